//! Watches all PeerPods, and deletes the VM of each one with a deletionTimestamp and the finalizer. Up to
//! 50 deletions run at once, one task each.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::{self, Action, Controller};
use kube::runtime::events::EventType;
use kube::runtime::reflector::Store;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use peerpod_kube::client::{self, within};
use peerpod_kube::crds::{FINALIZER, PeerPod};
use peerpod_kube::lease::{NotHeld, Term};
use peerpod_provider_api::{Error as ProviderError, Owned, Retry};
use serde_json::json;
use tracing::{debug, info, warn};

use super::Vms;
use super::backoff::Backoff;
use super::decide::{Decision, decide};
use super::facts::{gather, owner_of};
use super::find::{Meant, another_ones, keys, meant};
use super::metrics::{DeletionOutcome, count};
use super::report::{self, Stays};
use crate::controller::Context;

/// Interval for another check of a running pod. Its end causes no event here.
const POD_AGAIN: Duration = Duration::from_secs(15);
/// Interval between searches for the VM of a PeerPod.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// Duration of one watch in seconds, which bounds the cost of a connection that died unnoticed.
const WATCH: u32 = 60;
/// Interval at which the gauges are updated.
const COUNT_EVERY: Duration = Duration::from_secs(5);
/// Attempts against concurrent writers of the finalizers.
const ROUNDS: usize = 5;

