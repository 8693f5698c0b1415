//! Serves the EBS direct APIs between the provider and moto. Adds the rules that moto lacks: client tokens, checksums, and
//! snapshots that are pending until they are completed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::http::request::Parts;
use peerpod_test_clouds::Fault;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::form::Params;
use crate::proxy::{Call, Shared, lock};

/// Path below which the API is.
pub(crate) const PATH: &str = "/snapshots";
/// Size of a block in bytes.
const BLOCK: usize = 512 << 10;

/// Snapshots of an account that were started by this API.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    by_id: BTreeMap<String, Started>,
    /// Requests and answers by client token.
    tokens: BTreeMap<String, (Value, Answer)>,
}

#[derive(Debug, Default)]
struct Started {
    /// Digests of the written blocks, by number.
    blocks: BTreeMap<u32, Vec<u8>>,
    is_complete: bool,
}

impl Snapshots {
    /// Whether the snapshot was started and is not complete.
    pub(crate) fn is_pending(&self, id: &str) -> bool {
        self.by_id.get(id).is_some_and(|snapshot| !snapshot.is_complete)
    }
}

/// Status and JSON of an answer.
#[derive(Clone, Debug)]
struct Answer(u16, Value);

fn refusal(status: u16, code: &str, message: &str) -> Answer {
    Answer(status, json!({"__type": code, "Message": message}))
}

/// Parts of a request, by its path.
struct Request {
    action: &'static str,
    snapshot: String,
    block: u32,
    head: Parts,
    body: Bytes,
}

impl Request {
    fn new(head: Parts, body: Bytes) -> Request {
        let path: Vec<&str> = head.uri.path().trim_start_matches('/').split('/').collect();
        let (action, snapshot, block) = match path[..] {
            ["snapshots"] => ("StartSnapshot", "", 0),
            ["snapshots", "completion", id] => ("CompleteSnapshot", id, 0),
            ["snapshots", id, "blocks", number] => {
                ("PutSnapshotBlock", id, number.parse().unwrap_or(u32::MAX))
            }
            _ => ("", "", 0),
        };
        Request { action, snapshot: snapshot.to_owned(), block, head, body }
    }

    fn header(&self, name: &str) -> &str {
        self.head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

/// Answers a request, with faults.
pub(crate) async fn answer(
    shared: Arc<Shared>,
    head: Parts,
    body: Bytes,
) -> anyhow::Result<Response<Full<Bytes>>> {
    let request = Request::new(head, body);
    let params: Params = [("SnapshotId".to_owned(), request.snapshot.clone())].into();
    let index = {
        let mut calls = lock(&shared.calls);
        calls.push(Call { at: Instant::now(), action: request.action.to_owned(), params, status: 0 });
        calls.len() - 1
    };
    let fault = {
        let mut faults = lock(&shared.faults);
        match faults.denied.contains(request.action) {
            true => Some(Fault::Refuse {
                status: 403,
                code: "AccessDeniedException".to_owned(),
                message: "You do not have sufficient access.".to_owned(),
            }),
            false => faults.next(request.action),
        }
    };
    let Answer(status, json) = match &fault {
        Some(Fault::Refuse { status, code, message }) => refusal(*status, code, message),
        Some(Fault::Reset) => anyhow::bail!("reset"),
        _ => {
            let shared = Arc::clone(&shared);
            tokio::task::spawn_blocking(move || done(&shared, &request)).await??
        }
    };
    match fault {
        Some(Fault::LostAnswer) => anyhow::bail!("the answer is lost"),
        Some(Fault::Late(late)) => {
            shared.late.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(late).await;
            shared.late.fetch_sub(1, Ordering::Relaxed);
        }
        _ => {}
    }
    if let Some(call) = lock(&shared.calls).get_mut(index) {
        call.status = status;
    }
    let code = json["__type"].as_str().unwrap_or_default();
    let answer = Response::builder().status(status).header("content-type", "application/json");
    Ok(answer.header("x-amzn-errortype", code).body(Full::new(json.to_string().into()))?)
}

/// Applies the rules, and lets moto make snapshots and keep blocks.
fn done(shared: &Shared, request: &Request) -> anyhow::Result<Answer> {
    // One request at a time: the rules depend on those before.
    let mut snapshots = lock(&shared.snapshots);
    match request.action {
        "StartSnapshot" => {
            let wish: Value = serde_json::from_slice(&request.body)?;
            let token = wish["ClientToken"].as_str().unwrap_or_default().to_owned();
            if token.is_empty() || token.len() > 64 {
                return Ok(refusal(400, "ValidationException", "a client token has 1 to 64 characters"));
            }
            if let Some((before, answer)) = snapshots.tokens.get(&token) {
                let conflict = || refusal(409, "ConflictException", "the token had other parameters");
                return Ok(if *before == wish { answer.clone() } else { conflict() });
            }
            let mut answer = upstream(shared, request)?;
            let id = answer.1["SnapshotId"].as_str().unwrap_or_default().to_owned();
            answer.1["BlockSize"] = BLOCK.into();
            snapshots.by_id.insert(id, Started::default());
            snapshots.tokens.insert(token, (wish, answer.clone()));
            Ok(answer)
        }
        "PutSnapshotBlock" | "CompleteSnapshot" => {
            let Some(snapshot) = snapshots.by_id.get_mut(&request.snapshot) else {
                return Ok(refusal(404, "ResourceNotFoundException", "no such snapshot"));
            };
            if snapshot.is_complete {
                return Ok(refusal(400, "ValidationException", "the snapshot is not pending"));
            }
            if request.action == "CompleteSnapshot" {
                return complete(shared, request, snapshot);
            }
            let digest = Sha256::digest(&request.body).to_vec();
            if request.body.len() != BLOCK || request.header("x-amz-checksum") != STANDARD.encode(&digest) {
                return Ok(refusal(400, "ValidationException", "another size or checksum"));
            }
            snapshot.blocks.insert(request.block, digest);
            upstream(shared, request)
        }
        _ => Ok(refusal(404, "ResourceNotFoundException", "no such operation")),
    }
}

fn complete(shared: &Shared, request: &Request, snapshot: &mut Started) -> anyhow::Result<Answer> {
    let mut all = Sha256::new();
    snapshot.blocks.values().for_each(|digest| all.update(digest));
    let expected = [snapshot.blocks.len().to_string(), STANDARD.encode(all.finalize()), "LINEAR".to_owned()];
    let names = ["x-amz-changedblockscount", "x-amz-checksum", "x-amz-checksum-aggregation-method"];
    if names.map(|name| request.header(name).to_owned()) != expected {
        return Ok(refusal(400, "ValidationException", "another number of blocks, or another checksum"));
    }
    snapshot.is_complete = true;
    upstream(shared, request)
}

/// Sends the request to moto.
fn upstream(shared: &Shared, request: &Request) -> anyhow::Result<Answer> {
    let passes = |name: &str| name.starts_with("x-amz-") || name == "content-type";
    let headers = request.head.headers.iter().filter(|(name, _)| passes(name.as_str()));
    let headers: String =
        headers.filter_map(|(name, value)| Some(format!("{name}: {}\r\n", value.to_str().ok()?))).collect();
    let head = format!("{} {}", request.head.method, request.head.uri.path());
    let (status, body) =
        shared.moto.send(&shared.account, crate::REGION, "ebs", &head, &headers, &request.body)?;
    Ok(Answer(status, serde_json::from_str(&body).unwrap_or_default()))
}
