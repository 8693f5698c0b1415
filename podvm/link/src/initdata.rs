//! Initdata: what the owner of a confidential pod wants its VM to begin with, as TOML whose digest is measured.
//!
//! Both ends read it with this code: the node when the pod is made, so that a mistake is an answer to CreateVM, the guest
//! when it gets it. Pure; bounded by whoever hands the text in.

use std::collections::BTreeMap;

use serde::Deserialize;
use sha2::{Digest, Sha256, Sha384, Sha512};

/// Files in one; each has a name that is not too long.
const MAX_FILES: usize = 64;
const MAX_NAME: usize = 64;
/// Names of the guest's own in the folder where these files go.
const RESERVED: [&str; 7] =
    ["initdata", "initdata.digest", "auth.json", "guest", "images", "volumes", "hypervisor"];

/// Initdata, read and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initdata {
    /// Of the whole text, byte for byte: `sha256:…`, `sha384:…` or `sha512:…`, lower-case hex.
    pub digest: String,
    /// Version of the format, `0.1.…`.
    pub version: String,
    /// The table `data`: files by their names (`aa.toml`, `cdh.toml`, `policy.rego`, …).
    pub files: BTreeMap<String, String>,
}

/// Why a text is not initdata.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InitdataError {
    /// Not TOML, or a field is missing or of the wrong kind.
    #[error("initdata is not TOML with algorithm, version and a table data of texts: {what} (line {line})")]
    Malformed {
        /// What is wrong; repeats no value.
        what: String,
        /// From 1; 0 when not known.
        line: usize,
    },
    /// A hash that nobody measures with.
    #[error("initdata: algorithm = {0:?}; sha256, sha384 and sha512 are possible")]
    Algorithm(String),
    /// Another format.
    #[error("initdata: version = {0:?}; 0.1.0 is understood")]
    Version(String),
    /// A name that cannot be a file's, or is one of ours.
    #[error("initdata: data has a file {name:?}: {why}")]
    Name {
        /// As it is there, cut.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Not what was announced.
    #[error("initdata has the digest {found}, and {wanted} was announced: it was changed on its way")]
    Digest {
        /// Of what came.
        found: String,
        /// Of what should have come.
        wanted: String,
    },
}

#[derive(Deserialize)]
struct Text {
    algorithm: String,
    version: String,
    #[serde(default)]
    data: BTreeMap<String, String>,
}

impl Initdata {
    /// Reads the text, as the shim decoded it.
    ///
    /// # Errors
    /// See [`InitdataError`].
    pub fn parse(text: &str) -> Result<Initdata, InitdataError> {
        let parsed: Text = toml::from_str(text).map_err(|error| {
            let before = error.span().map(|span| text.as_bytes().iter().take(span.start));
            let line = before.map_or(0, |bytes| 1 + bytes.filter(|byte| **byte == b'\n').count());
            InitdataError::Malformed { what: error.message().chars().take(120).collect(), line }
        })?;
        let digest = match parsed.algorithm.as_str() {
            "sha256" => hex::encode(&Sha256::digest(text)),
            "sha384" => hex::encode(&Sha384::digest(text)),
            "sha512" => hex::encode(&Sha512::digest(text)),
            other => return Err(InitdataError::Algorithm(other.chars().take(MAX_NAME).collect())),
        };
        if !parsed.version.starts_with("0.1.") {
            return Err(InitdataError::Version(parsed.version.chars().take(MAX_NAME).collect()));
        }
        for name in parsed.data.keys() {
            check_name(name)
                .map_err(|why| InitdataError::Name { name: name.chars().take(MAX_NAME).collect(), why })?;
        }
        if parsed.data.len() > MAX_FILES {
            return Err(InitdataError::Malformed { what: "more than 64 files".to_owned(), line: 0 });
        }
        Ok(Initdata {
            digest: format!("{}:{digest}", parsed.algorithm),
            version: parsed.version,
            files: parsed.data,
        })
    }

    /// Whether it is the one that was announced; an empty `wanted` announces nothing.
    ///
    /// # Errors
    /// It is another.
    pub fn is(&self, wanted: &str) -> Result<(), InitdataError> {
        if wanted.is_empty() || wanted == self.digest {
            return Ok(());
        }
        let wanted = wanted.chars().take(160).collect();
        Err(InitdataError::Digest { found: self.digest.clone(), wanted })
    }
}

fn check_name(name: &str) -> Result<(), &'static str> {
    if name.len() > MAX_NAME {
        return Err("longer than 64 characters");
    }
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    if !first || !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')) {
        return Err("a file's name of letters, digits, '.', '-' and '_' would do");
    }
    if RESERVED.contains(&name) || name.ends_with(".sock") || name.ends_with(".new") {
        return Err("the name is the guest's own");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str = "algorithm = \"sha256\"\nversion = \"0.1.0\"\n\n[data]\n\"aa.toml\" = '''\n[token]\n'''\n\"policy.rego\" = \"package agent_policy\"\n";

    #[test]
    fn files_and_digest_come_out() {
        let read = Initdata::parse(GOOD).unwrap();
        assert_eq!(read.files["aa.toml"], "[token]\n");
        assert_eq!(read.files.len(), 2);
        // printf … | sha256sum
        assert_eq!(read.digest, format!("sha256:{}", hex::encode(&Sha256::digest(GOOD))));
        for (algorithm, digits) in [("sha384", 96), ("sha512", 128)] {
            let digest = Initdata::parse(&GOOD.replace("sha256", algorithm)).unwrap().digest;
            assert_eq!(digest.len(), algorithm.len() + 1 + digits);
        }
        assert!(read.is("").is_ok() && read.is(&read.digest).is_ok());
        let error = read.is("sha256:00").unwrap_err().to_string();
        assert!(error.contains("sha256:00 was announced"), "{error}");
        assert!(Initdata::parse("algorithm = \"sha384\"\nversion = \"0.1.0\"\n").unwrap().files.is_empty());
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| Initdata::parse(text).unwrap_err().to_string();
        assert!(error("H4sIAAAAAAAA").contains("is not TOML"));
        assert!(error("version = \"0.1.0\"").contains("algorithm"));
        assert!(error(&GOOD.replace("sha256", "md5")).contains("algorithm = \"md5\""));
        assert!(error(&GOOD.replace("0.1.0", "2.0.0")).contains("version = \"2.0.0\""));
        assert!(
            error(&GOOD.replace("\"package agent_policy\"", "7")).contains("line 8"),
            "{}",
            error(&GOOD.replace("\"package agent_policy\"", "7"))
        );
        for name in ["../etc/passwd", "/etc/passwd", ".hidden", "", "agent.sock", "initdata.digest", "a b"] {
            let text = GOOD.replace("policy.rego", name);
            assert!(error(&text).contains("data has a file"), "{name}: {}", error(&text));
        }
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in ".{0,300}") {
            drop(Initdata::parse(&text));
            drop(Initdata::parse(&format!("{GOOD}{text}")));
        }
    }
}