/// Reasons why a PeerPod is not gone yet.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Api(#[from] client::Error),
    #[error("{0}")]
    Provider(#[from] ProviderError),
    #[error(transparent)]
    NotHeld(#[from] NotHeld),
    #[error("the finalizers of PeerPod {0} change all the time")]
    Crowded(String),
}

struct Work {
    vms: Arc<Vms>,
    context: Context,
    term: Term,
    backoff: Backoff,
    store: Store<PeerPod>,
}

pub(in crate::controller) async fn run(vms: Arc<Vms>, context: Context, term: Term) -> anyhow::Result<()> {
    context.ready.not_ready("peerpods", "the PeerPods are not listed yet");
    let peerpods: Api<PeerPod> = Api::all(context.client.clone());
    let controller = Controller::new(peerpods, watcher::Config::default().timeout(WATCH))
        .with_config(controller::Config::default().concurrency(vms.config.concurrency));
    let store = controller.store();
    let backoff = Backoff::new(vms.config.longest_pause);
    let work = Arc::new(Work { vms, context, term, backoff, store });
    let mut done = std::pin::pin!(controller.run(reconcile, again, work.clone()));
    let mut count = tokio::time::interval(COUNT_EVERY);
    loop {
        tokio::select! {
            one = done.next() => match one {
                Some(Err(controller::Error::QueueError(error))) => {
                    let error = client::explain(&error);
                    warn!(error, "the PeerPods cannot be followed");
                    work.context.ready.not_ready("peerpods", &format!("PeerPods cannot be followed: {error}"));
                }
                Some(_) => work.context.ready.ready("peerpods"),
                None => return Ok(()),
            },
            _ = count.tick() => work.count().await,
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // Another replica watches and counts now.
        self.vms.metrics.deleting.set(0);
        self.vms.metrics.failing.set(0);
        self.context.ready.ready("peerpods");
    }
}

impl Work {
    /// The PeerPods are not processed meanwhile, so it waits 1 ms at most.
    async fn count(&self) {
        let ready = tokio::time::timeout(Duration::from_millis(1), self.store.wait_until_ready()).await;
        if !matches!(ready, Ok(Ok(()))) {
            return;
        }
        self.context.ready.ready("peerpods");
        let all = self.store.state();
        let going: HashSet<String> =
            all.iter().filter(|one| is_going(one)).filter_map(|one| one.uid()).collect();
        self.backoff.keep(&going);
        self.vms.metrics.deleting.set(going.len().try_into().unwrap_or(i64::MAX));
        self.vms.metrics.failing.set(self.backoff.len().try_into().unwrap_or(i64::MAX));
        self.vms.listing.forget(COUNT_EVERY);
    }
}

fn is_going(peerpod: &PeerPod) -> bool {
    peerpod.metadata.deletion_timestamp.is_some() && peerpod.finalizers().iter().any(|one| one == FINALIZER)
}

/// A failed object keeps its pause even if it changes meanwhile.
fn again(peerpod: Arc<PeerPod>, error: &Error, work: Arc<Work>) -> Action {
    let least = match error {
        Error::Provider(error) => match error.retry() {
            Retry::After(least) => least,
            Retry::NextOffering | Retry::Never => Duration::ZERO,
        },
        Error::Api(_) | Error::Crowded(_) => Duration::ZERO,
        // The next term starts over.
        Error::NotHeld(_) => return Action::await_change(),
    };
    let uid = peerpod.uid().unwrap_or_default();
    Action::requeue(work.backoff.failed(&uid, Instant::now(), least))
}

async fn reconcile(peerpod: Arc<PeerPod>, work: Arc<Work>) -> Result<Action, Error> {
    if !is_going(&peerpod) {
        return Ok(Action::await_change());
    }
    let uid = peerpod.uid().unwrap_or_default();
    if let Some(left) = work.backoff.waits(&uid, Instant::now()) {
        return Ok(Action::requeue(left));
    }
    let ended = work.end(&peerpod).await;
    match &ended {
        Ok(_) => work.backoff.done(&uid),
        Err(Error::NotHeld(_)) => {}
        Err(error) => {
            count(&work.vms.metrics.peerpods, DeletionOutcome::Failed);
            warn!(peerpod = full_name(&peerpod), %error, "a PeerPod cannot be ended yet");
        }
    }
    ended
}

impl Work {
    async fn end(&self, peerpod: &PeerPod) -> Result<Action, Error> {
        let Work { vms, context, .. } = self;
        let ours = vms.is_ours(peerpod.spec.cloud_provider.as_deref());
        let facts = gather(context, peerpod, ours).await?;
        match decide(&facts, vms.config.node_first) {
            Decision::NodeFirst(left) => {
                count(&vms.metrics.peerpods, DeletionOutcome::LeftToNode);
                debug!(peerpod = full_name(peerpod), "left to its node's daemon");
                Ok(Action::requeue(left))
            }
            Decision::Foreign => {
                count(&vms.metrics.peerpods, DeletionOutcome::Foreign);
                report::stays(context, peerpod, &foreign(peerpod, &vms.kind)).await;
                Ok(Action::await_change())
            }
            Decision::PodLives => {
                count(&vms.metrics.peerpods, DeletionOutcome::PodLives);
                report::stays(context, peerpod, &pod_lives(peerpod)).await;
                Ok(Action::requeue(POD_AGAIN))
            }
            Decision::Delete => {
                let deleted = self.delete(peerpod, facts.since).await;
                if let Err(Error::Provider(error)) = &deleted {
                    report::stays(context, peerpod, &refused(error)).await;
                }
                deleted
            }
        }
    }

    /// Deletes only VMs of a list that was begun after the deletion was requested: any writer of PeerPods can write any
    /// id, and the provider's credentials may end more than this cluster's VMs.
    async fn delete(&self, peerpod: &PeerPod, since: Duration) -> Result<Action, Error> {
        let owned = self.vms.listing.fresh(&*self.vms.provider).await?;
        let all = self.store.state();
        let (vms, doubt) = match self.meant(peerpod, &owned, &all) {
            Meant::Vms(vms) => (vms, None),
            Meant::Several(count) => (Vec::new(), Some(unclear(count))),
        };
        let settle = self.vms.config.settle;
        if vms.is_empty() && since < settle {
            return Ok(Action::requeue((settle - since).min(LOOK_AGAIN)));
        }
        let same = |other: &&PeerPod| self.vms.is_ours(other.spec.cloud_provider.as_deref());
        let others = all.iter().map(|other| &**other).filter(same);
        let cluster = &self.vms.config.cluster_id;
        if let Some(why) = vms.iter().find_map(|vm| another_ones(cluster, peerpod, vm, others.clone())) {
            return self.leave(peerpod, why).await;
        }
        if let (Some(id), true) = (&peerpod.spec.instance_id, vms.is_empty()) {
            return self.leave(peerpod, unlisted(id, cluster)).await;
        }
        for vm in &vms {
            self.term.check()?;
            self.vms.provider.delete(&vm.id).await?;
            info!(peerpod = full_name(peerpod), vm = %vm.id, "VM deleted");
        }
        self.term.check()?;
        if peerpod.finalizers().len() > 1 {
            report::deleted(&self.context, peerpod).await;
        }
        self.let_go(peerpod).await?;
        count(
            &self.vms.metrics.peerpods,
            if vms.is_empty() { DeletionOutcome::NoVm } else { DeletionOutcome::Deleted },
        );
        self.told(peerpod, &vms, doubt);
        Ok(Action::await_change())
    }

    /// Returns the VMs of this PeerPod in the list.
    fn meant(&self, peerpod: &PeerPod, owned: &[Owned], all: &[Arc<PeerPod>]) -> Meant {
        if let Some(id) = &peerpod.spec.instance_id {
            return Meant::Vms(owned.iter().filter(|vm| vm.id.as_str() == id).cloned().collect());
        }
        let keys = keys(&self.vms.config.cluster_id, &peerpod.spec);
        let others = all.iter().filter(|other| other.metadata.uid != peerpod.metadata.uid);
        meant(&keys, owned, others.map(|other| &other.spec))
    }

    /// Removes the finalizer and leaves the VM: the PeerPod must not wait for ever for the end of another owner's VM.
    async fn leave(&self, peerpod: &PeerPod, why: String) -> Result<Action, Error> {
        warn!(peerpod = full_name(peerpod), why, "a PeerPod goes without its VM");
        self.term.check()?;
        report::stays(&self.context, peerpod, &Stays { reason: "VMNotOurs", message: why }).await;
        self.let_go(peerpod).await?;
        count(&self.vms.metrics.peerpods, DeletionOutcome::NotOurs);
        Ok(Action::await_change())
    }

    /// Publishes the Event in a task, without waiting for it.
    fn told(&self, peerpod: &PeerPod, vms: &[Owned], doubt: Option<Stays>) {
        let (context, peerpod) = (self.context.clone(), peerpod.clone());
        let names: Vec<&str> = vms.iter().map(|vm| vm.id.as_str()).collect();
        let (type_, reason, note) = match doubt {
            Some(Stays { reason, message }) => (EventType::Warning, reason, message),
            None if names.is_empty() => (EventType::Normal, "VMDeleted", "it had no VM".to_owned()),
            None => (EventType::Normal, "VMDeleted", format!("deleted VM {}", names.join(", "))),
        };
        let busy = context.drain.busy("event");
        tokio::spawn(async move {
            report::event(&context, &peerpod, type_, reason, &note).await;
            drop(busy);
        });
    }

    /// Removes this controller's finalizer, and no other.
    async fn let_go(&self, peerpod: &PeerPod) -> Result<(), Error> {
        let (name, namespace) = (peerpod.name_any(), peerpod.namespace().unwrap_or_default());
        let peerpods: Api<PeerPod> = Api::namespaced(self.context.client.clone(), &namespace);
        let mut finalizers = peerpod.finalizers().to_vec();
        let params = PatchParams::default();
        for _ in 0..ROUNDS {
            let Some(index) = finalizers.iter().position(|one| one == FINALIZER) else { return Ok(()) };
            let path = format!("/metadata/finalizers/{index}");
            // Tests the uid, too: the same sandbox always gives the same object name.
            let patch = json!([
                {"op": "test", "path": "/metadata/uid", "value": peerpod.uid()},
                {"op": "test", "path": path, "value": FINALIZER},
                {"op": "remove", "path": path},
            ]);
            let patch = Patch::Json::<()>(serde_json::from_value(patch).map_err(unreadable)?);
            let patched = peerpods.patch_metadata(&name, &params, &patch);
            match within(format!("take the finalizer off PeerPod {namespace}/{name}"), patched).await {
                Ok(_) => return Ok(()),
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) if error.is_conflict() || error.status() == Some(422) => {}
                Err(error) => return Err(error.into()),
            }
            let found = within(format!("read PeerPod {namespace}/{name}"), peerpods.get_metadata_opt(&name));
            let found = found.await?.filter(|found| found.metadata.uid == peerpod.metadata.uid);
            let Some(found) = found else { return Ok(()) };
            finalizers = found.finalizers().to_vec();
        }
        Err(Error::Crowded(format!("{namespace}/{name}")))
    }
}

fn unreadable(error: serde_json::Error) -> client::Error {
    client::Error::Api { what: "make a patch".to_owned(), error: kube::Error::SerdeError(error) }
}

fn full_name(peerpod: &PeerPod) -> String {
    format!("{}/{}", peerpod.namespace().unwrap_or_default(), peerpod.name_any())
}

fn foreign(peerpod: &PeerPod, ours: &str) -> Stays {
    let theirs = peerpod.spec.cloud_provider.as_deref().unwrap_or_default();
    let message = format!(
        "its VM belongs to provider {theirs}, and this controller has {ours}: it is left alone. Delete the \
         VM there and take the finalizer {FINALIZER} off; or add {theirs} to controller.cloud-providers if \
         it is another name of {ours}"
    );
    Stays { reason: "OtherProvider", message }
}

fn unlisted(id: &str, cluster: &str) -> String {
    format!(
        "VM {id} is not among this cluster's VMs (node.cluster-id {cluster}): it is gone, or another owner made it; \
         nothing is deleted. If it still exists, delete it at the provider"
    )
}

fn unclear(count: usize) -> Stays {
    let message = format!(
        "{count} VMs have its idempotency key and no record names its own VM; those that no PeerPod names are \
         collected when their node is gone"
    );
    Stays { reason: "VMUnclear", message }
}

fn pod_lives(peerpod: &PeerPod) -> Stays {
    let message = if owner_of(peerpod).is_some() {
        "its pod still runs in the VM, which is deleted with the pod; delete the pod to end both"
    } else {
        "it names no pod, and its node's daemon, which lives, has recorded no stop of its sandbox: a pod \
         may still run in the VM; delete the pod to end both"
    };
    Stays { reason: "PodRuns", message: message.to_owned() }
}

fn refused(error: &ProviderError) -> Stays {
    let reason = match error {
        ProviderError::Throttled { .. } => "Throttled",
        ProviderError::Auth { .. } => "Unauthorized",
        ProviderError::Quota { .. } => "QuotaExceeded",
        ProviderError::Invalid { .. } => "Invalid",
        ProviderError::Unsupported { .. } => "Unsupported",
        ProviderError::Transient { .. } => "ProviderUnavailable",
        ProviderError::Capacity { .. } | ProviderError::NotFound { .. } | ProviderError::KeyReused { .. } => {
            "Failed"
        }
    };
    Stays { reason, message: format!("the VM could not be deleted: {error}; trying again") }
}
