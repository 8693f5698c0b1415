//! Tests two sessions over a wire that may be cut at every byte.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::record::{self, BadRecord, Hello, Level, Line, MAX_TEXT, Target};

const GUEST: SessionId = SessionId([7; 16]);

/// Returns the byte at a place of a stream: different for every stream, direction and place.
fn byte(side: usize, stream: u32, at: usize) -> u8 {
    let mut x = (at as u64) << 20 ^ u64::from(stream) << 8 ^ side as u64;
    x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x >> 56) as u8
}

fn line(number: u64, text: &str) -> Vec<u8> {
    Line { level: Level::Info, lost: 0, uptime_ms: number, target: "test", text }.encode()
}

/// Bytes and Closes that one end received on a stream.
#[derive(Default)]
struct Seen {
    bytes: usize,
    closed: usize,
    /// Received and not consumed yet.
    held: usize,
}

struct End {
    session: Session,
    /// Received bytes that are not a whole record yet.
    carry: Vec<u8>,
    /// Bytes sent on each stream, and whether this end closed it.
    sent: BTreeMap<u32, usize>,
    closed: BTreeMap<u32, bool>,
    seen: BTreeMap<u32, Seen>,
    control_sent: Vec<usize>,
    /// Log records, each identified by a number.
    lines_sent: Vec<u64>,
    lines_seen: Vec<u64>,
    control_seen: Vec<usize>,
}

/// End 0 is the relay, end 1 the guest; `wire[0]` goes from the relay to the guest.
struct Pair {
    ends: [End; 2],
    wire: [Vec<u8>; 2],
    linked: bool,
    welcomed: bool,
    epochs: u64,
}

fn end(role: Role, id: Option<SessionId>, limits: SessionLimits) -> End {
    End {
        session: Session::new(role, id, limits),
        carry: Vec::new(),
        sent: BTreeMap::new(),
        closed: BTreeMap::new(),
        seen: BTreeMap::new(),
        control_sent: Vec::new(),
        lines_sent: Vec::new(),
        lines_seen: Vec::new(),
        control_seen: Vec::new(),
    }
}

impl Pair {
    fn new() -> Pair {
        let limits = SessionLimits { streams: 40, ..SessionLimits::default() };
        let ends = [end(Role::Relay, None, limits), end(Role::Guest, Some(GUEST), limits)];
        Pair { ends, wire: [Vec::new(), Vec::new()], linked: false, welcomed: false, epochs: 0 }
    }

    /// Starts a new transport. `cut` ends the handshake early: 1 before the relay receives Hello, 2 before the guest
    /// receives Welcome.
    fn link(&mut self, cut: u8) {
        self.cut();
        let hello = self.ends[1].session.hello().unwrap();
        let hello = Hello::decode(&hello.encode()).unwrap();
        if cut == 1 {
            return;
        }
        self.epochs += 1;
        let joined = self.ends[0].session.answer(&hello, self.epochs).unwrap();
        assert!(!joined.lost);
        self.linked = true;
        if cut == 2 {
            // Records that the relay has already written are lost with the Welcome.
            self.transfer(0, 50_000);
            self.cut();
        }
    }

    fn cut(&mut self) {
        (self.linked, self.welcomed) = (false, false);
        for at in 0..2 {
            self.wire[at].clear();
            self.ends[at].carry.clear();
        }
    }

    fn transfer(&mut self, from: usize, most: usize) -> usize {
        // The guest sends nothing in a session before it receives the Welcome.
        if !self.linked || from == 1 && !self.welcomed {
            return 0;
        }
        let session = &mut self.ends[from].session;
        session.schedule();
        let mut slices = [IoSlice::new(&[]); 5];
        let filled = session.output(&mut slices);
        let mut bytes = slices[..filled].iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>();
        bytes.truncate(most);
        session.wrote(bytes.len());
        self.wire[from].extend_from_slice(&bytes);
        bytes.len()
    }

