//! Handles stops: the calls that they cancel, and the inbox when the node does not answer in time.

use std::time::Instant;

use peerpod_proto::hypervisor::StopVMRequest;
use peerpod_proto::ttrpc_frame::Request;
use protobuf::Message;

use super::{Call, CallId, HANG, NodeState, Output, Queue, Timer, WRITE_GRACE};
use crate::hypervisor::call::{self, Kind, code};
use crate::id::SandboxId;

impl Queue {
    /// Cancels the CreateVM and StartVM of a sandbox that came before `stop`; calls already sent only if `all` is set.
    pub(super) fn cancel_before(&mut self, id: &SandboxId, stop: CallId, all: bool) {
        let cancelled = |(other, call): &(CallId, &Call)| {
            *other < stop && !matches!(call.kind, Kind::Stop(_)) && (all || call.sent.is_none())
        };
        let doomed: Vec<CallId> =
            self.calls.of_sandbox(id).filter(cancelled).map(|(other, _)| other).collect();
        for call in doomed {
            self.finish(call, call::status(code::CANCELLED, "cancelled by a StopVM of the same sandbox"));
        }
    }

    /// Takes the next way to make a stop last: first the inbox, then the memory that outlives this process.
    pub(super) fn fall_back(&mut self, stop: CallId, now: Instant) {
        let Some(call) = self.calls.all.get_mut(&stop) else { return };
        let Kind::Stop(id) = call.kind.clone() else { return };
        if call.in_inbox {
            if call.caller.is_some() {
                self.inbox.kept.insert(id.clone());
                self.outputs.push_back(Output::KeepStop(id));
            }
            return;
        }
        call.in_inbox = true;
        self.timers.insert((now + WRITE_GRACE, Timer::StopGrace(stop)));
        self.cancel_before(&id, stop, true);
        if self.inbox.writing.insert(id.clone()) {
            self.outputs.push_back(Output::WriteInbox(id));
        }
    }

    /// Handles the end of an inbox write: the stop of `id` is durable, or failed with the given reason.
    pub(crate) fn inbox_written(&mut self, id: &SandboxId, result: Result<(), String>, now: Instant) {
        let stops = self.in_inbox(id);
        self.inbox.writing.remove(id);
        match result {
            Ok(()) => {
                self.inbox.written(id.clone());
                for stop in stops {
                    self.finish(stop, call::done());
                }
                self.read_inbox(now);
            }
            Err(why) => {
                let why = format!("record the stop of sandbox {id}: {why}; the node did not answer either");
                for stop in stops {
                    self.not_written(stop, id, &why, now);
                }
            }
        }
        self.forget_kept(id);
        self.advance(id, now);
    }

    /// Removes the kept stop of a sandbox after its last StopVM has ended. A write under way may still come to its end.
    pub(super) fn forget_kept(&mut self, id: &SandboxId) {
        if !self.inbox.writing.contains(id)
            && !self.calls.of_sandbox(id).any(|(_, call)| is_stop(call))
            && self.inbox.kept.remove(id)
        {
            self.outputs.push_back(Output::ForgetStop(id.clone()));
        }
    }

    /// Refuses a stop that could not be recorded. One that was answered before is recorded again after a pause.
    fn not_written(&mut self, stop: CallId, id: &SandboxId, why: &str, now: Instant) {
        match self.calls.all.get_mut(&stop) {
            Some(call) if call.caller.is_none() && self.inbox.kept.contains(id) => {
                call.in_inbox = false;
                self.timers.insert((now + HANG, Timer::StopGrace(stop)));
            }
            _ => self.finish(stop, call::status(code::INTERNAL, why)),
        }
    }

    /// Handles a kept stop: its callers are answered, and it stays until it is in the inbox.
    pub(crate) fn stop_kept(&mut self, id: &SandboxId) {
        for stop in self.in_inbox(id) {
            let caller = self.calls.take_caller(stop);
            self.answer_to(caller, call::done());
        }
        // It reached the inbox while it was being kept.
        if !self.inbox.kept.contains(id) {
            self.outputs.push_back(Output::ForgetStop(id.clone()));
        }
    }

    /// Continues stops that an earlier process kept.
    pub(crate) fn continue_kept(&mut self, ids: Vec<SandboxId>, now: Instant) {
        for id in ids {
            self.inbox.kept.insert(id.clone());
            if self.calls.of_sandbox(&id).any(|(_, call)| is_stop(call)) {
                continue;
            }
            let payload = StopVMRequest { id: id.to_string(), ..Default::default() }.write_to_bytes();
            let request = Request {
                service: "hypervisor.Hypervisor".into(),
                method: "StopVM".into(),
                payload: payload.unwrap_or_default(),
                ..Default::default()
            };
            let stop = self.insert(None, Kind::Stop(id), request, now);
            self.fall_back(stop, now);
        }
    }

    /// Returns the stops of a sandbox that are on their way to the inbox.
    fn in_inbox(&self, id: &SandboxId) -> Vec<CallId> {
        self.calls.of_sandbox(id).filter(|(_, call)| call.in_inbox).map(|(stop, _)| stop).collect()
    }

    /// Asks the node to read the inbox, if it is connected and no ReadInbox is in flight.
    pub(super) fn read_inbox(&mut self, now: Instant) {
        if self.node.state == NodeState::Away || self.inbox.reading.is_some() {
            return;
        }
        let request = Request {
            service: "peerpod.node.v1.Node".into(),
            method: "ReadInbox".into(),
            ..Default::default()
        };
        if let Some(stream) = self.send(&request) {
            self.inbox.reading = Some((stream, self.inbox.writes));
            self.timers.insert((now + HANG, Timer::Hang));
        }
    }

    pub(super) fn inbox_read(&mut self, covers: u64, body: &[u8], now: Instant) {
        self.inbox.reading = None;
        self.timers.retain(|(_, timer)| !matches!(timer, Timer::Hang));
        if !call::is_ok(body) {
            self.outputs.push_back(Output::Reconnect("the node could not read the inbox"));
            return;
        }
        self.inbox.unread.retain(|_, writing| *writing > covers);
        self.node.state = NodeState::Ready;
        if !self.inbox.unread.is_empty() {
            self.read_inbox(now);
        }
        let waiting: Vec<CallId> =
            self.calls.all.iter().filter(|(_, call)| call.sent.is_none()).map(|(id, _)| *id).collect();
        for call in waiting {
            self.send_if_due(call, now);
        }
    }
}

fn is_stop(call: &Call) -> bool {
    matches!(call.kind, Kind::Stop(_))
}
