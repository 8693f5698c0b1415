//! Fuzzes a conversation between a shim and an agent over the whole path: the relay's filter, the guest's, and back.
//! Shim, agent and guest may send any bytes.
//!
//! The shim receives only whole frames: the guest's unchanged, or the filters' own errors. Each call has one answer, of
//! a size that the shim accepts. The agent receives only whole requests, with the pod's network namespace in them where
//! it is required.
//!
//! An input is a list of messages: sender (u8), length (u16 BE), bytes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::BytesMut;
use peerpod_guest::intercept::{Intercept, Notice};
use peerpod_link::endpoint::Filter;
use peerpod_link::frame::{DATA, FrameReader, Header, MAX_PAYLOAD, Piece, REQUEST, RESPONSE, method_of};
use peerpod_proto::agent::CreateContainerRequest;
use peerpod_proto::ttrpc_frame::{Request, Response};
use peerpod_relay::agent::filter::{AgentFilter, Bounds, Shared, Volume};
use protobuf::Message;
use serde_json::json;

pub(crate) const SHIM: u8 = 0;
pub(crate) const AGENT: u8 = 1;
/// A hostile guest without its filter: the bytes go to the relay unchanged. With a higher value the stream is lost, as
/// after a restart of the guest program.
const GUEST: u8 = 2;
/// Flag on any sender: a new relay takes over before the message.
const HANDED_OVER: u8 = 4;
/// Flag on any sender: the endpoint's shortcut is tried first.
const SHORTCUT: u8 = 8;

/// Few calls fit, so that refusals are common.
const BOUNDS: Bounds = Bounds { per_connection: 8, per_sandbox: 8 };

const PODNS: &str = "/run/netns/podns";

/// Makes the relay's filter for a pod with one volume, whose marker is the first one of the recordings.
fn relay() -> AgentFilter {
    let volume =
        json!({"id": "a".repeat(32), "name": "data", "target_path": "/data", "marker": format!("{:064}", 1)});
    let volume: Volume = serde_json::from_value(volume).expect("a volume as the node announces it");
    let shared = Shared::default();
    shared.set("", &[volume]);
    AgentFilter::new(Arc::new(shared), BOUNDS)
}

/// Encodes one message of an input.
pub(crate) fn word(who: u8, bytes: &[u8]) -> Vec<u8> {
    bytes
        .chunks(usize::from(u16::MAX))
        .flat_map(|part| [&[who][..], &(part.len() as u16).to_be_bytes(), part].concat())
        .collect()
}

#[derive(Default)]
struct Told {
    containers: AtomicUsize,
}

impl Notice for Told {
    fn container(&self) {
        self.containers.fetch_add(1, Ordering::Relaxed);
    }
    fn bind_source(&self, _source: &str) {}
    fn sandbox_ends(&self) {}
}

/// Both filters, and counts of their output.
struct Conversation {
    relay: AgentFilter,
    guest: Intercept,
    told: Arc<Told>,
    /// Frames from the shim: its calls.
    calls: Frames,
    /// Counts of frames, requests and answers by stream.
    asked: HashMap<u32, Asked>,
    from_agent: Passing,
    from_guest: Passing,
    to_agent: Frames,
    /// Number of whole frames that arrived.
    answers: usize,
    containers: usize,
}

#[derive(Default)]
struct Asked {
    frames: usize,
    requests: usize,
    answers: usize,
}

impl Conversation {
    fn new() -> Conversation {
        let told = Arc::new(Told::default());
        Conversation {
            relay: relay(),
            guest: Intercept::new(told.clone(), PODNS.to_owned()),
            told,
            calls: Frames::default(),
            asked: HashMap::new(),
            from_agent: Passing::default(),
            from_guest: Passing::default(),
            to_agent: Frames::default(),
            answers: 0,
            containers: 0,
        }
    }

