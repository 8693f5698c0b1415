//! Ids of IBM Cloud, names of VMs and their attachments, and places of VMs. Pure.
//!
//! IBM gives an instance no tags in its create. The names of instance and attachments therefore carry the marks: the VM's
//! name, which follows from cluster, node, installation and key, with 80 bits of a hash of cluster and installation; the
//! boot volume's attachment, with the key; the first network attachment, with the digest of the request. The tags of the
//! boot volume have the same marks in words, and the name of the node.

use data_encoding::BASE32_NOPAD;
use peerpod_provider_api::{IdempotencyKey, Owner};
use peerpod_provider_cloud::names;

/// Characters of a name of [`names::unique`].
const UNIQUE: usize = 38;
/// Longest id.
const MAX_ID: usize = 64;
/// Begin of the name of the boot volume's attachment.
const KEY: &str = "key-";
/// Begin of the name of the first network attachment.
const DIGEST: &str = "digest-";

/// Whether a text has the form of an id, like `0717_1e09281b-f177-46fb-baf1-bc152b2e391a`.
pub(crate) fn is_id(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    !text.is_empty() && text.len() <= MAX_ID && text.chars().all(fits)
}

/// Returns the name of the VM that this owner makes with this key.
pub(crate) fn name(owner: &Owner, key: &IdempotencyKey) -> String {
    format!("{}-{}", names::unique(owner, key), names::proof(owner))
}

/// Whether a VM of this name is this owner's.
pub(crate) fn is_of(owner: &Owner, name: &str) -> bool {
    let Some((unique, proof)) = name.split_at_checked(UNIQUE) else { return false };
    unique.starts_with(&names::prefix(owner)) && proof.strip_prefix('-') == Some(names::proof(owner).as_str())
}

/// Returns the name of the boot volume's attachment, which has the key.
pub(crate) fn key_name(key: &IdempotencyKey) -> String {
    marked(KEY, key.as_str()).unwrap_or_else(|| "boot".to_owned())
}

/// Returns the key in the name of a boot volume's attachment.
pub(crate) fn key_in(name: &str) -> Option<IdempotencyKey> {
    IdempotencyKey::parse(mark_in(KEY, name)?).ok()
}

/// Returns the name of the first network attachment, which has the digest of the request.
pub(crate) fn digest_name(digest: &str) -> String {
    marked(DIGEST, digest).unwrap_or_else(|| "nic0".to_owned())
}

/// Returns the digest in the name of a network attachment.
pub(crate) fn digest_in(name: &str) -> Option<String> {
    mark_in(DIGEST, name)
}

/// Returns a SHA-256 in hex as a name of at most 63 characters; `None`: it is none.
fn marked(prefix: &str, hex: &str) -> Option<String> {
    let bytes = hex::decode(hex).ok().filter(|bytes| bytes.len() == 32 && hex::encode(bytes) == hex)?;
    Some(format!("{prefix}{}", BASE32_NOPAD.encode(&bytes).to_ascii_lowercase()))
}

fn mark_in(prefix: &str, name: &str) -> Option<String> {
    let text = name.strip_prefix(prefix)?.to_ascii_uppercase();
    let bytes = BASE32_NOPAD.decode(text.as_bytes()).ok().filter(|bytes| bytes.len() == 32)?;
    Some(hex::encode(bytes))
}

/// Place of a VM in a zone: a subnet, and a dedicated host or a group of them where the settings name such.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IbmCloudPlace {
    /// Id of the subnet.
    pub subnet: String,
    /// Id of the dedicated host or group; `None`: any host of IBM's.
    pub target: Option<String>,
}

impl IbmCloudPlace {
    /// Returns the place as the planner keeps it. The planner takes places in the order of their texts, so a host comes
    /// before a group.
    pub(crate) fn text(subnet: &str, target: Option<(&str, bool)>) -> String {
        match target {
            None => subnet.to_owned(),
            Some((host, false)) => format!("{subnet}@host/{host}"),
            Some((group, true)) => format!("{subnet}@hosts/{group}"),
        }
    }

    /// Reads the text of a place.
    pub(crate) fn parse(text: &str) -> Option<IbmCloudPlace> {
        let (subnet, target) = match text.split_once('@') {
            None => (text, None),
            Some((subnet, target)) => (subnet, Some(target.split_once('/')?.1)),
        };
        let is_place = is_id(subnet) && target.is_none_or(is_id);
        is_place.then(|| IbmCloudPlace { subnet: subnet.to_owned(), target: target.map(str::to_owned) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(cluster: &str, node: &str, installation: &str) -> Owner {
        Owner { cluster_id: cluster.into(), node_name: node.into(), installation: installation.into() }
    }

    #[test]
    fn a_name_shows_the_vm_to_its_owner_alone() {
        let ours = owner("c", "n", "i");
        let name = name(&ours, &IdempotencyKey::derive("c", "s", 0));
        assert!(name.len() <= 63 && is_of(&ours, &name), "{name}");
        assert!(is_of(&owner("c", "", "i"), &name), "the controller's");
        for other in [owner("c", "m", "i"), owner("d", "n", "i"), owner("c", "n", "j"), owner("c", "", "j")] {
            assert!(!is_of(&other, &name), "{other:?}");
        }
        for bad in [
            "",
            "pp-",
            &name[..UNIQUE],
            &name[..50],
            &format!("{name}x"),
            "päppäpäppäpäppäpäppäpäppäpäppäpäppä",
        ] {
            assert!(!is_of(&ours, bad), "{bad}");
        }
    }

    #[test]
    fn key_and_digest_are_read_back_from_names() {
        let key = IdempotencyKey::derive("c", "s", 0);
        assert!(key_name(&key).len() <= 63);
        assert_eq!(key_in(&key_name(&key)), Some(key.clone()));
        assert!(digest_name(key.as_str()).len() <= 63);
        assert_eq!(digest_in(&digest_name(key.as_str())).as_deref(), Some(key.as_str()));
        let odd = IdempotencyKey::parse("ABC").unwrap();
        assert_eq!((key_name(&odd).as_str(), key_in("boot"), key_in("key-abc")), ("boot", None, None));
        assert_eq!(digest_in(&key_name(&key)), None);
    }

    #[test]
    fn a_place_is_read_back_and_a_host_comes_before_a_group() {
        let places = [("02b7-a", None), ("02b7-a", Some(("h-1", false))), ("02b7-a", Some(("g-1", true)))];
        let texts: Vec<String> =
            places.iter().map(|(subnet, target)| IbmCloudPlace::text(subnet, *target)).collect();
        assert!(texts.is_sorted(), "{texts:?}");
        for ((subnet, target), text) in places.iter().zip(&texts) {
            let place = IbmCloudPlace::parse(text).unwrap();
            assert_eq!((place.subnet.as_str(), place.target.as_deref()), (*subnet, target.map(|(id, _)| id)));
        }
        for bad in ["", "a b", "a@", "a@host", "a@host/", "a@host/b/c", "A"] {
            assert_eq!(IbmCloudPlace::parse(bad), None, "{bad}");
        }
    }
}
