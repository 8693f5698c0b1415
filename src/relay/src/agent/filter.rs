//! Filter between one connection of a shim to `agent.ttrpc` and its stream to the guest. It tracks the pending calls,
//! so that they are asked again or answered when the guest is gone, and enforces limits. Pure; bytes in, bytes out.
//!
//! Requests pass as they arrive, header first. Three kinds are read whole: CopyFile of a small file, in a pod with
//! volumes or after an unknown marker CreateContainer (see `volumes.rs`), and calls that may be asked again.
//!
//! A shim takes an error of WaitProcess as the end of the process, and never reads a stream again after an error. When
//! another guest program replaces the lost one, the filter therefore asks these calls again (`is_repeatable`). All
//! other pending calls get an error, because the agent may have carried them out.
//! A success of CloseStdin reaches the shim as an error, which containerd logs. After a success Kata's Go shim (to 4.1)
//! reads no more output of the process, which then waits for ever (kata-containers, issue 13640).
//!
//! Answers of the guest up to `HOLD` bytes are held and passed on whole; larger ones pass as they arrive. If the guest
//! is lost during a larger one, the connection is closed, because the missing bytes cannot be replaced. The relay's own
//! answers wait for the end of the present answer (`FrameWriter`).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use bytes::BytesMut;
use parking_lot::RwLock;
use peerpod_link::endpoint::Filter;
use peerpod_link::frame::{
    self, FrameReader, FrameWriter, HEADER_LEN, Header, MAX_PAYLOAD, PEEK_LIMIT, Peek, Piece,
};
use peerpod_link::ids::IdMap;
use peerpod_proto::intercept::CopyFileRequest;
use peerpod_proto::ttrpc_frame::{Request, Response};
use protobuf::Message;
use serde::{Deserialize, Serialize};

use crate::hypervisor::code;
use crate::metrics::Traffic;
pub use crate::volumes::Volume;
use crate::volumes::{self, Copies};

/// Largest answer that is held until it is whole, in bytes.
const HOLD: usize = 16 << 10;
/// Largest CopyFile that is read whole, in bytes; that of a marker has some 300.
const SMALL_COPY: usize = 4 << 10;
/// Largest request that is kept in order to be asked again, in bytes; one with two ids of 64 characters has some 200.
const SMALL_CALL: usize = 1 << 10;
const SERVICE: &str = "grpc.AgentService";
const HEALTH: &str = "grpc.Health";
const OOM_EVENT: &str = "GetOOMEvent";

/// State shared by all connections of one sandbox.
#[derive(Debug, Default)]
pub struct Shared {
    /// Calls that wait for the guest.
    pub(crate) pending: AtomicUsize,
    pub(crate) bytes_to_guest: AtomicU64,
    pub(crate) bytes_from_guest: AtomicU64,
    pub(crate) frames_to_guest: AtomicU64,
    pub(crate) frames_from_guest: AtomicU64,
    /// Dropped frames: unrequested ones of the guest, and refused ones of the shim.
    pub(crate) dropped: AtomicU64,
    pub(crate) totals: Traffic,
    /// For log records, as the pod.
    sandbox: String,
    /// `namespace/name`.
    pod: RwLock<String>,
    volumes: RwLock<Arc<[Volume]>>,
    /// Reason of the guest why the agent does not answer; empty: it runs.
    no_agent: RwLock<String>,
}

/// Maximum number of characters of the guest's reason in an error.
const MOST_REASON: usize = 400;

impl Shared {
    /// Keeps the guest's reason why the agent does not answer; empty: it runs.
    pub(crate) fn without_agent(&self, why: &str) {
        let why = why.chars().take(MOST_REASON).map(|c| if c.is_control() { ' ' } else { c }).collect();
        *self.no_agent.write() = why;
    }

    /// Sets the pod and its volumes, for all requests that begin from now on.
    pub fn set(&self, pod: &str, volumes: &[Volume]) {
        pod.clone_into(&mut self.pod.write());
        *self.volumes.write() = volumes.into();
    }

    pub(crate) fn pod(&self) -> String {
        self.pod.read().clone()
    }

    /// Returns the counters of bytes to and from the guest, then of frames to and from it.
    pub(crate) fn counts(&self) -> [&AtomicU64; 4] {
        [&self.bytes_to_guest, &self.bytes_from_guest, &self.frames_to_guest, &self.frames_from_guest]
    }