    /// Passes a message through the filters. Returns false when the shim's connection is over.
    fn say(&mut self, who: u8, bytes: &[u8]) -> bool {
        let (mut up, mut down, mut out) = (BytesMut::new(), BytesMut::new(), BytesMut::new());
        let shortcut = who & SHORTCUT != 0;
        if who & HANDED_OVER != 0 {
            let state = self.relay.state().expect("a relay's filter can be handed over");
            self.relay = relay();
            assert!(self.relay.restore(&state), "{state}");
        }
        match who & 3 {
            SHIM => {
                for (header, body) in self.calls.take(bytes) {
                    let asked = self.asked.entry(header.stream).or_default();
                    asked.frames += usize::from(body.is_none());
                    asked.requests += usize::from(body.is_none() && header.kind == REQUEST);
                }
                if shortcut && self.relay.passes_from_local(bytes) {
                    up.extend_from_slice(bytes);
                } else {
                    self.relay.from_local(bytes, &mut up, &mut down);
                }
                self.from_guest.is_no_place_for(&down);
                self.shim_hears(&down);
                let mut back = BytesMut::new();
                self.guest.from_peer(&up, &mut back, &mut out);
                self.agent_hears(&out);
                self.from_agent.is_no_place_for(&back);
                self.from_agent.arrive(&back);
                self.relay_hears(&back, false);
            }
            AGENT => {
                self.from_agent.leave(bytes);
                if shortcut && self.guest.passes_from_local(bytes) {
                    up.extend_from_slice(bytes);
                } else {
                    self.guest.from_local(bytes, &mut up, &mut out);
                }
                self.from_agent.arrive(&up);
                self.agent_hears(&out);
                self.relay_hears(&up, shortcut);
            }
            GUEST => self.relay_hears(bytes, shortcut),
            _ => {
                let goes_on = self.relay.stream_lost(Some(&mut up), &mut down);
                self.shim_hears(&down);
                (self.from_agent, self.from_guest.left) = (Passing::default(), Frames::default());
                self.told = Arc::new(Told::default());
                self.guest = Intercept::new(self.told.clone(), PODNS.to_owned());
                (self.to_agent, self.containers) = (Frames::default(), 0);
                let mut back = BytesMut::new();
                self.guest.from_peer(&up, &mut back, &mut out);
                assert!(back.is_empty(), "the guest refuses a request that it has had before");
                self.agent_hears(&out);
                return goes_on;
            }
        }
        true
    }

    fn relay_hears(&mut self, bytes: &[u8], shortcut: bool) {
        let (mut peer, mut local) = (BytesMut::new(), BytesMut::new());
        self.from_guest.leave(bytes);
        if shortcut && self.relay.passes_from_peer(bytes) {
            local.extend_from_slice(bytes);
        } else {
            self.relay.from_peer(bytes, &mut peer, &mut local);
        }
        self.shim_hears(&local);
    }

    fn shim_hears(&mut self, bytes: &[u8]) {
        for (header, whole) in self.from_guest.arrive(bytes) {
            assert!(matches!(header.kind, RESPONSE | DATA), "{header:?}");
            assert!(header.length as usize <= MAX_PAYLOAD, "{header:?}");
            let asked = self.asked.get_mut(&header.stream);
            let asked = asked.unwrap_or_else(|| panic!("no request had the stream of {header:?}"));
            asked.answers += usize::from(!whole && header.kind == RESPONSE);
            assert!(asked.answers <= asked.frames, "answered twice: {header:?}");
            self.answers += usize::from(whole);
        }
    }

    /// Ends the sandbox.
    fn finish(&mut self) {
        let mut down = BytesMut::new();
        self.relay.finish(&mut down);
        self.from_guest.is_no_place_for(&down);
        // No frame can follow an answer that stays incomplete. Otherwise every call has an answer.
        if self.from_guest.arrived.is_between() {
            self.shim_hears(&down);
            let all = self.asked.iter().all(|(_, asked)| asked.requests == 0 || asked.answers > 0);
            assert!(all, "a call is not answered");
        }
    }

    fn agent_hears(&mut self, bytes: &[u8]) {
        for (header, body) in self.to_agent.take(bytes) {
            assert!(header.length as usize <= MAX_PAYLOAD, "{header:?}");
            let Some(body) = body.filter(|_| header.kind == REQUEST) else { continue };
            let Some(("grpc.AgentService", "CreateContainer")) = method_of(&body) else { continue };
            let request = Request::parse_from_bytes(&body).expect("what was rewritten can be read");
            self.containers += 1;
            let Ok(container) = CreateContainerRequest::parse_from_bytes(&request.payload) else { continue };
            if container.OCI.is_some() {
                let networks = container.OCI.Linux.Namespaces.iter().filter(|it| it.Type == "network");
                let paths: Vec<&str> = networks.map(|it| it.Path.as_str()).collect();
                assert_eq!(paths, [PODNS]);
            }
        }
        // The filter counts a container before the agent gets the request: a dead agent then means dead containers.
        assert!(self.told.containers.load(Ordering::Relaxed) >= self.containers);
    }
}

