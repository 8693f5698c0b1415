//! Keeps the CA on disk: one versioned JSON file, 0600, written whole or not at all.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use peerpod_common::files;
use peerpod_pki::Authority;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::{Authorities, Error};

const VERSION: u64 = 1;

/// Size limit of the file; three CAs have some 3 KiB.
const MAX_FILE: u64 = 64 * 1024;

#[derive(Deserialize)]
struct Version {
    version: u64,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    version: u64,
    since_ms: u64,
    current: KeptAuthority,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next: Option<KeptAuthority>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous: Option<KeptAuthority>,
}

#[derive(Serialize, Deserialize)]
struct KeptAuthority {
    certificate: String,
    key: String,
    not_after_ms: u64,
}

fn disk<'p>(what: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> Error + 'p {
    move |why| Error::Disk { what, path: path.to_owned(), why }
}

/// Makes the directory if it is missing, and restricts it to root.
pub(super) fn prepare(dir: &Path) -> Result<(), Error> {
    files::make_folder(dir).map_err(disk("make", dir))?;
    files::sweep(dir).map_err(disk("clean", dir))
}

/// Reads the CA; `None`: it was never made.
pub(super) fn read(path: &Path) -> Result<Option<Authorities>, Error> {
    let damaged = |why: String| Error::Damaged { path: path.to_owned(), why };
    let bytes = match files::read(path, MAX_FILE) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(None),
        Err(why) if why.kind() == ErrorKind::FileTooLarge => {
            return Err(damaged(format!("larger than {MAX_FILE} bytes")));
        }
        Err(why) => return Err(disk("read", path)(why)),
    };
    // A restored backup may have lost the mode.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(disk("protect", path))?;
    // serde's text would repeat its input, which may be a key: only the position is reported.
    let not_ours = |why: serde_json::Error| {
        damaged(format!("not in the format of this program, at line {}, column {}", why.line(), why.column()))
    };
    let Version { version } = serde_json::from_slice(&bytes).map_err(not_ours)?;
    if version != VERSION {
        return Err(Error::Newer { path: path.to_owned(), version });
    }
    let kept: Kept = serde_json::from_slice(&bytes).map_err(not_ours)?;
    let restore =
        |kept: Option<KeptAuthority>| kept.map(restore).transpose().map_err(|why| damaged(why.to_owned()));
    Ok(Some(Authorities {
        current: restore(Some(kept.current))?.ok_or_else(|| damaged("no current CA".to_owned()))?,
        next: restore(kept.next)?,
        previous: restore(kept.previous)?,
        since: from_ms(kept.since_ms).ok_or_else(|| damaged("an impossible time".to_owned()))?,
    }))
}

/// Writes the file: a temporary file, fsync, rename, fsync of the directory.
pub(super) fn write(path: &Path, authorities: &Authorities) -> Result<(), Error> {
    let kept = Kept {
        version: VERSION,
        since_ms: to_ms(authorities.since),
        current: keep(&authorities.current),
        next: authorities.next.as_ref().map(keep),
        previous: authorities.previous.as_ref().map(keep),
    };
    let text = serde_json::to_vec_pretty(&kept).map_err(|why| disk("write", path)(why.into()))?;
    files::write(path, &text).map_err(disk("write", path))
}

fn keep(authority: &Authority) -> KeptAuthority {
    KeptAuthority {
        certificate: BASE64.encode(&authority.certificate),
        key: BASE64.encode(authority.key_der()),
        not_after_ms: to_ms(authority.not_after),
    }
}

fn restore(kept: KeptAuthority) -> Result<Authority, &'static str> {
    let certificate = BASE64.decode(kept.certificate).map_err(|_| "a certificate is not base64")?;
    let key = Zeroizing::new(BASE64.decode(kept.key).map_err(|_| "a key is not base64")?);
    let not_after = from_ms(kept.not_after_ms).ok_or("an impossible time")?;
    Authority::restore(CertificateDer::from(certificate), &PrivatePkcs8KeyDer::from(&**key), not_after)
}

/// Returns a time as milliseconds since 1970.
fn to_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn from_ms(ms: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms))
}
