//! What a provider of pod VMs is: one small trait, its types, its errors.
//!
//! A provider makes a VM somewhere (a cloud, a hypervisor, namespaces) and takes it away again. It knows
//! nothing of pods, Kubernetes or Kata, and holds no state of its own that the caller would miss after a
//! crash: the caller writes its intent down first and repeats calls until they hold, so **every call here is
//! idempotent** and may be dropped at any await.
//!
//! * [`Provider`] is the trait; [`Capabilities`] says what a provider can do, and a request that asks for more
//!   is refused before the call, never shortened.
//! * [`Error`] is typed, and [`Error::retry`] is the only thing retry policy looks at.
//! * [`decorate()`] puts deadline, log, metric, retry and pace around any provider, so that none writes its own.
//! * [`select`] picks an instance type; [`conformance`] is the test suite that any provider runs in one line.
//!
//! This crate touches no network and no disk, and depends on no provider.

mod capabilities;
pub mod conformance;
mod deadline;
pub mod decorate;
mod error;
mod id;
mod request;
pub mod select;

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::SystemTime;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use prometheus_client::registry::Registry;

pub use capabilities::{Capabilities, WISHES, Wish};
pub use deadline::{deadline, with_deadline};
pub use decorate::{DecoratorConfig, decorate};
pub use error::{Error, Rejected, Retry};
pub use id::{IdempotencyKey, InstanceId, NotAnId};
pub use request::{
    Arch, Confidential, CreateRequest, Created, CreatedMany, DiskIdentity, DiskRequest, Market, Owned,
    OwnedState, Placement, Size,
};

/// Makes VMs and takes them away. See the crate's page for the rules all methods share.
///
/// **Construction calls nobody.** What a provider must look up (images, types, prices) it looks up in `preflight` or
/// when a create first needs it, so that whoever only lists and deletes, like the cluster's controller, needs rights
/// for nothing else: `list_owned`, `addresses`, `delete`, `detach` and `console` work without `preflight`.
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// The name in `provider.kind`, in logs and in metrics: `local`, `aws`, …
    fn name(&self) -> &'static str;

    /// What this provider can do. Constant for the life of the object, and cheap.
    fn capabilities(&self) -> Capabilities;

    /// Asks the cloud whether we may do all the rest, and finishes what an earlier process left half done.
    /// Makes no VM. Runs before the node says it is ready, and may run again at any time.
    ///
    /// # Errors
    /// What stands in the way, with what to do about it.
    async fn preflight(&self) -> Result<Preflight, Error>;

    /// Chooses where the next attempt is to be made, where there is a choice: which types, zones and markets the
    /// call will name. Makes nothing and reserves nothing. The caller records the answer, and `create` gets it as
    /// `request.placement`: so a create that is repeated after a crash names the same offerings, whatever has become
    /// exhausted, dearer or newly configured since.
    ///
    /// After [`Error::Capacity`] of a create the caller asks again, for another attempt with another key; what was
    /// refused is the provider's to remember (for minutes; a restart may forget it).
    ///
    /// # Errors
    /// [`Error::Capacity`] when everything that fits is known to be exhausted, [`Error::Invalid`] when nothing fits;
    /// both end the attempts at once. Otherwise by class.
    async fn place(&self, _request: &CreateRequest) -> Result<Option<Placement>, Error> {
        Ok(None)
    }

    /// Makes the VM, or finds the one an earlier call with this key made. Returns as soon as there is an id.
    ///
    /// The caller repeats it byte for byte after a crash or a lost answer; the provider turns the key into
    /// what its cloud offers (client token, deterministic name, tag). A create whose `placement` is empty, of a
    /// provider that chooses places, chooses for itself; such a call is not safe to repeat after a crash of the caller.
    ///
    /// # Errors
    /// [`Error::KeyReused`] when the key came with another request before; [`Error::Capacity`] when nothing was made
    /// because all of the placement is exhausted; otherwise by class.
    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error>;

    /// The VM's addresses, the one the node should use first; those of a second card are not among them. Waits until
    /// they are known, polling adaptively; the caller sets the deadline by dropping the future.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the VM is gone or has ended.
    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error>;

    /// Removes the VM and everything its creation made. A VM that is gone, or never was, is `Ok`.
    /// Returns when the cloud has accepted it; [`Provider::list_owned`] shows the VM until it is gone.
    ///
    /// # Errors
    /// When the cloud has not accepted it; the caller repeats the call.
    async fn delete(&self, id: &InstanceId) -> Result<(), Error>;

    /// Every VM this cluster and node made through this provider that has not vanished without a trace,
    /// half-made and half-deleted ones included. Nobody else's.
    ///
    /// # Errors
    /// By class. Never a shortened list: an unread page is an error.
    async fn list_owned(&self) -> Result<Vec<Owned>, Error>;

    /// Several identical VMs by one call, when [`Capabilities::max_batch`] is more than 0.
    fn batch(&self) -> Option<&dyn Batch> {
        None
    }

    /// Disks attached to a VM that runs, when [`Capabilities::volumes`].
    fn volumes(&self) -> Option<&dyn Volumes> {
        None
    }

    /// What the VM wrote on its console, when [`Capabilities::console`].
    fn console(&self) -> Option<&dyn Console> {
        None
    }

    /// What happens to VMs without our doing, when [`Capabilities::events`].
    fn events(&self) -> Option<BoxStream<'static, ProviderEvent>> {
        None
    }

    /// Registers the provider's own metrics, below its name; the decorator calls it once. (Calls, failures and times
    /// are the decorator's.)
    fn register_metrics(&self, _registry: &mut Registry) {}
}

