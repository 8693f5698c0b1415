//! Runs one batch, until its file is removed. Every step is retried: the members wait, each with its own deadline.

use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use peerpod_provider_api::{CreateRequest, InstanceId, OwnedState, Retry};
use tokio::time::sleep;
use tracing::{error, info, warn};

use super::{BatchRun, Batches, Status};
use crate::ledger::{BATCH_VERSION, Batch, Rest};
use crate::sandbox::lifecycle::Backoff;
use crate::sandbox::ports::{CloudError, Made};

impl Batches {
    /// Runs a batch to its end. `shape` is the members' common request, if it is still to be composed.
    pub(super) async fn follow(self, run: Arc<BatchRun>, mut shape: Option<CreateRequest>) {
        let mut backoff = Backoff::default();
        loop {
            let step = self.step(&run, shape.take());
            if AssertUnwindSafe(step).catch_unwind().await.is_ok() {
                return self.drop_batch(&run);
            }
            // The batch's progress is in its status, and the essential part is on disk.
            self.0.metrics.panics.inc();
            error!(
                "the task of a batch of VMs panicked; this is a bug of peerpod-node, and the task resumes"
            );
            sleep(backoff.next(Duration::ZERO)).await;
        }
    }

    async fn step(&self, run: &Arc<BatchRun>, shape: Option<CreateRequest>) {
        let status = run.status.borrow().clone();
        if let Status::Forming = status {
            let composed = match shape {
                Some(shape) => self.compose(run, shape).await,
                None => Err("the batch's task ended early".to_owned()),
            };
            let batch = match composed {
                Ok(batch) => Arc::new(batch),
                Err(why) => {
                    let members = run.members.len();
                    info!(members, why, "no batch formed; each sandbox requests its own VM");
                    run.status.send_replace(Status::Void);
                    return;
                }
            };
            // A failing disk may have kept the file all the same, and a restarted node that finds it requests its VMs.
            self.save(&batch).await;
            self.0.tickets.open(&batch.ticket.id);
            run.status.send_replace(Status::Asked(batch));
        }
        let status = run.status.borrow().clone();
        if let Status::Asked(batch) = status
            && !run.needed.borrow().is_empty()
        {
            let (made, rest) = self.ask(&batch).await;
            let (id, size, got) = (&batch.ticket.id, batch.members.len(), made.len());
            match &rest {
                None => info!(batch = id, size, "VMs made by one call"),
                Some(Rest { text: error, .. }) => {
                    warn!(batch = id, size, made = got, error, "the cloud made fewer VMs than requested");
                }
            }
            let batch = Arc::new(Batch { made: Some(made), rest, ..(*batch).clone() });
            self.save(&batch).await;
            run.status.send_replace(Status::Answered(batch));
        }
        let status = run.status.borrow().clone();
        let (Status::Asked(batch) | Status::Answered(batch)) = status else { return };
        // `run` holds the sender, so the wait cannot fail.
        drop(run.needed.subscribe().wait_for(|needed| needed.is_empty()).await);
        let mut backoff = Backoff::default();
        while let Err(error) = self.0.ports.store.forget_batch(&batch.ticket.id).await {
            warn!(batch = batch.ticket.id, %error, "cannot remove a batch's file; trying again");
            sleep(backoff.next(Duration::ZERO)).await;
        }
        self.0.tickets.close(&batch.ticket.id);
    }

    /// Builds the batch, with everything that a repeated call must repeat. Nothing is requested yet.
    async fn compose(&self, run: &BatchRun, shape: CreateRequest) -> Result<Batch, String> {
        let (ports, settings) = (&self.0.ports, &self.0.settings);
        let claims = u32::try_from(run.members.len()).map_err(|error| error.to_string())?;
        ports.identity.settled().await;
        let ticket = ports.identity.ticket(settings.ticket_ttl)?;
        let user_data = ports.identity.user_data(&ticket, claims)?;
        let trust = ports.identity.trusted().borrow().id.clone();
        // Labels of one pod would be wrong on the VMs of the others.
        let labels = [("peerpod.cluster", &settings.cluster_id), ("peerpod.node", &settings.node_name)];
        let short: String = ticket.id.chars().take(12).collect();
        let mut request = CreateRequest {
            name: format!("batch-{short}"),
            user_data,
            labels: labels.map(|(key, value)| (key.to_owned(), value.clone())).into(),
            ..shape
        };
        // If no place can take all of them, each member requests its own VM and gets its own error.
        request.placement = ports.cloud.place(&request).await.map_err(|error| error.to_string())?;
        let (key, members) = (self.key(&ticket.id), run.members.clone());
        Ok(Batch { version: BATCH_VERSION, key, request, ticket, trust, members, made: None, rest: None })
    }

    async fn save(&self, batch: &Batch) {
        let mut backoff = Backoff::default();
        while let Err(error) = self.0.ports.store.save_batch(batch).await {
            self.0.metrics.sandboxes.ledger_errors.inc();
            warn!(batch = batch.ticket.id, %error, "cannot record a batch; trying again");
            sleep(backoff.next(Duration::ZERO)).await;
        }
    }

    /// Repeats the call until its result is certain: VMs, or a refusal that the cloud's list does not contradict.
    async fn ask(&self, batch: &Batch) -> (Vec<InstanceId>, Option<Rest>) {
        let ports = &self.0.ports;
        let size = u32::try_from(batch.members.len()).unwrap_or(u32::MAX);
        let count = NonZeroU32::new(size).unwrap_or(NonZeroU32::MIN);
        self.0.metrics.sandboxes.batches.observe(f64::from(size));
        let mut backoff = Backoff::default();
        loop {
            let error = match ports.cloud.create_many(&batch.request, count, &batch.key).await {
                Ok(Made { vms, rest }) => return (in_order(vms, size), rest.as_ref().map(why)),
                Err(error) => error,
            };
            let id = &batch.ticket.id;
            if let Retry::After(least) = error.retry() {
                warn!(batch = id, %error, "no answer to a call for several VMs; repeating the call");
                sleep(backoff.next(least)).await;
                continue;
            }
            // An earlier try may have made the VMs, with a lost answer.
            match ports.cloud.owned().await {
                Ok(owned) => {
                    let ours = owned
                        .into_iter()
                        .filter(|vm| vm.key.as_ref() == Some(&batch.key) && vm.state != OwnedState::Deleting);
                    let made = in_order(ours.map(|vm| vm.id).collect(), size);
                    let rest = (made.len() < batch.members.len()).then(|| why(&error));
                    return (made, rest);
                }
                Err(unseen) => {
                    warn!(batch = id, %error, %unseen, "cannot list the VMs of a call for several VMs; trying again");
                    sleep(backoff.next(Duration::ZERO)).await;
                }
            }
        }
    }
}

/// Sorts the VMs into the order of the members' numbers.
fn in_order(mut vms: Vec<InstanceId>, at_most: u32) -> Vec<InstanceId> {
    vms.sort();
    vms.dedup();
    vms.truncate(at_most as usize);
    vms
}

/// Decides whether a member without a VM retries on its own, as another attempt: one VM may be available.
fn why(error: &CloudError) -> Rest {
    Rest { again: !matches!(error, CloudError::Auth { .. }), text: error.to_string() }
}
