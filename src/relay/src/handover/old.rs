//! The old relay's side of a handover: freezes, sends everything, and exits when the new relay has taken it. In every
//! other case it resumes.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use peerpod_base::fd_handoff::{accept, check_peer};
use peerpod_common::reactor;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use tokio::{
    io::Interest,
    sync::{Mutex, oneshot},
    task::JoinSet,
    time::timeout,
};

use super::{
    Named, OLDEST, Process, VERSION,
    new::{DOOR, ENDED, PROCESS, SANDBOX, WIREGUARD},
    protocol::{Item, Reason, What, Who, Wire, invalid},
};
use crate::{
    hypervisor::HypervisorHandle,
    pause::Pause,
    sandboxes::{Sandboxes, states::States},
    wireguard::WireGuard,
};

/// Time limit for the Hello of a connected peer.
const HELLO: Duration = Duration::from_secs(5);
/// Longest time that everything is frozen; shims and guests wait longer than this.
pub(crate) const STILL: Duration = Duration::from_secs(5);
/// Limit of open connections; only one of them takes over, and the others get a refusal.
const CONNECTIONS: usize = 8;

/// State and descriptors to hand over.
pub(crate) struct Giver {
    pub(crate) hypervisor: HypervisorHandle,
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) states: Arc<States>,
    pub(crate) wireguard: Arc<WireGuard>,
    pub(crate) pause: Pause,
    /// Duplicates of the process's own descriptors.
    pub(crate) named: Named,
}

/// Serves until the future is dropped; ends the process when another one has taken over.
pub(crate) async fn serve(listener: OwnedFd, giver: Arc<Mutex<Giver>>) {
    let listener = match reactor::register(listener, Interest::READABLE) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "takeover.sock is not served: an upgrade of the relay will end its pods");
            return std::future::pending().await;
        }
    };
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.async_io(Interest::READABLE, |listener| accept(listener)) => accepted,
            Some(_) = open.join_next() => continue,
        };
        match accepted {
            Ok(connection) if open.len() < CONNECTIONS => {
                open.spawn(one(connection, giver.clone()));
            }
            Ok(_) => tracing::warn!("handover refused: too many processes request one"),
            Err(error) => {
                tracing::warn!(%error, "accept on takeover.sock failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn one(connection: OwnedFd, giver: Arc<Mutex<Giver>>) {
    if let Err(error) = check_peer(&connection) {
        tracing::warn!(%error, "handover refused");
        return;
    }
    let Ok(wire) = Wire::new(connection) else { return };
    let asked = match timeout(HELLO, hello(&wire)).await {
        Ok(Ok(who)) => match giver.try_lock() {
            Ok(giver) => giver.hand_over(&wire, &who).await,
            Err(_) => Err(invalid("another handover is under way")),
        },
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    };
    if let Err(error) = asked {
        tracing::warn!(%error, "handover failed; this process goes on");
        // The peer may be gone.
        drop(timeout(HELLO, wire.say(What::No, &Reason { why: error.to_string() })).await);
    }
}

/// Reads the peer's Hello; fails if no version is common to both.
async fn hello(wire: &Wire) -> io::Result<Who> {
    let message = wire.hear().await?;
    if message.what != What::Hello {
        return Err(invalid("its first message is not a Hello"));
    }
    let who: Who = message.read()?;
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
struct SaysNo<'a>(&'a Wire);

impl Drop for SaysNo<'_> {
    fn drop(&mut self) {
        // The peer may be gone. If it misses this message, it sees the connection close and this process still running.
        drop(self.0.say_now(What::No, br#"{"why":"the new process had not taken over in time, or the running one ends; its log gives the reason"}"#));
    }
}

impl Giver {
    /// Hands over to the new relay. It returns only on failure; everything then resumes.
    async fn hand_over(&self, wire: &Wire, to: &Who) -> io::Result<()> {
        let version = to.versions.1.min(VERSION);
        let us = Who {
            pid: std::process::id(),
            program: env!("CARGO_PKG_VERSION").to_owned(),
            versions: (version, version),
        };
        wire.say(What::Welcome, &us).await?;
        tracing::info!(to = to.pid, program = to.program, "handover to another process begins");
        let began = Instant::now();
        // Dropped in this order when the function returns, which resumes everything.
        let (_thaw, thawed) = oneshot::channel();
        let shown = async {
            let _closed = self.pause.close().await;
            let (_still, sandboxes) = self.sandboxes.freeze().await.map_err(invalid)?;
            // In every case, also when this process ends, `No` is sent before anything here resumes.
            let _no = SaysNo(wire);
            let items = self.items(sandboxes, thawed).await?;
            for item in &items {
                wire.send_item(item).await?;
            }
            let (count, sent) = (items.len(), began.elapsed());
            drop(items);
            wire.say(What::End, &count).await?;
            let answer = wire.hear().await?;
            if answer.what != What::Taken {
                let why = answer.read().map_or_else(|_| "it gave no reason".to_owned(), |Reason { why }| why);
                return Err(invalid(format!("the new process does not take over: {why}")));
            }
            tracing::info!(to = to.pid, items = count, sent_in = ?sent, still_for = ?began.elapsed(), "handover to another process complete; this process exits");
            // This message transfers ownership and cannot be undone. Nothing may come between it and the exit, not even
            // a log line, which could block without a reader.
            wire.say_now(What::Yours, b"{}")?;
            std::process::exit(0)
        };
        match timeout(STILL, shown).await {
            Ok(result) => result,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the new process had not taken over after {STILL:?}"),
            )),
        }
    }

    async fn items(
        &self,
        sandboxes: Vec<(crate::sandboxes::Handed, Vec<OwnedFd>)>,
        thaw: oneshot::Receiver<()>,
    ) -> io::Result<Vec<Item>> {
        let mut names = Vec::new();
        let mut descriptors = Vec::new();
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
            Item::new(DOOR, &hypervisor, conns)?,
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
