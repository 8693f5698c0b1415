//! Fake world behind the port. It outlives the node: a cloud with VMs, a relay, pod networks, guests.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream, StreamExt};
use peerpod_link::user_data::UserData;
use peerpod_proto::guest::{Images, NetworkPlan, Reply, Request};
use peerpod_proto::relay::{PutSandboxRequest, TunnelPeer};
use peerpod_provider_api::{
    Chosen, CreateRequest, DiskRequest, IdempotencyKey, InstanceId, Owned, OwnedState, Placement,
    ProviderEvent,
};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;
use zeroize::Zeroizing;

use crate::cluster::Recorded;
use crate::ledger::{Batch, Error as LedgerError, Ledger, NetnsRef, Network, Record};
use crate::sandbox::ports::{
    CallError, Clock, Cloud, CloudError, Followed, Guest, Identity, Kubernetes, Made, NetworkError,
    NodeEndpoints, PodEvent, PodNetwork, Ports, PullSecretError, Relay, Storage, Store, Trusted,
};
use crate::spec::{PodRef, SandboxId};
use crate::trust::{Signed, Ticket};
use crate::volumes::PodVolumes;

/// Directory that is removed at the end of the test.
pub(super) struct Dir(pub PathBuf);

impl Dir {
    pub(super) fn new() -> Dir {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        // In memory where possible: the tests sync thousands of times.
        let base = Path::new("/dev/shm");
        let base = if base.is_dir() { base.to_owned() } else { std::env::temp_dir() };
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = base.join(format!("peerpod-node-test-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// SplitMix64: the same seed gives the same world.
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    pub(super) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}

pub(super) struct Vm {
    pub key: IdempotencyKey,
    pub made: Instant,
    pub user_data: UserData,
    /// Address of this VM alone, if VMs have addresses of their own.
    pub address: IpAddr,
    /// Whether the cloud is deleting the VM, which may take long.
    pub is_deleting: bool,
}

/// State outside the node.
pub(super) struct State {
    pub vms: BTreeMap<InstanceId, Vm>,
    pub made: u64,
    /// A key that has made a VM never makes another one, as with a cloud's client token.
    pub tokens: HashMap<IdempotencyKey, InstanceId>,
    pub create_calls: u64,
    /// VMs that each call for several made, by its key; also those that are gone.
    pub batches: HashMap<IdempotencyKey, Vec<InstanceId>>,
    /// Number of VMs that each call for several requested, repeated calls included.
    pub many_calls: Vec<u32>,
    /// Number of writes of batch files, and of all writes.
    pub batch_saves: u64,
    pub saves: u64,
    /// Digest of the first request with each key.
    pub asked: HashMap<IdempotencyKey, String>,
    /// Number of creates with a key that had come with another request.
    pub reused: u64,
    /// Number of placements that were chosen.
    pub placed: u64,
    pub relay: BTreeMap<String, PutSandboxRequest>,
    pub devices: BTreeMap<String, bool>,
    /// Session of each sandbox's guest on the link.
    pub links: BTreeMap<String, String>,
    pub greeted: Vec<String>,
    /// The VM's tunnel address in the last plan of each guest.
    pub tunnels: BTreeMap<String, String>,
    /// Number of inspections of running pods' networks.
    pub looks: usize,
    /// Sandbox of each rotation request; `true` if the request contained a certificate.
    pub rotated: Vec<(String, bool)>,
    pub flushed: Vec<String>,
    pub dead_netns: BTreeSet<PathBuf>,
    /// Announced intents, each with the number of create calls by then.
    pub announced: Vec<(String, u64)>,
    /// Sandboxes with volumes that were marked as taken, each with the number of create calls by then.
    pub expected: Vec<(String, u64)>,
    /// Phase last published in the cluster for each sandbox.
    pub shown: BTreeMap<String, String>,
    /// Events posted on pods: pod, reason, text.
    pub said: Vec<(String, &'static str, String)>,
    /// Normal Events.
    pub progress: Vec<(String, &'static str, String)>,
    pub dice: Dice,
}

/// Behaviour of the world; tests change it as they go.
pub(super) struct World {
    pub state: Mutex<State>,
    pub scripted_creates: Mutex<VecDeque<CloudError>>,
    /// Refusals of creates that the cloud accepts first; each leaves a VM that is being deleted.
    pub late_refusals: Mutex<VecDeque<CloudError>>,
    /// Whether the provider chooses placements.
    pub places: AtomicBool,
    pub scripted_places: Mutex<VecDeque<CloudError>>,
    pub scripted_batches: Mutex<VecDeque<CloudError>>,
    /// Maximum number of VMs that the next call for several makes.
    pub shortage: Mutex<Option<u32>>,
    /// Whether each VM has an address of its own, from which its guest connects.
    pub own_addresses: AtomicBool,
    /// Whether the cloud still has no addresses of the VMs.
    pub hides_addresses: AtomicBool,
    pub create_takes: Mutex<Duration>,
    pub delete_takes: Mutex<Duration>,
    pub delete_fails: Mutex<Option<CloudError>>,
    /// Whether there is a cluster; it takes `announce_takes` to publish an intent.
    pub in_cluster: AtomicBool,
    pub announce_takes: Mutex<Duration>,
    /// Volumes of every pod.
    pub volumes: Mutex<Option<PodVolumes>>,
    /// Storage and clock in the place of this world's, from the next start of a node on.
    pub storage: Mutex<Option<Arc<dyn Storage>>>,
    pub clock: Mutex<Option<Arc<dyn Clock>>>,
    pub flush_takes: Mutex<Duration>,
    pub expect_fails: Mutex<Option<CloudError>>,
    /// PeerPods that the cluster lists, or the API server's error.
    pub peerpods: Mutex<Result<Vec<Recorded>, String>>,
    pub console_takes: Mutex<Duration>,
    pub console: Mutex<String>,
    pub reserve_fails: Mutex<Option<NetworkError>>,
    pub guest_error: Mutex<String>,
    pub guests_stay_away: AtomicBool,
    /// Whether a create may still reach the cloud after its caller died.
    pub late_creates: AtomicBool,
    pub disk_full: AtomicBool,
    /// Number of further operations that panic.
    pub panics: AtomicU64,
    pub owned_fails: Mutex<Option<CloudError>>,
    /// The provider's VM events.
    pub events: broadcast::Sender<ProviderEvent>,
    /// The only sandbox with a record that cannot be written.
    pub cannot_record: Mutex<Option<SandboxId>>,
    /// Counter of changes around the pods' networks.
    pub noise: watch::Sender<u64>,
    /// Name of the first interface that every inspection finds.
    pub network: Mutex<String>,
    /// Endpoints at which guests reach the node.
    pub node_endpoints: watch::Sender<NodeEndpoints>,
    /// Addresses of the VMs, unless each has its own.
    pub addresses: Mutex<Vec<IpAddr>>,
    /// Obstacles to every pod's traffic.
    pub obstacles: Mutex<Vec<String>>,
    /// Percentage of operations that fail; half of those fail after they took effect.
    pub faults: AtomicU64,
    pub epoch: watch::Sender<u64>,
    /// Service for pull secrets.
    pub secrets: super::pull::Service,
    pub trusted: watch::Sender<Arc<Trusted>>,
}

pub(super) fn transient(text: &str) -> CloudError {
    CloudError::transient(text)
}

pub(super) fn id(name: &str) -> SandboxId {
    name.parse().unwrap()
}

impl World {
    /// Returns the guest's plan for the present network.
    fn plan(&self, vm: IpAddr) -> NetworkPlan {
        let mut plan = NetworkPlan { version: 1, ..NetworkPlan::default() };
        plan.underlay.mut_or_insert_default().vm_address = vm.to_string();
        let name = self.network.lock().unwrap().clone();
        plan.interfaces.push(peerpod_proto::guest::Interface { name, mtu: 1450, ..Default::default() });
        plan
    }

    pub(super) fn looks(&self) -> usize {
        self.state().looks
    }

    /// Returns the VM's tunnel address in the guest's last plan.
    pub(super) fn tunnel_to(&self, id: &str) -> Option<String> {
        self.state().tunnels.get(id).cloned()
    }

    pub(super) fn new(seed: u64) -> Arc<World> {
        Arc::new(World {
            state: Mutex::new(State {
                vms: BTreeMap::new(),
                made: 0,
                tokens: HashMap::new(),
                create_calls: 0,
                batches: HashMap::new(),
                many_calls: Vec::new(),
                batch_saves: 0,
                saves: 0,
                asked: HashMap::new(),
                reused: 0,
                placed: 0,
                relay: BTreeMap::new(),
                devices: BTreeMap::new(),
                links: BTreeMap::new(),
                greeted: Vec::new(),
                tunnels: BTreeMap::new(),
                looks: 0,
                rotated: Vec::new(),
                flushed: Vec::new(),
                dead_netns: BTreeSet::new(),
                announced: Vec::new(),
                expected: Vec::new(),
                shown: BTreeMap::new(),
                said: Vec::new(),
                progress: Vec::new(),
                dice: Dice::new(seed),
            }),
            scripted_creates: Mutex::default(),
            late_refusals: Mutex::default(),
            places: AtomicBool::new(false),
            scripted_places: Mutex::default(),
            scripted_batches: Mutex::default(),
            shortage: Mutex::default(),
            own_addresses: AtomicBool::new(false),
            hides_addresses: AtomicBool::new(false),
            create_takes: Mutex::new(Duration::from_millis(50)),
            delete_takes: Mutex::new(Duration::from_millis(20)),
            delete_fails: Mutex::default(),
            in_cluster: AtomicBool::new(false),
            announce_takes: Mutex::default(),
            volumes: Mutex::default(),
            storage: Mutex::default(),
            clock: Mutex::default(),
            flush_takes: Mutex::default(),
            expect_fails: Mutex::default(),
            peerpods: Mutex::new(Ok(Vec::new())),
            console_takes: Mutex::default(),
            console: Mutex::new("kernel panic".into()),
            reserve_fails: Mutex::default(),
            guest_error: Mutex::default(),
            guests_stay_away: AtomicBool::new(false),
            late_creates: AtomicBool::new(false),
            disk_full: AtomicBool::new(false),
            panics: AtomicU64::new(0),
            owned_fails: Mutex::default(),
            events: broadcast::Sender::new(16),
            cannot_record: Mutex::default(),
            noise: watch::Sender::new(0),
            network: Mutex::new("eth0".into()),
            node_endpoints: watch::Sender::new(None),
            addresses: Mutex::new(vec![IpAddr::V4(Ipv4Addr::new(10, 99, 0, 7))]),
            obstacles: Mutex::default(),
            faults: AtomicU64::new(0),
            epoch: watch::Sender::new(1),
            secrets: super::pull::Service::default(),
            trusted: watch::Sender::new(Arc::new(Trusted { id: "first".into(), cas: vec![b"ca".to_vec()] })),
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    // Each method takes the lock itself, so that a test may compare several values in one line.
    pub(super) fn vms(&self) -> usize {
        self.state().vms.len()
    }

    pub(super) fn made(&self) -> u64 {
        self.state().made
    }

    pub(super) fn create_calls(&self) -> u64 {
        self.state().create_calls
    }

    /// Returns the number of VMs that each call for several requested.
    pub(super) fn many_calls(&self) -> Vec<u32> {
        self.state().many_calls.clone()
    }

    pub(super) fn placed(&self) -> u64 {
        self.state().placed
    }

    /// Returns the number of writes of batch files, and of all writes.
    pub(super) fn writes(&self) -> (u64, u64) {
        let state = self.state();
        (state.batch_saves, state.saves)
    }

    pub(super) fn greetings(&self) -> usize {
        self.state().greeted.len()
    }

    pub(super) fn devices(&self) -> usize {
        self.state().devices.len()
    }

    /// Rejects a key that has come with another request, as a cloud does for a client token.
    fn reused(&self, request: &CreateRequest, key: &IdempotencyKey, count: u32) -> Option<CloudError> {
        let mut state = self.state();
        let digest = format!("{count} {}", request.digest());
        let known = state.asked.entry(key.clone()).or_insert_with(|| digest.clone());
        if *known == digest {
            return None;
        }
        state.reused += 1;
        Some(CloudError::key_reused("IdempotentParameterMismatch"))
    }

    /// Returns the VM of this key, and makes it unless it was made before; it may be gone by now.
    fn make(&self, request: &CreateRequest, key: &IdempotencyKey) -> InstanceId {
        let mut state = self.state();
        if let Some(id) = state.tokens.get(key) {
            return id.clone();
        }
        let id = state.boot(request, key);
        state.tokens.insert(key.clone(), id.clone());
        id
    }

    /// Returns the VMs of this key, and makes them unless they were made before; they may be gone by now.
    fn make_many(&self, request: &CreateRequest, count: u32, key: &IdempotencyKey) -> Vec<InstanceId> {
        let most = self.shortage.lock().unwrap().take();
        let mut state = self.state();
        if let Some(made) = state.batches.get(key) {
            return made.clone();
        }
        let made: Vec<_> = (0..count.min(most.unwrap_or(count))).map(|_| state.boot(request, key)).collect();
        state.batches.insert(key.clone(), made.clone());
        made
    }

    /// Adds a VM with the key of another one, as a cloud would that breaks its promise.
    pub(super) fn double(&self, of: &str) {
        let mut state = self.state();
        let vm = &state.vms[&InstanceId::new(of).unwrap()];
        let twin = Vm {
            key: vm.key.clone(),
            made: vm.made,
            user_data: vm.user_data.clone(),
            address: vm.address,
            is_deleting: vm.is_deleting,
        };
        state.vms.insert(InstanceId::new(format!("{of}-double")).unwrap(), twin);
    }

    /// Returns the source address of the guest in a VM.
    pub(super) fn home_of(&self, vm: &InstanceId) -> IpAddr {
        if !self.own_addresses.load(Ordering::Relaxed) {
            return self.addresses.lock().unwrap()[0];
        }
        self.state().vms.get(vm).map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |vm| vm.address)
    }

    /// Panics if the test asked for it, as an operation with a bug would.
    fn bug(&self) {
        let left = self.panics.load(Ordering::Relaxed);
        if left > 0 {
            self.panics.store(left - 1, Ordering::Relaxed);
            panic!("a bug, as the test asked for");
        }
    }

    /// Decides whether an operation fails now, and whether it takes effect all the same.
    fn fault(&self) -> Option<bool> {
        let chance = self.faults.load(Ordering::Relaxed);
        let mut state = self.state();
        state.dice.percent(chance).then(|| state.dice.percent(50))
    }
}

impl State {
    fn boot(&mut self, request: &CreateRequest, key: &IdempotencyKey) -> InstanceId {
        self.made += 1;
        let id = InstanceId::new(format!("i-{}", self.made)).unwrap();
        let user_data = UserData::parse(request.user_data.as_bytes()).unwrap();
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 98, 0, 0).to_bits() + self.made as u32).into();
        let (key, made) = (key.clone(), Instant::now());
        self.vms.insert(id.clone(), Vm { key, made, user_data, address, is_deleting: false });
        id
    }
}

/// Ends the node after a number of boundaries.
#[derive(Default)]
pub(super) struct Fuse {
    left: AtomicI64,
    burning: AtomicBool,
    pub blown: tokio::sync::Notify,
}

impl Fuse {
    pub(super) fn after(boundaries: Option<u64>) -> Arc<Fuse> {
        let left = boundaries.map_or(i64::MAX, |n| n as i64);
        Arc::new(Fuse { left: AtomicI64::new(left), ..Fuse::default() })
    }

    /// Sets the number of boundaries anew, from here on.
    pub(super) fn burn_after(&self, boundaries: i64) {
        self.left.store(boundaries, Ordering::SeqCst);
    }

    pub(super) fn is_blown(&self) -> bool {
        self.burning.load(Ordering::SeqCst)
    }

    async fn boundary(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) <= 0 {
            self.burning.store(true, Ordering::SeqCst);
            self.blown.notify_one();
            std::future::pending::<()>().await;
        }
    }
}

/// Port implementation for one life of the node process.
pub(super) struct Fake {
    pub world: Arc<World>,
    ledger: Ledger,
    pub fuse: Arc<Fuse>,
    pub guests: Mutex<HashMap<String, watch::Sender<Guest>>>,
    start: Instant,
    start_ms: u64,
}

impl Fake {
    pub(super) fn new(world: Arc<World>, ledger: Ledger, fuse: Arc<Fuse>) -> Arc<Fake> {
        // The wall clock goes on while the node is dead: it advances at least by the age of the oldest VM.
        let age = world.state().vms.values().map(|vm| vm.made.elapsed().as_millis() as u64).max();
        let start_ms = 1_700_000_000_000 + age.unwrap_or(0);
        Arc::new(Fake { world, ledger, fuse, guests: Mutex::default(), start: Instant::now(), start_ms })
    }

    /// Returns this fake behind all ports that the world has nothing else for.
    pub(super) fn ports(self: &Arc<Fake>) -> Ports {
        let (clock, storage) = (self.world.clock.lock().unwrap(), self.world.storage.lock().unwrap());
        Ports {
            clock: clock.clone().unwrap_or_else(|| self.clone()),
            store: self.clone(),
            cloud: self.clone(),
            storage: storage.clone().unwrap_or_else(|| self.clone()),
            network: self.clone(),
            relay: self.clone(),
            identity: self.clone(),
            kubernetes: self.clone(),
        }
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(super) fn guest_sender(&self, id: &str) -> watch::Sender<Guest> {
        let session = self.world.state().links.get(id).cloned();
        let mut guests = self.guests.lock().unwrap();
        let sender = guests.entry(id.to_owned()).or_insert_with(|| {
            let guest = Guest {
                connected: session.is_some(),
                session: session.unwrap_or_default(),
                ..Guest::default()
            };
            watch::Sender::new(guest)
        });
        sender.clone()
    }

    /// Sets the source address of the guest's connection.
    pub(super) fn comes_from(&self, id: &str, address: IpAddr) {
        self.guest_sender(id).send_modify(|guest| guest.address = Some(address));
    }

    /// Makes the guest report the address as its VM's own.
    pub(super) fn has_address(&self, id: &str, address: IpAddr) {
        let mut status = peerpod_proto::guest::Status::new();
        status.uplink_addresses.push(address.to_string());
        let status = protobuf::Message::write_to_bytes(&status).unwrap();
        self.guest_sender(id).send_modify(|guest| guest.status = status);
    }

    /// Makes the guest report its path MTU to the node, and the pod's MTU that follows from it.
    pub(super) fn finds_path(&self, id: &str, mtu: u32, pod_mtu: u32) {
        let mut status = peerpod_proto::guest::Status::new();
        status.path = Some(peerpod_proto::guest::Path { mtu, probed: mtu, ..Default::default() }).into();
        status.pod_mtu = pod_mtu;
        let status = protobuf::Message::write_to_bytes(&status).unwrap();
        self.guest_sender(id).send_modify(|guest| guest.status = status);
    }

    /// Makes the guest report that the cloud takes its VM back at this time.
    pub(super) fn is_reclaimed(&self, id: &str, at_unix_ms: u64) {
        let mut status = peerpod_proto::guest::Status::new();
        status.reclaimed_at_unix_ms = at_unix_ms;
        let status = protobuf::Message::write_to_bytes(&status).unwrap();
        self.guest_sender(id).send_modify(|guest| guest.status = status);
    }

    /// Makes the guest report a pull in flight of 300 MiB; `None`: it is over.
    pub(super) fn pulls(&self, id: &str, image: &str, mib: Option<u64>) {
        let mut status = peerpod_proto::guest::Status::new();
        status.pulls.extend(mib.map(|mib| peerpod_proto::guest::Pull {
            image: image.to_owned(),
            bytes: mib << 20,
            of: 300 << 20,
            bytes_per_second: 3 << 19,
            elapsed_ms: 20_500,
            ..Default::default()
        }));
        let status = protobuf::Message::write_to_bytes(&status).unwrap();
        self.guest_sender(id).send_modify(|guest| guest.status = status);
    }

    /// Makes the guest report the bytes that it has not written back yet.
    pub(super) fn has_unwritten(&self, id: &str, bytes: u64) {
        let mut status = peerpod_proto::guest::Status::new();
        status.unwritten_bytes = Some(bytes);
        let status = protobuf::Message::write_to_bytes(&status).unwrap();
        self.guest_sender(id).send_modify(|guest| guest.status = status);
    }

    /// Takes the sandbox's guest off the link.
    pub(super) fn unlink(&self, id: &str) {
        self.world.state().links.remove(id);
        self.guest_sender(id).send_modify(|guest| guest.connected = false);
    }

    /// Puts the sandbox's guest on the link, with this session.
    pub(super) fn link(&self, id: &str, session: &str) {
        self.world.state().links.insert(id.to_owned(), session.to_owned());
        self.guest_sender(id).send_modify(|guest| {
            guest.connected = true;
            guest.session = session.to_owned();
        });
    }
}

/// Create request from its sending until its arrival at the cloud.
struct OnTheWire {
    world: Arc<World>,
    request: Option<(CreateRequest, IdempotencyKey)>,
    /// Number of VMs, for a call for several.
    count: Option<u32>,
}

impl OnTheWire {
    fn new(
        world: &Arc<World>,
        request: &CreateRequest,
        key: &IdempotencyKey,
        count: Option<u32>,
    ) -> OnTheWire {
        OnTheWire { world: world.clone(), request: Some((request.clone(), key.clone())), count }
    }
}

impl Drop for OnTheWire {
    fn drop(&mut self) {
        let late = self.world.late_creates.load(Ordering::Relaxed);
        let Some((request, key)) = self.request.take().filter(|_| late) else { return };
        let (arrives, after) = {
            let mut state = self.world.state();
            (state.dice.percent(50), Duration::from_millis(state.dice.below(3000)))
        };
        if arrives {
            let (world, count) = (self.world.clone(), self.count);
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                match count {
                    None => drop(world.make(&request, &key)),
                    Some(count) => drop(world.make_many(&request, count, &key)),
                }
            });
        }
    }
}

impl Clock for Fake {
    fn now_ms(&self) -> u64 {
        self.start_ms + self.start.elapsed().as_millis() as u64
    }
}

#[async_trait]
impl Store for Fake {
    async fn save(&self, record: &Record) -> Result<(), LedgerError> {
        self.fuse.boundary().await;
        let full = || LedgerError::Write {
            path: "sandboxes".into(),
            source: std::io::ErrorKind::StorageFull.into(),
        };
        let this_one = self.world.cannot_record.lock().unwrap().as_ref() == Some(&record.id);
        if this_one || self.world.disk_full.load(Ordering::Relaxed) {
            return Err(full());
        }
        // Disks fail rarely, and then before the write.
        if self.world.fault().is_some() && self.world.state().dice.percent(20) {
            return Err(full());
        }
        self.ledger.save(record)?;
        self.world.state().saves += 1;
        self.fuse.boundary().await;
        Ok(())
    }

    async fn forget(&self, id: &SandboxId) -> Result<(), LedgerError> {
        self.fuse.boundary().await;
        self.ledger.remove(id)
    }

    async fn recall(&self, id: &SandboxId) -> Result<Option<Record>, LedgerError> {
        self.fuse.boundary().await;
        self.ledger.read(id)
    }

    async fn save_batch(&self, batch: &Batch) -> Result<(), LedgerError> {
        self.fuse.boundary().await;
        let full =
            || LedgerError::Write { path: "batches".into(), source: std::io::ErrorKind::StorageFull.into() };
        if self.world.disk_full.load(Ordering::Relaxed) {
            return Err(full());
        }
        if self.world.fault().is_some() && self.world.state().dice.percent(20) {
            return Err(full());
        }
        self.ledger.save_batch(batch)?;
        self.world.state().batch_saves += 1;
        self.world.state().saves += 1;
        self.fuse.boundary().await;
        Ok(())
    }

    async fn forget_batch(&self, id: &str) -> Result<(), LedgerError> {
        self.fuse.boundary().await;
        self.ledger.remove_batch(id)?;
        self.fuse.boundary().await;
        Ok(())
    }
}

#[async_trait]
impl Cloud for Fake {
    fn obstacle(&self) -> Option<String> {
        None
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, CloudError> {
        assert_eq!(request.placement, None, "an attempt has its place already");
        self.fuse.boundary().await;
        if !self.world.places.load(Ordering::Relaxed) {
            return Ok(None);
        }
        if let Some(error) = self.world.scripted_places.lock().unwrap().pop_front() {
            return Err(error);
        }
        if self.world.fault().is_some() {
            return Err(transient("prices"));
        }
        // Never the same placement twice: the choice depends on the capacity at the moment.
        let mut state = self.world.state();
        state.placed += 1;
        Ok(Some(Placement::new(format!("place {}", state.placed)).unwrap()))
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<InstanceId, CloudError> {
        let mut wire = OnTheWire::new(&self.world, request, key, None);
        self.fuse.boundary().await;
        let takes = *self.world.create_takes.lock().unwrap();
        tokio::time::sleep(takes / 2).await;
        let fault = self.world.fault();
        if fault == Some(false) {
            wire.request = None;
            self.world.state().create_calls += 1;
            let which = self.world.state().dice.below(4);
            return Err(match which {
                0 => CloudError::capacity("m", "none left"),
                _ => transient("before"),
            });
        }
        if let Some(error) = self.world.scripted_creates.lock().unwrap().pop_front() {
            wire.request = None;
            self.world.state().create_calls += 1;
            return Err(error);
        }
        self.world.state().create_calls += 1;
        if let Some(error) = self.world.reused(request, key, 1) {
            wire.request = None;
            return Err(error);
        }
        let id = self.world.make(request, key);
        wire.request = None;
        let refusal = self.world.late_refusals.lock().unwrap().pop_front();
        if let Some(error) = refusal {
            self.world.state().vms.get_mut(&id).unwrap().is_deleting = true;
            self.fuse.boundary().await;
            tokio::time::sleep(takes / 2).await;
            return Err(error);
        }
        // The VM exists; a node that dies now has not got the answer.
        self.fuse.boundary().await;
        tokio::time::sleep(takes / 2).await;
        if fault == Some(true) {
            let auth = self.world.state().dice.percent(20);
            return Err(if auth {
                CloudError::Auth { text: "the token ended meanwhile".into() }
            } else {
                transient("after")
            });
        }
        Ok(id)
    }

    fn chosen(&self, vm: &InstanceId) -> Option<Chosen> {
        let instance_type = Some(format!("type of {vm}"));
        Some(Chosen { instance_type, zone: Some("z1".to_owned()), ..Chosen::default() })
    }

    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<Made, CloudError> {
        let count = count.get();
        let written = self.ledger.load().unwrap().batches;
        let ours = written.iter().find(|batch| batch.key == *key).expect("asked for before it was written");
        assert_eq!((ours.members.len(), &ours.request), (count as usize, request), "as it was written");
        let mut wire = OnTheWire::new(&self.world, request, key, Some(count));
        self.fuse.boundary().await;
        self.world.bug();
        let takes = *self.world.create_takes.lock().unwrap();
        tokio::time::sleep(takes / 2).await;
        self.world.state().many_calls.push(count);
        let fault = self.world.fault();
        if fault == Some(false) {
            wire.request = None;
            let which = self.world.state().dice.below(4);
            return Err(match which {
                0 => CloudError::capacity("m", "none left"),
                1 => CloudError::Auth { text: "the token ended".into() },
                _ => transient("before"),
            });
        }
        if let Some(error) = self.world.scripted_batches.lock().unwrap().pop_front() {
            wire.request = None;
            return Err(error);
        }
        if let Some(error) = self.world.reused(request, key, count) {
            wire.request = None;
            return Err(error);
        }
        let vms = self.world.make_many(request, count, key);
        wire.request = None;
        self.fuse.boundary().await;
        tokio::time::sleep(takes / 2).await;
        if fault == Some(true) {
            let auth = self.world.state().dice.percent(20);
            return Err(if auth {
                CloudError::Auth { text: "the token ended meanwhile".into() }
            } else {
                transient("after")
            });
        }
        let rest = (vms.len() < count as usize).then(|| CloudError::capacity("m", "no more of them"));
        Ok(Made { vms, rest })
    }

    async fn owned(&self) -> Result<Vec<Owned>, CloudError> {
        self.fuse.boundary().await;
        if let Some(error) = self.world.owned_fails.lock().unwrap().clone() {
            return Err(error);
        }
        if self.world.fault().is_some() {
            return Err(transient("list"));
        }
        let state = self.world.state();
        let owned = state.vms.iter().map(|(id, vm)| Owned {
            id: id.clone(),
            key: Some(vm.key.clone()),
            name: None,
            state: if vm.is_deleting { OwnedState::Deleting } else { OwnedState::Running },
            addresses: vec![],
            created: None,
            node: None,
        });
        Ok(owned.collect())
    }

    fn events(&self) -> BoxStream<'static, ProviderEvent> {
        let told = self.world.events.subscribe();
        stream::unfold(told, |mut told| async move { Some((told.recv().await.ok()?, told)) }).boxed()
    }

    async fn addresses(&self, vm: &InstanceId) -> Result<Vec<IpAddr>, CloudError> {
        self.fuse.boundary().await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        if self.world.fault().is_some() {
            return Err(transient("addresses"));
        }
        if !self.world.state().vms.contains_key(vm) {
            return Err(CloudError::not_found(format!("VM {vm} is gone")));
        }
        while self.world.hides_addresses.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if self.world.own_addresses.load(Ordering::Relaxed) {
            return Ok(vec![self.world.home_of(vm)]);
        }
        Ok(self.world.addresses.lock().unwrap().clone())
    }

    async fn delete(&self, vm: &InstanceId) -> Result<(), CloudError> {
        self.fuse.boundary().await;
        let takes = *self.world.delete_takes.lock().unwrap();
        tokio::time::sleep(takes).await;
        if let Some(error) = self.world.delete_fails.lock().unwrap().clone() {
            return Err(error);
        }
        match self.world.fault() {
            Some(false) => return Err(transient("delete")),
            other => {
                self.world.state().vms.remove(vm);
                self.fuse.boundary().await;
                if other.is_some() { Err(transient("delete, done")) } else { Ok(()) }
            }
        }
    }

    async fn console(&self, _: &InstanceId) -> Option<String> {
        let takes = *self.world.console_takes.lock().unwrap();
        tokio::time::sleep(takes).await;
        Some(self.world.console.lock().unwrap().clone())
    }

    async fn disk_grown(&self, _vm: &InstanceId, _disk: &DiskRequest, _bytes: u64) -> Result<(), CloudError> {
        Ok(())
    }
}

#[async_trait]
impl Storage for Fake {
    async fn volumes(&self, _pod: &PodRef) -> Result<Option<PodVolumes>, String> {
        Ok(self.world.volumes.lock().unwrap().clone())
    }

    async fn credentials(&self, volumes: &PodVolumes) -> Result<Vec<Option<Zeroizing<Vec<u8>>>>, String> {
        Ok(vec![None; volumes.volumes.len()])
    }

    async fn expect_vm(&self, id: &SandboxId, _volumes: &PodVolumes) -> Result<(), CloudError> {
        self.fuse.boundary().await;
        if let Some(error) = self.world.expect_fails.lock().unwrap().clone() {
            return Err(error);
        }
        let mut state = self.world.state();
        let calls = state.create_calls;
        state.expected.push((id.to_string(), calls));
        Ok(())
    }

    async fn attach(
        &self,
        _id: &SandboxId,
        _vm: &InstanceId,
        volumes: PodVolumes,
    ) -> Result<PodVolumes, CloudError> {
        Ok(volumes)
    }

    async fn release(&self, _id: &SandboxId, _vm: Option<&InstanceId>, _uid: &str) -> Result<(), CloudError> {
        Ok(())
    }
}

#[async_trait]
impl PodNetwork for Fake {
    async fn netns(&self, path: &Path) -> Result<NetnsRef, NetworkError> {
        if self.world.state().dead_netns.contains(path) {
            return Err(NetworkError { text: "no such file".into(), permanent: true });
        }
        let mut hash = [0; 8];
        hash.copy_from_slice(&Sha256::digest(path.to_string_lossy().as_bytes())[..8]);
        Ok(NetnsRef { path: path.into(), dev: 4, inode: u64::from_be_bytes(hash), boot_id: "b".into() })
    }

    fn netns_lives(&self, netns: &NetnsRef) -> bool {
        !self.world.state().dead_netns.contains(&netns.path)
    }

    async fn reserve(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        v6: bool,
        _encrypted: bool,
    ) -> Result<Network, NetworkError> {
        self.fuse.boundary().await;
        if let Some(error) = self.world.reserve_fails.lock().unwrap().clone() {
            return Err(error);
        }
        if !self.netns_lives(netns) {
            return Err(NetworkError { text: "the network namespace is gone".into(), permanent: true });
        }
        let fault = self.world.fault();
        if fault == Some(false) {
            return Err(NetworkError { text: "EBUSY".into(), permanent: false });
        }
        self.world.state().devices.insert(id.to_string(), false);
        self.fuse.boundary().await;
        if fault.is_some() {
            return Err(NetworkError { text: "EBUSY, done".into(), permanent: false });
        }
        Ok(Network { v6, tunnel: RawValue::from_string("{}".into()).unwrap() })
    }

    fn is_unsuited(
        &self,
        _network: &Network,
        _vm: IpAddr,
        _addresses: &[IpAddr],
        _from: Option<IpAddr>,
    ) -> bool {
        false
    }

    fn tunnel_peer(&self, _network: &Network, _key: &[u8]) -> Option<TunnelPeer> {
        None
    }

    async fn connect(
        &self,
        _: &NetnsRef,
        _: &SandboxId,
        network: &Network,
        vm: IpAddr,
    ) -> Result<NetworkPlan, NetworkError> {
        self.fuse.boundary().await;
        assert_eq!(network.v6, vm.is_ipv6());
        if self.world.fault().is_some() {
            return Err(NetworkError { text: "EBUSY".into(), permanent: false });
        }
        Ok(self.world.plan(vm))
    }

    async fn follow(
        &self,
        _: &NetnsRef,
        _: &SandboxId,
        network: &Network,
        vm: IpAddr,
    ) -> Result<Followed, NetworkError> {
        self.fuse.boundary().await;
        assert_eq!(network.v6, vm.is_ipv6());
        if self.world.fault().is_some() {
            return Err(NetworkError { text: "EBUSY".into(), permanent: false });
        }
        self.world.state().looks += 1;
        let plan = self.world.plan(vm);
        Ok(Followed {
            network: None,
            plan,
            changes: vec!["all".into()],
            left: vec![],
            obstacles: self.world.obstacles.lock().unwrap().clone(),
        })
    }

    async fn is_one_way(&self, one: IpAddr, other: IpAddr) -> bool {
        let network = |ip: IpAddr| ip.to_string().rsplit_once('.').map(|(network, _)| network.to_owned());
        network(one) == network(other)
    }

    fn netns_watcher(&self, _: &NetnsRef, _: &Network, _: IpAddr) -> watch::Receiver<u64> {
        self.world.noise.subscribe()
    }

    async fn carry_localhost(&self, _netns: &NetnsRef, _id: &SandboxId) -> Result<(), NetworkError> {
        Ok(())
    }

    async fn disconnect(
        &self,
        _: &NetnsRef,
        id: &SandboxId,
        _: Option<&Network>,
        _: Option<IpAddr>,
    ) -> Result<(), NetworkError> {
        self.fuse.boundary().await;
        let fault = self.world.fault();
        if fault != Some(false) {
            self.world.state().devices.remove(id.as_str());
            self.fuse.boundary().await;
        }
        match fault {
            None => Ok(()),
            Some(_) => Err(NetworkError { text: "EBUSY".into(), permanent: false }),
        }
    }
}

#[async_trait]
impl Relay for Fake {
    fn epoch(&self) -> watch::Receiver<u64> {
        self.world.epoch.subscribe()
    }

    async fn put(&self, request: PutSandboxRequest) -> Result<(), String> {
        self.fuse.boundary().await;
        self.world.bug();
        let fault = self.world.fault();
        if fault != Some(false) {
            self.world.state().relay.insert(request.id.clone(), request);
            self.fuse.boundary().await;
        }
        fault.map_or(Ok(()), |_| Err("the relay is away".into()))
    }

    async fn remove(&self, id: &SandboxId) -> Result<(), String> {
        self.fuse.boundary().await;
        self.world.bug();
        let fault = self.world.fault();
        if fault != Some(false) {
            self.world.state().relay.remove(id.as_str());
            self.world.state().links.remove(id.as_str());
            self.fuse.boundary().await;
        }
        fault.map_or(Ok(()), |_| Err("the relay is away".into()))
    }

    fn guest(&self, id: &SandboxId) -> watch::Receiver<Guest> {
        self.guest_sender(id.as_str()).subscribe()
    }

    async fn call(&self, id: &SandboxId, request: Request, _: Duration) -> Result<Reply, CallError> {
        self.fuse.boundary().await;
        if !self.world.state().relay.contains_key(id.as_str()) {
            return Err(CallError { text: "the sandbox is not served".into(), not_served: true });
        }
        if self.world.fault().is_some() || !self.world.state().links.contains_key(id.as_str()) {
            return Err("the guest is not connected".to_owned().into());
        }
        if request.has_flush() {
            self.world.state().flushed.push(id.to_string());
            let takes = *self.world.flush_takes.lock().unwrap();
            let mut guest = self.guest(id);
            let session = guest.borrow_and_update().session.clone();
            tokio::time::sleep(takes).await;
            // The answer comes with the link of the same guest program.
            let back = guest.wait_for(|guest| guest.connected || guest.session != session).await;
            if back.is_ok_and(|guest| guest.session != session) {
                return Err("the guest program was replaced".to_owned().into());
            }
            return Ok(Reply { error: self.world.guest_error.lock().unwrap().clone(), ..Reply::default() });
        }
        let mut state = self.world.state();
        if request.has_rotate() {
            let gets = request.rotate().certificates.first().map(|leaf| Sha256::digest(leaf).to_vec());
            state.rotated.push((id.to_string(), gets.is_some()));
            let put = &state.relay[id.as_str()];
            assert!(
                gets.is_none_or(|print| put.guest_certificates.contains(&print)),
                "the relay must know it first"
            );
            let csr = state.links[id.as_str()].clone().into_bytes();
            return Ok(Reply { csr, ..Reply::default() });
        } else {
            assert_eq!(request.personalise().sandbox_id, id.as_str());
            let to = &request.personalise().network.underlay.vm_address;
            state.tunnels.insert(id.to_string(), to.clone());
            state.greeted.push(id.to_string());
            let images = &request.personalise().images;
            let given = (images.pull_secret.clone(), images.keep_pull_secret);
            self.world.secrets.given.lock().unwrap().push(given);
        }
        drop(state);
        Ok(Reply { error: self.world.guest_error.lock().unwrap().clone(), ..Reply::default() })
    }
}

#[async_trait]
impl Identity for Fake {
    fn ticket(&self, ttl: Duration) -> Result<Ticket, String> {
        Ticket::new(self.now_ms(), ttl).map_err(|error| error.to_string())
    }

    async fn settled(&self) {}

    fn user_data(&self, ticket: &Ticket, claims: u32) -> Result<String, String> {
        let addresses = ["10.99.0.1:15151".parse().unwrap()];
        Ok(crate::ports::user_data(ticket, claims, &addresses, None, &[[7; 32]], Duration::from_secs(900)))
    }

    fn node_endpoints(&self) -> watch::Receiver<NodeEndpoints> {
        self.world.node_endpoints.subscribe()
    }

    fn trusted(&self) -> watch::Receiver<Arc<Trusted>> {
        self.world.trusted.subscribe()
    }

    fn csr_key(&self, csr: &[u8]) -> Result<[u8; 32], String> {
        if csr.is_empty() { Err("no CSR".into()) } else { Ok(Sha256::digest(csr).into()) }
    }

    fn sign(&self, id: &SandboxId, csr: &[u8]) -> Result<Signed, String> {
        self.csr_key(csr)?;
        // Every signature gives another certificate, as with a real CA.
        let mut leaf = format!("certificate of {id} ").into_bytes();
        leaf.extend(self.world.state().dice.below(u64::MAX).to_be_bytes());
        let certificate_sha256 = Sha256::digest(&leaf).into();
        Ok(Signed { certificate_sha256, chain: vec![leaf, b"ca".to_vec()] })
    }
}

#[async_trait]
impl Kubernetes for Fake {
    fn is_in_cluster(&self) -> bool {
        self.world.in_cluster.load(Ordering::Relaxed)
    }

    async fn announce(&self, record: &Record) -> Option<String> {
        self.fuse.boundary().await;
        let takes = *self.world.announce_takes.lock().unwrap();
        tokio::time::sleep(takes).await;
        let mut state = self.world.state();
        let calls = state.create_calls;
        state.announced.push((record.id.to_string(), calls));
        Some(format!("uid of {}", record.pod_name()))
    }

    fn show(&self, record: &Record) {
        self.world.state().shown.insert(record.id.to_string(), record.phase.name().to_owned());
    }

    async fn recorded(&self) -> Result<Vec<Recorded>, String> {
        self.world.peerpods.lock().unwrap().clone()
    }

    fn tell(&self, pod: &PodRef, said: PodEvent) {
        let mut state = self.world.state();
        let said_before = if said.is_normal { &mut state.progress } else { &mut state.said };
        said_before.push((pod.to_string(), said.reason, said.text));
    }

    fn images(&self, pull_secret: &str) -> Option<Images> {
        Some(Images { pull_secret: pull_secret.to_owned(), ..Images::default() })
    }

    fn pull_secrets_every(&self) -> Option<Duration> {
        self.world.secrets.every()
    }

    async fn pull_secret(&self, _: &PodRef) -> Result<Zeroizing<String>, PullSecretError> {
        self.world.secrets.ask().await
    }
}