    fn volumes(&self) -> Arc<[Volume]> {
        self.volumes.read().clone()
    }

    pub(crate) fn new(sandbox: String, totals: Traffic) -> Shared {
        Shared { sandbox, totals, ..Shared::default() }
    }

    fn count_bytes_to_guest(&self, bytes: usize) {
        self.bytes_to_guest.fetch_add(bytes as u64, Relaxed);
        self.totals.bytes_to_guest.inc_by(bytes as u64);
    }

    fn count_bytes_from_guest(&self, bytes: usize) {
        self.bytes_from_guest.fetch_add(bytes as u64, Relaxed);
        self.totals.bytes_from_guest.inc_by(bytes as u64);
    }

    fn count_frame_to_guest(&self) {
        self.frames_to_guest.fetch_add(1, Relaxed);
        self.totals.frames_to_guest.inc();
    }

    fn count_frame_from_guest(&self) {
        self.frames_from_guest.fetch_add(1, Relaxed);
        self.totals.frames_from_guest.inc();
    }
}

/// Limits of pending calls.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Limit of one connection.
    pub per_connection: usize,
    /// Limit of all connections of a sandbox.
    pub per_sandbox: usize,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { per_connection: 32_768, per_sandbox: 65_536 }
    }
}

/// Treatment of the present frame.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Fate {
    None,
    /// It passes to the other side as it arrives.
    Pass,
    Skip,
    /// It is collected with its header and passed on whole (answers only).
    Hold(Vec<u8>),
    /// A request is collected with its header until its method is known.
    Look(Vec<u8>),
    /// A request is collected until it is whole, to be read or changed.
    Gather(Vec<u8>),
}

/// State of a filter, for another process.
#[derive(Debug, Serialize, Deserialize)]
struct Standing {
    /// Streams, and whether their call is GetOOMEvent. A call whose answer is held is not among them.
    pending: Vec<(u32, bool)>,
    /// The requests that may be asked again, as frames one after the other.
    #[serde(default)]
    repeatable: Vec<u8>,
    #[serde(default)]
    closing: Vec<u32>,
    requests: FrameReader,
    request: Fate,
    answers: FrameReader,
    answer: Fate,
    #[serde(default)]
    copies: Copies,
    /// The relay's own whole answers that wait for the end of `answer`.
    #[serde(default)]
    own_answers: Vec<u8>,
}

/// Filter of one connection. Without `COUNTED` it counts no bytes and no frames; the benchmarks measure the difference.
#[derive(Debug)]
pub struct AgentFilter<const COUNTED: bool = true> {
    shared: Arc<Shared>,
    bounds: Bounds,
    /// Streams that wait for an answer. The shim chooses the numbers; it is root here, so collisions ([`IdMap`]) are no
    /// attack. The value is the frame of a request that may be asked again, and otherwise empty.
    pending: IdMap<Vec<u8>>,
    /// Streams of pending calls of CloseStdin.
    closing: Vec<u32>,
    requests: FrameReader,
    request: Fate,
    answers: FrameReader,
    answer: Fate,
    to_shim: FrameWriter,
    /// Folders copied into the VM for containers still to come.
    copies: Copies,
}

impl AgentFilter {
    /// Makes a filter for a new connection of the sandbox that `shared` belongs to.
    pub fn new(shared: Arc<Shared>, bounds: Bounds) -> AgentFilter {
        AgentFilter::make(shared, bounds)
    }
}

impl AgentFilter<false> {
    /// Makes the same filter without counters.
    pub fn uncounted(shared: Arc<Shared>, bounds: Bounds) -> AgentFilter<false> {
        AgentFilter::make(shared, bounds)
    }
}

impl<const COUNTED: bool> AgentFilter<COUNTED> {
    fn make(shared: Arc<Shared>, bounds: Bounds) -> AgentFilter<COUNTED> {
        AgentFilter {
            shared,
            bounds,
            pending: IdMap::default(),
            closing: Vec::new(),
            requests: FrameReader::new(),
            request: Fate::None,
            answers: FrameReader::new(),
            answer: Fate::None,
            to_shim: FrameWriter::default(),
            copies: Copies::default(),
        }
    }

    fn count(&self, count: impl FnOnce(&Shared)) {
        if COUNTED {
            count(&self.shared);
        }
    }

