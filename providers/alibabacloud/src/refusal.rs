//! Turns refusals of ECS, VPC and STS into provider errors: class, cause, remedy. Pure.
//!
//! Codes: the API references of ECS, and those that gardener's machine-controller-manager treats as lack of capacity.

use peerpod_provider_cloud::Refusals;
use peerpod_provider_cloud::refusal::{Meaning, Row};
use peerpod_provider_rest::{Dialect, HttpAnswer, Said, read};

use Meaning::{Auth, Capacity, Invalid, KeyReused, NotFound, Quota, Throttled, Transient};

/// Errors of Alibaba Cloud.
pub(crate) static DIALECT: Dialect = Dialect { refusals: REFUSALS, said, left: |_| None };

/// Refusals of Alibaba Cloud.
pub(crate) const REFUSALS: Refusals = Refusals { cloud: "Alibaba Cloud", rows: ROWS, usual };

/// Code of a dry run without a fault.
pub(crate) const DRY_RUN: &str = "DryRunOperation";
/// Code of a vSwitch without a free address.
pub(crate) const NO_ADDRESS: &str = "InvalidVSwitchId.IpNotEnough";

const HIGHER_QUOTA: &str = "ask for a higher quota of this instance type (Quota Center, Elastic Compute Service), or allow other instance-types";
const ALLOW: &str =
    "allow {action} to this identity (providers/alibabacloud/ram-policy.json is the whole list)";
const PAY: &str = "pay the open bills, or top up the account";
const RENEW: &str = "renew the credentials, and check the node's clock";
const KEY: &str = "use an access key that exists and is active";
const TYPES: &str = "allow instance-types that these zones sell, or give vswitch-ids in others";
const ADDRESSES: &str = "give larger or more vswitch-ids";
const IMAGE: &str = "set image-id to an image of this region that is shared with the account";
const NETWORK: &str = "set vswitch-ids and security-group-ids to those of one VPC in this region";
const CONFIDENTIAL: &str =
    "use instance-types and an image that have TDX, in a region that has it, or set disable-cvm to true";
const BUSY: &str = "end the pod or instance that uses the disk; it attaches to one VM only";

