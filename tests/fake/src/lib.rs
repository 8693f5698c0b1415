//! Fake provider that takes no time and makes no VM. Each create leaves a file with the request's user-data in a
//! folder. The program that plays the guests (a benchmark, a load test) reads the file and dials the node. Measurements
//! against this provider therefore cover only the node. A batch call leaves an additional file that records the number
//! of VMs; it is never removed.
//!
//! Touches its own folder, `fake` in `paths.state-dir`.

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use async_trait::async_trait;
use peerpod_base::config::Reader;
use peerpod_common::files;
use peerpod_provider_api::{
    Batch, Capabilities, Chosen, CreateRequest, Created, CreatedMany, Error, Extensions, IdempotencyKey,
    InstanceId, Owned, OwnedState, Preflight, Provider,
};
use serde::{Deserialize, Serialize};

/// Settings `provider.fake.*`.
#[derive(Clone, Debug)]
pub struct FakeConfig {
    /// Folder of the files; created when missing.
    pub dir: PathBuf,
    /// First of the 16384 addresses that fake VMs can get.
    pub first_address: Ipv4Addr,
    /// Most fake VMs by one call; 0: one per call.
    pub max_batch: u32,
    /// Duration of a create: half of it before the effect, half of it after.
    pub takes: Duration,
}

impl FakeConfig {
    /// Reads `provider.fake.*`; mistakes stay with the reader.
    pub fn read(reader: &mut Reader, state_dir: &Path) -> FakeConfig {
        reader.section("provider.fake", |section| {
            let first = section.constant("first-address", "FIRST_ADDRESS", IpAddr::V4(FIRST_ADDRESS));
            let first_address = match first {
                IpAddr::V4(address) => address,
                IpAddr::V6(_) => {
                    section.mistake("first-address", "an IPv4 address is needed");
                    FIRST_ADDRESS
                }
            };
            FakeConfig {
                dir: section.derived("dir", "paths.state-dir", state_dir.join("fake")),
                first_address,
                max_batch: section.constant("max-batch", "MAX_BATCH", MAX_BATCH),
                takes: section.constant("takes", "TAKES", TAKES),
            }
        })
    }
}

/// Address of the first fake VM; the node needs a route to it and the next ones.
const FIRST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
/// Fake VMs are made one by one.
const MAX_BATCH: u32 = 0;
/// A create takes no time.
const TAKES: Duration = Duration::ZERO;

/// Content of the file of one fake VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FakeVm {
    /// Key of its create.
    pub key: IdempotencyKey,
    /// Digest of the request, to recognise a key that comes back with another request.
    pub digest: String,
    /// User-data that the guest would find.
    pub user_data: String,
    /// Address of the fake VM.
    pub address: Ipv4Addr,
    /// Node that made it.
    #[serde(default)]
    pub node: Option<String>,
}

/// Content of the file of one batch call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batched {
    /// Key of the call.
    pub key: IdempotencyKey,
    /// Digest of the request.
    pub digest: String,
    /// Number of VMs requested.
    pub count: u32,
    /// Whether all of them were made. A VM that is deleted after that is not made again.
    pub whole: bool,
}

/// Fake provider; see the module.
#[derive(Debug)]
pub struct Fake {
    config: FakeConfig,
}

impl Fake {
    /// Returns a provider over the configured folder.
    pub fn new(config: FakeConfig) -> Fake {
        Fake { config }
    }

    fn file(&self, id: &str) -> PathBuf {
        self.config.dir.join(format!("{id}.json"))
    }

    /// Path of the link that reserves an address. The link points to the id and is created atomically.
    fn taken(&self, address: Ipv4Addr) -> PathBuf {
        self.config.dir.join(format!("{address}.taken"))
    }

