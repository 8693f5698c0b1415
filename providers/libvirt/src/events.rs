//! Reports VMs that end without a delete. Reads libvirtd's events, and compares libvirt's list whenever events may have
//! been missed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use peerpod_common::backoff::Backoff;
use peerpod_provider_api::{EventKind, InstanceId, ProviderEvent};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, sleep, sleep_until};

use crate::Shared;
use crate::kind::is_trial;
use crate::marks::uuid_text;
use crate::rpc::calls::Domain;
use crate::rpc::xdr::Uuid;
use crate::rpc::{DomainEvent, LibvirtConnection, RpcError, unless_absent};

/// `VIR_DOMAIN_EVENT_STARTED`.
const STARTED: i32 = 2;
/// `VIR_DOMAIN_EVENT_STOPPED`.
const STOPPED: i32 = 5;
/// Intervals of the comparisons beside the events, at first short. A libvirtd that has just restarted assumes for a
/// moment that all its VMs run, and sends no event when it finds out that one does not.
const FIRST_LOOK: Duration = Duration::from_secs(1);
const LAST_LOOK: Duration = Duration::from_secs(30);
/// Interval of attempts to reach a libvirtd that is down.
const AGAIN: Duration = Duration::from_secs(1);

/// Returns the events from now on; the stream ends with the provider.
pub(crate) fn stream(shared: &Arc<Shared>) -> BoxStream<'static, ProviderEvent> {
    let events = shared.ended.subscribe();
    // The first listener starts the one task that listens to libvirtd; later listeners share its events.
    if shared.ended.receiver_count() == 1 {
        tokio::spawn(listen(Arc::downgrade(shared)));
    }
    let next = |mut events: broadcast::Receiver<ProviderEvent>| async move {
        loop {
            match events.recv().await {
                Ok(event) => return Some((event, events)),
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    };
    stream::unfold(events, next).boxed()
}

/// Returns the changes of libvirtd's health from now on, which the task that listens to libvirtd notices.
pub(crate) fn health(shared: &Shared) -> BoxStream<'static, Option<String>> {
    let next = |mut away: watch::Receiver<Option<String>>| async move {
        away.changed().await.ok()?;
        let now = away.borrow_and_update().clone();
        Some((now, away))
    };
    stream::unfold(shared.away.subscribe(), next).boxed()
}

async fn listen(shared: Weak<Shared>) {
    let mut said = false;
    loop {
        let Some(here) = shared.upgrade().filter(|shared| shared.ended.receiver_count() > 0) else { return };
        let connected = here.link.get().await;
        drop(here);
        let outcome = match connected {
            Ok(libvirt) => hear(&shared, &libvirt).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &outcome
            && !said
        {
            tracing::warn!("libvirtd sends no events: {error}; VMs that end are seen when it is back");
        }
        said = outcome.is_err();
        let Some(here) = shared.upgrade() else { return };
        here.set_away(outcome.err().map(|error| error.to_string()));
        drop(here);
        sleep(AGAIN).await;
    }
}

/// Handles the events of this connection until it closes.
async fn hear(shared: &Weak<Shared>, libvirt: &LibvirtConnection) -> Result<(), RpcError> {
    let mut events = libvirt.events();
    compare(shared, libvirt).await?;
    if let Some(shared) = shared.upgrade() {
        shared.set_away(None);
    }
    let mut looks = Backoff::new(FIRST_LOOK, LAST_LOOK);
    let mut next = Instant::now() + looks.pause();
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = sleep_until(next) => {
                compare(shared, libvirt).await?;
                next = Instant::now() + looks.pause();
                continue;
            }
            why = libvirt.closed() => return Err(RpcError::Lost(why)),
        };
        match event {
            Ok(DomainEvent::Lifecycle { domain, event, detail }) => {
                let Some(shared) = shared.upgrade() else { return Ok(()) };
                if !domain.name.starts_with(&crate::marks::prefix(&shared.owner)) {
                    continue;
                }
                match event {
                    // A trial of KVM is not a VM.
                    STARTED if !is_trial(&domain) => shared.running(&domain),
                    STOPPED => shared.has_ended(&domain.uuid, stopped(detail)),
                    _ => {}
                }
            }
            Ok(_) => {}
            Err(RecvError::Lagged(_)) => compare(shared, libvirt).await?,
            Err(RecvError::Closed) => {
                return Err(RpcError::Lost("libvirtd closed the connection".to_owned()));
            }
        }
    }
}

/// Compares the recorded VMs with libvirt's: a VM that was running and no longer is has ended.
async fn compare(shared: &Weak<Shared>, libvirt: &LibvirtConnection) -> Result<(), RpcError> {
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    let prefix = crate::marks::prefix(&shared.owner);
    let before: Vec<Uuid> = shared.lives.lock().running.iter().copied().collect();
    let domains: Vec<Domain> =
        libvirt.domains().await?.0.into_iter().filter(|domain| domain.name.starts_with(&prefix)).collect();
    for domain in &domains {
        let Some(state) = unless_absent(libvirt.state(domain).await)? else { continue };
        if state.is_on() && !is_trial(domain) {
            shared.running(domain);
        } else if before.contains(&domain.uuid) {
            shared.has_ended(&domain.uuid, state.describe());
        }
    }
    for uuid in before.iter().filter(|uuid| !domains.iter().any(|domain| domain.uuid == **uuid)) {
        shared.has_ended(uuid, "libvirt does not know it any more");
    }
    Ok(())
}

impl Shared {
    fn set_away(&self, why: Option<String>) {
        self.away.send_if_modified(|away| std::mem::replace(away, why.clone()) != why);
    }

    /// Reports the end of a VM once, unless the provider caused it.
    fn has_ended(&self, uuid: &Uuid, why: &str) {
        if !self.lives.lock().running.remove(uuid) {
            return;
        }
        let Ok(id) = InstanceId::new(uuid_text(uuid)) else { return };
        tracing::info!(instance = %id, "VM has ended: {why}");
        let reason = why.to_owned();
        // Without a listener the event is not needed.
        self.ended.send(ProviderEvent { id, kind: EventKind::Ended { reason } }).ok();
    }
}

/// Describes a `virDomainEventStoppedDetailType`.
fn stopped(detail: i32) -> &'static str {
    match detail {
        0 => "it was shut down or powered itself off",
        1 => "it was destroyed from outside",
        2 => "its kernel crashed",
        3 => "it was migrated away",
        4 => "it was saved to a file",
        5 => "QEMU failed or was killed",
        _ => "libvirt gives no reason",
    }
}