    fn deliver(&mut self, from: usize, most: usize) -> usize {
        let take = most.min(self.wire[from].len());
        let bytes: Vec<u8> = self.wire[from].drain(..take).collect();
        let end = &mut self.ends[1 - from];
        end.carry.extend_from_slice(&bytes);
        let carry = std::mem::take(&mut end.carry);
        let mut input = &carry[..];
        while let Some((header, payload)) = record::split(&mut input).unwrap() {
            if header.kind == RecordKind::Welcome {
                let welcome = record::Welcome::decode(payload).unwrap();
                assert!(!end.session.welcomed(&welcome).unwrap().lost);
                self.welcomed = true;
                continue;
            }
            match end.session.receive(&header, payload).unwrap() {
                Received::Nothing => {}
                Received::Opened(id, StreamKind::Agent) => {
                    assert!(end.seen.insert(id, Seen::default()).is_none(), "opened twice");
                    end.sent.entry(id).or_default();
                }
                Received::Data(id, data) => {
                    let seen = end.seen.entry(id).or_default();
                    for (at, value) in data.iter().enumerate() {
                        assert_eq!(*value, byte(from, id, seen.bytes + at), "lost, doubled or out of order");
                    }
                    seen.bytes += data.len();
                    seen.held += data.len();
                    assert!(seen.held <= WINDOW as usize, "beyond the window");
                }
                Received::Closed(id, _) => end.seen.entry(id).or_default().closed += 1,
                Received::Control(message) => end.control_seen.push(message.len()),
                Received::Line(line) => end.lines_seen.push(line.uptime_ms),
                Received::Opened(_, StreamKind::Dial(_)) | Received::Connected(_) | Received::Finished(_) => {
                    panic!("this test does not dial")
                }
            }
        }
        end.carry = input.to_vec();
        take
    }

    fn send(&mut self, side: usize, id: u32, bytes: usize) {
        let end = &mut self.ends[side];
        if end.closed.contains_key(&id) || end.seen.get(&id).is_some_and(|seen| seen.closed > 0) {
            return;
        }
        // The guest has no stream before its Open arrives.
        let Some(at) = end.sent.get_mut(&id) else { return };
        let data: Vec<u8> = (*at..*at + bytes).map(|at| byte(side, id, at)).collect();
        *at += bytes;
        end.session.send(id, &data);
    }

    fn close(&mut self, side: usize, id: u32) {
        let end = &mut self.ends[side];
        if !end.sent.contains_key(&id) {
            return;
        }
        end.session.close(id, CloseReason::Closed);
        end.closed.insert(id, true);
    }

    fn consume(&mut self, side: usize, id: u32, most: usize) {
        let end = &mut self.ends[side];
        if let Some(seen) = end.seen.get_mut(&id) {
            let bytes = seen.held.min(most);
            seen.held -= bytes;
            end.session.consumed(id, bytes);
        }
    }

    fn streams(&self) -> Vec<u32> {
        self.ends[0].sent.keys().copied().collect()
    }

    /// Delivers everything over one more good link.
    fn settle(&mut self) {
        self.link(0);
        self.flow();
    }

    /// Delivers everything under way.
    fn flow(&mut self) {
        for _ in 0..10_000 {
            let mut moved = 0;
            for from in 0..2 {
                moved += self.transfer(from, usize::MAX);
                moved += self.deliver(from, usize::MAX);
                for id in self.streams() {
                    self.consume(from, id, usize::MAX);
                }
            }
            if moved == 0 {
                return;
            }
        }
        panic!("does not settle");
    }

    fn check(&self) {
        for side in 0..2 {
            let (from, to) = (&self.ends[side], &self.ends[1 - side]);
            assert_eq!(from.control_sent, to.control_seen, "control messages");
            assert_eq!(from.lines_sent, to.lines_seen, "lines of the log");
            for (id, sent) in &from.sent {
                let seen = to.seen.get(id).map_or(0, |seen| seen.bytes);
                let closed_there = to.closed.contains_key(id);
                assert!(
                    seen == *sent || closed_there && seen < *sent,
                    "stream {id}: {sent} sent, {seen} seen"
                );
                let closed_seen = to.seen.get(id).map_or(0, |seen| seen.closed);
                if from.closed.contains_key(id) && !closed_there {
                    assert_eq!(closed_seen, 1, "stream {id}");
                }
                assert!(closed_seen <= 1);
            }
        }
    }
}

