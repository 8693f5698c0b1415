//! A VM out of namespaces that runs peerpod-guest.

fn main() {}
