//! Keeps the node's private tunnel key and the port that was chosen once: one versioned JSON file, 0600, written whole.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use parking_lot::Mutex;
use peerpod_common::files;
use peerpod_podnet::{Error, netlink};
use peerpod_wireguard::PrivateKey;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

const VERSION: u32 = 1;
const FILE: &str = "tunnel.json";
const MAX_FILE: u64 = 4096;

#[derive(Serialize, Deserialize)]
struct Kept {
    version: u32,
    private_key: Zeroizing<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
}

#[derive(Debug)]
pub(super) struct Key {
    pub(super) private: PrivateKey,
    path: PathBuf,
    port: Mutex<Option<u16>>,
}

fn failed(what: &str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let attempt = format!("{what} the tunnel's key {}", path.display());
    move |why| Error::Kernel { attempt, source: netlink::Error::Socket(why) }
}

impl Key {
    /// Reads the key, or makes one and writes it to disk before it is used.
    pub(super) fn open(dir: &Path) -> Result<Key, Error> {
        let path = dir.join(FILE);
        files::make_folder(dir).map_err(failed("make the folder of", &path))?;
        files::sweep(dir).map_err(failed("clean the folder of", &path))?;
        if let Some(kept) = read(&path)? {
            let bad = |why: &str| failed("read", &path)(io::Error::new(ErrorKind::InvalidData, why));
            let bytes = BASE64_STANDARD.decode(kept.private_key.as_bytes()).map(Zeroizing::new);
            let private = PrivateKey::from_bytes(&bytes.map_err(|_| bad("the key is not base64"))?)
                .map_err(|e| bad(&e.to_string()))?;
            return Ok(Key { private, path, port: Mutex::new(kept.port) });
        }
        let private = PrivateKey::generate().map_err(failed("make", &path))?;
        let key = Key { private, path, port: Mutex::new(None) };
        key.write(None)?;
        Ok(key)
    }

    pub(super) fn port(&self) -> Option<u16> {
        *self.port.lock()
    }

    /// Records the port; does nothing where it is recorded already.
    pub(super) fn keep_port(&self, port: u16) -> Result<(), Error> {
        if self.port() == Some(port) {
            return Ok(());
        }
        self.write(Some(port))?;
        *self.port.lock() = Some(port);
        Ok(())
    }

    fn write(&self, port: Option<u16>) -> Result<(), Error> {
        let private_key = Zeroizing::new(BASE64_STANDARD.encode(self.private.expose().as_slice()));
        let kept = Kept { version: VERSION, private_key, port };
        let text = serde_json::to_vec(&kept).map(Zeroizing::new);
        let text = text.map_err(|e| failed("write", &self.path)(e.into()))?;
        files::write(&self.path, &text).map_err(failed("write", &self.path))
    }
}

fn read(path: &Path) -> Result<Option<Kept>, Error> {
    let Some(bytes) = files::read(path, MAX_FILE).map_err(failed("read", path))? else { return Ok(None) };
    let bytes = Zeroizing::new(bytes);
    // serde's text would repeat its input, which may be a key: only the position is reported.
    let kept: Kept = serde_json::from_slice(&bytes).map_err(|e| {
        let why = format!("not in the format of this program, at line {}, column {}", e.line(), e.column());
        failed("read", path)(io::Error::new(ErrorKind::InvalidData, why))
    })?;
    if kept.version != VERSION {
        let why = format!("version {}, this program supports {VERSION}", kept.version);
        return Err(failed("read", path)(io::Error::new(ErrorKind::InvalidData, why)));
    }
    Ok(Some(kept))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_key_is_made_once_and_for_root_alone_and_keeps_its_port() {
        let dir = std::env::temp_dir().join(format!("peerpod-tunnel-key-{}", std::process::id()));
        let first = Key::open(&dir).unwrap();
        assert_eq!(first.port(), None);
        first.keep_port(40_000).unwrap();
        let again = Key::open(&dir).unwrap();
        assert_eq!((again.private.public(), again.port()), (first.private.public(), Some(40_000)));
        let path = dir.join(FILE);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let secret = BASE64_STANDARD.encode(first.private.expose().as_slice());
        fs::write(&path, format!("{{\"version\":9,\"private_key\":\"{secret}\"}}")).unwrap();
        let error = Key::open(&dir).unwrap_err().to_string();
        assert!(error.contains("version 9") && !error.contains(&secret), "{error}");
        fs::write(&path, format!("{{\"version\":1,\"private_key\":{secret}}}")).unwrap();
        let error = Key::open(&dir).unwrap_err().to_string();
        assert!(!error.contains(&secret), "{error}");
        fs::remove_dir_all(dir).unwrap();
    }
}
