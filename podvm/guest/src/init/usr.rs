//! Mounts the image's /usr, which an initramfs carries as one compressed file. Unpacking would cost each boot, and the
//! memory of each VM, megabytes that most pods never read.
//!
//! The mount comes after the first contact with the node: the few drivers needed for that are in the archive itself. A
//! disk image has a /usr of its own, and no such file.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::unistd::{chdir, fchdir};

use super::modules::Modules;
use super::root;

const FILE: &str = "/usr.squashfs";
/// One of the devices that the module makes at once: nothing else runs yet that could have taken it.
const DEVICE: &str = "/dev/loop0";
const MODULES: [&str; 2] = ["loop", "squashfs"];

mod ioctls {
    //! Requests of linux/loop.h.
    nix::ioctl_write_int_bad!(
        /// Attaches a file to a loop device.
        loop_set_fd,
        0x4c00
    );
}

/// Returns whether it is mounted, or there is none.
pub(super) fn is_mounted() -> bool {
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    !Path::new(FILE).exists() || root::is_mounted(&mounts(), "/usr")
}

/// Mounts the file, if any, on this root and on the kernel's first, where the kernel's own helpers look for modules.
pub(super) fn mount_file(modules: &Modules, first_root: Option<&OwnedFd>) {
    if !Path::new(FILE).exists() {
        return;
    }
    if let Err(error) = try_mount(modules, first_root) {
        tracing::error!(%error, "cannot mount {FILE} on /usr: drivers and the agent are in it");
    }
}

fn try_mount(modules: &Modules, first_root: Option<&OwnedFd>) -> io::Result<()> {
    for name in MODULES {
        modules.load(name).map_err(io::Error::other)?;
    }
    // Opened read-only, and so the device is read-only.
    let (file, device) = (File::open(FILE)?, File::open(DEVICE)?);
    give(&device, file.as_raw_fd())?;
    let flags = MsFlags::MS_RDONLY.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOSUID);
    let none: Option<&str> = None;
    if let Some(first_root) = first_root {
        fchdir(first_root)?;
        let mounted = mount(Some(DEVICE), "usr", Some("squashfs"), flags, none);
        chdir("/")?;
        mounted?;
    }
    // Last: a task that waits for this mount may rely on the other one.
    Ok(mount(Some(DEVICE), "/usr", Some("squashfs"), flags, none)?)
}

#[expect(unsafe_code, reason = "a loop device gets its file by an ioctl and by nothing else")]
fn give(device: &File, file: RawFd) -> nix::Result<i32> {
    // SAFETY: both descriptors are open; the call takes a number and no memory.
    unsafe { ioctls::loop_set_fd(device.as_raw_fd(), file) }
}
