//! What clouds and disks say to a guest at birth: a metadata service's answer, a line of the table of clouds, module
//! indexes and the kernel's events. Refused with a reason, or read; never a panic, never without end.

pub(crate) fn run(input: &[u8]) {
    peerpod_guest::fuzzed::metadata_answer(input);
    peerpod_guest::fuzzed::source(input);
    // An order has as many files as there are, and no more.
    let lines = input.iter().filter(|byte| **byte == b'\n').count() + 1;
    assert!(peerpod_guest::fuzzed::modules(input) <= lines * (lines + 260));
}
