//! Issues tokens: for a service account's signed assertion, for the node's metadata, for a federated identity.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::signature::{KeyPair, RSA_PKCS1_2048_8192_SHA256, RsaKeyPair, UnparsedPublicKey};
use serde_json::{Value, json};

use crate::body::{at, text};
use crate::fake::{Answer, Refused, Request, World};

/// Service account.
pub const EMAIL: &str = "pods@pods-1234.iam.gserviceaccount.com";
/// Token of a workload's identity, which the federation accepts.
pub const SUBJECT: &str = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJub2RlIn0.";
/// Audience of the federation.
const AUDIENCE: &str = concat!(
    "//iam.googleapis.com/projects/123456789012/locations/global",
    "/workloadIdentityPools/pods/providers/cluster"
);
/// The service account's key, for these tests alone.
const KEY: &str = include_str!("key.pem");

const LIFE: Duration = Duration::from_secs(3_599);

/// Returns a service account's key file that names this endpoint.
pub fn service_account(endpoint: &str) -> String {
    json!({"type": "service_account", "project_id": super::PROJECT, "private_key_id": "1", "private_key": KEY,
        "client_email": EMAIL, "client_id": "1", "token_uri": format!("{endpoint}/token"),
        "universe_domain": "googleapis.com"})
    .to_string()
}

/// Returns the file of a federated identity that names this endpoint and the file with the workload's token.
/// `impersonates`: the identity acts as the service account.
pub fn external_account(endpoint: &str, file: &str, impersonates: bool) -> String {
    let mut account = json!({"type": "external_account", "audience": AUDIENCE,
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "token_url": format!("{endpoint}/sts/v1/token"),
        "credential_source": {"file": file}, "universe_domain": "googleapis.com"});
    if impersonates {
        account["service_account_impersonation_url"] =
            json!(format!("{endpoint}/v1/projects/-/serviceAccounts/{EMAIL}:generateAccessToken"));
    }
    account.to_string()
}

fn no(error: &str, description: &str) -> Result<Answer, Box<Refused>> {
    Ok(Answer::json(400, &json!({"error": error, "error_description": description})))
}

fn is_scope(scopes: &str) -> bool {
    let wanted =
        ["https://www.googleapis.com/auth/compute", "https://www.googleapis.com/auth/cloud-platform"];
    scopes.split(' ').any(|scope| wanted.contains(&scope))
}

/// `POST /token` with an assertion.
pub(super) fn jwt(request: &Request, world: &mut World<'_>) -> Result<Answer, Box<Refused>> {
    let form = request.form();
    let get = |name: &str| form.get(name).map_or("", String::as_str);
    if get("grant_type") != "urn:ietf:params:oauth:grant-type:jwt-bearer" {
        return no("unsupported_grant_type", "Invalid grant_type");
    }
    let Some(claims) = verified(get("assertion")) else {
        return no("invalid_grant", "Invalid JWT Signature.");
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (from, until) = (number(&claims, "/iat"), number(&claims, "/exp"));
    if until <= now || from > now + 60 || until.saturating_sub(from) > 3_600 {
        return no(
            "invalid_grant",
            "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe.",
        );
    }
    if text(&claims, "/iss") != EMAIL {
        return no("invalid_grant", "Invalid grant: account not found");
    }
    if text(&claims, "/aud") != format!("{}/token", world.endpoint) || !is_scope(text(&claims, "/scope")) {
        return no("invalid_scope", "Invalid OAuth scope or ID token audience provided.");
    }
    let token = world.tokens.issue(world.now, LIFE);
    Ok(Answer::json(
        200,
        &json!({"access_token": token, "expires_in": LIFE.as_secs(), "token_type": "Bearer"}),
    ))
}

fn number(value: &Value, pointer: &str) -> u64 {
    at(value, pointer).as_u64().unwrap_or(0)
}

/// Returns the claims of a JWT that the service account's key signed.
fn verified(token: &str) -> Option<Value> {
    let (signed, signature) = token.rsplit_once('.')?;
    let (head, claims) = signed.split_once('.')?;
    let read =
        |part: &str| -> Option<Value> { serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok() };
    if text(&read(head)?, "/alg") != "RS256" {
        return None;
    }
    let der: String = KEY.lines().filter(|line| !line.starts_with("-----")).collect();
    let key = RsaKeyPair::from_pkcs8(&STANDARD.decode(der).ok()?).ok()?;
    let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, key.public_key().as_ref());
    key.verify(signed.as_bytes(), &URL_SAFE_NO_PAD.decode(signature).ok()?).ok()?;
    read(claims)
}

