//! The old relay's side of a handover: freezes, sends everything, and exits when the new relay has taken it. In every
//! other case it resumes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{PidfdFlags, getpid, pidfd_open};
use tokio::sync::{Mutex, oneshot};
use tokio::time::timeout;

use super::new::{ENDED, HYPERVISOR, PROCESS, SANDBOX, WIREGUARD};
use super::protocol::{Item, MessageKind, ProcessInfo, Reason, Wire, invalid};
use super::{Named, OLDEST, Pause, Process, SOCKET, VERSION};
use crate::hypervisor::HypervisorHandle;
use crate::sandboxes::states::States;
use crate::sandboxes::{Handed, Sandboxes};
use crate::socket;
use crate::wireguard::WireGuard;

/// Time limit for the Hello of a connected peer.
const HELLO: Duration = Duration::from_secs(5);
/// Longest time that everything is frozen; shims and guests wait longer than this.
pub(crate) const STILL: Duration = Duration::from_secs(5);
/// Limit of open connections; only one of them takes over, and the others get a refusal.
const CONNECTIONS: usize = 8;

pub(crate) struct HandoverSource {
    pub(crate) hypervisor: HypervisorHandle,
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) states: Arc<States>,
    pub(crate) wireguard: Arc<WireGuard>,
    pub(crate) pause: Pause,
    pub(crate) named: Named,
}

/// Serves until the future is dropped; ends the process when another one has taken over.
pub(crate) async fn serve(listener: OwnedFd, source: Arc<Mutex<HandoverSource>>) {
    socket::serve_packets(listener, SOCKET, CONNECTIONS, |connection| one(connection, source.clone())).await;
    // Without handover the pods still run, and a new relay takes over only from an ended one.
    std::future::pending().await
}

async fn one(connection: OwnedFd, source: Arc<Mutex<HandoverSource>>) {
    let Ok(wire) = Wire::new(connection) else { return };
    let asked = match timeout(HELLO, hello(&wire)).await {
        Ok(Ok(who)) => match source.try_lock() {
            Ok(source) => source.hand_over(&wire, &who).await,
            Err(_) => Err(invalid("another handover is under way")),
        },
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    };
    if let Err(error) = asked {
        tracing::warn!(%error, "handover failed; this process goes on");
        // The peer may be gone.
        drop(timeout(HELLO, wire.send(MessageKind::No, &Reason { why: error.to_string() })).await);
    }
}

/// Reads the peer's Hello; fails if no version is common to both.
async fn hello(wire: &Wire) -> io::Result<ProcessInfo> {
    let message = wire.receive().await?;
    if message.kind != MessageKind::Hello {
        return Err(invalid("its first message is not a Hello"));
    }
    let who: ProcessInfo = message.read()?;
    let (oldest, newest) = who.versions;
    if newest < OLDEST || oldest > VERSION {
        return Err(invalid(format!(
            "the running peerpod-relay {} hands over in version {OLDEST} to {VERSION}, the new one ({}) \
             supports {oldest} to {newest}; upgrade by way of a version between them",
            env!("CARGO_PKG_VERSION"),
            who.program
        )));
    }
    Ok(who)
}

/// Sends `No` to the new relay when dropped.
struct SendNo<'a>(&'a Wire);

impl Drop for SendNo<'_> {
    fn drop(&mut self) {
        // The peer may be gone. If it misses this message, it sees the connection close and this process still running.
        drop(self.0.send_now(MessageKind::No, br#"{"why":"the new process had not taken over in time, or the running one ends; its log gives the reason"}"#));
    }
}

impl HandoverSource {
    /// Hands over to the new relay. It returns only on failure; everything then resumes.
    async fn hand_over(&self, wire: &Wire, to: &ProcessInfo) -> io::Result<()> {
        let version = to.versions.1.min(VERSION);
        wire.send(MessageKind::Welcome, &ProcessInfo::this(version, version)).await?;
        tracing::info!(to = to.pid, program = to.program, "handover to another process begins");
        let began = Instant::now();
        // Dropped in this order when the function returns, which resumes everything.
        let (_thaw, thawed) = oneshot::channel();
        let shown = async {
            let _closed = self.pause.clone().write_owned().await;
            let (_still, sandboxes) = self.sandboxes.freeze().await.map_err(invalid)?;
            // In every case, also when this process ends, `No` is sent before anything here resumes.
            let _no = SendNo(wire);
            let items = self.items(sandboxes, thawed).await?;
            for item in &items {
                wire.send_item(item).await?;
            }
            let (count, sent) = (items.len(), began.elapsed());
            drop(items);
            wire.send(MessageKind::End, &count).await?;
            let answer = wire.receive().await?;
            if answer.kind != MessageKind::Taken {
                let why = answer.reason();
                return Err(invalid(format!("the new process does not take over: {why}")));
            }
            tracing::info!(to = to.pid, items = count, sent_in = ?sent, still_for = ?began.elapsed(), "handover to another process complete; this process exits");
            // This message transfers ownership and cannot be undone. Nothing may come between it and the exit, not even
            // a log line, which could block without a reader.
            wire.send_now(MessageKind::Yours, b"{}")?;
            std::process::exit(0)
        };
        timeout(STILL, shown).await.unwrap_or_else(|_| {
            let why = format!("the new process had not taken over after {STILL:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        })
    }

    async fn items(
        &self,
        sandboxes: Vec<(Handed, Vec<OwnedFd>)>,
        thaw: oneshot::Receiver<()>,
    ) -> io::Result<Vec<Item>> {
        let (mut names, mut descriptors) = (Vec::new(), Vec::new());
        for (name, descriptor) in &self.named {
            names.push(name.clone());
            descriptors.push(descriptor.as_fd().try_clone_to_owned()?);
        }
        // A pidfd, by which the new process detects the end of this one.
        names.push(ENDED.to_owned());
        descriptors.push(pidfd_open(getpid(), PidfdFlags::empty())?);
        let (hypervisor, conns) = self.hypervisor.freeze(thaw).await?;
        let (epoch, version) = (self.states.epoch().to_owned(), self.states.version());
        let mut items = vec![
            Item::new(PROCESS, &Process { epoch, version, names }, descriptors)?,
            Item::new(HYPERVISOR, &hypervisor, conns)?,
        ];
        if let Some(handed) = self.wireguard.show()? {
            let (detail, names, descriptors) = handed.into_parts();
            items.push(Item::new(WIREGUARD, &(detail, names), descriptors)?);
        }
        for (sandbox, descriptors) in sandboxes {
            items.push(Item::new(SANDBOX, &sandbox, descriptors)?);
        }
        Ok(items)
    }
}
