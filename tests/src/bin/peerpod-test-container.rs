//! Starts a program with the rights that the chart gives one of its containers:
//!
//! ```text
//! peerpod-test-container CONTAINER [--volume NAME=PATH]... [--extra PATH]... [--env NAME=VALUE]... -- PROGRAM [ARGUMENT]...
//! ```
//!
//! The rendered chart names user, capabilities, system call filter, root file system and volumes of the container. A
//! volume is mounted at PATH, the test's own path, with the options of the container's volume mount NAME: read-only or
//! not, with the node's later mounts or not. An extra volume is one that an operator adds, such as a provider's files. The
//! program's environment is this process's and the named variables.
//! The root holds the machine's programs and libraries, read-only, and nothing else of the machine.
//!
//! The caller provides a new PID namespace and the network namespace. The program keeps this process's pid.

use std::collections::BTreeMap;
use std::ffi::{CString, NulError, OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use anyhow::{Context, bail, ensure};
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, execve, fchdir, pivot_root};
use rustix::thread::{
    CapabilitySet, CapabilitySets, remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter,
};
use serde::Deserialize;

/// The rendered chart, which has a container for each daemon, and the component for CSI drivers.
const MANIFESTS: [&str; 2] = ["../deploy/kustomize/base/peerpod.yaml", "../deploy/csi/node.yaml"];
/// Volume that the chart has only if `tunnel.kind` is not `vxlan`; the rendered defaults lack it.
const TUN: &str = "tun";
const TEMPLATE: &str = "../deploy/chart/templates/_daemonsets.tpl";
static TUN_MOUNT: LazyLock<VolumeMount> = LazyLock::new(|| VolumeMount {
    name: TUN.to_owned(),
    mount_path: PathBuf::new(),
    read_only: false,
    mount_propagation: None,
    _sub_path: None,
});
/// Device files of every container (OCI runtime specification, "Default Devices").
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// Folders of the machine that replace the image: a test's programs are linked with the machine's C library.
const IMAGE: [&str; 2] = ["/usr", "/etc"];

/// A pod's specification, as far as it concerns the rights of its containers. An unknown field of a security context,
/// its capabilities or a volume mount is an error: it may be a right.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pod {
    #[serde(default, rename = "hostPID")]
    host_pid: bool,
    #[serde(default, rename = "hostIPC")]
    host_ipc: bool,
    #[serde(default)]
    security_context: SecurityContext,
    containers: Vec<Container>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    name: String,
    #[serde(default)]
    security_context: SecurityContext,
    #[serde(default)]
    volume_mounts: Vec<VolumeMount>,
}

/// Security context of a pod or of a container; the container's context takes precedence.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SecurityContext {
    run_as_user: Option<u32>,
    run_as_group: Option<u32>,
    seccomp_profile: Option<SeccompProfile>,
    #[serde(default)]
    privileged: bool,
    allow_privilege_escalation: Option<bool>,
    #[serde(default)]
    read_only_root_filesystem: bool,
    #[serde(default)]
    capabilities: Capabilities,
}

