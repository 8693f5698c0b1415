//! A provider that takes no time and makes no VM: each create leaves a file with the request's user-data in a folder,
//! and whoever plays the guests (a bench, a load test) reads it there and dials home. What is measured against it is
//! the node, and nothing else.
//!
//! Touches its own folder, `provider.drill.dir`.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink},
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use peerpod_base::config::Reader;
use peerpod_provider_api::{
    Capabilities, CreateRequest, Created, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Preflight,
    Provider,
};
use serde::{Deserialize, Serialize};

/// The settings, `provider.drill.*`.
#[derive(Clone, Debug)]
pub struct DrillConfig {
    /// Where the files are; made when missing.
    pub dir: PathBuf,
    /// The first of the addresses that the "VMs" get, one after another.
    pub first_address: Ipv4Addr,
}

impl DrillConfig {
    /// Reads `provider.drill.*`; mistakes stay with the reader.
    pub fn read(reader: &mut Reader, state_dir: &Path) -> DrillConfig {
        let mut section = reader.section("provider.drill");
        let dir = section.optional("dir", "where requests are left; default: drill in the state directory");
        let first: IpAddr = section.get(
            "first-address",
            "10.200.0.1",
            "address of the first \"VM\"; the node needs a route to it and the next ones",
        );
        let first_address = match first {
            IpAddr::V4(address) => address,
            IpAddr::V6(_) => {
                section.mistake("first-address", "an IPv4 address is needed");
                Ipv4Addr::new(10, 200, 0, 1)
            }
        };
        DrillConfig { dir: dir.unwrap_or_else(|| state_dir.join("drill")), first_address }
    }
}

/// What is in the file of one "VM".
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Drilled {
    /// The key it was made with.
    pub key: IdempotencyKey,
    /// Digest of the request, to recognise a key that comes back with another one.
    pub digest: String,
    /// What the guest would find.
    pub user_data: String,
    /// Its address.
    pub address: Ipv4Addr,
}

/// The provider; see the module.
#[derive(Debug)]
pub struct Drill {
    config: DrillConfig,
}

impl Drill {
    /// A provider over the configured folder.
    pub fn new(config: DrillConfig) -> Drill {
        Drill { config }
    }

    fn file(&self, id: &str) -> PathBuf {
        self.config.dir.join(format!("{id}.json"))
    }

    /// Whose an address is: a link to the id, which is there whole or not at all.
    fn taken(&self, address: Ipv4Addr) -> PathBuf {
        self.config.dir.join(format!("{address}.taken"))
    }

    /// An address that nobody else has; the key says where to begin, so that this costs one look and not one per VM.
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
                    // Ours, of a create that went no further.
                    if fs::read_link(&path).is_ok_and(|whose| whose == Path::new(id)) {
                        return Ok(address);
                    }
                }
                Err(error) => return Err(transient("taking", &path, &error)),
            }
        }
        Err(Error::Invalid { text: format!("all {ADDRESSES} drill addresses are taken; delete VMs") })
    }

    fn read(&self, id: &str) -> Result<Drilled, Error> {
        let path = self.file(id);
        let bytes = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NotFound { text: format!("no drill VM {id}") },
            _ => transient("reading", &path, &error),
        })?;
        serde_json::from_slice(&bytes).map_err(|error| Error::Invalid {
            text: format!("{} is not ours: {error}; remove it", path.display()),
        })
    }
}

/// Addresses there are, from the first on.
const ADDRESSES: u32 = 1 << 14;

/// The id follows from the key: that is all the idempotency a folder needs.
fn id_of(key: &IdempotencyKey) -> String {
    format!("drill-{}", &key.as_str()[..key.as_str().len().min(20)])
}

fn transient(what: &str, path: &Path, error: &io::Error) -> Error {
    Error::Transient { text: format!("{what} {}: {error}", path.display()) }
}

#[async_trait]
impl Provider for Drill {
    fn name(&self) -> &'static str {
        "drill"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::minimal(64 << 10)
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        let dir = &self.config.dir;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(|error| transient("making", dir, &error))?;
        Ok(Preflight {
            warnings: vec!["the drill provider makes no VMs; it is for measurements".into()],
            ..Preflight::default()
        })
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.capabilities().check(request, self.name())?;
        let id = id_of(key);
        let drilled = match self.read(&id) {
            Ok(known) if known.digest == request.digest() => known,
            Ok(_) => return Err(Error::KeyReused { text: format!("{id} was made with another request") }),
            Err(Error::NotFound { .. }) => {
                let drilled = Drilled {
                    key: key.clone(),
                    digest: request.digest(),
                    user_data: request.user_data.clone(),
                    address: self.take_address(&id, key)?,
                };
                write(&self.file(&id), &drilled)?;
                drilled
            }
            Err(error) => return Err(error),
        };
        let id = InstanceId::new(id).map_err(|error| Error::Invalid { text: error.to_string() })?;
        let addresses = vec![drilled.address.into()];
        Ok(Created { id, addresses, instance_type: None, disks: Vec::new() })
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        Ok(vec![self.read(id.as_str())?.address.into()])
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let path = self.file(id.as_str());
        // The address last: nobody gets it while this VM is listed.
        let taken = self.read(id.as_str()).ok().map(|drilled| self.taken(drilled.address));
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
        for entry in fs::read_dir(dir).map_err(|error| transient("listing", dir, &error))? {
            let name = entry.map_err(|error| transient("listing", dir, &error))?.file_name();
            let Some(id) = name.to_str().and_then(|name| name.strip_suffix(".json")) else { continue };
            let drilled = match self.read(id) {
                Err(Error::NotFound { .. }) => continue,
                other => other?,
            };
            owned.push(Owned {
                id: InstanceId::new(id).map_err(|error| Error::Invalid { text: error.to_string() })?,
                key: Some(drilled.key),
                name: None,
                state: OwnedState::Running,
                addresses: vec![drilled.address.into()],
                created: None,
            });
        }
        Ok(owned)
    }
}

/// Whole or not at all: whoever watches the folder sees only complete files.
fn write(path: &Path, drilled: &Drilled) -> Result<(), Error> {
    let json = serde_json::to_vec(drilled).map_err(|error| Error::Invalid { text: error.to_string() })?;
    let temporary = path.with_extension("new");
    let written = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| io::Write::write_all(&mut file, &json))
        .and_then(|()| fs::rename(&temporary, path));
    written.map_err(|error| transient("writing", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_one_vms_alone_and_stays_its_own_when_a_create_is_repeated() {
        let dir = std::env::temp_dir().join(format!("peerpod-drill-addresses-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let drill = Drill::new(DrillConfig { dir: dir.clone(), first_address: Ipv4Addr::new(10, 200, 0, 1) });
        let key = |number: u32| IdempotencyKey::derive("cluster", &number.to_string(), 1);
        // Many more than begin at places of their own.
        let take = |number: u32| drill.take_address(&format!("drill-{number}"), &key(number)).unwrap();
        let all: std::collections::BTreeSet<Ipv4Addr> = (0..600).map(take).collect();
        assert_eq!(all.len(), 600);
        assert!((0..600).all(|number| all.contains(&take(number))));
        fs::remove_dir_all(dir).unwrap();
    }
}
