//! Defines and reads the settings of the provider, `provider.byom.*`. Reads configuration, touches nothing else.

mod machines;

use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::Reader;

pub use machines::MachineAddress;

/// Settings of the provider.
#[derive(Debug, Clone)]
pub struct ByomConfig {
    /// Whether machines are claimed, not only listed and freed.
    pub creates: bool,
    /// Machines of the pool, each once.
    pub machines: Vec<MachineAddress>,
    /// User of the machines' SSH servers.
    pub username: String,
    /// File with the private key, in the form of OpenSSH or PEM, without a passphrase.
    pub private_key_file: PathBuf,
    /// Pinned host keys.
    pub host_keys: HostKeys,
    /// Longest time until a machine has accepted the connection and the key.
    pub connect_timeout: Duration,
    /// Longest wait for one answer of a machine.
    pub call_timeout: Duration,
    /// Time in which a machine that cannot be reached is not chosen for a pod.
    pub quarantine: Duration,
    /// Time in which an unreachable machine that may have a claim of this owner makes a list fail.
    pub list_patience: Duration,
}

/// Source of the pinned host keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostKeys {
    /// File in the form of OpenSSH's `known_hosts`: each machine has its own keys.
    KnownHosts(PathBuf),
    /// Folder with `*.pub` files: each machine may have any of these keys.
    Folder(PathBuf),
}

/// User of the machines' SSH servers.
const USERNAME: &str = "peerpod";
/// Longest time until a machine has accepted the connection and the key.
const CONNECT_TIMEOUT: &str = "10s";
/// Longest wait for one answer of a machine.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which a machine that cannot be reached is not chosen for a pod.
const QUARANTINE: Duration = Duration::from_secs(180);
/// Time in which an unreachable machine that may have a claim of this owner makes a list fail. A machine boots in less.
const LIST_PATIENCE: Duration = Duration::from_secs(180);

impl ByomConfig {
    /// Reads `provider.byom.*`. The reader collects the mistakes. A process that does not create (the cluster's
    /// controller) needs the same settings, because it frees the machines.
    pub fn read(reader: &mut Reader, creates: bool) -> ByomConfig {
        reader.section("provider.byom", |section| ByomConfig {
            creates,
            machines: machines(section),
            username: section.get("username", USERNAME, "user of the machines' SSH servers"),
            private_key_file: section
                .required("private-key-file", "file with the private key (Ed25519 or ECDSA) of that user")
                .unwrap_or_default(),
            host_keys: host_keys(section),
            connect_timeout: connect_timeout(section),
            call_timeout: section.constant("call-timeout", "CALL_TIMEOUT", CALL_TIMEOUT),
            quarantine: section.constant("quarantine", "QUARANTINE", QUARANTINE),
            list_patience: section.constant("list-patience", "LIST_PATIENCE", LIST_PATIENCE),
        })
    }
}

fn machines(section: &mut Reader) -> Vec<MachineAddress> {
    let help =
        "machines of the pool: addresses like 10.0.0.7 or 10.0.0.7:2222, and ranges like 10.0.0.10-10.0.0.20";
    let entries: Vec<String> = section.required("machines", help).unwrap_or_default();
    machines::parse(&entries).unwrap_or_else(|why| {
        section.mistake("machines", why);
        Vec::new()
    })
}

fn host_keys(section: &mut Reader) -> HostKeys {
    let file: Option<PathBuf> = section.optional(
        "known-hosts-file",
        "file with the machines' host keys, in the form of OpenSSH's known_hosts (ssh-keyscan writes it)",
    );
    let folder: Option<PathBuf> = section.optional(
        "host-keys-dir",
        "folder of *.pub files instead: every machine may have any of these host keys",
    );
    match (file, folder) {
        (Some(file), None) => HostKeys::KnownHosts(file),
        (None, Some(folder)) => HostKeys::Folder(folder),
        (file, folder) => {
            let why = match folder {
                Some(_) => "given together with host-keys-dir; keep one of them",
                None => "missing; give the machines' host keys by known-hosts-file or host-keys-dir",
            };
            section.mistake("known-hosts-file", why);
            HostKeys::KnownHosts(file.unwrap_or_default())
        }
    }
}

fn connect_timeout(section: &mut Reader) -> Duration {
    let help = "longest time until a machine has accepted the connection and the key";
    let timeout: Duration = section.get("connect-timeout", CONNECT_TIMEOUT, help);
    if timeout.is_zero() {
        section.mistake("connect-timeout", "zero; no machine would be reached");
    }
    timeout
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::Sources;
    use peerpod_test_reference as reference;

    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<ByomConfig, String> {
        let env = |key: &str| format!("PEERPOD_PROVIDER_BYOM_{key}").to_ascii_uppercase().replace('-', "_");
        let env = pairs.iter().map(|(key, value)| (env(key), (*value).to_owned())).collect();
        let mut reader = Reader::load(Sources { env, ..Sources::default() }, &["provider"], &[]).unwrap();
        let config = ByomConfig::read(&mut reader, true);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn the_least_configuration_is_read() {
        let config = read(&[
            ("machines", "10.0.0.7, 10.0.0.9-10.0.0.10"),
            ("private-key-file", "/etc/peerpod/byom/key"),
            ("known-hosts-file", "/etc/peerpod/byom/known_hosts"),
        ])
        .unwrap();
        let names: Vec<String> = config.machines.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["10.0.0.7", "10.0.0.9", "10.0.0.10"]);
        assert_eq!((config.username.as_str(), config.connect_timeout), ("peerpod", Duration::from_secs(10)));
    }

    #[test]
    fn documented_settings_are_up_to_date() {
        let mut reader = Reader::load(Sources::default(), &["provider"], &[]).unwrap();
        ByomConfig::read(&mut reader, true);
        let text = reference::settings(&reader.asked());
        reference::section("configuration.md", "byom", &text).unwrap();
    }

    #[test]
    fn mistakes_are_named() {
        let text = read(&[("connect-timeout", "0s")]).unwrap_err();
        for part in ["machines", "private-key-file", "give the machines' host keys", "no machine would be"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let text = read(&[
            ("machines", "10.0.0.7,host"),
            ("private-key-file", "/k"),
            ("known-hosts-file", "/h"),
            ("host-keys-dir", "/d"),
        ])
        .unwrap_err();
        assert!(text.contains("keep one of them") && text.contains("host is no address"), "{text}");
    }
}
