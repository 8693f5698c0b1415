//! Names of VMs on clouds that are idempotent by name: the name follows from owner and key, so a repeated create finds
//! the VM of the first one. Pure.
//!
//! A name has 38 characters (`pp-` + 8 + `-` + 26) of `[a-z2-7-]` and begins with a letter, which every known cloud
//! accepts; PowerVS has the shortest limit, 47. People find the pod in the marks, not in the name.

use data_encoding::BASE32_NOPAD;
use peerpod_provider_api::{IdempotencyKey, Owner};
use sha2::{Digest, Sha256};

/// Prefix of all names.
pub const ALL: &str = "pp-";
/// Characters of the owner's part: 40 bits. Two owners with one prefix cost a look at each other's VMs, no more.
const OWNER: usize = 8;
/// Characters of the key's part: 130 bits.
const KEY: usize = 26;

/// Returns the name of the VM that is made with this key.
pub fn unique(owner: &Owner, key: &IdempotencyKey) -> String {
    let Owner { cluster_id, node_name, installation } = owner;
    let key = base32(&digest(&[cluster_id, node_name, installation, key.as_str()]), KEY);
    format!("{}{key}", prefix(owner))
}

/// Returns the prefix of the names of this owner's VMs; without a node, that of all VMs. Other owners may share it, so
/// a list by prefix is filtered by the marks.
pub fn prefix(owner: &Owner) -> String {
    if owner.node_name.is_empty() {
        return ALL.to_owned();
    }
    format!("{ALL}{}-", short(&[&owner.cluster_id, &owner.node_name]))
}

/// Returns a text of eight characters of `[a-z2-7]` for these parts, for marks that are too narrow for the parts.
pub fn short(parts: &[&str]) -> String {
    base32(&digest(parts), OWNER)
}

/// Returns 16 characters that prove cluster and installation (80 bits), for the name of an object to which the cloud gives
/// no marks. A name of [`unique`] before them proves the node.
pub fn proof(owner: &Owner) -> String {
    let Owner { cluster_id, installation, .. } = owner;
    let half = |number: &str| short(&[number, cluster_id, installation]);
    format!("{}{}", half("1"), half("2"))
}

/// Returns a UUID of version 8 (custom) that follows from the key, like `0f5c1d5e-…`.
pub fn uuid(key: &IdempotencyKey) -> String {
    uuid_text(&version_8(&key.sha256()))
}

/// Returns the first 16 bytes of a hash as a UUID of version 8, with the usual variant.
pub fn version_8(hash: &[u8; 32]) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&hash[..16]);
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// Returns a UUID as lower-case text with dashes.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let text = hex::encode(uuid);
    [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]].join("-")
}

/// Hashes the parts, each after its length, so that no two different lists give the same bytes.
pub fn digest(parts: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn base32(hash: &[u8; 32], characters: usize) -> String {
    let mut text = BASE32_NOPAD.encode(hash).to_ascii_lowercase();
    text.truncate(characters);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(cluster: &str, node: &str, installation: &str) -> Owner {
        Owner { cluster_id: cluster.into(), node_name: node.into(), installation: installation.into() }
    }

    #[test]
    fn a_name_follows_from_owner_and_key_and_suits_every_cloud() {
        let key = IdempotencyKey::derive("c", "s", 0);
        let name = unique(&owner("c", "node-1.example", "i"), &key);
        assert_eq!(name, unique(&owner("c", "node-1.example", "i"), &key));
        assert_eq!(name.len(), 38);
        assert!(name.starts_with(&prefix(&owner("c", "node-1.example", "j"))));
        assert!(name.starts_with(&prefix(&owner("c", "", "i"))), "the controller finds it");
        assert!(name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'2'..=b'7' | b'-')), "{name}");
    }

    #[test]
    fn another_owner_or_key_has_another_name() {
        let key = IdempotencyKey::derive("c", "s", 0);
        let names = [
            unique(&owner("c", "n", "i"), &key),
            unique(&owner("d", "n", "i"), &key),
            unique(&owner("c", "m", "i"), &key),
            unique(&owner("c", "n", "j"), &key),
            unique(&owner("cn", "", "i"), &key),
            unique(&owner("c", "n", "i"), &IdempotencyKey::derive("c", "s", 1)),
        ];
        let distinct: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        assert_ne!(prefix(&owner("c", "n", "i")), prefix(&owner("c", "m", "i")));
    }

    #[test]
    fn a_uuid_has_version_and_variant() {
        let one = uuid(&IdempotencyKey::derive("c", "s", 0));
        assert_eq!(one, uuid(&IdempotencyKey::derive("c", "s", 0)));
        assert_ne!(one, uuid(&IdempotencyKey::derive("c", "s", 1)));
        let parts: Vec<_> = one.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12]);
        assert!(
            one.as_bytes()[14] == b'8' && matches!(one.as_bytes()[19], b'8' | b'9' | b'a' | b'b'),
            "{one}"
        );
    }
}
