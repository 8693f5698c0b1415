//! Marks of VMs. Labels hold hashes, by which the cloud selects; the description holds the exact values, as JSON, because
//! labels accept neither dots nor capital letters nor more than 63 characters. Pure.

use std::collections::BTreeMap;

use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, Owner};
use peerpod_provider_cloud::{Marks, names};

use crate::config::{ALPHABET, is_of_a_label};

/// Label with the hash of the cluster.
const CLUSTER: &str = "peerpod-cluster";
/// Label with the hash of cluster and node.
const NODE: &str = "peerpod-node";
/// Label with the hash of the idempotency key.
const KEY: &str = "peerpod-key";
/// Longest description that the cloud accepts, in bytes.
const MAX_DESCRIPTION: usize = 2048;
/// Longest name of a pod in the description; it is for people.
const MAX_SHOWN: usize = 253;

/// Returns the description of a VM: its exact marks.
///
/// # Errors
/// [`Error::Invalid`] when the names of cluster and node are too long for it.
pub(crate) fn description(
    request: &CreateRequest,
    key: &IdempotencyKey,
    owner: &Owner,
) -> Result<String, Error> {
    let mut marks = Marks::new(request, key, owner);
    marks.name = marks.name.map(|name| name.chars().take(MAX_SHOWN).collect());
    let text = marks.text();
    if text.len() > MAX_DESCRIPTION {
        return Err(Error::invalid(format!(
            "create of {}: its marks have more than the {MAX_DESCRIPTION} bytes of a description; shorten the name of \
             the cluster or of the node",
            request.name
        )));
    }
    Ok(text)
}

/// Returns the marks in a description; none of them, if it has another form.
pub(crate) fn read(description: &str) -> Marks {
    Marks::parse(description).unwrap_or_default()
}

/// Returns the labels of a VM: the administrator's, the request's, and the hashes, which come last, so that no label
/// replaces them. Surplus labels are left out, because the cloud would refuse the create.
pub(crate) fn labels(
    request: &CreateRequest,
    key: &IdempotencyKey,
    owner: &Owner,
    users: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let ours = [
        (CLUSTER, cluster(owner)),
        (NODE, node(owner)),
        (KEY, hash_of_key(key)),
        ("peerpod-installation", names::short(&[&owner.installation])),
    ];
    let mut labels = BTreeMap::new();
    for (name, value) in users.iter().chain(&request.labels) {
        let name = fit_name(name);
        if labels.len() + ours.len() < ALPHABET.max_marks || labels.contains_key(&name) {
            labels.insert(name, fit(value));
        }
    }
    labels.extend(ours.map(|(name, value)| (name.to_owned(), value)));
    labels
}

/// Returns the filter of lists for the VMs of this owner. Others may share the hashes, so the marks decide.
pub(crate) fn filter(owner: &Owner) -> String {
    let of_cluster = format!("(labels.{CLUSTER} = \"{}\")", cluster(owner));
    match owner.node_name.as_str() {
        "" => of_cluster,
        _ => format!("{of_cluster} AND (labels.{NODE} = \"{}\")", node(owner)),
    }
}

/// Returns the filter of lists for the VMs that this owner made with this key.
pub(crate) fn filter_by_key(owner: &Owner, key: &IdempotencyKey) -> String {
    format!("{} AND (labels.{KEY} = \"{}\")", filter(owner), hash_of_key(key))
}

fn cluster(owner: &Owner) -> String {
    names::short(&[&owner.cluster_id])
}

fn node(owner: &Owner) -> String {
    names::short(&[&owner.cluster_id, &owner.node_name])
}

/// Returns 16 characters for a key, 80 bits.
fn hash_of_key(key: &IdempotencyKey) -> String {
    names::short(&[key.as_str()]) + &names::short(&[key.as_str(), ""])
}

/// Returns a label's name for one of ours or of the administrator: `peerpod.pod` becomes `peerpod-pod`.
fn fit_name(name: &str) -> String {
    let fit = fit(name);
    match fit.starts_with(|first: char| first.is_ascii_lowercase()) {
        true => fit,
        false => format!("l{fit}").chars().take(ALPHABET.max_name).collect(),
    }
}

/// Returns a text as the cloud accepts it in a label. It is for people and for cost reports.
fn fit(text: &str) -> String {
    let label = text.chars().flat_map(char::to_lowercase);
    label.map(|c| if is_of_a_label(c) { c } else { '-' }).take(ALPHABET.max_value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(node: &str) -> Owner {
        Owner { cluster_id: "Cluster.1".into(), node_name: node.into(), installation: "i".into() }
    }

    fn key() -> IdempotencyKey {
        IdempotencyKey::derive("c", "s", 0)
    }

    #[test]
    fn the_description_has_the_exact_words() {
        let request = CreateRequest { name: "web-0".into(), ..CreateRequest::default() };
        let owner = owner("Node-1.example.com");
        let text = description(&request, &key(), &owner).unwrap();
        let marks = read(&text);
        assert_eq!(marks, Marks::new(&request, &key(), &owner));
        assert!(marks.are_of(&owner) && text.len() < MAX_DESCRIPTION, "{}", text.len());
        for other in ["", "my own VM", "[]", "{\"cluster\":7}"] {
            assert!(!read(other).are_of(&owner), "{other}");
        }
        let long = CreateRequest { name: "ä".repeat(900), ..request.clone() };
        assert!(description(&long, &key(), &owner).unwrap().len() < MAX_DESCRIPTION);
        let long = Owner { node_name: "n".repeat(2048), ..owner };
        assert_eq!(description(&request, &key(), &long).unwrap_err().class(), "invalid");
    }

    #[test]
    fn labels_fit_and_ours_come_last() {
        let mut given: BTreeMap<String, String> =
            (0..70).map(|n| (format!("l{n}"), "v".to_owned())).collect();
        given.insert("peerpod.pod".into(), "Web_0.ä".into());
        given.insert("0.Odd".into(), "x".repeat(99));
        given.insert("peerpod-node".into(), "another node".into());
        let request = CreateRequest { labels: given, ..CreateRequest::default() };
        let users = BTreeMap::from([("team".to_owned(), "blue".to_owned())]);
        let labels = labels(&request, &key(), &owner("n"), &users);
        assert_eq!((labels.len(), labels["team"].as_str()), (64, "blue"));
        assert_eq!(labels["peerpod-node"], node(&owner("n")));
        for (name, value) in &labels {
            assert!(name.len() <= 63 && value.len() <= 63, "{name}={value}");
            assert!(name.chars().chain(value.chars()).all(is_of_a_label), "{name}={value}");
            assert!(name.starts_with(|c: char| c.is_ascii_lowercase()), "{name}");
        }
        assert_eq!(fit("Web_0.ä"), "web_0--");
        assert_eq!(fit_name("peerpod.pod"), "peerpod-pod");
    }

    #[test]
    fn a_filter_selects_by_cluster_node_and_key() {
        let all = filter(&owner(""));
        assert_eq!(all.matches("labels.").count(), 1);
        let one = filter(&owner("n"));
        assert!(one.starts_with(&format!("{all} AND (labels.peerpod-node = \"")), "{one}");
        assert!(
            filter_by_key(&owner("n"), &key()).starts_with(&format!("{one} AND (labels.peerpod-key = \""))
        );
        assert_ne!(filter(&owner("n")), filter(&owner("m")));
    }
}
