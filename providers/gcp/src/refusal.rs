//! Turns refusals of Compute Engine into provider errors: class, cause, remedy. Pure.
//!
//! A refusal comes as the answer to a call, or later as the error of its operation. Both have the same causes in two
//! spellings (`quotaExceeded`, `QUOTA_EXCEEDED`). Codes: error pages of Compute Engine's documentation, and those that
//! machine-controller-manager's provider treats as lack of capacity.

use peerpod_provider_cloud::Refusals;
use peerpod_provider_cloud::refusal::{Meaning, Row};
use peerpod_provider_rest::{Dialect, HttpAnswer, Said, read};
use serde_json::Value;

use Meaning::{Auth, Capacity, Invalid, KeyReused, NotFound, Quota, Throttled, Transient};

/// Errors of Compute Engine.
pub(crate) static DIALECT: Dialect = Dialect { refusals: REFUSALS, said, left: |_| None };

/// Refusals of Compute Engine.
pub(crate) const REFUSALS: Refusals = Refusals { cloud: "Google Cloud", rows: ROWS, usual };

const HIGHER_QUOTA: &str =
    "ask for a higher quota of the region (IAM & Admin, Quotas), or allow instance-types of another family";
const ROLE: &str = "give this identity the rights in providers/gcp/role.yaml";
const KEY: &str = "renew the key or the identity, and check the node's clock";
const ENABLE: &str =
    "enable the Compute Engine API in the project: gcloud services enable compute.googleapis.com";
const IMAGE: &str = "set image to one that exists and that this identity may use";
const NETWORK: &str = "set network and subnetwork to those of the project and the region of zones";
const TYPES: &str = "allow instance-types that exist in these zones, or give other zones";
const ADDRESSES: &str = "give a larger subnetwork, or delete VMs in it";
const ACT_AS: &str =
    "give this identity iam.serviceAccounts.actAs on the account of service-account, or clear that setting";
const POLICY: &str = "the organisation policy in this message forbids the VM; correct the setting that it names, or exempt the project";
const BUSY: &str = "end the pod or VM that uses the disk; it is tried again";

const ROWS: &[Row] = &[
    Row::code("rateLimitExceeded", Throttled),
    Row::code("userRateLimitExceeded", Throttled),
    Row::code("RATE_LIMIT_EXCEEDED", Throttled),
    Row::code("CONCURRENT_OPERATIONS_QUOTA_EXCEEDED", Throttled),
    Row::code("quotaExceeded", Throttled).with("oncurrent operations"),
    Row::code("RESOURCE_OPERATION_RATE_EXCEEDED", Throttled),
    Row::code("operationRateExceeded", Throttled),
    // Other causes have the same codes, such as `conditionNotMet`.
    Row::code("*", Invalid).with("onstraint constraints/").remedy(POLICY),
    Row::code("insufficientCapacity", Capacity),
    Row::code("ZONE_RESOURCE_POOL_EXHAUSTED", Capacity),
    Row::code("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", Capacity),
    Row::code("RESOURCE_POOL_EXHAUSTED", Capacity),
    Row::code("STOCKOUT", Capacity),
    Row::code("VM_MIN_COUNT_NOT_REACHED", Capacity),
    Row::code("resourcePoolExhausted", Capacity),
    Row::code("*", Capacity).with("does not have enough resources available"),
    Row::code("*", Capacity).with("does not exist in zone").remedy(TYPES),
    Row::code("*", Capacity).with("/machineTypes/*' was not found").remedy(TYPES),
    Row::code("IP_SPACE_EXHAUSTED*", Quota).remedy(ADDRESSES),
    Row::code("QUOTA_EXCEEDED", Quota).remedy(HIGHER_QUOTA),
    Row::code("quotaExceeded", Quota).remedy(HIGHER_QUOTA),
    Row::code("limitExceeded", Quota).remedy(HIGHER_QUOTA),
    Row::code("LIMIT_EXCEEDED", Quota).remedy(HIGHER_QUOTA),
    Row::code("SERVICE_DISABLED", Auth).remedy(ENABLE),
    Row::code("accessNotConfigured", Auth).remedy(ENABLE),
    Row::code("BILLING_DISABLED", Auth).remedy("enable billing of the project"),
    Row::code("SERVICE_ACCOUNT_ACCESS_DENIED", Auth).remedy(ACT_AS),
    Row::code("forbidden", Auth).remedy(ROLE),
    Row::code("insufficientPermissions", Auth).remedy(ROLE),
    Row::code("PERMISSIONS_ERROR", Auth).remedy(ROLE),
    Row::code("PERMISSION_DENIED", Auth).remedy(ROLE),
    Row::code("IAM_PERMISSION_DENIED", Auth).remedy(ROLE),
    Row::code("authError", Auth).remedy(KEY),
    Row::code("UNAUTHENTICATED", Auth).remedy(KEY),
    Row::code("alreadyExists", KeyReused),
    Row::code("RESOURCE_ALREADY_EXISTS", KeyReused),
    Row::code("notFound", NotFound).with("/instances/"),
    Row::code("RESOURCE_NOT_FOUND", NotFound).with("/instances/"),
    Row::code("notFound", NotFound).with("/disks/"),
    Row::code("RESOURCE_NOT_FOUND", NotFound).with("/disks/"),
    Row::code("notFound", NotFound).with("/operations/"),
    Row::code("*", NotFound).with("No attached disk found"),
    Row::code("*", Invalid).with("/images/*' was not found").remedy(IMAGE),
    Row::code("*", Invalid).with("/networks/*' was not found").remedy(NETWORK),
    Row::code("*", Invalid).with("/subnetworks/*' was not found").remedy(NETWORK),
    Row::code("*", Invalid)
        .with("/projects/*' was not found")
        .remedy("set project-id to the id of a project that exists"),
    Row::code("resourceInUseByAnotherResource", Transient).remedy(BUSY),
    Row::code("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", Transient).remedy(BUSY),
    Row::code("resourceNotReady", Transient),
    Row::code("RESOURCE_NOT_READY", Transient),
    Row::code("conditionNotMet", Transient),
    Row::code("CONDITION_NOT_MET", Transient),
    Row::code("backendError", Transient),
    Row::code("internalError", Transient),
    Row::code("INTERNAL_ERROR", Transient),
    Row::code("UNSUPPORTED_OPERATION", Invalid)
        .remedy("check that image, instance-types and confidential fit each other"),
    Row::status(429..=429, Throttled),
    Row::status(401..=401, Auth),
    Row::status(403..=403, Auth),
    Row::status(500..=u16::MAX, Transient),
];

