//! What a phase obliges its task to: starts every effect that is due and does not run yet.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use peerpod_link::initdata::Initdata;
use peerpod_proto::{
    guest::{Images, Personalise, Request},
    relay::{PutSandboxRequest, TunnelPeer},
};
use peerpod_provider_api::CreateRequest;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::{
    batch::{Seat, Way},
    claims::fingerprints,
    clear::{self, Left, Release, Undo},
    effects::RelayError,
    phase::{Action, Phase, duty},
    slots::Outcome,
    task::Task,
};
use crate::{
    ledger::{Member, Network, Record},
    volumes::PodVolumes,
};

/// Addresses at which a guest is dialled.
const MOST_DIALLED: usize = 8;

impl Task {
    /// Starts what is due. Cheap and without waiting: called after everything that happens.
    pub(super) fn pump(&mut self) {
        match duty(&self.record.phase) {
            Action::Ask => {
                self.ask_pull_secret();
                self.ask();
                self.weave();
                self.tell_relay();
            }
            Action::Join => {
                self.ask_pull_secret();
                self.locate();
                self.attach();
                self.weave();
                self.tell_relay();
                self.carry_localhost();
                self.greet();
            }
            Action::Serve => {
                self.ask_pull_secret();
                self.weave();
                self.tell_relay();
                self.carry_localhost();
                self.greet();
                self.renew();
                self.follow();
                self.trace();
                self.hear_reports();
            }
            Action::Learn => self.learn(),
            Action::Clear => self.clear(),
            Action::Nothing | Action::Bury | Action::Forget => {}
        }
    }

    /// Asks the cloud for the VM.
    fn ask(&mut self) {
        let Phase::Booting { attempt } = self.record.phase else { return };
        if !self.slots.cloud.is_idle() {
            return;
        }
        let Some(request) = self.record.request.clone() else { return self.find(None) };
        if !self.announced {
            let (fx, record) = (self.fx.clone(), self.record.clone());
            return self.slots.cloud.start(async move {
                // Before anything is asked for: whose disks these are must be known as long as a VM may come of it.
                if let Some(volumes) = &record.volumes
                    && let Err(error) = fx.expect_vm(&record.id, volumes).await
                {
                    return Outcome::Placed(Err(error));
                }
                Outcome::Announced(fx.announce(&record).await)
            });
        }
        self.unsent = false;
        match self.way.clone() {
            Way::Alone => self.create(request, attempt),
            Way::Seated(seat) => self.sit(seat),
            Way::Open | Way::Joining => match self.batches.withdraw(&self.record.id) {
                Some(seat) => {
                    self.way = Way::Seated(seat.clone());
                    self.sit(seat);
                }
                None => self.join(&request, attempt),
            },
        }
    }

    /// Waits for others that want the same.
    fn join(&mut self, request: &CreateRequest, attempt: u32) {
        let member = Member { sandbox: self.record.id.clone(), attempt };
        let seated = self.batches.join(member, request);
        self.way = Way::Joining;
        // Never answered: the node is closing, and so are we.
        self.slots.cloud.start(async move { Outcome::Seated(seated.await.unwrap_or(None)) });
    }

    /// Waits for what the batch comes to.
    fn sit(&mut self, seat: Seat) {
        self.slots.cloud.start(async move {
            match seat.outcome().await {
                Some(result) => Outcome::Created(result),
                None => Outcome::Seated(None),
            }
        });
    }

    /// Has the pod's volumes attached, beside everything else that goes on before it runs.
    fn attach(&mut self) {
        let (Phase::Joining { vm }, Some(volumes)) = (&self.record.phase, &self.record.volumes) else {
            return;
        };
        if volumes.is_ready() || !self.slots.volumes.is_idle() {
            return;
        }
        let (fx, id, vm, volumes) = (self.fx.clone(), self.record.id.clone(), vm.clone(), volumes.clone());
        self.slots
            .volumes
            .start(async move { Outcome::Attached(fx.attach(&id, &vm, volumes).await.map(Box::new)) });
    }

    /// Whether the pod's volumes are with its VM and known to the relay, which is to recognise them without us.
    fn has_volumes(&self) -> bool {
        self.record.volumes.as_ref().is_none_or(|volumes| volumes.is_ready() && self.put_done > 0)
    }

