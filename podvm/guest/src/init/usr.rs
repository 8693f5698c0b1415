//! The image's /usr, which an initramfs carries as one compressed file: it is mounted, not unpacked. Unpacked it would cost
//! each boot, and each VM's memory, megabytes that most pods never read.
//!
//! A disk image has a /usr of its own, and no such file.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, RawFd},
    path::Path,
};

use nix::mount::{MsFlags, mount};

use super::modules::Modules;

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

/// Mounts it, if there is one. `/dev` must be there.
pub(super) fn mount_file() {
    if !Path::new(FILE).exists() {
        return;
    }
    if let Err(error) = try_mount() {
        tracing::error!(%error, "cannot mount {FILE} on /usr: drivers and the agent are in it");
    }
}

fn try_mount() -> io::Result<()> {
    let modules = Modules::open();
    for name in MODULES {
        modules.load(name).map_err(io::Error::other)?;
    }
    // Opened for reading, and so the device is for reading.
    let (file, device) = (File::open(FILE)?, File::open(DEVICE)?);
    give(&device, file.as_raw_fd())?;
    let flags = MsFlags::MS_RDONLY.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOSUID);
    let none: Option<&str> = None;
    Ok(mount(Some(DEVICE), "/usr", Some("squashfs"), flags, none)?)
}

#[expect(unsafe_code, reason = "a loop device gets its file by an ioctl and by nothing else")]
fn give(device: &File, file: RawFd) -> nix::Result<i32> {
    // SAFETY: both descriptors are open; the call takes a number and no memory.
    unsafe { ioctls::loop_set_fd(device.as_raw_fd(), file) }
}
