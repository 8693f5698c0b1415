//! Handover of sandboxes from one relay process to another: freezing them here, and restoring them there. Records are
//! not sent, because both processes have them on disk.

use std::os::fd::OwnedFd;

use peerpod_link::endpoint::{Endpoint, EndpointState, Frozen, NotFrozen};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::net::UnixListener;
use tokio::sync::OwnedMutexGuard;

use super::guest::GuestHandler;
use super::states::StateState;
use super::{Attached, Live, RESTART, Sandboxes};
use crate::agent::AgentSocket;
use crate::fd_handoff::Passed;
use crate::id::SandboxId;
use crate::store::SandboxRecord;
use crate::{localhost, socket};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Handed {
    pub(crate) id: String,
    last_call: u64,
    state: StateState,
    endpoint: EndpointState,
    localhost_ports: Option<localhost::Ports>,
    /// Names of the descriptors of its localhost, which follow the agent socket's listener and precede its connections.
    names: Vec<String>,
}

/// Frozen sandboxes; dropping this resumes them.
pub(crate) struct Still {
    slots: Vec<OwnedMutexGuard<Option<Live>>>,
}

impl Drop for Still {
    fn drop(&mut self) {
        for live in self.slots.iter_mut().filter_map(|slot| slot.as_mut()) {
            live.attached.endpoint.thaw();
            live.socket.accept_again();
        }
    }
}

/// Sandbox of another process that is not served here yet.
pub(crate) struct Prepared {
    record: SandboxRecord,
    state: StateState,
    attached: Attached,
    endpoint: Endpoint<GuestHandler>,
    listener: UnixListener,
    localhost: Option<(localhost::Ports, localhost::Listeners)>,
}

impl Prepared {
    pub(crate) fn id(&self) -> &SandboxId {
        &self.record.id
    }
}

impl Sandboxes {
    /// Freezes all sandboxes, or none. One with a failed endpoint is left out: it begins anew, here or there.
    pub(crate) async fn freeze(&self) -> Result<(Still, Vec<(Handed, Vec<OwnedFd>)>), String> {
        let slots: Vec<_> =
            self.table.lock().slots.iter().map(|(id, slot)| (id.clone(), slot.clone())).collect();
        let mut still = Still { slots: Vec::with_capacity(slots.len()) };
        let mut all = Vec::with_capacity(slots.len());
        for (id, slot) in slots {
            still.slots.push(slot.lock_owned().await);
            let Some(live) = still.slots.last_mut().and_then(|slot| slot.as_mut()) else { continue };
            match self.show(live).await {
                Ok(Some(handed)) => all.push(handed),
                Ok(None) => {
                    tracing::warn!(sandbox = %id, "the sandbox's endpoint failed, so it is not handed over")
                }
                Err(error) => return Err(format!("sandbox {id}: {error}")),
            }
        }
        Ok((still, all))
    }

    async fn show(&self, live: &mut Live) -> Result<Option<(Handed, Vec<OwnedFd>)>, NotFrozen> {
        let mut descriptors = vec![live.socket.hold().await?];
        let Frozen { state: endpoint, sockets } = match live.attached.endpoint.freeze().await {
            Ok(frozen) => frozen,
            Err(NotFrozen::Ended) => return Ok(None),
            Err(error) => return Err(error),
        };
        let id = &live.attached.id;
        let Some(state) = self.states.show(id) else { return Ok(None) };
        let mut names = Vec::new();
        let localhost = live.localhost.as_ref().filter(|serving| serving.is_running());
        if let Some(serving) = localhost {
            for (name, socket) in serving.listeners.copies()? {
                names.push(name);
                descriptors.push(socket);
            }
        }
        descriptors.extend(sockets);
        let localhost_ports = localhost.map(|serving| serving.ports);
        let (id, last_call) = (id.to_string(), live.attached.guest.last_call());
        Ok(Some((Handed { id, last_call, state, endpoint, localhost_ports, names }, descriptors)))
    }

    /// Reads a sandbox of another process. Its connections stay frozen until [`Sandboxes::go_on`].
    pub(crate) fn prepare(
        &self,
        record: SandboxRecord,
        handed: Handed,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<Prepared, String> {
        let Handed { last_call, state, endpoint, localhost_ports, names, .. } = handed;
        if descriptors.len() <= names.len() {
            return Err("descriptors are missing".to_owned());
        }
        let connections = descriptors.split_off(1 + names.len());
        let of_localhost = descriptors.split_off(1);
        let listener = descriptors.pop().ok_or("the agent socket's listener is missing")?;
        let listener = socket::unix_listener(listener).map_err(|error| error.to_string())?;
        let localhost = match localhost_ports {
            None => None,
            Some(ports) => {
                let descriptors = names.into_iter().zip(of_localhost).collect();
                let mut passed = Passed { detail: Value::Null, descriptors };
                Some((ports, localhost::Listeners::take(&mut passed)?))
            }
        };
        let guest = self.guest(&record);
        guest.count_calls_from(last_call);
        let frozen = Frozen { state: endpoint, sockets: connections };
        let (endpoint, handle) = Endpoint::restore(GuestHandler(guest.clone()), self.limits.clone(), frozen)
            .map_err(|error| error.to_string())?;
        let attached = Attached { id: record.id.clone(), endpoint: handle, guest };
        Ok(Prepared { record, state, attached, endpoint, listener, localhost })
    }

    /// Serves a prepared sandbox from now on.
    pub(crate) async fn go_on(&self, prepared: Prepared) {
        let Prepared { record, state, attached, endpoint, listener, localhost } = prepared;
        let (id, pod) = (record.id.clone(), record.pod.clone());
        if let Err(error) = self.take_keys(&record, None) {
            tracing::error!(sandbox = %id, pod, %error, "cannot register the certificates of the sandbox's guest");
        }
        self.states.put_shown(&id, &pod, attached.guest.traffic.clone(), &state);
        let socket = AgentSocket::go_on(&record.agent_socket, listener, &attached);
        let mut live = self.run(record, attached, endpoint, socket, RESTART);
        live.localhost = localhost.map(|(ports, listeners)| {
            localhost::Serving::of(&self.me, &id, &pod, ports, listeners, self.metrics.clone())
        });
        let slot = self.table.lock().slots.entry(id.clone()).or_default().clone();
        *slot.lock().await = Some(live);
        tracing::info!(sandbox = %id, pod, "this process now serves the sandbox");
    }
}