/// `GET …/service-accounts/default/token`, of the metadata service.
pub(super) fn metadata(request: &Request, world: &mut World<'_>) -> Result<Answer, Box<Refused>> {
    if request.header("metadata-flavor") != "Google" || !request.header("x-forwarded-for").is_empty() {
        return Ok(Answer::text(403, "Missing Metadata-Flavor:Google header."));
    }
    let token = world.tokens.issue(world.now, LIFE);
    let body = json!({"access_token": token, "expires_in": LIFE.as_secs(), "token_type": "Bearer"});
    Ok(Answer::json(200, &body).header("metadata-flavor", "Google"))
}

/// `POST /sts/v1/token`: exchanges a workload's token (RFC 8693).
pub(super) fn exchange(request: &Request, world: &mut World<'_>) -> Result<Answer, Box<Refused>> {
    let form = request.form();
    let get = |name: &str| form.get(name).map_or("", String::as_str);
    let is_exchange = get("grant_type") == "urn:ietf:params:oauth:grant-type:token-exchange"
        && get("requested_token_type") == "urn:ietf:params:oauth:token-type:access_token"
        && get("subject_token_type") == "urn:ietf:params:oauth:token-type:jwt";
    if !is_exchange || get("audience") != AUDIENCE || !is_scope(get("scope")) {
        return no("invalid_request", "Invalid value for audience, scope or a token type.");
    }
    if get("subject_token") != SUBJECT {
        return no("invalid_grant", "The given credential is rejected by the attribute condition.");
    }
    let token = world.tokens.issue(world.now, LIFE);
    Ok(Answer::json(
        200,
        &json!({"access_token": token, "expires_in": LIFE.as_secs(), "token_type": "Bearer",
        "issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}),
    ))
}

/// `POST …:generateAccessToken`, with a token of the federation.
pub(super) fn impersonate(request: &Request, world: &mut World<'_>) -> Result<Answer, Box<Refused>> {
    let body = request.json();
    let scopes: Vec<&str> = crate::body::list(&body, "/scope").iter().filter_map(Value::as_str).collect();
    let is_account = request.path.contains(EMAIL) || request.path.contains(&EMAIL.replace('@', "%40"));
    if !is_account || !is_scope(&scopes.join(" ")) {
        let message =
            "Permission 'iam.serviceAccounts.getAccessToken' denied on resource (or it may not exist).";
        return Ok(Answer::json(
            403,
            &json!({"error": {"code": 403, "message": message, "status": "PERMISSION_DENIED"}}),
        ));
    }
    let token = world.tokens.issue(world.now, LIFE);
    let end = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + LIFE;
    Ok(Answer::json(200, &json!({"accessToken": token, "expireTime": crate::clock::zulu(end)})))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::rand::SystemRandom;
    use ring::signature::RSA_PKCS1_SHA256;

    /// Returns a JWT with these claims, signed by the service account's key.
    fn signed(claims: &Value) -> String {
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", part(&json!({"alg": "RS256", "typ": "JWT"})), part(claims));
        let der: String = KEY.lines().filter(|line| !line.starts_with("-----")).collect();
        let key = RsaKeyPair::from_pkcs8(&STANDARD.decode(der).unwrap()).unwrap();
        let mut signature = vec![0; key.public().modulus_len()];
        key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), text.as_bytes(), &mut signature).unwrap();
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    #[test]
    fn an_assertion_counts_if_the_key_signed_it() {
        let token = signed(&json!({"iss": EMAIL}));
        assert_eq!(verified(&token), Some(json!({"iss": EMAIL})));
        let other = signed(&json!({"iss": "another"}));
        let (text, _) = token.rsplit_once('.').unwrap();
        let (_, signature) = other.rsplit_once('.').unwrap();
        assert_eq!(verified(&format!("{text}.{signature}")), None);
        assert_eq!(verified("a.b.c"), None);
    }
}
