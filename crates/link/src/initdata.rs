//! Parses and checks initdata: the measured TOML document that the owner of a confidential pod passes to its VM.
//!
//! Both ends use this code. The node parses initdata when it creates the pod, so that CreateVM returns any mistake;
//! the guest parses it on receipt. Pure; the caller bounds the length of the text.

use std::collections::BTreeMap;

use serde::Deserialize;
use sha2::{Digest, Sha256, Sha384, Sha512};

/// Most files in one initdata, and most bytes of a file name.
const MAX_FILES: usize = 64;
const MAX_NAME: usize = 64;
/// Names in the target folder that the guest itself uses.
const RESERVED: [&str; 7] =
    ["initdata", "initdata.digest", "auth.json", "guest", "images", "volumes", "hypervisor"];

/// Parsed and checked initdata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initdata {
    /// Digest of the whole text, byte for byte: `sha256:…`, `sha384:…` or `sha512:…`, lower-case hex.
    pub digest: String,
    /// Version of the format, `0.1.…`.
    pub version: String,
    /// Table `data`: contents by file name (`aa.toml`, `cdh.toml`, `policy.rego`, …).
    pub files: BTreeMap<String, String>,
}

/// Reason to refuse a text as initdata. It repeats no value of the table `data`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("initdata{0}")]
pub struct InitdataError(String);

#[derive(Deserialize)]
struct Text {
    algorithm: String,
    version: String,
    #[serde(default)]
    data: BTreeMap<String, String>,
}

impl Initdata {
    /// Parses the text as decoded by the shim.
    pub fn parse(text: &str) -> Result<Initdata, InitdataError> {
        let parsed: Text = toml::from_str(text).map_err(|error| {
            let before = error.span().map(|span| text.as_bytes().iter().take(span.start));
            let line = before.map_or(0, |bytes| 1 + bytes.filter(|byte| **byte == b'\n').count());
            malformed(&beginning(error.message(), 120), line)
        })?;
        let refused = |field, value: &str, known| {
            Err(InitdataError(format!(": {field} = {:?}; {known}", beginning(value, MAX_NAME))))
        };
        let digest = match parsed.algorithm.as_str() {
            "sha256" => hex::encode(Sha256::digest(text)),
            "sha384" => hex::encode(Sha384::digest(text)),
            "sha512" => hex::encode(Sha512::digest(text)),
            other => return refused("algorithm", other, "sha256, sha384 and sha512 are possible"),
        };
        if !parsed.version.starts_with("0.1.") {
            return refused("version", &parsed.version, "0.1.0 is understood");
        }
        for name in parsed.data.keys() {
            check_name(name).map_err(|why| {
                InitdataError(format!(": data has a file {:?}: {why}", beginning(name, MAX_NAME)))
            })?;
        }
        if parsed.data.len() > MAX_FILES {
            return Err(malformed("more than 64 files", 0));
        }
        Ok(Initdata {
            digest: format!("{}:{digest}", parsed.algorithm),
            version: parsed.version,
            files: parsed.data,
        })
    }

    /// Compares the digest with the announced one; an empty `wanted` announces none.
    pub fn is(&self, wanted: &str) -> Result<(), InitdataError> {
        if wanted.is_empty() || wanted == self.digest {
            return Ok(());
        }
        let (found, wanted) = (&self.digest, beginning(wanted, 160));
        Err(InitdataError(format!(
            " has the digest {found}, and {wanted} was announced: it was changed on its way"
        )))
    }
}

fn malformed(what: &str, line: usize) -> InitdataError {
    InitdataError(format!(
        " is not TOML with algorithm, version and a table data of texts: {what} (line {line})"
    ))
}

fn beginning(text: &str, characters: usize) -> String {
    text.chars().take(characters).collect()
}

fn check_name(name: &str) -> Result<(), &'static str> {
    if name.len() > MAX_NAME {
        return Err("longer than 64 characters");
    }
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    if !first || !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')) {
        return Err("use a name of letters, digits, '.', '-' and '_'");
    }
    if RESERVED.contains(&name) || name.ends_with(".sock") || name.ends_with(".new") {
        return Err("the name is reserved for the guest");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str = "algorithm = \"sha256\"\nversion = \"0.1.0\"\n\n[data]\n\"aa.toml\" = '''\n[token]\n'''\n\"policy.rego\" = \"package agent_policy\"\n";

    #[test]
    fn initdata_gives_files_and_digest() {
        let read = Initdata::parse(GOOD).unwrap();
        assert_eq!(read.files["aa.toml"], "[token]\n");
        assert_eq!(read.files.len(), 2);
        // printf … | sha256sum
        assert_eq!(read.digest, format!("sha256:{}", hex::encode(Sha256::digest(GOOD))));
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
        fn any_text_is_handled(text in ".{0,300}") {
            drop(Initdata::parse(&text));
            drop(Initdata::parse(&format!("{GOOD}{text}")));
        }
    }
}
