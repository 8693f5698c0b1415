//! Records of the link as a hostile peer may send them, before and in a session: a typed refusal or an event, never a
//! panic, and nothing kept beyond the bounds.

use peerpod_link::{
    endpoint::Role,
    record,
    session::{Limits, Session},
};

pub(crate) fn run(input: &[u8]) {
    for role in [Role::Relay, Role::Guest] {
        let mut session = Session::new(role, None, Limits { streams: 64, ..Limits::default() });
        let mut rest = input;
        while let Ok(Some((header, payload))) = record::split(&mut rest) {
            assert!(payload.len() <= record::MAX_PAYLOAD);
            if session.receive(&header, payload).is_err() {
                break;
            }
            session.pump();
            assert!(session.buffered() <= 4 << 20, "{} bytes kept", session.buffered());
        }
    }
}
