//! The fuzz targets by name. Each takes any bytes and panics when a promise does not hold.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a target speaks")]

mod birth;
mod frames;
mod ledger;
mod link;
mod plan;

/// A target.
pub type Target = fn(&[u8]);

/// All of them: name, and what it does with an input.
pub const TARGETS: [(&str, Target); 5] = [
    ("birth", birth::run),
    ("frames", frames::run),
    ("ledger", ledger::run),
    ("link", link::run),
    ("plan", plan::run),
];

/// The target of this name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|(known, _)| *known == name).map(|(_, target)| target)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn every_target_passes_every_seed() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut seeds = vec![Vec::new()];
        for folder in ["seeds/birth", "../src/node/tests/samples"] {
            for file in fs::read_dir(here.join(folder)).unwrap() {
                let path = file.unwrap().path();
                if path.is_file() {
                    seeds.push(fs::read(path).unwrap());
                }
            }
        }
        assert!(seeds.len() > 2, "no seeds");
        for (name, run) in TARGETS {
            for seed in &seeds {
                // What was cut off is as good a try as what was not.
                for cut in [0, seed.len() / 3, seed.len()] {
                    println!("{name}: {cut} of {} bytes", seed.len());
                    run(&seed[..cut]);
                }
            }
        }
    }
}
