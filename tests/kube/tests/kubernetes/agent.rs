//! Starts Kata's agent in a VM of the local provider, on a machine that may lack a capability.

#![allow(unsafe_code)] // no library installs a listener of system calls

use std::convert::Infallible;
use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::{env, io, mem};

use anyhow::Context;
use nix::libc;
use rustix::thread::{CapabilitySet, capability_is_in_bounding_set};

/// Path of Kata's agent in the VM: in the only folder beside the agent that the provider adds to a VM.
const AGENT: &str = "/pause_bundle/kata-agent";
/// Argument of the process that answers for the kernel. Its standard input is the filter's listener.
pub(crate) const ANSWER: &str = "answer-capset";

/// Becomes Kata's agent with the same arguments.
///
/// The agent sets all capabilities, and ends when one is missing. Where the machine lacks CAP_SYS_RESOURCE, a second
/// process takes it out of each `capset` in the VM, before the kernel does the call.
pub(crate) fn run() -> anyhow::Result<Infallible> {
    if !capability_is_in_bounding_set(CapabilitySet::SYS_RESOURCE)? {
        let listener = listen()?;
        Command::new(env::current_exe()?)
            .arg(ANSWER)
            .stdin(listener)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start the process that answers")?;
    }
    Err(Command::new(AGENT).args(env::args_os().skip(1)).exec()).context(AGENT)
}

/// Installs a filter that reports each `capset` of this process and its children, and returns its listener.
fn listen() -> anyhow::Result<OwnedFd> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let unless = libc::sock_filter {
        jf: 1,
        ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_capset as u32)
    };
    // The first word of the input is the call's number.
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        unless,
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: No library installs a listener. The kernel copies the program; the descriptor is new.
    unsafe {
        let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
        let listener = libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program);
        anyhow::ensure!(listener >= 0, "install a filter: {}", io::Error::last_os_error());
        Ok(OwnedFd::from_raw_fd(listener as i32))
    }
}

/// Takes CAP_SYS_RESOURCE out of the sets of each `capset`, and lets the kernel do the call.
pub(crate) fn answer() -> anyhow::Result<Infallible> {
    let listener = io::stdin();
    loop {
        // SAFETY: The kernel wants a cleared structure and fills it.
        let call = unsafe {
            let mut call: libc::seccomp_notif = mem::zeroed();
            let received = libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call);
            if received < 0 {
                // The caller was killed meanwhile.
                anyhow::ensure!(io::Error::last_os_error().kind() == io::ErrorKind::NotFound, "no listener");
                continue;
            }
            call
        };
        // A caller that is gone needs no answer.
        let _without = without_the_capability(call.pid, call.data.args[1]);
        let mut response = libc::seccomp_notif_resp {
            id: call.id,
            val: 0,
            error: 0,
            flags: libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
        };
        // SAFETY: The kernel reads the structure.
        unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut response) };
    }
}

/// Clears the capability's bit in the first words of the three sets in a process' memory (capset(2)).
fn without_the_capability(pid: u32, address: u64) -> io::Result<()> {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let mut sets = [0; 12];
    memory.read_exact_at(&mut sets, address)?;
    for set in sets.chunks_exact_mut(4) {
        // Bit 24 of a number in this machine's order.
        set[3] &= !1;
    }
    memory.write_all_at(&sets, address)
}
