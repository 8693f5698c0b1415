//! Tests of the filter with synthetic byte streams, cut at every position.

use peerpod_proto::ttrpc_frame::{Request, Response};
use proptest::prelude::*;
use protobuf::Message;

use super::*;

mod order;
mod volumes;

fn frame(kind: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let header = Header { length: body.len() as u32, stream, kind, flags: 0 };
    [&header.encode()[..], body].concat()
}

fn request(stream: u32, method: &str, payload: usize) -> Vec<u8> {
    let request = Request {
        service: "grpc.AgentService".into(),
        method: method.into(),
        payload: vec![7; payload],
        ..Default::default()
    };
    frame(frame::REQUEST, stream, &request.write_to_bytes().unwrap())
}

fn answer(stream: u32, payload: usize) -> Vec<u8> {
    let response = Response { payload: vec![9; payload], ..Default::default() };
    frame(frame::RESPONSE, stream, &response.write_to_bytes().unwrap())
}

/// Streams and codes of the answers in `bytes`.
fn codes(mut bytes: &[u8]) -> Vec<(u32, i32)> {
    let mut found = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk() {
        let header = Header::decode(head);
        let (body, rest) = rest.split_at(header.length as usize);
        found.push((header.stream, Response::parse_from_bytes(body).unwrap().status.code));
        bytes = rest;
    }
    found
}

#[derive(Default)]
struct Seen {
    peer: BytesMut,
    local: BytesMut,
}

fn filter() -> AgentFilter {
    AgentFilter::new(Arc::default(), Bounds { per_connection: 4, per_sandbox: 6 })
}

/// The filter of the next process.
fn handed_over(filter: &AgentFilter) -> AgentFilter {
    let text = serde_json::to_string(&filter.state().unwrap()).unwrap();
    let mut next = self::filter();
    assert!(next.restore(&serde_json::from_str(&text).unwrap()));
    next
}

impl Seen {
    fn shim(&mut self, filter: &mut AgentFilter, bytes: &[u8]) {
        // The endpoint, too, tries the shortcut first.
        if filter.passes_from_local(bytes) {
            self.peer.extend_from_slice(bytes);
        } else {
            filter.from_local(bytes, &mut self.peer, &mut self.local);
        }
    }
    fn guest(&mut self, filter: &mut AgentFilter, bytes: &[u8]) {
        if filter.passes_from_peer(bytes) {
            self.local.extend_from_slice(bytes);
        } else {
            filter.from_peer(bytes, &mut self.peer, &mut self.local);
        }
    }
}

#[test]
fn a_success_of_close_stdin_is_an_error_to_the_shim() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    for (stream, method) in [(1, "CloseStdin"), (3, "CloseStdin"), (5, "TtyWinResize")] {
        seen.shim(&mut filter, &request(stream, method, 9));
    }
    let mut filter = handed_over(&filter);
    seen.guest(&mut filter, &answer(5, 0));
    seen.guest(&mut filter, &answer(1, 0));
    seen.guest(&mut filter, &frame::error_response(3, code::INTERNAL, "no such process"));
    // The stream's number may come again.
    seen.shim(&mut filter, &request(1, "TtyWinResize", 9));
    seen.guest(&mut filter, &answer(1, 0));
    assert_eq!(codes(&seen.local), [(5, 0), (1, code::FAILED_PRECONDITION), (3, code::INTERNAL), (1, 0)]);
}

#[test]
fn a_close_stdin_that_is_answered_too_early_is_not_remembered() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    let whole = request(1, "CloseStdin", 9);
    let (head, rest) = whole.split_at(HEADER_LEN);
    seen.shim(&mut filter, head);
    seen.guest(&mut filter, &answer(1, 0));
    seen.shim(&mut filter, rest);
    assert_eq!(codes(&seen.local), [(1, 0)]);
    assert!(filter.closing.is_empty());
}

