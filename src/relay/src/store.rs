//! Stores the data that a new relay process needs to serve guests without the node: the TLS identity and one record per
//! sandbox, under `<state-dir>/relay`. The files are versioned JSON, written whole. An unreadable file is moved to
//! `<state-dir>/relay/quarantine` and reported; the others are served.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use peerpod_common::files;
use peerpod_link::base64_bytes;
use peerpod_link::user_data::fingerprints;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::id::SandboxId;
use crate::volumes::Volume;

/// Version of both file formats.
const VERSION: u32 = 1;
const IDENTITY: &str = "tls.json";
/// Limit of a file that is read, in bytes.
const MAX_FILE: u64 = 4 << 20;

/// The state folder is not usable.
#[derive(Debug, Error)]
#[error("{what} {path}: {why}; check that the folder exists, is writable, and has space")]
pub(crate) struct StoreError {
    what: &'static str,
    path: String,
    why: io::Error,
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.display().to_string();
    move |why| StoreError { what, path, why }
}

/// One sandbox, as the node put it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SandboxRecord {
    pub(crate) id: SandboxId,
    pub(crate) agent_socket: PathBuf,
    /// SHA-256 fingerprints of the leaf certificates of this sandbox's guest.
    #[serde(with = "fingerprints")]
    pub(crate) guest_certificates: Vec<[u8; 32]>,
    pub(crate) pod: String,
    /// The guest's end of the encrypted tunnel, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tunnel_peer: Option<TunnelPeer>,
    /// Addresses at which the guest waits to be dialled; if empty, the guest dials.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) dial: Vec<SocketAddr>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) volumes: Vec<Volume>,
    /// Addresses of the VM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) addresses: Vec<IpAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TunnelPeer {
    #[serde(with = "base64_bytes")]
    pub(crate) key: Vec<u8>,
    pub(crate) inner: Ipv4Addr,
    pub(crate) vnis: Vec<u32>,
    pub(crate) vxlan_port: u16,
}

/// The relay's certificate and key towards guests, and the CAs that it trusts.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServerIdentity {
    #[serde(with = "base64_bytes::list")]
    pub(crate) certificates: Vec<Vec<u8>>,
    #[serde(with = "base64_bytes")]
    pub(crate) private_key: Vec<u8>,
    #[serde(with = "base64_bytes::list")]
    pub(crate) trusted_cas: Vec<Vec<u8>>,
}

impl fmt::Debug for ServerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerIdentity")
            .field("certificates", &self.certificates.len())
            .finish_non_exhaustive()
    }
}

impl ServerIdentity {
    pub(crate) fn server_config(
        &self,
    ) -> Result<std::sync::Arc<rustls::ServerConfig>, peerpod_link::tls::TlsError> {
        let certificate = |der: &Vec<u8>| CertificateDer::from(der.clone());
        let trusted: Vec<_> = self.trusted_cas.iter().map(certificate).collect();
        peerpod_link::tls::server_config(
            self.certificates.iter().map(certificate).collect(),
            PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.private_key.clone())),
            &trusted,
        )
    }
}

/// State folder of the relay. All calls block.
#[derive(Clone, Debug)]
pub(crate) struct RelayStore {
    folder: PathBuf,
    sandboxes: PathBuf,
    quarantine: PathBuf,
}

impl RelayStore {
    pub(crate) fn open(state_dir: &Path) -> Result<RelayStore, StoreError> {
        let folder = state_dir.join("relay");
        let store =
            RelayStore { sandboxes: folder.join("sandboxes"), quarantine: folder.join("quarantine"), folder };
        for folder in [&store.folder, &store.sandboxes] {
            files::make_folder(folder).map_err(failed("make", folder))?;
        }
        Ok(store)
    }

    /// Removes half-written files of a process that died; must not run while another process writes.
    pub(crate) fn sweep(&self) -> Result<(), StoreError> {
        for folder in [&self.folder, &self.sandboxes] {
            files::sweep(folder).map_err(failed("clean", folder))?;
        }
        Ok(())
    }

    pub(crate) fn put_identity(&self, identity: &ServerIdentity) -> Result<(), StoreError> {
        write(&self.folder.join(IDENTITY), identity)
    }

    /// Reads the identity, if a readable one exists.
    pub(crate) fn identity(&self) -> Option<ServerIdentity> {
        self.read(&self.folder.join(IDENTITY), |_| Ok(()))
    }

    pub(crate) fn put(&self, record: &SandboxRecord) -> Result<(), StoreError> {
        write(&self.sandboxes.join(format!("{}.json", record.id)), record)
    }

    /// Removes a sandbox's record; a missing one is no error.
    pub(crate) fn delete(&self, id: &SandboxId) -> Result<(), StoreError> {
        files::remove(&self.sandboxes.join(format!("{id}.json"))).map_err(failed("remove", &self.sandboxes))
    }

