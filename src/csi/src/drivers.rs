//! What is known of CSI drivers by name: what a driver's volume is in the guest's terms, and how the guest recognises a
//! disk that the driver attached. A driver is a `Family` in a file of its own and a word in `FAMILIES`; its name stands
//! nowhere else. Of a driver that is not here every volume is a disk. May touch: nothing.

mod azure_file;
mod disks;
mod efs;
mod iscsi;
mod nfs;
mod smb;

use std::collections::HashMap;

use peerpod_volume::{Identity, SecretRef, Source, descriptor::Attach};

/// All that are known.
static FAMILIES: [&[Family]; 6] = [
    &[azure_file::FAMILY],
    &[efs::FAMILY],
    &[iscsi::FAMILY],
    &[nfs::FAMILY],
    &[smb::FAMILY],
    &disks::FAMILIES,
];

/// Where a volume is, and mount options that its driver would add; or what is missing, in words.
type Sourced = Result<(Source, Vec<String>), String>;

/// One driver.
struct Family {
    /// As its CSIDriver object is called.
    name: &'static str,
    /// Where its volumes are; none: they are disks.
    source: Option<fn(&Known<'_>) -> Sourced>,
    /// How its disks are recognised; none: as most drivers' are.
    disk: Option<Disk>,
    /// What its secrets for mounting have in them; none: it needs none that we could use.
    login: Option<Login>,
}

/// The keys of a secret with a user and a password, in lower case: drivers take them in any. Of several names of one thing
/// the first that is there counts.
#[derive(Debug)]
pub struct Login {
    /// The user's name.
    pub username: &'static [&'static str],
    /// The user's password.
    pub password: &'static [&'static str],
    /// The user's domain, which may be missing.
    pub domain: &'static [&'static str],
}

/// How a driver's disks are recognised.
struct Disk {
    /// What of its answer to ControllerPublishVolume is needed for that.
    keys: &'static [&'static str],
    /// By the volume's handle and that answer.
    identity: fn(&str, &Answer<'_>) -> Option<Identity>,
}

/// What is known of a volume.
#[derive(Clone, Debug)]
pub struct Known<'a> {
    /// The driver's name.
    pub driver: &'a str,
    /// The volume's handle.
    pub handle: &'a str,
    /// The volume's attributes.
    pub context: &'a HashMap<String, String>,
    /// Where the credentials for mounting it are, as the PersistentVolume says.
    pub secret: Option<SecretRef>,
    /// The zone of its topology.
    pub zone: Option<String>,
    /// The region of this node.
    pub region: Option<String>,
    /// Who attaches the driver's disks.
    pub attach: Attach,
}

/// Where the volume is, and mount options that its driver would add.
///
/// # Errors
/// What is missing, in words for the person who wrote the StorageClass.
pub fn source(known: &Known<'_>) -> Result<(Source, Vec<String>), String> {
    if let Some(source) = family(known.driver).and_then(|family| family.source) {
        return source(known);
    }
    let volume = known.handle.to_owned();
    Ok((Source::AttachedBlock { volume, zone: known.zone.clone(), attach: known.attach }, Vec::new()))
}

/// How a disk is recognised that its driver attached with this answer to ControllerPublishVolume; none when the answer does
/// not say, or says only a device's name, which is no identity.
pub fn identity(driver: &str, handle: &str, context: &HashMap<String, String>) -> Option<Identity> {
    (disk(driver).identity)(handle, &Answer(context))
}

/// The part of a driver's answer to ControllerPublishVolume that [`identity`] needs: the rest may be anything.
pub fn telling(driver: &str, context: &HashMap<String, String>) -> HashMap<String, String> {
    let keys = disk(driver).keys;
    let needed = |key: &String| keys.iter().any(|one| one.eq_ignore_ascii_case(key));
    context.iter().filter(|(key, _)| needed(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// What the secrets for mounting this driver's shares have in them; none: there is nothing to be taken of them.
pub fn login(driver: &str) -> Option<&'static Login> {
    family(driver)?.login.as_ref()
}

fn family(driver: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().flatten().find(|family| family.name == driver)
}

fn disk(driver: &str) -> &'static Disk {
    family(driver).and_then(|family| family.disk.as_ref()).unwrap_or(&disks::ANY)
}

/// A driver's answer to ControllerPublishVolume.
struct Answer<'a>(&'a HashMap<String, String>);

impl<'a> Answer<'a> {
    /// Keys in any case.
    fn get(&self, key: &str) -> Option<&'a str> {
        let found = self.0.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
        found.map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
    }
}

/// A path below another; with one slash between.
fn below(base: &str, path: &str) -> String {
    let path = path.trim_matches('/');
    if path.is_empty() {
        return base.to_owned();
    }
    format!("{}/{path}", base.trim_end_matches('/'))
}

/// Mount options as mount(8) has them after `-o`, one by one.
fn split(options: &str) -> Vec<String> {
    options.split(',').map(str::trim).filter(|option| !option.is_empty()).map(str::to_owned).collect()
}

impl<'a> Known<'a> {
    /// Drivers take the keys of attributes in any case.
    fn get(&self, key: &str) -> Option<&'a str> {
        let found = self.context.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    fn need(&self, key: &str) -> Result<&'a str, String> {
        self.get(key).ok_or_else(|| format!("its attributes lack {key:?}"))
    }

    /// The attributes' mount options, then these.
    fn options(&self, more: &str) -> Vec<String> {
        let mut options = split(self.get("mountoptions").unwrap_or_default());
        options.extend(split(more));
        options
    }
}

#[cfg(test)]
mod tests;
