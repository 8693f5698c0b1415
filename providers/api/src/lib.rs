//! Defines the interface of a provider of pod VMs: one small trait, its types, its errors.
//!
//! A provider makes a VM somewhere (a cloud, a hypervisor, namespaces) and deletes it again. It has no notion of pods,
//! Kubernetes or Kata. It holds no state that the caller would miss after a crash: the caller records its intent first
//! and repeats each call until it succeeds. **Every call here is therefore idempotent** and may be dropped at any
//! await.
//!
//! * [`Provider`] is the trait. [`Capabilities`] describes the features of a provider; a request that exceeds them is
//!   refused before the call, never shortened.
//! * [`Error`] is typed. Retry policy depends only on [`Error::retry`].
//! * [`decorate()`] adds deadline, log, metrics, retry and pacing to any provider, so that no provider implements its
//!   own.
//! * [`conformance`] is the test suite that any provider runs in one line.
//!
//! This crate touches no network and no disk, and depends on no provider.

mod capabilities;
pub mod conformance;
mod deadline;
pub mod decorate;
mod error;
mod id;
mod owner;
mod request;

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::SystemTime;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use prometheus_client::registry::Registry;

pub use capabilities::Capabilities;
pub use deadline::{deadline, detached, with_deadline};
pub use decorate::{DecoratorConfig, decorate};
pub use error::{Error, Rejected, Retry, unless_gone};
pub use id::{IdempotencyKey, InstanceId, NotAnId};
pub use owner::Owner;
pub use request::{
    Arch, Chosen, Confidential, CreateRequest, Created, CreatedMany, DiskIdentity, DiskRequest, Market,
    Owned, OwnedState, Placement, Size,
};

/// Makes and deletes VMs. The crate's page has the rules that all methods share.
///
/// **Construction makes no call.** A provider looks up images, types and prices in `preflight` or when a create first
/// needs them. A caller that only lists and deletes, like the cluster's controller, therefore needs no further rights:
/// `list_owned`, `addresses`, `delete`, `detach` and `console` work without `preflight`.
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// Name in `provider.kind`, in logs and in metrics: `local`, `aws`, …
    fn name(&self) -> &'static str;

    /// Returns the features of this provider. Constant for the life of the object, and cheap.
    fn capabilities(&self) -> Capabilities;

    /// Checks with the cloud that all other calls are allowed, and finishes work that an earlier process left
    /// incomplete. Makes no VM. Runs before the node reports ready, and may run again at any time.
    ///
    /// # Errors
    /// The obstacle, and how to remove it.
    async fn preflight(&self) -> Result<Preflight, Error>;

    /// Chooses the offerings of the next attempt, where the provider has a choice: the types, zones and markets that
    /// the call will name. Makes nothing and reserves nothing. The caller records the answer, and `create` gets it as
    /// `request.placement`. A create repeated after a crash therefore names the same offerings, even if some became
    /// exhausted, dearer or newly configured since.
    ///
    /// After [`Error::Capacity`] of a create, the caller calls this again for another attempt with another key. The
    /// provider remembers the refused offerings for minutes; a restart may forget them.
    ///
    /// # Errors
    /// [`Error::Capacity`] when every offering that fits is known to be exhausted, [`Error::Invalid`] when no offering
    /// fits; both end the attempts at once. Otherwise by class.
    async fn place(&self, _request: &CreateRequest) -> Result<Option<Placement>, Error> {
        Ok(None)
    }

    /// Makes the VM, or finds the one that an earlier call with this key made. Returns as soon as there is an id and the
    /// cloud has decided to make the VM.
    ///
    /// Most clouds decide in their answer. An asynchronous cloud accepts the call, and may refuse it seconds later. Its
    /// provider waits for that decision, but not for the boot. A late refusal then has the class of an early one, so a
    /// lack of capacity leads to the next offering. The provider deletes the rest of a refused VM; a list may show it
    /// as [`OwnedState::Deleting`]. If the deadline comes before the decision, the call returns the id shortly before
    /// the deadline; a later refusal appears as [`Error::NotFound`] of [`Provider::addresses`].
    ///
    /// A call whose VM is being deleted never returns a VM that the caller could use until it vanishes. It returns
    /// [`Error::Transient`] until the VM is gone, [`Error::Capacity`], or the id of a VM without addresses.
    ///
    /// The caller repeats the call byte for byte after a crash or a lost answer. The provider turns the key into a
    /// mechanism of its cloud (client token, deterministic name, tag). If `placement` is empty, a provider that chooses
    /// placements chooses one itself; such a call is not safe to repeat after a crash of the caller.
    ///
    /// # Errors
    /// [`Error::KeyReused`] when an earlier call used the key with another request. [`Error::Capacity`] when the whole
    /// placement is exhausted and nothing but VMs that are being deleted was made. Otherwise by class.
    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error>;

    /// Returns the VM's addresses, the preferred one for the node first. Those of a second NIC are not included. Waits
    /// until they are known, polling adaptively; the caller sets the deadline by dropping the future.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the VM is gone or has ended.
    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error>;

    /// Removes the VM and everything that its creation made. Returns `Ok` for a VM that is gone or never existed.
    /// Returns when the cloud has accepted the deletion; [`Provider::list_owned`] shows the VM until it is gone.
    ///
    /// A VM without the mark of this owner does not exist for the provider: a delete or a detach returns `Ok` and
    /// changes nothing, an attach returns [`Error::NotFound`]. The provider reads the mark from the cloud in the same
    /// call. A delete of a VM that this process made and the cloud does not show yet is [`Error::Transient`], never `Ok`.
    ///
    /// # Errors
    /// When the cloud has not accepted the deletion; the caller repeats the call.
    async fn delete(&self, id: &InstanceId) -> Result<(), Error>;

    /// Lists every VM of this [`Owner`] (cluster, node and installation) that the provider made, half-made and
    /// half-deleted ones included, until no trace of it is left. VMs of other owners are not listed.
    ///
    /// # Errors
    /// By class. The list is never shortened: an unread page is an error.
    async fn list_owned(&self) -> Result<Vec<Owned>, Error>;

    /// Returns the optional parts of the interface that this provider has.
    fn extensions(&self) -> Extensions<'_> {
        Extensions::default()
    }

    /// Returns a stream of VM events that no call caused, when [`Capabilities::events`].
    fn events(&self) -> Option<BoxStream<'static, ProviderEvent>> {
        None
    }

    /// Returns a stream of the provider's health, where it has a connection that shows it without a call: the reason
    /// why it cannot work now, and `None` when it can again. While there is a reason, the node is not ready.
    fn health(&self) -> Option<BoxStream<'static, Option<String>>> {
        None
    }

    /// Registers the provider's own metrics, under its name. The decorator calls it once, and itself provides the
    /// metrics of calls, failures and times.
    fn register_metrics(&self, _registry: &mut Registry) {}
}

