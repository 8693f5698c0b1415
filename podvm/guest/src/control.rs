//! Answers the node's requests on the link's control stream: Personalise, Flush, Rotate, VolumeStats, ExpandVolume.
//!
//! Each request is handled in a task of its own, so that a Flush never waits behind a kata-agent that does not start.
//! Work that must not run twice at a time holds its own lock.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use parking_lot::Mutex;
use peerpod_link::endpoint::EndpointHandle;
use peerpod_proto::guest::request::Body;
use peerpod_proto::guest::{Reply, Request, Rotate, VolumeFill};
use protobuf::Message;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::agent::Agent;
use crate::identity::Identity;
use crate::intercept::{Notice, Preparing, Use};
use crate::network::Network;
use crate::status::Status;
use crate::volumes::{Fault, Volumes};
use crate::{assignment, power};

/// Limit of requests in flight; the node sends one at a time, and repeats unanswered ones.
const AT_ONCE: usize = 16;

/// State that requests act on.
pub(crate) struct Control {
    pub(crate) identity: Arc<Mutex<Identity>>,
    pub(crate) status: Arc<Status>,
    pub(crate) person: assignment::PodAssignment,
    /// Held during a flush: a second one must not report success before the first is done.
    pub(crate) flushing: tokio::sync::Mutex<()>,
}

impl Control {
    /// Answers requests until the link's endpoint is gone.
    pub(crate) async fn serve(self: Arc<Self>, handle: EndpointHandle, mut messages: mpsc::Receiver<Bytes>) {
        let slots = Arc::new(Semaphore::new(AT_ONCE));
        while let Some(message) = messages.recv().await {
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            let (control, handle) = (self.clone(), handle.clone());
            tokio::spawn(async move {
                if let Some(reply) = control.answer(&message).await {
                    send(&handle, &reply);
                }
                drop(slot);
            });
        }
    }

    async fn answer(&self, message: &[u8]) -> Option<Reply> {
        let request = match Request::parse_from_bytes(message) {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(%error, bytes = message.len(), "dropped a control message that cannot be read");
                return None;
            }
        };
        let mut reply = Reply::new();
        reply.id = request.id;
        let result = match request.body {
            Some(Body::Personalise(plan)) => {
                let ours = self.identity().sandbox_id().to_owned();
                self.person.personalise(&ours, plan).await.map_err(|error| error.to_string())
            }
            Some(Body::Flush(_)) => self.flush().await,
            Some(Body::Rotate(rotate)) => self.rotate(&rotate).map(|csr| reply.csr = csr),
            Some(Body::VolumeStats(asked)) => {
                let fill = self.person.volumes().stats(&asked.id).await;
                filled(&mut reply, fill)
            }
            Some(Body::ExpandVolume(asked)) => {
                let fill = self.person.volumes().expand(&asked.id, asked.bytes).await;
                filled(&mut reply, fill)
            }
            // `Body` is open: a newer node may send requests that are unknown here.
            _ => Err(format!("guest {} does not know this request", env!("CARGO_PKG_VERSION"))),
        };
        if let Err(error) = result {
            tracing::error!(error, "a request of the node failed");
            reply.error = error;
        }
        reply.status = Some(self.status.report()).into();
        Some(reply)
    }

    /// Writes volumes back and unmounts them.
    pub(crate) async fn flush(&self) -> Result<(), String> {
        let _one = self.flushing.lock().await;
        let stage = self.status.begin("flush");
        let problems = tokio::task::spawn_blocking(power::flush).await.map_err(|error| error.to_string())?;
        self.status.done(stage);
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }

    fn rotate(&self, rotate: &Rotate) -> Result<Vec<u8>, String> {
        let mut identity = self.identity();
        if rotate.certificates.is_empty() {
            if !rotate.trusted_cas.is_empty() {
                identity.trust(&rotate.trusted_cas).map_err(|error| error.to_string())?;
            }
            return identity.csr().map_err(|error| error.to_string());
        }
        let sandbox_id = identity.sandbox_id().to_owned();
        identity
            .grant(&sandbox_id, &rotate.certificates, &rotate.trusted_cas)
            .map_err(|error| error.to_string())?;
        tracing::info!("the guest has a new certificate and uses it from the next connection on");
        Ok(Vec::new())
    }

    fn identity(&self) -> parking_lot::MutexGuard<'_, Identity> {
        self.identity.lock()
    }
}

fn filled(reply: &mut Reply, fill: Result<VolumeFill, Fault>) -> Result<(), String> {
    match fill {
        Ok(fill) => {
            reply.volume = Some(fill).into();
            Ok(())
        }
        Err(fault) => {
            reply.volume_fault = fault.kind.into();
            Err(fault.text)
        }
    }
}

/// Sends the status to the node, unasked, at every change of the kata-agent and at every urgent note: a Reply to no
/// request.
pub(crate) async fn report(agent: Arc<Agent>, status: Arc<Status>, handle: EndpointHandle) {
    let (mut phase, said) = (agent.watch(), status.said());
    loop {
        tokio::select! {
            changed = phase.changed() => if changed.is_err() { break },
            () = said.notified() => {}
        }
        tell(&status, &handle);
    }
}

/// Sends the status to the node, unasked.
pub(crate) fn tell(status: &Status, handle: &EndpointHandle) {
    let mut reply = Reply::new();
    reply.status = Some(status.report()).into();
    send(handle, &reply);
}

fn send(handle: &EndpointHandle, reply: &Reply) {
    let sent = reply
        .write_to_bytes()
        .map_err(|error| error.to_string())
        .and_then(|bytes| handle.control(Bytes::from(bytes)).map_err(|error| error.to_string()));
    if let Err(error) = sent {
        tracing::warn!(error, "cannot answer the node");
    }
}

/// Effects of kata-agent requests on the guest.
pub(crate) struct Notices {
    pub(crate) agent: Arc<Agent>,
    pub(crate) network: Arc<Network>,
    /// Number of the VM's GPUs.
    pub(crate) gpus: Arc<AtomicU32>,
    pub(crate) volumes: Arc<Volumes>,
}

impl Notice for Notices {
    fn container(&self) {
        self.agent.has_containers();
    }

    fn bind_source(&self, source: &str) {
        assignment::make_bind_source(source);
    }

    fn gpus(&self) -> u32 {
        self.gpus.load(Relaxed)
    }

    fn network_admin(&self) {
        self.network.pod_may_change();
    }

    fn prepare(&self, wanted: Vec<Use>) -> Preparing {
        let (answer, preparing) = oneshot::channel();
        let volumes = self.volumes.clone();
        // Goes on without a receiver: the task finishes its work, and the next container finds it done.
        tokio::spawn(async move {
            let all = wanted.into_iter().map(|one| volumes.prepare(one));
            let ready = futures_util::future::join_all(all).await;
            let ready: Result<Vec<_>, Fault> = ready.into_iter().collect();
            drop(answer.send(ready.map_err(|fault| fault.to_string())));
        });
        preparing
    }

    /// Begins to write back while the kata-agent still ends the containers; the node's Flush, which always follows, has
    /// less to do then. On a thread, because a disk is slow and the link must not wait.
    fn sandbox_ends(&self) {
        let begun = std::thread::Builder::new().name("flush".into()).spawn(power::sync_machine);
        if let Err(error) = begun {
            tracing::warn!(%error, "cannot begin to flush");
        }
    }
}
