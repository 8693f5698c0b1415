//! The command line for people.

fn main() {}
