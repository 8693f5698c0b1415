//! Turns the refusals of PowerVS into provider errors: class, cause, remedy. Pure.
//!
//! PowerVS has statuses and texts, but hardly any codes. A fault of a VM appears after PowerVS has accepted its create.

use peerpod_provider_cloud::refusal::{Meaning, Refusals, Row};
use peerpod_provider_rest::{Dialect, HttpAnswer, Said, read};

use Meaning::{Auth, Capacity, Invalid, KeyReused, NotFound, Quota, Throttled, Transient};

/// Errors and limits of the PowerVS API.
pub(crate) const DIALECT: Dialect = Dialect { refusals: REFUSALS, said, left: |_| None };

/// Refusals of the PowerVS API.
pub(crate) const REFUSALS: Refusals = Refusals { cloud: "PowerVS", rows: ROWS, usual };

const LOGIN: &str = "check the key of provider.ibmcloud-powervs, and the node's clock";
const ROLE: &str =
    "give the service id the role Manager on the workspace (providers/ibmcloud-powervs/README.md)";
const QUOTA: &str = "ask IBM's support for a higher limit of the workspace, or end other VMs";
const ADDRESS: &str = "give network-id a network with more free addresses";
const SYSTEM: &str = "set system-type to one with free processors (ibmcloud pi workspace system-pool list)";

const ROWS: &[Row] = &[
    Row::status(429..=429, Throttled),
    Row::part("quota", Quota).remedy(QUOTA),
    Row::part("exceeds limit", Quota).remedy(QUOTA),
    Row::part("limit exceeded", Quota).remedy(QUOTA),
    Row::part("no available IP", Quota).remedy(ADDRESS),
    Row::part("o valid host", Capacity).remedy(SYSTEM),
    Row::part("nsufficient", Capacity).remedy(SYSTEM),
    Row::part("not enough", Capacity).remedy(SYSTEM),
    Row::part("capacity", Capacity).remedy(SYSTEM),
    Row::status(401..=401, Auth).remedy(LOGIN),
    Row::status(403..=403, Auth).remedy(ROLE),
    Row::status(404..=404, NotFound),
    Row::status(410..=410, NotFound),
    // Also a VM that is being built.
    Row::status(408..=409, Transient),
    Row::status(500..=u16::MAX, Transient),
];

/// Returns the remedy for a refusal that has none of its own.
fn usual(meaning: Meaning) -> &'static str {
    match meaning {
        Throttled => "it is tried again more slowly; others in the account use the same limit",
        Capacity => "set system-type to another system, or wait",
        Quota => "raise the workspace's limit",
        Auth => "check the key and its rights",
        Transient => "it is tried again; if it stays, look at IBM Cloud's status page",
        KeyReused => "this is a bug in Peerpod, report it",
        NotFound | Invalid => {
            "correct the settings below provider.ibmcloud-powervs, or the pod's annotations"
        }
    }
}

/// Reads code and message of an error.
fn said(answer: &HttpAnswer) -> Said {
    let body = answer.json();
    let text = |pointer: &str| read::text(&body, pointer);
    let message = text("/description").or_else(|| text("/message")).unwrap_or_default();
    Said { code: text("/error").unwrap_or_default().to_owned(), message: message.to_owned() }
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
    fn texts_of_powervs_have_class_and_remedy() {
        for (message, status, class, remedy) in [
            ("slow down", 429, "throttled", "more slowly"),
            ("the memory quota is used up", 403, "quota", "higher limit"),
            ("no available IP in network", 422, "quota", "more free addresses"),
            ("No valid host was found", 0, "capacity", "system-type"),
            ("Insufficient processors", 409, "capacity", "system-type"),
            ("unauthorized", 401, "auth", "the node's clock"),
            ("forbidden", 403, "auth", "Manager"),
            ("not here", 404, "not_found", "correct the settings"),
            ("gone", 410, "not_found", "correct the settings"),
            ("pvm-instance is building", 409, "transient", "tried again"),
            ("bad image", 422, "invalid", "correct the settings"),
            ("oops", 504, "transient", "status page"),
        ] {
            let error = REFUSALS.refused("pvminstances.post", "code", message, status, None);
            assert_eq!(error.class(), class, "{message}");
            assert!(error.to_string().contains(remedy), "{remedy} in {error}");
        }
        let body = json!({"error": "bad request", "description": "no such image", "message": "m"});
        let found = said(&HttpAnswer::of(400, &body));
        assert_eq!((found.code.as_str(), found.message.as_str()), ("bad request", "no such image"));
        assert_eq!(said(&HttpAnswer::of(500, &json!("oops"))), Said::default());
    }
}
