//! Parses the name of a pod's disk into its source for QEMU. Pure.
//!
//! | volume | meaning |
//! |---|---|
//! | `NAME`, `POOL/NAME` | a volume that libvirt knows |
//! | `/PATH` | a raw file of libvirtd's host, below one of `volume-dirs` |
//! | `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=/PATH` | a network block device |
//! | `iscsi://HOST[:PORT]/IQN/LUN` | an iSCSI target |
//! | `rbd:POOL/IMAGE`, `rbd://MON[:PORT],…/POOL/IMAGE` | a Ceph block device |

use std::path::{Component, Path};

use sha2::{Digest, Sha256};

use crate::config::LibvirtConfig;

/// Location of a disk's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DiskSource {
    Volume { pool: String, name: String },
    File(String),
    Network { protocol: &'static str, name: String, places: Vec<DiskServer>, user: Option<(String, String)> },
}

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DiskServer {
    Host { host: String, port: Option<u16> },
    Socket(String),
}

/// Returns the serial by which the guest finds the disk; virtio has room for 20 characters.
pub(crate) fn serial(volume: &str) -> String {
    format!("pp{}", hex::encode(&Sha256::digest(volume.as_bytes())[..9]))
}

/// Whether a disk with this serial is a volume; the VM's own disks have other serials.
pub(crate) fn is_volume(serial: &str) -> bool {
    serial.len() == 20 && serial.starts_with("pp")
}

/// Parses a volume's name. An error names the correct form.
pub(crate) fn parse(volume: &str, config: &LibvirtConfig) -> Result<DiskSource, String> {
    if volume.is_empty() || volume.len() > 1024 || volume.chars().any(char::is_control) {
        return Err("not a disk's name".to_owned());
    }
    if let Some(rest) = volume.strip_prefix("nbd://") {
        let (hosts, export) = rest.split_once('/').unwrap_or((rest, ""));
        return network("nbd", export, &[place(hosts)?], None);
    }
    if let Some(rest) = volume.strip_prefix("nbd+unix:///") {
        let socket = rest.split_once("?socket=").filter(|(_, socket)| socket.starts_with('/'));
        let (export, socket) = socket.ok_or("write it like nbd+unix:///EXPORT?socket=/PATH")?;
        let socket = below(socket, config)?;
        return network("nbd", export, &[DiskServer::Socket(socket)], None);
    }
    if let Some(rest) = volume.strip_prefix("iscsi://") {
        let parts: Vec<&str> = rest.split('/').collect();
        return match parts[..] {
            [host, target, lun] if !target.is_empty() && lun.parse::<u16>().is_ok() => {
                network("iscsi", &format!("{target}/{lun}"), &[place(host)?], None)
            }
            _ => Err("write it like iscsi://HOST/IQN/LUN".to_owned()),
        };
    }
    if let Some(rest) = volume.strip_prefix("rbd://") {
        let (hosts, image) = rest.split_once('/').ok_or("write it like rbd://MON/POOL/IMAGE")?;
        let places = hosts.split(',').map(place).collect::<Result<Vec<_>, _>>()?;
        return rbd(image, &places, config);
    }
    if let Some(image) = volume.strip_prefix("rbd:") {
        return rbd(image, &[], config);
    }
    if volume.starts_with('/') {
        return Ok(DiskSource::File(below(volume, config)?));
    }
    let (pool, name) = volume.split_once('/').unwrap_or((&config.pool, volume));
    if pool.is_empty() || name.is_empty() || name.contains(['/', ':']) {
        return Err(
            "not a disk's name; write a libvirt volume (NAME or POOL/NAME), a file, or nbd:, iscsi: or rbd:"
                .to_owned(),
        );
    }
    Ok(DiskSource::Volume { pool: pool.to_owned(), name: name.to_owned() })
}

fn rbd(image: &str, places: &[DiskServer], config: &LibvirtConfig) -> Result<DiskSource, String> {
    match image.split('/').collect::<Vec<_>>()[..] {
        [pool, name] if !pool.is_empty() && !name.is_empty() => {
            network("rbd", image, places, config.rbd.clone())
        }
        _ => Err("write it like rbd:POOL/IMAGE".to_owned()),
    }
}

fn network(
    protocol: &'static str,
    name: &str,
    places: &[DiskServer],
    user: Option<(String, String)>,
) -> Result<DiskSource, String> {
    Ok(DiskSource::Network { protocol, name: name.to_owned(), places: places.to_vec(), user })
}

/// Parses `HOST`, `HOST:PORT` or `[V6]:PORT`.
fn place(text: &str) -> Result<DiskServer, String> {
    let bad = || format!("`{text}` is no host; write HOST or HOST:PORT");
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(bad)?;
            (host, rest.strip_prefix(':'))
        }
        None => match text.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = port.map(|port| port.parse::<u16>().map_err(|_| bad())).transpose()?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    if host.is_empty() || !host.chars().all(plain) {
        return Err(bad());
    }
    Ok(DiskServer::Host { host: host.to_owned(), port })
}

/// Checks that a path in a volume's name leads below the folders that the administrator allows.
fn below(path: &str, config: &LibvirtConfig) -> Result<String, String> {
    let straight =
        Path::new(path).components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let allowed = straight
        && config.volume_dirs.iter().any(|dir| Path::new(path).starts_with(dir) && Path::new(path) != dir);
    if allowed {
        return Ok(path.to_owned());
    }
    Err("files may be attached only below provider.libvirt.volume-dirs".to_owned())
}