const ROWS: &[Row] = &[
    Row::code("Throttling*", Throttled),
    Row::code("OperationDenied.NoStock", Capacity),
    Row::code("Zone.NotOnSale", Capacity),
    Row::code("Zone.NotOpen", Capacity),
    Row::code("OperationDenied.ZoneNotAllowed", Capacity).remedy(TYPES),
    Row::code("InvalidResourceType.NotSupported", Capacity).remedy(TYPES),
    Row::code("InvalidInstanceType.ZoneNotSupported", Capacity).remedy(TYPES),
    Row::code("InvalidInstanceType.NotSupportDiskCategory", Capacity)
        .remedy("set root-volume-type to a category that these instance-types have"),
    Row::code("InvalidVpcZone.NotSupported", Capacity).remedy(TYPES),
    Row::code("InstanceType.Offline", Capacity).remedy(TYPES),
    Row::code("ResourceNotAvailable", Capacity),
    Row::code("OperationDenied.CloudSSDNotSupported", Capacity),
    Row::code("OperationDenied.ZoneSystemCategoryNotMatch", Capacity)
        .remedy("set root-volume-type to a category that these zones have"),
    Row::code("InvalidSystemDiskCategory.*", Capacity)
        .remedy("set root-volume-type to a category that these zones and instance-types have"),
    Row::code(NO_ADDRESS, Capacity).remedy(ADDRESSES),
    Row::code("InvalidSpotPriceLimit.LowerThanPublicPrice", Capacity),
    Row::code("InvalidAccountStatus.NotEnoughBalance", Quota).remedy(PAY),
    Row::code("InsufficientBalance*", Quota).remedy(PAY),
    Row::code("QuotaExceed*", Quota).remedy(HIGHER_QUOTA),
    Row::code("SecurityGroupInstanceLimitExceed*", Quota)
        .remedy("set security-group-ids to groups with room, such as advanced ones"),
    Row::code("InstanceDiskLimitExceeded", Quota)
        .remedy("use a larger instance type, or fewer volumes in the pod"),
    Row::code("InstanceDiskNumber.LimitExceed", Quota)
        .remedy("use a larger instance type, or fewer volumes in the pod"),
    Row::code("Forbidden.RAM", Auth).remedy(ALLOW),
    Row::code("Forbidden.SubUser", Auth).remedy(ALLOW),
    Row::code("Forbidden.Unauthorized", Auth).remedy(ALLOW),
    Row::code("NoPermission", Auth).remedy(ALLOW),
    Row::code("InvalidAccessKeyId.*", Auth).remedy(KEY),
    Row::code("SignatureDoesNotMatch", Auth).remedy("correct the secret key, and check the node's clock"),
    Row::code("IncompleteSignature", Auth).remedy("correct the secret key, and check the node's clock"),
    Row::code("InvalidTimeStamp*", Auth).remedy("check the node's clock"),
    Row::code("InvalidSecurityToken.*", Auth).remedy(RENEW),
    Row::code("MissingSecurityToken", Auth).remedy(RENEW),
    // Another attempt has the number of this one, which is improbable; the next one has another.
    Row::code("SignatureNonceUsed", Transient),
    Row::code("OperationDenied.NotInDebt", Auth).remedy(PAY),
    Row::code("IdempotentParameterMismatch", KeyReused),
    Row::code("IdempotenceParamNotMatch", KeyReused),
    Row::code("LastTokenProcessing", Transient),
    Row::code("IdempotentProcessing", Transient),
    Row::code("InvalidInstanceId.NotFound", NotFound),
    Row::code("InvalidDiskId.NotFound", NotFound),
    Row::code("InvalidDiskId.OperationNotSupported", NotFound),
    Row::code("IncorrectInstanceStatus*", Transient),
    Row::code("OperationConflict", Transient),
    Row::code("IncorrectDiskStatus*", Transient).remedy(BUSY),
    Row::code("InvalidOperation.Conflict", Transient),
    Row::code("InvalidImageId.*", Invalid).remedy(IMAGE),
    Row::code("ImageNotSupport*", Invalid).remedy(IMAGE),
    Row::code("InvalidVSwitchId.*", Invalid).remedy(NETWORK),
    Row::code("InvalidSecurityGroupId.*", Invalid).remedy(NETWORK),
    Row::code("InvalidKeyPairName.NotFound", Invalid)
        .remedy("set key-name to a key pair of this region, or remove it"),
    Row::code("InvalidInstanceType.*", Invalid).remedy("correct instance-type and instance-types"),
    Row::code("*", Invalid).with("onfidential").remedy(CONFIDENTIAL),
    Row::code("InvalidDisk.ZoneMismatch", Invalid).remedy("give a vSwitch in the disk's zone"),
    Row::code("ResourcesNotInSameZone", Invalid).remedy("give a vSwitch in the disk's zone"),
    Row::code("ServiceUnavailable", Throttled),
    Row::code("InternalError", Transient),
    Row::code("UnknownError", Transient),
    Row::status(429..=429, Throttled),
    Row::status(401..=401, Auth),
    Row::status(500..=u16::MAX, Transient),
];

/// Returns the remedy for a code that has none of its own.
fn usual(meaning: Meaning) -> &'static str {
    match meaning {
        Throttled => "it is tried again in the next minute; others in the account use the same limit",
        Capacity => "allow more instance-types or give vswitch-ids in more zones",
        Quota => HIGHER_QUOTA,
        Auth => "check the credentials and their rights (providers/alibabacloud/ram-policy.json)",
        Transient => "it is tried again; if it stays, look at the status page of Alibaba Cloud",
        KeyReused => "this is a bug in Peerpod, report it",
        NotFound | Invalid => "correct the settings below provider.alibabacloud, or the pod's annotations",
    }
}

