//! Turns the errors of libvirt and QEMU into provider errors, each with the class for the caller and a remedy. Pure.

use peerpod_provider_api::Error;

use crate::rpc::{RpcError, code};

use Class::{Full, Memory, Never, Wait};

/// Texts of QEMU and libvirt that are more precise than their error number, with the remedy. `*` stands for a name.
const WORDS: &[(&str, Class, &str)] = &[
    ("Failed to get \"write\" lock", Wait, LOCKED),
    ("Failed to get shared \"write\" lock", Wait, LOCKED),
    ("has asynchronous jobs running", Wait, "a disk is being made or removed there; ask again"),
    ("is already in use", Wait, "another VM has this; stop it, or wait until it is gone"),
    (
        "No space left on device",
        Full,
        "make room in the storage pool, or set provider.libvirt.pool to another",
    ),
    ("Cannot allocate memory", Memory, "stop VMs, or ask for smaller ones"),
    ("cannot set up guest memory", Memory, "stop VMs, or ask for smaller ones"),
    (
        "Could not access KVM kernel module",
        Never,
        "load the kernel module of KVM, or run the node where KVM is",
    ),
    ("network '*' is not active", Never, "start it: virsh net-start NAME"),
    (
        "Network not found",
        Never,
        "define and start it (virsh net-define, net-start), or set provider.libvirt.network",
    ),
    (
        "Storage pool not found",
        Never,
        "define and start it (virsh pool-define-as, pool-start), or set provider.libvirt.pool",
    ),
    ("storage pool '*' is not active", Never, "start it: virsh pool-start NAME"),
    ("Image is not in qcow2 format", Never, "the image is no qcow2"),
    ("Could not open", Never, "is the file there, and may QEMU's user read it?"),
    ("Cannot access storage file", Never, "is the file there, and may QEMU's user read it?"),
    ("Connection refused", Wait, "is its server running?"),
    ("No more available PCI slots", Full, "attach fewer disks to the VM"),
    ("monitor socket did not show up", Wait, SLOW),
    ("failed to connect to monitor socket", Wait, SLOW),
    ("guest unexpectedly quit", Wait, KILLED),
    ("terminating on signal", Wait, KILLED),
    ("Resource temporarily unavailable", Wait, "the host has too many processes or locks just now"),
];

const LOCKED: &str = "another VM has this disk; stop it, or wait until it is gone";
const SLOW: &str = "is the host overloaded?";
const KILLED: &str = "QEMU was killed; the kernel does it when memory is short, see its log";

/// Texts of libvirt when QEMU ended during its start. QEMU's own message follows if QEMU refused to start, as it will
/// the next time. No message follows if QEMU was killed.
const ENDED: &[&str] = &["unexpectedly closed the monitor", "process exited while connecting to monitor"];

enum Class {
    Full,
    Memory,
    Wait,
    Never,
}

impl From<RpcError> for Error {
    fn from(error: RpcError) -> Error {
        let text = error.to_string();
        let failure = match error {
            RpcError::Lost(_) | RpcError::Late(_) | RpcError::Garbled(_) => return Error::transient(text),
            RpcError::Refused(_) => return Error::Auth { text },
            RpcError::Failed(failure) => failure,
        };
        if let Some((_, class, help)) = WORDS.iter().find(|(words, _, _)| says(&failure.text, words)) {
            let text = format!("{text}; {help}");
            return match class {
                Wait => Error::transient(text),
                Full => Error::Quota { text },
                Memory => Error::capacity("memory of the host", text),
                Never => Error::invalid(text),
            };
        }
        let end = failure.text.trim_end_matches(|c: char| c == ':' || c.is_whitespace());
        if ENDED.iter().any(|words| end.ends_with(words)) {
            return Error::transient(format!("{text}; {KILLED}"));
        }
        match failure.code {
            code::NO_DOMAIN => Error::not_found(text),
            code::NO_STORAGE_VOL => {
                Error::not_found(format!("{text}; is the pool refreshed (virsh pool-refresh)?"))
            }
            code::AUTH_FAILED | code::OPERATION_DENIED | code::ACCESS_DENIED => Error::Auth {
                text: format!(
                    "{text}; let our user use libvirtd (group libvirt, polkit, or unix_sock_rw_perms)"
                ),
            },
            code::NO_MEMORY => Error::capacity("memory of the host", text),
            code::OPERATION_TIMEOUT | code::RESOURCE_BUSY => Error::transient(text),
            _ => Error::invalid(text),
        }
    }
}

fn says(text: &str, words: &str) -> bool {
    let after = words.split('*').try_fold(text, |rest, part| rest.split_once(part).map(|(_, after)| after));
    after.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::message::Failure;

    fn class(code: i32, text: &str) -> (String, &'static str) {
        let error = Error::from(RpcError::Failed(Failure { code, text: text.into() })).during("create of x");
        (error.to_string(), error.class())
    }

    #[test]
    fn each_refusal_has_a_class_and_a_remedy() {
        for (code, said, expected, help) in [
            (1, "process exited: Failed to get \"write\" lock", "transient", "another VM has this disk"),
            (38, "cannot extend file: No space left on device", "quota", "make room"),
            (1, "cannot set up guest memory 'pc.ram': Cannot allocate memory", "capacity", "smaller"),
            (
                43,
                "Network not found: no network with matching name 'x'",
                "invalid",
                "provider.libvirt.network",
            ),
            (49, "Storage pool not found: no storage pool", "invalid", "provider.libvirt.pool"),
            (55, "storage pool 'x' is not active", "invalid", "virsh pool-start"),
            (55, "network 'x' is not active", "invalid", "virsh net-start"),
            (42, "Domain not found", "not_found", ""),
            (88, "access denied", "auth", "group libvirt"),
            (68, "Timed out during operation", "transient", ""),
            (67, "unsupported configuration", "invalid", ""),
            (38, "monitor socket did not show up: No such file or directory", "transient", "overloaded"),
            (38, "failed to connect to monitor socket: Connection refused", "transient", ""),
            (1, "internal error: qemu unexpectedly closed the monitor", "transient", "memory is short"),
            (1, "internal error: process exited while connecting to monitor: ", "transient", "see its log"),
            (
                1,
                "internal error: process exited while connecting to monitor: qemu-system-x86_64: terminating on signal 15",
                "transient",
                "QEMU was killed",
            ),
            (
                1,
                "internal error: process exited while connecting to monitor: qemu-system-x86_64: -cpu x: unknown model",
                "invalid",
                "",
            ),
            (
                1,
                "internal error: qemu unexpectedly closed the monitor: cannot set up guest memory 'pc.ram'",
                "capacity",
                "smaller",
            ),
        ] {
            let (text, class) = class(code, said);
            assert_eq!(class, expected, "{text}");
            assert!(
                text.contains(said) && text.contains(help) && text.starts_with("create of x: "),
                "{text}"
            );
        }
        assert_eq!(Error::from(RpcError::Lost("gone".into())).class(), "transient");
        assert_eq!(Error::from(RpcError::Refused("no".into())).class(), "auth");
    }
}