/// A stream that passes through a filter, which adds whole answers of its own.
#[derive(Default)]
struct Passing {
    left: Frames,
    /// Frames that are not known to have arrived.
    under_way: VecDeque<(Header, Vec<u8>)>,
    arrived: Frames,
}

impl Passing {
    fn leave(&mut self, bytes: &[u8]) {
        let whole = self.left.take(bytes).into_iter();
        self.under_way.extend(whole.filter_map(|(header, body)| Some((header, body?))));
    }

    /// Asserts that the filter's own answers do not arrive in the middle of a frame.
    fn is_no_place_for(&self, own: &[u8]) {
        assert!(own.is_empty() || self.arrived.is_between(), "{} bytes in the middle of a frame", own.len());
    }

    /// Returns each header as it arrives, and again with `true` when its frame is whole. Whole frames are those that
    /// left, in order and unchanged, or errors of the filter.
    fn arrive(&mut self, bytes: &[u8]) -> Vec<(Header, bool)> {
        let mut found = Vec::new();
        for (header, body) in self.arrived.take(bytes) {
            found.push((header, body.is_some()));
            let Some(body) = body else { continue };
            let frame = (header, body);
            if let Some(at) = self.under_way.iter().position(|left| *left == frame) {
                self.under_way.drain(..=at);
                continue;
            }
            let own = Response::parse_from_bytes(&frame.1).is_ok_and(|response| response.status.code != 0);
            assert!(
                own && header.kind == RESPONSE,
                "what was written is neither passed on nor an error: {header:?}"
            );
        }
        found
    }
}

/// Assembles frames from pieces: each header at once, and again with its body when that is whole.
#[derive(Default)]
struct Frames {
    reader: FrameReader,
    head: Option<Header>,
    body: Vec<u8>,
}

impl Frames {
    /// Returns whether the input so far ends at the end of a frame.
    fn is_between(&self) -> bool {
        self.reader.at_boundary()
    }

    /// Returns headers without a body first, then with their body once it is whole; incomplete bodies never follow.
    fn take(&mut self, mut bytes: &[u8]) -> Vec<(Header, Option<Vec<u8>>)> {
        let mut found = Vec::new();
        while let Some(piece) = self.reader.next(&mut bytes) {
            match piece {
                Piece::Head(header) => {
                    (self.head, self.body) = (Some(header), Vec::new());
                    found.push((header, None));
                }
                Piece::Body(part) => self.body.extend_from_slice(part),
                Piece::End => {
                    found.extend(self.head.take().map(|head| (head, Some(std::mem::take(&mut self.body)))))
                }
            }
        }
        found
    }
}

pub(crate) fn run(input: &[u8]) {
    drop(walk(input));
}

fn walk(mut input: &[u8]) -> Conversation {
    let mut conversation = Conversation::new();
    while let Some(([who, high, low], rest)) = input.split_first_chunk() {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (bytes, rest) = rest.split_at(length);
        input = rest;
        if !conversation.say(*who, bytes) {
            break;
        }
    }
    conversation.finish();
    conversation
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds;

    #[test]
    fn the_recorded_conversations_go_the_whole_road() {
        let (mut answers, mut containers) = (0, 0);
        for (name, seed) in seeds::of("agent") {
            let conversation = walk(&seed);
            println!("{name}: {} answers, {} containers", conversation.answers, conversation.containers);
            (answers, containers) = (answers + conversation.answers, containers + conversation.containers);
        }
        assert!(answers > 100 && containers >= 4, "{answers} answers, {containers} containers");
    }

    #[test]
    fn a_seed_has_refusals_that_wait_for_the_end_of_an_answer() {
        let seeds = seeds::of("agent").into_iter();
        // Without its last byte, the answer stays incomplete.
        let waiting = seeds.map(|(_, seed)| walk(&seed[..seed.len() - 1]).relay.answers_waiting());
        assert!(waiting.sum::<usize>() > 0);
    }

    #[test]
    fn a_lying_guest_reaches_no_shim() {
        let mut conversation = Conversation::new();
        let lie = [&Header { length: 4, stream: 9, kind: RESPONSE, flags: 0 }.encode()[..], b"lies"].concat();
        assert!(conversation.say(GUEST, &lie));
        assert_eq!(conversation.answers, 0);
        // The guest's filter answers a question that it cannot parse; the answer count is then complete.
        let question = Header { length: 0, stream: 9, kind: REQUEST, flags: 0 }.encode();
        assert!(conversation.say(SHIM, &question) && conversation.say(GUEST, &lie));
        assert_eq!(conversation.answers, 1);
    }
}
