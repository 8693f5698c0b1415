//! Makes every call to the API server: applies its deadline, counts it, and tracks whether the API server is reachable.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use parking_lot::Mutex;
use peerpod_base::admin::Ready;
use peerpod_common::backoff::Backoff;
use peerpod_kube::client::{Error, within};
use tokio::time::Instant;
use tracing::{info, warn};

use crate::metrics::Metrics;

/// Name of the API server in the warnings of `/readyz`.
const WARNING: &str = "api-server";
/// Pauses between two attempts while the API server is unreachable.
pub(super) const AWAY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));

/// Client of the API server. Clones share one state.
#[derive(Clone)]
pub(super) struct Calls {
    pub(super) client: Client,
    metrics: Metrics,
    ready: Ready,
    /// Time since which the API server is unreachable, with the first cause.
    away: Arc<Mutex<Option<(Instant, String)>>>,
    /// Last outage, until it is taken.
    outage: Arc<Mutex<Option<Outage>>>,
}

/// Outage of the API server that is over.
pub(super) struct Outage {
    pub(super) lasted: Duration,
    pub(super) why: String,
}

impl Calls {
    pub(super) fn new(client: Client, metrics: Metrics, ready: Ready) -> Calls {
        Calls { client, metrics, ready, away: Arc::default(), outage: Arc::default() }
    }

    /// Makes one call. `call` is its kind in the metric, `what` its description in errors.
    pub(super) async fn call<T>(
        &self,
        call: &'static str,
        what: impl Into<String>,
        future: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Error> {
        let result = within(what, future).await;
        self.metrics.cluster.call(call, outcome(&result));
        match &result {
            Err(error) if is_away(error) => self.lost(&error.to_string()),
            Ok(_) | Err(_) => self.met(),
        }
        result
    }

    /// Whether the last call found the API server unreachable.
    pub(super) fn is_away(&self) -> bool {
        self.away.lock().is_some()
    }

    /// Records that the API server did not answer, or not as a working one does.
    pub(super) fn lost(&self, why: &str) {
        let mut away = self.away.lock();
        let (since, _) = away.get_or_insert_with(|| {
            warn!(error = why, "the API server is away; pods go on, and pending updates follow later");
            (Instant::now(), why.to_owned())
        });
        // Counted back from now, by the wall clock.
        let since = Timestamp::now().as_second().saturating_sub_unsigned(since.elapsed().as_secs());
        let since = Timestamp::from_second(since).unwrap_or_default();
        let text = format!(
            "away since {since}; pods go on, and pending updates follow later; check the node's path to the API server: {why}"
        );
        self.ready.warn(WARNING, &text);
    }

    pub(super) fn met(&self) {
        if let Some((since, why)) = self.away.lock().take() {
            let lasted = since.elapsed();
            info!(away_for = ?lasted, "the API server is back");
            self.ready.settled(WARNING);
            *self.outage.lock() = Some(Outage { lasted, why });
        }
    }

    /// Returns the last outage, once.
    pub(super) fn take_outage(&self) -> Option<Outage> {
        self.outage.lock().take()
    }
}

/// Whether the error concerns the server and not the request: the next call would fail like this one.
pub(super) fn is_away(error: &Error) -> bool {
    match error {
        Error::Late { .. } => true,
        Error::Config(_) => false,
        Error::Api { error: kube::Error::Api(status), .. } => {
            status.code >= 500 || status.code == 429 || status.code == 401
        }
        Error::Api { error, .. } => !matches!(
            error,
            kube::Error::SerdeError(_) | kube::Error::BuildRequest(_) | kube::Error::FromUtf8(_)
        ),
    }
}

/// Makes the error of a value that cannot be encoded for the API server.
pub(super) fn unencodable(what: &str, error: serde_json::Error) -> Error {
    Error::Api { what: what.to_owned(), error: kube::Error::SerdeError(error) }
}

fn outcome<T>(result: &Result<T, Error>) -> &'static str {
    match result {
        Ok(_) => "ok",
        Err(error) if error.is_not_found() => "not_found",
        Err(error) if error.is_conflict() => "conflict",
        Err(error) if is_away(error) => "away",
        Err(_) => "refused",
    }
}
