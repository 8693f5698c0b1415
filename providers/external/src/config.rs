//! Settings `provider.external.*`. Reads configuration, touches nothing else.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use peerpod_base::config::Reader;
use rustls_pki_types::ServerName;

use crate::Owner;

/// Most bytes in the path of a unix socket.
const LONGEST_SOCKET: usize = 107;
/// Most words of a command.
const MOST_WORDS: usize = 64;

/// Longest time from a start of the provider to its first answer.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time for one answer: shorter than the minute after which the node gives a call up.
const CALL_TIMEOUT: Duration = Duration::from_secs(55);
/// Interval of health checks.
const HEALTH_EVERY: Duration = Duration::from_secs(10);
/// Longest time for an answer to a health check. A program that this process started is then killed and started again.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// Settings of the provider.
#[derive(Debug, Clone)]
pub struct ExternalConfig {
    /// Address of the provider.
    pub endpoint: Endpoint,
    /// Owner of the VMs that the calls are about.
    pub owner: Owner,
    /// Longest time from the start of the program, or from the first dial, to the answer to the handshake.
    pub handshake_timeout: Duration,
    /// Deadline of one call on the connection.
    pub call_timeout: Duration,
    /// Interval between health checks.
    pub health_every: Duration,
    /// Longest time for the answer to a health check.
    pub health_timeout: Duration,
}

/// Address of the provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// Provider on this node.
    Unix {
        /// Path of the socket that it listens on.
        socket: PathBuf,
        /// User id of the provider, if it is neither root nor the user of this process.
        peer_uid: Option<u32>,
        /// Program and its arguments, if this process starts the provider; `None` if the provider is started elsewhere.
        command: Option<Vec<String>>,
    },
    /// Provider elsewhere in the cluster.
    Tls {
        /// Host and port.
        address: String,
        /// Name that its certificate must have.
        server_name: ServerName<'static>,
        /// Files for the certificates of both sides.
        files: TlsFiles,
    },
}

/// Certificate files in PEM format. They are read again for every connection, so that they can be replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// CA certificates, one or more, that verify the other side.
    pub ca: PathBuf,
    /// Certificate of this side, with the intermediates up to the CA that the other side trusts.
    pub certificate: PathBuf,
    /// Key of the certificate; only its owner may have access.
    pub key: PathBuf,
}

impl ExternalConfig {
    /// Reads `provider.external.*`; mistakes stay with the reader. The caller fills in the owner.
    pub fn read(reader: &mut Reader, state_dir: &Path) -> ExternalConfig {
        reader.section("provider.external", |section| {
        let at = "where the provider listens on this node; default with a command: external/provider.sock \
             in the state directory";
        let program = "program, by its whole path, and arguments that serve the provider on the socket; we \
             start it, and start it again";
        let socket: Option<PathBuf> = section.optional("socket", at);
        let command: Option<Vec<String>> = section.optional("command", program);
        let peer_uid: Option<u32> = section
            .optional("peer-uid", "user id of a provider on the socket that is neither root nor our user");
        let address: Option<String> =
            section.optional("address", "host:port of a provider elsewhere in the cluster (mutual TLS)");
        let name: Option<String> = section
            .optional("server-name", "name in that provider's certificate; default: the host of the address");
        let ca: Option<PathBuf> =
            section.optional("ca-file", "PEM file of the CA that signed the provider's certificate");
        let certificate: Option<PathBuf> =
            section.optional("cert-file", "PEM file of our certificate for the provider");
        let key: Option<PathBuf> =
            section.optional("key-file", "PEM file of its key, readable by its user alone (mode 0600)");
        let files = [("ca-file", ca), ("cert-file", certificate), ("key-file", key)];

        let endpoint = match address {
            Some(address) => {
                for key in ["socket", "command", "peer-uid"] {
                    if section.is_set(key) {
                        section.mistake(key, "not with provider.external.address; keep one of them");
                    }
                }
                remote(section, address, name, files)
            }
            None => {
                let given = files.iter().filter(|(_, file)| file.is_some()).map(|(key, _)| *key);
                let given: Vec<&str> = given.chain(name.as_ref().map(|_| "server-name")).collect();
                for key in given {
                    section.mistake(key, "only with provider.external.address; set that or leave this out");
                }
                on_this_node(section, state_dir, socket, command, peer_uid)
            }
        };
        ExternalConfig {
            endpoint,
            owner: Owner::default(),
            handshake_timeout: section.constant("handshake-timeout", "HANDSHAKE_TIMEOUT", HANDSHAKE_TIMEOUT),
            call_timeout: section.constant("call-timeout", "CALL_TIMEOUT", CALL_TIMEOUT),
            health_every: section.constant("health-every", "HEALTH_EVERY", HEALTH_EVERY),
            health_timeout: section.constant("health-timeout", "HEALTH_TIMEOUT", HEALTH_TIMEOUT),
        }
        })
    }
}