fn step(pair: &mut Pair, (what, which, size): (u8, u16, u32)) {
    let side = usize::from(which & 1);
    let streams = pair.streams();
    let id = streams.get(usize::from(which >> 1) % streams.len().max(1)).copied();
    match (what, id) {
        (0, _) | (_, None) => {
            if let Some(id) = pair.ends[0].session.open(StreamKind::Agent) {
                pair.ends[0].sent.insert(id, 0);
                pair.ends[0].seen.insert(id, Seen::default());
            }
        }
        (1 | 2, Some(id)) => {
            let room = pair.ends[side].session.room(id);
            pair.send(side, id, room.min(size as usize));
        }
        // Without checking the room, like a filter that lengthens a message.
        (3, Some(id)) => pair.send(side, id, size as usize % 5000),
        (4, _) => {
            let message = size as usize % 60_000;
            pair.ends[side].control_sent.push(message);
            pair.ends[side].session.control(Bytes::from(vec![1; message]));
        }
        (5, Some(id)) if size % 8 == 0 => pair.close(side, id),
        (6, Some(id)) => pair.consume(side, id, size as usize),
        (7, _) if size % 4 == 0 => pair.cut(),
        (8, _) if size % 2 == 0 => pair.link((size / 2 % 4) as u8),
        (9, _) => pair.ends[side].session.ping(),
        (14, _) if pair.linked && pair.welcomed => {
            let guest = &mut pair.ends[1];
            let text = "x".repeat(size as usize % 5000);
            while guest.session.has_room_for_line() {
                let number = guest.lines_sent.len() as u64;
                guest.lines_sent.push(number);
                guest.session.line(&line(number, &text));
            }
        }
        (19, _) => {
            // Another process continues this end; transports are not handed over.
            pair.cut();
            let end = &mut pair.ends[side];
            let role = if side == 0 { Role::Relay } else { Role::Guest };
            let text = serde_json::to_string(&end.session.state()).unwrap();
            let state = serde_json::from_str::<SessionState>(&text).unwrap();
            end.session = Session::restore(role, end.session.limits, state.clone()).unwrap();
            assert_eq!(end.session.state(), state);
        }
        (10..=13, _) => drop(pair.transfer(side, size as usize)),
        _ => drop(pair.deliver(side, size as usize)),
    }
    for end in &pair.ends {
        let bound = REPLAY + CHUNK + HEADER_LEN;
        assert!(end.session.log.len() <= bound, "{} kept", end.session.log.len());
        assert!(end.session.urgent.bytes.len() <= 2 * URGENT_MOST);
        assert!(end.session.lines.under_way <= (64 << 10) + MAX_TEXT + 100);
    }
}

/// Number of random sequences: an optimised build tries millions in the fuzz target `link`.
fn cases() -> u32 {
    if std::env::var_os("PEERPOD_TEST_LONG").is_some() { 2000 } else { 50 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn no_cut_loses_or_doubles_bytes(
        steps in prop::collection::vec((0u8..20, any::<u16>(), 0u32..200_000), 1..400),
    ) {
        let mut pair = Pair::new();
        for one in steps {
            step(&mut pair, one);
        }
        pair.settle();
        pair.check();
        for end in &pair.ends {
            prop_assert!(end.session.streams.values().all(Stream::is_open), "ended streams are forgotten");
        }
    }

    #[test]
    fn arbitrary_bytes_from_the_peer_are_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        drop(feed(&mut opened(), &bytes));
    }

    #[test]
    fn arbitrary_records_from_the_peer_are_refused_without_panic(
        records in prop::collection::vec((0u8..24, 0u8..2, 0u32..6, 0u64..3, 0u64..3, 0usize..6), 0..60),
    ) {
        let mut session = opened();
        let mut seq = 0;
        for (kind, flags, stream, ahead, ack, length) in records {
            let Some(kind) = RecordKind::from_u8(kind) else { continue };
            let flags = if kind == RecordKind::Control { flags } else { 0 };
            let seq = if kind.is_sequenced() { seq += 1; seq + ahead / 2 } else { 0 };
            let header = RecordHeader { length: length as u32, kind, flags, stream, seq, ack };
            let payload = [1, 0, 0, 0, 0, 0];
            if feed(&mut session, &[&header.encode()[..], &payload[..length]].concat()).is_err() {
                break;
            }
            session.schedule();
        }
    }
}

