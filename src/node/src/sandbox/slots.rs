//! What a sandbox is doing at the moment: one slot for each kind of effect, so that nothing of one kind ever runs
//! twice, and everything else runs at once.
//!
//! An effect runs inside its sandbox's task. A slot can also rest (back-off), and can hold an outcome that could not
//! be recorded, to deliver it again.

use std::{future::Future, net::IpAddr, sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, FutureExt, pending};
use peerpod_proto::guest::{NetworkPlan, Reply};
use peerpod_provider_api::{InstanceId, Placement};
use zeroize::Zeroizing;

use super::{
    batch::Seat,
    effects::{CloudError, Followed, NetworkError, PullSecretError, RelayError, Trusted},
    follow::Heard,
};
use crate::{ledger::Network, volumes::PodVolumes};

/// What an effect came to.
#[derive(Clone)]
pub(super) enum Outcome {
    /// Nothing: a pause is over.
    Rested,
    /// Whether it gets its VM with others; `None`: it does not, and nobody was asked for one yet.
    Seated(Option<Seat>),
    /// The cluster shows it, or could not at once; the pod's UID.
    Announced(Option<String>),
    /// Where the attempt is to be made.
    Placed(Result<Option<Placement>, CloudError>),
    Created(Result<InstanceId, CloudError>),
    /// A look for the VM by its key; `after` is what the create before it said, if that was final.
    Found {
        result: Result<Option<InstanceId>, CloudError>,
        after: Option<CloudError>,
    },
    Located(Result<Vec<IpAddr>, CloudError>),
    /// The pod's volumes are attached to its VM.
    Attached(Result<Box<PodVolumes>, CloudError>),
    Reserved(Result<Network, NetworkError>),
    Connected(Result<Box<NetworkPlan>, NetworkError>),
    /// Another look at the pod's network; `heard`: what had been heard when it began.
    Followed {
        heard: Heard,
        result: Result<Box<Followed>, NetworkError>,
    },
    /// What the cloud says of the VM's addresses, asked because its guest comes from this one.
    Traced {
        from: IpAddr,
        /// Whether it lies the same way as the address that is known.
        near: bool,
        result: Result<Vec<IpAddr>, CloudError>,
    },
    Put {
        version: u64,
        result: Result<(), RelayError>,
    },
    /// The pod's localhost; `version`: of what the relay had been told.
    Carried {
        version: u64,
        result: Result<(), NetworkError>,
    },
    /// `digest`: which plan; `secret`: which pull secrets, where they are known.
    Greeted {
        session: String,
        digest: String,
        secret: Option<String>,
        result: Result<Box<Reply>, RelayError>,
    },
    /// The guest was told whom to trust and asked for a CSR.
    Told {
        trusted: Arc<Trusted>,
        result: Result<Box<Reply>, RelayError>,
    },
    /// The guest was given its new certificate.
    Renewed {
        trusted: Arc<Trusted>,
        result: Result<Box<Reply>, RelayError>,
    },
    /// What is known of the pod's pull secrets.
    PullSecret(Result<Zeroizing<String>, PullSecretError>),
    Cleared(super::clear::Pass),
}

/// One kind of effect.
#[derive(Default)]
pub(super) struct Slot {
    future: Option<BoxFuture<'static, Outcome>>,
    resting: bool,
    failures: u32,
}

/// The first pause after a failure; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Slot {
    pub(super) fn is_idle(&self) -> bool {
        self.future.is_none()
    }

    /// Starts an effect. The slot must be idle.
    pub(super) fn start(&mut self, effect: impl Future<Output = Outcome> + Send + 'static) {
        debug_assert!(self.is_idle());
        self.resting = false;
        self.future = Some(effect.boxed());
    }

    /// Pauses after a failure, longer each time, at least as long as was asked for.
    pub(super) fn rest(&mut self, at_least: Duration) {
        let pause = self.pause().max(at_least);
        self.failures = self.failures.saturating_add(1);
        self.start(async move {
            tokio::time::sleep(pause).await;
            Outcome::Rested
        });
        self.resting = true;
    }

    /// Delivers an outcome again later: it was not recorded yet.
    pub(super) fn again(&mut self, outcome: Outcome) {
        let pause = self.pause();
        self.failures = self.failures.saturating_add(1);
        self.start(async move {
            tokio::time::sleep(pause).await;
            outcome
        });
    }

    /// It worked: the next failure pauses shortly again.
    pub(super) fn worked(&mut self) {
        self.failures = 0;
    }

    /// How often in a row it failed.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// Ends a pause; an effect that runs goes on to its end.
    pub(super) fn wake(&mut self) {
        if self.resting {
            self.cancel();
        }
    }

    /// Drops whatever runs. Only for effects that leave nothing behind.
    pub(super) fn cancel(&mut self) {
        self.future = None;
        self.resting = false;
        self.failures = 0;
    }

    /// The outcome; never, as long as the slot is idle.
    ///
    /// cancel safety: dropped before its end, the effect stays in the slot and is polled again later.
    pub(super) async fn done(&mut self) -> Outcome {
        let Some(future) = &mut self.future else { return pending().await };
        let outcome = future.await;
        self.future = None;
        self.resting = false;
        outcome
    }

    fn pause(&self) -> Duration {
        FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(LONGEST_PAUSE)
    }
}

/// All slots of a sandbox.
#[derive(Default)]
pub(super) struct Slots {
    /// Place, create, find, addresses.
    pub(super) cloud: Slot,
    /// The pod's volumes.
    pub(super) volumes: Slot,
    /// Reserve and connect.
    pub(super) network: Slot,
    /// PutSandbox.
    pub(super) relay: Slot,
    /// The pod's localhost.
    pub(super) localhost: Slot,
    /// Personalise.
    pub(super) guest: Slot,
    /// The pod's pull secrets.
    pub(super) secret: Slot,
    /// The way out.
    pub(super) clear: Slot,
}

/// Which slot an outcome came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
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
    pub(super) fn get(&mut self, which: Which) -> &mut Slot {
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

    /// The next outcome of any of them; never, as long as all are idle.
    ///
    /// cancel safety: as [`Slot::done`].
    pub(super) async fn next(&mut self) -> (Which, Outcome) {
        tokio::select! {
            outcome = self.cloud.done() => (Which::Cloud, outcome),
            outcome = self.volumes.done() => (Which::Volumes, outcome),
            outcome = self.network.done() => (Which::Network, outcome),
            outcome = self.relay.done() => (Which::Relay, outcome),
            outcome = self.localhost.done() => (Which::Localhost, outcome),
            outcome = self.guest.done() => (Which::Guest, outcome),
            outcome = self.secret.done() => (Which::Secret, outcome),
            outcome = self.clear.done() => (Which::Clear, outcome),
        }
    }
}
