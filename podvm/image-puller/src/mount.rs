//! Mounts overlays. Paths of layers are relative to the store, so that many fit into the one page that mount(2) takes.
//! The calling thread's working directory must be the store.

use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

/// Size limit of mount(2)'s options in bytes, with the terminator.
const PAGE: usize = 4096;
/// Options that rule out any dependence on the kernel's configuration.
const OPTIONS: &str = "redirect_dir=off,metacopy=off,index=off";

/// Gives the calling thread mounts and a working directory of its own, which end with it.
pub(crate) fn apart() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none: Option<&str> = None;
    Ok(mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?)
}

/// Mounts `layers` (ids, the lowest first) and `upper/{fs,work}` on top. `hasty`: writes need not survive the machine.
pub(crate) fn overlay(layers: &[String], upper: &str, target: &Path, hasty: bool) -> io::Result<()> {
    let lower: Vec<String> = layers.iter().rev().map(|id| format!("l/{id}")).collect();
    let volatile = if hasty { ",volatile" } else { "" };
    let options =
        format!("lowerdir={},upperdir={upper}/fs,workdir={upper}/work,{OPTIONS}{volatile}", lower.join(":"));
    if options.len() >= PAGE {
        return Err(io::Error::new(io::ErrorKind::ArgumentListTooLong, "too many layers for one mount"));
    }
    // The kata-agent provides the devices of containers; none comes with an image.
    let flags = MsFlags::MS_NODEV;
    Ok(mount(Some("overlay"), target, Some("overlay"), flags, Some(options.as_str()))?)
}

/// Unmounts every mount on the target; none is fine.
pub(crate) fn unmount_all(target: &Path) -> io::Result<()> {
    loop {
        match umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
