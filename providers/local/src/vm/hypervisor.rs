//! Process outside a VM: makes its namespaces and underlay devices, starts its pid 1, keeps its console, records its
//! end.
//!
//! It writes one line to its standard output and is independent of the node after that: it has its own session and no
//! descriptor of the node. Order of effects: lock → record of this process → namespaces and underlay devices → pid 1
//! (which waits) → record of pid 1 → go. A kill between any two leaves nothing but files, because namespaces end with
//! their processes.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode};

use anyhow::{Context, bail};
use nix::errno::Errno;
use nix::fcntl::Flock;
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::Mode;
use peerpod_podnet::netlink::Client;

use super::{Description, LaunchAnswer, console, inside, leave_the_session, read};
use crate::network;
use crate::process::{ProcessId, boot_id};
use crate::store::{Exit, Machine, VERSION, VmRecord, lock_in, read_json, write_json};

pub(super) fn main() -> ExitCode {
    close_what_we_inherited();
    let made = read(io::stdin()).context("read the VM's description").and_then(make);
    let (answer, machine) = match made {
        Ok(Some(machine)) => (LaunchAnswer::Running, Some(machine)),
        Ok(None) => (LaunchAnswer::Busy, None),
        Err(error) => {
            let text = format!("{error:#}");
            eprintln!("{text}");
            (LaunchAnswer::Failed { text, transient: is_transient(&error) }, None)
        }
    };
    // If the node died and no reader is left, the VM runs all the same. It is found by its record.
    let mut line = serde_json::to_vec(&answer).unwrap_or_default();
    line.push(b'\n');
    let told = io::stdout().write_all(&line).and_then(|()| io::stdout().flush());
    let Some(machine) = machine else { return ExitCode::from(u8::from(told.is_err())) };
    machine.run()
}

struct Running {
    description: Description,
    guest: Child,
    console: io::PipeReader,
    /// Netlink socket in the node's namespace.
    node: Client,
    _lock: Flock<File>,
}

/// Makes the VM. `None` if another process holds its lock.
fn make(mut description: Description) -> anyhow::Result<Option<Running>> {
    leave_the_session();
    nix::sys::stat::umask(Mode::from_bits_truncate(0o022));
    if description.version != VERSION {
        bail!("the description has version {}, this program knows {VERSION}", description.version);
    }
    let dir = description.dir.clone();
    let Some(lock) = lock_in(&dir, false).context("take the VM's lock")? else { return Ok(None) };
    let record: Option<VmRecord> = read_json(&dir.join("record.json")).context("read the VM's record")?;
    match record {
        Some(record) if !record.deleting => {}
        _ => bail!("the VM is not wanted any more"),
    }
    let us = ProcessId::current().context("look at this process")?;
    let mut machine = Machine { version: VERSION, boot: boot_id()?, hypervisor: us, guest: None };
    write_json(&dir.join("machine.json"), &machine).context("record this process")?;

    let mut node = network::client()?;
    let new = CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWPID;
    unshare(new).context("make namespaces; the local provider needs root")?;
    // Acts on the UTS namespace of the writing process.
    fs::write("/proc/sys/kernel/hostname", &description.inside.hostname).context("set the host name")?;
    let namespace = File::open("/proc/self/ns/net").context("open our network namespace")?;
    let names = network::host_links(&description.inside.id).into_iter().zip(network::VM_LINKS);
    for (nic, (outside, inside)) in description.nics.iter().zip(names) {
        network::plug(&mut node, nic, &outside, inside, namespace.as_fd())?;
    }
    network::configure(&description.nics)?;

    let (console, console_end) = io::pipe().context("make the console")?;
    let (ours, theirs) = UnixStream::pair().context("make a socket pair")?;
    let guest = Command::new("/proc/self/exe")
        .arg(inside::ARGUMENT)
        .env_clear()
        .stdin(OwnedFd::from(theirs))
        .stdout(console_end.try_clone().context("copy the console")?)
        .stderr(console_end)
        .spawn()
        .context("start the VM's first process")?;
    // It waits for its description, so no guest code has run when this is written.
    machine.guest = ProcessId::of(guest.id()).context("look at the VM's first process")?;
    if machine.guest.is_none() {
        bail!("the VM's first process ended at once");
    }
    write_json(&dir.join("machine.json"), &machine).context("record the VM's first process")?;
    description.inside.hypervisor = Some(us);
    start(ours, &description.inside)?;
    Ok(Some(Running { description, guest, console, node, _lock: lock }))
}

/// Sends pid 1 its description and waits until it has built its root.
fn start(mut socket: UnixStream, inside: &inside::Description) -> anyhow::Result<()> {
    socket.write_all(&serde_json::to_vec(inside)?).context("describe the VM to its first process")?;
    socket.shutdown(std::net::Shutdown::Write).context("describe the VM to its first process")?;
    let mut complaint = String::new();
    (&socket).take(64 * 1024).read_to_string(&mut complaint).context("wait for the VM's first process")?;
    if complaint != inside::READY {
        let why = if complaint.is_empty() { "it ended without a report" } else { &complaint };
        bail!("build the VM's root: {why}");
    }
    Ok(())
}

impl Running {
    /// Keeps the console until the VM ends, and records how it ended.
    fn run(mut self) -> ExitCode {
        let dir = &self.description.dir;
        // The pipe ends when the last process of the VM is gone, or earlier if the guest closes its own end.
        console::keep(self.console, dir);
        let status = self.guest.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let exit = Exit { version: VERSION, status: format!("its first process ended: {status}") };
        let recorded = write_json(&dir.join("exit.json"), &exit);
        // The devices would vanish with the namespace, but at a time that the kernel chooses.
        let unplugged = network::host_links(&self.description.inside.id)
            .map(|link| network::remove(&mut self.node, &link));
        for error in unplugged.iter().filter_map(|unplugged| unplugged.as_ref().err()) {
            eprintln!("{error}");
        }
        ExitCode::from(u8::from(recorded.is_err() || unplugged.iter().any(Result::is_err)))
    }
}

/// Whether the error is a temporary shortage of the machine.
fn is_transient(error: &anyhow::Error) -> bool {
    let errno = error.chain().find_map(|cause| {
        cause
            .downcast_ref::<Errno>()
            .copied()
            .or_else(|| cause.downcast_ref::<io::Error>()?.raw_os_error().map(Errno::from_raw))
    });
    matches!(
        errno,
        Some(Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE | Errno::ENOSPC | Errno::EBUSY)
    )
}

/// Closes descriptors that were left open across exec. A VM that lives for days must not hold a socket of the node, or
/// of the program that started the node.
fn close_what_we_inherited() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return };
    let open: Vec<i32> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|descriptor| *descriptor > 2)
        .collect();
    for descriptor in open {
        // One of them was the directory just read: EBADF by now.
        let _closed = nix::unistd::close(descriptor);
    }
}
