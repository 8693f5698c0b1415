//! Keeps an access token and renews it before it ends. May touch the network, through the token's source.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::hash::Hasher;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex as Lock;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::http::Http;

/// Part of its life after which a token is renewed, less a random part of [`SPREAD`].
const RENEW: f64 = 0.8;
/// Largest random part, so that the processes of a cluster do not renew at one time.
const SPREAD: f64 = 0.05;
/// Time before its end at which a token is not used any more, at most a tenth of its life.
const MARGIN: Duration = Duration::from_secs(30);
/// Time after a failed renewal during which the old token is used without another one.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// Time after the renewal of a refused token during which no refused token is renewed: a newer one would be refused,
/// too.
const RENEWED: Duration = Duration::from_secs(10);

/// Access token, as its source issued it.
#[derive(Debug, Clone)]
pub struct Token {
    /// Text of the token.
    pub secret: Secret,
    /// Time for which it is valid.
    pub life: Duration,
}

/// Source of access tokens.
#[async_trait]
pub trait TokenSource: Send + Sync {
    /// Fetches a new token. Reads files of credentials again, because they change.
    ///
    /// # Errors
    /// [`Error::Auth`] when the source refuses, with its words and the remedy; [`Error::Transient`] without an answer.
    async fn fetch(&self, http: &Http) -> Result<Token, Error>;
}

#[async_trait]
impl TokenSource for Box<dyn TokenSource> {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        self.as_ref().fetch(http).await
    }
}

/// Token of one account, fetched at first use and renewed at four fifths of its life. Concurrent callers share one
/// fetch; while an old token is valid, they use it meanwhile, also after a failed renewal.
pub struct Tokens {
    source: Box<dyn TokenSource>,
    kept: Lock<Option<Kept>>,
    /// Held across a fetch.
    fetching: Mutex<Fetches>,
}

#[derive(Default)]
struct Fetches {
    /// Time of the last renewal of a refused token.
    renewed: Option<Instant>,
    /// Last failure, for the callers that waited for that fetch.
    failed: Option<(Instant, Error)>,
}

#[derive(Clone)]
struct Kept {
    secret: Secret,
    renew: Instant,
    ends: Instant,
}

impl Tokens {
    /// Returns a keeper without a token; fetches nothing.
    pub fn new(source: impl TokenSource + 'static) -> Tokens {
        Tokens { source: Box::new(source), kept: Lock::default(), fetching: Mutex::default() }
    }

    /// Returns a valid token.
    ///
    /// # Errors
    /// The error of the source, when there is no valid token.
    pub async fn get(&self, http: &Http) -> Result<Secret, Error> {
        let now = Instant::now();
        let old = self.kept.lock().clone().filter(|kept| now < kept.ends);
        let Some(old) = old else {
            let mut fetches = self.fetching.lock().await;
            // Another caller may have fetched it during the wait, or failed.
            let kept = self.kept.lock().clone().filter(|kept| Instant::now() < kept.ends);
            if let Some(kept) = kept {
                return Ok(kept.secret);
            }
            if let Some((_, error)) = fetches.failed.as_ref().filter(|(at, _)| *at > now) {
                return Err(error.clone());
            }
            let fetched = self.fetch(http).await;
            fetches.failed = fetched.as_ref().err().map(|error| (Instant::now(), error.clone()));
            return fetched;
        };
        if now < old.renew {
            return Ok(old.secret);
        }
        let Ok(_alone) = self.fetching.try_lock() else { return Ok(old.secret) };
        match self.fetch(http).await {
            Ok(new) => Ok(new),
            Err(error) => {
                tracing::warn!("the access token was not renewed and the old one is used: {error}");
                if let Some(kept) = self.kept.lock().as_mut() {
                    kept.renew = Instant::now() + AFTER_FAILURE;
                }
                Ok(old.secret)
            }
        }
    }

    /// Returns a token other than `refused`, which the cloud did not accept; `None`: another one was renewed for this
    /// reason a moment ago, so a newer one would not help.
    ///
    /// # Errors
    /// The error of the source.
    pub async fn renew(&self, http: &Http, refused: &Secret) -> Result<Option<Secret>, Error> {
        let mut fetches = self.fetching.lock().await;
        let kept = self.kept.lock().clone();
        if let Some(kept) = kept.filter(|kept| kept.secret.expose() != refused.expose()) {
            return Ok(Some(kept.secret));
        }
        let now = Instant::now();
        if fetches.renewed.is_some_and(|at| now.saturating_duration_since(at) < RENEWED) {
            return Ok(None);
        }
        fetches.renewed = Some(now);
        self.fetch(http).await.map(Some)
    }

    async fn fetch(&self, http: &Http) -> Result<Secret, Error> {
        let made = Instant::now();
        let Token { secret, life } = self.source.fetch(http).await?;
        let kept = Kept {
            secret: secret.clone(),
            renew: made + life.mul_f64(RENEW - SPREAD * chance()),
            ends: made + life.saturating_sub(MARGIN.min(life / 10)),
        };
        *self.kept.lock() = Some(kept);
        Ok(secret)
    }
}

/// Returns a random number from 0 to 1. The fresh keys of a hasher are the standard library's source of randomness.
fn chance() -> f64 {
    (RandomState::new().build_hasher().finish() % 1024) as f64 / 1024.0
}
