//! Identifies the node that asks, by its token.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use peerpod_kube::client::{self, within};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use super::refusal::{No, unknown};

/// Keys that the API server adds to a user with a token bound to a pod.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const NODE_UID: &str = "authentication.kubernetes.io/node-uid";
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";

/// Time for which an answer of the API server counts, and so for which a revoked token still works.
const REMEMBER: Duration = Duration::from_secs(60);
/// The same for a refusal.
const REMEMBER_REFUSED: Duration = Duration::from_secs(10);
/// Limit of remembered tokens.
const MOST: usize = 8192;
/// Limit of reviews in flight.
const AT_ONCE: usize = 32;
/// Longest token in bytes. A token of the API server has one to two kilobytes.
pub(super) const LONGEST_TOKEN: usize = 16 * 1024;

/// End of the answer, and the node's name or the reason for a refusal.
type Known = (Instant, Result<String, String>);

/// Asks the API server about tokens and caches its answers for a short time.
pub(super) struct Callers {
    reviews: Api<TokenReview>,
    audience: String,
    /// `system:serviceaccount:<namespace>:<name>`.
    user: String,
    places: Semaphore,
    /// Keyed by the token's SHA-256.
    known: Mutex<HashMap<[u8; 32], Known>>,
}

impl Callers {
    pub(super) fn new(client: Client, audience: String, account: &str) -> Callers {
        Callers {
            reviews: Api::all(client),
            audience,
            user: format!("system:serviceaccount:{account}"),
            places: Semaphore::new(AT_ONCE),
            known: Mutex::default(),
        }
    }

    /// Returns the name of the node that the token was issued to, or the reason for a refusal; `None`: only the API
    /// server knows.
    pub(super) fn known(&self, token: &str) -> Option<Result<String, String>> {
        let known = self.known.lock().get(&digest(token)).cloned();
        let remembered = known.filter(|(until, _)| *until > Instant::now()).map(|(_, found)| found);
        remembered.or_else(|| left(token).err().map(|why| Err(why.to_owned())))
    }

    /// Asks the API server for the name of the node that the token was issued to.
    pub(super) async fn ask(&self, token: &str) -> Result<String, No> {
        let left = left(token).map_err(unknown)?;
        let found = self.read(self.review(token).await?);
        let remember = if found.is_ok() { REMEMBER.min(left) } else { REMEMBER_REFUSED };
        self.remember(token, (Instant::now() + remember, found.clone()));
        found.map_err(unknown)
    }

    async fn review(&self, token: &str) -> Result<TokenReviewStatus, client::Error> {
        // Fails only when the semaphore is closed, which never happens.
        let _place = self.places.acquire().await;
        let spec =
            TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![self.audience.clone()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let answer =
            within("review a node's token", self.reviews.create(&PostParams::default(), &review)).await?;
        Ok(answer.status.unwrap_or_default())
    }

    fn read(&self, status: TokenReviewStatus) -> Result<String, String> {
        if status.authenticated != Some(true) {
            // The API server's reason may be long; it is cut.
            let why: String = status.error.unwrap_or_default().chars().take(300).collect();
            return Err(format!(
                "the API server does not know the token, or it is not for the audience {}{}{why}",
                self.audience,
                if why.is_empty() { "" } else { ": " }
            ));
        }
        // A server without support for audiences would accept any token.
        if !status.audiences.unwrap_or_default().contains(&self.audience) {
            return Err(format!("the token is not for the audience {}", self.audience));
        }
        let UserInfo { username, extra, .. } = status.user.unwrap_or_default();
        if username.as_deref() != Some(&self.user) {
            return Err(format!(
                "the token belongs to {}, and only {} may ask",
                username.unwrap_or_default(),
                self.user
            ));
        }
        let extra = extra.unwrap_or_default();
        let one = |key: &str| match extra.get(key).map(Vec::as_slice) {
            Some([only]) if !only.is_empty() => Some(only.clone()),
            _ => None,
        };
        let (Some(name), Some(_), Some(_)) = (one(NODE_NAME), one(NODE_UID), one(POD_NAME)) else {
            return Err("the token names no pod and node; it must be a pod's projected token, of a cluster \
                 that has ServiceAccountTokenPodNodeInfo (Kubernetes 1.30)"
                .to_owned());
        };
        Ok(name)
    }

    /// Whether the last answer of the API server named a node; it may have ended.
    pub(super) fn verified_before(&self, token: &str) -> bool {
        self.known.lock().get(&digest(token)).is_some_and(|(_, found)| found.is_ok())
    }

    fn remember(&self, token: &str, found: Known) {
        let mut known = self.known.lock();
        if known.len() >= MOST {
            let now = Instant::now();
            known.retain(|_, (until, _)| *until > now);
            // Still full of valid tokens: a quarter of them is dropped and reviewed again.
            if known.len() >= MOST {
                let mut count = 0;
                known.retain(|_, _| {
                    count += 1;
                    count % 4 != 0
                });
            }
        }
        known.insert(digest(token), found);
    }
}

fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token).into()
}

/// Returns the time until the end of the token, or the reason why no request to the API server is needed.
fn left(token: &str) -> Result<Duration, &'static str> {
    let ends = ends(token).ok_or("no token of a service account")?;
    // The API server would accept the token for a minute longer, because clocks differ.
    ends.duration_since(SystemTime::now()).ok().filter(|left| !left.is_zero()).ok_or("the token has ended")
}

/// Returns the end that the token itself claims; `None`: it is no token. The claim counts only after the API server has
/// verified the token.
fn ends(token: &str) -> Option<SystemTime> {
    #[derive(serde::Deserialize)]
    struct Claims {
        exp: u64,
    }
    let [_, payload, _] = token.split('.').collect::<Vec<_>>()[..] else { return None };
    let claims: Claims = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(claims.exp))
}
