//! Reads the operation of an accepted call, which explains a failure. May call Azure.

use peerpod_provider_cloud::ApiCall;
use peerpod_provider_rest::{Request, Said, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::client::Arm;

/// Returns code and message of an operation that failed; `None`: it did not fail, or Azure does not tell. The object's
/// own state decides, so no error of this look matters.
pub(crate) async fn failure(
    arm: &Arm,
    operation: Option<&str>,
    (owner, what): (&str, &str),
    until: Instant,
) -> Option<Said> {
    // The link carries our token, so it must lead to the endpoint.
    let url = arm.rest().hosts().follow(operation?).ok()?;
    match arm.call(ApiCall::new("Operations_Get", owner, what).until(until), &Request::get(url)).await {
        Ok(answer) => said(&answer.json()),
        Err(failure) => {
            tracing::debug!("the state of an operation is not known: {}", failure.error);
            None
        }
    }
}

/// Reads the error of a failed operation.
fn said(operation: &Value) -> Option<Said> {
    read::text(operation, "/status").filter(|status| *status == "Failed" || *status == "Canceled")?;
    let text = |pointer: &str| read::text(operation, pointer).unwrap_or_default().to_owned();
    let said = Said { code: text("/error/code"), message: text("/error/message") };
    (!said.code.is_empty()).then_some(said)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_failed_operation_has_code_and_message() {
        let failed = json!({"status": "Failed", "error": {"code": "AllocationFailed", "message": "none"}});
        assert_eq!(said(&failed), Some(Said { code: "AllocationFailed".into(), message: "none".into() }));
        for other in [json!({"status": "InProgress"}), json!({"status": "Failed"}), json!(5)] {
            assert_eq!(said(&other), None, "{other}");
        }
    }
}