    /// Handles the complete header of a request: decides whether the request passes.
    fn admit(&mut self, header: &Header, peer: &mut BytesMut, local: &mut BytesMut) -> Fate {
        if let Some((code, message)) = self.refusal(header) {
            self.shared.dropped.fetch_add(1, Relaxed);
            self.refuse(header.stream, code, &message, local);
            return Fate::Skip;
        }
        if header.kind == frame::REQUEST {
            self.await_answer(header.stream, Vec::new());
        }
        self.count(Shared::count_frame_to_guest);
        if header.kind == frame::REQUEST {
            return Fate::Look(header.encode().to_vec());
        }
        peer.extend_from_slice(&header.encode());
        Fate::Pass
    }

    fn refusal(&self, header: &Header) -> Option<(i32, String)> {
        let (length, Bounds { per_connection, per_sandbox }) = (header.length, self.bounds);
        if length as usize > MAX_PAYLOAD {
            // Same text as ttrpc's own error, which shims recognise.
            let message = format!("message length {length} exceed maximum message size of {MAX_PAYLOAD}");
            return Some((code::INVALID_ARGUMENT, message));
        }
        let (calls, of) = if header.kind != frame::REQUEST {
            return None;
        } else if self.pending.len() >= per_connection {
            (self.pending.len(), "connection")
        } else if self.shared.pending.load(Relaxed) >= per_sandbox {
            (per_sandbox, "sandbox")
        } else {
            return None;
        };
        let message = format!("{calls} calls of this {of} are unanswered, which is the limit");
        Some((code::RESOURCE_EXHAUSTED, message))
    }

    /// Handles more bytes of a request that does not pass yet.
    fn inspect(&mut self, body: &[u8], peer: &mut BytesMut) {
        let mut have = match &mut self.request {
            Fate::Look(have) => std::mem::take(have),
            Fate::Gather(have) => return have.extend_from_slice(body),
            _ => return,
        };
        self.request = Fate::Skip;
        // Other bytes are not copied: a body may contain megabytes of a process's input.
        let seen = have.len();
        have.extend_from_slice(&body[..body.len().min((HEADER_LEN + PEEK_LIMIT).saturating_sub(seen))]);
        let (head, start) = have.split_at(HEADER_LEN.min(have.len()));
        let Some(head) = head.first_chunk().map(Header::decode) else { return };
        match frame::peek(start) {
            Peek::More if start.len() < PEEK_LIMIT => {
                self.request = Fate::Look(have);
                return;
            }
            Peek::Method { service, method } if self.is_gathered(service, method, &head) => {
                have.truncate(seen);
                have.extend_from_slice(body);
                self.request = Fate::Gather(have);
                return;
            }
            // A malicious guest may have answered the call before it was whole.
            Peek::Method { service: SERVICE, method: "CloseStdin" }
                if self.pending.contains_key(&head.stream) =>
            {
                self.closing.push(head.stream);
            }
            Peek::Method { .. } | Peek::More | Peek::Unknown => {}
        }
        self.request = Fate::Pass;
        peer.extend_from_slice(&have[..seen]);
        peer.extend_from_slice(body);
    }

    /// Whether a request is read whole. Small files are read in every pod: one may be the marker of a volume that the
    /// node did not announce, and its container must not get an empty folder instead.
    fn is_gathered(&self, service: &str, method: &str, head: &Header) -> bool {
        match (service, method) {
            (SERVICE, "CopyFile") => head.length as usize <= SMALL_COPY,
            (SERVICE, "CreateContainer") => !self.shared.volumes().is_empty() || self.copies.has_strangers(),
            _ => is_repeatable(service, method) && head.length as usize <= SMALL_CALL,
        }
    }

