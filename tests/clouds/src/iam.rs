//! IBM Cloud's IAM: issues tokens for an API key, and for the token that a cluster projects for a trusted profile.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::json;

use crate::fake::{Answer, Request, World};

/// API key of the tests.
pub const API_KEY: &str = "not a secret";
/// Trusted profile that accepts [`CR_TOKEN`].
pub const PROFILE: &str = "Profile-11111111-2222-3333-4444-555555555555";
/// Token that a cluster projects.
pub const CR_TOKEN: &str = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJub2RlIn0.";
/// Account of the tests.
pub const ACCOUNT: &str = "0123456789abcdef0123456789abcdef";

const LIFE: Duration = Duration::from_secs(3_600);

/// `POST /identity/token`.
pub(crate) fn token(request: &Request, world: &mut World<'_>) -> Answer {
    let form = request.form();
    let get = |name: &str| form.get(name).map_or("", String::as_str);
    let refused = |code: &str, message: &str| {
        let body = json!({"errorCode": code, "errorMessage": message, "context": {"requestId": "0"}});
        Answer::json(400, &body)
    };
    match get("grant_type") {
        "urn:ibm:params:oauth:grant-type:apikey" => {
            if get("apikey") != API_KEY {
                return refused("BXNIM0415E", "Provided API key could not be found.");
            }
        }
        "urn:ibm:params:oauth:grant-type:cr-token" => {
            if get("cr_token") != CR_TOKEN {
                return refused("BXNIM0436E", "The compute resource token is not valid.");
            }
            if get("profile_id") != PROFILE {
                return refused("BXNIM0513E", "The trusted profile could not be found.");
            }
        }
        _ => return refused("BXNIM0101E", "The grant type is not supported."),
    }
    let token = signed(&world.tokens.issue(world.now, LIFE));
    let body = json!({"access_token": token, "refresh_token": "not_supported", "token_type": "Bearer",
        "expires_in": LIFE.as_secs(), "expiration": 4_102_444_800_u64, "scope": "ibm openid"});
    Answer::json(200, &body)
}

/// Returns a token in the form of IAM: a JWT whose claims name the account. Its signature is the token of [`World`].
fn signed(token: &str) -> String {
    let claims = json!({"iam_id": "iam-ServiceId-1", "account": {"valid": true, "bss": ACCOUNT}});
    let encode = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    format!("{}.{}.{token}", encode(&json!({"alg": "RS256"})), encode(&claims))
}
