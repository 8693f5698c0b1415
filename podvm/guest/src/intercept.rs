//! Filters a shim's stream on its way to the kata-agent: everything passes unchanged, except the three requests that
//! the VM must change or notice.
//!
//! * `CreateContainer`: the shim strips the network namespace, so containers would run in the VM's own; the filter
//!   inserts the pod's network namespace. It restores a memory limit that the cluster's webhook removed from the
//!   container. It makes missing bind sources, below two folders only. In a VM with GPUs it marks a container that asks
//!   for them, and the kata-agent then provides them. A volume that the relay recognised is made ready; meanwhile the
//!   request waits (others pass), and then it names the mount for the kata-agent.
//! * `CreateSandbox`: `dns` is cleared, or the kata-agent would overwrite the VM's own resolv.conf with that of the
//!   pod.
//! * `DestroySandbox`: the flush begins.
//!
//! An oversize frame is answered and its body skipped: closing the connection would kill the pod. The filter inserts
//! its answers between the kata-agent's frames, never into one. The filter provides correctness, not security: the
//! kata-agent's policy, which comes after it, restricts the requests of a hostile host.

mod rewrite;

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use peerpod_link::endpoint::Filter;
use peerpod_link::frame::{
    FrameReader, FrameWriter, Header, MAX_PAYLOAD, PEEK_LIMIT, Peek, Piece, REQUEST, error_response, peek,
};
use tokio::sync::oneshot;

use self::rewrite::Rewritten;

/// gRPC's INVALID_ARGUMENT, with which ttrpc servers answer unreadable requests.
const INVALID_ARGUMENT: i32 = 3;
const SERVICE: &str = "grpc.AgentService";
/// gRPC's INTERNAL, with which the kata-agent answers a storage that cannot be mounted.
const INTERNAL: i32 = 13;
/// Limit of containers per connection that wait for their volumes.
const MAX_HELD: usize = 64;

/// Volume as one container wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The volume's id.
    pub id: String,
    /// The paths below its root that the container's mounts name; an empty one is the root.
    pub paths: Vec<PathBuf>,
}

/// Ready volume, as described to the kata-agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// The kata-agent's storage driver.
    pub driver: String,
    /// Source of the mount: `/dev/vdb`, `server:/export`.
    pub source: String,
    /// Name of the file system for mount(2); empty: the raw device.
    pub fstype: String,
    /// Mount options as for `-o` of mount(8).
    pub options: Vec<String>,
    /// The group of its files, and whether they are changed only when the root differs.
    pub fs_group: Option<(u32, bool)>,
    /// Major and minor number of a raw device.
    pub device: Option<(u32, u32)>,
    /// Whether no container may write.
    pub read_only: bool,
    /// The wanted paths, in their order, as they are on the volume, without symbolic links.
    pub paths: Vec<PathBuf>,
}

/// Directory of the containers' volume mounts, each in a folder of its id.
pub const VOLUMES: &str = "/run/peerpod/volumes";

/// Pending result of a preparation.
pub type Preparing = oneshot::Receiver<Result<Vec<Ready>, String>>;

/// Effects of the requests on the rest of the guest. Called from the link's task: must return quickly.
pub trait Notice: Send + Sync {
    /// Reports that a container is about to be made; from now on a dead kata-agent means dead containers.
    fn container(&self);
    /// Reports that the container binds this path of the VM, which may have to be made first.
    fn bind_source(&self, source: &str);
    /// Reports that the container may change the pod's network.
    fn network_admin(&self) {}
    /// Reports the time within which the shim wants this container.
    fn wanted_within(&self, _container: &str, _within: Duration) {}
    /// Returns the number of the VM's GPUs.
    fn gpus(&self) -> u32 {
        0
    }
    /// Prepares the volumes of a waiting container; the results are in the same order.
    fn prepare(&self, wanted: Vec<Use>) -> Preparing {
        let (answer, preparing) = oneshot::channel();
        drop(answer.send(Err(format!("{} volumes are wanted, and this guest has none", wanted.len()))));
        preparing
    }
    /// Reports that the shim ends the sandbox.
    fn sandbox_ends(&self);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    CreateContainer,
    CreateSandbox,
}