    /// Handles a request that was read whole.
    fn gathered(&mut self, have: &[u8], peer: &mut BytesMut, local: &mut BytesMut) {
        let Some((head, payload)) = have.split_first_chunk::<HEADER_LEN>() else { return };
        let head = Header::decode(head);
        let volumes = self.shared.volumes();
        match frame::method_of(payload) {
            Some((SERVICE, "CopyFile")) => {
                let copied = Request::parse_from_bytes(payload)
                    .and_then(|request| CopyFileRequest::parse_from_bytes(&request.payload));
                // The agent refuses a request that cannot be decoded.
                if let Ok(copied) = copied {
                    self.copies.note(&volumes, &copied);
                }
                return peer.extend_from_slice(have);
            }
            Some((service, method)) if is_repeatable(service, method) => {
                // A malicious guest may have answered the call before it was whole.
                if let Some(call) = self.pending.get_mut(&head.stream) {
                    *call = have.to_vec();
                }
                return peer.extend_from_slice(have);
            }
            _ => {}
        }
        match volumes::create_container(payload, &volumes, &mut self.copies) {
            Ok(payload) => {
                let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
                peer.extend_from_slice(&Header { length, ..head }.encode());
                peer.extend_from_slice(&payload);
            }
            Err(why) => {
                let Shared { sandbox, .. } = &*self.shared;
                tracing::warn!(sandbox, pod = self.shared.pod(), why, "container refused");
                self.shared.dropped.fetch_add(1, Relaxed);
                // A malicious guest may have answered the call before it was whole.
                if self.settle(head.stream) {
                    self.refuse(head.stream, code::FAILED_PRECONDITION, &why, local);
                }
            }
        }
    }

    /// Handles the complete header of a guest's frame: decides whether it answers a pending call.
    fn deliver(&mut self, header: &Header, local: &mut BytesMut) -> Fate {
        let length = header.length as usize;
        self.count(Shared::count_frame_from_guest);
        let answers = matches!(header.kind, frame::RESPONSE | frame::DATA);
        if !(answers && self.pending.contains_key(&header.stream)) {
            self.shared.dropped.fetch_add(1, Relaxed);
            return Fate::Skip;
        }
        if length > MAX_PAYLOAD {
            self.shared.dropped.fetch_add(1, Relaxed);
            self.settle(header.stream);
            let message =
                format!("the guest answered with {length} bytes, more than the {MAX_PAYLOAD} of ttrpc");
            self.refuse(header.stream, code::INTERNAL, &message, local);
            return Fate::Skip;
        }
        if length <= HOLD {
            return Fate::Hold(header.encode().to_vec());
        }
        if header.kind == frame::RESPONSE {
            self.settle(header.stream);
        }
        self.to_shim.begin(header, local);
        Fate::Pass
    }

    /// Sends the relay's own answer to a call.
    fn refuse(&mut self, stream: u32, code: i32, why: &str, local: &mut BytesMut) {
        self.to_shim.whole(&frame::error_response(stream, code, why), local);
    }

    /// Adds a call to the pending ones.
    fn await_answer(&mut self, stream: u32, request: Vec<u8>) {
        if self.pending.insert(stream, request).is_none() {
            self.shared.pending.fetch_add(1, Relaxed);
        }
    }

    /// Passes a held answer on, now that it is whole. Its call may have been refused meanwhile.
    fn release(&mut self, frame: &[u8], local: &mut BytesMut) {
        let Some(head) = frame.first_chunk().map(Header::decode) else { return };
        if self.closing.contains(&head.stream) && is_success(frame) && self.settle(head.stream) {
            let why = "stdin is closed; Kata's Go shim would read no output after a success";
            self.refuse(head.stream, code::FAILED_PRECONDITION, why, local);
        } else if head.kind == frame::DATA || self.settle(head.stream) {
            self.to_shim.whole(frame, local);
        }
    }

    /// Removes the call of this stream from the pending ones; returns false if there was none.
    fn settle(&mut self, stream: u32) -> bool {
        let was = self.pending.remove(&stream).is_some();
        if was {
            self.shared.pending.fetch_sub(1, Relaxed);
            self.closing.retain(|closing| *closing != stream);
            if self.pending.is_empty() && self.pending.capacity() > 64 {
                self.pending = IdMap::default();
            }
        }
        was
    }

    /// Answers all pending calls but those that are to be kept, by stream and request. Returns false if a part of an
    /// answer was passed on and the rest will never come: no other answer can follow on this connection.
    fn answer_pending(&mut self, kept: impl Fn(u32, &[u8]) -> bool, why: &str, local: &mut BytesMut) -> bool {
        if self.to_shim.is_under_way() {
            return false;
        }
        // No byte of a held answer was passed on.
        (self.answers, self.answer) = (FrameReader::new(), Fate::None);
        let pending = self.pending.iter().filter(|(stream, request)| !kept(**stream, request));
        let mut streams: Vec<u32> = pending.map(|(stream, _)| *stream).collect();
        streams.sort_unstable();
        for stream in streams {
            self.settle(stream);
            self.refuse(stream, code::UNAVAILABLE, why, local);
        }
        true
    }

