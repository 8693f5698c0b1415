//! Turns Azure's refusals into provider errors: class, cause, remedy. Pure.
//!
//! Codes: Azure's documentation of allocation failures and of common deployment errors, and those that karpenter's
//! provider handles. `OperationNotAllowed` is a quota, a policy or a state; only its text tells them apart.

use std::time::Duration;

use peerpod_provider_cloud::exhausted::STANDS;
use peerpod_provider_cloud::refusal::{Meaning, Refusals, Row};
use peerpod_provider_rest::{Dialect, HttpAnswer, Said, read};

use Meaning::{Auth, Capacity, Invalid, KeyReused, NotFound, Quota, Throttled, Transient};

/// Time for which a type that is closed to the subscription is not tried again.
const CLOSED: Duration = Duration::from_secs(3600);
/// Time for which a type without quota is not tried again.
const NO_QUOTA: Duration = Duration::from_secs(600);

/// Errors and limits of Azure Resource Manager.
pub(crate) const DIALECT: Dialect = Dialect { refusals: REFUSALS, said, left };

/// Refusals of Azure Resource Manager and its services.
pub(crate) const REFUSALS: Refusals = Refusals { cloud: "Azure", rows: ROWS, usual };

const ROLE: &str =
    "give the identity the role of providers/azure/role.json in the scope that the message names";
const QUOTA: &str =
    "ask for a higher quota of this family or region (Azure portal, Quotas), or allow other instance-types";
const LOGIN: &str = "check the credentials of provider.azure, and the node's clock";
const IMAGE: &str = "set image-id to an image of this region that the identity may read";
const NETWORK: &str =
    "set subnet-id and security-group-id to resources that exist in this region and subscription";
const GROUP: &str = "set subscription-id and resource-group to those of the pods' VMs";
const DISK: &str = "end the pod or VM that has the disk; it attaches to one VM only";
const LARGER: &str = "use a larger instance type, or fewer volumes in the pod";

/// Code for a throttle by the limit of one VM, which must not slow down calls for others.
const OF_ONE_VM: &str = "TooManyRequestsForOneResource";

const ROWS: &[Row] = &[
    Row::code("RetryableErrorDueToAnotherOperation", Transient),
    Row::code(OF_ONE_VM, Transient),
    // The code of a throttle is that of a quota, too.
    Row::status(429..=429, Throttled),
    Row::code("TooManyRequests", Throttled),
    Row::code("SkuNotAvailable", Capacity),
    Row::code("AllocationFailed", Capacity),
    Row::code("ZonalAllocationFailed", Capacity),
    Row::code("OverconstrainedAllocationRequest", Capacity),
    Row::code("OverconstrainedZonalAllocationRequest", Capacity),
    Row::code("QuotaExceeded", Quota).remedy(QUOTA),
    Row::code("ResourceQuotaExceeded", Quota).remedy(QUOTA),
    Row::code("OperationNotAllowed", Quota).with("Family Cores quota").remedy(QUOTA),
    Row::code("OperationNotAllowed", Quota).with("LowPriorityCores").remedy(QUOTA),
    Row::code("OperationNotAllowed", Quota).with("Total Regional Cores quota").remedy(QUOTA),
    Row::code("OperationNotAllowed", Quota).with("Quota increase").remedy(QUOTA),
    Row::code("OperationNotAllowed", Quota).with("maximum number of data disks").remedy(LARGER),
    Row::code("OperationNotAllowed", Transient).with("marked for deletion"),
    Row::code("OperationNotAllowed", Transient).with("being deleted"),
    Row::code("OperationNotAllowed", Transient).with("is attached to"),
    Row::code("SubnetIsFull", Quota).remedy("give a subnet-id with more free addresses"),
    Row::code("PublicIPCountLimitReached", Quota).remedy("ask for a higher quota of public addresses"),
    Row::code("AnotherOperationInProgress", Transient),
    Row::code("OperationPreempted", Transient),
    Row::code("AttachDiskWhileBeingDetached", Transient),
    Row::code("Conflict", Transient),
    Row::code("RetryableError", Transient),
    Row::code("NicInUse", Transient),
    Row::code("PublicIPAddressCannotBeDeleted", Transient),
    Row::code("CannotDeleteResource*", Transient),
    Row::code("NicReservedForAnotherVm", Transient),
    Row::code("InUse*", Transient),
    Row::code("InternalExecutionError", Transient),
    Row::code("InternalDiskManagementError", Transient),
    Row::code("ProvisioningFailed", Transient),
    Row::code("OSProvisioning*", Transient),
    Row::code("VMStartTimedOut", Transient),
    Row::code("ConflictingUserInput", Invalid).remedy(DISK),
    Row::code("PreconditionFailed", KeyReused),
    Row::code("PropertyChangeNotAllowed", KeyReused),
    Row::code("AuthorizationFailed", Auth).remedy(ROLE),
    Row::code("LinkedAuthorizationFailed", Auth).remedy(ROLE),
    Row::code("LinkedAccessCheckFailed", Auth).remedy(ROLE),
    Row::code("ExpiredAuthenticationToken", Auth).remedy(LOGIN),
    Row::code("InvalidAuthenticationToken*", Auth).remedy(LOGIN),
    Row::code("MissingSubscriptionRegistration", Auth)
        .remedy("register the resource provider that the message names (az provider register)"),
    Row::code("ReadOnlyDisabledSubscription", Auth).remedy("enable the subscription again"),
    Row::code("RequestDisallowedByPolicy", Invalid).remedy(
        "change the settings as the policy that the message names wants it, or exempt the resource group",
    ),
    Row::code("ScopeLocked", Invalid).remedy("remove the lock from the resource group"),
    Row::code("ResourceGroupNotFound", Invalid).remedy(GROUP),
    Row::code("SubscriptionNotFound", Invalid).remedy(GROUP),
    Row::code("InvalidSubscriptionId", Invalid).remedy(GROUP),
    Row::code("NoRegisteredProviderFound", Invalid).remedy("correct region"),
    Row::code("PlatformImageNotFound", Invalid).remedy(IMAGE),
    Row::code("GalleryImageNotFound", Invalid).remedy(IMAGE),
    Row::code("ImageNotFound", Invalid).remedy(IMAGE),
    Row::code("InvalidResourceReference", Invalid).remedy(NETWORK),
    Row::code("InvalidAvailabilityZone", Invalid).remedy("correct zones"),
    Row::code("ResourceNotFound", NotFound),
    Row::code("NotFound", NotFound),
    Row::status(401..=401, Auth).remedy(LOGIN),
    Row::status(403..=403, Auth).remedy(ROLE),
    Row::status(404..=404, NotFound),
    Row::status(412..=412, KeyReused),
    Row::status(408..=408, Transient),
    Row::status(500..=u16::MAX, Transient),
];