proptest! {
    #[test]
    fn bytes_pass_unchanged_in_any_pieces(
        sizes in prop::collection::vec(0usize..40_000, 1..4),
        cut in 1usize..5000,
    ) {
        let (mut filter, mut seen) = (filter(), Seen::default());
        let mut requests = Vec::new();
        let mut answers = Vec::new();
        for (n, size) in sizes.iter().enumerate() {
            requests.extend(request(2 * n as u32 + 1, "ReadStdout", *size));
            answers.extend(answer(2 * n as u32 + 1, *size));
        }
        // Every piece is handled by the filter of another process.
        for part in requests.chunks(cut) {
            seen.shim(&mut filter, part);
            filter = handed_over(&filter);
        }
        prop_assert_eq!(filter.shared.pending.load(Relaxed), sizes.len());
        for part in answers.chunks(cut) {
            seen.guest(&mut filter, part);
            filter = handed_over(&filter);
        }
        prop_assert_eq!(&seen.peer[..], &requests[..]);
        prop_assert_eq!(&seen.local[..], &answers[..]);
        prop_assert_eq!(filter.shared.pending.load(Relaxed), 0);
    }

    #[test]
    fn garbage_never_panics_and_never_holds_much(
        parts in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..200)), 0..40),
    ) {
        let (mut filter, mut seen) = (filter(), Seen::default());
        for (from_guest, part) in parts {
            if from_guest { seen.guest(&mut filter, &part) } else { seen.shim(&mut filter, &part) }
        }
        filter.stream_lost(Some(&mut seen.peer), &mut seen.local);
        filter.stream_lost(None, &mut seen.local);
        filter.finish(&mut seen.local);
    }
}

#[test]
fn a_replaced_guest_gets_the_calls_that_wait_once_more_and_the_others_are_answered() {
    let asked = [(1, "WaitProcess"), (3, "GetOOMEvent"), (5, "ReadStdout"), (7, "WriteStdin")]
        .map(|(stream, method)| request(stream, method, 10));
    let (mut filter, mut seen) = (filter(), Seen::default());
    for request in &asked {
        seen.shim(&mut filter, request);
    }
    assert_eq!(&seen.peer[..], asked.concat());
    // The loss is noticed by the next relay, and it cut the answer to stream 5.
    seen.guest(&mut filter, &answer(5, 100)[..30]);
    filter = handed_over(&filter);
    let mut again = BytesMut::new();
    assert!(filter.stream_lost(Some(&mut again), &mut seen.local));
    assert_eq!(&again[..], asked[..3].concat());
    assert_eq!(codes(&seen.local), [(7, code::UNAVAILABLE)]);
    seen.local.clear();
    let read = answer(5, 100);
    seen.guest(&mut filter, &read);
    assert_eq!(&seen.local[..], &read[..], "the next guest's answer, and no other");
    seen.local.clear();
    again.clear();
    assert!(filter.stream_lost(Some(&mut again), &mut seen.local));
    assert_eq!(&again[..], asked[..2].concat(), "the connection was usable, and is lost again");
    assert!(seen.local.is_empty());
    filter.finish(&mut seen.local);
    assert_eq!(codes(&seen.local), [(1, code::UNAVAILABLE), (3, code::UNAVAILABLE)]);
    assert_eq!(filter.shared.pending.load(Relaxed), 0);
}

#[test]
fn a_dead_agent_answers_all_but_the_long_poll_until_the_sandbox_ends() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    for (stream, method) in [(1, "WaitProcess"), (3, "GetOOMEvent"), (5, "ReadStdout")] {
        seen.shim(&mut filter, &request(stream, method, 10));
    }
    assert!(filter.stream_lost(None, &mut seen.local));
    assert_eq!(codes(&seen.local), [(1, code::UNAVAILABLE), (5, code::UNAVAILABLE)]);
    seen.local.clear();
    filter.finish(&mut seen.local);
    assert_eq!(codes(&seen.local), [(3, code::UNAVAILABLE)]);
    assert_eq!(filter.shared.pending.load(Relaxed), 0);
}

#[test]
fn a_long_request_is_not_kept() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    seen.shim(&mut filter, &request(1, "WaitProcess", SMALL_CALL));
    seen.peer.clear();
    assert!(filter.stream_lost(Some(&mut seen.peer), &mut seen.local));
    assert_eq!(codes(&seen.local), [(1, code::UNAVAILABLE)]);
    assert!(seen.peer.is_empty());
}

#[test]
fn an_inconsistent_filter_state_is_refused() {
    let good = filter().state().unwrap();
    assert!(filter().restore(&good));
    for bad in ["null", "{}", r#"{"state":{"Header":{"bytes":[0,0,0,0,0,0,0,0,0,0],"have":10}}}"#] {
        let mut state = good.clone();
        state["requests"] = serde_json::from_str(bad).unwrap();
        assert!(!filter().restore(&state), "{bad}");
    }
    let mut many = good.clone();
    many["pending"] = serde_json::json!([[1, false], [3, false], [5, true], [7, false], [9, false]]);
    assert!(!filter().restore(&many));
    let mut cut = good.clone();
    cut["repeatable"] = serde_json::to_value(&request(1, "WaitProcess", 10)[..50]).unwrap();
    assert!(!filter().restore(&cut));
}