    /// Returns the pending requests that may be asked again, in the order of their streams.
    fn repeatable(&self) -> Vec<u8> {
        let mut requests: Vec<(&u32, &Vec<u8>)> = self.pending.iter().collect();
        requests.sort_unstable();
        requests.into_iter().flat_map(|(_, request)| request).copied().collect()
    }
}

/// Whether a call may be asked again, although the agent may have begun it: it changes nothing, or it waits, and the
/// agent drops what waits when the guest program's connection closes.
fn is_repeatable(service: &str, method: &str) -> bool {
    match service {
        SERVICE => matches!(method, OOM_EVENT | "ReadStderr" | "ReadStdout" | "WaitProcess"),
        _ => service == HEALTH,
    }
}

fn is_success(frame: &[u8]) -> bool {
    let answer = frame.get(HEADER_LEN..).map(Response::parse_from_bytes);
    matches!(answer, Some(Ok(answer)) if answer.status.code == 0)
}

/// Whether a request is GetOOMEvent, which the Rust shim repeats in a tight loop after an error.
fn is_oom_event(request: &[u8]) -> bool {
    request.get(HEADER_LEN..).and_then(frame::method_of) == Some((SERVICE, OOM_EVENT))
}

/// Returns the request GetOOMEvent, which has no fields.
fn oom_event(stream: u32) -> Vec<u8> {
    let request = Request { service: SERVICE.into(), method: OOM_EVENT.into(), ..Request::default() };
    let payload = request.write_to_bytes().unwrap_or_default();
    let head = Header { length: payload.len() as u32, stream, kind: frame::REQUEST, flags: 0 }; // two names
    [&head.encode()[..], &payload].concat()
}

/// Splits whole frames; `None` if the last one is cut.
fn split_frames(mut bytes: &[u8]) -> Option<Vec<(Header, &[u8])>> {
    let mut frames = Vec::new();
    while let Some(head) = bytes.first_chunk() {
        let head = Header::decode(head);
        let (frame, rest) = bytes.split_at_checked(HEADER_LEN + head.length as usize)?;
        frames.push((head, frame));
        bytes = rest;
    }
    bytes.is_empty().then_some(frames)
}

impl<const COUNTED: bool> Drop for AgentFilter<COUNTED> {
    fn drop(&mut self) {
        self.shared.pending.fetch_sub(self.pending.len(), Relaxed);
    }
}

impl<const COUNTED: bool> Filter for AgentFilter<COUNTED> {
    fn from_local(&mut self, mut input: &[u8], peer: &mut BytesMut, local: &mut BytesMut) {
        self.count(|shared| shared.count_bytes_to_guest(input.len()));
        while let Some(piece) = self.requests.next(&mut input) {
            match piece {
                Piece::Head(header) => self.request = self.admit(&header, peer, local),
                Piece::Body(body) if matches!(self.request, Fate::Pass) => peer.extend_from_slice(body),
                Piece::Body(body) => self.inspect(body, peer),
                Piece::End => match std::mem::replace(&mut self.request, Fate::None) {
                    Fate::Gather(have) => self.gathered(&have, peer, local),
                    // The request is too short to name a method; the guest answers it with an error.
                    Fate::Look(have) => peer.extend_from_slice(&have),
                    Fate::None | Fate::Pass | Fate::Skip | Fate::Hold(_) => {}
                },
            }
        }
    }

    fn from_peer(&mut self, mut input: &[u8], _peer: &mut BytesMut, local: &mut BytesMut) {
        self.count(|shared| shared.count_bytes_from_guest(input.len()));
        while let Some(piece) = self.answers.next(&mut input) {
            match piece {
                Piece::Head(header) => self.answer = self.deliver(&header, local),
                Piece::Body(body) => match &mut self.answer {
                    Fate::Pass => self.to_shim.body(body, local),
                    Fate::Hold(frame) => frame.extend_from_slice(body),
                    Fate::Skip | Fate::None | Fate::Look(_) | Fate::Gather(_) => {}
                },
                Piece::End => match std::mem::replace(&mut self.answer, Fate::None) {
                    Fate::Pass => self.to_shim.end(local),
                    Fate::Hold(frame) => self.release(&frame, local),
                    Fate::Skip | Fate::None | Fate::Look(_) | Fate::Gather(_) => {}
                },
            }
        }
    }

