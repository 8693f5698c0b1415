//! Drops the privileges that the process does not need, before its first thread and connection: later threads inherit
//! the result. The relay needs no capability, except one for a listening port below 1024.
//!
//! Landlock permits to open the files of [`PermittedFolders`] alone, although root owns the others, too. It keeps
//! `lstat`, by which the relay compares kubelet's targets, and everything that the node opens for the relay.
//!
//! The seccomp filter refuses system calls by purpose: calls that start programs, inspect, signal or change other
//! processes, make or enter namespaces, mount, load code into the kernel or open sockets other than Unix and IP. An
//! allow list would have to follow every allocator, runtime and C library of the relay, and a missing call would end
//! the pods of a node. No such update needs a refused call. A deny list must contain each call under all its numbers:
//! x86_64 kernels may have a second set (x32), so that whole set is refused.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use anyhow::{Context, anyhow, ensure};
use landlock::{
    ABI, Access, AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use nix::libc;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter, sock_filter,
};

/// Causes of an absent Landlock.
const NO_LANDLOCK: &str = "the kernel lacks it, it is off (boot parameter lsm=), or the container's seccomp profile \
                           refuses its system calls";

/// First port that needs no capability.
const FIRST_FREE_PORT: u16 = 1024;

/// Number of `kexec_file_load`, which the crate libc lacks for some C libraries: x86_64 has its own numbers, and later
/// architectures share theirs.
const KEXEC_FILE_LOAD: libc::c_long = if cfg!(target_arch = "x86_64") { 320 } else { 294 };
#[cfg(target_arch = "x86_64")]
const _: () = assert!(KEXEC_FILE_LOAD == libc::SYS_kexec_file_load);

/// System calls that are refused with any arguments.
const REFUSED: [libc::c_long; 58] = [
    // Other programs, and other processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_pidfd_send_signal,
    libc::SYS_setpriority,
    libc::SYS_ioprio_set,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_process_mrelease,
    // Namespaces and mounts.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    // Kernel internals, and ways round this filter.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_userfaultfd,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    KEXEC_FILE_LOAD,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_personality,
    libc::SYS_quotactl,
    libc::SYS_acct,
    libc::SYS_syslog,
    // The machine's state.
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
];

/// System calls that are refused if their first argument is another process than this one, or all processes.
const FOR_ITSELF: [libc::c_long; 4] =
    [libc::SYS_kill, libc::SYS_tgkill, libc::SYS_rt_tgsigqueueinfo, libc::SYS_prlimit64];

/// Commands of `fcntl` and `ioctl` that make the kernel send a descriptor's signals to any process.
const SEND_SIGNALS: [(libc::c_long, &[u64]); 2] = [
    (libc::SYS_fcntl, &[8, 15]),          // F_SETOWN, F_SETOWN_EX
    (libc::SYS_ioctl, &[0x8901, 0x8902]), // FIOSETOWN, SIOCSPGRP
];

/// `clone` flags that make namespaces (`linux/sched.h`): mount, cgroup, uts, ipc, user, pid, net.
const NEW_NAMESPACES: u64 = 0x7e02_0000;

/// Returns the rights in the relay's own folders.
fn in_own_folders() -> BitFlags<AccessFs> {
    use AccessFs::{
        MakeDir, MakeReg, MakeSock, ReadDir, ReadFile, Refer, RemoveDir, RemoveFile, Truncate, WriteFile,
    };
    ReadFile | ReadDir | WriteFile | Truncate | MakeReg | MakeDir | MakeSock | RemoveFile | RemoveDir | Refer
}

/// Folders below which the hardened process may open files.
#[derive(Clone, Debug, Default)]
pub struct PermittedFolders {
    /// Its own folders.
    own: Vec<PathBuf>,
    /// Folders of which it reads files.
    read: Vec<PathBuf>,
}

impl PermittedFolders {
    /// Permits the relay's own folders, containers' bundles and the kernel's list of mounts. Makes missing bundle
    /// folders: a container runtime that has started nothing yet has not made them.
    pub fn new(own: Vec<PathBuf>, bundles: &[PathBuf]) -> PermittedFolders {
        let mut read = vec![PathBuf::from("/proc")];
        for path in bundles {
            match DirBuilder::new().recursive(true).mode(0o711).create(path) {
                Ok(()) => read.push(path.clone()),
                Err(error) => tracing::warn!(
                    %error, path = %path.display(),
                    "cannot make a folder of relay.bundles; without it containers' volumes are not found there"
                ),
            }
        }
        PermittedFolders { own, read }
    }
}

