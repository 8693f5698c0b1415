//! Fuzzes the guest's inputs at boot: a metadata service's answer, a row of the table of clouds, module indexes and the
//! kernel's events. They are refused with a reason, or read. There is no panic and no endless loop.

pub(crate) fn run(input: &[u8]) {
    peerpod_guest::fuzzed::metadata_answer(input);
    peerpod_guest::fuzzed::source(input);
    // The load order has at most as many files as the index.
    let lines = input.iter().filter(|byte| **byte == b'\n').count() + 1;
    assert!(peerpod_guest::fuzzed::modules(input) <= lines * (lines + 260));
}