enum State {
    Between,
    /// Beginning of a request with a method that is not known yet.
    Peeking {
        head: Header,
        have: Vec<u8>,
    },
    Passing,
    /// Request that is rewritten once it is complete.
    Holding {
        head: Header,
        method: Method,
        have: Vec<u8>,
    },
    Skipping,
}

/// Container that waits for its volumes.
struct Held {
    head: Header,
    waiting: Box<rewrite::Waiting>,
    preparing: Preparing,
}

/// The [`Filter`] of one connection.
pub struct Intercept {
    notice: Arc<dyn Notice>,
    podns: String,
    requests: FrameReader,
    state: State,
    to_agent: FrameWriter,
    responses: FrameReader,
    to_peer: FrameWriter,
    held: Vec<Held>,
}

impl Intercept {
    /// Makes the filter. `podns` is the path of the network namespace that containers join.
    pub fn new(notice: Arc<dyn Notice>, podns: String) -> Intercept {
        Intercept {
            notice,
            podns,
            requests: FrameReader::new(),
            state: State::Between,
            to_agent: FrameWriter::default(),
            responses: FrameReader::new(),
            to_peer: FrameWriter::default(),
            held: Vec::new(),
        }
    }

    fn begin(&mut self, head: Header, peer: &mut BytesMut, agent: &mut BytesMut) {
        self.state = if head.length as usize > MAX_PAYLOAD {
            if head.kind == REQUEST {
                let text = format!(
                    "message length {} exceed maximum message size of {MAX_PAYLOAD}; \
                     the Rust shim copies a file in one message, so larger files in volumes cannot be copied",
                    head.length
                );
                self.answer(head.stream, INVALID_ARGUMENT, &text, peer);
            }
            State::Skipping
        } else if head.kind == REQUEST {
            State::Peeking { head, have: Vec::new() }
        } else {
            self.to_agent.begin(&head, agent);
            State::Passing
        };
    }

    fn body(&mut self, bytes: &[u8], peer: &mut BytesMut, agent: &mut BytesMut) {
        match &mut self.state {
            State::Passing => self.to_agent.body(bytes, agent),
            State::Holding { have, .. } => have.extend_from_slice(bytes),
            State::Peeking { .. } => self.inspect(bytes, peer, agent),
            State::Between | State::Skipping => {}
        }
    }

    /// Processes more bytes of a request with a method that is not known yet.
    fn inspect(&mut self, bytes: &[u8], peer: &mut BytesMut, agent: &mut BytesMut) {
        let State::Peeking { head, have } = &mut self.state else { return };
        let head = *head;
        // Nearly always the first piece suffices, and nothing is copied.
        let first = have.is_empty();
        if !first {
            have.extend_from_slice(bytes);
        }
        let known = if first { bytes } else { have.as_slice() };
        match peek(known) {
            Peek::Method { service: SERVICE, method: "CreateContainer" } => {
                self.state = State::Holding { head, method: Method::CreateContainer, have: known.to_vec() };
            }
            Peek::Method { service: SERVICE, method: "CreateSandbox" } => {
                self.state = State::Holding { head, method: Method::CreateSandbox, have: known.to_vec() };
            }
            Peek::Method { service, method } => {
                if service == SERVICE && method == "DestroySandbox" {
                    self.notice.sandbox_ends();
                }
                self.to_agent.begin(&head, agent);
                self.to_agent.body(known, agent);
                self.state = State::Passing;
            }
            Peek::More if known.len() < PEEK_LIMIT => {
                if first {
                    have.extend_from_slice(bytes);
                }
            }
            Peek::More | Peek::Unknown => self.refuse_unreadable(head, peer),
        }
    }

