//! Performs a phase's operations: starts every operation that is due and not in flight.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use peerpod_link::initdata::Initdata;
use peerpod_proto::guest::{Images, NetworkPlan, Personalise, Request};
use peerpod_proto::relay::{PutSandboxRequest, TunnelPeer};
use peerpod_provider_api::{CreateRequest, Owned, OwnedState};
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};
use zeroize::Zeroizing;

use crate::ledger::{Member, Network, Record};
use crate::sandbox::guest::claims::fingerprints;
use crate::sandbox::lifecycle::clear::Left;
use crate::sandbox::lifecycle::flush::FlushPlan;
use crate::sandbox::lifecycle::{Completion, Phase, Task, clear};
use crate::sandbox::ports::CloudError;
use crate::sandbox::vm::batch::{BatchMember, CreatePath};
use crate::volumes::PodVolumes;

/// Shortest time between the assignments of two sessions of a guest.
const BETWEEN_SESSIONS: Duration = Duration::from_secs(1);
/// Limit of the VM's addresses that the relay gets.
const MOST_ADDRESSES: usize = 8;

impl Task {
    /// Starts the operations that are due. Cheap and without waiting; runs after every event.
    pub(crate) fn reconcile(&mut self) {
        match self.record.phase {
            Phase::Booting { attempt } => {
                self.ask_pull_secret();
                self.ask(attempt);
                self.setup_network();
                self.tell_relay();
            }
            Phase::Joining { .. } => {
                self.ask_pull_secret();
                self.locate();
                self.attach();
                self.setup_network();
                self.tell_relay();
                self.carry_localhost();
                self.assign();
            }
            Phase::Running { .. } => {
                self.ask_pull_secret();
                self.setup_network();
                self.tell_relay();
                self.carry_localhost();
                self.assign();
                self.renew();
                self.follow();
                self.trace();
                self.read_reports();
            }
            Phase::Unwanted { .. } => self.learn(),
            Phase::Leaving { .. } => self.clear(),
            Phase::Created | Phase::Gone => {}
        }
    }

    /// Requests the VM from the cloud, after its announcement.
    fn ask(&mut self, attempt: u32) {
        if !self.in_flight.cloud.is_idle() {
            return;
        }
        let Some(request) = self.record.wanted.request.clone() else { return self.find(None) };
        if !self.start.announced {
            let (ports, record) = (self.ports.clone(), self.record.clone());
            return self.in_flight.cloud.start(async move {
                // Recorded before any request: the disks must have a known owner as long as a VM may come of it.
                if let Some(volumes) = &record.volumes
                    && let Err(error) = ports.storage.expect_vm(&record.id, volumes).await
                {
                    return Completion::Announced(Err(error));
                }
                Completion::Announced(Ok(ports.kubernetes.announce(&record).await))
            });
        }
        self.vm.unsent = false;
        match self.vm.path.clone() {
            CreatePath::Alone => self.create(request, attempt),
            CreatePath::Member(member) => self.await_batch(member),
            CreatePath::Open | CreatePath::Joining => match self.vm.batches.withdraw(&self.record.id) {
                Some(member) => {
                    self.vm.path = CreatePath::Member(member.clone());
                    self.await_batch(member);
                }
                None => self.join(&request, attempt),
            },
        }
    }

    /// Joins a window with sandboxes that want the same VM.
    fn join(&mut self, request: &CreateRequest, attempt: u32) {
        let member = Member { sandbox: self.record.id.clone(), attempt };
        let batched = self.vm.batches.join(member, request);
        self.vm.path = CreatePath::Joining;
        // The sender is dropped only if the node is closing, and this task with it.
        self.in_flight.cloud.start(async move { Completion::Batched(batched.await.unwrap_or(None)) });
    }

    fn await_batch(&mut self, member: BatchMember) {
        self.in_flight.cloud.start(async move {
            match member.result().await {
                Some(result) => Completion::Created(result),
                None => Completion::Batched(None),
            }
        });
    }