/// Returns the remedy for a code that has none of its own.
fn usual(meaning: Meaning) -> &'static str {
    match meaning {
        Throttled => "it is tried again more slowly; others in the subscription use the same limit",
        Capacity => "allow more instance-types or zones",
        Quota => "raise the subscription's limit (Azure portal, Quotas)",
        Auth => "check the credentials and their rights",
        Transient => "it is tried again; if it stays, look at Azure's status page",
        KeyReused => "this is a bug in Peerpod, report it",
        NotFound | Invalid => "correct the settings below provider.azure, or the pod's annotations",
    }
}

/// Returns the time for which an offering that Azure refused by this code is not tried again.
pub(crate) fn standing(code: &str, meaning: Meaning, is_spot: bool) -> Duration {
    match (code, meaning) {
        (_, Meaning::Quota) => NO_QUOTA,
        // On demand it means that the type is closed to the subscription, on spot that none is left.
        ("SkuNotAvailable", _) if !is_spot => CLOSED,
        _ => STANDS,
    }
}

/// Reads code and message of an error. The inner error is the more precise one.
fn said(answer: &HttpAnswer) -> Said {
    let body = answer.json();
    let text = |pointer: &str| read::text(&body, pointer).unwrap_or_default().to_owned();
    let is_of_one_vm = || {
        let limits = answer.header("x-ms-ratelimit-remaining-resource").unwrap_or_default();
        let is_used_up = |limit: &str| {
            limit.trim().rsplit_once(';').is_some_and(|(name, left)| is_of_a_vm(name) && left.trim() == "0")
        };
        let details = read::list(&body, "/error/details");
        limits.split(',').any(is_used_up)
            || details.iter().filter_map(|one| read::text(one, "/target")).any(is_of_a_vm)
    };
    let code = match answer.status() == 429 && is_of_one_vm() {
        true => OF_ONE_VM.to_owned(),
        false => text("/error/code"),
    };
    Said { code, message: text("/error/message") }
}

/// Whether a limit is that of one VM, like `Microsoft.Compute/GetVMResource`.
fn is_of_a_vm(limit: &str) -> bool {
    limit.rsplit('/').next().unwrap_or_default().contains("Resource")
}

/// Reads the smallest of the subscription's limits that Compute reports as left. Limits of one VM are no limits of calls
/// for other VMs.
fn left(answer: &HttpAnswer) -> Option<u32> {
    smallest(answer.header("x-ms-ratelimit-remaining-resource")?)
}