#[test]
fn an_invalid_state_is_refused() {
    let state = serde_json::to_value(opened().state()).unwrap();
    let with = |key: &str, value: serde_json::Value| {
        let mut state = state.clone();
        state[key] = value;
        let state = serde_json::from_value::<SessionState>(state).unwrap();
        Session::restore(Role::Relay, SessionLimits::default(), state).map(|_| ())
    };
    assert_eq!(with("recv", 0.into()), Ok(()));
    for (key, value) in [
        ("version", 999.into()),
        ("first", 7.into()),
        ("first", 0.into()),
        ("high_sent", 9.into()),
        ("records", "AAAA".into()),
        ("next_own", 2.into()),
        ("next_peer", 1.into()),
    ] {
        assert!(with(key, value).is_err(), "{key}");
    }
    let mut odd = state.clone();
    odd["streams"][0]["window"] = u32::MAX.into();
    let odd = serde_json::from_value::<SessionState>(odd).unwrap();
    assert!(Session::restore(Role::Relay, SessionLimits::default(), odd).is_err());
}

/// Returns a relay's session with stream 1 open and all records sent.
fn opened() -> Session {
    let mut session = Session::new(Role::Relay, None, SessionLimits::default());
    let hello = Hello { versions: (1, 9), session: GUEST, epoch: 0, recv: 0, program: String::new() };
    session.answer(&hello, 5).unwrap();
    assert_eq!(session.open(StreamKind::Agent), Some(1));
    drain(&mut session);
    session
}

fn drain(session: &mut Session) -> usize {
    let mut total = 0;
    loop {
        session.schedule();
        let mut slices = [IoSlice::new(&[]); 4];
        let filled = session.output(&mut slices);
        let bytes: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
        session.wrote(bytes);
        total += bytes;
        if bytes == 0 {
            return total;
        }
    }
}

fn feed(session: &mut Session, mut bytes: &[u8]) -> Result<(), Violation> {
    while let Some((header, payload)) = record::split(&mut bytes)? {
        session.receive(&header, payload)?;
    }
    Ok(())
}

fn one(kind: RecordKind, stream: u32, seq: u64, payload: &[u8]) -> Vec<u8> {
    let header = RecordHeader { stream, seq, ..RecordHeader::new(kind, payload.len() as u32) };
    [&header.encode()[..], payload].concat()
}

