//! Binds the listening sockets of the relay, or takes them over from the old relay.

use std::{
    fs::File,
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use nix::fcntl::Flock;
use peerpod_base::{admin, listen::listen};
use peerpod_link::path_mtu::echo::{Echo, Known};
use tokio::net::{TcpListener, UnixListener};

use super::{AppError, path_error};
use crate::{
    config::RelayConfig,
    fd_handoff,
    handover::{self, name, new::Taken},
    socket::{self, Bound as Socket},
};

/// Listening sockets, bound by this process or taken over from another one.
pub(super) struct Sockets {
    pub(super) guests: TcpListener,
    pub(super) listen: SocketAddr,
    pub(super) probes: Option<Echo>,
    pub(super) paths: Known,
    pub(super) admin: TcpListener,
    pub(super) hypervisor: UnixListener,
    pub(super) control: UnixListener,
    pub(super) hand_off: OwnedFd,
    pub(super) takeover: OwnedFd,
    pub(super) lock: Lock,
    pub(super) names: Vec<Socket>,
}

/// Lock on the run-dir. It holds as long as one of its descriptors is open, in any process.
pub(super) enum Lock {
    Own(Flock<File>),
    Taken(OwnedFd),
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Lock::Own(lock) => lock.as_fd(),
            Lock::Taken(lock) => lock.as_fd(),
        }
    }
}

const NAMES: [&str; 4] =
    ["relay.sock", "hypervisor.sock", peerpod_base::fd_handoff::SOCKET, handover::SOCKET];

impl Sockets {
    pub(super) async fn bind(config: &RelayConfig, lock: Flock<File>) -> Result<Sockets, AppError> {
        let run_dir = &config.run_dir;
        let guests =
            listen(config.listen).await.map_err(|why| AppError::Listen { address: config.listen, why })?;
        let admin =
            listen(config.admin_listen).await.map_err(|why| admin::refused(config.admin_listen, why))?;
        let listen = guests.local_addr().map_err(|why| AppError::Listen { address: config.listen, why })?;
        let paths = Known::default();
        let probes = match Echo::bind(listen, paths.clone()).await {
            Ok(echo) => Some(echo),
            Err(error) => {
                // Without the echo, guests rely on the packet size that their kernel reports.
                tracing::warn!(%listen, %error, "the relay does not answer path probes (UDP) of guests");
                None
            }
        };
        let bind = |name: &str| {
            let path = run_dir.join(name);
            socket::bind(&path).map_err(path_error("listen on", &path))
        };
        let bind_packets = |name: &str| {
            let path = run_dir.join(name);
            fd_handoff::bind(&path).map_err(path_error("listen on", &path))
        };
        let (control, control_name) = bind(NAMES[0])?;
        let (hypervisor, hypervisor_name) = bind(NAMES[1])?;
        let (hand_off, hand_in_name) = bind_packets(NAMES[2])?;
        let (takeover, takeover_name) = bind_packets(NAMES[3])?;
        let names = vec![control_name, hypervisor_name, hand_in_name, takeover_name];
        let lock = Lock::Own(lock);
        Ok(Sockets {
            guests,
            listen,
            probes,
            paths,
            admin,
            hypervisor,
            control,
            hand_off,
            takeover,
            lock,
            names,
        })
    }

    /// Reads the sockets of another process. Their names belong to that process until [`Sockets::own`].
    pub(super) fn taken(taken: &mut Taken) -> io::Result<Sockets> {
        let (guests, listen) = taken.tcp(name::GUESTS)?;
        let paths = Known::default();
        let probes = taken
            .descriptor(name::PROBES)
            .ok()
            .map(|socket| Echo::go_on(socket, paths.clone()))
            .transpose()?;
        Ok(Sockets {
            guests,
            listen,
            probes,
            paths,
            admin: taken.tcp(name::ADMIN)?.0,
            hypervisor: taken.unix(name::HYPERVISOR)?,
            control: taken.unix(name::CONTROL)?,
            hand_off: taken.descriptor(name::HAND_IN)?,
            takeover: taken.descriptor(name::TAKEOVER)?,
            lock: Lock::Taken(taken.descriptor(name::LOCK)?),
            names: Vec::new(),
        })
    }

    /// Takes ownership of the socket names, which are then unlinked at the end.
    pub(super) fn own(mut self, run_dir: &Path) -> Sockets {
        self.names = NAMES.iter().filter_map(|name| Socket::of(&run_dir.join(name)).ok()).collect();
        self
    }

    /// Duplicates all sockets, for another process.
    pub(super) fn copies(&self) -> io::Result<handover::Named> {
        let mut copies = Vec::new();
        let mut copy = |name: &str, socket: BorrowedFd<'_>| {
            copies.push((name.to_owned(), socket.try_clone_to_owned()?));
            Ok::<_, io::Error>(())
        };
        copy(name::LOCK, self.lock.as_fd())?;
        copy(name::GUESTS, self.guests.as_fd())?;
        copy(name::ADMIN, self.admin.as_fd())?;
        copy(name::HYPERVISOR, self.hypervisor.as_fd())?;
        copy(name::CONTROL, self.control.as_fd())?;
        copy(name::HAND_IN, self.hand_off.as_fd())?;
        copy(name::TAKEOVER, self.takeover.as_fd())?;
        if let Some(probes) = &self.probes {
            copy(name::PROBES, probes.copy()?.as_fd())?;
        }
        Ok(copies)
    }
}
