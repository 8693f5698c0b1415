//! Merges pull secrets of both Kubernetes forms into one `.dockerconfigjson`. Pure. Secrets are never printed, and
//! errors repeat no part of a secret.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;
use zeroize::Zeroizing;

/// Largest merged text in bytes. It travels to the guest in one message of at most 4 MiB, beside the pod's initdata.
pub const MOST: usize = 2 << 20;

/// Names of Docker Hub in such files.
const HUB: [&str; 3] = ["index.docker.io", "docker.io", "registry-1.docker.io"];

/// Form of a pull secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Type `kubernetes.io/dockerconfigjson`, key `.dockerconfigjson`: entries below `auths`.
    DockerConfigJson,
    /// Type `kubernetes.io/dockercfg`, key `.dockercfg`: the entries themselves.
    DockerCfg,
}

impl Form {
    /// Returns the form of a secret of this type; `None`: the secret is no pull secret.
    pub fn of_type(kind: &str) -> Option<Form> {
        match kind {
            "kubernetes.io/dockerconfigjson" => Some(Form::DockerConfigJson),
            "kubernetes.io/dockercfg" => Some(Form::DockerCfg),
            _ => None,
        }
    }

    /// Returns the key in the secret's data.
    pub fn key(self) -> &'static str {
        match self {
            Form::DockerConfigJson => ".dockerconfigjson",
            Form::DockerCfg => ".dockercfg",
        }
    }
}

/// Reasons to refuse a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// The value is not JSON of the form.
    #[error(
        "{key} is not of its form ({what} at line {line}); make it with `kubectl create secret docker-registry`"
    )]
    Malformed {
        /// The secret's key.
        key: &'static str,
        /// Kind of mistake.
        what: &'static str,
        /// Line of the mistake, counted from 1.
        line: usize,
    },
    /// The merged text is too large.
    #[error(
        "the pull secrets together have more than {MOST} bytes; remove entries of registries that the pod does not need"
    )]
    TooLarge,
}

type Entries = BTreeMap<String, Box<RawValue>>;

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    auths: Entries,
}

/// Merged entries of several secrets. For one registry (and path) the first entry counts, the one a kubelet would try
/// first.
#[derive(Default)]
pub struct Merged {
    /// Keyed by registry as kubelet normalises it; the value holds the key as it was written.
    entries: BTreeMap<String, (String, Zeroizing<String>)>,
}

