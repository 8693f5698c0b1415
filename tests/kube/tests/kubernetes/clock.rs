//! The wall clock of relay and node, which a test sets. No namespace has a wall clock of its own, so libfaketime answers
//! the daemons' calls of the C library. Their other clocks, and every other process, keep the kernel's time.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use peerpod_world::{Settings, World};

const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

/// The daemons' wall clock.
#[derive(Clone)]
pub(crate) struct Clock {
    /// Its difference to the kernel's clock.
    file: PathBuf,
}

impl Clock {
    /// Makes a clock that shows the kernel's time.
    pub(crate) fn new(world: &World) -> anyhow::Result<Clock> {
        ensure!(Path::new(LIBRARY).exists(), "{LIBRARY} is missing: scripts/setup installs it");
        // The hardened relay may read there.
        let folder = world.folder().join("run");
        fs::create_dir_all(&folder)?;
        let clock = Clock { file: folder.join("clock") };
        clock.set(0)?;
        Ok(clock)
    }

    /// Adds the clock to the daemons' settings.
    pub(crate) fn settings(&self, settings: Settings) -> Settings {
        let file = self.file.to_string_lossy();
        let variables = [
            ("LD_PRELOAD", LIBRARY),
            ("FAKETIME_TIMESTAMP_FILE", &file),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ("FAKETIME_DISABLE_SHM", "1"),
            ("NO_FAKE_STAT", "1"),
        ];
        variables.into_iter().fold(settings, |settings, (name, value)| settings.with_env(name, value))
    }

    /// Sets the clock to this many seconds after the kernel's time.
    pub(crate) fn set(&self, seconds: i64) -> anyhow::Result<()> {
        // The daemons read the file with each call, so it has its content at once.
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{seconds:+}\n"))?;
        fs::rename(&new, &self.file).with_context(|| format!("replace {}", self.file.display()))
    }
}
