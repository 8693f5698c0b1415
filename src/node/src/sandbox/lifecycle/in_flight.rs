//! Tracks a sandbox's in-flight operations: one slot for each kind. Operations of one kind never overlap. A slot can
//! also hold a backoff pause, or a result that could not be recorded and is delivered again.

use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, pending};
use peerpod_proto::guest::{NetworkPlan, Reply};
use peerpod_provider_api::{InstanceId, Placement};
use zeroize::Zeroizing;

use crate::ledger::Network;
use crate::sandbox::lifecycle::clear::Pass;
use crate::sandbox::ports::{Changes, CloudError, Followed, NetworkError, PullSecretError, Trusted};
use crate::sandbox::vm::batch::BatchMember;
use crate::volumes::PodVolumes;

/// Result of a finished operation.
#[derive(Clone)]
pub(crate) enum Completion {
    Rested,
    /// End of a batch window; `None`: the sandbox goes on alone, and nothing was requested for it yet.
    Batched(Option<BatchMember>),
    /// End of the announcement to the volumes' owner and in the cluster, with the pod's UID if known.
    Announced(Result<Option<String>, CloudError>),
    Placed(Result<Option<Placement>, CloudError>),
    Created(Result<InstanceId, CloudError>),
    /// Look-up of the VM by its key; `after` is the error of the create before it, if that was final.
    Found {
        result: Result<Option<InstanceId>, CloudError>,
        after: Option<CloudError>,
    },
    Located(Result<Vec<IpAddr>, CloudError>),
    Attached(Result<Box<PodVolumes>, CloudError>),
    Reserved(Result<Network, NetworkError>),
    Connected(Result<Box<NetworkPlan>, NetworkError>),
    /// Inspection of the pod's network; `changes` is the change count at its start.
    Followed {
        changes: Changes,
        result: Result<Box<Followed>, NetworkError>,
    },
    /// Addresses of the VM, whose guest connects from `from`. `near`: that is on the same path as the known address.
    Traced {
        from: IpAddr,
        near: bool,
        result: Result<Vec<IpAddr>, CloudError>,
    },
    Put {
        version: u64,
        result: Result<(), String>,
    },
    /// Redirection of the pod's localhost; `version` is the version of the relay's state at its start.
    Carried {
        version: u64,
        result: Result<(), NetworkError>,
    },
    /// Pod assignment; `digest` identifies the plan, `secret` the pull secrets where they are known.
    Assigned {
        session: String,
        digest: String,
        secret: Option<String>,
        result: Result<Box<Reply>, String>,
    },
    /// First step of a CA rotation: the guest got the CA set and a request for a CSR.
    Csr {
        trusted: Arc<Trusted>,
        result: Result<Box<Reply>, String>,
    },
    /// Second step of a CA rotation: the guest got its new certificate.
    Renewed {
        trusted: Arc<Trusted>,
        result: Result<Box<Reply>, String>,
    },
    PullSecret(Result<Zeroizing<String>, PullSecretError>),
    Cleared(Pass),
}

/// In-flight operation of one kind.
#[derive(Default)]
pub(crate) struct Slot {
    future: Option<BoxFuture<'static, Completion>>,
    resting: bool,
    backoff: Backoff,
}

#[derive(Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Counts a failure. Returns the pause before the next try: the growing backoff, but at least `at_least`.
    pub(crate) fn next(&mut self, at_least: Duration) -> Duration {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(LONGEST_PAUSE);
        self.failures = self.failures.saturating_add(1);
        pause.max(at_least)
    }
}

/// First backoff pause; doubles with each failure.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Slot {
    pub(crate) fn is_idle(&self) -> bool {
        self.future.is_none()
    }

    /// Starts an operation. The slot must be idle.
    pub(crate) fn start(&mut self, effect: impl Future<Output = Completion> + Send + 'static) {
        debug_assert!(self.is_idle());
        self.resting = false;
        self.future = Some(effect.boxed());
    }

    /// Pauses after a failure: the growing backoff, but at least `at_least`.
    pub(crate) fn rest(&mut self, at_least: Duration) {
        let pause = self.backoff.next(at_least);
        self.start(async move {
            tokio::time::sleep(pause).await;
            Completion::Rested
        });
        self.resting = true;
    }

    /// Delivers a result again after a pause: it was not recorded yet.
    pub(crate) fn again(&mut self, completion: Completion) {
        let pause = self.backoff.next(Duration::ZERO);
        self.start(async move {
            tokio::time::sleep(pause).await;
            completion
        });
    }

    pub(crate) fn worked(&mut self) {
        self.backoff = Backoff::default();
    }

    pub(crate) fn failures(&self) -> u32 {
        self.backoff.failures
    }

    /// Ends a pause; a running operation continues.
    pub(crate) fn wake(&mut self) {
        if self.resting {
            self.cancel();
        }
    }

    /// Drops the running operation. Only for operations that leave nothing behind.
    pub(crate) fn cancel(&mut self) {
        self.future = None;
        self.resting = false;
        self.backoff = Backoff::default();
    }

    /// Waits for the result; pending forever while the slot is idle. Cancel safe: the operation stays in the slot.
    pub(crate) async fn done(&mut self) -> Completion {
        let Some(future) = &mut self.future else { return pending().await };
        let completion = future.await;
        self.future = None;
        self.resting = false;
        completion
    }
}

#[derive(Default)]
pub(crate) struct Slots {
    /// Placement, create, look-up and addresses.
    pub(crate) cloud: Slot,
    pub(crate) volumes: Slot,
    /// Tunnel reservation, connection and inspection.
    pub(crate) network: Slot,
    pub(crate) relay: Slot,
    pub(crate) localhost: Slot,
    /// Pod assignment and CA rotation.
    pub(crate) guest: Slot,
    pub(crate) secret: Slot,
    pub(crate) clear: Slot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Cloud,
    Volumes,
    Network,
    Relay,
    Localhost,
    Guest,
    Secret,
    Clear,
}

impl Slots {
    pub(crate) fn get(&mut self, which: Which) -> &mut Slot {
        match which {
            Which::Cloud => &mut self.cloud,
            Which::Volumes => &mut self.volumes,
            Which::Network => &mut self.network,
            Which::Relay => &mut self.relay,
            Which::Localhost => &mut self.localhost,
            Which::Guest => &mut self.guest,
            Which::Secret => &mut self.secret,
            Which::Clear => &mut self.clear,
        }
    }

    /// Waits for the next result of any slot; pending forever while all are idle. Cancel safe, as [`Slot::done`].
    pub(crate) async fn next(&mut self) -> (Which, Completion) {
        tokio::select! {
            completion = self.cloud.done() => (Which::Cloud, completion),
            completion = self.volumes.done() => (Which::Volumes, completion),
            completion = self.network.done() => (Which::Network, completion),
            completion = self.relay.done() => (Which::Relay, completion),
            completion = self.localhost.done() => (Which::Localhost, completion),
            completion = self.guest.done() => (Which::Guest, completion),
            completion = self.secret.done() => (Which::Secret, completion),
            completion = self.clear.done() => (Which::Clear, completion),
        }
    }
}
