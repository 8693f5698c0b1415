//! Speed as ratios against something run beside it.

fn main() {}