#[test]
fn every_violation_has_its_error() {
    let after = |bytes: &[u8]| feed(&mut opened(), bytes).unwrap_err();
    assert_eq!(after(&one(RecordKind::Data, 1, 2, b"x")), Violation::Sequence(1, 2));
    assert_eq!(after(&one(RecordKind::Data, 1, 0, b"x")), Violation::Sequence(1, 0));
    assert_eq!(after(&one(RecordKind::Ping, 0, 1, b"")), Violation::Sequence(0, 1));
    assert_eq!(after(&one(RecordKind::Data, 3, 1, b"x")), Violation::Stream(RecordKind::Data, 3));
    assert_eq!(after(&one(RecordKind::Data, 1, 1, b"")), Violation::Payload(RecordKind::Data));
    assert_eq!(after(&one(RecordKind::Credit, 1, 1, b"123")), Violation::Payload(RecordKind::Credit));
    assert_eq!(after(&one(RecordKind::Credit, 1, 1, &[0xff; 4])), Violation::Credit(1));
    assert_eq!(after(&one(RecordKind::Close, 1, 1, b"")), Violation::Payload(RecordKind::Close));
    assert_eq!(after(&one(RecordKind::Open, 2, 1, &[9])), Violation::Payload(RecordKind::Open));
    assert_eq!(after(&one(RecordKind::Open, 1, 1, &[1])), Violation::Open(1));
    assert_eq!(after(&one(RecordKind::Hello, 0, 0, b"")), Violation::Misplaced(RecordKind::Hello));
    assert_eq!(after(&one(RecordKind::Claim, 0, 0, b"")), Violation::Misplaced(RecordKind::Claim));
    let ack = RecordHeader { ack: 99, ..RecordHeader::new(RecordKind::Ack, 0) };
    assert_eq!(after(&ack.encode()), Violation::Ack(1, 99));
    let closed_twice = [one(RecordKind::Close, 1, 1, &[0]), one(RecordKind::Data, 1, 2, b"x")].concat();
    assert_eq!(after(&closed_twice), Violation::Stream(RecordKind::Data, 1));
    assert!(matches!(after(&[0xff; 28]), Violation::Record(BadRecord::Length(_))));
    let version = Hello { versions: (4, 5), session: GUEST, epoch: 0, recv: 0, program: String::new() };
    let mut fresh = Session::new(Role::Relay, None, SessionLimits::default());
    assert_eq!(fresh.answer(&version, 1).unwrap_err(), Violation::Version(4, 5));
}

#[test]
fn a_dialled_stream_has_no_credit_before_its_answer_and_each_side_ends_once() {
    let target = Target { v6: true, port: 8080 };
    let mut session = opened();
    assert!(session.speaks_dial());
    let call = session.open(StreamKind::Dial(target)).unwrap();
    assert_eq!(session.room(call), 0, "the stream is not connected yet");
    drain(&mut session);
    let answer = one(RecordKind::Credit, call, 1, &WINDOW.to_be_bytes());
    let (header, payload) = record::split(&mut &answer[..]).unwrap().unwrap();
    assert_eq!(session.receive(&header, payload).unwrap(), Received::Connected(call));
    assert!(session.room(call) > 0);
    session.finish(call);
    assert_eq!(session.room(call), 0, "the stream is finished");
    assert!(drain(&mut session) > 0);
    session.finish(call);
    assert_eq!(drain(&mut session), 0, "once");
    let finish = one(RecordKind::Finish, call, 2, b"");
    let (header, payload) = record::split(&mut &finish[..]).unwrap().unwrap();
    assert_eq!(session.receive(&header, payload).unwrap(), Received::Finished(call));
    let again = feed(&mut session, &one(RecordKind::Finish, call, 3, b""));
    assert_eq!(again, Err(Violation::Stream(RecordKind::Finish, call)));

    let data_after_finish = [one(RecordKind::Finish, 1, 1, b""), one(RecordKind::Data, 1, 2, b"x")].concat();
    assert_eq!(feed(&mut opened(), &data_after_finish), Err(Violation::Window(1)));
    let finish_with_words = one(RecordKind::Finish, 1, 1, b"x");
    assert_eq!(feed(&mut opened(), &finish_with_words), Err(Violation::Payload(RecordKind::Finish)));
    // The dialled side gives no credit before it has answered.
    let (payload, length) = StreamKind::Dial(target).encode();
    let mut called = opened();
    feed(&mut called, &one(RecordKind::Open, 2, 1, &payload[..length])).unwrap();
    assert_eq!(feed(&mut called, &one(RecordKind::Data, 2, 2, b"x")), Err(Violation::Window(2)));
    for payload in [&[2, 4, 0, 0][..], &[2, 5, 0, 80], &[2, 4, 0], &[2]] {
        let opened = feed(&mut opened(), &one(RecordKind::Open, 2, 1, payload));
        assert_eq!(opened, Err(Violation::Payload(RecordKind::Open)), "{payload:?}");
    }
}