    /// Has the attempt's place chosen and recorded, then the VM made there. A create that may have been sent before is
    /// repeated with the place it had.
    fn create(&mut self, request: CreateRequest, attempt: u32) {
        let (fx, key) = (self.fx.clone(), self.key(attempt));
        if request.placement.is_none() && self.placed != Some(attempt) {
            self.slots.cloud.start(async move { Outcome::Placed(fx.place(&request).await) });
        } else {
            self.slots.cloud.start(async move { Outcome::Created(fx.create(&request, &key).await) });
        }
    }

    /// Learns what the cloud made for a sandbox nobody wants any more: looks for it, and where nothing is shown asks
    /// for it again with the same key, because a list may lag behind a create that nobody heard the answer of. One with
    /// a seat in a batch hears it from the batch.
    fn learn(&mut self) {
        if !self.slots.cloud.is_idle() {
            return;
        }
        match self.way.clone() {
            Way::Alone => self.find(None),
            Way::Seated(seat) => self.sit(seat),
            Way::Open | Way::Joining => {
                let seat = self.batches.withdraw(&self.record.id);
                self.slots.cloud.start(async move { Outcome::Seated(seat) });
            }
        }
    }

    /// Looks for the VM by the key of the phase's attempt.
    pub(super) fn find(&mut self, after: Option<super::effects::CloudError>) {
        let (Phase::Booting { attempt } | Phase::Unwanted { attempt }) = self.record.phase else { return };
        let (fx, key) = (self.fx.clone(), self.key(attempt));
        self.slots.cloud.start(async move {
            let result = fx.find(&key).await;
            Outcome::Found { result, after }
        });
    }

    /// Asks again with the same key, in order to have something to delete.
    pub(super) fn ask_to_delete(&mut self) {
        let Phase::Unwanted { attempt } = self.record.phase else { return };
        let Some(request) = self.record.request.clone() else {
            self.slots.cloud.rest(Duration::ZERO);
            return;
        };
        self.create(request, attempt);
    }

    /// Learns the VM's addresses.
    fn locate(&mut self) {
        let Phase::Joining { vm } = &self.record.phase else { return };
        if (self.record.addresses.is_empty() || self.is_not_told_apart()) && self.slots.cloud.is_idle() {
            let (fx, vm) = (self.fx.clone(), vm.clone());
            self.slots.cloud.start(async move { Outcome::Located(fx.addresses(&vm).await) });
        }
    }

    /// A guest with the batch's ticket knocks from an address that the cloud has named for no VM yet.
    pub(super) fn is_not_told_apart(&self) -> bool {
        let ticket = self.record.ticket.as_ref().filter(|_| self.record.seat.is_some());
        self.record.binding.is_none() && ticket.is_some_and(|ticket| self.tickets.is_awaited(&ticket.id))
    }

    /// Reserves the pod's tunnel, and connects it once the VM's address is known.
    fn weave(&mut self) {
        if !self.slots.network.is_idle() || self.network_given_up {
            return;
        }
        let Some(netns) = self.record.netns.clone() else { return };
        if let Some(mut before) = self.predecessor.take() {
            // Whoever had the namespace before us must be out of it, or it would take our device away.
            self.slots.network.start(async move {
                // An error means that its task is gone, and with it whatever it was doing.
                drop(before.wait_for(|view| view.network_gone).await);
                Outcome::Rested
            });
            return;
        }
        let (fx, id) = (self.fx.clone(), self.record.id.clone());
        match (self.record.network.clone(), address(&self.record)) {
            (None, _) => {
                let v6 = self.record.addresses.first().is_some_and(IpAddr::is_ipv6);
                self.slots
                    .network
                    .start(async move { Outcome::Reserved(fx.reserve(&netns, &id, v6, None).await) });
            }
            (Some(network), None) if !self.record.addresses.is_empty() => {
                // Reserved for the other family than the VM has; a VNI is unique per family.
                self.slots.network.start(async move {
                    let undone = fx.disconnect(&netns, &id, Some(&network), None).await;
                    Outcome::Reserved(match undone {
                        Ok(()) => fx.reserve(&netns, &id, !network.v6, None).await,
                        Err(error) => Err(error),
                    })
                });
            }
            (Some(network), Some(vm)) if self.is_unsuited(&network, vm) => {
                // Nothing went through it yet: the guest hears of its network only when it is there.
                self.plan = None;
                self.slots.network.start(async move {
                    let undone = fx.disconnect(&netns, &id, Some(&network), Some(vm)).await;
                    Outcome::Reserved(match undone {
                        Ok(()) => fx.reserve_encrypted(&netns, &id, network.v6).await,
                        Err(error) => Err(error),
                    })
                });
            }
            (Some(network), Some(vm)) if self.plan.is_none() => {
                self.slots.network.start(async move {
                    Outcome::Connected(fx.connect(&netns, &id, &network, vm).await.map(Box::new))
                });
            }
            (Some(_), _) => {}
        }
    }

