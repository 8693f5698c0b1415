//! Connects to ports of the pod's localhost, for streams that the relay dialled. The kubelet and probes connect in the
//! node's side of the pod's namespace; the ports listen here, in the namespace that containers join.

use std::io;
use std::net::TcpStream as Unconnected;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use parking_lot::Mutex;
use peerpod_link::endpoint::Target;
use peerpod_podnet::netns::Netns;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::spawn_blocking;

/// The pod's namespace, kept open while its path refers to it.
#[derive(Debug)]
pub(crate) struct Localhost {
    podns: PathBuf,
    open: Mutex<Option<Netns>>,
}

impl Localhost {
    /// Makes the connector. `podns` is the path of the namespace that containers join; it may not exist yet.
    pub(crate) fn new(podns: PathBuf) -> Localhost {
        Localhost { podns, open: Mutex::new(None) }
    }

    /// Connects in the pod's namespace. Only the link limits the time; dropping the future cancels the attempt.
    pub(crate) async fn connect(self: Arc<Localhost>, target: Target) -> io::Result<TcpStream> {
        let socket = spawn_blocking(move || self.socket(target)).await.map_err(io::Error::other)??;
        TcpSocket::from_std_stream(Unconnected::from(socket)).connect(target.address()).await
    }

    /// Makes a socket, which belongs to the namespace of the calling thread for its whole life.
    fn socket(&self, target: Target) -> io::Result<OwnedFd> {
        let family = if target.v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let made = self.netns()?.run(|| socket(family, SockType::Stream, flags, SockProtocol::Tcp))?;
        Ok(made?)
    }

    fn netns(&self) -> io::Result<Netns> {
        let mut open = self.open.lock();
        match &*open {
            Some(netns) if netns.is_still_there() => Ok(netns.clone()),
            _ => {
                let netns = Netns::open(&self.podns).map_err(io::Error::other)?;
                Ok(open.insert(netns).clone())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpListener;

    use peerpod_podnet::netns::{create_named, delete_named};

    use super::*;

    #[tokio::test]
    async fn the_pods_localhost_differs_from_the_vms_and_a_new_namespace_is_noticed() {
        let path = PathBuf::from(format!("/run/netns/pplh{}", std::process::id()));
        let localhost = Arc::new(Localhost::new(path.clone()));
        let outside = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = outside.local_addr().unwrap().port();
        let target = |v6| Target { v6, port };
        assert!(localhost.clone().connect(target(false)).await.is_err(), "there is no namespace yet");
        for round in 0..2 {
            let netns = create_named(&path).unwrap();
            let up = std::process::Command::new("ip")
                .args(["-n", path.file_name().unwrap().to_str().unwrap(), "link", "set", "lo", "up"])
                .status();
            assert!(up.unwrap().success());
            for (v6, address) in [(false, "127.0.0.1"), (true, "::1")] {
                let refused = localhost.clone().connect(target(v6)).await.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "round {round}");
                let inside = netns.run(|| TcpListener::bind((address, port))).unwrap().unwrap();
                let connected = localhost.clone().connect(target(v6)).await.unwrap();
                let (_, peer) = inside.accept().unwrap();
                assert_eq!(peer, connected.local_addr().unwrap());
            }
            drop(netns);
            delete_named(&path).unwrap();
        }
    }
}