#[test]
fn window_control_message_and_number_of_streams_are_limited() {
    let mut session = opened();
    let part = vec![0; record::MAX_PAYLOAD];
    let mut result = Ok(());
    let mut records = 0;
    while result.is_ok() {
        records += 1;
        result = feed(&mut session, &one(RecordKind::Data, 1, records, &part));
    }
    assert_eq!((records, result), (5, Err(Violation::Window(1))));

    let mut session = opened();
    let mut result = Ok(());
    let mut seq = 0;
    while result.is_ok() {
        seq += 1;
        let header =
            RecordHeader { flags: MORE, seq, ..RecordHeader::new(RecordKind::Control, part.len() as u32) };
        result = feed(&mut session, &[&header.encode()[..], &part].concat());
    }
    assert_eq!((seq, result), (17, Err(Violation::Control(1 << 20))));

    let mut session = opened();
    let mut result = Ok(());
    let mut opened = 0;
    while result.is_ok() {
        opened += 1;
        result = feed(&mut session, &one(RecordKind::Open, 2 * opened as u32, opened, &[1]));
    }
    assert_eq!((opened, result), (1024, Err(Violation::Streams(1024))));
    assert_eq!(session.open(StreamKind::Agent), None);
}

#[test]
fn a_peer_that_pings_without_reading_fills_no_queue() {
    let mut session = opened();
    for _ in 0..100_000 {
        feed(&mut session, &one(RecordKind::Ping, 0, 0, b"")).unwrap();
        session.schedule();
    }
    assert!(session.urgent.bytes.len() <= 2 * URGENT_MOST);
}

#[test]
fn a_stream_without_credit_does_not_hold_up_another_or_a_control_message() {
    let mut session = opened();
    let other = session.open(StreamKind::Agent).unwrap();
    while session.room(1) > 0 {
        session.send(1, &vec![0; session.room(1)]);
        drain(&mut session);
    }
    session.send(1, &[0; 100_000]);
    assert_eq!((drain(&mut session), session.room(1)), (0, 0));
    assert!(session.room(other) > 0);
    session.send(other, b"call");
    session.control(Bytes::from_static(b"flush"));
    assert_eq!(drain(&mut session), 2 * HEADER_LEN + 4 + 5);
}

#[test]
fn control_goes_before_data_that_waits() {
    let mut session = opened();
    session.send(1, &[0; 200_000]);
    session.control(Bytes::from_static(b"now"));
    let mut wire = Vec::new();
    while wire.len() < 200_000 {
        session.schedule();
        let mut slices = [IoSlice::new(&[]); 16];
        let filled = session.output(&mut slices);
        let bytes = slices[..filled].iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>();
        session.wrote(bytes.len());
        wire.extend(bytes);
    }
    let (mut input, mut before) = (&wire[..], 0);
    while let Some((header, _)) = record::split(&mut input).unwrap() {
        if header.kind == RecordKind::Control {
            break;
        }
        before += HEADER_LEN + header.length as usize;
    }
    assert!(before <= AHEAD + CHUNK + HEADER_LEN, "{before} bytes stood before it");
}

#[test]
fn a_relay_without_the_session_starts_a_new_one() {
    let mut pair = Pair::new();
    pair.link(0);
    pair.transfer(0, usize::MAX);
    pair.deliver(0, usize::MAX);
    let epoch = pair.ends[1].session.epoch();
    assert_eq!(epoch, 1);

    let mut relay = Session::new(Role::Relay, None, SessionLimits::default());
    let hello = pair.ends[1].session.hello().unwrap();
    let joined = relay.answer(&hello, 9).unwrap();
    assert_eq!(joined, Joined { resumed: false, lost: false }, "the relay had nothing to lose");
    let welcome = record::Welcome { version: 1, resumed: false, epoch: 9, recv: 0, program: String::new() };
    let joined = pair.ends[1].session.welcomed(&welcome).unwrap();
    assert_eq!(joined, Joined { resumed: false, lost: true });
    assert_eq!(pair.ends[1].session.epoch(), 9);
}