    /// Reserves a free address. The search starts at an offset derived from the key, so that it costs about one attempt
    /// and not one per VM.
    fn take_address(&self, id: &str, key: &IdempotencyKey) -> Result<Ipv4Addr, Error> {
        let [.., high, low] = key.sha256();
        let begin = u32::from(u16::from_be_bytes([high, low]));
        for step in 0..ADDRESSES {
            let offset = (begin + step) % ADDRESSES;
            let address = Ipv4Addr::from_bits(self.config.first_address.to_bits().saturating_add(offset));
            let path = self.taken(address);
            match symlink(id, &path) {
                Ok(()) => return Ok(address),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // Reserved by an earlier create of this VM that did not finish.
                    if fs::read_link(&path).is_ok_and(|whose| whose == Path::new(id)) {
                        return Ok(address);
                    }
                }
                Err(error) => return Err(transient("taking", &path, &error)),
            }
        }
        Err(Error::Invalid { text: format!("all {ADDRESSES} fake addresses are taken; delete VMs") })
    }

    fn of(&self, id: &str, request: &CreateRequest, key: &IdempotencyKey) -> Result<FakeVm, Error> {
        match self.read(id) {
            Ok(known) if known.digest == request.digest() => Ok(known),
            Ok(_) => Err(Error::KeyReused { text: format!("{id} was made with another request") }),
            Err(Error::NotFound { .. }) => {
                let fake_vm = FakeVm {
                    key: key.clone(),
                    digest: request.digest(),
                    user_data: request.user_data.clone(),
                    node: request.labels.get("peerpod.node").cloned(),
                    // Derived from the id, because all VMs of one batch have the same key.
                    address: self.take_address(id, &IdempotencyKey::derive("fake", id, 0))?,
                };
                write(&self.file(id), &fake_vm)?;
                Ok(fake_vm)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the path and the record of a batch call, from an earlier call if there was one.
    fn call(
        &self,
        request: &CreateRequest,
        count: u32,
        key: &IdempotencyKey,
    ) -> Result<(PathBuf, Batched), Error> {
        let path = self.config.dir.join(format!("{}.batch", id_of(key)));
        let wanted = Batched { key: key.clone(), digest: request.digest(), count, whole: false };
        match fs::read(&path) {
            Ok(bytes) => match serde_json::from_slice::<Batched>(&bytes) {
                Ok(known) if known.digest == wanted.digest && known.count == count => Ok((path, known)),
                Ok(_) => {
                    Err(Error::KeyReused { text: format!("{} was made with another request", id_of(key)) })
                }
                Err(error) => Err(Error::Invalid {
                    text: format!("{} is not our file: {error}; remove it", path.display()),
                }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                write(&path, &wanted)?;
                Ok((path, wanted))
            }
            Err(error) => Err(transient("reading", &path, &error)),
        }
    }

    fn read(&self, id: &str) -> Result<FakeVm, Error> {
        let path = self.file(id);
        let bytes = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NotFound { text: format!("no fake VM {id}") },
            _ => transient("reading", &path, &error),
        })?;
        serde_json::from_slice(&bytes).map_err(|error| Error::Invalid {
            text: format!("{} is not our file: {error}; remove it", path.display()),
        })
    }
}

/// Number of addresses, from the first one on.
const ADDRESSES: u32 = 1 << 14;

/// Derives the id from the key, which makes creates idempotent.
fn id_of(key: &IdempotencyKey) -> String {
    format!("fake-{}", &key.as_str()[..key.as_str().len().min(20)])
}

fn transient(what: &str, path: &Path, error: &io::Error) -> Error {
    Error::Transient { text: format!("{what} {}: {error}", path.display()) }
}

#[async_trait]
impl Provider for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { max_batch: self.config.max_batch, ..Capabilities::minimal(64 << 10) }
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        let dir = &self.config.dir;
        files::make_folder(dir).map_err(|error| transient("making", dir, &error))?;
        Ok(Preflight {
            warnings: vec!["the fake provider makes no VMs; it is for measurements".into()],
            ..Preflight::default()
        })
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.capabilities().check(request, self.name())?;
        tokio::time::sleep(self.config.takes / 2).await;
        let id = id_of(key);
        let created = created(&id, &self.of(&id, request, key)?);
        tokio::time::sleep(self.config.takes / 2).await;
        created
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        Ok(vec![self.read(id.as_str())?.address.into()])
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let path = self.file(id.as_str());
        // The address goes last, so that no other VM gets it while this VM is listed.
        let taken = self.read(id.as_str()).ok().map(|fake_vm| self.taken(fake_vm.address));
        for path in [Some(path), taken].into_iter().flatten() {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(transient("removing", &path, &error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let dir = &self.config.dir;
        let mut owned = Vec::new();
        let entries = match fs::read_dir(dir) {
            // `preflight` creates the folder, and a caller that only lists and deletes never calls it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(owned),
            other => other.map_err(|error| transient("listing", dir, &error))?,
        };
        for entry in entries {
            let name = entry.map_err(|error| transient("listing", dir, &error))?.file_name();
            let Some(id) = name.to_str().and_then(|name| name.strip_suffix(".json")) else { continue };
            let fake_vm = match self.read(id) {
                Err(Error::NotFound { .. }) => continue,
                other => other?,
            };
            owned.push(Owned {
                id: InstanceId::new(id).map_err(|error| Error::invalid(error.to_string()))?,
                key: Some(fake_vm.key),
                name: None,
                state: OwnedState::Running,
                addresses: vec![fake_vm.address.into()],
                created: None,
                node: fake_vm.node,
            });
        }
        Ok(owned)
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions {
            batch: (self.config.max_batch > 0).then_some(self as &dyn Batch),
            ..Extensions::default()
        }
    }
}

#[async_trait]
impl Batch for Fake {
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        self.capabilities().check_batch(request, count, self.name())?;
        let count = count.get();
        tokio::time::sleep(self.config.takes / 2).await;
        let (path, call) = self.call(request, count, key)?;
        let mut made = Vec::new();
        for number in 0..count {
            let id = format!("{}-{number:04}", id_of(key));
            let fake_vm = if call.whole { self.read(&id) } else { self.of(&id, request, key) };
            match fake_vm {
                Ok(fake_vm) => made.push(created(&id, &fake_vm)?),
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        write(&path, &Batched { whole: true, ..call })?;
        tokio::time::sleep(self.config.takes / 2).await;
        let gone = count - u32::try_from(made.len()).unwrap_or(count);
        let rest =
            (gone > 0).then(|| Error::NotFound { text: format!("{gone} of {count} fake VMs are gone") });
        Ok(CreatedMany { made, rest })
    }
}

fn created(id: &str, fake_vm: &FakeVm) -> Result<Created, Error> {
    let id = InstanceId::new(id).map_err(|error| Error::invalid(error.to_string()))?;
    Ok(Created { id, addresses: vec![fake_vm.address.into()], chosen: Chosen::default(), disks: Vec::new() })
}

/// Writes atomically: a reader of the folder sees only complete files, even when several writers write the same one.
fn write(path: &Path, content: &impl Serialize) -> Result<(), Error> {
    let json = serde_json::to_vec(content).map_err(|error| Error::invalid(error.to_string()))?;
    files::write_volatile(path, &json).map_err(|error| transient("writing", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vm_has_its_own_address_also_after_a_repeated_create() {
        let dir = std::env::temp_dir().join(format!("peerpod-fake-addresses-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let fake = Fake::new(FakeConfig {
            dir: dir.clone(),
            first_address: Ipv4Addr::new(10, 200, 0, 1),
            max_batch: 0,
            takes: Duration::ZERO,
        });
        let key = |number: u32| IdempotencyKey::derive("cluster", &number.to_string(), 1);
        // Enough VMs that several start at the same offset.
        let take = |number: u32| fake.take_address(&format!("fake-{number}"), &key(number)).unwrap();
        let all: std::collections::BTreeSet<Ipv4Addr> = (0..600).map(take).collect();
        assert_eq!(all.len(), 600);
        assert!((0..600).all(|number| all.contains(&take(number))));
        fs::remove_dir_all(dir).unwrap();
    }
}
