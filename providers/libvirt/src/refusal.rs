//! Turns the errors of libvirt and QEMU into provider errors, each with the class for the caller and a remedy. Pure.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::refusal::{ANY, Meaning, Refusals, Row};

use crate::rpc::{RpcError, code};

use Meaning::{Auth, Capacity, Invalid, NotFound, Quota, Transient};

/// Refusals of libvirt and QEMU: their texts, which are more precise than the error number, and then the numbers, which
/// stand for a status.
const REFUSALS: Refusals = Refusals { cloud: "libvirt", rows: ROWS, usual: |_| "see the text" };

const ROWS: &[Row] = &[
    Row::part("Failed to get \"write\" lock", Transient).remedy(LOCKED),
    Row::part("Failed to get shared \"write\" lock", Transient).remedy(LOCKED),
    Row::part("has asynchronous jobs running", Transient)
        .remedy("a disk is being made or removed there; ask again"),
    Row::part("is already in use", Transient)
        .remedy("another VM has this; stop it, or wait until it is gone"),
    Row::part("No space left on device", Quota)
        .remedy("make room in the storage pool, or set provider.libvirt.pool to another"),
    Row::part("Cannot allocate memory", Capacity).remedy("stop VMs, or ask for smaller ones"),
    Row::part("cannot set up guest memory", Capacity).remedy("stop VMs, or ask for smaller ones"),
    Row::part("Could not access KVM kernel module", Invalid)
        .remedy("load the kernel module of KVM, or run the node where KVM is"),
    Row::part("network '*' is not active", Invalid).remedy("start it: virsh net-start NAME"),
    Row::part("Network not found", Invalid)
        .remedy("define and start it (virsh net-define, net-start), or set provider.libvirt.network"),
    Row::part("Storage pool not found", Invalid)
        .remedy("define and start it (virsh pool-define-as, pool-start), or set provider.libvirt.pool"),
    Row::part("storage pool '*' is not active", Invalid).remedy("start it: virsh pool-start NAME"),
    Row::part("Image is not in qcow2 format", Invalid).remedy("the image is no qcow2"),
    Row::part("Could not open", Invalid).remedy("is the file there, and may QEMU's user read it?"),
    Row::part("Cannot access storage file", Invalid)
        .remedy("is the file there, and may QEMU's user read it?"),
    Row::part("Connection refused", Transient).remedy("is its server running?"),
    Row::part("No more available PCI slots", Quota).remedy("attach fewer disks to the VM"),
    Row::part("monitor socket did not show up", Transient).remedy(SLOW),
    Row::part("failed to connect to monitor socket", Transient).remedy(SLOW),
    Row::part("guest unexpectedly quit", Transient).remedy(KILLED),
    Row::part("terminating on signal", Transient).remedy(KILLED),
    Row::part("Resource temporarily unavailable", Transient)
        .remedy("the host has too many processes or locks just now"),
    number(code::NO_DOMAIN, NotFound),
    number(code::NO_STORAGE_VOL, NotFound).remedy("is the pool refreshed (virsh pool-refresh)?"),
    number(code::AUTH_FAILED, Auth).remedy(RIGHTS),
    number(code::OPERATION_DENIED, Auth).remedy(RIGHTS),
    number(code::ACCESS_DENIED, Auth).remedy(RIGHTS),
    number(code::NO_MEMORY, Capacity),
    number(code::OPERATION_TIMEOUT, Transient),
    number(code::RESOURCE_BUSY, Transient),
];

const fn number(code: i32, meaning: Meaning) -> Row {
    Row::status(code as u16..=code as u16, meaning)
}

const LOCKED: &str = "another VM has this disk; stop it, or wait until it is gone";
const SLOW: &str = "is the host overloaded?";
const KILLED: &str = "QEMU was killed; the kernel does it when memory is short, see its log";

/// Offering that lacks capacity.
const HOST: &str = "memory of the host";
const RIGHTS: &str = "let our user use libvirtd (group libvirt, polkit, or unix_sock_rw_perms)";

/// Texts of libvirt when QEMU ended during its start. QEMU's own message follows if QEMU refused to start, as it will
/// the next time. No message follows if QEMU was killed.
const ENDED: &[&str] = &["unexpectedly closed the monitor", "process exited while connecting to monitor"];

impl From<RpcError> for Error {
    fn from(error: RpcError) -> Error {
        let text = error.to_string();
        let failure = match error {
            RpcError::Lost(_) | RpcError::Late(_) | RpcError::Garbled(_) => return Error::transient(text),
            RpcError::Refused(_) => return Error::Auth { text },
            RpcError::Failed(failure) => failure,
        };
        let number = u16::try_from(failure.code).unwrap_or_default();
        let row = REFUSALS.find("", &failure.text, number);
        let end = failure.text.trim_end_matches(|c: char| c == ':' || c.is_whitespace());
        if row.is_none_or(|row| row.status != ANY) && ENDED.iter().any(|words| end.ends_with(words)) {
            return Error::transient(format!("{text}; {KILLED}"));
        }
        match row {
            None => Error::invalid(text),
            Some(row) if row.remedy.is_empty() => row.meaning.error(HOST, None, text),
            Some(row) => row.meaning.error(HOST, None, format!("{text}; {}", row.remedy)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::message::LibvirtFailure;

    fn class(code: i32, text: &str) -> (String, &'static str) {
        let error =
            Error::from(RpcError::Failed(LibvirtFailure { code, text: text.into() })).during("create of x");
        (error.to_string(), error.class())
    }

    #[test]
    fn every_row_of_the_table_is_used() {
        REFUSALS.check().unwrap();
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
