//! Identifies the pod of a sandbox.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Error, SANDBOX_NAME, SANDBOX_NAMESPACE};

/// The longest name Kubernetes allows.
const MAX_NAME: usize = 253;

/// A pod by name. Display is `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The UID, known only from the Go shim under CRI-O; a pod of the same name may be another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Reads the two annotations that name the pod.
pub(super) fn read(name: &str, namespace: &str) -> Result<PodRef, Error> {
    if name.is_empty() {
        return Err(Error::Missing { key: SANDBOX_NAME });
    }
    let bad = |key, value: &str, why: &str| Error::Bad {
        key,
        value: value.chars().take(64).collect(),
        why: why.to_owned(),
    };
    // A name of Kubernetes has no underscore, so the two forms cannot be confused.
    let pod = if name.starts_with("k8s_") {
        let parts: Vec<&str> = name.split('_').collect();
        let [_, pod, from_name, uid, attempt] = parts[..] else {
            return Err(bad(
                SANDBOX_NAME,
                name,
                "not k8s_<pod>_<namespace>_<uid>_<attempt>; CRI-O sends that",
            ));
        };
        if uid.is_empty() || attempt.is_empty() || !attempt.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad(
                SANDBOX_NAME,
                name,
                "its uid or attempt is missing or not valid; CRI-O sends both",
            ));
        }
        if !namespace.is_empty() && namespace != from_name {
            return Err(bad(
                SANDBOX_NAMESPACE,
                namespace,
                "not the namespace in the sandbox's name; they must agree",
            ));
        }
        PodRef { namespace: from_name.to_owned(), name: pod.to_owned(), uid: Some(uid.to_owned()) }
    } else {
        PodRef { namespace: namespace.to_owned(), name: name.to_owned(), uid: None }
    };
    if pod.namespace.is_empty() {
        return Err(Error::Missing { key: SANDBOX_NAMESPACE });
    }
    // Both end up in log lines, labels and file names.
    let names = [(SANDBOX_NAME, &pod.name), (SANDBOX_NAMESPACE, &pod.namespace)];
    for (key, value) in names.into_iter().chain(pod.uid.iter().map(|uid| (SANDBOX_NAME, uid))) {
        if !is_name(value) {
            return Err(bad(
                key,
                value,
                "not a name of Kubernetes; it has letters, digits, '-' and '.', at most 253",
            ));
        }
    }
    Ok(pod)
}

fn is_name(text: &str) -> bool {
    let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= MAX_NAME
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'))
}
