//! libFuzzer's main program for the target that `FUZZ_TARGET` names. One program for all targets: it is linked once.
#![no_main]

use std::sync::LazyLock;

use peerpod_fuzz::Target;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let known = peerpod_fuzz::TARGETS.map(|(name, _)| name);
    match peerpod_fuzz::target(&name) {
        Some(target) => target,
        None => panic!("FUZZ_TARGET is {name:?}, and must be one of {known:?}"),
    }
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| (*TARGET)(input));