fn on_this_node(
    section: &mut Reader,
    state_dir: &Path,
    socket: Option<PathBuf>,
    command: Option<Vec<String>>,
    peer_uid: Option<u32>,
) -> Endpoint {
    if socket.is_none() && command.is_none() {
        let why = "the provider has no address; set this to start one, or socket or address to dial one";
        section.mistake("command", why);
    }
    if let Some(words) = &command {
        match words.first() {
            None => section.mistake("command", "no program; write its whole path and the arguments"),
            Some(first) if !first.starts_with('/') => {
                section.mistake("command", "not a whole path; write one like /usr/libexec/my-provider");
            }
            Some(_) if words.len() > MOST_WORDS || words.iter().any(|word| word.contains('\0')) => {
                section.mistake(
                    "command",
                    "too many arguments, or a NUL in one; write the program and its arguments",
                );
            }
            Some(_) => {}
        }
    }
    let socket = socket.unwrap_or_else(|| state_dir.join("external/provider.sock"));
    if !socket.is_absolute() {
        section.mistake("socket", "not a whole path; write one like /run/my-provider/provider.sock");
    }
    if socket.as_os_str().as_bytes().len() > LONGEST_SOCKET {
        let why =
            format!("longer than the {LONGEST_SOCKET} bytes a socket's path may have; set a shorter one");
        section.mistake("socket", why);
    }
    Endpoint::Unix { socket, peer_uid, command }
}

fn remote(
    section: &mut Reader,
    address: String,
    name: Option<String>,
    files: [(&str, Option<PathBuf>); 3],
) -> Endpoint {
    let host = match address.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) => {
            host.trim_start_matches('[').trim_end_matches(']').to_owned()
        }
        _ => {
            section.mistake("address", "not a host and a port; write them like provider.peerpod.svc:7443");
            String::new()
        }
    };
    let (key, text) = name.map_or(("address", host.clone()), |name| ("server-name", name));
    let server_name = ServerName::try_from(text).unwrap_or_else(|_| {
        if key != "address" || !host.is_empty() {
            section.mistake(key, "not a name that a certificate can have; write a DNS name or an IP address");
        }
        ServerName::try_from("invalid").expect("one argument is a name")
    });
    let [ca, certificate, key] = files.map(|(key, file)| {
        if file.is_none() {
            section.mistake(key, "missing beside provider.external.address; name the PEM file");
        }
        file.unwrap_or_default()
    });
    Endpoint::Tls { address, server_name, files: TlsFiles { ca, certificate, key } }
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::Sources;

    use super::*;

    fn read(flags: &[(&str, &str)]) -> (ExternalConfig, String) {
        let flags =
            flags.iter().map(|(key, value)| (format!("provider.external.{key}"), (*value).to_owned()));
        let sources = Sources { flags: flags.collect(), ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = ExternalConfig::read(&mut reader, Path::new("/var/lib/peerpod"));
        (config, reader.finish().err().map(|mistakes| mistakes.to_string()).unwrap_or_default())
    }

    #[test]
    fn a_command_alone_gets_a_socket_in_the_state_directory() {
        let (config, mistakes) = read(&[("command", "/usr/libexec/x, --region, y")]);
        assert_eq!(mistakes, "");
        let Endpoint::Unix { socket, command, .. } = config.endpoint else { panic!("{:?}", config.endpoint) };
        assert_eq!(socket, Path::new("/var/lib/peerpod/external/provider.sock"));
        assert_eq!(command.unwrap(), ["/usr/libexec/x", "--region", "y"]);
    }

    #[test]
    fn an_address_needs_its_three_files_and_gives_the_name() {
        let files = [("ca-file", "/a"), ("cert-file", "/b"), ("key-file", "/c")];
        for (address, name) in [("provider.svc:7443", "provider.svc"), ("[fd00::1]:7443", "fd00::1")] {
            let (config, mistakes) = read(&[&files[..], &[("address", address)]].concat());
            assert_eq!(mistakes, "");
            let Endpoint::Tls { server_name, .. } = config.endpoint else { panic!("{:?}", config.endpoint) };
            assert_eq!(server_name.to_str(), name);
        }
        let (_, mistakes) = read(&[("address", "provider.svc:7443")]);
        for (key, _) in files {
            assert!(mistakes.contains(key), "{key} in {mistakes}");
        }
    }

    #[test]
    fn all_mistakes_and_contradictions_are_reported() {
        let (_, mistakes) = read(&[]);
        assert!(mistakes.contains("the provider has no address"), "{mistakes}");
        let wrong = [
            ("command", "relative/path"),
            ("socket", "also/relative"),
            ("key-file", "/x"),
            ("server-name", "x"),
        ];
        let (_, mistakes) = read(&wrong);
        for (key, _) in wrong {
            assert!(mistakes.contains(key), "{key} in {mistakes}");
        }
        let wrong =
            [("address", "no-port"), ("socket", "/x"), ("command", "/x"), ("server-name", "not a name")];
        let (_, mistakes) = read(&wrong);
        for (key, _) in wrong {
            assert!(mistakes.contains(key), "{key} in {mistakes}");
        }
        let long = format!("/{}", "x".repeat(107));
        let (_, mistakes) = read(&[("socket", &long)]);
        assert!(mistakes.contains("107 bytes"), "{mistakes}");
    }
}
