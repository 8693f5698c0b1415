//! Provider of pod VMs on QEMU, made by libvirtd.
//!
//! * A VM is a persistent domain. Its name and UUID follow from owner and idempotency key, so there is never a second
//!   one. Its metadata name the owner. The provider keeps no state that libvirt does not have.
//! * The provider uses libvirtd's own protocol ([`rpc`]), over one connection that it dials again when it is lost.
//!   Running VMs are not affected: they are processes of QEMU.
//! * Touches libvirtd's socket and the image files that the settings name; nothing else of the node.

pub mod config;
mod create;
mod disks;
mod events;
mod guest_memory;
mod inspect;
mod kind;
mod kvm;
mod marks;
mod probe;
mod refusal;
mod remove;
mod reserve;
pub mod rpc;
mod seed;
mod store;
mod upload;
mod volumes;
mod xml;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use parking_lot::Mutex as Lock;
use peerpod_common::keyed_locks::KeyedLocks;
use peerpod_provider_api::{
    Capabilities, Console, CreateRequest, Created, Error, Extensions, IdempotencyKey, InstanceId, Owned,
    Owner, Preflight, Provider, ProviderEvent, detached,
};
use tokio::sync::{Mutex, broadcast, watch};

pub use config::LibvirtConfig;
use reserve::Reservations;
use rpc::Redialer;
use rpc::calls::Domain;
use rpc::xdr::Uuid;
use store::Images;
pub use upload::upload;

/// Maximum size of user-data, in bytes; the guest refuses more than this anyway.
const MAX_USER_DATA: usize = 64 * 1024;

/// Provider of VMs on libvirt; see the crate's documentation.
pub struct LibvirtProvider {
    shared: Arc<Shared>,
}

/// State that calls share, including calls that their caller has dropped.
struct Shared {
    config: LibvirtConfig,
    owner: Owner,
    link: Redialer,
    images: Images,
    /// Value of [`Capabilities::guest_memory_mib`].
    guest_memory_mib: u64,
    /// Kind of domain that can be started here, once it is known.
    kind: Mutex<Option<kind::KnownKind>>,
    /// Locks of VMs: one call at a time works on a VM.
    turns: KeyedLocks<Uuid>,
    lives: Lock<Lives>,
    ended: broadcast::Sender<ProviderEvent>,
    /// Reason why libvirtd cannot be reached, as long as events are listened to.
    away: watch::Sender<Option<String>>,
    reservations: Reservations,
}

impl LibvirtProvider {
    /// Creates a provider of this owner's VMs. Reads the image's `image.json`, makes no call.
    pub fn new(config: LibvirtConfig, owner: Owner) -> LibvirtProvider {
        let link = Redialer::new(config.address.clone(), config.call_timeout);
        let guest_memory_mib = guest_memory::of(&config);
        let shared = Shared {
            config,
            owner,
            link,
            images: Images::default(),
            guest_memory_mib,
            kind: Mutex::new(None),
            turns: KeyedLocks::default(),
            lives: Lock::default(),
            ended: broadcast::channel(1024).0,
            away: watch::Sender::new(None),
            reservations: Reservations::default(),
        };
        LibvirtProvider { shared: Arc::new(shared) }
    }
}

#[async_trait]
impl Provider for LibvirtProvider {
    fn name(&self) -> &'static str {
        "libvirt"
    }

    fn capabilities(&self) -> Capabilities {
        let Shared { config, guest_memory_mib, .. } = &*self.shared;
        create::capabilities(MAX_USER_DATA, config.second_network.is_some(), *guest_memory_mib)
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        // A dropped preflight still clears its trials away, and the next one knows the result.
        let shared = Arc::clone(&self.shared);
        let found = detached(async move { shared.preflight().await }).await;
        found.map_err(|error| error.during("libvirt"))
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.capabilities().check(request, self.name())?;
        if !self.shared.config.creates {
            let text = format!("create of {}: this provider only lists and deletes", request.name);
            return Err(Error::invalid(text));
        }
        let (shared, request, key) = (Arc::clone(&self.shared), request.clone(), key.clone());
        detached(async move { shared.create(&request, &key).await }).await
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let addresses = self.shared.addresses(id).await;
        addresses.map_err(|error| error.during(format_args!("addresses of VM {id}")))
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let Some(uuid) = marks::uuid_of(id) else { return Ok(()) };
        let shared = Arc::clone(&self.shared);
        let deleted = detached(async move { shared.delete(&uuid).await }).await;
        deleted.map_err(|error| error.during(format_args!("delete of VM {id}")))
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        self.shared.list().await.map_err(|error| Error::from(error).during("list the VMs"))
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions { batch: None, volumes: Some(self), console: Some(self) }
    }

    fn events(&self) -> Option<BoxStream<'static, ProviderEvent>> {
        Some(events::stream(&self.shared))
    }

    fn health(&self) -> Option<BoxStream<'static, Option<String>>> {
        Some(events::health(&self.shared))
    }
}

#[async_trait]
impl Console for LibvirtProvider {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        let tail = self.shared.console(id, limit).await;
        tail.map_err(|error| error.during(format_args!("console of VM {id}")))
    }
}

impl Shared {
    /// Records that the VM is about to be started, for the first time or again.
    fn starting(&self, domain: &Domain) {
        self.lives.lock().leaving.remove(&domain.uuid);
    }

    /// Records that the VM runs, so that its end is reported unless the provider causes it.
    fn running(&self, domain: &Domain) {
        let mut lives = self.lives.lock();
        if !lives.leaving.contains_key(&domain.uuid) {
            lives.running.insert(domain.uuid);
        }
    }

    /// Records that the provider ends the VM, so that its end is not reported.
    fn leaving(&self, domain: &Domain) {
        let mut lives = self.lives.lock();
        lives.running.remove(&domain.uuid);
        // Events may be late: libvirtd may report the start of a VM after its end was requested.
        lives.leaving.retain(|_, since| since.elapsed() < LATEST);
        lives.leaving.insert(domain.uuid, Instant::now());
    }
}

/// Maximum delay of libvirtd's events about a VM.
const LATEST: Duration = Duration::from_secs(600);

/// Recorded states of VMs, which separate an unexpected end from one that the provider caused.
#[derive(Default)]
struct Lives {
    /// VMs that run, as far as libvirtd has reported. A VM that leaves this set has ended.
    running: HashSet<Uuid>,
    /// VMs that the provider has ended, with the time.
    leaving: HashMap<Uuid, Instant>,
}

/// Runs every parser of data from libvirtd or from a guest's host, for fuzzing: any input is possible.
#[doc(hidden)]
pub fn read_anything(input: &[u8]) {
    if let Some((prefix, body)) = input.split_first_chunk::<4>()
        && rpc::message::length(*prefix).is_ok()
        && let Ok(Some((header, payload))) = rpc::message::read(body)
    {
        let written = rpc::message::write(&header, payload);
        assert_eq!(rpc::message::read(&written[4..]), Ok(Some((header, payload))));
    }
    drop(rpc::message::failure(input));
    for procedure in rpc::connection::EVENTS_HEARD {
        drop(rpc::connection::event(procedure, input));
    }
    if let Ok(text) = std::str::from_utf8(input) {
        if let Some(marks) = marks::Marks::read(text) {
            assert_eq!(marks::Marks::read(&marks.xml()).map(|again| again.key), Some(marks.key));
        }
        create::read_anything(text);
        reserve::read_anything(text);
        volumes::read_anything(text);
        drop(rpc::link::Address::parse(text));
    }
}
