//! The program that redirects every packet to one device: four instructions, built in memory and loaded with bpf(2).
//! For kernels that have neither u32 nor matchall.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use nix::libc;

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
/// `r1 = imm` is 0xb7 with 1 in the low half of the register byte, and so on (see the kernel's instruction set page).
const MOVE: u8 = 0xb7;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// The kernel's number of `bpf_redirect(ifindex, flags)`.
const REDIRECT: i32 = 23;

/// One instruction as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    value: i32,
}

/// The beginning of `union bpf_attr` for BPF_PROG_LOAD; the kernel takes what is missing for zero.
#[repr(C)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
}

fn program(target: u32) -> [Instruction; 4] {
    let step = |code, registers, value| Instruction { code, registers, offset: 0, value };
    [step(MOVE, 1, target.cast_signed()), step(MOVE, 2, 0), step(CALL, 0, REDIRECT), step(EXIT, 0, 0)]
}

/// Loads the program; it may be closed once a filter has it.
///
/// # Errors
/// What the kernel says: EPERM without CAP_BPF (or CAP_SYS_ADMIN), ENOSYS or EINVAL without BPF.
#[allow(unsafe_code)] // no crate of ours has bpf(2), and one for a call of a dozen lines would bring a loader
pub(super) fn load(target: u32) -> io::Result<OwnedFd> {
    let instructions = program(target);
    let load = Load {
        kind: BPF_PROG_TYPE_SCHED_CLS,
        count: 4,
        instructions: instructions.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
    };
    // SAFETY: the kernel reads `size_of::<Load>()` bytes at `load`, `count` instructions and the licence's text at the
    // addresses in it, and nothing of that after the call; all three outlive it. It writes nowhere, as there is no log.
    let fd =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, std::ptr::from_ref(&load), size_of::<Load>()) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel just gave us this descriptor (close-on-exec), and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
