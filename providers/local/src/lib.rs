//! Runs each VM as a set of namespaces on this node, with `peerpod-guest` as its pid 1.
//!
//! This provider is for development, the demo, tests and benchmarks; everything above the provider interface is the
//! same as with a cloud. Like a real VM, such a VM has its own network, mount, pid, uts and ipc namespaces and its own
//! root directory. It has an underlay device in a simulated cloud network (a bridge in the node's network namespace),
//! and user-data on a read-only file system. Its size is not enforced: a VM sees the whole machine.
//!
//! * The processes of a VM are independent of the node: they survive it and are found again by pid and start time.
//! * The directory of a VM (see `store.rs`) exists before the first effect and is removed after the last.
//! * Disks are files of the node, attached as loop devices (see `disks.rs`); this provider never creates or removes
//!   them.
//! * Needs root; touches `<state-dir>/local`, two bridges, one or two veths per VM, loop devices, cgroups
//!   `peerpod-local-…`, and processes it started.

mod cgroup;
pub mod config;
mod create;
mod delete;
mod disks;
mod network;
mod process;
mod store;
pub mod vm;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use nix::fcntl::Flock;
use peerpod_common::backoff::Backoff;
use peerpod_common::keyed_locks::KeyedLocks;
use peerpod_provider_api::{
    Batch, Capabilities, Console, CreateRequest, Created, CreatedMany, Error, Extensions, IdempotencyKey,
    InstanceId, Owned, OwnedState, Preflight, Provider, detached,
};
use tokio::sync::Mutex;

pub use config::LocalConfig;
use store::{VmRecord, VmStatus, VmStore, is_ours};

/// Most bytes of user-data; the guest refuses more than this anyway.
const MAX_USER_DATA: usize = 64 * 1024;
/// Longest time that `open` waits for another provider object to release the state. That object may belong to an older
/// node that is just leaving, on a busy machine.
const HANDOVER: Duration = Duration::from_secs(20);

/// Provider of VMs in namespaces. See the crate's page.
pub struct LocalProvider {
    shared: Arc<Shared>,
}

/// State shared by all calls, including those that their callers dropped.
struct Shared {
    config: LocalConfig,
    store: VmStore,
    /// Locks that allow one call at a time for each VM.
    ids: KeyedLocks<InstanceId>,
    /// Indices in use; locked while the bridge is made or removed.
    network: Mutex<HashMap<u32, InstanceId>>,
    /// Lock that allows one change of disks at a time.
    disks: Mutex<()>,
    _lock: Flock<File>,
}

impl LocalProvider {
    /// Opens the provider's state and finds the VMs of earlier processes. Makes no VM and no network device.
    ///
    /// # Errors
    /// When the state directory cannot be used, or another provider object uses it and does not release it.
    pub fn open(config: LocalConfig) -> Result<LocalProvider, Error> {
        LocalProvider::open_within(config, HANDOVER)
    }

    /// Same as [`LocalProvider::open`], with another time to wait for the other provider object.
    ///
    /// # Errors
    /// Same as [`LocalProvider::open`].
    pub fn open_within(config: LocalConfig, handover: Duration) -> Result<LocalProvider, Error> {
        let deadline = Instant::now() + handover;
        let dir = config.state_dir.display();
        let (store, lock) = loop {
            let why = match VmStore::open(&config.state_dir) {
                Ok((store, Some(lock))) => break (store, lock),
                Ok(_) if Instant::now() <= deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                }
                Ok(_) => "another process uses it; end that one or set another paths.state-dir".to_owned(),
                Err(error) => error.to_string(),
            };
            return Err(Error::invalid(format!("open the local provider's state {dir}: {why}")));
        };
        let mut taken = HashMap::new();
        let failed = |error| disk(error).during("find the local VMs");
        for id in store.list().map_err(failed)? {
            let status = store.status(&id).map_err(failed)?;
            if let VmStatus::Unreadable(why) = &status {
                tracing::warn!(instance = %id, "local VM's record cannot be read: {why}");
            }
            taken.extend(record_of(&status).map(|record| (record.index, id)));
        }
        Ok(LocalProvider {
            shared: Arc::new(Shared {
                config,
                store,
                ids: KeyedLocks::default(),
                network: Mutex::new(taken),
                disks: Mutex::new(()),
                _lock: lock,
            }),
        })
    }
}