/// Sets `no_new_privs`, drops the capabilities, restricts the files and installs the system call filters. A failed step
/// does not keep the later ones from being tried. Fails with all steps that failed, and their causes.
pub fn harden(listen_port: u16, files: &PermittedFolders) -> anyhow::Result<()> {
    let steps = [
        ("set no_new_privs", set_no_new_privs(true).map_err(anyhow::Error::from)),
        ("drop the capabilities", drop_capabilities(listen_port)),
        ("restrict the files by Landlock", restrict(files)),
        ("filter system calls", filter_calls()),
    ];
    let failed = |(step, result): (&str, anyhow::Result<()>)| Some(format!("{step}: {:#}", result.err()?));
    let failed: Vec<String> = steps.into_iter().filter_map(failed).collect();
    if failed.is_empty() {
        Ok(())
    } else {
        Err(anyhow!("limit the rights of this process: {}", failed.join("; ")))
    }
}

/// Restricts this thread to the files, as far as the kernel's version of Landlock can. From version 6 on the process
/// connects to no abstract socket of another process, such as those of container runtimes in the node's network.
fn restrict(files: &PermittedFolders) -> anyhow::Result<()> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V5))?
        .scope(Scope::AbstractUnixSocket | Scope::Signal)?
        .create()?;
    for (paths, rights) in [(&files.own, in_own_folders()), (&files.read, AccessFs::ReadFile.into())] {
        for path in paths {
            let what = || path.display().to_string();
            let rule = PathBeneath::new(PathFd::new(path).with_context(what)?, rights);
            rules = rules.add_rule(rule).with_context(what)?;
        }
    }
    let status = rules.restrict_self()?.ruleset;
    ensure!(status != RulesetStatus::NotEnforced, "{NO_LANDLOCK}");
    Ok(())
}

fn filter_calls() -> anyhow::Result<()> {
    for filter in filters()?.iter().chain(second_numbers().iter()) {
        apply_filter(filter)?;
    }
    Ok(())
}

/// Builds two programs, because a program has one answer for all its matches: EPERM, and ENOSYS for `clone3`. No filter
/// can see the flags of `clone3`; on ENOSYS a C library falls back to `clone`.
fn filters() -> Result<[BpfProgram; 2], BackendError> {
    use SeccompCmpArgLen::Dword;
    let arg = |at, op, value| SeccompCondition::new(at, Dword, op, value);
    let family = |family: libc::c_int| arg(0, SeccompCmpOp::Ne, family.unsigned_abs().into());
    let stranger =
        SeccompRule::new(vec![family(libc::AF_UNIX)?, family(libc::AF_INET)?, family(libc::AF_INET6)?])?;
    let mut refused: BTreeMap<i64, Vec<SeccompRule>> = REFUSED.map(|call| (call, Vec::new())).into();
    refused.insert(libc::SYS_socket, vec![stranger]);
    let own = std::process::id().into();
    for call in FOR_ITSELF {
        // The limits of process 0 are the own ones; its signals go to the whole process group.
        let mut others = vec![arg(0, SeccompCmpOp::Ne, own)?];
        if call == libc::SYS_prlimit64 {
            others.push(arg(0, SeccompCmpOp::Ne, 0)?);
        }
        refused.insert(call, vec![SeccompRule::new(others)?]);
    }
    for (call, commands) in SEND_SIGNALS {
        let rule = |command: &u64| SeccompRule::new(vec![arg(1, SeccompCmpOp::Eq, *command)?]);
        refused.insert(call, commands.iter().map(rule).collect::<Result<_, _>>()?);
    }
    let mut namespaces = Vec::new();
    for bit in (0..32).map(|bit| 1 << bit).filter(|bit| NEW_NAMESPACES & bit != 0) {
        namespaces.push(SeccompRule::new(vec![arg(0, SeccompCmpOp::MaskedEq(bit), bit)?])?);
    }
    refused.insert(libc::SYS_clone, namespaces);
    let unknown = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    Ok([program(refused, libc::EPERM)?, program(unknown, libc::ENOSYS)?])
}

