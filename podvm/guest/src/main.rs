//! The only program of ours in the pod VM.

fn main() {}
