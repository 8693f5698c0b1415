//! Holds all knowledge of CSI drivers by name: the source of a volume in the guest's terms, and the identity of a disk
//! that the driver attached. A driver is a `Family` in its own file and an entry of `FAMILIES`; its name appears
//! nowhere else. Every volume of an unknown driver counts as a disk. May touch: nothing.

mod azure_file;
mod disks;
mod efs;
mod iscsi;
mod nfs;
mod smb;

use std::collections::HashMap;

use peerpod_volume::descriptor::Attach;
use peerpod_volume::{Identity, SecretRef, Source};

static FAMILIES: [&[Family]; 6] = [
    &[azure_file::FAMILY],
    &[efs::FAMILY],
    &[iscsi::FAMILY],
    &[nfs::FAMILY],
    &[smb::FAMILY],
    &disks::FAMILIES,
];

/// Source of a volume and mount options that its driver would add; or a text that names the missing setting.
type Sourced = Result<(Source, Vec<String>), String>;

struct Family {
    /// Name of its CSIDriver object.
    name: &'static str,
    /// Source of its volumes; `None`: they are disks.
    source: Option<fn(&VolumeInfo<'_>) -> Sourced>,
    /// Identity of its disks; `None`: as with most drivers ([`disks::ANY`]).
    disk: Option<Disk>,
    /// Keys of its secrets for mounting; `None`: it needs no usable secret.
    login: Option<Login>,
}

/// Keys of a secret with user and password, in lower case: drivers accept any case. The first present key counts.
#[derive(Debug)]
pub(crate) struct Login {
    pub(crate) username: &'static [&'static str],
    pub(crate) password: &'static [&'static str],
    /// Keys of the user's domain, which may be missing.
    pub(crate) domain: &'static [&'static str],
}

/// Identification of a driver's disks.
struct Disk {
    /// Keys of its answer to ControllerPublishVolume that the identity needs.
    keys: &'static [&'static str],
    /// Returns the identity from the volume's handle and that answer.
    identity: fn(&str, &Answer<'_>) -> Option<Identity>,
}

#[derive(Clone, Debug)]
pub(crate) struct VolumeInfo<'a> {
    pub(crate) driver: &'a str,
    pub(crate) handle: &'a str,
    /// The volume's attributes.
    pub(crate) context: &'a HashMap<String, String>,
    /// Secret with the credentials for mounting it, as the PersistentVolume names it.
    pub(crate) secret: Option<SecretRef>,
    pub(crate) zone: Option<String>,
    /// Region of this node.
    pub(crate) region: Option<String>,
    /// Component that attaches the driver's disks.
    pub(crate) attach: Attach,
}

/// Returns a volume's source, and mount options of its driver; or a text for the author of the StorageClass.
pub(crate) fn source(known: &VolumeInfo<'_>) -> Result<(Source, Vec<String>), String> {
    if let Some(source) = family(known.driver).and_then(|family| family.source) {
        return source(known);
    }
    let volume = known.handle.to_owned();
    Ok((Source::AttachedBlock { volume, zone: known.zone.clone(), attach: known.attach }, Vec::new()))
}

/// Returns the identity of a disk that its driver attached with this answer to ControllerPublishVolume. `None` when the
/// answer has no identity, or only a device's name, which is none.
pub(crate) fn identity(driver: &str, handle: &str, context: &HashMap<String, String>) -> Option<Identity> {
    (disk(driver).identity)(handle, &Answer(context))
}

/// Returns the part of the driver's answer that [`identity`] needs. The rest may be confidential.
pub(crate) fn telling(driver: &str, context: &HashMap<String, String>) -> HashMap<String, String> {
    let keys = disk(driver).keys;
    let needed = |key: &String| keys.iter().any(|one| one.eq_ignore_ascii_case(key));
    context.iter().filter(|(key, _)| needed(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Returns the keys of the secrets for mounting this driver's shares; `None`: nothing is read from such secrets.
pub(crate) fn login(driver: &str) -> Option<&'static Login> {
    family(driver)?.login.as_ref()
}

fn family(driver: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().flatten().find(|family| family.name == driver)
}

fn disk(driver: &str) -> &'static Disk {
    family(driver).and_then(|family| family.disk.as_ref()).unwrap_or(&disks::ANY)
}

struct Answer<'a>(&'a HashMap<String, String>);

impl<'a> Answer<'a> {
    /// Returns a value by its key in any case.
    fn get(&self, key: &str) -> Option<&'a str> {
        let found = self.0.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
        found.map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
    }
}

/// Joins a path to a base, with one slash between.
fn below(base: &str, path: &str) -> String {
    let path = path.trim_matches('/');
    if path.is_empty() {
        return base.to_owned();
    }
    format!("{}/{path}", base.trim_end_matches('/'))
}

/// Splits mount options in mount(8)'s form after `-o`.
fn split(options: &str) -> Vec<String> {
    options.split(',').map(str::trim).filter(|option| !option.is_empty()).map(str::to_owned).collect()
}

impl<'a> VolumeInfo<'a> {
    /// Returns an attribute by its key in any case, as drivers do.
    fn get(&self, key: &str) -> Option<&'a str> {
        let found = self.context.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    fn need(&self, key: &str) -> Result<&'a str, String> {
        self.get(key).ok_or_else(|| format!("its attributes lack {key:?}"))
    }

    /// Returns the attributes' mount options, then these.
    fn options(&self, more: &str) -> Vec<String> {
        let mut options = split(self.get("mountoptions").unwrap_or_default());
        options.extend(split(more));
        options
    }
}

#[cfg(test)]
mod tests;