#[derive(Clone, Deserialize)]
struct SeccompProfile {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Capabilities {
    #[serde(default)]
    add: Vec<String>,
    #[serde(default)]
    drop: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct VolumeMount {
    name: String,
    mount_path: PathBuf,
    #[serde(default)]
    read_only: bool,
    mount_propagation: Option<String>,
    #[serde(rename = "subPath")]
    _sub_path: Option<String>,
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let name = arguments.next().context("name a container of the chart")?.to_string_lossy().into_owned();
    let (mut volumes, mut extra) = (BTreeMap::new(), Vec::new());
    let mut env: Vec<CString> =
        std::env::vars_os().map(|(name, value)| variable(&name, &value)).collect::<Result<_, _>>()?;
    loop {
        let word = arguments.next().context("-- and a program are missing")?;
        if word == "--" {
            break;
        }
        if word == "--extra" {
            extra.push(PathBuf::from(arguments.next().context("--extra needs a path")?));
            continue;
        }
        if word == "--env" {
            env.push(CString::new(arguments.next().context("--env needs NAME=VALUE")?.as_bytes())?);
            continue;
        }
        ensure!(word == "--volume", "{word:?} is not known");
        let volume = arguments.next().context("--volume needs NAME=PATH")?.to_string_lossy().into_owned();
        let (name, path) = volume.split_once('=').context("--volume needs NAME=PATH")?;
        volumes.insert(name.to_owned(), PathBuf::from(path));
    }
    let command: Vec<OsString> = arguments.collect();
    let program = PathBuf::from(command.first().context("a program is missing")?);

    let (pod, container) = find(&name)?;
    let own = &container.security_context;
    ensure!(
        !pod.host_pid && std::process::id() == 1,
        "the container has its own PID namespace: be its pid 1"
    );
    let user = own.run_as_user.or(pod.security_context.run_as_user);
    let group = own.run_as_group.or(pod.security_context.run_as_group);
    ensure!((user, group) == (Some(0), Some(0)), "only root is supported here");
    let mut namespaces = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP;
    namespaces.set(CloneFlags::CLONE_NEWIPC, !pod.host_ipc);
    unshare(namespaces).context("make the container's namespaces")?;
    let bidirectional = |mount: &VolumeMount| mount.mount_propagation.as_deref() == Some("Bidirectional");
    ensure!(
        !container.volume_mounts.iter().any(bidirectional) || own.privileged,
        "Bidirectional needs privileged"
    );
    root(&container, &volumes, &extra, &program).context("make the container's root")?;
    if !own.privileged {
        let kept = capabilities(&own.capabilities)?;
        if own.allow_privilege_escalation == Some(false) {
            set_no_new_privs(true)?;
        }
        drop_capabilities(kept)?;
        let profile = own.seccomp_profile.as_ref().or(pod.security_context.seccomp_profile.as_ref());
        match profile.map(|profile| profile.kind.as_str()) {
            Some("RuntimeDefault") => filter_calls(kept).context("filter system calls")?,
            Some("Unconfined") | None => {}
            Some(other) => bail!("the seccomp profile {other} is not supported here"),
        }
    }
    let command: Vec<CString> =
        command.iter().map(|word| CString::new(word.as_bytes())).collect::<Result<_, _>>()?;
    execve(&command[0], &command, &env).with_context(|| format!("start {}", program.display()))?;
    Ok(())
}

fn variable(name: &OsStr, value: &OsStr) -> Result<CString, NulError> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat())
}

/// Finds a container in the manifests by name, and returns it with its pod.
fn find(name: &str) -> anyhow::Result<(Pod, Container)> {
    for manifest in MANIFESTS {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(manifest);
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        for document in serde_yaml::Deserializer::from_str(&text) {
            let document = serde_yaml::Value::deserialize(document)?;
            if document["kind"] != "DaemonSet" {
                continue;
            }
            let mut pod: Pod = serde_yaml::from_value(document["spec"]["template"]["spec"].clone())
                .with_context(|| format!("read a pod's specification in {}", path.display()))?;
            if let Some(at) = pod.containers.iter().position(|container| container.name == name) {
                let container = pod.containers.swap_remove(at);
                return Ok((pod, container));
            }
        }
    }
    bail!("the chart has no container {name}")
}

fn bind(from: &Path, to: &Path, read_only: bool) -> anyhow::Result<()> {
    let none = None::<&str>;
    let attempt = || format!("mount {} at {}", from.display(), to.display());
    if from.is_dir() {
        fs::create_dir_all(to).with_context(attempt)?;
    } else {
        fs::create_dir_all(to.parent().context("a file has a folder")?)?;
        fs::write(to, "").with_context(attempt)?;
    }
    mount(Some(from), to, none, MsFlags::MS_BIND | MsFlags::MS_REC, none).with_context(attempt)?;
    if read_only {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, to, none, flags, none).with_context(attempt)?;
    }
    Ok(())
}

fn file_system(kind: &str, to: &Path, flags: MsFlags, data: &str) -> anyhow::Result<()> {
    fs::create_dir_all(to)?;
    mount(Some(kind), to, Some(kind), flags, Some(data))
        .with_context(|| format!("mount {kind} at {}", to.display()))
}