#[async_trait]
impl Provider for LocalProvider {
    fn name(&self) -> &'static str {
        "local"
    }

    fn capabilities(&self) -> Capabilities {
        let max_batch = self.shared.config.max_batch;
        Capabilities {
            console: true,
            volumes: true,
            second_nic: true,
            max_batch,
            ..Capabilities::minimal(MAX_USER_DATA)
        }
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        let shared = Arc::clone(&self.shared);
        shared.check()?;
        // Deletions that a dead node left unfinished.
        for id in shared.store.list().map_err(|error| disk(error).during("list the local VMs"))? {
            if let Ok(VmStatus::Deleting(_)) = shared.store.status(&id) {
                drop(Arc::clone(&shared).finish_later(id));
            }
        }
        shared.remove_bridges_if_unused().await?;
        let config = &shared.config;
        let ours = network::node_addresses(config, &config.network);
        let words: Vec<String> = ours.iter().map(|(address, prefix)| format!("{address}/{prefix}")).collect();
        let node_addresses = ours.into_iter().map(|(address, _)| address).collect();
        let (bridge, words) = (&config.network.bridge, words.join(" and "));
        let network =
            format!("bridge {bridge}, {words}, MTU {}, room for {} VMs", config.mtu, config.room() - 2);
        let guest = format!("guest program {}", config.guest_binary.display());
        let warnings = vec!["VM sizes are not enforced: each VM can use the whole machine".to_owned()];
        Ok(Preflight { facts: vec![network, guest], warnings, node_addresses })
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.capabilities().check(request, self.name())?;
        let created = detached(Arc::clone(&self.shared).create(request.clone(), key.clone())).await;
        created.map_err(|error| error.during(format_args!("create of {}", request.name)))
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let addresses = self.shared.addresses(id).await;
        addresses.map_err(|error| error.during(format_args!("addresses of local VM {id}")))
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        if !is_ours(id) {
            return Ok(());
        }
        let deleted = Arc::clone(&self.shared).delete(id.clone()).await;
        deleted.map_err(|error| error.during(format_args!("delete of local VM {id}")))
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let shared = Arc::clone(&self.shared);
        let listed = blocking(move || shared.list()).await;
        listed.map_err(|error| error.during("list the local VMs"))
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions {
            batch: (self.shared.config.max_batch > 0).then_some(self as &dyn Batch),
            volumes: Some(self),
            console: Some(self),
        }
    }
}

#[async_trait]
impl Batch for LocalProvider {
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        self.capabilities().check_batch(request, count, self.name())?;
        let work = Arc::clone(&self.shared).create_many(request.clone(), count.get(), key.clone());
        let created = detached(work).await;
        created.map_err(|error| error.during(format_args!("create of {count} VMs {}", request.name)))
    }
}

#[async_trait]
impl Console for LocalProvider {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        if !is_ours(id) || self.shared.status(id)? == VmStatus::Absent {
            return Err(Error::not_found(format!("console of local VM {id}: there is no such VM")));
        }
        vm::console_tail(&self.shared.store.dir(id), limit)
            .map_err(|error| disk(error).during(format_args!("console of local VM {id}")))
    }
}

