//! Makes a VM: record → bridge → hypervisor process. Every step can be repeated, and is repeated after a crash.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use peerpod_provider_api::{
    Chosen, CreateRequest, Created, CreatedMany, DiskRequest, Error, IdempotencyKey, InstanceId,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use crate::store::{VERSION, VmRecord, VmStatus};
use crate::vm::{Description, Inside, LaunchAnswer};
use crate::{Shared, addresses, blocking, disk, network};

/// Longest time to make a VM. It usually takes some 20 ms, so this is for an overloaded machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most bytes of the hypervisor process's answer, which is one short line.
const MAX_ANSWER: u64 = 128 * 1024;

impl Shared {
    pub(crate) async fn create(
        self: Arc<Shared>,
        request: CreateRequest,
        key: IdempotencyKey,
    ) -> Result<Created, Error> {
        let (id, digest) = (instance_id(&key)?, request.digest());
        self.create_as(id, digest, request, key).await
    }

    /// Makes several VMs, each with an id derived from the key and its number. It makes all of them or none: if one
    /// fails for good, the others are deleted.
    pub(crate) async fn create_many(
        self: Arc<Shared>,
        request: CreateRequest,
        count: u32,
        key: IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        let digest = format!("{count} of {}", request.digest());
        let mut work = JoinSet::new();
        for number in 0..count {
            let id = instance_id(&IdempotencyKey::derive("local batch", key.as_str(), number))?;
            work.spawn(Arc::clone(&self).create_as(id, digest.clone(), request.clone(), key.clone()));
        }
        let (mut made, mut failed) = (Vec::new(), None);
        while let Some(done) = work.join_next().await {
            match done.unwrap_or_else(|error| Err(Error::transient(error.to_string()))) {
                Ok(created) => made.push(created),
                // A transient error takes precedence, because a repeated call can still make all VMs.
                Err(error) => match failed {
                    Some(Error::Transient { .. }) => {}
                    _ => failed = Some(error),
                },
            }
        }
        match failed {
            None => {
                made.sort_by(|one, other| one.id.cmp(&other.id));
                Ok(CreatedMany { made, rest: None })
            }
            Some(error @ Error::Transient { .. }) => Err(error),
            Some(error) => {
                for created in made {
                    Arc::clone(&self).delete(created.id).await?;
                }
                Err(error)
            }
        }
    }

    async fn create_as(
        self: Arc<Shared>,
        id: InstanceId,
        digest: String,
        request: CreateRequest,
        key: IdempotencyKey,
    ) -> Result<Created, Error> {
        self.check()?;
        let _turn = self.ids.lock(&id).await;
        let record = match self.status(&id)? {
            VmStatus::Absent | VmStatus::Pending(None) => {
                self.look_for_disks(&request)?;
                self.begin(&id, &request, digest, &key).await?
            }
            VmStatus::Unreadable(why) => {
                return Err(Error::invalid(format!("{why}; delete VM {id}")));
            }
            VmStatus::Deleting(_) => {
                return Err(Error::transient(format!("VM {id} is being deleted")));
            }
            VmStatus::Pending(Some(record)) => same(record, &digest)?,
            // `addresses` reports the end of the VM; the answer to this key stays the same.
            VmStatus::Running(record) => {
                return self.attached(&id, &same(record, &digest)?, request.disks).await;
            }
            VmStatus::Ended(record, _) => return Ok(created(&id, &same(record, &digest)?)),
        };
        self.ensure_networks(request.second_nic).await?;
        let disks = request.disks.clone();
        self.launch(&id, &record, request).await?;
        self.attached(&id, &record, disks).await
    }

    /// Returns the answer of the create, with the VM's disks. The VM exists, so a disk that cannot be attached now is
    /// attached by a later call.
    async fn attached(
        self: &Arc<Shared>,
        id: &InstanceId,
        record: &VmRecord,
        disks: Vec<DiskRequest>,
    ) -> Result<Created, Error> {
        let mut created = created(id, record);
        for disk in disks {
            match Arc::clone(self).attach(id.clone(), disk.clone()).await {
                Ok(identity) => created.disks.push((disk.volume, identity)),
                Err(error) => tracing::warn!(%error, "not attached at creation"),
            }
        }
        Ok(created)
    }

