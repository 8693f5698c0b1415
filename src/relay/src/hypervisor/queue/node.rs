//! The queue's side of the node's connection: requests out, answers in, and liveness.

use std::time::Instant;

use bytes::Bytes;
use peerpod_proto::ttrpc_frame::Request;
use protobuf::Message;

use super::{Caller, NodeState, Output, PROBE_AFTER, Queue, Timer};
use crate::hypervisor::call::{self, Kind, code};

impl Queue {
    /// Handles a new connection to the node. Only ReadInbox is sent until that call is answered.
    pub(crate) fn node_connected(&mut self, now: Instant) {
        self.node.state = NodeState::ReadingInbox;
        self.node.next_stream = 1;
        self.node.last_received = now;
        self.read_inbox(now);
    }

    /// Handles the loss of the node's connection: its unanswered calls will be sent again.
    pub(crate) fn node_lost(&mut self, now: Instant) {
        self.node.state = NodeState::Away;
        self.inbox.reading = None;
        self.node.sent.clear();
        self.node.probing = false;
        self.timers.retain(|(_, timer)| !matches!(timer, Timer::Probe | Timer::Hang));
        let mut stops = Vec::new();
        let mut internal = Vec::new();
        for (id, call) in &mut self.calls.all {
            call.sent = None;
            match call.caller {
                Some(Caller::Internal(_)) => internal.push(*id),
                _ if matches!(call.kind, Kind::Stop(_)) => stops.push(*id),
                _ => {}
            }
        }
        for stop in stops {
            self.fall_back(stop, now);
        }
        for call in internal {
            self.finish(call, call::status(code::UNAVAILABLE, "peerpod-node is away"));
        }
    }

    pub(super) fn send(&mut self, request: &Request) -> Option<u32> {
        let stream = self.node.next_stream;
        if stream >= u32::MAX - 2 {
            // Stream ids only grow on one connection; a new connection begins at 1.
            self.outputs.push_back(Output::Reconnect("the connection has no stream ids left"));
            return None;
        }
        let body = request.write_to_bytes().ok()?;
        self.node.next_stream += 2;
        self.outputs.push_back(Output::Send { stream, body: body.into() });
        Some(stream)
    }

    /// Handles the node's response envelope on `stream`.
    pub(crate) fn answer(&mut self, stream: u32, body: Bytes, now: Instant) {
        self.node.last_received = now;
        if let Some((reading, covers)) = self.inbox.reading
            && reading == stream
        {
            self.inbox_read(covers, &body, now);
            return;
        }
        let Some(id) = self.node.sent.remove(&stream) else { return };
        let Some(call) = self.calls.all.get_mut(&id) else { return };
        call.sent = None;
        let sandbox = call.kind.id().cloned();
        // A stop that was answered already stays until node or inbox has it. It is tried again after the write under way,
        // or after the pause since a failed one.
        if call.caller.is_none()
            && sandbox.as_ref().is_some_and(|sandbox| self.inbox.kept.contains(sandbox))
            && !call::is_ok(&body)
        {
            return;
        }
        self.finish(id, body);
        if let Some(sandbox) = sandbox {
            self.forget_kept(&sandbox);
            self.advance(&sandbox, now);
        }
    }

    /// Sends ReadInbox, as a liveness check, to a node that owes answers and is silent.
    pub(super) fn probe(&mut self, now: Instant) {
        if self.node.state != NodeState::Ready || self.node.sent.is_empty() {
            self.node.probing = false;
            return;
        }
        let silent_until = self.node.last_received + PROBE_AFTER;
        if silent_until <= now {
            self.read_inbox(now);
        }
        self.timers.insert((silent_until.max(now + PROBE_AFTER), Timer::Probe));
    }
}
