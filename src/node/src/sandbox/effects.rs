//! The one seam between a sandbox and everything that is not pure: clock, disk, cloud, pod network, relay, trust.
//!
//! Tests put a world of their own behind it, stop time, and fail or kill at every call. The real one is
//! [`crate::effects`]. No method retries: when and whether to try again is the task's decision.

use std::{net::IpAddr, num::NonZeroU32, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream, StreamExt};
use peerpod_proto::{
    guest::{Images, NetworkPlan, Reply, Request},
    relay::{PutSandboxRequest, TunnelPeer},
};
use peerpod_provider_api::{
    CreateRequest, DiskRequest, IdempotencyKey, InstanceId, Owned, Placement, ProviderEvent,
};
use tokio::sync::watch;
use zeroize::Zeroizing;

use super::follow::{Heard, Homes};
use crate::{
    ledger::{self, Batch, NetnsRef, Network, Record},
    spec::{PodRef, SandboxId},
    trust::Ticket,
    volumes::PodVolumes,
};

pub use peerpod_provider_api::{Error as CloudError, Retry};

/// What went wrong with a pod's network, and whether trying again can help.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct NetworkError {
    /// For people.
    pub text: String,
    /// Trying again cannot help: the namespace is gone, or holds something that cannot be carried.
    pub permanent: bool,
}

/// What another look at a running pod's network came to.
#[derive(Clone, Debug)]
pub struct Followed {
    /// For the record, where it differs from what was recorded.
    pub network: Option<Network>,
    /// For the guest, whether or not it differs.
    pub plan: NetworkPlan,
    /// What is new or gone, in words.
    pub changes: Vec<String>,
    /// What is new and cannot be followed, in words.
    pub left: Vec<String>,
    /// What may keep the pod's traffic from the VM although all stands, in words.
    pub obstacles: Vec<String>,
}

/// What one call for several VMs made.
#[derive(Clone, Debug)]
pub struct Made {
    /// The VMs.
    pub vms: Vec<InstanceId>,
    /// Why there are fewer than asked for.
    pub rest: Option<CloudError>,
}

/// What went wrong between us and the relay, or behind it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct RelayError {
    /// For people.
    pub text: String,
}

/// Why a pod's pull secrets are not known.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct PullSecretError {
    /// For people; nothing of a secret.
    pub text: String,
    /// Whoever was asked said no, and will say so again for a while.
    pub refused: bool,
}

/// A certificate for a guest.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// SHA-256 of the public key it is for.
    pub key_sha256: [u8; 32],
    /// SHA-256 of the leaf's DER.
    pub certificate_sha256: [u8; 32],
    /// DER, leaf first.
    pub chain: Vec<Vec<u8>>,
}

/// Whom guests are to trust at present.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trusted {
    /// Changes with the CAs and with the one that signs; a guest that knows another one must be told.
    pub id: String,
    /// The CAs, DER.
    pub cas: Vec<Vec<u8>>,
}

/// What the relay last said of a sandbox's guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guest {
    /// Whether its link stands.
    pub connected: bool,
    /// Changes when the guest program or the relay is another one; empty before the first link.
    pub session: String,
    /// The guest's own words, the last ones heard (`peerpod.guest.v1.Status`).
    pub status: Vec<u8>,
    /// Where its last connection came from, as the relay saw it.
    pub address: Option<IpAddr>,
}

/// Something that a pod's owner should see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// One word.
    pub reason: &'static str,
    /// What, why, and what to do.
    pub text: String,
}