    fn is_unsuited(&self, network: &Network, vm: IpAddr) -> bool {
        let from = self.record.binding.as_ref().and_then(|binding| binding.from);
        self.record.session.is_none() && self.fx.is_unsuited(network, vm, &self.record.addresses, from)
    }

    fn tunnel_peer(&self) -> Option<TunnelPeer> {
        let network = self.record.network.as_ref()?;
        let key = self.record.binding.as_ref()?.tunnel_key.as_ref()?;
        self.fx.tunnel_peer(network, &peerpod_link::birth::from_hex(key)?)
    }

    /// Where the relay is to dial: every address that anybody ever named, the likeliest first.
    pub(super) fn dial(&self) -> Vec<String> {
        let Some(port) = self.settings.dial else { return Vec::new() };
        let addresses = self.moved.iter().chain(&self.record.addresses);
        let mut dial: Vec<String> = Vec::new();
        for address in addresses.map(|address| SocketAddr::new(*address, port).to_string()) {
            if dial.len() < MOST_DIALLED && !dial.contains(&address) {
                dial.push(address);
            }
        }
        dial
    }

    /// The VM has other addresses than those where its guest is dialled in vain, the cloud says. Its tunnel follows when
    /// the guest was reached there.
    pub(super) fn moved(&mut self, addresses: Vec<IpAddr>) {
        let new = addresses.iter().any(|address| !self.record.addresses.contains(address));
        if self.settings.dial.is_none() || !new || self.moved == addresses {
            return;
        }
        info!(?addresses, "the cloud names other addresses of the VM; its guest is dialled there, too");
        self.moved = addresses;
        self.redial();
    }

    /// The relay is to hear where the guest is dialled now.
    pub(super) fn redial(&mut self) {
        if self.settings.dial.is_some() {
            self.put_wanted += 1;
            self.slots.relay.wake();
        }
    }

    /// Tells the relay what it must know, whenever that changed or the relay is another one.
    fn tell_relay(&mut self) {
        if self.put_done >= self.put_wanted || !self.slots.relay.is_idle() {
            return;
        }
        let (fx, version) = (self.fx.clone(), self.put_wanted);
        let request = PutSandboxRequest {
            id: self.record.id.to_string(),
            agent_socket: self.settings.agent_socket(&self.record.id).to_string_lossy().into_owned(),
            guest_certificates: fingerprints(&self.record),
            pod: self.record.pod_name(),
            tunnel_peer: self.tunnel_peer().into(),
            dial: self.dial(),
            volumes: self.record.volumes.as_ref().map(PodVolumes::for_relay).unwrap_or_default(),
            ..Default::default()
        };
        self.slots.relay.start(async move { Outcome::Put { version, result: fx.put(request).await } });
    }

