//! Converts the session to and from data, so that another process can continue it. Transports are not handed over: the
//! peer treats the other process like a new transport, and both ends replay.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::log::Log;
use super::stream::{Kept, Stream};
use super::{Counts, Session, SessionLimits};
use crate::base64_bytes;
use crate::endpoint::Role;
use crate::record::{CloseReason, SessionId, VERSION};

/// Serialised session: the result of [`Session::state`] and the input of [`Session::restore`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionState {
    id: Option<[u8; 16]>,
    epoch: u64,
    version: u16,
    recv: u64,
    first: u64,
    high_sent: u64,
    #[serde(with = "base64_bytes")]
    records: Vec<u8>,
    #[serde(with = "base64_bytes::list")]
    control: Vec<Vec<u8>>,
    #[serde(with = "base64_bytes")]
    assembly: Vec<u8>,
    streams: Vec<StreamState>,
    signals: Vec<u32>,
    ready: Vec<u32>,
    next_own: u32,
    next_peer: u32,
    #[serde(flatten)]
    counts: Counts,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StreamState {
    pub(super) id: u32,
    /// Unsent Open, encoded as its payload.
    pub(super) open: Option<Vec<u8>>,
    pub(super) close: Option<u8>,
    #[serde(flatten)]
    pub(super) kept: Kept,
}

/// Reason to refuse a state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the session's state is invalid: {0}")]
pub struct BadState(pub(crate) &'static str);

impl Session {
    /// Returns the state from which another process can continue the session.
    pub fn state(&self) -> SessionState {
        let mut streams: Vec<StreamState> =
            self.streams.iter().map(|(id, stream)| stream.state(*id)).collect();
        streams.sort_unstable_by_key(|stream| stream.id);
        SessionState {
            id: self.id.map(|id| id.0),
            epoch: self.epoch,
            version: self.version,
            recv: self.inbound.recv,
            first: self.log.acked() + 1,
            high_sent: self.log.high_sent(),
            records: self.log.records(),
            control: self.control.messages.iter().map(|message| message.to_vec()).collect(),
            assembly: self.inbound.assembly.clone(),
            streams,
            signals: self.those_that_are(&self.turns.signals),
            ready: self.those_that_are(&self.turns.ready),
            next_own: self.next_own,
            next_peer: self.next_peer,
            counts: self.counts,
        }
    }

    /// Returns the streams of a list that still exist; ended streams stay in the list until their turn.
    fn those_that_are(&self, list: &VecDeque<u32>) -> Vec<u32> {
        list.iter().copied().filter(|id| self.streams.contains_key(id)).collect()
    }

    /// Returns the session of another process, without a transport.
    pub fn restore(role: Role, limits: SessionLimits, state: SessionState) -> Result<Session, BadState> {
        let mut session = Session::new(role, state.id.map(SessionId), limits);
        if state.version > VERSION {
            return Err(BadState("its link protocol is newer than this program"));
        }
        session.log = Log::restore(state.first, state.high_sent, &state.records)
            .ok_or(BadState("its records are not in order"))?;
        if state.streams.len() > session.limits.streams || state.assembly.len() > limits.control_message {
            return Err(BadState("it is larger than the limits"));
        }
        if state.next_own % 2 != session.next_own % 2 || state.next_peer % 2 != session.next_peer % 2 {
            return Err(BadState("it belongs to the other end"));
        }
        for stream in state.streams {
            let id = stream.id;
            session.streams.insert(id, Stream::restore(stream)?);
        }
        (session.epoch, session.version, session.inbound.recv) = (state.epoch, state.version, state.recv);
        (session.next_own, session.next_peer) = (state.next_own, state.next_peer);
        session.control.messages = state.control.into_iter().map(Bytes::from).collect();
        session.inbound.assembly = state.assembly;
        session.counts = state.counts;
        for id in state.ready {
            if let Some(stream) = session.streams.get_mut(&id)
                && !std::mem::replace(&mut stream.queued, true)
            {
                session.turns.ready.push_back(id);
            }
        }
        for id in state.signals {
            if let Some(stream) = session.streams.get_mut(&id) {
                stream.signalled();
                session.turns.signals.push_back(id);
            }
        }
        Ok(session)
    }

    /// Returns the bytes of waiting control messages, as [`Session::control_done`] will count them.
    pub(crate) fn control_waiting(&self) -> usize {
        self.control.waiting()
    }

    /// Closes the open streams for which `owned` returns false: they have no owner any more.
    pub(crate) fn close_others(&mut self, owned: impl Fn(u32) -> bool) {
        let others: Vec<u32> =
            self.streams.iter().filter(|(id, s)| s.is_open() && !owned(**id)).map(|(id, _)| *id).collect();
        for id in others {
            self.close(id, CloseReason::Failed);
        }
    }
}