#[test]
fn the_long_poll_is_known_even_when_its_name_comes_byte_by_byte() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    for byte in request(3, "GetOOMEvent", 100) {
        seen.shim(&mut filter, &[byte]);
    }
    assert!(filter.stream_lost(None, &mut seen.local));
    assert!(seen.local.is_empty());
}

#[test]
fn an_oversize_request_is_answered_and_skipped() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    let header = Header { length: u32::MAX, stream: 1, kind: frame::REQUEST, flags: 0 };
    seen.shim(&mut filter, &header.encode());
    assert_eq!(codes(&seen.local), [(1, code::INVALID_ARGUMENT)]);
    let small = Header { length: MAX_PAYLOAD as u32 + 1, stream: 1, kind: frame::REQUEST, flags: 0 };
    let mut filter = self::filter();
    seen.shim(&mut filter, &small.encode());
    seen.shim(&mut filter, &vec![0; MAX_PAYLOAD + 1]);
    assert!(seen.peer.is_empty());
    let next = request(3, "Check", 5);
    seen.shim(&mut filter, &next);
    assert_eq!(&seen.peer[..], &next[..]);
}

#[test]
fn more_calls_than_the_bounds_are_refused_one_by_one() {
    let (mut one, mut seen) = (filter(), Seen::default());
    let mut other = AgentFilter::new(one.shared.clone(), one.bounds);
    for n in 0..5 {
        seen.shim(&mut one, &request(2 * n + 1, "WaitProcess", 0));
    }
    assert_eq!(codes(&seen.local), [(9, code::RESOURCE_EXHAUSTED)], "four fit this connection");
    seen.local.clear();
    for n in 0..3 {
        seen.shim(&mut other, &request(2 * n + 1, "WaitProcess", 0));
    }
    assert_eq!(codes(&seen.local), [(5, code::RESOURCE_EXHAUSTED)], "six fit the sandbox");
    drop(one);
    assert_eq!(other.shared.pending.load(Relaxed), 2, "a closed connection gives its share back");
}

#[test]
fn unrequested_answers_do_not_reach_the_shim() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    seen.shim(&mut filter, &request(1, "Check", 0));
    seen.guest(&mut filter, &answer(99, 10));
    seen.guest(&mut filter, &frame(frame::DATA, 3, b"x"));
    seen.guest(&mut filter, &frame(77, 1, b"x"));
    assert!(seen.local.is_empty());
    seen.guest(&mut filter, &answer(1, 10));
    seen.guest(&mut filter, &answer(1, 10));
    assert_eq!(codes(&seen.local), [(1, 0)], "the second answer is one too many");
}

#[test]
fn an_oversize_answer_becomes_an_error_of_its_call() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    seen.shim(&mut filter, &request(1, "Check", 0));
    let header = Header { length: u32::MAX, stream: 1, kind: frame::RESPONSE, flags: 0 };
    seen.guest(&mut filter, &header.encode());
    assert_eq!(codes(&seen.local), [(1, code::INTERNAL)]);
}

#[test]
fn a_small_answer_cut_by_the_loss_costs_its_call_and_a_large_one_the_connection() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    seen.shim(&mut filter, &request(1, "StatsContainer", 0));
    seen.guest(&mut filter, &answer(1, 8192)[..100]);
    assert!(filter.stream_lost(Some(&mut seen.peer), &mut seen.local));
    assert_eq!(codes(&seen.local), [(1, code::UNAVAILABLE)]);
    seen.shim(&mut filter, &request(3, "ReadStdout", 0));
    seen.guest(&mut filter, &answer(3, 100_000)[..20_000]);
    seen.peer.clear();
    assert!(!filter.stream_lost(Some(&mut seen.peer), &mut seen.local));
    assert!(seen.peer.is_empty());
}

#[test]
fn a_request_cut_by_the_loss_does_not_spill_into_the_next_stream() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    let long = request(1, "WriteStdin", 1000);
    seen.shim(&mut filter, &long[..300]);
    seen.peer.clear();
    assert!(filter.stream_lost(Some(&mut seen.peer), &mut seen.local));
    assert_eq!(codes(&seen.local), [(1, code::UNAVAILABLE)]);
    seen.shim(&mut filter, &long[300..]);
    // The next guest gets a request whole if none of it had passed.
    let next = request(3, "WaitProcess", 10);
    seen.shim(&mut filter, &next[..15]);
    assert!(filter.stream_lost(Some(&mut seen.peer), &mut seen.local));
    seen.shim(&mut filter, &next[15..]);
    assert_eq!(&seen.peer[..], &next[..]);
    assert_eq!(codes(&seen.local), [(1, code::UNAVAILABLE)]);
}
