//! Lists the fuzz targets by name. Each takes any bytes and panics when a promise is broken.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a target speaks")]

mod agent;
mod frames;
mod greeting;
mod initdata;
mod layer;
mod ledger;
mod libvirt;
mod link;
mod packets;
mod plan;
pub mod seeds;
mod sources;
mod user_data;

/// Function that runs one input.
pub type Target = fn(&[u8]);

/// All targets: name and function.
pub const TARGETS: [(&str, Target); 12] = [
    ("agent", agent::run),
    ("user_data", user_data::run),
    ("frames", frames::run),
    ("greeting", greeting::run),
    ("initdata", initdata::run),
    ("layer", layer::run),
    ("ledger", ledger::run),
    ("libvirt", libvirt::run),
    ("link", link::run),
    ("packets", packets::run),
    ("plan", plan::run),
    ("sources", sources::run),
];

/// Returns the target of this name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|(known, _)| *known == name).map(|(_, target)| target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_passes_its_kept_corpus() {
        for (target, run) in TARGETS {
            for (name, input) in seeds::kept(target) {
                println!("{target}: {name}");
                run(&input);
            }
        }
    }

    #[test]
    fn every_target_has_seeds_and_passes_all_there_are() {
        let mut seeds = vec![("nothing".to_owned(), Vec::new())];
        for (target, _) in TARGETS {
            let own = seeds::of(target);
            assert!(!own.is_empty(), "{target} begins with nothing");
            seeds.extend(own);
        }
        for (target, run) in TARGETS {
            for (name, seed) in &seeds {
                // A truncated seed is as good an input as a whole one.
                for cut in [0, seed.len() / 3, seed.len()] {
                    println!("{target}: {cut} of {} bytes of {name}", seed.len());
                    run(&seed[..cut]);
                }
            }
        }
    }
}