    /// Attaches the pod's volumes, concurrently with all other steps before the pod runs.
    fn attach(&mut self) {
        let Record { id, phase: Phase::Joining { vm }, volumes: Some(volumes), .. } = &self.record else {
            return;
        };
        if volumes.is_ready() || !self.in_flight.volumes.is_idle() {
            return;
        }
        let (ports, id, vm, volumes) = (self.ports.clone(), id.clone(), vm.clone(), volumes.clone());
        self.in_flight.volumes.start(async move {
            Completion::Attached(ports.storage.attach(&id, &vm, volumes).await.map(Box::new))
        });
    }

    /// Whether the pod's volumes are attached, and the relay can recognise them without the node.
    fn has_volumes(&self) -> bool {
        self.record.volumes.as_ref().is_none_or(|volumes| volumes.is_ready() && self.relay.put_done > 0)
    }

    /// Chooses and records the attempt's placement, then creates the VM there. A repeated create keeps its placement.
    fn create(&mut self, request: CreateRequest, attempt: u32) {
        let (ports, key) = (self.ports.clone(), self.key(attempt));
        if request.placement.is_none() && self.vm.placed != Some(attempt) {
            self.in_flight.cloud.start(async move { Completion::Placed(ports.cloud.place(&request).await) });
        } else {
            let create = async move { Completion::Created(ports.cloud.create(&request, &key).await) };
            self.in_flight.cloud.start(create);
        }
    }

    /// Finds the VM that the cloud may have made for an unwanted sandbox; a list may lag behind a create with a lost
    /// answer, so the create is then repeated with the same key. A member of a batch gets the result from its batch.
    fn learn(&mut self) {
        if !self.in_flight.cloud.is_idle() {
            return;
        }
        match self.vm.path.clone() {
            CreatePath::Alone => self.find(None),
            CreatePath::Member(member) => self.await_batch(member),
            CreatePath::Open | CreatePath::Joining => {
                let member = self.vm.batches.withdraw(&self.record.id);
                self.in_flight.cloud.start(async move { Completion::Batched(member) });
            }
        }
    }

    /// Looks for the VM by the key of the phase's attempt. A VM that is being deleted is one that the cloud refused after
    /// all: no pod may join it. A sandbox that is unwanted takes it all the same, as a VM to delete.
    pub(crate) fn find(&mut self, after: Option<CloudError>) {
        let (attempt, joins) = match self.record.phase {
            Phase::Booting { attempt } => (attempt, true),
            Phase::Unwanted { attempt } => (attempt, false),
            _ => return,
        };
        let (ports, key) = (self.ports.clone(), self.key(attempt));
        self.in_flight.cloud.start(async move {
            let is_deleting = |vm: &Owned| vm.state == OwnedState::Deleting;
            let result = ports.cloud.owned().await.map(|owned| {
                let ours = owned.into_iter().filter(|vm| vm.key.as_ref() == Some(&key));
                let best = ours.min_by_key(is_deleting);
                best.filter(|vm| !(joins && is_deleting(vm))).map(|vm| vm.id)
            });
            Completion::Found { result, after }
        });
    }

    /// Repeats the create with the same key, in order to have a VM to delete.
    pub(crate) fn ask_to_delete(&mut self) {
        let Phase::Unwanted { attempt } = self.record.phase else { return };
        let Some(request) = self.record.wanted.request.clone() else {
            self.in_flight.cloud.rest(Duration::ZERO);
            return;
        };
        self.create(request, attempt);
    }

    fn locate(&mut self) {
        let Phase::Joining { vm } = &self.record.phase else { return };
        if let Some(from) = self.seen_by_link() {
            // The cloud may never know the address.
            self.in_flight.cloud.cancel();
            return self.in_flight.cloud.start(async move { Completion::Located(Ok(vec![from])) });
        }
        if (self.record.addresses.is_empty() || self.is_not_told_apart()) && self.in_flight.cloud.is_idle() {
            let (ports, vm) = (self.ports.clone(), vm.clone());
            self.in_flight.cloud.start(async move { Completion::Located(ports.cloud.addresses(&vm).await) });
        }
    }

