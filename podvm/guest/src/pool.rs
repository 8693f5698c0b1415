//! The guest's part in a pool of machines that exist (`providers/byom`): it publishes the boot, waits for a claim, and
//! notices the request for a reboot.
//!
//! A node claims the machine, delivers user-data and requests the reboot by files in one folder. The folder is a tmpfs, so
//! a reboot frees the machine. May touch: that folder.

use std::fs::{OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use tokio::time::sleep;

use crate::power::{self, Lease};
use crate::{files, status};

/// Claim of a node's pod.
const CLAIM: &str = "claim";
/// Name of user-data in the folder.
pub(crate) const USER_DATA: &str = "user-data";
/// Request for the reboot.
const REBOOT: &str = "reboot";
/// Description of the machine and its boot. A machine without it is never claimed.
const MACHINE: &str = "machine";
/// The same while it is written.
const ASIDE: &str = ".machine.new";
/// Interval of looks at the folder.
const LOOK: Duration = Duration::from_millis(250);

/// Publishes the boot and waits until a node has claimed the machine. The lease begins with the claim: a free machine
/// waits for ever, and one that gets no user-data frees itself.
pub(crate) async fn claimed(folder: &Path, lease: &Lease) {
    let mut published = Err(String::new());
    let mut is_free = false;
    while !has(folder, CLAIM) {
        if let Err(said) = &published {
            let now = publish(folder);
            if let Err(why) = &now
                && why != said
            {
                tracing::error!(folder = %folder.display(), why, "the machine cannot be claimed");
            }
            published = now;
        }
        if !is_free {
            lease.linked(true);
            is_free = true;
        }
        sleep(LOOK).await;
    }
    tracing::info!("a node has claimed the machine");
    if is_free {
        lease.linked(false);
    }
}

/// Waits until a node requests the reboot.
pub(crate) async fn returned(folder: &Path) {
    while !has(folder, REBOOT) {
        sleep(LOOK).await;
    }
}

fn has(folder: &Path, name: &str) -> bool {
    folder.join(name).symlink_metadata().is_ok()
}

/// Writes the description of the machine, for all users. The folder belongs to another user, so no link is followed.
fn publish(folder: &Path) -> Result<(), String> {
    let kind = statfs(folder).map_err(|error| error.to_string())?.filesystem_type();
    if kind != TMPFS_MAGIC {
        return Err("a claim would outlive the boot; mount a tmpfs there".to_owned());
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let description = serde_json::json!({
        "version": 1,
        "boot_id": status::boot_id(),
        "vcpus": std::thread::available_parallelism().map_or(1, usize::from),
        "memory_mib": power::bytes_of("MemTotal", &meminfo).unwrap_or_default() >> 20,
    });
    let aside = folder.join(ASIDE);
    let write = || {
        files::remove_volatile(&aside)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&aside)?;
        file.write_all(description.to_string().as_bytes())?;
        file.set_permissions(Permissions::from_mode(0o644))?;
        std::fs::rename(&aside, folder.join(MACHINE))
    };
    write().map_err(|error: std::io::Error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    #[test]
    fn a_folder_that_outlives_the_boot_is_not_published() {
        let dir = TempDir::new();
        // The folder of temporary files may be a tmpfs itself.
        if statfs(dir.path()).unwrap().filesystem_type() != TMPFS_MAGIC {
            assert!(publish(dir.path()).unwrap_err().contains("mount a tmpfs"));
            assert!(!has(dir.path(), MACHINE));
        }
        assert!(publish(&dir.path().join("none")).is_err());
    }

    #[tokio::test]
    async fn a_claimed_machine_and_a_requested_reboot_are_noticed() {
        let (dir, state) = (TempDir::new(), TempDir::new());
        let folder = dir.path().to_owned();
        let lease = std::sync::Arc::new(Lease::load(state.path()));
        let waiting = tokio::spawn({
            let (folder, lease) = (folder.clone(), lease.clone());
            async move {
                claimed(&folder, &lease).await;
                returned(&folder).await;
            }
        });
        sleep(LOOK * 2).await;
        assert!(!waiting.is_finished());
        std::os::unix::fs::symlink("/nonexistent", folder.join(CLAIM)).unwrap();
        std::fs::write(folder.join(REBOOT), "").unwrap();
        tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap().unwrap();
    }
}