/// What [`Provider::preflight`] found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Preflight {
    /// For people, one fact a line: account, region, image, limits. No secrets.
    pub facts: Vec<String>,
    /// Things that will hurt later but do not stop us now.
    pub warnings: Vec<String>,
    /// Addresses by which this provider's VMs reach the node, where the provider knows (the local one owns the
    /// network its VMs are on; a cloud does not know).
    pub node_addresses: Vec<IpAddr>,
}

/// Several identical VMs by one call.
///
/// They share everything, user-data included: its ticket says how many may claim it, and who is whose pod's is decided
/// when they join, by their ids and addresses. Marks of a single pod are therefore not among the labels.
#[async_trait]
pub trait Batch: Send + Sync {
    /// Makes `count` VMs like this one, or finds those that an earlier call with this key made. Returns as soon as
    /// there are ids. All of them carry the key ([`Owned::key`]), and each is deleted by itself.
    ///
    /// `count` is part of what a repeated call must repeat. Fewer than `count` is an answer, not an error
    /// ([`CreatedMany::rest`] says why), and it stands: a repeated call makes no more of them.
    ///
    /// # Errors
    /// When none was made; the classes are those of [`Provider::create`]. [`Error::Invalid`] for more than
    /// [`Capabilities::max_batch`].
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error>;
}

/// Attach and detach on a running VM.
///
/// What has grown is shown by [`Volumes::grown`], where the cloud does not do that by itself.
#[async_trait]
pub trait Volumes: Send + Sync {
    /// Attaches the disk, or finds it attached. Returns how the guest will recognise it.
    ///
    /// # Errors
    /// [`Error::NotFound`] when VM or disk is gone; otherwise by class.
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error>;

    /// Detaches the disk. Not attached, or VM gone, is `Ok`.
    ///
    /// # Errors
    /// When the cloud has not accepted it; the caller repeats the call.
    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error>;

    /// An attached disk was made larger, to at least `bytes` (0: not said): shows the VM its new size, which need not be
    /// there when this returns. Not attached, VM gone, or shown already is `Ok`; never makes what the VM sees smaller, and
    /// makes no disk larger that others do. Nothing is to be done where a VM sees it by itself, as in most clouds.
    ///
    /// # Errors
    /// By class; the caller goes on, and asks the VM whether it sees it.
    async fn grown(&self, _id: &InstanceId, _disk: &DiskRequest, _bytes: u64) -> Result<(), Error> {
        Ok(())
    }
}

/// The VM's console, for the message that says why a boot failed.
#[async_trait]
pub trait Console: Send + Sync {
    /// The last at most `limit` bytes the VM wrote, raw. Works for a VM that has ended, until it is deleted.
    ///
    /// # Errors
    /// [`Error::NotFound`] when nothing is known of the VM.
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error>;
}

/// Something that happened to a VM without our doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderEvent {
    /// Which VM.
    pub id: InstanceId,
    /// What happened.
    pub kind: EventKind,
}

/// The kinds of [`ProviderEvent`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// The cloud will take the VM away at about this time (a spot notice, host maintenance).
    Interruption {
        /// When the cloud says it will happen.
        at: SystemTime,
    },
    /// The VM has ended: powered off, terminated by another hand, host lost.
    Ended {
        /// What the cloud says of it.
        reason: String,
    },
}