/// Everything a sandbox does to the world. Every method may be called again after a crash.
#[async_trait]
pub trait Effects: Send + Sync + 'static {
    /// Milliseconds since 1970, for records. (Waits use tokio's clock, which tests stop.)
    fn now_ms(&self) -> u64;

    /// A fresh ticket that is good for `ttl`.
    ///
    /// # Errors
    /// When the kernel gives no randomness.
    fn ticket(&self, ttl: Duration) -> Result<Ticket, String>;

    /// Waits, not for ever, until what VMs find when they boot can be written: where they find this node.
    async fn settled(&self);

    /// What each of `claims` VMs that share the ticket finds when it boots.
    ///
    /// # Errors
    /// When it is not known where guests can reach this node.
    fn user_data(&self, ticket: &Ticket, claims: u32) -> Result<String, String>;

    /// Makes the record durable.
    async fn save(&self, record: &Record) -> Result<(), ledger::Error>;

    /// Removes the record.
    async fn forget(&self, id: &SandboxId) -> Result<(), ledger::Error>;

    /// The record as it is on the disk; `None`: there is none.
    async fn recall(&self, id: &SandboxId) -> Result<Option<Record>, ledger::Error>;

    /// Makes the batch durable.
    async fn save_batch(&self, batch: &Batch) -> Result<(), ledger::Error>;

    /// Removes the batch's file.
    async fn forget_batch(&self, id: &str) -> Result<(), ledger::Error>;

    /// Has the provider choose where the next attempt is to be made; `None`: it has no choice. Makes nothing.
    async fn place(&self, _request: &CreateRequest) -> Result<Option<Placement>, CloudError> {
        Ok(None)
    }

    /// Whether there is a cluster that shows sandboxes.
    fn is_in_cluster(&self) -> bool {
        false
    }

    /// Has the cluster show the sandbox before its VM is asked for: waits for that, but never long. Answers the pod's
    /// UID, where it is known by then.
    async fn announce(&self, _record: &Record) -> Option<String> {
        None
    }

    /// Has the cluster show the sandbox as it is, or nothing once it is gone. Does not wait.
    fn show(&self, _record: &Record) {}

    /// Says something where the pod's owner looks. Does not wait.
    fn tell(&self, _pod: &PodRef, _said: Said) {}

    /// Asks the cloud for the VM; the same key gets the same VM.
    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<InstanceId, CloudError>;

    /// Asks the cloud for several VMs by one call; the same key and count get the same VMs.
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<Made, CloudError>;

    /// The VM that a create with this key made, if the cloud shows one.
    async fn find(&self, key: &IdempotencyKey) -> Result<Option<InstanceId>, CloudError>;

    /// Every VM that this node made and that has not vanished.
    async fn owned(&self) -> Result<Vec<Owned>, CloudError>;

    /// What the provider says of VMs unasked; nothing, where it does not.
    fn events(&self) -> BoxStream<'static, ProviderEvent> {
        stream::pending().boxed()
    }

    /// The pod's volumes, as its CSI wrapper recorded them; `None`: it has none. Of no other pod.
    async fn volumes(&self, _pod: &PodRef) -> Result<Option<PodVolumes>, String> {
        Ok(None)
    }

    /// Who the pod's shares are mounted as, in the volumes' order and as the guest reads it: none for those that ask nobody,
    /// or when they are being unpublished. An error has nothing of it.
    async fn credentials(&self, volumes: &PodVolumes) -> Result<Vec<Option<Zeroizing<Vec<u8>>>>, String> {
        Ok(vec![None; volumes.volumes.len()])
    }

    /// Says, durably, that a VM with these volumes may be made from now on. An error: they are the pod's no more, or it
    /// cannot be said.
    async fn expect_vm(&self, _id: &SandboxId, _volumes: &PodVolumes) -> Result<(), CloudError> {
        Ok(())
    }

    /// Has every volume that is not yet attached to the VM attached, or finds it so; with how the guest recognises each.
    async fn attach(
        &self,
        _id: &SandboxId,
        _vm: &InstanceId,
        volumes: PodVolumes,
    ) -> Result<PodVolumes, CloudError> {
        Ok(volumes)
    }

    /// Has the VM shown that a disk of it was made larger, to at least so many bytes, where it does not see that by itself.
    async fn disk_grown(&self, _vm: &InstanceId, _disk: &DiskRequest, _bytes: u64) -> Result<(), CloudError> {
        Ok(())
    }

    /// Says that what was attached to the VM is free, once the VM is gone for sure.
    async fn release(&self, _id: &SandboxId, _vm: Option<&InstanceId>, _uid: &str) -> Result<(), CloudError> {
        Ok(())
    }

    /// The VM's addresses, best first; waits until they are known.
    async fn addresses(&self, vm: &InstanceId) -> Result<Vec<IpAddr>, CloudError>;

    /// Deletes the VM; gone is fine.
    async fn delete(&self, vm: &InstanceId) -> Result<(), CloudError>;

    /// The end of what the VM wrote to its console, as it is, where the cloud tells.
    async fn console(&self, vm: &InstanceId) -> Option<String>;

    /// Opens the path and identifies the network namespace there.
    async fn netns(&self, path: &Path) -> Result<NetnsRef, NetworkError>;

    /// Whether the very namespace is still at its path.
    fn netns_lives(&self, netns: &NetnsRef) -> bool;

    /// Looks at the pod's network and reserves its tunnel; with a recorded reservation makes it so again.
    async fn reserve(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        v6: bool,
        recorded: Option<&Network>,
    ) -> Result<Network, NetworkError>;

    /// Whether the reserved tunnel does not suit the VM, now that its addresses are known and where its link came from.
    fn is_unsuited(
        &self,
        _network: &Network,
        _vm: IpAddr,
        _addresses: &[IpAddr],
        _from: Option<IpAddr>,
    ) -> bool {
        false
    }

    /// Reserves a tunnel that is encrypted and passes NATs, where the other kind is undone.
    async fn reserve_encrypted(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        v6: bool,
    ) -> Result<Network, NetworkError> {
        self.reserve(netns, id, v6, None).await
    }

    /// What the relay must know of the guest with this tunnel key; `None` where the relay does not carry the tunnel.
    fn tunnel_peer(&self, _network: &Network, _key: &[u8]) -> Option<TunnelPeer> {
        None
    }

    /// Gives the tunnel its remote and redirects the pod's traffic into it.
    async fn connect(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: &Network,
        vm: IpAddr,
    ) -> Result<NetworkPlan, NetworkError>;

    /// Looks again and makes what changed so: the network as it is now (where it is another one), the redirects, the
    /// remote.
    async fn follow(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: &Network,
        vm: IpAddr,
    ) -> Result<Followed, NetworkError>;

    /// Whether packets to both leave the node by the same interface.
    async fn is_one_way(&self, one: IpAddr, other: IpAddr) -> bool;

    /// Hears of changes in the pod's network namespace and of the way to the VM, until the receiver is dropped.
    fn ear(&self, netns: &NetnsRef, network: &Network, vm: IpAddr) -> watch::Receiver<Heard>;

    /// Where guests find this node now, `address:port`.
    fn homes(&self) -> watch::Receiver<Homes>;

    /// Has connections to the pod's localhost carried into its VM; again changes nothing. Taken back by `disconnect`.
    async fn carry_localhost(&self, _netns: &NetnsRef, _id: &SandboxId) -> Result<(), NetworkError> {
        Ok(())
    }

    /// Takes back whatever of the two is there; gone is fine.
    async fn disconnect(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: Option<&Network>,
        vm: Option<IpAddr>,
    ) -> Result<(), NetworkError>;

    /// Counts relay processes; a new value means that it must be told everything again. 0: none was met yet.
    fn relay_epoch(&self) -> watch::Receiver<u64>;

    /// Makes the relay serve the sandbox; the later call wins.
    async fn put(&self, request: PutSandboxRequest) -> Result<(), RelayError>;

    /// Makes the relay forget the sandbox; unknown is fine.
    async fn remove(&self, id: &SandboxId) -> Result<(), RelayError>;

    /// What the relay says of the sandbox's guest.
    fn guest(&self, id: &SandboxId) -> watch::Receiver<Guest>;

    /// How guests get at images: what is known of registries now, with the pod's own pull secrets (a `.dockerconfigjson`,
    /// empty: none).
    fn images(&self, _pull_secret: &str) -> Option<Images> {
        None
    }

    /// How often pods' pull secrets are asked for; `None`: never, for nobody is there to be asked.
    fn pull_secrets_every(&self) -> Option<Duration> {
        None
    }

    /// The pull secrets of a pod as one `.dockerconfigjson`, empty: it has none. Answers within some seconds, and at once
    /// for a pod that names none.
    async fn pull_secret(&self, _pod: &PodRef) -> Result<Zeroizing<String>, PullSecretError> {
        Ok(Zeroizing::default())
    }

    /// One request to the guest and its answer.
    async fn call(&self, id: &SandboxId, request: Request, timeout: Duration) -> Result<Reply, RelayError>;

    /// Whom guests are to trust; changes while the CA is rolled over.
    fn trusted(&self) -> watch::Receiver<Arc<Trusted>>;

    /// SHA-256 of the public key in a CSR.
    ///
    /// # Errors
    /// When it is no CSR, or not signed by its key.
    fn csr_key(&self, csr: &[u8]) -> Result<[u8; 32], String>;

    /// A certificate for the sandbox's guest.
    ///
    /// # Errors
    /// When it is no CSR, or not signed by its key.
    fn sign(&self, id: &SandboxId, csr: &[u8]) -> Result<Certificate, String>;
}