impl Shared {
    fn status(&self, id: &InstanceId) -> Result<VmStatus, Error> {
        if !is_ours(id) {
            return Ok(VmStatus::Absent);
        }
        self.store.status(id).map_err(|error| disk(error).during(format_args!("look at local VM {id}")))
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(250));
        loop {
            match self.status(id)? {
                VmStatus::Running(record) => return Ok(addresses(&record)),
                // The VM is being made, or its create will be repeated.
                VmStatus::Pending(_) => {}
                VmStatus::Ended(_, how) => return Err(Error::not_found(format!("it has ended: {how}"))),
                VmStatus::Absent => return Err(Error::not_found("there is no such VM")),
                VmStatus::Deleting(_) => return Err(Error::not_found("it is being deleted")),
                VmStatus::Unreadable(why) => return Err(Error::invalid(format!("{why}; delete the VM"))),
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    fn list(&self) -> Result<Vec<Owned>, Error> {
        let mut owned = Vec::new();
        for id in self.store.list().map_err(disk)? {
            let status = self.status(&id)?;
            let state = match &status {
                VmStatus::Absent => continue, // gone in the meantime
                VmStatus::Pending(_) => OwnedState::Pending,
                VmStatus::Running(_) => OwnedState::Running,
                // A VM with an unreadable record counts as ended, because it is of no use.
                VmStatus::Ended(..) | VmStatus::Unreadable(_) => OwnedState::Ended,
                VmStatus::Deleting(_) => OwnedState::Deleting,
            };
            let record = record_of(&status);
            owned.push(Owned {
                id,
                key: record.map(|record| record.key.clone()),
                name: record.map(|record| record.name.clone()),
                state,
                addresses: record.map(addresses).unwrap_or_default(),
                created: record
                    .map(|record| SystemTime::UNIX_EPOCH + Duration::from_millis(record.created_ms)),
                // All VMs here belong to the one node that owns this disk.
                node: None,
            });
        }
        Ok(owned)
    }

    /// Checks the requirements of making any VM.
    fn check(&self) -> Result<(), Error> {
        if !nix::unistd::geteuid().is_root() {
            let text = "local provider: namespaces need root; run the node as root or use another provider";
            return Err(Error::Auth { text: text.to_owned() });
        }
        let config = &self.config;
        if !config.ipv4 && !network::has_v6() {
            let text =
                "local provider: VMs would have no address: there is no IPv6 here; enable it in the kernel";
            return Err(Error::invalid(text.to_owned()));
        }
        executable("the helper", &config.helper_binary)?;
        executable("the guest program", &config.guest_binary)?;
        executable("the agent", &config.agent_binary)
    }

    async fn remove_bridges_if_unused(&self) -> Result<(), Error> {
        let taken = self.network.lock().await;
        if taken.is_empty() {
            let names = [&self.config.network, &self.config.second].map(|network| network.bridge.clone());
            blocking(move || {
                let removed = names.iter().try_for_each(|name| network::remove_bridge(name));
                removed.map_err(|error| Error::transient(error.to_string()))
            })
            .await?;
        }
        drop(taken);
        Ok(())
    }
}

/// Runs work that waits for the disk or the kernel on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Error::transient(format!("local provider: {error}"))))
}

fn executable(name: &str, path: &Path) -> Result<(), Error> {
    let bad = |why: &str| {
        let path = path.display();
        Err(Error::invalid(format!("{path}: {why}; {name} belongs beside this program")))
    };
    match std::fs::metadata(path) {
        Err(error) => bad(&error.to_string()),
        Ok(metadata) if !metadata.is_file() => bad("not a file"),
        Ok(metadata) if metadata.permissions().mode() & 0o111 == 0 => bad("not executable"),
        Ok(_) => Ok(()),
    }
}

fn record_of(status: &VmStatus) -> Option<&VmRecord> {
    match status {
        VmStatus::Pending(record) => record.as_ref(),
        VmStatus::Running(record) | VmStatus::Ended(record, _) | VmStatus::Deleting(record) => Some(record),
        VmStatus::Absent | VmStatus::Unreadable(_) => None,
    }
}

fn addresses(record: &VmRecord) -> Vec<IpAddr> {
    record.v4.map(IpAddr::from).into_iter().chain(record.v6.map(IpAddr::from)).collect()
}

/// Converts a failure of the state directory. A failure that only a person can fix is invalid, so that it is not
/// retried for minutes.
fn disk(error: io::Error) -> Error {
    let text = error.to_string();
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::invalid(format!("{text}; make room below paths.state-dir"))
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            Error::invalid(format!("{text}; make paths.state-dir writable"))
        }
        _ => Error::transient(text),
    }
}
