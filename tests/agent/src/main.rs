//! Kata's agent API with real processes, for the demo and the tests.

fn main() {}
