//! State of the queue as data, for another process. That process does not know which calls the node has received, and
//! sends them again, as after a restart of the node. It also repeats the inbox writes that were under way.

use std::time::{Duration, Instant};

use peerpod_link::base64_bytes;
use peerpod_proto::ttrpc_frame::Request;
use protobuf::Message;
use serde::{Deserialize, Serialize};

use super::{CALLS, Caller, ConnId, Queue, Timer};
use crate::hypervisor::call::Kind;
use crate::id::SandboxId;

/// Time before a handed-over stop goes to the inbox: less than the caller's second, enough for the node to connect.
const STOP_GRACE: Duration = Duration::from_millis(200);

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QueueState {
    calls: Vec<CallState>,
    /// Stops in the inbox that the node may not have read.
    unread: Vec<SandboxId>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CallState {
    #[serde(flatten)]
    kind: Kind,
    #[serde(with = "base64_bytes")]
    request: Vec<u8>,
    caller: Option<(ConnId, u32)>,
    /// Remaining time of the caller, in milliseconds.
    left_ms: Option<u64>,
}

impl Queue {
    /// Returns the state at `now`. Internal calls are left out: their callers end with this process.
    pub(crate) fn state(&self, now: Instant) -> QueueState {
        let calls = self.calls.all.values().filter_map(|call| {
            let caller = match call.caller {
                Some(Caller::Internal(_)) => return None,
                Some(Caller::Shim { conn, stream }) => Some((conn, stream)),
                None => None,
            };
            let left = |at: Instant| u64::try_from(at.saturating_duration_since(now).as_millis()).ok();
            Some(CallState {
                kind: call.kind.clone(),
                request: call.request.write_to_bytes().ok()?,
                caller,
                left_ms: call.deadline.and_then(left),
            })
        });
        QueueState { calls: calls.collect(), unread: self.inbox.unread.keys().cloned().collect() }
    }

    /// Restores another process's calls; must be called before any other method.
    pub(crate) fn restore(&mut self, state: QueueState, now: Instant) -> Result<(), String> {
        if state.calls.len() > 2 * CALLS {
            return Err(format!("{} calls are more than the limit", state.calls.len()));
        }
        for id in state.unread {
            self.inbox.written(id);
        }
        for call in state.calls {
            let mut request = Request::parse_from_bytes(&call.request).map_err(|error| error.to_string())?;
            request.timeout_nano = call.left_ms.map_or(0, |ms| {
                i64::try_from(Duration::from_millis(ms.max(1)).as_nanos()).unwrap_or(i64::MAX)
            });
            let caller = call.caller.map(|(conn, stream)| Caller::Shim { conn, stream });
            let is_stop = matches!(call.kind, Kind::Stop(_));
            let id = self.insert(caller, call.kind, request, now);
            if is_stop {
                self.timers.insert((now + STOP_GRACE, Timer::StopGrace(id)));
            }
        }
        Ok(())
    }

    /// Ends the calls of connections that no longer exist.
    pub(crate) fn keep_connections(&mut self, there: impl Fn(ConnId) -> bool, now: Instant) {
        let gone: Vec<ConnId> =
            self.calls.by_connection.keys().copied().filter(|conn| !there(*conn)).collect();
        for conn in gone {
            self.connection_closed(conn, now);
        }
    }
}