    pub(crate) fn records(&self) -> Result<Vec<SandboxRecord>, StoreError> {
        let names = std::fs::read_dir(&self.sandboxes)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>())
            .map_err(failed("list", &self.sandboxes))?;
        let read = |path: &PathBuf| {
            self.read(path, |record: &SandboxRecord| {
                let named = path.file_name().is_some_and(|name| *name == *format!("{}.json", record.id));
                if named {
                    Ok(())
                } else {
                    Err(format!("it describes sandbox {}, unlike its file name", record.id))
                }
            })
        };
        Ok(names.iter().filter_map(read).collect())
    }

    /// Reads a file; moves an invalid one to the quarantine.
    fn read<T: DeserializeOwned>(
        &self,
        path: &Path,
        check: impl FnOnce(&T) -> Result<(), String>,
    ) -> Option<T> {
        let content = match files::read(path, MAX_FILE) {
            Ok(content) => content?,
            Err(error) => {
                tracing::error!(file = %path.display(), %error, "cannot read a state file; its sandbox or identity is not served");
                return None;
            }
        };
        let read = parse(&content).and_then(|content| check(&content).map(|()| content));
        read.map_err(|why| self.put_aside(path, &why)).ok()
    }

    fn put_aside(&self, path: &Path, why: &str) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        let to = self.quarantine.join(format!("relay-{now}-{name}"));
        let moved = files::make_folder(&self.quarantine).and_then(|()| rename(path, &to));
        let moved = moved.map_or_else(|error| error.to_string(), |()| to.display().to_string());
        tracing::error!(file = %path.display(), why, moved, "a state file is not valid; its sandbox or identity is not served");
    }
}

/// Moves a file. Landlock of kernels before 5.19 permits no rename into another folder.
fn rename(path: &Path, to: &Path) -> io::Result<()> {
    match std::fs::rename(path, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            std::fs::copy(path, to)?;
            std::fs::remove_file(path)
        }
        renamed => renamed,
    }
}

fn write(path: &Path, content: &impl Serialize) -> Result<(), StoreError> {
    #[derive(Serialize)]
    struct Versioned<'a, T> {
        version: u32,
        #[serde(flatten)]
        content: &'a T,
    }
    let content = serde_json::to_vec(&Versioned { version: VERSION, content }).map_err(io::Error::from);
    content.and_then(|content| files::write(path, &content)).map_err(failed("write", path))
}

/// Parses a file's content. Only the present version has a known form.
fn parse<T: DeserializeOwned>(content: &[u8]) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let Versioned { version } = serde_json::from_slice(content).map_err(|error| error.to_string())?;
    if version != VERSION {
        return Err(format!("version {version}, this relay supports {VERSION}"));
    }
    serde_json::from_slice(content).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(id: &str) -> SandboxRecord {
        SandboxRecord {
            id: SandboxId::new(id).unwrap(),
            agent_socket: "/run/peerpod/pods/x/agent.ttrpc".into(),
            guest_certificates: vec![[0xab; 32], [1; 32]],
            pod: "shop/web".into(),
            tunnel_peer: (id == "a").then(|| TunnelPeer {
                key: vec![7; 32],
                inner: [10, 1, 2, 3].into(),
                vnis: vec![0x1_0203, 9],
                vxlan_port: 4789,
            }),
            dial: if id == "b" { vec!["[fd00::7]:15150".parse().unwrap()] } else { Vec::new() },
            volumes: if id == "a" {
                vec![Volume { id: "a".repeat(32), block: true, ..Volume::default() }]
            } else {
                Vec::new()
            },
            addresses: if id == "a" { vec!["10.0.0.7".parse().unwrap()] } else { Vec::new() },
        }
    }

    #[test]
    fn records_survive_and_torn_files_are_quarantined() {
        let base = std::env::temp_dir().join(format!("peerpod-store-{}", std::process::id()));
        let store = RelayStore::open(&base).unwrap();
        store.put(&sample("a")).unwrap();
        store.put(&sample("b")).unwrap();
        store.put(&sample("gone")).unwrap();
        store.delete(&sample("gone").id).unwrap();
        let identity = ServerIdentity {
            certificates: vec![vec![1], vec![2]],
            private_key: vec![3; 50],
            trusted_cas: vec![vec![4]],
        };
        assert_eq!(store.identity(), None);
        store.put_identity(&identity).unwrap();
        assert_eq!(store.identity(), Some(identity));

        std::fs::copy(base.join("relay/sandboxes/a.json"), base.join("relay/sandboxes/other.json")).unwrap();
        std::fs::write(base.join("relay/sandboxes/torn.json"), "{\"version\":1,\"id\":\"to").unwrap();
        std::fs::write(base.join("relay/sandboxes/new.json"), "{\"version\":2}").unwrap();
        let mut records = store.records().unwrap();
        records.sort_by(|a, b| a.id.cmp(&b.id));
        assert_eq!(records, [sample("a"), sample("b")]);
        assert_eq!(std::fs::read_dir(base.join("relay/quarantine")).unwrap().count(), 3);
        assert_eq!(store.records().unwrap().len(), 2);
        std::fs::remove_dir_all(base).unwrap();
    }
}
