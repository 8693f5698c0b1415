//! Passes descriptors to the relay that only the node has the right to open ([`peerpod_base::fd_handoff`]). The relay keeps
//! them until it exits. The caller watches `RelayClient::epoch`, and passes them again to a new relay.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use peerpod_base::fd_handoff::{self, HandoffAnswer, HandoffHeader};
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::RelayClient;
use crate::spec::SandboxId;

/// Timeout of the relay's answer; the relay answers at once unless it is stuck.
const PATIENCE: Duration = Duration::from_secs(10);
/// Concurrent handoffs: each has a thread while it waits for the relay, which takes 64 at a time and refuses more.
pub(super) const AT_A_TIME: usize = 16;

impl RelayClient {
    /// Passes descriptors, each with its name, to the relay. They replace the earlier ones of this kind and sandbox
    /// (`None`: those of the node itself). The node's copies are closed. Returns the detail of the relay's answer.
    pub(crate) async fn hand_off(
        &self,
        kind: &str,
        sandbox: Option<&SandboxId>,
        detail: Value,
        descriptors: Vec<(String, OwnedFd)>,
    ) -> Result<Value, String> {
        let mut header = HandoffHeader { detail, ..HandoffHeader::new(kind, sandbox.map(SandboxId::as_str)) };
        let (names, descriptors) = descriptors.into_iter().unzip();
        header.descriptors = names;
        self.say(header, descriptors).await.map(|answer| answer.detail)
    }

    /// Returns the relay's own description of the descriptors that it holds of this kind and sandbox.
    pub(crate) async fn held(
        &self,
        kind: &str,
        sandbox: Option<&SandboxId>,
    ) -> Result<Option<Value>, String> {
        let header = HandoffHeader { ask: true, ..HandoffHeader::new(kind, sandbox.map(SandboxId::as_str)) };
        let answer = self.say(header, Vec::new()).await?;
        Ok(answer.held.then_some(answer.detail))
    }

    async fn say(&self, header: HandoffHeader, descriptors: Vec<OwnedFd>) -> Result<HandoffAnswer, String> {
        let path = self.0.socket.with_file_name(fd_handoff::SOCKET);
        let attempt = format!("pass the {} descriptors to peerpod-relay", header.kind);
        let failed = |why: &dyn std::fmt::Display| format!("{attempt}: {why}");
        // A relay that hangs must not take all threads, nor block a stop for ever.
        let turn = timeout(PATIENCE, self.0.turns.clone().acquire_owned()).await;
        let turn = turn.map_err(|_| failed(&"it has not answered earlier ones"))?;
        let work = move || {
            let _turn = turn;
            let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            fd_handoff::hand_off(&path, &header, &borrowed, PATIENCE)
        };
        let said = spawn_blocking(work).await.map_err(|error| failed(&error))?;
        said.map_err(|error| failed(&error))
    }
}