    /// Whether a guest with the batch's ticket connects from an address that the cloud has not named for any VM yet.
    pub(crate) fn is_not_told_apart(&self) -> bool {
        let enrolment = &self.record.enrolment;
        enrolment.binding.is_none()
            && enrolment.shared_ticket().is_some_and(|ticket| self.vm.tickets.is_awaited(&ticket.id))
    }

    /// Reserves the pod's tunnel, and connects it once the VM's address is known.
    fn setup_network(&mut self) {
        if !self.in_flight.network.is_idle() || self.network.given_up {
            return;
        }
        let Some(netns) = self.record.netns.clone() else { return };
        if let Some(mut before) = self.network.predecessor.take() {
            // The namespace's previous sandbox must have left it, or it would remove the new device.
            self.in_flight.network.start(async move {
                // An error means that the previous sandbox's task has ended, and all its operations with it.
                drop(before.wait_for(|view| view.network_gone).await);
                Completion::Rested
            });
            return;
        }
        let (ports, id) = (self.ports.clone(), self.record.id.clone());
        let vm = address(&self.record);
        let Some(network) = self.record.network.clone() else {
            let v6 = self.record.addresses.first().is_some_and(IpAddr::is_ipv6);
            return self.in_flight.network.start(async move {
                Completion::Reserved(ports.network.reserve(&netns, &id, v6, false).await)
            });
        };
        // The tunnel was reserved for the other address family; a VNI is unique per family.
        let is_other_family = vm.is_none() && !self.record.addresses.is_empty();
        let is_unsuited = vm.is_some_and(|vm| self.is_unsuited(&network, vm));
        if is_other_family || is_unsuited {
            if is_unsuited {
                // The tunnel has carried nothing yet: the guest gets its plan only when the tunnel is complete.
                self.guest.plan = None;
            }
            return self.in_flight.network.start(async move {
                let undone = ports.network.disconnect(&netns, &id, Some(&network), vm).await;
                Completion::Reserved(match undone {
                    Ok(()) => {
                        ports.network.reserve(&netns, &id, network.v6 != is_other_family, is_unsuited).await
                    }
                    Err(error) => Err(error),
                })
            });
        }
        if let Some(vm) = vm
            && self.guest.plan.is_none()
        {
            self.in_flight.network.start(async move {
                let plan = ports.network.connect(&netns, &id, &network, vm).await;
                Completion::Connected(plan.map(Box::new))
            });
        }
    }

    fn is_unsuited(&self, network: &Network, vm: IpAddr) -> bool {
        let from = self.record.enrolment.binding.as_ref().and_then(|binding| binding.from);
        self.record.assigned.session.is_none()
            && self.ports.network.is_unsuited(network, vm, &self.record.addresses, from)
    }

    fn tunnel_peer(&self) -> Option<TunnelPeer> {
        let network = self.record.network.as_ref()?;
        let key = self.record.enrolment.binding.as_ref()?.tunnel_key.as_ref()?;
        self.ports.network.tunnel_peer(network, &peerpod_link::user_data::from_hex(key)?)
    }

    /// Returns every address ever named for the VM, the likeliest first.
    fn vm_addresses(&self) -> Vec<IpAddr> {
        let mut addresses = Vec::new();
        for address in self.vm.moved.iter().chain(&self.record.addresses) {
            if addresses.len() < MOST_ADDRESSES && !addresses.contains(address) {
                addresses.push(*address);
            }
        }
        addresses
    }

