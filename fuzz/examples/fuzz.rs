//! Runs libFuzzer on the target that `FUZZ_TARGET` names. One program serves all targets, so it is linked once. With
//! `FUZZ_LIST` it prints the names of all targets and exits. With `FUZZ_SEEDS` it writes the target's seeds into that
//! folder and exits.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use peerpod_fuzz::Target;

fn name() -> String {
    std::env::var("FUZZ_TARGET").unwrap_or_default()
}

/// Runs before libFuzzer: lists the targets or writes the seeds, and exits, if the variable for it is set.
fn begin() {
    if std::env::var_os("FUZZ_LIST").is_some() {
        peerpod_fuzz::TARGETS.iter().for_each(|(name, _)| println!("{name}"));
        std::process::exit(0);
    }
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
