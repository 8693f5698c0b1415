//! Answers the calls: runs the checks in a fixed order before it gives anything. Logs one line per answered call, which
//! the rate of a node bounds, and a bounded number of lines about refused calls.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use hyper::body::Incoming;
use hyper::header::AUTHORIZATION;
use hyper::{Method, Request, StatusCode};
use kube::Client;
use peerpod_common::caller_limits::{CallerLimits, Rate};
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::{info, warn};

use super::caller::{Callers, LONGEST_TOKEN};
use super::metrics::{SecretsCall, SecretsMetrics, SecretsOutcome};
use super::pod;
use super::refusal::{No, failed, no, unknown};
use crate::serve::{self, Reply, Responder, Room, reply};

/// A node asks for a pod's pull secrets: [`PullSecretRequest`] with its token.
const PULL_SECRETS: &str = "/v1/pull-secrets";
/// Limit of a request's body in bytes.
const MOST_BODY: usize = 16 * 1024;
/// Deadline of one answer, including the API server's part.
const WITHIN: Duration = Duration::from_secs(10);
/// Limit of answers in flight: each may hold some megabytes.
const AT_ONCE: usize = 64;
/// Rate per node. A node asks once per pod, and starts pods in bursts.
const NODE: Rate = Rate { burst: 250.0, per_second: 25.0, at_once: 16 };
/// Rate of token reviews per address. A call that the service can answer alone does not count, because other programs
/// may share a node's address.
const ADDRESS: Rate = Rate { burst: 100.0, per_second: 10.0, at_once: 16 };

/// Log lines about refused calls per address. The metric counts all calls.
const REFUSALS: Rate = Rate { burst: 20.0, per_second: 0.1, at_once: 16 };

/// Pod that a node asks about.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PullSecretRequest {
    pub(super) namespace: String,
    pub(super) name: String,
    /// Empty: any pod of this name on the node.
    #[serde(default)]
    pub(super) uid: String,
}

/// Caller and object of a request as far as they are known, for the log.
#[derive(Default)]
struct Audit {
    node: Option<String>,
    pod: Option<String>,
    secrets: Option<usize>,
    notes: usize,
}

/// Answers the calls.
pub(super) struct Desk {
    client: Client,
    classes: Vec<String>,
    callers: Callers,
    metrics: SecretsMetrics,
    nodes: CallerLimits<String>,
    addresses: CallerLimits<IpAddr>,
    /// Log lines about refused calls, of each address.
    refusals: CallerLimits<IpAddr>,
    places: Semaphore,
}

impl Desk {
    pub(super) fn new(
        client: Client,
        classes: Vec<String>,
        callers: Callers,
        metrics: SecretsMetrics,
    ) -> Desk {
        let (nodes, addresses) = (CallerLimits::new(NODE), CallerLimits::new(ADDRESS));
        let (refusals, places) = (CallerLimits::new(REFUSALS), Semaphore::new(AT_ONCE));
        Desk { client, classes, callers, metrics, nodes, addresses, refusals, places }
    }

    async fn call(
        &self,
        call: SecretsCall,
        request: Request<Incoming>,
        peer: IpAddr,
        audit: &mut Audit,
    ) -> Result<Vec<u8>, No> {
        if call == SecretsCall::Other {
            return Err(no(
                StatusCode::NOT_FOUND,
                SecretsOutcome::Malformed,
                format!("post to {PULL_SECRETS}"),
            ));
        }
        let limited = || {
            no(StatusCode::TOO_MANY_REQUESTS, SecretsOutcome::Limited, "too many requests; ask again later")
        };
        let Ok(_place) = self.places.acquire().await else { return Err(limited()) };
        let header = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = header.and_then(|value| value.strip_prefix("Bearer "));
        let token = token.filter(|token| token.len() <= LONGEST_TOKEN);
        let token = token.ok_or_else(|| unknown("no bearer token in Authorization"))?;
        let node = match self.callers.known(token) {
            Some(known) => known.map_err(unknown)?,
            None => {
                // Other programs at its address cannot hold off a node whose token was verified before.
                let _turn = if self.callers.verified_before(token) {
                    None
                } else {
                    Some(self.addresses.enter(&peer, Instant::now()).ok_or_else(limited)?)
                };
                timeout(WITHIN, self.callers.ask(token)).await.unwrap_or_else(|_| Err(late()))?
            }
        };
        audit.node = Some(node.clone());
        let _turn = self.nodes.enter(&node, Instant::now()).ok_or_else(limited)?;
        self.pull_secrets(request, &node, audit).await
    }