    /// Returns the addresses that the relay dials.
    pub(crate) fn dial(&self) -> Vec<String> {
        let Some(port) = self.settings.dial else { return Vec::new() };
        self.vm_addresses().into_iter().map(|address| SocketAddr::new(address, port).to_string()).collect()
    }

    /// Handles other addresses of a VM that is dialled in vain. The tunnel follows once the guest was reached there.
    pub(crate) fn moved(&mut self, addresses: Vec<IpAddr>) {
        let new = addresses.iter().any(|address| !self.record.addresses.contains(address));
        if self.settings.dial.is_none() || !new || self.vm.moved == addresses {
            return;
        }
        info!(
            ?addresses,
            "the cloud reports other addresses of the VM; the relay dials its guest there, too"
        );
        self.vm.moved = addresses;
        self.put_again();
    }

    /// Sends the relay the sandbox's state, whenever that has changed or the relay is a new process.
    fn tell_relay(&mut self) {
        if self.relay.put_done >= self.relay.put_wanted || !self.in_flight.relay.is_idle() {
            return;
        }
        let (ports, version) = (self.ports.clone(), self.relay.put_wanted);
        let request = PutSandboxRequest {
            id: self.record.id.to_string(),
            agent_socket: self.settings.agent_socket(&self.record.id).to_string_lossy().into_owned(),
            guest_certificates: fingerprints(&self.record),
            pod: self.record.pod_name(),
            tunnel_peer: self.tunnel_peer().into(),
            dial: self.dial(),
            addresses: self.vm_addresses().iter().map(IpAddr::to_string).collect(),
            volumes: self.record.volumes.as_ref().map(PodVolumes::for_relay).unwrap_or_default(),
            ..Default::default()
        };
        let put = async move { Completion::Put { version, result: ports.relay.put(request).await } };
        self.in_flight.relay.start(put);
    }

    /// Assigns the pod to the connected guest, and again if session, plan, endpoints or pull secrets change.
    fn assign(&mut self) {
        if !self.in_flight.guest.is_idle() || !self.has_volumes() {
            return;
        }
        let guest = self.guest.state.borrow_and_update().clone();
        let Some(plan) = self.guest.plan.clone() else { return };
        if !guest.connected || self.is_assigned(&guest.session) {
            return;
        }
        self.reached("guest_connected");
        if !self.is_pull_secret_asked() {
            return; // the answer, or its deadline, comes soon
        }
        if self.record.assigned.session.as_ref().is_some_and(|session| *session != guest.session) {
            // A guest may change its session at will, and each assignment costs a plan and a record.
            let due = self.guest.assigned_at.map(|last| last + BETWEEN_SESSIONS);
            if let Some(due) = due.filter(|due| *due > Instant::now()) {
                return self.in_flight.guest.start(async move {
                    sleep_until(due).await;
                    Completion::Rested
                });
            }
            warn!(session = guest.session, "the guest program restarted; its pending work is lost");
        }
        self.guest.assigned_at = Some(Instant::now());
        let digest = plan.digest(&self.network.node_endpoints.borrow());
        let mut assignment = self.assignment(plan.network);
        let volumes = self.record.volumes.clone();
        let (ports, id, session) = (self.ports.clone(), self.record.id.clone(), guest.session);
        let secret = self.guest.pull.digest().map(str::to_owned);
        // The guest gives up on its agent or its path by itself; this limit ends a call without an answer.
        let timeout = self.settings.agent_timeout + Duration::from_secs(30);
        self.in_flight.guest.start(async move {
            let credentials = match &volumes {
                Some(volumes) => ports.storage.credentials(volumes).await,
                None => Ok(Vec::new()),
            };
            let result = match credentials {
                Ok(credentials) => {
                    add_credentials(&mut assignment, &credentials);
                    let mut request = Request::new();
                    request.set_personalise(assignment);
                    let reply = ports.relay.call(&id, request, timeout).await;
                    reply.map(Box::new).map_err(|error| error.text)
                }
                Err(text) => Err(text),
            };
            Completion::Assigned { session, digest, secret, result }
        });
    }

