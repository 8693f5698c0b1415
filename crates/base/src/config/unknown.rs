//! Finds given keys that no component requested: a misspelled key that is silently ignored is worse than a bad value.
//!
//! Values are never shown here: an unknown key may be a misspelled secret.

use super::node::{Node, join};
use super::reader::Reader;
use super::sources::{FILE_VARIABLE, PREFIX, TESTING_VARIABLE, env_name};
use super::suggest::nearest;

/// Variables with the project's prefix that are no settings: tests and benches use them.
const NOT_SETTINGS: [&str; 3] = ["PEERPOD_TEST_", "PEERPOD_BENCH_", "PEERPOD_DEMO_"];

pub(super) fn find(reader: &mut Reader) {
    let tree = std::mem::replace(&mut reader.tree, Node::Null);
    if let Node::Map(sections) = &tree {
        for (name, node) in sections {
            if !reader.others.contains(name) {
                in_file(reader, name, node);
            }
        }
    }
    in_environment(reader);
    in_flags(reader);
}

fn in_file(reader: &mut Reader, path: &str, node: &Node) {
    if is_known(reader, path) || is_left(reader, path) {
        return;
    }
    let below = format!("{path}.");
    let mut keys = reader.asked.keys().chain(&reader.removed).chain(&reader.left);
    let is_section = keys.any(|key| key.starts_with(&below));
    let is_mine = reader.mine.iter().any(|name| name == path);
    match node {
        Node::Map(entries) if is_section => {
            for (key, child) in entries {
                in_file(reader, &join(path, key), child);
            }
        }
        Node::Null if is_section || is_mine => {}
        Node::Map(entries) if entries.is_empty() && is_mine => {}
        _ => {
            let one_value = "one value where a section is expected; indent its keys below it";
            let why = if is_section { one_value.to_owned() } else { unknown_key(reader, path) };
            reader.note_file(path, None, why);
        }
    }
}

fn in_environment(reader: &mut Reader) {
    let known: Vec<String> = reader.asked.keys().map(|key| env_name(key)).collect();
    let settled: Vec<String> = reader
        .removed
        .iter()
        .chain(&reader.overridden)
        .chain(&reader.left)
        .map(|key| env_name(key))
        .collect();
    let elsewhere: Vec<String> =
        reader.others.iter().chain(&reader.left).map(|prefix| format!("{}_", env_name(prefix))).collect();
    let unknown: Vec<String> = reader
        .sources
        .env
        .iter()
        .filter(|(name, value)| {
            name.starts_with(PREFIX)
                && !value.is_empty()
                && ![FILE_VARIABLE, TESTING_VARIABLE].contains(&name.as_str())
                && !known.contains(name)
                && !settled.contains(name)
                && !elsewhere.iter().chain(&NOT_SETTINGS.map(str::to_owned)).any(|p| name.starts_with(p))
                && !is_service_link(name, value)
        })
        .map(|(name, _)| name.clone())
        .collect();
    for name in unknown {
        let meant = nearest(&name, known.iter().map(String::as_str));
        let why = advice("unknown variable", meant, "unset it, or see `peerpod config schema`");
        reader.note((1, 0), name, None, why);
    }
}

fn in_flags(reader: &mut Reader) {
    for (key, _) in reader.sources.flags.clone() {
        let top = key.split('.').next().unwrap_or_default();
        if is_known(reader, &key) || is_left(reader, &key) || reader.others.iter().any(|o| o == top) {
            continue;
        }
        let (place, why) = match key.strip_prefix("--") {
            Some(bare) if reader.asked.contains_key(bare) || bare == "config" => {
                (key.clone(), "has no value; write the value after the flag".to_owned())
            }
            Some(bare) => (key.clone(), unknown_key(reader, bare)),
            None if key.contains('.') => (format!("--{key}"), unknown_key(reader, &key)),
            None => (key.clone(), "not a flag; write --section.key value".to_owned()),
        };
        reader.note((2, 0), place, None, why);
    }
}

fn is_known(reader: &Reader, key: &str) -> bool {
    reader.asked.contains_key(key)
        || reader.removed.contains(key)
        || reader.overridden.iter().any(|overridden| overridden == key)
}

fn is_left(reader: &Reader, path: &str) -> bool {
    reader
        .left
        .iter()
        .any(|left| path.strip_prefix(left).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// Returns the reason why a key is unknown, with the known key that was probably meant.
fn unknown_key(reader: &Reader, path: &str) -> String {
    if !path.contains('.') {
        let sections = reader.mine.iter().chain(&reader.others).map(String::as_str);
        return advice("unknown section", nearest(path, sections), "remove it");
    }
    let known = || reader.asked.keys().map(String::as_str);
    let leaf = |key: &str| key.rsplit('.').next().map(str::to_owned);
    // The right name in the wrong section is as likely as a typo.
    let meant = nearest(path, known()).or_else(|| known().find(|key| leaf(key) == leaf(path)));
    advice("unknown key", meant, "remove it, or see `peerpod config schema`")
}

fn advice(what: &str, meant: Option<&str>, otherwise: &str) -> String {
    match meant {
        Some(meant) => format!("{what}; did you mean {meant}?"),
        None => format!("{what}; {otherwise}"),
    }
}

/// Whether a variable comes from Kubernetes, which sets variables for every Service of the namespace in each container.
/// A Service called `peerpod-…` gives `PEERPOD_…_SERVICE_HOST`, `…_PORT=tcp://…` and so on.
fn is_service_link(name: &str, value: &str) -> bool {
    let docker = name.rsplit_once("_PORT_").is_some_and(|(_, rest)| {
        rest.split_once('_').is_some_and(|(port, rest)| {
            port.bytes().all(|b| b.is_ascii_digit())
                && ["TCP", "UDP", "SCTP"].iter().any(|p| rest.starts_with(p))
        })
    });
    docker
        || name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT") && ["tcp://", "udp://", "sctp://"].iter().any(|p| value.starts_with(p))
}
