//! Dials a machine: SSH with a pinned host key and our key, then SFTP. Reads the files of these keys at each dial,
//! because mounted files change.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use peerpod_common::files as local;
use russh::Preferred;
use russh::client::{self, Handle, Handler};
use russh::keys::known_hosts::known_host_keys_path;
use russh::keys::{
    Algorithm, HashAlg, PrivateKey, PrivateKeyWithHashAlg, PublicKey, PublicKeyOrCertificate,
    decode_secret_key,
};
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::fault::Fault;
use super::files::MachineFiles;
use crate::config::{ByomConfig, HostKeys, MachineAddress};

/// A connection without calls ends after this time: each costs its machine some memory.
const IDLE: Duration = Duration::from_secs(60);
/// Longest file of a key, and longest file of known hosts.
const MAX_KEY: u64 = 64 << 10;
const MAX_KNOWN_HOSTS: u64 = 4 << 20;
/// Most files in the folder of host keys.
const MAX_HOST_KEYS: usize = 1024;

/// SSH connection to a machine, with an open SFTP session.
pub(crate) struct SshConnection {
    /// The machine's files.
    pub(crate) files: MachineFiles,
    ssh: Handle<Pinned>,
}

impl SshConnection {
    /// Dials the machine.
    pub(crate) async fn open(config: &ByomConfig, machine: MachineAddress) -> Result<SshConnection, Fault> {
        let keys = {
            let config = config.clone();
            spawn_blocking(move || Keys::load(&config, machine)).await
        };
        let keys = keys.map_err(|error| Fault::Away(format!("read the keys: {error}")))??;
        let dial = SshConnection::dial(config, machine, keys);
        timeout(config.connect_timeout, dial).await.unwrap_or_else(|_| {
            let text = format!("connect: no answer within {:?}; check that it runs", config.connect_timeout);
            Err(Fault::Away(text))
        })
    }

    async fn dial(config: &ByomConfig, machine: MachineAddress, keys: Keys) -> Result<SshConnection, Fault> {
        let socket = TcpStream::connect(machine.socket()).await;
        let socket = socket.map_err(|error| Fault::Away(format!("connect: {error}; check that it runs")))?;
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%machine, %error, "cannot send small packets at once");
        }
        let mut ssh = handshake(socket, keys.pinned).await?;
        let key = PrivateKeyWithHashAlg::new(Arc::new(keys.ours), None);
        let lost = |error: russh::Error| Fault::Away(format!("log in: {error}"));
        if !ssh.authenticate_publickey(&config.username, key).await.map_err(lost)?.success() {
            let text = format!(
                "it refuses the key of provider.byom.private-key-file for the user {}; add its public half to the \
                 user's authorized keys",
                config.username
            );
            return Err(Fault::Denied(text));
        }
        let subsystem = async {
            let channel = ssh.channel_open_session().await?;
            channel.request_subsystem(true, "sftp").await?;
            Ok(channel.into_stream())
        };
        let stream =
            subsystem.await.map_err(|error: russh::Error| Fault::Away(format!("open SFTP: {error}")))?;
        Ok(SshConnection { files: MachineFiles::open(stream, config.call_timeout).await?, ssh })
    }

    /// Whether the connection has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.ssh.is_closed()
    }
}

/// Our key, and the pinned ones of a machine.
struct Keys {
    ours: PrivateKey,
    pinned: Vec<PublicKey>,
}

impl Keys {
    fn load(config: &ByomConfig, machine: MachineAddress) -> Result<Keys, Fault> {
        let pinned = match &config.host_keys {
            HostKeys::KnownHosts(file) => known(file, machine)?,
            HostKeys::Folder(folder) => of_folder(folder)?,
        };
        Ok(Keys { ours: private_key(&config.private_key_file)?, pinned })
    }
}

fn private_key(file: &Path) -> Result<PrivateKey, Fault> {
    let denied = |why: String| {
        let remedy = "mount a key without a passphrase there, as ssh-keygen -t ed25519 makes it";
        Fault::Denied(format!("read the private key in {}: {why}; {remedy}", file.display()))
    };
    let text = local::read(file, MAX_KEY).map_err(|error| denied(error.to_string()))?;
    let text = text.ok_or_else(|| denied("no such file".to_owned()))?;
    let mode = std::fs::metadata(file).map_err(|error| denied(error.to_string()))?.mode();
    if mode & 0o077 != 0 {
        let why = format!("others than its user may read it (mode {:04o}); chmod 600 it", mode & 0o7777);
        return Err(Fault::Denied(format!("read the private key in {}: {why}", file.display())));
    }
    let text = String::from_utf8(text).map_err(|_| denied("it is no text".to_owned()))?;
    decode_secret_key(&text, None).map_err(|error| denied(error.to_string()))
}

