//! Tests of the table and of the two forms of a refusal.

use peerpod_provider_api::Error;
use serde_json::json;

use super::*;

fn refused(status: u16, body: &Value) -> Error {
    let said = said(&HttpAnswer::of(status, body));
    REFUSALS.refused("instances.insert", &said.code, &said.message, status, None)
}

fn answer(reason: &str, message: &str, status: u16) -> Value {
    json!({"error": {"code": status, "message": message, "errors": [
        {"message": message, "domain": "global", "reason": reason}]}})
}

#[test]
fn every_row_of_the_table_is_used() {
    REFUSALS.check().unwrap();
}

#[test]
fn a_code_gives_the_class_and_the_text_gives_cause_and_remedy() {
    let resource = |path: &str| format!("The resource 'projects/p-1/{path}' was not found");
    let cases = [
        ("rateLimitExceeded", 403, "Rate Limit Exceeded".to_owned(), "throttled", "next minute"),
        (
            "quotaExceeded",
            403,
            "Quota exceeded for quota group 'concurrent operations'".to_owned(),
            "throttled",
            "next minute",
        ),
        ("quotaExceeded", 403, "Quota 'CPUS' exceeded. Limit: 24.0".to_owned(), "quota", "higher quota"),
        (
            "invalid",
            400,
            "Invalid value for field 'resource.machineType': 'x'. Machine type with name 'x' does not exist in zone 'z'."
                .to_owned(),
            "capacity",
            "exist in these zones",
        ),
        ("notFound", 404, resource("zones/z-1-a/machineTypes/x"), "capacity", "exist in these zones"),
        ("notFound", 404, resource("zones/z-1-a/instances/x"), "not_found", ""),
        ("notFound", 404, resource("zones/z-1-a/disks/x"), "not_found", ""),
        ("notFound", 404, resource("global/images/x"), "invalid", "set image"),
        ("notFound", 404, resource("global/networks/x"), "invalid", "set network"),
        ("notFound", 404, resource("regions/r-1/subnetworks/x"), "invalid", "set network"),
        ("forbidden", 403, "Required 'compute.instances.create' permission".to_owned(), "auth", "role.yaml"),
        ("accessNotConfigured", 403, "API has not been used".to_owned(), "auth", "gcloud services enable"),
        ("authError", 401, "Invalid Credentials".to_owned(), "auth", "renew the key"),
        ("somethingNew", 401, "no".to_owned(), "auth", "check the credentials"),
        ("somethingNew", 403, "no".to_owned(), "auth", "check the credentials"),
        ("alreadyExists", 409, "The resource 'x' already exists".to_owned(), "key_reused", "bug in Peerpod"),
        ("resourceInUseByAnotherResource", 400, "is already being used".to_owned(), "transient", "uses the disk"),
        ("resourceNotReady", 400, "is not ready".to_owned(), "transient", "tried again"),
        ("conditionNotMet", 412, "fingerprint".to_owned(), "transient", "tried again"),
        (
            "conditionNotMet",
            412,
            "Constraint constraints/compute.requireShieldedVm violated for project p-1.".to_owned(),
            "invalid",
            "organisation policy",
        ),
        ("insufficientCapacity", 503, "no more".to_owned(), "capacity", "more instance-types or zones"),
        ("invalid", 400, "No attached disk found with device name 'x'".to_owned(), "not_found", ""),
        ("backendError", 503, "Backend Error".to_owned(), "transient", "tried again"),
        ("somethingNew", 429, "slow".to_owned(), "throttled", "next minute"),
        ("somethingNew", 502, "bad".to_owned(), "transient", "tried again"),
        ("somethingNew", 400, "bad".to_owned(), "invalid", "correct the settings"),
    ];
    for (reason, status, message, class, remedy) in cases {
        let error = refused(status, &answer(reason, &message, status));
        assert_eq!(error.class(), class, "{reason}: {message}");
        let text = error.to_string();
        assert!(text.contains(reason) && text.contains(remedy), "{remedy} in {text}");
    }
}

#[test]
fn a_detail_is_more_telling_than_a_reason() {
    let mut body = answer("quotaExceeded", "Quota exceeded", 403);
    body["error"]["details"] = json!([{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED"}]);
    assert_eq!(refused(403, &body).class(), "throttled");
    body["error"]["details"] = json!([{"reason": "somethingElse"}, 7, {"reason": 8}]);
    assert_eq!(refused(403, &body).class(), "quota");
    assert_eq!(refused(502, &Value::Null).class(), "transient");
}

#[test]
fn an_operation_has_many_errors_and_the_telling_one_counts() {
    let operation = |codes: &[&str]| {
        let errors: Vec<_> =
            codes.iter().map(|code| json!({"code": code, "message": "The cause."})).collect();
        json!({"status": "DONE", "error": {"errors": errors}, "httpErrorStatusCode": 503})
    };
    for (codes, class) in [
        (&["ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"][..], "capacity"),
        (&["ZONE_RESOURCE_POOL_EXHAUSTED"], "capacity"),
        (&["RESOURCE_POOL_EXHAUSTED"], "capacity"),
        (&["STOCKOUT"], "capacity"),
        (&["badRequest", "VM_MIN_COUNT_NOT_REACHED"], "capacity"),
        (&["QUOTA_EXCEEDED"], "quota"),
        (&["IP_SPACE_EXHAUSTED_WITH_DETAILS"], "quota"),
        (&["RESOURCE_IN_USE_BY_ANOTHER_RESOURCE"], "transient"),
        (&["RESOURCE_NOT_READY"], "transient"),
        (&["INTERNAL_ERROR"], "transient"),
        (&["PERMISSIONS_ERROR"], "auth"),
        (&["SERVICE_ACCOUNT_ACCESS_DENIED"], "auth"),
        (&["RESOURCE_OPERATION_RATE_EXCEEDED"], "throttled"),
        (&["UNSUPPORTED_OPERATION"], "invalid"),
    ] {
        let said = said_of_operation(&operation(codes)).unwrap();
        let meaning = REFUSALS.meaning(&said.code, &said.message, 400);
        assert_eq!(meaning.error("", None, String::new()).class(), class, "{codes:?}");
        assert_eq!(said.message, "The cause.", "one message for the same words");
    }
    assert_eq!(said_of_operation(&json!({"status": "DONE"})), None);
    assert_eq!(said_of_operation(&json!({"error": {"errors": [{}]}})).unwrap().code, "UNKNOWN");
    assert_eq!(status_of_operation(&operation(&[])), 503);
}

#[test]
fn a_message_that_quotes_user_data_is_cut() {
    for field in [
        "resource.metadata.items[0].value",
        "resource.metadata",
        "instanceProperties.metadata",
        "resource.Metadata",
    ] {
        let message = format!("Invalid value for field '{field}': 'the ticket'. The value is too long.");
        let text = refused(400, &answer("invalid", &message, 400)).to_string();
        let before = field.split_once('.').unwrap().0;
        assert!(!text.contains("ticket") && text.contains(before), "{text}");
        let operation = json!({"error": {"errors": [{"code": "INVALID_FIELD_VALUE", "message": message}]}});
        assert!(!said_of_operation(&operation).unwrap().message.contains("ticket"));
    }
}