impl Merged {
    /// Adds the secret's entries for registries that have none yet.
    ///
    /// # Errors
    /// The secret is malformed; then none of its entries is added.
    pub fn add(&mut self, form: Form, bytes: &[u8]) -> Result<(), Bad> {
        let entries = match form {
            Form::DockerConfigJson => serde_json::from_slice::<File>(bytes).map(|file| file.auths),
            Form::DockerCfg => serde_json::from_slice::<Entries>(bytes),
        };
        let malformed = |error: serde_json::Error| Bad::Malformed {
            key: form.key(),
            what: match error.classify() {
                serde_json::error::Category::Data => "a field of the wrong kind",
                serde_json::error::Category::Eof => "it ends early",
                _ => "not JSON",
            },
            line: error.line(),
        };
        let mut taken = Vec::new();
        for (key, entry) in entries.map_err(malformed)? {
            // One entry that is no object would make the guest refuse all of them.
            let text: Zeroizing<String> = Zeroizing::new(String::from(Box::<str>::from(entry)));
            serde_json::from_str::<Entry>(&text).map_err(malformed)?;
            taken.push((registry(&key), (key, text)));
        }
        for (registry, entry) in taken {
            self.entries.entry(registry).or_insert(entry);
        }
        Ok(())
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns one `.dockerconfigjson`; empty text where there is no entry.
    ///
    /// # Errors
    /// [`Bad::TooLarge`].
    pub fn write(&self) -> Result<Zeroizing<String>, Bad> {
        let mut text = Zeroizing::new(String::new());
        if self.is_empty() {
            return Ok(text);
        }
        let room: usize = self.entries.values().map(|(key, entry)| key.len() * 6 + entry.len() + 8).sum();
        // Allocated once: a growing text would leave copies of secrets in memory.
        text.reserve(room.min(MOST) + 16);
        text.push_str("{\"auths\":{");
        for (index, (key, entry)) in self.entries.values().enumerate() {
            if index > 0 {
                text.push(',');
            }
            text.push_str(&serde_json::Value::from(key.as_str()).to_string());
            text.push(':');
            text.push_str(entry);
            if text.len() + 2 > MOST {
                return Err(Bad::TooLarge);
            }
        }
        text.push_str("}}");
        Ok(text)
    }
}

/// Fields of an entry that its readers need; their types are checked. Other fields pass through unchecked.
#[derive(Deserialize)]
#[expect(dead_code, reason = "only its form is looked at")]
struct Entry {
    #[serde(default)]
    auth: Box<str>,
    #[serde(default)]
    username: Box<str>,
    #[serde(default)]
    password: Box<str>,
    #[serde(default)]
    registrytoken: Box<str>,
}

/// Returns the key by which kubelet compares registries: without scheme, without `/v1/` and `/v2/`, and with one name
/// for Docker Hub.
fn registry(key: &str) -> String {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    let path = path.strip_prefix("v1/").or_else(|| path.strip_prefix("v2/")).unwrap_or(path);
    let path = match path.trim_end_matches('/') {
        "v1" | "v2" => "",
        other => other,
    };
    let host = host.to_ascii_lowercase();
    let host = if HUB.contains(&host.as_str()) { HUB[0] } else { &host };
    format!("{host}/{path}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn merged(secrets: &[(Form, Value)]) -> Value {
        let mut merged = Merged::default();
        for (form, secret) in secrets {
            merged.add(*form, secret.to_string().as_bytes()).unwrap();
        }
        serde_json::from_str(&merged.write().unwrap()).unwrap()
    }

    #[test]
    fn both_forms_are_merged_and_a_registrys_first_entry_counts() {
        let pod = json!({"auths": {
            "https://r.example:5000/v1/": {"auth": "cG9kOnB3", "email": "a@b"},
            "docker.io": {"username": "hub", "password": "1"},
        }});
        let account = json!({
            "r.example:5000": {"auth": "YWNjb3VudDpwdw=="},
            "r.example:5000/team": {"username": "team", "password": "2"},
            "https://index.docker.io/v1/": {"username": "later", "password": "3"},
        });
        let got = merged(&[(Form::DockerConfigJson, pod), (Form::DockerCfg, account)]);
        let expected = json!({"auths": {
            "https://r.example:5000/v1/": {"auth": "cG9kOnB3", "email": "a@b"},
            "docker.io": {"username": "hub", "password": "1"},
            "r.example:5000/team": {"username": "team", "password": "2"},
        }});
        assert_eq!(got, expected);
    }

    #[test]
    fn a_malformed_secret_is_named_without_its_content_and_others_stay() {
        let mut merged = Merged::default();
        merged.add(Form::DockerConfigJson, br#"{"auths":{"a":{"auth":"eDp5"}}}"#).unwrap();
        for (form, text) in [
            (Form::DockerConfigJson, "geheim"),
            (Form::DockerConfigJson, r#"{"auths":{"b":{"auth":7777}}}"#),
            (Form::DockerConfigJson, r#"{"auths":["geheim"]}"#),
            (Form::DockerCfg, r#"{"b":"geheim"}"#),
            (Form::DockerCfg, r#"{"b":{"#),
        ] {
            let error = merged.add(form, text.as_bytes()).unwrap_err();
            let said = format!("{error} {error:?}");
            assert!(
                said.contains(form.key()) && !said.contains("geheim") && !said.contains("7777"),
                "{said}"
            );
        }
        assert_eq!(*merged.write().unwrap(), r#"{"auths":{"a":{"auth":"eDp5"}}}"#);
        assert_eq!(*Merged::default().write().unwrap(), "");
    }

    #[test]
    fn too_large_secrets_are_refused_and_others_pass() {
        let secret = |name: &str, length: usize| {
            json!({"auths": {name: {"username": "u", "password": "p".repeat(length)}}}).to_string()
        };
        let mut merged = Merged::default();
        merged.add(Form::DockerConfigJson, secret("a", 1_000_000).as_bytes()).unwrap();
        merged.add(Form::DockerConfigJson, secret("b", 1_000_000).as_bytes()).unwrap();
        assert!(merged.write().unwrap().len() > 2_000_000);
        merged.add(Form::DockerConfigJson, secret("c", 200_000).as_bytes()).unwrap();
        assert_eq!(merged.write().unwrap_err(), Bad::TooLarge);
    }
}