/// Makes a root with the image, the pseudo file systems as a container runtime mounts them, and the container's
/// volumes.
fn root(
    container: &Container,
    volumes: &BTreeMap<String, PathBuf>,
    extra: &[PathBuf],
    program: &Path,
) -> anyhow::Result<()> {
    let none = None::<&str>;
    let privileged = container.security_context.privileged;
    // No mount below the new root propagates to the machine. Volumes keep their peers until they are mounted.
    mount(none, "/", none, MsFlags::MS_PRIVATE, none)?;
    let new = Path::new("/mnt");
    file_system("tmpfs", new, MsFlags::empty(), "mode=0755")?;
    let inside = |path: &Path| new.join(path.strip_prefix("/").unwrap_or(path));
    for folder in IMAGE {
        bind(Path::new(folder), &inside(Path::new(folder)), true)?;
    }
    for link in ["bin", "sbin", "lib", "lib64"] {
        match fs::read_link(Path::new("/").join(link)) {
            Ok(target) => symlink(target, new.join(link))?,
            Err(_) => bind(&Path::new("/").join(link), &new.join(link), true)?,
        }
    }
    // As in the container image (deploy/dist): container runtimes name network namespaces /var/run/netns/….
    fs::create_dir_all(new.join("var"))?;
    symlink("../run", new.join("var/run"))?;
    let programs = program.parent().context("the program's path has a folder")?;
    bind(programs, &inside(programs), true)?;

    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NODEV;
    file_system("proc", &new.join("proc"), safe, "")?;
    if privileged {
        bind(Path::new("/sys"), &new.join("sys"), false)?;
        bind(Path::new("/dev"), &new.join("dev"), false)?;
    } else {
        for read_only in ["proc/sys", "proc/sysrq-trigger", "proc/irq", "proc/bus"].map(|part| new.join(part))
        {
            // The kernel may be built without this file.
            if read_only.exists() {
                bind(&read_only, &read_only, true)?;
            }
        }
        file_system("sysfs", &new.join("sys"), safe | MsFlags::MS_RDONLY, "")?;
        let dev = new.join("dev");
        file_system("tmpfs", &dev, MsFlags::MS_NOSUID | MsFlags::MS_STRICTATIME, "mode=755,size=65536k")?;
        for device in DEVICES {
            bind(&Path::new("/dev").join(device), &dev.join(device), false)?;
        }
        file_system("tmpfs", &dev.join("shm"), safe, "mode=1777,size=65536k")?;
        symlink("/proc/self/fd", dev.join("fd"))?;
    }
    for (mount_, path) in volumes_of(container, volumes)? {
        let to = inside(path);
        match mount_.name.as_str() {
            "tmp" => file_system("tmpfs", &to, MsFlags::empty(), "mode=1777")?,
            _ => bind(path, &to, mount_.read_only)?,
        }
        let flags = match mount_.mount_propagation.as_deref() {
            Some("HostToContainer") => MsFlags::MS_SLAVE,
            Some("Bidirectional") => MsFlags::MS_SHARED,
            None | Some("None") => MsFlags::MS_PRIVATE,
            Some(other) => bail!("mount propagation {other} is not known"),
        };
        mount(none, &to, none, flags | MsFlags::MS_REC, none)?;
    }
    for path in extra {
        bind(path, &inside(path), true)?;
    }
    let old = fs::File::open("/")?;
    chdir(new)?;
    pivot_root(".", ".")?;
    // Without peers, so that the machine keeps the mounts that are unmounted here.
    fchdir(&old)?;
    mount(none, ".", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")?;
    if container.security_context.read_only_root_filesystem {
        mount(none, "/", none, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none)?;
    }
    Ok(())
}

/// Returns the container's mounts with their paths, outer mounts before inner ones. Leaves out volumes that the test
/// does not provide.
fn volumes_of<'a>(
    container: &'a Container,
    volumes: &'a BTreeMap<String, PathBuf>,
) -> anyhow::Result<Vec<(&'a VolumeMount, &'a Path)>> {
    let mounts = &container.volume_mounts;
    for name in volumes.keys().filter(|name| *name != TUN) {
        ensure!(
            mounts.iter().any(|mount| mount.name == *name),
            "the chart gives the container no volume {name}"
        );
    }
    let mut placed: Vec<_> = mounts
        .iter()
        .filter_map(|mount| match volumes.get(&mount.name) {
            Some(path) => Some((mount, path.as_path())),
            None if mount.name == "tmp" => Some((mount, mount.mount_path.as_path())),
            None => None,
        })
        .collect();
    if let Some(path) = volumes.get(TUN) {
        let template = Path::new(env!("CARGO_MANIFEST_DIR")).join(TEMPLATE);
        ensure!(fs::read_to_string(template)?.contains("- name: tun\n"), "the chart has no volume {TUN}");
        placed.push((&*TUN_MOUNT, path.as_path()));
    }
    placed.sort_by_key(|(_, path)| path.components().count());
    Ok(placed)
}

