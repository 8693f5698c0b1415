//! Runs as pid 1 of a VM before the guest program: builds the root directory, enters it and executes the guest.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use nix::unistd::{chdir, pivot_root};

pub(super) use super::Inside as Description;
use super::root::NONE;
use super::{leave_the_session, read, root};
use crate::cgroup;

/// Argument that selects this role.
pub(super) const ARGUMENT: &str = "inside";
/// Message to the hypervisor process that the root is ready.
pub(super) const READY: &str = "ready";

pub(super) fn main() -> ExitCode {
    let error = match boot() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("{error:#}");
    ExitCode::FAILURE
}

fn boot() -> anyhow::Result<std::convert::Infallible> {
    // First of all: a VM must not outlive its hypervisor process.
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).context("end with the hypervisor process")?;
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let description: Description = read(&mut socket).context("read the VM's description")?;
    if let Err(error) = prepare(&description) {
        let text = format!("{error:#}");
        drop(socket.write_all(text.as_bytes()));
        bail!(text);
    }
    // Replaces this end of the socket, which would otherwise be the guest's standard input.
    let null = File::open("/dev/null").context("open /dev/null")?;
    nix::unistd::dup2_stdin(&null).context("replace standard input")?;
    socket.write_all(READY.as_bytes()).context("report that the root is complete")?;
    drop(socket);
    std::thread::sleep(Duration::from_millis(description.boot_delay_ms));
    let error = Command::new(root::GUEST)
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root")
        .env("TERM", "linux")
        .exec();
    Err(error).context(format!("execute {}", description.guest_binary.display()))
}

fn prepare(description: &Description) -> anyhow::Result<()> {
    let hypervisor = description.hypervisor.context("the description names no hypervisor process")?;
    // This /proc is still that of the node. If the hypervisor process died before the death signal was set, no signal
    // comes.
    if !hypervisor.alive().context("look at the hypervisor process")? {
        bail!("the hypervisor process is gone");
    }
    // A separate session here too, because the guest may want a terminal.
    leave_the_session();
    let cgroups = cgroup::enter(&description.id).context("make the VM's cgroups")?;
    unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace")?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
        .context("separate our mounts from the node's mounts")?;
    root::build(description, &cgroups)?;
    // Stacks the old root on the new one and detaches it, so no directory for the old root is needed.
    chdir(&description.root).context("enter the new root")?;
    pivot_root(".", ".").context("make it the root")?;
    umount2(".", MntFlags::MNT_DETACH).context("unmount the node's files")?;
    chdir("/").context("enter the new root")?;
    Ok(())
}
