//! Issues tokens: Entra ID for clients with a secret or a federated credential, and the metadata service for managed
//! identities.

use std::time::Duration;

use serde_json::json;

use super::{ASSERTION, CLIENT, SECRET, TENANT};
use crate::fake::{Answer, Refused, Request, World};

const LIFE: Duration = Duration::from_secs(3_599);

fn no(status: u16, error: &str, description: &str) -> Result<Answer, Box<Refused>> {
    let code: String = description.chars().filter(char::is_ascii_digit).collect();
    let body = json!({"error": error, "error_description": description, "error_codes": [code.parse::<u64>().ok()],
        "timestamp": "2026-01-01 00:00:00Z", "trace_id": "0", "correlation_id": "0"});
    Ok(Answer::json(status, &body))
}

/// `POST /<tenant>/oauth2/v2.0/token`.
pub(super) fn client_credentials(request: &Request, world: &mut World<'_>) -> Result<Answer, Box<Refused>> {
    let form = request.form();
    let get = |name: &str| form.get(name).map_or("", String::as_str);
    if request.parts().first().is_none_or(|tenant| tenant != TENANT) {
        return no(
            400,
            "invalid_request",
            "AADSTS90002: Tenant not found. Check to make sure you have the correct tenant ID.",
        );
    }
    if get("grant_type") != "client_credentials" {
        return no(
            400,
            "unsupported_grant_type",
            "AADSTS70003: The app requested an unsupported grant type.",
        );
    }
    if !get("scope").starts_with("https://management.") || !get("scope").ends_with("/.default") {
        return no(
            400,
            "invalid_scope",
            "AADSTS70011: The provided value for the input parameter 'scope' is not valid.",
        );
    }
    if get("client_id") != CLIENT {
        return no(400, "unauthorized_client", "AADSTS700016: Application was not found in the directory.");
    }
    let by_assertion =
        get("client_assertion_type") == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
    let is_known =
        if by_assertion { get("client_assertion") == ASSERTION } else { get("client_secret") == SECRET };
    if !is_known && by_assertion {
        return no(
            401,
            "invalid_client",
            "AADSTS700213: No matching federated identity record found for the presented assertion.",
        );
    }
    if !is_known {
        return no(401, "invalid_client", "AADSTS7000215: Invalid client secret provided.");
    }
    let token = world.tokens.issue(world.now, LIFE);
    let body = json!({"token_type": "Bearer", "expires_in": LIFE.as_secs(), "ext_expires_in": LIFE.as_secs(),
        "access_token": token});
    Ok(Answer::json(200, &body))
}

/// `GET /metadata/identity/oauth2/token`, of the metadata service.
pub(super) fn managed_identity(request: &Request, world: &mut World<'_>) -> Result<Answer, Box<Refused>> {
    if request.header("metadata") != "true" || !request.header("x-forwarded-for").is_empty() {
        return no(400, "invalid_request", "Required metadata header not specified");
    }
    if request.query("api-version").is_empty()
        || !request.query("resource").starts_with("https://management.")
    {
        return no(400, "invalid_request", "Required audience parameter not specified");
    }
    let client = request.query("client_id");
    if !client.is_empty() && client != CLIENT {
        return no(400, "invalid_request", "Identity not found");
    }
    let token = world.tokens.issue(world.now, LIFE);
    // All numbers are texts here.
    let body = json!({"access_token": token, "client_id": CLIENT, "expires_in": LIFE.as_secs().to_string(),
        "expires_on": "4102444800", "ext_expires_in": LIFE.as_secs().to_string(), "not_before": "0",
        "resource": request.query("resource"), "token_type": "Bearer"});
    Ok(Answer::json(200, &body))
}
