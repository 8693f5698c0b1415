//! Fuzzes records of the link from a hostile peer, before and in a session. The result is a typed refusal or an event,
//! never a panic, and memory stays within the bounds.

use std::io::IoSlice;

use bytes::Bytes;
use peerpod_link::endpoint::Role;
use peerpod_link::record::{
    self, CloseReason, Level, Line, MAX_TEXT, RecordKind, SessionId, StreamKind, Target, Welcome,
};
use peerpod_link::session::{Received, Session, SessionLimits};

const LIMITS: fn() -> SessionLimits = || SessionLimits { streams: 64, ..SessionLimits::default() };

pub(crate) fn run(input: &[u8]) {
    for role in [Role::Relay, Role::Guest] {
        feed(&mut Session::new(role, None, LIMITS()), input);
    }
    let (mut relay, mut guest) = joined();
    begin(&mut relay);
    drain(&mut relay);
    feed(&mut relay, input);
    feed(&mut guest, input);
}

/// Feeds records to a session until it refuses one, with an endpoint's answers. Returns the remaining bytes.
fn feed<'a>(session: &mut Session, mut input: &'a [u8]) -> &'a [u8] {
    loop {
        let before = input;
        let Ok(Some((header, payload))) = record::split(&mut input) else { return before };
        assert!(payload.len() <= record::MAX_PAYLOAD);
        match session.receive(&header, payload) {
            Err(_) => return before,
            Ok(Received::Opened(id, StreamKind::Agent)) => session.send(id, b"the local side's first words"),
            Ok(Received::Opened(id, StreamKind::Dial(_))) => session.accept(id),
            Ok(Received::Data(id, data)) => session.consumed(id, data.len()),
            Ok(Received::Control(message)) => assert!(message.len() <= LIMITS().control_message),
            Ok(Received::Line(line)) => assert!(line.text.len() <= MAX_TEXT),
            Ok(Received::Nothing | Received::Closed(..) | Received::Connected(_) | Received::Finished(_)) => {
            }
        }
        drain(session);
        assert!(session.buffered() <= 4 << 20, "{} bytes kept", session.buffered());
    }
}

/// Returns all bytes that a transport would take now.
fn drain(session: &mut Session) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        session.schedule();
        let mut slices = [IoSlice::new(&[]); 8];
        let filled = session.output(&mut slices);
        let before = all.len();
        slices.iter().take(filled).for_each(|slice| all.extend_from_slice(slice));
        let taken = all.len() - before;
        if taken == 0 {
            return all;
        }
        session.wrote(taken);
    }
}

/// Returns both ends after a successful handshake.
fn joined() -> (Session, Session) {
    let mut relay = Session::new(Role::Relay, None, LIMITS());
    let mut guest = Session::new(Role::Guest, Some(SessionId([7; 16])), LIMITS());
    let hello = guest.hello().expect("it has a name");
    relay.answer(&hello, 1).expect("the versions are ours");
    let welcome = drain(&mut relay);
    let (header, payload) = record::split(&mut &welcome[..]).expect("a record").expect("a whole one");
    assert_eq!(header.kind, RecordKind::Welcome);
    guest.welcomed(&Welcome::decode(payload).expect("a Welcome")).expect("it fits");
    (relay, guest)
}

/// Sends the relay's first records: streams, bytes on them, a question. Returns the streams.
fn begin(relay: &mut Session) -> Vec<u32> {
    let dial = StreamKind::Dial(Target { v6: true, port: 8080 });
    let streams: Vec<u32> = [StreamKind::Agent, StreamKind::Agent, dial]
        .into_iter()
        .filter_map(|kind| relay.open(kind))
        .collect();
    for stream in &streams {
        relay.send(*stream, &[0x5a; 100]);
    }
    relay.control(Bytes::from_static(b"a question"));
    relay.ping();
    streams
}

/// Records a session, cut where a transport may break. Returns the bytes of the relay and of the guest.
pub(crate) fn recorded() -> [Vec<u8>; 2] {
    let (mut relay, mut guest) = joined();
    let streams = begin(&mut relay);
    let mut said = drain(&mut relay);
    assert!(feed(&mut guest, &said).is_empty(), "the guest takes it");
    for (stream, size) in streams.iter().zip([10, 40_000]) {
        guest.send(*stream, &vec![0xa5; size]);
    }
    guest.control(Bytes::from(vec![7; 30_000]));
    guest.ping();
    for stream in &streams {
        guest.finish(*stream);
        guest.close(*stream, CloseReason::Closed);
    }
    let line =
        Line { level: Level::Warn, lost: 3, uptime_ms: 5, target: "kata-agent", text: "a line\u{1b}[0m" };
    guest.line(&line.encode());
    // The guest's earlier bytes are lost with its transport: the new transport carries them again.
    let hello = guest.hello().expect("it has a name");
    relay.answer(&hello, 2).expect("it is known");
    let welcome = drain(&mut relay);
    let (header, payload) = record::split(&mut &welcome[..]).expect("a record").expect("a whole one");
    guest.welcomed(&Welcome::decode(payload).expect("a Welcome")).expect("it fits");
    said.extend_from_slice(&welcome[record::HEADER_LEN + header.length as usize..]);
    [said, drain(&mut guest)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_session_is_taken_to_its_end() {
        let [of_relay, of_guest] = recorded();
        let (mut relay, mut guest) = joined();
        begin(&mut relay);
        drain(&mut relay);
        assert!(of_guest.len() > 70_000 && feed(&mut relay, &of_guest).is_empty());
        assert!(of_relay.len() > 300 && feed(&mut guest, &of_relay).is_empty());
        // The session reads to the last record, not only the first one.
        let mut broken = of_guest.clone();
        *broken.last_mut().unwrap() ^= 0xff;
        let (mut relay, _) = joined();
        begin(&mut relay);
        drain(&mut relay);
        let left = feed(&mut relay, &broken).len();
        assert!(left > 0 && left < 200, "{left}");
    }
}