/// Reads the refusal in an answer.
fn said(answer: &HttpAnswer) -> Said {
    let body = answer.json();
    let text = |pointer| read::text(&body, pointer).unwrap_or_default();
    Said { code: text("/Code").to_owned(), message: plain(text("/Message")) }
}

/// Returns a message without the values of user-data, which it may quote: they hold a ticket.
fn plain(message: &str) -> String {
    const FIELD: &str = "userdata";
    let place = message.to_ascii_lowercase().find(FIELD);
    match place.and_then(|place| message.get(..place + FIELD.len())) {
        Some(before) => format!("{before} (the rest of the message may quote user-data)"),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::Error;
    use serde_json::json;

    use super::*;

    fn refusal(code: &str, status: u16, message: &str) -> Error {
        REFUSALS.refused("RunInstances", code, message, status, None).during("create of web-0")
    }

    #[test]
    fn every_row_of_the_table_is_used() {
        REFUSALS.check().unwrap();
    }

    #[test]
    fn a_code_gives_the_class_and_the_text_gives_cause_and_remedy() {
        let cases = [
            ("Throttling", 400, "throttled", "next minute"),
            ("Throttling.User", 400, "throttled", "next minute"),
            ("Throttling.Api", 400, "throttled", "next minute"),
            ("ServiceUnavailable", 503, "throttled", "next minute"),
            ("OperationDenied.NoStock", 403, "capacity", "vswitch-ids in more zones"),
            ("Zone.NotOnSale", 403, "capacity", "vswitch-ids in more zones"),
            ("InvalidResourceType.NotSupported", 403, "capacity", "that these zones sell"),
            ("InvalidVSwitchId.IpNotEnough", 403, "capacity", "larger or more vswitch-ids"),
            ("QuotaExceed.ElasticQuota", 403, "quota", "Quota Center"),
            ("QuotaExceed.PostPaidQuota", 403, "quota", "Quota Center"),
            ("InvalidAccountStatus.NotEnoughBalance", 403, "quota", "top up"),
            ("InvalidAccessKeyId.NotFound", 404, "auth", "exists and is active"),
            ("SignatureDoesNotMatch", 400, "auth", "clock"),
            ("Forbidden.RAM", 403, "auth", "allow RunInstances"),
            ("InvalidSecurityToken.Expired", 400, "auth", "renew the credentials"),
            ("IdempotentParameterMismatch", 403, "key_reused", "bug in Peerpod"),
            ("LastTokenProcessing", 403, "transient", "tried again"),
            ("IncorrectInstanceStatus", 403, "transient", "tried again"),
            ("InvalidInstanceId.NotFound", 404, "not_found", ""),
            ("InvalidImageId.NotFound", 404, "invalid", "set image-id"),
            ("InvalidVSwitchId.NotFound", 404, "invalid", "one VPC"),
            ("SomethingNew", 500, "transient", "tried again"),
            ("SomethingNew", 400, "invalid", "correct the settings"),
        ];
        for (code, status, class, remedy) in cases {
            let error = refusal(code, status, "The cause.");
            assert_eq!(error.class(), class, "{code}");
            let text = error.to_string();
            assert!(
                text.starts_with("create of web-0: ") && text.contains(code) && text.contains(remedy),
                "{text}"
            );
        }
        let error = refusal("InvalidParameter", 400, "ConfidentialComputingMode is not supported.");
        assert!(error.to_string().contains("disable-cvm"), "{error}");
    }

    #[test]
    fn a_refusal_quotes_no_user_data() {
        let message = "The specified UserData 'e30=' is not valid.";
        let answer = HttpAnswer::of(400, &json!({"Code": "InvalidUserData.Format", "Message": message}));
        let said = said(&answer);
        assert!(!said.message.contains("e30="), "{}", said.message);
        assert_eq!(said.code, "InvalidUserData.Format");
    }
}