#[test]
fn a_new_guest_program_gets_nothing_of_the_previous_one() {
    let mut session = opened();
    let other =
        Hello { versions: (1, 1), session: SessionId([8; 16]), epoch: 0, recv: 0, program: String::new() };
    let joined = session.answer(&other, 6).unwrap();
    assert_eq!(joined, Joined { resumed: false, lost: true });
    assert_eq!((session.room(1), session.unacknowledged(), session.id()), (0, 0, Some(other.session)));
}

#[test]
fn a_guest_refuses_to_resume_an_unknown_session() {
    let mut guest = Session::new(Role::Guest, Some(GUEST), SessionLimits::default());
    for (resumed, epoch, recv) in [(true, 1, 0), (true, 0, 0), (false, 0, 0), (false, 3, 7)] {
        let welcome = record::Welcome { version: 1, resumed, epoch, recv, program: String::new() };
        assert!(matches!(guest.welcomed(&welcome), Err(Violation::Handshake(_))), "{welcome:?}");
    }
}

#[test]
fn lines_of_the_log_go_behind_everything_else_and_leave_room_for_it() {
    let mut pair = Pair::new();
    let guest = |pair: &mut Pair| pair.ends[1].session.has_room_for_line();
    assert!(!guest(&mut pair), "no handshake, no line");
    pair.settle();
    let stream = pair.ends[0].session.open(StreamKind::Agent).unwrap();
    pair.ends[0].sent.insert(stream, 0);
    pair.settle();
    pair.ends[1].session.send(stream, &[byte(1, stream, 0)]);
    pair.settle();

    // The peer acknowledges nothing: the window of log records fills, that of the streams does not.
    let mut lines = 0;
    while guest(&mut pair) {
        pair.ends[1].session.line(&line(lines, &"x".repeat(MAX_TEXT)));
        lines += 1;
        pair.ends[1].session.schedule();
        drain(&mut pair.ends[1].session);
    }
    assert!((16..=17).contains(&lines), "{lines}");
    assert!(pair.ends[1].session.room(stream) > 100_000);
    pair.settle();
    assert!(!guest(&mut pair), "the peer has them without an acknowledgement");
    pair.flow();
    assert!(guest(&mut pair), "it was asked");
    // Waiting data goes first.
    pair.ends[1].session.control(Bytes::from_static(b"first"));
    assert!(!guest(&mut pair), "a control message waits");
    drain(&mut pair.ends[1].session);
    assert!(guest(&mut pair));
}

#[test]
fn an_older_peer_is_sent_no_lines_and_a_relay_sends_none() {
    let mut old = Session::new(Role::Guest, Some(GUEST), SessionLimits::default());
    let welcome =
        |version| record::Welcome { version, resumed: false, epoch: 3, recv: 0, program: String::new() };
    old.welcomed(&welcome(2)).unwrap();
    assert!(!old.has_room_for_line());
    old.reset(Some(GUEST));
    old.welcomed(&welcome(3)).unwrap();
    assert!(old.has_room_for_line());
    let record = |seq| {
        let payload = line(1, "x");
        let header = RecordHeader { seq, ..RecordHeader::new(RecordKind::Line, payload.len() as u32) };
        [&header.encode()[..], &payload].concat()
    };
    assert!(matches!(feed(&mut old, &record(1)), Err(Violation::Misplaced(RecordKind::Line))));

    let mut relay = Session::new(Role::Relay, None, SessionLimits::default());
    let hello = Hello { versions: (1, 2), session: GUEST, epoch: 0, recv: 0, program: String::new() };
    relay.answer(&hello, 5).unwrap();
    assert!(matches!(feed(&mut relay, &record(1)), Err(Violation::Misplaced(RecordKind::Line))));
}