/// Optional parts of a provider's interface.
#[derive(Clone, Copy, Default)]
pub struct Extensions<'p> {
    /// Several identical VMs by one call, when [`Capabilities::max_batch`] is more than 0.
    pub batch: Option<&'p dyn Batch>,
    /// Disks of a running VM, when [`Capabilities::volumes`].
    pub volumes: Option<&'p dyn Volumes>,
    /// Console output, when [`Capabilities::console`].
    pub console: Option<&'p dyn Console>,
}

/// Result of [`Provider::preflight`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Preflight {
    /// Human-readable facts, one per line: account, region, image, limits. No secrets.
    pub facts: Vec<String>,
    /// Problems that will matter later but do not block now.
    pub warnings: Vec<String>,
    /// Addresses by which this provider's VMs reach the node, if the provider has them. The local provider owns the
    /// network of its VMs; a cloud provider does not have this information.
    pub node_addresses: Vec<IpAddr>,
}

/// Creation of several identical VMs by one call.
///
/// The VMs share everything, user-data included. The ticket in it states how many VMs may claim it. The node assigns
/// VMs to pods when they join, by their ids and addresses. The labels therefore hold no marks of a single pod.
#[async_trait]
pub trait Batch: Send + Sync {
    /// Makes `count` identical VMs, or finds those that an earlier call with this key made. Returns as soon as there
    /// are ids. All of them carry the key ([`Owned::key`]), and each is deleted separately.
    ///
    /// A repeated call must repeat `count` too. Fewer than `count` VMs is an answer, not an error
    /// ([`CreatedMany::rest`] gives the reason). It is final: a repeated call makes no more of them.
    ///
    /// # Errors
    /// When no VM was made; the classes are those of [`Provider::create`]. [`Error::Invalid`] for more than
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
/// [`Volumes::grown`] makes a grown disk visible, where the cloud does not do that itself.
#[async_trait]
pub trait Volumes: Send + Sync {
    /// Attaches the disk, or finds it attached. Returns the identity by which the guest recognises it.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the VM or the disk is gone, or the VM has another owner; otherwise by class.
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error>;

    /// Detaches the disk. Returns `Ok` if it is not attached, the VM is gone, or the VM has another owner.
    ///
    /// # Errors
    /// When the cloud has not accepted the detach; the caller repeats the call.
    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error>;

    /// Shows the VM the new size of an attached disk that has grown to at least `bytes` (0: unknown). The size need not
    /// be visible when this returns. Returns `Ok` if the disk is not attached, the VM is gone or the size is already
    /// visible. Never shrinks the visible size, and never resizes a disk that another component resizes. Where a VM
    /// sees the size by itself, as in most clouds, there is nothing to do.
    ///
    /// # Errors
    /// By class. The caller continues, and checks in the VM whether the size is visible.
    async fn grown(&self, _id: &InstanceId, _disk: &DiskRequest, _bytes: u64) -> Result<(), Error> {
        Ok(())
    }
}

/// Console of a VM, for the message that explains a failed boot.
#[async_trait]
pub trait Console: Send + Sync {
    /// Returns at most the last `limit` bytes that the VM wrote, raw. Works for a VM that has ended, until it is
    /// deleted.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the provider has no record of the VM.
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error>;
}

/// VM event that no call caused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderEvent {
    /// Affected VM.
    pub id: InstanceId,
    /// Kind of event.
    pub kind: EventKind,
}

/// Kinds of [`ProviderEvent`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// The cloud will remove the VM at about this time (a spot notice, host maintenance).
    Interruption {
        /// Time that the cloud announced.
        at: SystemTime,
    },
    /// The VM has ended: powered off, terminated by another actor, host lost.
    Ended {
        /// Reason from the cloud.
        reason: String,
    },
}