    fn passes_from_local(&mut self, input: &[u8]) -> bool {
        let passes = matches!(self.request, Fate::Pass) && self.requests.pass(input.len());
        if passes {
            self.count(|shared| shared.count_bytes_to_guest(input.len()));
        }
        passes
    }

    fn passes_from_peer(&mut self, input: &[u8]) -> bool {
        let passes = matches!(self.answer, Fate::Pass) && self.answers.pass(input.len());
        if passes {
            self.count(|shared| shared.count_bytes_from_guest(input.len()));
        }
        passes
    }

    fn answers_waiting(&self) -> usize {
        self.to_shim.waiting().len()
    }

    fn stream_lost(&mut self, again: Option<&mut BytesMut>, local: &mut BytesMut) -> bool {
        // The rest of a request that began to pass is dropped.
        if let Fate::Pass = self.request {
            self.request = Fate::Skip;
        }
        // A request that has not begun to pass is not lost.
        let unsent = match &self.request {
            Fate::Look(have) | Fate::Gather(have) => {
                have.first_chunk().map(|head| Header::decode(head).stream)
            }
            Fate::None | Fate::Pass | Fate::Skip | Fate::Hold(_) => None,
        };
        let restarts = again.is_some();
        let kept = |stream, request: &[u8]| {
            Some(stream) == unsent || (restarts && !request.is_empty()) || is_oom_event(request)
        };
        let why = match self.shared.no_agent.read().as_str() {
            "" => "the program in the pod VM that had this call is gone".to_owned(),
            why => why.to_owned(),
        };
        let stays = self.answer_pending(kept, &why, local);
        if let Some(peer) = again.filter(|_| stays) {
            peer.extend_from_slice(&self.repeatable());
        }
        stays
    }

    fn finish(&mut self, local: &mut BytesMut) {
        // A connection that cannot carry another answer is closed all the same.
        let _whole = self.answer_pending(|_, _| false, "the sandbox has ended", local);
    }

    fn state(&self) -> Option<serde_json::Value> {
        // An earlier release settles a call with the header of its answer.
        let held = match &self.answer {
            Fate::Hold(frame) => frame.first_chunk().map(Header::decode),
            Fate::None | Fate::Pass | Fate::Skip | Fate::Look(_) | Fate::Gather(_) => None,
        };
        let held = held.filter(|head| head.kind == frame::RESPONSE).map(|head| head.stream);
        let pending = self.pending.iter().filter(|(stream, _)| Some(**stream) != held);
        let standing = Standing {
            pending: pending.map(|(stream, request)| (*stream, is_oom_event(request))).collect(),
            repeatable: self.repeatable(),
            closing: self.closing.clone(),
            requests: self.requests.clone(),
            request: self.request.clone(),
            answers: self.answers.clone(),
            answer: self.answer.clone(),
            copies: self.copies.clone(),
            own_answers: self.to_shim.waiting().to_vec(),
        };
        serde_json::to_value(standing).ok()
    }

    fn restore(&mut self, state: &serde_json::Value) -> bool {
        let Ok(standing) = Standing::deserialize(state) else { return false };
        let sound = standing.requests.is_sound() && standing.answers.is_sound();
        let Some(repeatable) = split_frames(&standing.repeatable) else { return false };
        if !sound || standing.pending.len().max(repeatable.len()) > self.bounds.per_connection {
            return false;
        }
        let under_way = matches!(standing.answer, Fate::Pass);
        let Some(to_shim) = FrameWriter::resume(under_way, standing.own_answers) else { return false };
        self.to_shim = to_shim;
        for (stream, is_oom) in standing.pending {
            self.await_answer(stream, if is_oom { oom_event(stream) } else { Vec::new() });
        }
        for (head, frame) in repeatable {
            self.await_answer(head.stream, frame.to_vec());
        }
        if let Fate::Hold(frame) = &standing.answer
            && let Some(head) = frame.first_chunk().map(Header::decode)
            && !self.pending.contains_key(&head.stream)
        {
            self.await_answer(head.stream, Vec::new());
        }
        (self.requests, self.request) = (standing.requests, standing.request);
        (self.answers, self.answer) = (standing.answers, standing.answer);
        (self.closing, self.copies) = (standing.closing, standing.copies);
        true
    }
}

#[cfg(test)]
mod tests;
