//! Turns IBM's refusals into provider errors: class, cause, remedy. Pure.
//!
//! Codes: the VPC API's error messages, and the status reasons of instances in IBM's SDK. A status reason appears after
//! IBM has accepted the create.

use std::time::Duration;

use peerpod_provider_cloud::exhausted::STANDS;
use peerpod_provider_cloud::refusal::{Meaning, Refusals, Row};
use peerpod_provider_rest::{Dialect, HttpAnswer, Said, read};

use Meaning::{Auth, Capacity, Invalid, KeyReused, NotFound, Quota, Throttled, Transient};

/// Time for which an offering without quota is not tried again.
const NO_QUOTA: Duration = Duration::from_secs(600);

/// Errors and limits of the VPC API.
pub(crate) const DIALECT: Dialect = Dialect { refusals: REFUSALS, said, left: |_| None };

/// Refusals of the VPC API.
pub(crate) const REFUSALS: Refusals = Refusals { cloud: "IBM Cloud", rows: ROWS, usual };

const ROLE: &str =
    "give the identity the role of providers/ibmcloud/role.json for the resource group and the VPC";
const LOGIN: &str = "check the credentials of provider.ibmcloud, and the node's clock";
const QUOTA: &str = "ask IBM's support for a higher quota of the region, or end other VMs";
const SUBNET: &str = "give subnet-ids with more free addresses";
const PROFILE: &str = "set instance-type and instance-types to profiles of the region";
const NETWORK: &str = "set vpc-id, subnet-ids and security-group-ids to resources of this region and VPC";
const IMAGE: &str = "set image-ids to images of this region that the identity may use";
const HOST: &str = "set dedicated-host-ids and dedicated-host-group-ids to those of the zones";
const DISK: &str = "end the pod or VM that has the volume; it attaches to one VM only";

const ROWS: &[Row] = &[
    Row::status(429..=429, Throttled),
    Row::code("validation_unique_failed", KeyReused),
    Row::code("cannot_start_capacity", Capacity),
    Row::code("cannot_start_reservation_capacity", Capacity),
    Row::code("cannot_start_placement_group", Capacity),
    Row::code("cannot_start_ip_address", Capacity).remedy(SUBNET),
    Row::code("stopped_by_preemption", Capacity),
    Row::code("insufficient_capacity", Capacity),
    Row::code("cannot_start_reservation_expired", Invalid).remedy("renew the reservation"),
    Row::code("encryption_key_deleted", Invalid).remedy("restore the key of the image or volume"),
    Row::code("cannot_start*", Transient),
    Row::code("stopped_by_host_failure", Transient),
    Row::code("subnet_*", Capacity).with("address").remedy(SUBNET),
    Row::code("over_quota", Quota).remedy(QUOTA),
    Row::code("*quota*", Quota).remedy(QUOTA),
    Row::code("*limit_exceeded*", Quota).remedy(QUOTA),
    Row::code("not_authorized", Auth).remedy(ROLE),
    Row::code("forbidden", Auth).remedy(ROLE),
    Row::code("token_*", Auth).remedy(LOGIN),
    Row::code("invalid_profile*", Invalid).remedy(PROFILE),
    Row::code("instance_profile_*", Invalid).remedy(PROFILE),
    Row::code("image_*", Invalid).remedy(IMAGE),
    Row::code("subnet_*", Invalid).remedy(NETWORK),
    Row::code("vpc_*", Invalid).remedy(NETWORK),
    Row::code("security_group_*", Invalid).remedy(NETWORK),
    Row::code("dedicated_host_*", Invalid).remedy(HOST),
    Row::code("volume_*in_use", Transient).remedy(DISK),
    Row::code("volume_*attached", Transient).remedy(DISK),
    Row::code("not_found", NotFound),
    Row::code("*_not_found", NotFound),
    Row::status(401..=401, Auth).remedy(LOGIN),
    Row::status(403..=403, Auth).remedy(ROLE),
    Row::status(404..=404, NotFound),
    Row::status(408..=409, Transient),
    Row::status(412..=412, Transient),
    Row::status(500..=u16::MAX, Transient),
];

