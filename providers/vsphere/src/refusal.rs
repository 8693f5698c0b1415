//! Turns faults of a vCenter into provider errors: class, cause, remedy. Pure.
//!
//! A fault comes as the answer to a call, or later as the error of its task. Its type is the code.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::Refusals;
use peerpod_provider_cloud::refusal::{Meaning, Row};
use peerpod_provider_rest::Said;

use Meaning::{Auth, Capacity, Invalid, KeyReused, NotFound, Quota, Throttled, Transient};

/// Faults of a vCenter.
pub(crate) const REFUSALS: Refusals = Refusals { cloud: "vCenter", rows: ROWS, usual };

const ROLE: &str =
    "give this account the privileges in providers/vsphere/role.txt, on the objects that README.md names";
const LICENSE: &str = "add a license, or stop VMs that use it";
const BUSY: &str = "end the pod or VM that uses the disk; it is tried again";
const SPACE: &str = "free space in the datastore, or give more datastores";
const HOST: &str = "give hosts or a cluster that can run the template, and a datastore that they reach";
const LOGIN: &str = "correct provider.vsphere.username and password, and unlock the account";

const ROWS: &[Row] = &[
    Row::code("NoDiskSpace", Capacity).remedy(SPACE),
    Row::code("InsufficientStorageSpace", Capacity).remedy(SPACE),
    Row::code("DatastoreNotWritableOnHost", Capacity).remedy(HOST),
    Row::code("InaccessibleDatastore", Capacity).remedy(HOST),
    Row::code("Insufficient*", Capacity),
    Row::code("NoCompatibleHost*", Capacity).remedy(HOST),
    Row::code("NoActiveHostInCluster", Capacity).remedy(HOST),
    Row::code("NoHost", Capacity).remedy(HOST),
    Row::code("NoMaintenanceModeDrsRecommendationForVM", Capacity).remedy(HOST),
    Row::code("DrsDisabledOnVm", Capacity).remedy(HOST),
    Row::code("HostNotConnected", Capacity).remedy(HOST),
    Row::code("HostNotReachable", Capacity).remedy(HOST),
    Row::code("HostCommunication", Capacity).remedy(HOST),
    Row::code("NumVirtualCpusExceedsLimit", Capacity).remedy(HOST),
    Row::code("NumVirtualCpusIncompatible", Capacity).remedy(HOST),
    Row::code("MemorySizeNotSupported", Capacity).remedy(HOST),
    Row::code("MemorySizeNotRecommended", Capacity).remedy(HOST),
    Row::code("VmLimitLicense", Quota).remedy(LICENSE),
    Row::code("NotEnoughLicenses", Quota).remedy(LICENSE),
    Row::code("NotEnoughCpus", Capacity).remedy(HOST),
    Row::code("*License*", Quota).remedy(LICENSE),
    Row::code("TooMany*", Quota).remedy("delete VMs, or spread them over more hosts and datastores"),
    Row::code("NotAuthenticated", Auth),
    Row::code("InvalidLogin", Auth).remedy(LOGIN),
    Row::code("PasswordExpired", Auth).remedy(LOGIN),
    Row::code("NoPermission", Auth).remedy(ROLE),
    Row::code("RestrictedByAdministrator", Auth).remedy(ROLE),
    Row::code("DuplicateName", KeyReused),
    Row::code("AlreadyExists", KeyReused),
    Row::code("ManagedObjectNotFound", NotFound),
    Row::code("NotFound", NotFound),
    Row::code("FileNotFound", NotFound),
    Row::code("FileLocked", Transient).remedy(BUSY),
    Row::code("CannotAccessFile", Transient).remedy(BUSY),
    Row::code("CannotAccessLocalSource", Transient).remedy(BUSY),
    Row::code("ResourceInUse", Transient).remedy(BUSY),
    Row::code("TaskInProgress", Transient),
    Row::code("ConcurrentAccess", Transient),
    Row::code("InvalidPowerState", Transient),
    Row::code("InvalidState", Transient),
    Row::code("RequestCanceled", Transient),
    Row::code("Timedout", Transient),
    Row::code("HostCommunicationFault", Transient),
    Row::code("NoConnectionToHost", Transient),
    Row::code("SystemError*", Transient),
    Row::code("ServerBusy", Throttled),
    Row::code("MethodNotFound", Invalid).remedy("use a vCenter of version 6.5 or later"),
    Row::code("MethodDisabled", Transient),
    Row::status(401..=401, Auth),
    Row::status(403..=403, Auth),
    Row::status(429..=429, Throttled),
    Row::status(502..=504, Transient),
];

/// Returns the remedy for a fault that has none of its own.
fn usual(meaning: Meaning) -> &'static str {
    match meaning {
        Throttled => "it is tried again",
        Capacity => "free resources of hosts and datastores, or give more of them",
        Quota => LICENSE,
        Auth => "check the account and its privileges (providers/vsphere/role.txt)",
        Transient => "it is tried again; if it stays, look at the tasks and events of the vCenter",
        KeyReused => "this is a bug in Peerpod, report it",
        NotFound | Invalid => "correct the settings below provider.vsphere, or the pod's annotations",
    }
}

/// Returns the error for a fault.
pub(crate) fn error(action: &str, said: &Said, status: u16) -> Error {
    let Said { code, message } = said;
    let message = if message.is_empty() { "no message" } else { message };
    REFUSALS.refused(action, code, message, status, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_used_and_every_class_has_a_remedy() {
        REFUSALS.check().unwrap();
    }

    #[test]
    fn a_fault_has_its_class() {
        for (code, class) in [
            ("InsufficientCpuResourcesFault", "capacity"),
            ("InsufficientMemoryResourcesFault", "capacity"),
            ("InsufficientFailoverResourcesFault", "capacity"),
            ("NoCompatibleHost", "capacity"),
            ("NoDiskSpace", "capacity"),
            ("NotEnoughLicenses", "quota"),
            ("ExpiredFeatureLicense", "quota"),
            ("InvalidLogin", "auth"),
            ("NoPermission", "auth"),
            ("DuplicateName", "key_reused"),
            ("ManagedObjectNotFound", "not_found"),
            ("TaskInProgress", "transient"),
            ("FileLocked", "transient"),
            ("InvalidArgument", "invalid"),
            ("InvalidVmConfig", "invalid"),
            ("Fault", "invalid"),
        ] {
            let said = Said { code: code.to_owned(), message: String::new() };
            let error = error("CloneVM_Task", &said, 500);
            assert_eq!(error.class(), class, "{error}");
            assert!(
                error.to_string().starts_with(&format!("vCenter refused CloneVM_Task: {code}: no message; "))
            );
        }
    }
}
