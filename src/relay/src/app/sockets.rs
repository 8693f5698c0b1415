//! Binds the listening sockets of the relay, or takes them over from the old relay.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::anyhow;
use peerpod_base as base;
use peerpod_base::admin;
use peerpod_link::path_mtu::echo::{Echo, Known};
use tokio::net::{TcpListener, UnixListener};

use super::path_error;
use crate::config::RelayConfig;
use crate::handover::new::Taken;
use crate::handover::{self, name};
use crate::socket::{self, Bound as Socket};

/// Listening sockets, bound by this process or taken over from another one.
pub(super) struct Sockets {
    pub(super) guests: GuestSockets,
    pub(super) admin: TcpListener,
    pub(super) hypervisor: UnixListener,
    pub(super) control: UnixListener,
    pub(super) fd_handoff: OwnedFd,
    pub(super) handover: OwnedFd,
    /// Lock on the run-dir. It holds as long as one of its descriptors is open, in any process.
    pub(super) lock: OwnedFd,
    pub(super) names: Vec<Socket>,
}

/// Sockets that guests reach over the network.
pub(super) struct GuestSockets {
    pub(super) listener: TcpListener,
    pub(super) address: SocketAddr,
    pub(super) probes: Option<Echo>,
    pub(super) paths: Known,
}

impl GuestSockets {
    async fn bind(listen: SocketAddr) -> anyhow::Result<GuestSockets> {
        let failed = |why: io::Error| {
            anyhow!("listen for guests on {listen}: {why}; choose another relay.listen or free this one")
        };
        let listener = base::listen::listen(listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let paths = Known::default();
        let probes = match Echo::bind(address, paths.clone()).await {
            Ok(echo) => Some(echo),
            Err(error) => {
                // Without the echo, guests rely on the packet size that their kernel reports.
                tracing::warn!(listen = %address, %error, "the relay does not answer path probes (UDP) of guests");
                None
            }
        };
        Ok(GuestSockets { listener, address, probes, paths })
    }

    fn taken(taken: &mut Taken) -> io::Result<GuestSockets> {
        let listener = socket::tcp_listener(taken.descriptor(name::GUESTS)?)?;
        let address = listener.local_addr()?;
        let paths = Known::default();
        let probes = taken.descriptor(name::PROBES).ok();
        let probes = probes.map(|socket| Echo::go_on(socket, paths.clone())).transpose()?;
        Ok(GuestSockets { listener, address, probes, paths })
    }
}

const NAMES: [&str; 4] = ["relay.sock", "hypervisor.sock", base::fd_handoff::SOCKET, handover::SOCKET];

impl Sockets {
    pub(super) async fn bind(config: &RelayConfig, lock: OwnedFd) -> anyhow::Result<Sockets> {
        let guests = GuestSockets::bind(config.listen).await?;
        let listening = base::listen::listen(config.admin_listen).await;
        let admin = listening.map_err(|why| admin::refused(config.admin_listen, why))?;
        let [control, hypervisor, fd_handoff, handover] = NAMES.map(|name| config.run_dir.join(name));
        let (control, control_name) = socket::bind(&control).map_err(path_error("listen on", &control))?;
        let (hypervisor, hypervisor_name) =
            socket::bind(&hypervisor).map_err(path_error("listen on", &hypervisor))?;
        let (fd_handoff, fd_handoff_name) =
            socket::bind_packets(&fd_handoff).map_err(path_error("listen on", &fd_handoff))?;
        let (handover, handover_name) =
            socket::bind_packets(&handover).map_err(path_error("listen on", &handover))?;
        let names = vec![control_name, hypervisor_name, fd_handoff_name, handover_name];
        Ok(Sockets { guests, admin, hypervisor, control, fd_handoff, handover, lock, names })
    }

    /// Reads the sockets of another process. Their names belong to that process until [`Sockets::own`].
    pub(super) fn taken(taken: &mut Taken) -> io::Result<Sockets> {
        Ok(Sockets {
            guests: GuestSockets::taken(taken)?,
            admin: socket::tcp_listener(taken.descriptor(name::ADMIN)?)?,
            hypervisor: socket::unix_listener(taken.descriptor(name::HYPERVISOR)?)?,
            control: socket::unix_listener(taken.descriptor(name::CONTROL)?)?,
            fd_handoff: taken.descriptor(name::FD_HANDOFF)?,
            handover: taken.descriptor(name::HANDOVER)?,
            lock: taken.descriptor(name::LOCK)?,
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
        copy(name::GUESTS, self.guests.listener.as_fd())?;
        copy(name::ADMIN, self.admin.as_fd())?;
        copy(name::HYPERVISOR, self.hypervisor.as_fd())?;
        copy(name::CONTROL, self.control.as_fd())?;
        copy(name::FD_HANDOFF, self.fd_handoff.as_fd())?;
        copy(name::HANDOVER, self.handover.as_fd())?;
        if let Some(probes) = &self.guests.probes {
            copy(name::PROBES, probes.copy()?.as_fd())?;
        }
        Ok(copies)
    }
}