/// Returns the remedy for a code that has none of its own.
fn usual(meaning: Meaning) -> &'static str {
    match meaning {
        Throttled => "it is tried again in the next minute; others in the project use the same limit",
        Capacity => "allow more instance-types or zones",
        Quota => HIGHER_QUOTA,
        Auth => "check the credentials and their rights (providers/gcp/role.yaml)",
        Transient => "it is tried again; if it stays, look at the status page of Google Cloud",
        KeyReused => "this is a bug in Peerpod, report it",
        NotFound | Invalid => "correct the settings below provider.gcp, or the pod's annotations",
    }
}

/// Reads the refusal in an answer.
fn said(answer: &HttpAnswer) -> Said {
    let body = answer.json();
    let errors = read::list(&body, "/error/errors");
    let details = read::list(&body, "/error/details").iter();
    let mut codes: Vec<&str> = details.filter_map(|one| read::text(one, "/reason")).collect();
    codes.extend(errors.iter().filter_map(|one| read::text(one, "/reason")));
    codes.extend(read::text(&body, "/error/status"));
    let message = read::text(&body, "/error/message").unwrap_or_default();
    Said { code: telling(&codes, message), message: plain(message) }
}

/// Reads the refusal in an operation; `None`: it was not refused.
pub(crate) fn said_of_operation(operation: &Value) -> Option<Said> {
    let errors = read::list(operation, "/error/errors");
    let status = read::number(operation, "/httpErrorStatusCode").filter(|status| *status >= 400);
    if errors.is_empty() && status.is_none() {
        return None;
    }
    let mut codes: Vec<&str> = errors.iter().filter_map(|one| read::text(one, "/code")).collect();
    for one in errors.iter().flat_map(|one| read::list(one, "/errorDetails")) {
        codes.extend(read::text(one, "/errorInfo/reason"));
    }
    let mut messages: Vec<&str> = errors.iter().filter_map(|one| read::text(one, "/message")).collect();
    messages.dedup();
    let message = match messages.is_empty() {
        true => read::text(operation, "/httpErrorMessage").unwrap_or_default().to_owned(),
        false => messages.join("; "),
    };
    let code = telling(&codes, &message);
    Some(Said { code: if code.is_empty() { "UNKNOWN".to_owned() } else { code }, message: plain(&message) })
}

/// Returns the status of a refused operation.
pub(crate) fn status_of_operation(operation: &Value) -> u16 {
    let status = read::number(operation, "/httpErrorStatusCode");
    status.and_then(|status| u16::try_from(status).ok()).unwrap_or(400)
}

/// Returns the first code that a row of the table names, otherwise the first one. One refusal has several codes, and
/// general ones like `badRequest` among them.
fn telling(codes: &[&str], message: &str) -> String {
    let is_named = |code: &&&str| {
        let row = REFUSALS.find(code, message, 400);
        row.is_some_and(|row| row.code != "*" && !row.code.is_empty())
    };
    codes.iter().find(is_named).or(codes.first()).copied().unwrap_or_default().to_owned()
}

/// Returns a message without the values of metadata, which it may quote: user-data has a ticket.
fn plain(message: &str) -> String {
    const FIELD: &str = "metadata";
    let place = message.to_ascii_lowercase().find(FIELD);
    match place.and_then(|place| message.get(..place + FIELD.len())) {
        Some(before) => format!("{before} (the rest of the message may quote user-data)"),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests;