fn known(file: &Path, machine: MachineAddress) -> Result<Vec<PublicKey>, Fault> {
    let distrusted = |why: String| {
        let remedy = "add the machine, as ssh-keyscan prints it";
        Fault::Distrusted(format!("read its host keys in {}: {why}; {remedy}", file.display()))
    };
    // The parser below has no limit, and finds nothing in a file that it cannot read.
    match std::fs::metadata(file) {
        Ok(found) if found.len() > MAX_KNOWN_HOSTS => {
            return Err(distrusted("the file is too large".to_owned()));
        }
        Ok(_) => {}
        Err(error) => return Err(distrusted(error.to_string())),
    }
    let host = machine.socket();
    let found = known_host_keys_path(&host.ip().to_string(), host.port(), file);
    let found = found.map_err(|error| distrusted(error.to_string()))?;
    if found.is_empty() {
        return Err(distrusted(format!("it has none of {machine}")));
    }
    Ok(found.into_iter().map(|(_, key)| key).collect())
}

fn of_folder(folder: &Path) -> Result<Vec<PublicKey>, Fault> {
    let distrusted = |why: String| {
        let remedy =
            "put the machines' /etc/ssh/ssh_host_ed25519_key.pub there, each under a name of its own";
        Fault::Distrusted(format!("read the host keys in {}: {why}; {remedy}", folder.display()))
    };
    let entries = std::fs::read_dir(folder).map_err(|error| distrusted(error.to_string()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|end| end == "pub"));
    if files.is_empty() || files.len() > MAX_HOST_KEYS {
        return Err(distrusted(format!("it has {} files *.pub", files.len())));
    }
    let key = |file: &PathBuf| {
        let wrong = |why: String| distrusted(format!("{}: {why}", file.display()));
        let text = local::read(file, MAX_KEY).map_err(|error| wrong(error.to_string()))?.unwrap_or_default();
        PublicKey::from_openssh(String::from_utf8_lossy(&text).trim())
            .map_err(|error| wrong(error.to_string()))
    };
    files.iter().map(key).collect()
}

async fn handshake(socket: TcpStream, pinned: Vec<PublicKey>) -> Result<Handle<Pinned>, Fault> {
    // Otherwise the machine could show a key of another kind than the pinned one.
    let all = Preferred::DEFAULT;
    let is_pinned = |one: &Algorithm| pinned.iter().any(|key| key.algorithm() == *one);
    let key: Vec<_> = all
        .key
        .iter()
        .filter(|one| !matches!(one, Algorithm::Rsa { .. }) && is_pinned(one))
        .cloned()
        .collect();
    if key.is_empty() {
        let text = "its pinned host keys are neither Ed25519 nor ECDSA; pin its ssh_host_ed25519_key.pub";
        return Err(Fault::Distrusted(text.to_owned()));
    }
    let config = client::Config {
        inactivity_timeout: Some(IDLE),
        nodelay: true,
        preferred: Preferred { key: key.into(), ..all },
        ..client::Config::default()
    };
    let strange = Arc::new(OnceLock::new());
    let pinned = Pinned { keys: pinned, strange: strange.clone() };
    client::connect_stream(Arc::new(config), socket, pinned).await.map_err(|error| match strange.get() {
        Some(found) => Fault::Distrusted(format!(
            "its host key {found} is not pinned; if the machine was installed anew, pin its new key"
        )),
        None => Fault::Away(format!("begin SSH: {error}")),
    })
}

/// Compares the host key with the pinned ones.
struct Pinned {
    keys: Vec<PublicKey>,
    /// Fingerprint of a host key that is not pinned.
    strange: Arc<OnceLock<String>>,
}

impl Handler for Pinned {
    type Error = russh::Error;

    async fn check_server_key(&mut self, found: &PublicKeyOrCertificate) -> Result<bool, russh::Error> {
        let PublicKeyOrCertificate::PublicKey { key, .. } = found else { return Ok(false) };
        // Comments of the keys do not count.
        let is_pinned = self.keys.iter().any(|pinned| pinned.key_data() == key.key_data());
        if !is_pinned {
            self.strange.get_or_init(|| key.fingerprint(HashAlg::Sha256).to_string());
        }
        Ok(is_pinned)
    }
}
