//! Checks signatures, and issues temporary keys: to a Kubernetes service account (RRSA), and to the node's instance.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ring::{digest, hmac};
use serde_json::{Value, json};

use super::{Alibaba, answer};
use crate::clock::zulu;
use crate::fake::{Answer, Refused, Request, World, refused};

/// Id of the account's access key.
pub const KEY_ID: &str = "LTAI5tPeerpodTests000000";
/// Its secret.
pub const KEY_SECRET: &str = "secret of the tests";
/// Role of RRSA and of the node's instance.
pub const ROLE: &str = "acs:ram::1234567890123456:role/peerpod-node";
/// OIDC provider of the cluster.
pub const OIDC_PROVIDER: &str = "acs:ram::1234567890123456:oidc-provider/ack-rrsa-c0123456789";
/// Token of a Kubernetes service account that may assume the role.
pub const SUBJECT: &str = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJub2RlIn0.";

const LIFE: Duration = Duration::from_secs(3_600);
/// Token of the metadata service.
const PASS: &str = "metadata-token";
/// Characters that a canonical query keeps.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

fn keys(world: &mut World<'_>) -> Value {
    let token = world.tokens.issue(world.now, LIFE);
    let end = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + LIFE;
    json!({"AccessKeyId": format!("STS.{token}"), "AccessKeySecret": format!("secret of {token}"),
        "SecurityToken": token, "Expiration": zulu(end)})
}

/// `AssumeRoleWithOIDC`, which has no signature.
pub(super) fn assume(request: &Request, world: &mut World<'_>) -> Result<Answer, Box<Refused>> {
    let parameters = super::parameters(request);
    let get = |name| super::get(&parameters, name);
    if get("Version") != "2015-04-01" || get("RoleSessionName").is_empty() {
        return refused(400, "MissingParameter", "A required parameter is missing.");
    }
    if get("RoleArn") != ROLE {
        return refused(404, "EntityNotExist.Role", "The specified Role not exists.");
    }
    if get("OIDCProviderArn") != OIDC_PROVIDER {
        return refused(404, "EntityNotExist.OIDCProvider", "The specified OIDC provider not exists.");
    }
    if get("OIDCToken") != SUBJECT {
        return refused(400, "AuthenticationFail.OIDCToken.Invalid", "This JWT token is invalid.");
    }
    answer(json!({"Credentials": keys(world), "AssumedRoleUser": {"Arn": ROLE}}))
}

/// The metadata service, in its hardened mode.
pub(super) fn metadata(
    request: &Request,
    action: &str,
    world: &mut World<'_>,
) -> Result<Answer, Box<Refused>> {
    let has_pass = request.header("x-aliyun-ecs-metadata-token") == PASS;
    Ok(match action {
        "metadata.token" if request.method == "PUT" => {
            match request.header("x-aliyun-ecs-metadata-token-ttl-seconds").parse::<u32>() {
                Ok(1..=21_600) => Answer::text(200, PASS),
                _ => Answer::text(400, "Bad Request"),
            }
        }
        _ if request.method != "GET" || !has_pass => Answer::text(403, "Forbidden"),
        "metadata.roles" => Answer::text(200, "peerpod-node"),
        _ if !request.path.ends_with("/peerpod-node") => Answer::text(404, "Not Found"),
        _ => {
            let mut body = keys(world);
            body["Code"] = json!("Success");
            Answer::json(200, &body)
        }
    })
}

impl Alibaba {
    /// Refuses a request whose signature is wrong, or whose key has ended.
    pub(super) fn check_signature(
        &mut self,
        request: &Request,
        world: &World<'_>,
    ) -> Result<(), Box<Refused>> {
        let header = request.header("authorization");
        let Some((id, names, signature)) = parts(header) else {
            return refused(
                400,
                "IncompleteSignature",
                "The request signature does not conform to the standards.",
            );
        };
        let token = request.header("x-acs-security-token");
        let secret = match id.strip_prefix("STS.") {
            None if id == KEY_ID => KEY_SECRET.to_owned(),
            Some(issued) if issued != token => {
                return refused(
                    400,
                    "InvalidSecurityToken.MismatchWithAccessKey",
                    "The token is of another key.",
                );
            }
            Some(_) if !world.tokens.admits(&format!("Bearer {token}"), world.now) => {
                return refused(400, "InvalidSecurityToken.Expired", "Specified SecurityToken is expired.");
            }
            Some(issued) => format!("secret of {issued}"),
            None => return refused(404, "InvalidAccessKeyId.NotFound", "Specified access key is not found."),
        };
        for name in [
            "host",
            "x-acs-action",
            "x-acs-version",
            "x-acs-date",
            "x-acs-signature-nonce",
            "x-acs-content-sha256",
        ] {
            if !names.contains(&name) {
                return refused(400, "IncompleteSignature", format!("{name} is not signed."));
            }
        }
        let body = hex::encode(digest::digest(&digest::SHA256, &request.body));
        if request.header("x-acs-content-sha256") != body
            || signed(request, &names, &body, &secret) != signature
        {
            return refused(
                400,
                "SignatureDoesNotMatch",
                "Specified signature is not matched with our calculation.",
            );
        }
        if !self.nonces.insert(request.header("x-acs-signature-nonce").to_owned()) {
            return refused(400, "SignatureNonceUsed", "Specified signature nonce was used already.");
        }
        Ok(())
    }
}

/// Returns key, names of the signed headers and signature of an `Authorization`.
fn parts(header: &str) -> Option<(&str, Vec<&str>, &str)> {
    let rest = header.strip_prefix("ACS3-HMAC-SHA256 Credential=")?;
    let (id, rest) = rest.split_once(",SignedHeaders=")?;
    let (names, signature) = rest.split_once(",Signature=")?;
    Some((id, names.split(';').collect(), signature))
}

/// Returns the signature that a request must have.
fn signed(request: &Request, names: &[&str], body: &str, secret: &str) -> String {
    let encode = |text: &str| utf8_percent_encode(text, ENCODED).to_string();
    let query: Vec<String> =
        request.query.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
    let headers: String =
        names.iter().map(|name| format!("{name}:{}\n", request.header(name).trim())).collect();
    let canonical = format!(
        "{}\n{}\n{}\n{headers}\n{}\n{body}",
        request.method,
        request.path,
        query.join("&"),
        names.join(";")
    );
    let hash = hex::encode(digest::digest(&digest::SHA256, canonical.as_bytes()));
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    hex::encode(hmac::sign(&key, format!("ACS3-HMAC-SHA256\n{hash}").as_bytes()))
}
