//! Keeps the connection to libvirtd: dialled at the first call, and again after it was lost.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::{LibvirtConnection, RpcError};

/// Longest time until libvirtd accepts a connection.
const DIAL: Duration = Duration::from_secs(5);

/// Address of libvirtd, and the driver to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Driver, like `qemu:///system`.
    pub driver: String,
    /// Sockets of libvirtd, the best one first.
    pub sockets: Vec<PathBuf>,
    /// Whether these are this host's own sockets. A named one may be forwarded from another host.
    pub is_own: bool,
}

impl Address {
    /// Parses a libvirt URI: `qemu:///system`, `qemu:///session`, `test:///default`, or with `+unix` and
    /// `?socket=PATH`.
    ///
    /// # Errors
    /// The reason, with the correct form.
    pub fn parse(uri: &str) -> Result<Address, String> {
        let (scheme, rest) =
            uri.split_once("://").ok_or("not a libvirt URI; write it like qemu:///system")?;
        let (driver, transport) = scheme.split_once('+').unwrap_or((scheme, "unix"));
        if transport != "unix" {
            return Err(format!(
                "transport {transport} is not supported; forward libvirtd's socket (ssh -L \
                 PATH:/run/libvirt/libvirt-sock HOST) and write {driver}+unix:///system?socket=PATH"
            ));
        }
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let Some(path) = place.strip_prefix('/').map(|path| path.trim_matches('/')) else {
            return Err(
                "another host's libvirtd is reached by a forwarded socket; write it like qemu:///system"
                    .to_owned(),
            );
        };
        match (driver, path) {
            ("qemu", "system" | "session") | ("test", _) => {}
            ("qemu", _) => return Err("write qemu:///system or qemu:///session".to_owned()),
            _ => {
                return Err(format!(
                    "driver {driver} is none that boots our images; write it like qemu:///system"
                ));
            }
        }
        let mut sockets = Vec::new();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("socket", socket)) if socket.starts_with('/') => sockets.push(PathBuf::from(socket)),
                Some(("mode", _)) => {}
                _ => return Err(format!("`{part}` is not understood; only socket=/PATH is")),
            }
        }
        let is_own = sockets.is_empty();
        if is_own {
            let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
            let run = match (path, runtime) {
                ("session", Some(runtime)) => runtime.join("libvirt"),
                ("session", None) => return Err("qemu:///session needs XDG_RUNTIME_DIR; or name its socket: qemu+unix:///session?socket=PATH".to_owned()),
                _ => PathBuf::from("/run/libvirt"),
            };
            // The second socket is that of the split daemons, on hosts without a proxy for the first.
            sockets = vec![run.join("libvirt-sock"), run.join("virtqemud-sock")];
        }
        Ok(Address { driver: format!("{driver}:///{path}"), sockets, is_own })
    }
}

/// Connection that is dialled when it is needed.
pub(crate) struct Redialer {
    address: Address,
    patience: Duration,
    current: Mutex<Option<Arc<LibvirtConnection>>>,
}

impl Redialer {
    /// Stores the address; dials at the first call.
    pub(crate) fn new(address: Address, patience: Duration) -> Redialer {
        Redialer { address, patience, current: Mutex::new(None) }
    }

    pub(crate) fn driver(&self) -> &str {
        &self.address.driver
    }

    /// Returns the connection; dials if there is none. [`RpcError::Lost`] names the tried sockets if libvirtd does not
    /// listen.
    pub(crate) async fn get(&self) -> Result<Arc<LibvirtConnection>, RpcError> {
        let mut current = self.current.lock().await;
        if let Some(connection) = current.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(Arc::clone(connection));
        }
        *current = None;
        let connection = LibvirtConnection::start(self.dial().await?, self.patience);
        connection.hello(&self.address.driver).await?;
        connection.listen().await?;
        let connection = Arc::new(connection);
        *current = Some(Arc::clone(&connection));
        Ok(connection)
    }

    async fn dial(&self) -> Result<UnixStream, RpcError> {
        let mut tried = Vec::new();
        for socket in &self.address.sockets {
            match timeout(DIAL, UnixStream::connect(socket)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                    return Err(RpcError::Refused(format!(
                        "{}: permission denied; run as root, or join the group that may use it (libvirt)",
                        socket.display()
                    )));
                }
                Ok(Err(error)) => tried.push(format!("{}: {error}", socket.display())),
                Err(_) => tried.push(format!("{}: no answer within {DIAL:?}", socket.display())),
            }
        }
        Err(RpcError::Lost(format!(
            "no libvirtd ({}); is it running? systemctl start libvirtd",
            tried.join("; ")
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn uris_are_read() {
        let system = Address::parse("qemu:///system").unwrap();
        assert_eq!(system.driver, "qemu:///system");
        assert!(system.is_own && system.sockets[0] == Path::new("/run/libvirt/libvirt-sock"));
        let own = Address::parse("qemu+unix:///session?socket=/tmp/x").unwrap();
        assert_eq!(
            own,
            Address { driver: "qemu:///session".into(), sockets: vec!["/tmp/x".into()], is_own: false }
        );
        assert_eq!(Address::parse("test+unix:///default?socket=/s").unwrap().driver, "test:///default");
    }

    #[test]
    fn an_unusable_uri_is_refused_with_a_remedy() {
        for (uri, part) in [
            ("", "not a libvirt URI"),
            ("qemu", "not a libvirt URI"),
            ("qemu+ssh://root@192.168.122.1/system?no_verify=1", "ssh -L"),
            ("qemu://host/system", "forwarded socket"),
            ("xen:///system", "driver xen"),
            ("qemu:///other", "qemu:///system"),
            ("qemu:///system?command=x", "`command=x`"),
            ("qemu:///system?socket=relative", "socket=/PATH"),
        ] {
            let why = Address::parse(uri).unwrap_err();
            assert!(why.contains(part), "{uri}: {why}");
        }
    }
}
