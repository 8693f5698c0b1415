//! Loads the drivers: all modules in the builder's list, in its order, which respects their dependencies. A driver
//! without its device costs nothing.

use std::fs::{self, File};

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};

/// Paths of modules, one per line.
const LIST: &str = "/etc/modules.list";

/// Loads the modules. Only an unreadable list is an error: a driver that does not load may not be needed.
pub(crate) fn load() -> Result<(), String> {
    let list = fs::read_to_string(LIST).map_err(|error| format!("read {LIST}: {error}"))?;
    for path in list.lines() {
        let loaded = File::open(path).map_err(|error| error.to_string()).and_then(|file| {
            match finit_module(&file, c"", ModuleInitFlags::empty()) {
                // Loaded already; for hardware that this machine does not have; or dependent on such a driver.
                Ok(()) | Err(Errno::EEXIST | Errno::ENODEV | Errno::ENOENT) => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        });
        if let Err(why) = loaded {
            eprintln!("peerpod-initrd: {path}: {why}");
        }
    }
    Ok(())
}