/// Returns the capabilities that remain of a container runtime's defaults after `drop` and `add`.
fn capabilities(wanted: &Capabilities) -> anyhow::Result<CapabilitySet> {
    ensure!(wanted.drop == ["ALL"], "the container drops {:?}, not ALL", wanted.drop);
    let mut kept = CapabilitySet::empty();
    for name in &wanted.add {
        let known = CapabilitySet::from_name(name);
        kept |= known.with_context(|| format!("the capability {name} is not known"))?;
    }
    Ok(kept)
}

fn drop_capabilities(kept: CapabilitySet) -> anyhow::Result<()> {
    // A process of root gets the capabilities of the bounding set when it starts a program.
    for capability in (CapabilitySet::all() - kept).iter() {
        match remove_capability_from_bounding_set(capability) {
            // The kernel does not have this capability yet.
            Err(rustix::io::Errno::INVAL) | Ok(()) => {}
            Err(error) => return Err(error).with_context(|| format!("drop {capability:?}")),
        }
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: none })?;
    Ok(())
}

/// System calls that the default profile of containerd and CRI-O denies to every container, as far as the kernel has
/// them (containerd, contrib/seccomp/seccomp_default.go).
const NEVER: [libc::c_long; 18] = [
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_userfaultfd,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_move_pages,
    libc::SYS_mbind,
    libc::SYS_migrate_pages,
    libc::SYS_set_mempolicy,
    libc::SYS_get_mempolicy,
    libc::SYS_nfsservctl,
    libc::SYS_vmsplice,
];

/// Returns the system calls that the default profile permits with a capability.
fn with_capability() -> Vec<(CapabilitySet, Vec<libc::c_long>)> {
    let admin = vec![
        libc::SYS_bpf,
        libc::SYS_fanotify_init,
        libc::SYS_fsconfig,
        libc::SYS_fsmount,
        libc::SYS_fsopen,
        libc::SYS_fspick,
        libc::SYS_lookup_dcookie,
        libc::SYS_mount,
        libc::SYS_mount_setattr,
        libc::SYS_move_mount,
        libc::SYS_open_tree,
        libc::SYS_perf_event_open,
        libc::SYS_quotactl,
        libc::SYS_setdomainname,
        libc::SYS_sethostname,
        libc::SYS_setns,
        libc::SYS_syslog,
        libc::SYS_umount2,
        libc::SYS_unshare,
    ];
    vec![
        (CapabilitySet::SYS_ADMIN, admin),
        (CapabilitySet::DAC_READ_SEARCH, vec![libc::SYS_open_by_handle_at]),
        (CapabilitySet::SYS_BOOT, vec![libc::SYS_reboot]),
        (CapabilitySet::SYS_CHROOT, vec![libc::SYS_chroot]),
        (
            CapabilitySet::SYS_MODULE,
            vec![libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module],
        ),
        (CapabilitySet::SYS_PACCT, vec![libc::SYS_acct]),
        (CapabilitySet::SYS_PTRACE, vec![libc::SYS_kcmp, libc::SYS_pidfd_getfd]),
        (CapabilitySet::SYS_TIME, vec![libc::SYS_settimeofday, libc::SYS_clock_settime]),
    ]
}

/// `clone` flags that create namespaces (`linux/sched.h`): mount, cgroup, uts, ipc, user, pid, net.
const NEW_NAMESPACES: u64 = 0x7e02_0000;

fn filter_calls(kept: CapabilitySet) -> anyhow::Result<()> {
    let mut refused: BTreeMap<i64, Vec<SeccompRule>> = NEVER.iter().map(|call| (*call, Vec::new())).collect();
    for (capability, calls) in with_capability() {
        if !kept.contains(capability) {
            refused.extend(calls.into_iter().map(|call| (call, Vec::new())));
        }
    }
    let mut programs = Vec::new();
    if !kept.contains(CapabilitySet::SYS_ADMIN) {
        for bit in (0..32).map(|bit| 1 << bit).filter(|bit| NEW_NAMESPACES & bit != 0) {
            let set = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(bit), bit)?;
            refused.entry(libc::SYS_clone).or_default().push(SeccompRule::new(vec![set])?);
        }
        programs.push(program(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)?);
    }
    programs.push(program(refused, libc::EPERM)?);
    for program in &programs {
        apply_filter(program)?;
    }
    Ok(())
}

fn program(refused: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> anyhow::Result<BpfProgram> {
    let refuse = SeccompAction::Errno(errno.unsigned_abs());
    let architecture = std::env::consts::ARCH.try_into()?;
    Ok(SeccompFilter::new(refused, SeccompAction::Allow, refuse, architecture)?.try_into()?)
}