/// Returns the remedy for a code that has none of its own.
fn usual(meaning: Meaning) -> &'static str {
    match meaning {
        Throttled => "it is tried again more slowly; others in the account use the same limit",
        Capacity => "allow more instance-types or zones",
        Quota => "raise the account's limit",
        Auth => "check the credentials and their rights",
        Transient => "it is tried again; if it stays, look at IBM Cloud's status page",
        KeyReused => "this is a bug in Peerpod, report it",
        NotFound | Invalid => "correct the settings below provider.ibmcloud, or the pod's annotations",
    }
}

/// Returns the time for which an offering that IBM refused is not tried again.
pub(crate) fn standing(meaning: Meaning) -> Duration {
    if meaning == Quota { NO_QUOTA } else { STANDS }
}

/// Whether a code of a lack of capacity means that a subnet has no free addresses.
pub(crate) fn is_of_the_subnet(code: &str) -> bool {
    code == "cannot_start_ip_address" || code.starts_with("subnet_")
}

/// Reads code and message of an error, with the field that it concerns.
fn said(answer: &HttpAnswer) -> Said {
    let body = answer.json();
    let text = |pointer: &str| read::text(&body, pointer).unwrap_or_default();
    let message = match text("/errors/0/target/name") {
        "" => text("/errors/0/message").to_owned(),
        field => format!("{} ({field})", text("/errors/0/message").trim_end_matches('.')),
    };
    Said { code: text("/errors/0/code").to_owned(), message }
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
    fn codes_of_ibm_have_class_and_remedy() {
        for (code, message, status, class, remedy) in [
            ("too_many_requests", "", 429, "throttled", "more slowly"),
            ("validation_unique_failed", "", 400, "key_reused", "report it"),
            ("cannot_start_capacity", "", 200, "capacity", "more instance-types or zones"),
            ("cannot_start_ip_address", "", 200, "capacity", "more free addresses"),
            ("cannot_start_reservation_expired", "", 200, "invalid", "renew the reservation"),
            ("cannot_start", "", 200, "transient", "tried again"),
            ("cannot_start_storage", "", 200, "transient", "tried again"),
            ("over_quota", "", 400, "quota", "higher quota"),
            ("instance_vcpu_quota_exceeded", "", 403, "quota", "higher quota"),
            ("subnet_full", "no free address", 400, "capacity", "more free addresses"),
            ("not_authorized", "", 403, "auth", "providers/ibmcloud/role.json"),
            ("whatever", "", 401, "auth", "the node's clock"),
            ("image_not_found", "", 400, "invalid", "image-ids"),
            ("subnet_not_found", "", 404, "invalid", "subnet-ids"),
            ("dedicated_host_not_found", "", 404, "invalid", "dedicated-host-ids"),
            ("instance_not_found", "", 404, "not_found", "correct the settings"),
            ("not_found", "", 404, "not_found", "correct the settings"),
            ("volume_in_use", "", 409, "transient", "attaches to one VM only"),
            ("instance_conflict", "", 409, "transient", "tried again"),
            ("bad_field", "", 400, "invalid", "pod's annotations"),
            ("service_error", "", 503, "transient", "status page"),
        ] {
            let error = REFUSALS.refused("create_instance", code, message, status, None);
            assert_eq!(error.class(), class, "{code} {message}");
            assert!(error.to_string().contains(remedy), "{remedy} in {error}");
        }
    }

    #[test]
    fn an_error_names_its_field() {
        assert_eq!(said(&HttpAnswer::of(500, &json!("oops"))), Said::default());
        let body = json!({"errors": [{"code": "bad_field", "message": "Not so.", "target": {"name": "profile.name"}}]});
        let found = said(&HttpAnswer::of(400, &body));
        assert_eq!((found.code.as_str(), found.message.as_str()), ("bad_field", "Not so (profile.name)"));
    }

    #[test]
    fn a_quota_stands_longer_than_a_shortage() {
        assert_eq!((standing(Quota), standing(Capacity)), (NO_QUOTA, STANDS));
    }
}
