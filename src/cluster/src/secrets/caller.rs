//! Which node asks: by its token, and by its certificate.

use std::{
    collections::HashMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use kube::{Api, Client, api::PostParams};
use parking_lot::Mutex;
use peerpod_kube::client::{self, within};
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

/// What the API server adds to a user whose token is bound to a pod.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const NODE_UID: &str = "authentication.kubernetes.io/node-uid";
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
/// In a node's certificate, before the node's name.
const URI: &str = "peerpod:node:";

/// So long an answer of the API server counts, and so long a token that was taken back still works.
const REMEMBER: Duration = Duration::from_secs(60);
/// The same for one that was refused.
const REMEMBER_REFUSED: Duration = Duration::from_secs(10);
/// Tokens that are remembered.
const MOST: usize = 8192;
/// Reviews under way at once.
const AT_ONCE: usize = 32;
/// A token of the API server has one to two kilobytes.
pub(super) const LONGEST_TOKEN: usize = 16 * 1024;

/// A node that a token was issued to, or a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    /// Tells it from a later node of that name.
    pub(super) uid: String,
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Node {
    /// As it stands in its certificate.
    pub(super) fn uri(&self) -> String {
        format!("{URI}{}:{}", self.name, self.uid)
    }

    /// The node of a certificate that was proved. Its dates, too, were looked at then.
    pub(super) fn of_certificate(certificate: &CertificateDer<'_>) -> Option<Node> {
        let end = webpki::EndEntityCert::try_from(certificate).ok()?;
        let mut names = end.valid_uri_names().filter_map(|uri| uri.strip_prefix(URI));
        // Neither a node's name nor a uid has a colon.
        let (name, uid) = names.next()?.split_once(':')?;
        names.next().is_none().then(|| Node { name: name.to_owned(), uid: uid.to_owned() })
    }
}

/// Why it is not known who asks.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Unknown {
    /// The token is not one that we take.
    #[error("{0}")]
    Refused(String),
    /// The API server was not to be asked.
    #[error("{0}")]
    Unasked(Arc<client::Error>),
}

type Known = (Instant, Result<Node, String>);

/// Asks the API server about tokens, and remembers its answers for a moment.
pub(super) struct Callers {
    reviews: Api<TokenReview>,
    audience: String,
    /// `system:serviceaccount:<namespace>:<name>`.
    user: String,
    places: Semaphore,
    /// By the token's SHA-256.
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

    /// The node that the token was issued to.
    pub(super) async fn node(&self, token: &str) -> Result<Node, Unknown> {
        let digest: [u8; 32] = Sha256::digest(token).into();
        if let Some(known) = self.remembered(&digest) {
            return known.map_err(Unknown::Refused);
        }
        // What is no token costs the API server nothing.
        let Some(ends) = ends(token) else {
            return Err(Unknown::Refused("no token of a service account".to_owned()));
        };
        // The API server would take it for a minute longer, for clocks that differ.
        let left = ends.duration_since(SystemTime::now()).unwrap_or_default();
        if left.is_zero() {
            return Err(Unknown::Refused("the token has ended".to_owned()));
        }
        let status = self.review(token).await.map_err(|why| Unknown::Unasked(Arc::new(why)))?;
        let found = self.read(status);
        let remember = if found.is_ok() { REMEMBER.min(left) } else { REMEMBER_REFUSED };
        self.remember(digest, (Instant::now() + remember, found.clone()));
        found.map_err(Unknown::Refused)
    }

    async fn review(&self, token: &str) -> Result<TokenReviewStatus, client::Error> {
        // Fails only for a closed semaphore, and nobody closes it.
        let _place = self.places.acquire().await;
        let spec =
            TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![self.audience.clone()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let answer =
            within("review a node's token", self.reviews.create(&PostParams::default(), &review)).await?;
        Ok(answer.status.unwrap_or_default())
    }

    fn read(&self, status: TokenReviewStatus) -> Result<Node, String> {
        if status.authenticated != Some(true) {
            // The API server's reason for a token may be long; the rest is ours to say.
            let why: String = status.error.unwrap_or_default().chars().take(300).collect();
            return Err(format!(
                "the API server does not know the token, or it is not for the audience {}{}{why}",
                self.audience,
                if why.is_empty() { "" } else { ": " }
            ));
        }
        // A server that knows no audiences would take any token.
        if !status.audiences.unwrap_or_default().contains(&self.audience) {
            return Err(format!("the token is not for the audience {}", self.audience));
        }
        let UserInfo { username, extra, .. } = status.user.unwrap_or_default();
        if username.as_deref() != Some(&self.user) {
            return Err(format!(
                "the token is {}'s, and only {} may ask",
                username.unwrap_or_default(),
                self.user
            ));
        }
        let extra = extra.unwrap_or_default();
        let one = |key: &str| match extra.get(key).map(Vec::as_slice) {
            Some([only]) if !only.is_empty() => Some(only.clone()),
            _ => None,
        };
        let (Some(name), Some(uid), Some(_)) = (one(NODE_NAME), one(NODE_UID), one(POD_NAME)) else {
            return Err("the token does not say which pod on which node it is for; it must be a pod's projected token, of a \
                        cluster that knows ServiceAccountTokenPodNodeInfo (Kubernetes 1.30)"
                .to_owned());
        };
        Ok(Node { name, uid })
    }

    fn remembered(&self, digest: &[u8; 32]) -> Option<Result<Node, String>> {
        let known = self.known.lock();
        known.get(digest).filter(|(until, _)| *until > Instant::now()).map(|(_, found)| found.clone())
    }

    fn remember(&self, digest: [u8; 32], found: Known) {
        let mut known = self.known.lock();
        if known.len() >= MOST {
            let now = Instant::now();
            known.retain(|_, (until, _)| *until > now);
            // Still full: of tokens that hold, a quarter is asked about again.
            if known.len() >= MOST {
                let mut count = 0;
                known.retain(|_, _| {
                    count += 1;
                    count % 4 != 0
                });
            }
        }
        known.insert(digest, found);
    }
}

/// When the token ends, as it says itself; `None`: it is no token. Not believed before the API server proved it.
fn ends(token: &str) -> Option<SystemTime> {
    #[derive(serde::Deserialize)]
    struct Claims {
        exp: u64,
    }
    let mut parts = token.split('.');
    let (_, payload, _) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let claims: Claims = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(claims.exp))
}