    /// Personalises the guest as soon as it is there; again when it is another one.
    fn greet(&mut self) {
        if !self.slots.guest.is_idle() || !self.has_volumes() {
            return;
        }
        let guest = self.guest.borrow_and_update().clone();
        let Some(plan) = self.plan.clone().filter(|_| guest.connected && !self.is_told(&guest.session))
        else {
            return;
        };
        self.reached("guest_connected");
        if !self.is_pull_secret_asked() {
            return; // its answer, or its deadline, comes soon
        }
        if self.record.session.as_ref().is_some_and(|session| *session != guest.session) {
            warn!(session = guest.session, "the guest program is another one: what it had under way is lost");
        }
        let homes = self.homes.borrow().clone();
        let digest = plan.digest(&homes);
        let mut personalise = Personalise {
            version: 1,
            sandbox_id: self.record.id.to_string(),
            pod_name: self.record.pod.as_ref().map(|pod| pod.name.clone()).unwrap_or_default(),
            pod_namespace: self.record.pod.as_ref().map(|pod| pod.namespace.clone()).unwrap_or_default(),
            network: Some(plan.network).into(),
            node_addresses: homes.as_ref().map(|homes| homes.to_vec()).unwrap_or_default(),
            lease_seconds: u32::try_from(self.settings.lease.as_secs()).unwrap_or(u32::MAX),
            agent_timeout_ms: u32::try_from(self.settings.agent_timeout.as_millis()).unwrap_or(u32::MAX),
            initdata: self.record.initdata.clone().unwrap_or_default(),
            initdata_digest: digest_of(self.record.initdata.as_deref()),
            gpus: self.record.gpus,
            images: self.images().into(),
            volumes: self.record.volumes.as_ref().map(PodVolumes::for_guest).unwrap_or_default(),
            ..Default::default()
        };
        let volumes = self.record.volumes.clone();
        let (fx, id, session) = (self.fx.clone(), self.record.id.clone(), guest.session);
        let secret = self.pull.digest().map(str::to_owned);
        // The guest gives up on its agent, and before that on a way to us, by itself; this only ends a call that nobody will
        // answer.
        let timeout = self.settings.agent_timeout + Duration::from_secs(30);
        self.slots.guest.start(async move {
            if let Some(volumes) = &volumes {
                match fx.credentials(volumes).await {
                    Ok(told) => with_credentials(&mut personalise, &told),
                    Err(text) => {
                        return Outcome::Greeted {
                            session,
                            digest,
                            secret,
                            result: Err(RelayError { text }),
                        };
                    }
                }
            }
            let mut request = Request::new();
            request.set_personalise(personalise);
            let result = fx.call(&id, request, timeout).await.map(Box::new);
            Outcome::Greeted { session, digest, secret, result }
        });
    }

    fn images(&self) -> Option<Images> {
        let mut images = self.fx.images(self.pull.secret().unwrap_or_default())?;
        images.keep_pull_secret = self.asks_for_pull_secret() && self.pull.secret().is_none();
        Some(images)
    }

    /// Takes everything away, as soon as nothing more is being made.
    fn clear(&mut self) {
        let quiet =
            self.slots.network.is_idle() && self.slots.relay.is_idle() && self.slots.localhost.is_idle();
        if !quiet || !self.slots.clear.is_idle() {
            return;
        }
        let left = self.leaving.clone().unwrap_or_else(|| self.everything());
        self.leaving = Some(left.clone());
        let fx = self.fx.clone();
        self.slots.clear.start(async move { Outcome::Cleared(clear::pass(fx, left).await) });
    }

    fn everything(&self) -> Left {
        // Asked even when the link seems down: after a restart of ours the relay may not have said yet that it is up.
        let greeted = self.record.session.is_some();
        Left {
            id: self.record.id.clone(),
            flush: greeted.then_some(self.settings.flush_timeout),
            relay: true,
            vm: self.record.phase.vm().cloned(),
            volumes: self
                .record
                .volumes
                .as_ref()
                .map(|volumes| Release { uid: volumes.uid.clone(), vm: self.record.phase.vm().cloned() }),
            network: self.record.netns.clone().map(|netns| Undo {
                netns,
                network: self.record.network.clone(),
                address: address(&self.record),
            }),
        }
    }
}

/// Only now, and into what is sent alone: neither record nor ledger has them.
fn with_credentials(personalise: &mut Personalise, told: &[Option<Zeroizing<Vec<u8>>>]) {
    for (volume, told) in personalise.volumes.iter_mut().zip(told) {
        volume.credentials = told.as_ref().map(|told| told.to_vec()).unwrap_or_default();
    }
}

/// What the guest is to find, too; it was read when the pod was made.
fn digest_of(initdata: Option<&str>) -> String {
    initdata.and_then(|text| Initdata::parse(text).ok()).map(|read| read.digest).unwrap_or_default()
}

/// The VM's address that its tunnel goes to: the first of the family the tunnel was reserved for.
pub(super) fn address(record: &Record) -> Option<IpAddr> {
    let network = record.network.as_ref()?;
    record.addresses.iter().copied().find(|address| address.is_ipv6() == network.v6)
}
