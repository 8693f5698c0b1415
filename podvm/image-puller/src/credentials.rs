//! Selects the credentials for a registry from a `.dockerconfigjson`. Pure.
//!
//! Keys have the usual forms: `registry.example`, with a port, a path, a scheme or a star for one label of the host's
//! name. The most exact key that matches is tried first. Nothing here is ever printed.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use oci_client::secrets::RegistryAuth;
use serde::Deserialize;

/// Size limit in bytes; larger texts are refused.
const MAX_LEN: usize = 2 << 20;
/// Limit of credentials that are tried for one image.
const MOST: usize = 16;
/// Names of Docker Hub in such files.
const HUB: [&str; 3] = ["index.docker.io", "docker.io", "registry-1.docker.io"];

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    registrytoken: String,
}

/// Returns the credentials for the registry (as `host[:port]`) and repository, the most exact first. An empty text has
/// none. An error never repeats any of the text.
pub(crate) fn for_image(text: &str, registry: &str, repository: &str) -> Result<Vec<RegistryAuth>, String> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    if text.len() > MAX_LEN {
        return Err(format!("the pull secret has more than {MAX_LEN} bytes"));
    }
    let file: File = serde_json::from_str(text).map_err(|error| {
        let what = match error.classify() {
            serde_json::error::Category::Data => "a field of the wrong kind",
            serde_json::error::Category::Eof => "it ends early",
            _ => "not JSON",
        };
        let at = format!("{what} at line {}", error.line());
        format!("the pull secret is not a .dockerconfigjson ({at}): it begins with {{\"auths\": ...}}")
    })?;
    let fits =
        |(key, entry): (&String, &Entry)| Some((fits(key, registry, repository)?, entry.credential()?));
    let mut fitting: Vec<(usize, RegistryAuth)> = file.auths.iter().filter_map(fits).collect();
    fitting.sort_by_key(|(exact, _)| std::cmp::Reverse(*exact));
    Ok(fitting.into_iter().map(|(_, credential)| credential).take(MOST).collect())
}

impl Entry {
    fn credential(&self) -> Option<RegistryAuth> {
        if !self.registrytoken.is_empty() {
            return Some(RegistryAuth::Bearer(self.registrytoken.clone()));
        }
        if !self.username.is_empty() {
            return Some(RegistryAuth::Basic(self.username.clone(), self.password.clone()));
        }
        let decoded = String::from_utf8(STANDARD.decode(self.auth.trim()).ok()?).ok()?;
        let (user, password) = decoded.split_once(':')?;
        // Docker once padded with zero bytes.
        Some(RegistryAuth::Basic(user.to_owned(), password.trim_end_matches('\0').to_owned()))
    }
}

/// Returns how exactly a key matches: the length of its path and its host; `None`: not at all.
fn fits(key: &str, registry: &str, repository: &str) -> Option<usize> {
    let key = key.trim_start_matches("https://").trim_start_matches("http://");
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    // Suffixes that older tools write behind the host.
    let path = match path.trim_end_matches('/') {
        "v1" | "v2" => "",
        other => other,
    };
    let hub = |name: &str| HUB.contains(&name);
    let same_host = host.eq_ignore_ascii_case(registry) || (hub(host) && hub(registry));
    if !(same_host || host.contains('*') && stars(host, registry)) {
        return None;
    }
    let below = path.is_empty()
        || repository.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    below.then_some(path.len() * 1024 + if same_host { 1 } else { 0 })
}

/// Matches a pattern in which `*` stands for any part of one label; ports must be the same.
fn stars(pattern: &str, registry: &str) -> bool {
    let split = |text: &str| {
        let (host, port) = text.split_once(':').unwrap_or((text, ""));
        (host.split('.').map(str::to_ascii_lowercase).collect::<Vec<_>>(), port.to_owned())
    };
    let ((pattern, one), (host, other)) = (split(pattern), split(registry));
    one == other
        && pattern.len() == host.len()
        && pattern.iter().zip(&host).all(|(pattern, label)| star(pattern, label))
}

fn star(pattern: &str, label: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == label,
        Some((before, after)) => label
            .strip_prefix(before)
            .is_some_and(|rest| rest.len() >= after.len() && rest.ends_with(after) && !after.contains('*')),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn users(text: &str, registry: &str, repository: &str) -> Vec<String> {
        let name = |credential| match credential {
            RegistryAuth::Basic(user, password) => format!("{user}:{password}"),
            RegistryAuth::Bearer(token) => token,
            RegistryAuth::Anonymous => String::new(),
        };
        for_image(text, registry, repository).unwrap().into_iter().map(name).collect()
    }

    #[test]
    fn the_most_exact_match_comes_first_and_other_hosts_are_left_out() {
        let text = r#"{"auths":{
            "https://index.docker.io/v1/":{"auth":"aHViOnB3"},
            "r.example:5000":{"username":"plain","password":"p:w"},
            "r.example:5000/team":{"username":"team","password":"x"},
            "*.example:5000":{"username":"star","password":"x"},
            "other.example":{"registrytoken":"token"}}}"#;
        assert_eq!(users(text, "r.example:5000", "team/app"), ["team:x", "plain:p:w", "star:x"]);
        assert_eq!(users(text, "r.example:5000", "teamwork/app"), ["plain:p:w", "star:x"]);
        assert_eq!(users(text, "index.docker.io", "library/busybox"), ["hub:pw"]);
        assert_eq!(users(text, "other.example", "x"), ["token"]);
        assert!(users(text, "a.b.example:5000", "x").is_empty());
        assert!(users(text, "r.example", "x").is_empty());
        assert!(users("", "r.example", "x").is_empty());
    }

    #[test]
    fn mistakes_are_named_without_the_secret() {
        let error = for_image(r#"{"auths":{"r":{"auth":7777}}}"#, "r", "x").unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(text.contains("dockerconfigjson") && !text.contains("7777"), "{text}");
        assert_eq!(
            for_image(&" x".repeat(MAX_LEN), "r", "x"),
            Err(format!("the pull secret has more than {MAX_LEN} bytes"))
        );
        let entry = RegistryAuth::Basic("user".into(), "geheim".into());
        assert!(!format!("{entry:?}").contains("geheim"));
    }

    proptest! {
        #[test]
        fn any_secret_is_handled(text in ".{0,200}", registry in "[a-z.:*]{0,20}", key in "[a-z.:*/]{0,20}") {
            drop(for_image(&text, &registry, "a/b"));
            drop(for_image(&format!(r#"{{"auths":{{"{key}":{{"auth":"YTpi"}}}}}}"#), &registry, "a/b"));
        }
    }
}