    async fn pull_secrets(
        &self,
        request: Request<Incoming>,
        node: &str,
        audit: &mut Audit,
    ) -> Result<Vec<u8>, No> {
        let wanted = read(request).await?;
        for (field, value) in [("namespace", &wanted.namespace), ("name", &wanted.name)] {
            // The values become a part of the API server's path.
            let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
            if value.is_empty() || value.len() > 253 || !value.chars().all(good) {
                let said = format!("{field}: not a name of Kubernetes");
                return Err(no(StatusCode::BAD_REQUEST, SecretsOutcome::Malformed, said));
            }
        }
        audit.pod = Some(format!("{}/{}", wanted.namespace, wanted.name));
        let looked = async {
            let pod = pod::of_node(&self.client, node, &wanted, &self.classes).await?;
            pod::secrets(&self.client, pod).await
        };
        let found = timeout(WITHIN, looked).await.unwrap_or_else(|_| Err(late()))?;
        (audit.secrets, audit.notes) = (Some(found.secrets), found.notes.len());
        serde_json::to_vec(&found).map_err(|why| {
            no(StatusCode::INTERNAL_SERVER_ERROR, SecretsOutcome::Failed, format!("the answer: {why}"))
        })
    }
}

impl Responder for Desk {
    /// A node opens a connection for each request.
    const LIFETIME: Option<Duration> = Some(Duration::from_secs(60));

    async fn answer(&self, request: Request<Incoming>, peer: SocketAddr) -> Reply {
        let began = Instant::now();
        let call = match (request.method(), request.uri().path()) {
            (&Method::POST, PULL_SECRETS) => SecretsCall::PullSecrets,
            _ => SecretsCall::Other,
        };
        let mut audit = Audit::default();
        let result = self.call(call, request, peer.ip(), &mut audit).await;
        let outcome = result.as_ref().map_or_else(|no| no.outcome, |_| SecretsOutcome::Answered);
        let took = began.elapsed();
        self.metrics.ended(call, outcome, took);
        let (node, pod) = (audit.node.as_deref().unwrap_or("-"), audit.pod.as_deref().unwrap_or("-"));
        match result {
            Ok(body) => {
                info!(?call, node, pod, from = %peer, secrets = audit.secrets, notes = audit.notes, ?took, "answered");
                reply(StatusCode::OK, "application/json", body)
            }
            Err(No { status, said, why, .. }) => {
                if self.refusals.may_log(&peer.ip()) {
                    let why = why.unwrap_or(&said);
                    warn!(?call, node, pod, from = %peer, ?outcome, status = status.as_u16(), why, ?took, "not answered");
                }
                let body = serde_json::json!({"error": said});
                reply(status, "application/json", body.to_string())
            }
        }
    }

    fn handshake_failed(&self) {
        self.metrics.handshakes_failed.inc();
    }
}

async fn read(request: Request<Incoming>) -> Result<PullSecretRequest, No> {
    // No body is so long that it needs room.
    let body = serve::body(request, MOST_BODY, "a request", &Room::none()).await;
    let body = body.map_err(|(status, said)| no(status, SecretsOutcome::Malformed, said))?;
    serde_json::from_slice(&body.bytes)
        .map_err(|why| no(StatusCode::BAD_REQUEST, SecretsOutcome::Malformed, format!("the request: {why}")))
}

fn late() -> No {
    failed(format!("the API server did not answer within {WITHIN:?}"))
}
