//! What a machine is given once, before anything runs in it: name, limits, kernel settings.

use std::{fs, path::Path};

use nix::{
    sys::resource::{Resource, setrlimit},
    unistd::{gethostname, sethostname},
};

use crate::status;

/// What containers inherit; as systemd's service has it.
const OPEN_FILES: u64 = 1 << 20;
const SETTINGS: [(&str, &str); 6] = [
    // A kernel that fell must not stand still for as long as nobody looks: the lease cannot end it.
    ("kernel/panic", "10"),
    ("kernel/kptr_restrict", "1"),
    ("kernel/dmesg_restrict", "1"),
    ("kernel/unprivileged_bpf_disabled", "1"),
    // The kernel's own defaults are for one user and not for a pod's dozens of processes.
    ("fs/inotify/max_user_instances", "8192"),
    ("fs/inotify/max_user_watches", "524288"),
];
const DEFAULT_NAME: &str = "peerpod";

/// Settles it. What does not work is said and survived.
pub(super) fn settle() {
    let raised = setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES);
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    if !status::in_first_pid_namespace() {
        return; // the machine is somebody else's
    }
    let kernel_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    for (name, value) in SETTINGS {
        // What the image's kernel line says stays.
        if name == "kernel/panic" && kernel_line.split(' ').any(|word| word.starts_with("panic=")) {
            continue;
        }
        set(name, value);
    }
    // The kernel asks this program for modules, where it would ask modprobe.
    if let Ok(us) = fs::read_link("/proc/self/exe") {
        set("kernel/modprobe", &us.to_string_lossy());
    }
    let is_nameless = gethostname().is_ok_and(|name| name.is_empty() || name == "(none)");
    if is_nameless {
        let name = fs::read_to_string("/etc/hostname").unwrap_or_default();
        let name = Some(name.trim()).filter(|name| !name.is_empty()).unwrap_or(DEFAULT_NAME);
        if let Err(error) = sethostname(name) {
            tracing::warn!(name, %error, "cannot set the host name");
        }
    }
}

fn set(name: &str, value: &str) {
    let path = Path::new("/proc/sys").join(name);
    match fs::write(&path, value) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(setting = name, value, %error, "cannot set");
        }
        _ => {}
    }
}
