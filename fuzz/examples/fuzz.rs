//! Runs libFuzzer on the target that `FUZZ_TARGET` names. One program serves all targets, so it is linked once. With
//! `FUZZ_SEEDS` it writes the target's seeds into that folder and exits.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use peerpod_fuzz::Target;

fn name() -> String {
    std::env::var("FUZZ_TARGET").unwrap_or_default()
}

/// Runs before libFuzzer: writes the seeds and exits if `FUZZ_SEEDS` is set.
fn begin() {
    let Some(folder) = std::env::var_os("FUZZ_SEEDS") else { return };
    let written = peerpod_fuzz::seeds::write(&name(), Path::new(&folder));
    written.unwrap_or_else(|error| panic!("write seeds to {}: {error}", folder.display()));
    std::process::exit(0);
}

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = name();
    let known = peerpod_fuzz::TARGETS.map(|(name, _)| name);
    match peerpod_fuzz::target(&name) {
        Some(target) => target,
        None => panic!("FUZZ_TARGET is {name:?}, and must be one of {known:?}"),
    }
});

libfuzzer_sys::fuzz_target!(init: begin(), |input: &[u8]| (*TARGET)(input));
