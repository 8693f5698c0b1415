//! Applies the one-time settings of a machine before anything runs in it: name, limits, kernel settings.

use std::fs;
use std::path::Path;

use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{gethostname, sethostname};

use crate::status;

/// Limit that containers inherit; the same as in the systemd service.
const OPEN_FILES: u64 = 1 << 20;
const SETTINGS: [(&str, &str); 6] = [
    // The lease cannot end a kernel that panicked, which would stand still until an operator looks.
    ("kernel/panic", "10"),
    ("kernel/kptr_restrict", "1"),
    ("kernel/dmesg_restrict", "1"),
    ("kernel/unprivileged_bpf_disabled", "1"),
    // The kernel's own defaults are for one user and not for the dozens of processes of a pod.
    ("fs/inotify/max_user_instances", "8192"),
    ("fs/inotify/max_user_watches", "524288"),
];
const DEFAULT_NAME: &str = "peerpod";

/// Raises the limits that `serve` inherits, and so runs before it. A failure is logged and survived.
pub(super) fn limits() {
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// Applies the other settings, before any process of the pod runs. A failure is logged and survived.
pub(super) fn settle() {
    if !status::in_first_pid_namespace() {
        return; // the machine belongs to the host
    }
    let kernel_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    for (name, value) in SETTINGS {
        if !is_said(&kernel_line, name) {
            set(name, value);
        }
    }
    // The kernel calls this program for modules in the place of modprobe.
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

/// Returns whether the VM image's kernel command line sets a value, which then stays.
fn is_said(kernel_line: &str, name: &str) -> bool {
    let key = |word: &str| word.split_once('=').map(|(key, _)| key.replace('.', "/"));
    kernel_line
        .split_ascii_whitespace()
        .filter_map(key)
        .any(|key| (name == "kernel/panic" && key == "panic") || key.strip_prefix("sysctl/") == Some(name))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctls_of_the_kernel_line_stay() {
        let line =
            "quiet panic=1 sysctl.kernel.kptr_restrict=2 sysctl.fs/inotify/max_user_watches=9 kernel.x=1";
        for (name, said) in [
            ("kernel/panic", true),
            ("kernel/kptr_restrict", true),
            ("fs/inotify/max_user_watches", true),
            ("kernel/dmesg_restrict", false),
            ("kernel/x", false),
        ] {
            assert_eq!(is_said(line, name), said, "{name}");
        }
    }
}