/// Bit that marks a number as x32 (`__X32_SYSCALL_BIT`); to a filter x32 is the same architecture.
const X32: u32 = 0x4000_0000;

/// Returns EPERM for all of x32: each refused call under its second number, and the calls with numbers of their own
/// there (`execve` 520, `ptrace` 521, `kexec_load` 528, `process_vm_readv` and `_writev` 539 and 540, `execveat` 545).
/// No program of the usual ABI makes an x32 call. The other two programs cover other architectures.
fn second_numbers() -> Option<BpfProgram> {
    if !cfg!(target_arch = "x86_64") {
        return None;
    }
    let step = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    Some(vec![
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // seccomp_data.nr
        step(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 0, 1, X32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs()),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ])
}

fn program(calls: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> Result<BpfProgram, BackendError> {
    let answer = SeccompAction::Errno(errno.unsigned_abs());
    SeccompFilter::new(calls, SeccompAction::Allow, answer, std::env::consts::ARCH.try_into()?)?.try_into()
}

fn drop_capabilities(listen_port: u16) -> anyhow::Result<()> {
    let keep = if (1..FIRST_FREE_PORT).contains(&listen_port) {
        CapabilitySet::NET_BIND_SERVICE
    } else {
        CapabilitySet::empty()
    };
    let now = rustix::thread::capabilities(None)?;
    let sets = CapabilitySets {
        effective: now.effective & keep,
        permitted: now.permitted & keep,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_no_capabilities_and_can_still_bind_a_socket() {
        // Capabilities belong to a thread: the other tests keep theirs.
        let hardened = std::thread::spawn(|| {
            harden(15151, &PermittedFolders::default()).unwrap();
            let sets = rustix::thread::capabilities(None).unwrap();
            assert!(sets.effective.is_empty() && sets.permitted.is_empty());
            std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        });
        hardened.join().unwrap();
    }

    #[test]
    fn a_hardened_thread_starts_no_program_and_leaves_no_namespace_but_has_threads_and_sockets() {
        let hardened = std::thread::spawn(|| {
            harden(15151, &PermittedFolders::default()).unwrap();
            let refused = |what: &str, error: Option<i32>| assert_eq!(error, Some(libc::EPERM), "{what}");
            let program = std::process::Command::new("/bin/true").status();
            refused("a program", program.err().and_then(|error| error.raw_os_error()));
            let namespace = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER);
            refused("a namespace", namespace.err().map(|error| error as i32));
            let netlink =
                rustix::net::socket(rustix::net::AddressFamily::NETLINK, rustix::net::SocketType::RAW, None);
            refused("netlink", netlink.err().map(rustix::io::Errno::raw_os_error));
            assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
            std::net::UdpSocket::bind("[::1]:0").unwrap();
            std::os::unix::net::UnixStream::pair().unwrap();
        });
        hardened.join().unwrap();
    }

    /// The list of all files that can be opened, of a node's usual files.
    #[test]
    fn a_hardened_thread_opens_its_own_files_and_bundles_only() {
        let base = std::env::temp_dir().join(format!("ppr-files-{}", std::process::id()));
        let files = [
            ("run/relay.lock", true),
            ("run/node.sock", true),
            ("state/relay/sandboxes/a.json", true),
            ("state/inbox/a.json", true),
            ("state/sandboxes/a.json", false),
            ("state/ca.json", false),
            ("kubelet/pki/kubelet-client-current.pem", false),
            ("kubelet/pods/1/volumes/kubernetes.io~projected/token", false),
            ("bundles/k8s.io/a/config.json", true),
        ];
        for (name, _) in files {
            let path = base.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        let own = ["run", "state/relay", "state/inbox"].map(|name| base.join(name)).into();
        let permitted = PermittedFolders::new(own, &[base.join("bundles")]);
        let folder = base.clone();
        let hardened = std::thread::spawn(move || {
            harden(15151, &permitted).unwrap();
            for (name, opens) in files {
                let path = folder.join(name);
                assert_eq!(std::fs::File::open(&path).is_ok(), opens, "{name}");
                let writes = std::fs::OpenOptions::new().append(true).open(&path).is_ok();
                assert_eq!(writes, opens && !name.starts_with("bundles"), "{name}");
                std::fs::symlink_metadata(&path).unwrap();
            }
            for (path, opens) in
                [("/etc/passwd", false), ("/dev/null", false), ("/proc/self/mountinfo", true)]
            {
                assert_eq!(std::fs::File::open(path).is_ok(), opens, "{path}");
            }
            let relay = folder.join("state/relay");
            std::fs::create_dir(relay.join("quarantine")).unwrap();
            std::fs::rename(relay.join("sandboxes/a.json"), relay.join("quarantine/a.json")).unwrap();
            std::os::unix::net::UnixListener::bind(folder.join("run/relay.sock")).unwrap();
            std::fs::remove_file(folder.join("run/relay.sock")).unwrap();
        });
        hardened.join().unwrap();
        std::fs::remove_dir_all(base).unwrap();
    }

    #[test]
    #[expect(unsafe_code, reason = "no safe wrapper sets the owner of a descriptor's signals")]
    fn a_hardened_thread_signals_and_changes_no_other_process() {
        use std::os::fd::AsRawFd;

        use nix::errno::Errno;
        use nix::sys::signal::kill;
        use nix::unistd::{Pid, getpid};
        use rustix::process::{
            PidfdFlags, Resource, Signal, getppid, getrlimit, pidfd_open, pidfd_send_signal, prlimit,
        };

        let hardened = std::thread::spawn(|| {
            let parent = getppid().unwrap();
            let pidfd = pidfd_open(parent, PidfdFlags::empty()).unwrap();
            let limit = getrlimit(Resource::Nofile);
            let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            // SAFETY: the descriptor is open, and the other arguments are numbers.
            let set_owner = |owner: i32| unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETOWN, owner) };
            assert_eq!(set_owner(0), 0);
            harden(15151, &PermittedFolders::default()).unwrap();
            for pid in [Pid::parent(), Pid::from_raw(0), Pid::from_raw(-1)] {
                assert_eq!(kill(pid, None), Err(Errno::EPERM), "{pid}");
            }
            let refused = Some(rustix::io::Errno::PERM);
            assert_eq!(pidfd_send_signal(&pidfd, Signal::CONT).err(), refused);
            assert_eq!(prlimit(Some(parent), Resource::Nofile, limit).err(), refused);
            assert_eq!((set_owner(0), Errno::last()), (-1, Errno::EPERM));
            kill(getpid(), None).unwrap();
            prlimit(None, Resource::Nofile, limit).unwrap();
        });
        hardened.join().unwrap();
    }

    /// Returns those numbers that answer with anything but EPERM. The arguments are valid for no call.
    #[cfg(target_arch = "x86_64")]
    #[expect(
        unsafe_code,
        reason = "no safe wrapper makes a system call by a number that is not the platform's"
    )]
    fn not_refused(numbers: Vec<libc::c_long>) -> Vec<(libc::c_long, Option<i32>)> {
        let hardened = std::thread::spawn(move || {
            harden(15151, &PermittedFolders::default()).unwrap();
            let call = |number: libc::c_long| {
                // SAFETY: every call refuses these arguments: all ones is no valid pointer and no valid set of flags.
                let answer = unsafe { libc::syscall(number, -1, -1, -1, -1, -1, -1) };
                (number, std::io::Error::last_os_error().raw_os_error().filter(|_| answer == -1))
            };
            numbers.into_iter().map(call).filter(|(_, error)| *error != Some(libc::EPERM)).collect()
        });
        hardened.join().unwrap()
    }

    /// A kernel without x32 answers ENOSYS where no filter is installed.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn refused_system_calls_are_refused_by_x32_number_too() {
        let x32 = libc::c_long::from(X32);
        let only: [libc::c_long; 6] = [520, 521, 528, 539, 540, 545];
        let numbers = REFUSED.iter().chain(&only).map(|number| number | x32);
        assert_eq!(not_refused(numbers.collect()), []);
        assert_eq!(not_refused(vec![libc::SYS_getpid]).len(), 1, "and the usual numbers are not");
    }
}
