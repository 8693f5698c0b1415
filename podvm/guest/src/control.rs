//! Answers the node's requests on the link's control stream: Personalise, Flush, Rotate, VolumeStats, ExpandVolume.
//!
//! Each request is handled in a task of its own, so that a Flush never waits behind a kata-agent that does not start.
//! Work that must not run twice at a time holds its own lock.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use peerpod_link::endpoint::EndpointHandle;
use peerpod_proto::guest::request::Body;
use peerpod_proto::guest::{self, Reply, Request, Rotate, VolumeFill};
use protobuf::Message;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::sleep;

use crate::agent::Agent;
use crate::identity::GuestIdentity;
use crate::intercept::{Notice, Preparing, Use};
use crate::status::Status;
use crate::volumes::Fault;
use crate::{assignment, power};

/// Limit of requests in flight; the node sends one at a time, and repeats unanswered ones.
const AT_ONCE: usize = 16;
/// Interval of the reports of a flush's progress: the node gives up on a flush without progress.
const PROGRESS: Duration = Duration::from_secs(1);
/// Interval of the status without a change, for the use of the VM's resources.
const TELL_EVERY: Duration = Duration::from_secs(30);

pub(crate) struct Control {
    pub(crate) identity: Arc<Mutex<GuestIdentity>>,
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
                if let Some(reply) = control.answer(&message, &handle).await {
                    send(&handle, &reply);
                }
                drop(slot);
            });
        }
    }

    async fn answer(&self, message: &[u8], handle: &EndpointHandle) -> Option<Reply> {
        let request = Request::parse_from_bytes(message);
        let request = request.inspect_err(|error| {
            tracing::warn!(%error, bytes = message.len(), "dropped a control message that cannot be read");
        });
        let request = request.ok()?;
        let mut reply = Reply { id: request.id, ..Reply::default() };
        let result = match request.body {
            Some(Body::Personalise(plan)) => {
                let ours = self.identity.lock().sandbox_id().to_owned();
                self.person.personalise(&ours, plan).await.map_err(|error| error.to_string())
            }
            Some(Body::Flush(_)) => self.flush_and_report(handle).await,
            Some(Body::Rotate(rotate)) => {
                self.rotate(&rotate).map(|csr| reply.csr = csr).map_err(|error| format!("{error:#}"))
            }
            Some(Body::VolumeStats(asked)) => filled(&mut reply, self.person.volumes.stats(&asked.id).await),
            Some(Body::ExpandVolume(asked)) => {
                let fill = self.person.volumes.expand(&asked.id, asked.bytes).await;
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

    /// Flushes, and reports its progress to the node meanwhile. Requests that wait for an earlier flush report nothing.
    async fn flush_and_report(&self, handle: &EndpointHandle) -> Result<(), String> {
        let _one = self.flushing.lock().await;
        let mut written = pin!(self.write_back());
        loop {
            tokio::select! {
                done = &mut written => return done,
                () = sleep(PROGRESS) => {}
            }
            let status = guest::Status { unwritten_bytes: power::unwritten(), ..self.status.report() };
            send(handle, &Reply { status: Some(status).into(), ..Reply::default() });
        }
    }

    /// Writes volumes back and unmounts them.
    pub(crate) async fn flush(&self) -> Result<(), String> {
        let _one = self.flushing.lock().await;
        self.write_back().await
    }

    /// The caller must hold `flushing`.
    async fn write_back(&self) -> Result<(), String> {
        let stage = self.status.begin("flush");
        let problems = tokio::task::spawn_blocking(power::flush).await.map_err(|error| error.to_string())?;
        self.status.done(stage);
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }

    fn rotate(&self, rotate: &Rotate) -> anyhow::Result<Vec<u8>> {
        let mut identity = self.identity.lock();
        if rotate.certificates.is_empty() {
            if !rotate.trusted_cas.is_empty() {
                identity.trust(&rotate.trusted_cas)?;
            }
            return identity.csr();
        }
        let sandbox_id = identity.sandbox_id().to_owned();
        identity.grant(&sandbox_id, &rotate.certificates, &rotate.trusted_cas)?;
        tracing::info!("the guest has a new certificate and uses it from the next connection on");
        Ok(Vec::new())
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

/// Sends the status to the node, unasked: at every change of the kata-agent, at every urgent note, and at intervals.
pub(crate) async fn report(agent: Arc<Agent>, status: Arc<Status>, handle: EndpointHandle) {
    let mut phase = agent.watch();
    loop {
        tokio::select! {
            changed = phase.changed() => if changed.is_err() { break },
            () = status.said.notified() => {}
            () = sleep(TELL_EVERY) => {}
        }
        tell(&status, &handle);
    }
}

pub(crate) fn tell(status: &Status, handle: &EndpointHandle) {
    send(handle, &Reply { status: Some(status.with_usage()).into(), ..Reply::default() });
}

fn send(handle: &EndpointHandle, reply: &Reply) {
    let bytes = reply.write_to_bytes().map_err(anyhow::Error::from);
    if let Err(error) = bytes.and_then(|bytes| Ok(handle.control(bytes.into())?)) {
        tracing::warn!(%error, "cannot answer the node");
    }
}

/// Effects of kata-agent requests on the guest.
pub(crate) struct Notices {
    pub(crate) agent: Arc<Agent>,
    pub(crate) control: Arc<Control>,
}

impl Notice for Notices {
    fn container(&self) {
        self.agent.has_containers();
    }

    fn bind_source(&self, source: &str) {
        assignment::make_bind_source(source);
    }

    fn wanted_within(&self, container: &str, within: Duration) {
        self.control.person.images.expect(container, within);
    }

    fn gpus(&self) -> u32 {
        self.control.person.gpus.load(Relaxed)
    }

    fn network_admin(&self) {
        self.control.person.network.pod_may_change();
    }

    fn prepare(&self, wanted: Vec<Use>) -> Preparing {
        let (answer, preparing) = oneshot::channel();
        let volumes = self.control.person.volumes.clone();
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
