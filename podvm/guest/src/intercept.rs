//! Between a shim's stream and a connection to the kata-agent: everything passes as it comes, except the three
//! requests that the VM must change or notice.
//!
//! * `CreateContainer`: the shim strips the network namespace, so containers would run in the VM's own; the pod's is
//!   put in. A memory limit that the cluster's webhook took off the container is put back. Missing bind sources are
//!   made, below two folders only. In a VM with GPUs a container that asks for them is marked for the agent to give it them. A volume that the relay recognised is made ready, meanwhile the request waits
//!   (others pass), and then the agent is told what to mount.
//! * `CreateSandbox`: `dns` is cleared, or the agent would overwrite the VM's own resolv.conf with the pod's.
//! * `DestroySandbox`: the flush begins.
//!
//! An oversize frame is answered and its body skipped: closing the connection would kill the pod. Answers of ours are
//! put between the agent's frames, never into one. This is about correctness, not about trust: what a hostile host may
//! ask of the agent is decided by the agent's policy, after us.

mod rewrite;

use std::{
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::BytesMut;
use peerpod_link::{
    endpoint::Filter,
    frame::{
        FrameReader, FrameWriter, Header, MAX_PAYLOAD, PEEK_LIMIT, Peek, Piece, REQUEST, error_response, peek,
    },
};
use tokio::sync::oneshot;

use self::rewrite::Rewritten;

/// gRPC's INVALID_ARGUMENT, what ttrpc servers answer to what they cannot read.
const INVALID_ARGUMENT: i32 = 3;
const SERVICE: &str = "grpc.AgentService";
/// gRPC's INTERNAL, what the agent answers to a storage that cannot be mounted.
const INTERNAL: i32 = 13;
/// Containers of one connection that wait for their volumes.
const MAX_HELD: usize = 64;

/// A volume as one container wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The volume's id.
    pub id: String,
    /// The paths below its root that the container's mounts name; an empty one is the root.
    pub paths: Vec<PathBuf>,
}

/// What the agent is told of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// The agent's storage driver.
    pub driver: String,
    /// `/dev/vdb`, `server:/export`.
    pub source: String,
    /// As mount(2) calls it; empty: the raw device.
    pub fstype: String,
    /// Of mount(8)'s `-o`.
    pub options: Vec<String>,
    /// The group of its files and whether they are changed only when the root differs.
    pub fs_group: Option<(u32, bool)>,
    /// Major and minor number of a raw device.
    pub device: Option<(u32, u32)>,
    /// No container may write.
    pub read_only: bool,
    /// The wanted paths, in their order, as they are on the volume: without symbolic links.
    pub paths: Vec<PathBuf>,
}

/// Where containers' volumes are mounted, each in a folder of its id.
pub const VOLUMES: &str = "/run/peerpod/volumes";

/// What comes of a preparation.
pub type Preparing = oneshot::Receiver<Result<Vec<Ready>, String>>;

/// What the requests mean to the rest of the guest. Called from the link's task: must be quick.
pub trait Notice: Send + Sync {
    /// A container is about to be made; from now on a dead agent means dead containers.
    fn container(&self);
    /// The container binds this path of the VM, which may have to be made first.
    fn bind_source(&self, source: &str);
    /// The container may change the pod's network.
    fn network_admin(&self) {}
    /// How many GPUs the VM has.
    fn gpus(&self) -> u32 {
        0
    }
    /// A container that waits needs these volumes; the answers are in the same order.
    fn prepare(&self, wanted: Vec<Use>) -> Preparing {
        let (answer, preparing) = oneshot::channel();
        drop(answer.send(Err(format!("{} volumes are wanted where there are none", wanted.len()))));
        preparing
    }
    /// The shim ends the sandbox.
    fn sandbox_ends(&self);
}

/// The requests that do not just pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    CreateContainer,
    CreateSandbox,
}

enum State {
    Between,
    /// The beginning of a request, until its method is known.
    Peeking {
        head: Header,
        have: Vec<u8>,
    },
    Passing,
    /// A request that is rewritten once it is complete.
    Holding {
        head: Header,
        method: Method,
        have: Vec<u8>,
    },
    Skipping,
}

/// A container that waits for its volumes.
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
    /// `podns` is the path that containers join.
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
            State::Peeking { .. } => self.look(bytes, peer, agent),
            State::Between | State::Skipping => {}
        }
    }

    /// More bytes of a request whose method is not known yet.
    fn look(&mut self, bytes: &[u8], peer: &mut BytesMut, agent: &mut BytesMut) {
        let State::Peeking { head, have } = &mut self.state else { return };
        let head = *head;
        // Nearly always the first piece says it all and nothing is copied.
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
                        let text =
                            format!("{MAX_HELD} containers wait for their volumes, which is the bound");
                        self.answer(head.stream, INTERNAL, &text, peer);
                    }
                    Err(error) => {
                        self.answer(head.stream, INVALID_ARGUMENT, &format!("{method:?}: {error}"), peer);
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

    /// Answers a request ourselves, as soon as the agent's frame under way is complete.
    fn answer(&mut self, stream: u32, code: i32, text: &str, peer: &mut BytesMut) {
        tracing::warn!(stream, reason = text, "refused a request to the agent");
        self.to_peer.whole(&error_response(stream, code, text), peer);
    }

    /// A whole request, to the agent.
    fn pass(&mut self, head: Header, payload: &[u8], agent: &mut BytesMut) {
        let length = payload.len() as u32; // at most MAX_PAYLOAD, rewrite checks it
        self.to_agent.begin(&Header { length, ..head }, agent);
        self.to_agent.body(payload, agent);
        self.to_agent.end(agent);
    }
}

impl Filter for Intercept {
    fn poll(&mut self, cx: &mut Context<'_>, peer: &mut BytesMut, agent: &mut BytesMut) -> bool {
        // Not into the middle of another request; its end is a reason to be polled again.
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
            match result.and_then(|ready| waiting.with(&ready).map_err(|error| error.to_string())) {
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

    /// The relay is another one, or closed the stream: whoever waited for answers has them from the relay. The agent's
    /// connection is closed, which ends the calls there.
    fn stream_lost(&mut self, _local: &mut BytesMut) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