    /// Builds the message that assigns the pod to the guest, without the credentials of its shares.
    fn assignment(&self, network: NetworkPlan) -> Personalise {
        let Record { pod, volumes, .. } = &self.record;
        let node_endpoints = self.network.node_endpoints.borrow();
        Personalise {
            version: 1,
            sandbox_id: self.record.id.to_string(),
            pod_name: pod.as_ref().map(|pod| pod.name.clone()).unwrap_or_default(),
            pod_namespace: pod.as_ref().map(|pod| pod.namespace.clone()).unwrap_or_default(),
            network: Some(network).into(),
            node_addresses: node_endpoints.as_ref().map(|all| all.to_vec()).unwrap_or_default(),
            lease_seconds: u32::try_from(self.settings.lease.as_secs()).unwrap_or(u32::MAX),
            agent_timeout_ms: u32::try_from(self.settings.agent_timeout.as_millis()).unwrap_or(u32::MAX),
            initdata: self.record.wanted.initdata.clone().unwrap_or_default(),
            initdata_digest: digest_of(self.record.wanted.initdata.as_deref()),
            gpus: self.record.wanted.gpus,
            images: self.images().into(),
            volumes: volumes.as_ref().map(PodVolumes::for_guest).unwrap_or_default(),
            ..Personalise::default()
        }
    }

    fn images(&self) -> Option<Images> {
        let mut images = self.ports.kubernetes.images(self.guest.pull.secret().unwrap_or_default())?;
        images.keep_pull_secret = self.asks_for_pull_secret() && self.guest.pull.secret().is_none();
        Some(images)
    }

    /// Removes everything, as soon as no operation that makes something is in flight.
    fn clear(&mut self) {
        let quiet = self.in_flight.network.is_idle()
            && self.in_flight.relay.is_idle()
            && self.in_flight.localhost.is_idle();
        if !quiet || !self.in_flight.clear.is_idle() {
            return;
        }
        let left = self.end.leaving.clone().unwrap_or_else(|| self.everything());
        self.end.leaving = Some(left.clone());
        let (ports, record) = (self.ports.clone(), self.record.clone());
        let pass = async move { Completion::Cleared(clear::pass(ports, record, left).await) };
        self.in_flight.clear.start(pass);
    }

    fn everything(&self) -> Left {
        let Record { phase, assigned, volumes, netns, end, .. } = &self.record;
        // Flushed even if the link seems down: the relay may not have reported yet that it is up.
        let flush = (assigned.session.is_some() && !end.flush_over).then(|| match volumes {
            Some(volumes) if volumes.is_written() => FlushPlan::Volumes,
            _ => FlushPlan::Brief(self.settings.flush_timeout),
        });
        Left {
            flush,
            relay: true,
            vm: phase.vm().is_some(),
            volumes: volumes.is_some(),
            network: netns.is_some(),
        }
    }
}

/// Adds the credentials to the outgoing message alone: neither record nor ledger contains them.
fn add_credentials(assignment: &mut Personalise, credentials: &[Option<Zeroizing<Vec<u8>>>]) {
    for (volume, credentials) in assignment.volumes.iter_mut().zip(credentials) {
        volume.credentials = credentials.as_ref().map(|bytes| bytes.to_vec()).unwrap_or_default();
    }
}

/// Returns the initdata's digest, which the guest must find too. CreateVM has parsed the text before.
fn digest_of(initdata: Option<&str>) -> String {
    initdata.and_then(|text| Initdata::parse(text).ok()).map(|read| read.digest).unwrap_or_default()
}

/// Returns the remote of the tunnel: the VM's first address of the family the tunnel was reserved for.
pub(crate) fn address(record: &Record) -> Option<IpAddr> {
    let network = record.network.as_ref()?;
    record.addresses.iter().copied().find(|address| address.is_ipv6() == network.v6)
}