    /// Reserves an index and writes the VM's record.
    async fn begin(
        &self,
        id: &InstanceId,
        request: &CreateRequest,
        digest: String,
        key: &IdempotencyKey,
    ) -> Result<VmRecord, Error> {
        let index = {
            let mut taken = self.network.lock().await;
            let index = free_index(self.config.room(), &key.sha256(), |index| taken.contains_key(&index));
            let Some(index) = index else {
                let offering = format!("addresses of {}", self.config.network.bridge);
                let text = "all addresses of the local network are taken; delete VMs or set larger subnets";
                return Err(Error::capacity(offering, text));
            };
            taken.insert(index, id.clone());
            index
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let record = VmRecord {
            version: VERSION,
            key: key.clone(),
            request: digest,
            name: request.name.clone(),
            index,
            v4: self.config.ipv4.then(|| self.config.network.v4(index)),
            v6: network::has_v6().then(|| self.config.network.v6(index)),
            created_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            deleting: false,
        };
        let (store, written, vm) = (self.store.clone(), record.clone(), id.clone());
        let begin =
            move || store.begin(&vm, &written).map_err(|error| disk(error).during("write the VM's record"));
        if let Err(error) = blocking(begin).await {
            // Nothing was made; if the directory exists, `list_owned` shows the VM.
            self.network.lock().await.remove(&index);
            return Err(error);
        }
        Ok(record)
    }

    async fn ensure_networks(&self, second: bool) -> Result<(), Error> {
        // Under the lock, because the deletion of the last VM would remove the bridges.
        let taken = self.network.lock().await;
        let config = self.config.clone();
        let made = blocking(move || {
            let wanted = [Some(&config.network), Some(&config.second).filter(|_| second)];
            let made = wanted.into_iter().flatten().try_for_each(|one| network::ensure_bridge(&config, one));
            made.map_err(|error| match error {
                network::Error::Foreign(_) => Error::invalid(error.to_string()),
                network::Error::Netlink(_) => Error::transient(error.to_string()),
            })
        })
        .await;
        drop(taken);
        made
    }

    /// Starts the hypervisor process and waits for its answer.
    async fn launch(&self, id: &InstanceId, record: &VmRecord, request: CreateRequest) -> Result<(), Error> {
        let deadline = Instant::now() + PATIENCE;
        let description = serde_json::to_vec(&self.describe(id, record, request))
            .map_err(|error| Error::invalid(format!("describe the VM: {error}")))?;
        let late = || Error::transient(format!("the VM is not made after {} s", PATIENCE.as_secs()));
        loop {
            let answer = tokio::time::timeout_at(deadline.into(), self.ask(id, &description)).await;
            match answer.unwrap_or_else(|_| Err(late()))? {
                LaunchAnswer::Running => return Ok(()),
                LaunchAnswer::Failed { text, transient: true } => return Err(Error::transient(text)),
                LaunchAnswer::Failed { text, transient: false } => return Err(Error::invalid(text)),
                // The hypervisor process of an earlier call or of an earlier node is making the VM.
                LaunchAnswer::Busy => {
                    if !matches!(self.status(id)?, VmStatus::Pending(_)) {
                        return Ok(());
                    }
                    if Instant::now() > deadline {
                        return Err(late());
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    async fn ask(&self, id: &InstanceId, description: &[u8]) -> Result<LaunchAnswer, Error> {
        let helper = self.config.helper_binary.display();
        let failed = |error: std::io::Error| Error::transient(format!("run {helper}: {error}"));
        let log = self.store.dir(id).join("hypervisor.log");
        let log = File::options().create(true).append(true).mode(0o600).open(log).map_err(failed)?;
        let mut child = Command::new(&self.config.helper_binary)
            .current_dir("/")
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(failed)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        reap(child);
        let (mut input, output) = pipes.ok_or_else(|| failed(std::io::Error::other("no pipes")))?;
        // If the process ended already, its answer has the reason.
        let told = input.write_all(description).await;
        drop(input);
        let mut line = String::new();
        let mut output = BufReader::new(output.take(MAX_ANSWER));
        output.read_line(&mut line).await.map_err(failed)?;
        if line.is_empty() {
            told.map_err(failed)?;
            let why = "it ended without an answer; see hypervisor.log in the VM's directory";
            return Err(failed(std::io::Error::other(why)));
        }
        serde_json::from_str(&line)
            .map_err(|error| Error::invalid(format!("run {helper}: its answer is unreadable: {error}")))
    }

    fn describe(&self, id: &InstanceId, record: &VmRecord, request: CreateRequest) -> Description {
        let config = &self.config;
        let dir = self.store.dir(id);
        Description {
            version: VERSION,
            nics: network::nics(config, record.index, record.v4, record.v6, request.second_nic),
            inside: Inside {
                id: id.to_string(),
                hostname: hostname(&request.name),
                machine_id: id.as_str().trim_start_matches("local-").to_owned(),
                guest_binary: config.guest_binary.clone(),
                agent_binary: config.agent_binary.clone(),
                user_data: request.user_data,
                boot_delay_ms: u64::try_from(config.boot_delay.as_millis()).unwrap_or(u64::MAX),
                root: dir.join("root"),
                hypervisor: None,
            },
            dir,
        }
    }
}

/// Reaps the process when the VM ends during the life of this process; otherwise init reaps it.
fn reap(mut child: Child) {
    tokio::spawn(async move {
        if let Err(error) = child.wait().await {
            tracing::debug!("wait for a local VM's hypervisor process: {error}");
        }
    });
}

/// Returns the VM's id. It is the same for the same key, so that a repeated create finds the VM of an earlier one.
pub(crate) fn instance_id(key: &IdempotencyKey) -> Result<InstanceId, Error> {
    let hash: String = hex::encode(&key.sha256()[..16]);
    Ok(InstanceId::new(format!("local-{hash}"))?)
}

/// Returns a free number from 2 (1 is the node) to below `room`. The search starts at a position derived from the key's
/// hash, so that the next VM seldom gets the address of a deleted one.
fn free_index(room: u32, hash: &[u8; 32], taken: impl Fn(u32) -> bool) -> Option<u32> {
    let usable = room.checked_sub(2).filter(|usable| *usable > 0)?;
    let [a, b, c, d, ..] = *hash;
    let start = u32::from_be_bytes([a, b, c, d]) % usable;
    (0..usable).map(|step| 2 + (start + step) % usable).find(|index| !taken(*index))
}

/// Refuses a key that came with another request before.
fn same(record: VmRecord, digest: &str) -> Result<VmRecord, Error> {
    if record.request == digest {
        return Ok(record);
    }
    let first = &record.name;
    let text = format!("its key was used before with another request (for {first}); use a new key");
    Err(Error::key_reused(text))
}

fn created(id: &InstanceId, record: &VmRecord) -> Created {
    Created { id: id.clone(), addresses: addresses(record), chosen: Chosen::default(), disks: Vec::new() }
}

/// Converts a name to a valid host name.
fn hostname(name: &str) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let host: String = name.chars().map(fits).take(63).collect();
    let host = host.trim_matches('-');
    if host.is_empty() { "vm".to_owned() } else { host.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_is_given_once_and_none_beyond() {
        let mut taken = std::collections::HashSet::new();
        let hash = [0xff; 32];
        while let Some(index) = free_index(15, &hash, |index| taken.contains(&index)) {
            assert!((2..15).contains(&index));
            taken.insert(index);
        }
        assert_eq!(taken.len(), 13);
        assert_eq!(free_index(2, &hash, |_| false), None);
    }

    #[test]
    fn a_host_name_is_valid() {
        assert_eq!(hostname("Default/My_Pod."), "default-my-pod");
        assert_eq!(hostname("///"), "vm");
        assert_eq!(hostname(&"x".repeat(100)).len(), 63);
    }

    #[test]
    fn ids_come_from_keys_and_are_recognised() {
        let id = instance_id(&IdempotencyKey::derive("c", "s", 0)).unwrap();
        assert!(crate::store::is_ours(&id), "{id}");
        assert_eq!(id, instance_id(&IdempotencyKey::derive("c", "s", 0)).unwrap());
    }
}
