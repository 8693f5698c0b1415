//! Builds in memory, and loads with bpf(2), the programs that redirect every packet to one device. The short program is
//! for kernels without u32 and matchall. The other one also returns frames that a pod sends to itself.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use nix::libc;
use parking_lot::Mutex;

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
// The instruction set is the kernel's (Documentation/bpf/standardization/instruction-set.rst).
const MOVE: u8 = 0xb7;
const MOVE_REGISTER: u8 = 0xbf;
const ADD: u8 = 0x07;
const XOR: u8 = 0xa7;
const LOAD_WORD: u8 = 0x61;
const LOAD_HALF: u8 = 0x69;
const LOAD_BYTE: u8 = 0x71;
const STORE_BYTE: u8 = 0x73;
const JUMP_IF_GREATER: u8 = 0x2d;
const JUMP_IF_OTHER: u8 = 0x5d;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// The kernel's number of `bpf_redirect(ifindex, flags)`.
const REDIRECT: i32 = 23;
/// Offsets of the packet's beginning and end in `struct __sk_buff`.
const DATA: i16 = 76;
const DATA_END: i16 = 80;
/// Offset of the source address, and length of both addresses, in an Ethernet header.
const SOURCE: i16 = 6;
const ADDRESSES: i32 = 12;
/// Bit of a MAC address's first byte that marks it as locally administered.
const LOCAL: i32 = 2;

/// Number of loaded programs that are kept. Tunnels have the same few indexes in all pods' namespaces, so nearly all
/// need the same programs. The kernel takes as long to check and compile one as half a pod's set-up takes.
const KEPT: usize = 16;
static LOADED: Mutex<Vec<(Kind, Arc<OwnedFd>)>> = Mutex::new(Vec::new());

/// Key of a program: the target device and the additional work.
type Kind = (u32, Also);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Also {
    /// Nothing.
    Nothing,
    /// Gives a frame from the pod to itself another source address. A bridge reflects such frames (hairpin: the pod
    /// called a service and was selected as its endpoint). A VXLAN device drops frames from its own address.
    TellsReflectedApart,
}

/// One instruction, in the kernel's layout.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    value: i32,
}

/// The beginning of `union bpf_attr` for BPF_PROG_LOAD; the kernel treats the missing part as zero.
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

fn program(target: u32, also: Also) -> Vec<Instruction> {
    let step = |code, registers: (u8, u8), offset, value| Instruction {
        code,
        registers: registers.0 | registers.1 << 4,
        offset,
        value,
    };
    let redirect = [
        step(MOVE, (1, 0), 0, target.cast_signed()),
        step(MOVE, (2, 0), 0, 0),
        step(CALL, (0, 0), 0, REDIRECT),
        step(EXIT, (0, 0), 0, 0),
    ];
    let tell_apart = [
        step(LOAD_WORD, (2, 1), DATA, 0),
        step(LOAD_WORD, (3, 1), DATA_END, 0),
        step(MOVE_REGISTER, (4, 2), 0, 0),
        step(ADD, (4, 0), 0, ADDRESSES),
        step(JUMP_IF_GREATER, (4, 3), 9, 0), // frame too short: to the redirect, as all jumps
        step(LOAD_WORD, (4, 2), 0, 0),
        step(LOAD_WORD, (5, 2), SOURCE, 0),
        step(JUMP_IF_OTHER, (4, 5), 6, 0),
        step(LOAD_HALF, (4, 2), 4, 0),
        step(LOAD_HALF, (5, 2), SOURCE + 4, 0),
        step(JUMP_IF_OTHER, (4, 5), 3, 0),
        step(LOAD_BYTE, (4, 2), SOURCE, 0),
        step(XOR, (4, 0), 0, LOCAL),
        step(STORE_BYTE, (2, 4), SOURCE, 0),
    ];
    match also {
        Also::Nothing => redirect.to_vec(),
        Also::TellsReflectedApart => [&tell_apart[..], &redirect[..]].concat(),
    }
}

/// Returns the program, and loads it if necessary. A filter keeps a reference to its program. Fails with EPERM without
/// CAP_BPF (or CAP_SYS_ADMIN), with ENOSYS or EINVAL without BPF.
pub(super) fn loaded(target: u32, also: Also) -> io::Result<Arc<OwnedFd>> {
    let kept = || LOADED.lock();
    let known = kept().iter().find(|(kind, _)| *kind == (target, also)).map(|(_, program)| program.clone());
    if let Some(program) = known {
        return Ok(program);
    }
    let program = Arc::new(load(target, also)?);
    let mut kept = kept();
    if kept.len() == KEPT {
        kept.remove(0);
    }
    kept.push(((target, also), program.clone()));
    Ok(program)
}

#[allow(unsafe_code)] // no dependency has bpf(2), and a crate for one call would bring a loader
fn load(target: u32, also: Also) -> io::Result<OwnedFd> {
    let instructions = program(target, also);
    let load = Load {
        kind: BPF_PROG_TYPE_SCHED_CLS,
        count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
    };
    // SAFETY: the kernel reads `size_of::<Load>()` bytes at `load`, and `count` instructions and the licence's text at
    // the addresses in it. All three outlive the call. It writes nothing, as there is no log.
    let fd =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, std::ptr::from_ref(&load), size_of::<Load>()) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel just returned this descriptor (close-on-exec), and it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