    fn end(&mut self, peer: &mut BytesMut, agent: &mut BytesMut) {
        match std::mem::replace(&mut self.state, State::Between) {
            State::Holding { head, method, have } => {
                let payload = match method {
                    Method::CreateContainer => rewrite::create_container(have, &self.podns, &*self.notice),
                    Method::CreateSandbox => rewrite::create_sandbox(have).map(Rewritten::Whole),
                };
                match payload {
                    Ok(Rewritten::Whole(payload)) => {
                        if method == Method::CreateContainer {
                            self.notice.container();
                        }
                        self.pass(head, &payload, agent);
                    }
                    Ok(Rewritten::Waits(waiting)) if self.held.len() < MAX_HELD => {
                        let preparing = self.notice.prepare(waiting.wanted.clone());
                        self.held.push(Held { head, waiting, preparing });
                    }
                    Ok(Rewritten::Waits(_)) => {
                        let text = format!(
                            "{MAX_HELD} containers already wait for their volumes, which is the limit"
                        );
                        self.answer(head.stream, INTERNAL, &text, peer);
                    }
                    Err(error) => {
                        self.answer(head.stream, INVALID_ARGUMENT, &format!("{method:?}: {error:#}"), peer);
                    }
                }
            }
            State::Peeking { head, .. } => self.refuse_unreadable(head, peer),
            State::Passing => self.to_agent.end(agent),
            State::Between | State::Skipping => {}
        }
        if let State::Skipping = self.state {
            self.state = State::Between;
        }
    }

    fn refuse_unreadable(&mut self, head: Header, peer: &mut BytesMut) {
        let text = "request without a readable service and method";
        self.answer(head.stream, INVALID_ARGUMENT, text, peer);
        self.state = State::Skipping;
    }

    /// Answers a request itself, as soon as the kata-agent's current frame is complete.
    fn answer(&mut self, stream: u32, code: i32, text: &str, peer: &mut BytesMut) {
        tracing::warn!(stream, reason = text, "refused a request to the agent");
        self.to_peer.whole(&error_response(stream, code, text), peer);
    }

    fn pass(&mut self, head: Header, payload: &[u8], agent: &mut BytesMut) {
        let length = payload.len() as u32; // at most MAX_PAYLOAD, rewrite checks it
        self.to_agent.begin(&Header { length, ..head }, agent);
        self.to_agent.body(payload, agent);
        self.to_agent.end(agent);
    }
}

impl Filter for Intercept {
    fn poll(&mut self, cx: &mut Context<'_>, peer: &mut BytesMut, agent: &mut BytesMut) -> bool {
        // Not into the middle of another request; its end causes another poll.
        if self.held.is_empty() || self.to_agent.is_under_way() {
            return false;
        }
        let mut said = false;
        let mut at = 0;
        while at < self.held.len() {
            let Poll::Ready(result) = Pin::new(&mut self.held[at].preparing).poll(cx) else {
                at += 1;
                continue;
            };
            said = true;
            let Held { head, waiting, .. } = self.held.remove(at);
            let result = result.unwrap_or_else(|_| Err("the guest program is ending".to_owned()));
            match result.and_then(|ready| waiting.with(&ready).map_err(|error| format!("{error:#}"))) {
                Ok(payload) => {
                    self.notice.container();
                    self.pass(head, &payload, agent);
                }
                Err(error) => self.answer(head.stream, INTERNAL, &error, peer),
            }
        }
        said
    }

    fn from_local(&mut self, input: &[u8], peer: &mut BytesMut, _local: &mut BytesMut) {
        let mut rest = input;
        while let Some(piece) = self.responses.next(&mut rest) {
            match piece {
                Piece::Head(head) => self.to_peer.begin(&head, peer),
                Piece::Body(bytes) => self.to_peer.body(bytes, peer),
                Piece::End => self.to_peer.end(peer),
            }
        }
    }

    fn from_peer(&mut self, input: &[u8], peer: &mut BytesMut, local: &mut BytesMut) {
        let mut rest = input;
        while let Some(piece) = self.requests.next(&mut rest) {
            match piece {
                Piece::Head(head) => self.begin(head, peer, local),
                Piece::Body(bytes) => self.body(bytes, peer, local),
                Piece::End => self.end(peer, local),
            }
        }
    }

    fn passes_from_local(&mut self, input: &[u8]) -> bool {
        self.responses.pass(input.len())
    }

    fn passes_from_peer(&mut self, input: &[u8]) -> bool {
        matches!(self.state, State::Passing) && self.requests.pass(input.len())
    }

    /// The relay was replaced, or it closed the stream: it has answered the waiting calls itself. The kata-agent's
    /// connection is closed, which ends the calls there.
    fn stream_lost(&mut self, _again: Option<&mut BytesMut>, _local: &mut BytesMut) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
