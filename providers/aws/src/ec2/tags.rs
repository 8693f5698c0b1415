//! Defines the tags on every resource of the provider. Pure.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::Tag;
use peerpod_provider_api::{CreateRequest, IdempotencyKey, Owner};

/// Tag with the cluster's name.
pub(crate) const CLUSTER: &str = "peerpod.cluster";
/// Tag with the node's name.
pub(crate) const NODE: &str = "peerpod.node";
/// Tag with the id of the installation.
pub(crate) const INSTALLATION: &str = "peerpod.installation";
/// Tag with the idempotency key of the create.
pub(crate) const KEY: &str = "peerpod.key";
/// Tag with the digest of the request.
pub(crate) const DIGEST: &str = "peerpod.digest";
/// Tag that the EC2 console shows as name.
pub(crate) const NAME: &str = "Name";

/// EC2's limits.
const MAX_KEY: usize = 128;
const MAX_VALUE: usize = 256;
const MAX_TAGS: usize = 50;

/// Whether a resource with these tags has this owner.
pub(crate) fn owns(owner: &Owner, tags: &BTreeMap<String, String>) -> bool {
    let tag = |key: &str| tags.get(key).map(String::as_str);
    owner.owns(tag(CLUSTER), tag(NODE), tag(INSTALLATION))
}

/// Reads the tags of a resource.
pub(crate) fn read(tags: Option<Vec<Tag>>) -> BTreeMap<String, String> {
    tags.unwrap_or_default().into_iter().filter_map(|tag| Some((tag.key?, tag.value?))).collect()
}

/// Returns the tags of a VM. The provider's own tags come last, so that no label replaces them.
pub(crate) fn of(
    request: &CreateRequest,
    key: &IdempotencyKey,
    owner: &Owner,
    users: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let ours = [
        (NAME, request.name.as_str()),
        (CLUSTER, &owner.cluster_id),
        (NODE, &owner.node_name),
        (INSTALLATION, &owner.installation),
        (KEY, key.as_str()),
        (DIGEST, &request.digest()),
    ];
    let mut tags = BTreeMap::new();
    for (key, value) in users.iter().chain(&request.labels) {
        // Later tags of the same name win. Surplus tags are left out, because EC2 would refuse the launch.
        if tags.len() < MAX_TAGS - ours.len() || tags.contains_key(&clean(key, MAX_KEY)) {
            tags.insert(clean(key, MAX_KEY), clean(value, MAX_VALUE));
        }
    }
    for (key, value) in ours {
        tags.insert(key.to_owned(), clean(value, MAX_VALUE));
    }
    tags
}

/// Replaces characters that EC2 does not accept. All its services accept letters, digits, spaces and `+-=._:/@`; labels
/// of pods may contain any character.
fn clean(text: &str, most: usize) -> String {
    let allowed = |c: char| c.is_alphanumeric() || " +-=._:/@".contains(c);
    let clean: String = text.chars().map(|c| if allowed(c) { c } else { '_' }).take(most).collect();
    // EC2 reserves this prefix.
    if clean.to_ascii_lowercase().starts_with("aws:") { clean.replacen(':', "_", 1) } else { clean }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_cannot_override_our_tags_and_all_tags_fit() {
        let mut labels: BTreeMap<String, String> =
            (0..60).map(|n| (format!("l{n}"), "v".to_owned())).collect();
        labels.insert(CLUSTER.to_owned(), "another cluster".to_owned());
        labels.insert("aws:odd".to_owned(), "a\nb<".repeat(200));
        let request = CreateRequest { name: "web-0".into(), labels, ..CreateRequest::default() };
        let owner = Owner { cluster_id: "c".into(), node_name: "n".into(), installation: "i".into() };
        let key = IdempotencyKey::derive("c", "s", 0);
        let tags = of(&request, &key, &owner, &BTreeMap::from([("team".to_owned(), "blue".to_owned())]));
        assert!(tags.len() <= MAX_TAGS, "{}", tags.len());
        assert_eq!((tags[CLUSTER].as_str(), tags["team"].as_str()), ("c", "blue"));
        assert_eq!((tags[KEY].as_str(), tags[NAME].as_str()), (key.as_str(), "web-0"));
        assert!(owns(&owner, &tags));
        assert!(!owns(&Owner { installation: "another".into(), ..owner }, &tags));
        let odd = &tags["aws_odd"];
        assert!(odd.chars().count() == 256 && odd.starts_with("a_b_"), "{odd}");
    }
}
