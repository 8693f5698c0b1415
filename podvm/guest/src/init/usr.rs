//! The image's /usr, which an initramfs carries as one compressed file: it is mounted, not unpacked. Unpacked it would cost
//! each boot, and each VM's memory, megabytes that most pods never read.
//!
//! That comes after the first word home: the few drivers which that takes are in the archive itself.
//! A disk image has a /usr of its own, and no such file.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::Path,
};

use nix::{
    mount::{MsFlags, mount},
    unistd::{chdir, fchdir},
};

use super::{modules::Modules, root};

const FILE: &str = "/usr.squashfs";
/// Of those that the module makes at once: nothing else runs yet that could have taken it.
const DEVICE: &str = "/dev/loop0";
const MODULES: [&str; 2] = ["loop", "squashfs"];

mod ioctls {
    //! linux/loop.h
    nix::ioctl_write_int_bad!(
        /// Gives a loop device its file.
        loop_set_fd,
        0x4c00
    );
}

/// Whether it is mounted, or there is none.
pub(super) fn is_mounted() -> bool {
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    !Path::new(FILE).exists() || root::is_mounted(&mounts(), "/usr")
}

/// Mounts it, if there is one, on this root and on the kernel's first, where the kernel's own helpers look for modules.
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
    // Opened for reading, and so the device is for reading.
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
    // Last: who waits for this one may count on the other.
    Ok(mount(Some(DEVICE), "/usr", Some("squashfs"), flags, none)?)
}

#[expect(unsafe_code, reason = "a loop device gets its file by an ioctl and by nothing else")]
fn give(device: &File, file: RawFd) -> nix::Result<i32> {
    // SAFETY: both descriptors are open; the call takes a number and no memory.
    unsafe { ioctls::loop_set_fd(device.as_raw_fd(), file) }
}