fn smallest(limits: &str) -> Option<u32> {
    let each = limits.split(',').filter_map(|limit| limit.trim().rsplit_once(';'));
    let shared = each.filter(|(name, _)| !is_of_a_vm(name));
    shared.filter_map(|(_, left)| left.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_row_of_the_table_is_used() {
        REFUSALS.check().unwrap();
    }

    #[test]
    fn codes_of_azure_have_class_and_remedy() {
        let quota = "Operation could not be completed as it results in exceeding approved standardDASv5Family Cores quota.";
        let regional = "Operation could not be completed as it results in exceeding approved Total Regional Cores quota.";
        let spot =
            "Operation could not be completed as it results in exceeding approved LowPriorityCores quota.";
        for (code, message, status, class, remedy) in [
            ("OperationNotAllowed", "too many requests", 429, "throttled", "more slowly"),
            ("RetryableErrorDueToAnotherOperation", "", 429, "transient", "tried again"),
            ("SkuNotAvailable", "", 409, "capacity", "more instance-types or zones"),
            ("AllocationFailed", "", 200, "capacity", "more instance-types or zones"),
            ("OverconstrainedZonalAllocationRequest", "", 409, "capacity", "more instance-types"),
            ("OperationNotAllowed", quota, 409, "quota", "higher quota of this family"),
            ("OperationNotAllowed", regional, 409, "quota", "higher quota of this family"),
            ("OperationNotAllowed", spot, 409, "quota", "higher quota of this family"),
            ("OperationNotAllowed", "since the VM is marked for deletion.", 409, "transient", "tried again"),
            ("OperationNotAllowed", "because of a policy", 409, "invalid", "correct the settings"),
            ("QuotaExceeded", "", 400, "quota", "higher quota"),
            ("AuthorizationFailed", "", 403, "auth", "providers/azure/role.json"),
            ("Whatever", "", 403, "auth", "providers/azure/role.json"),
            ("ExpiredAuthenticationToken", "", 401, "auth", "the node's clock"),
            ("PreconditionFailed", "", 412, "key_reused", "report it"),
            ("PropertyChangeNotAllowed", "", 409, "key_reused", "report it"),
            ("ResourceGroupNotFound", "", 404, "invalid", "resource-group"),
            ("ResourceNotFound", "", 404, "not_found", "correct the settings"),
            ("InvalidResourceReference", "", 400, "invalid", "subnet-id"),
            ("AnotherOperationInProgress", "", 409, "transient", "tried again"),
            ("NicReservedForAnotherVm", "", 400, "transient", "tried again"),
            ("BadRequest", "no", 400, "invalid", "pod's annotations"),
            ("Whatever", "", 503, "transient", "status page"),
        ] {
            let error = REFUSALS.refused("VirtualMachines_CreateOrUpdate", code, message, status, None);
            assert_eq!(error.class(), class, "{code} {message}");
            assert!(error.to_string().contains(remedy), "{remedy} in {error}");
        }
    }

    #[test]
    fn a_refusal_is_remembered_as_long_as_it_may_last() {
        assert_eq!(standing("ZonalAllocationFailed", Capacity, false), STANDS);
        assert_eq!(standing("SkuNotAvailable", Capacity, true), STANDS);
        assert_eq!(standing("SkuNotAvailable", Capacity, false), CLOSED);
        assert_eq!(standing("OperationNotAllowed", Quota, false), NO_QUOTA);
    }

    #[test]
    fn an_answer_without_an_error_has_no_code() {
        assert_eq!(said(&HttpAnswer::of(500, &json!("oops"))), Said::default());
        let body = json!({"error": {"code": "Conflict", "message": "busy"}});
        assert_eq!(
            said(&HttpAnswer::of(409, &body)),
            Said { code: "Conflict".into(), message: "busy".into() }
        );
        assert_eq!(left(&HttpAnswer::of(200, &json!({}))), None);
        let body = json!({"error": {"code": "OperationNotAllowed", "message": "slow down",
            "details": [{"code": "TooManyRequests", "target": "Microsoft.Compute/GetVMResource.pp-a"}]}});
        let one = said(&HttpAnswer::of(429, &body));
        assert_eq!(REFUSALS.meaning(&one.code, &one.message, 429), Transient);
        let body = json!({"error": {"code": "OperationNotAllowed",
            "details": [{"code": "TooManyRequests", "target": "HighCostGet30Min"}]}});
        let all = said(&HttpAnswer::of(429, &body));
        assert_eq!(REFUSALS.meaning(&all.code, &all.message, 429), Throttled);
    }

    #[test]
    fn the_limits_of_one_vm_do_not_count_for_others() {
        let limits =
            "Microsoft.Compute/PutVMSubscriptionMaximum;1499, Microsoft.Compute/PutVMResource.pp-a;11";
        assert_eq!(smallest(limits), Some(1499));
        assert_eq!(
            smallest("Microsoft.Compute/HighCostGet3Min;46,Microsoft.Compute/HighCostGet30Min;237"),
            Some(46)
        );
        assert_eq!(
            (smallest("Microsoft.Compute/GetVMResource;3"), smallest("odd"), smallest("a;b")),
            (None, None, None)
        );
    }
}
