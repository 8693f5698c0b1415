//! The old process's side: stands still, shows everything, and leaves when the new one has it; in every other case goes on.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use peerpod_base::handin::{accept, check_peer};
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
    take::{DOOR, ENDED, PROCESS, SANDBOX, WIREGUARD},
    wire::{Item, Reason, What, Who, Wire, invalid},
};
use crate::{
    door::DoorHandle,
    gate::Gate,
    sandboxes::{Sandboxes, states::States},
    wireguard::WireGuard,
};

/// Who connected must have said who it is in this time.
const HELLO: Duration = Duration::from_secs(5);
/// For so long everything stands still at the most; shims and guests wait longer than that.
pub(crate) const STILL: Duration = Duration::from_secs(5);
/// Connections at once; all but one are told so.
const CONNECTIONS: usize = 8;

/// What is handed over.
pub(crate) struct Giver {
    pub(crate) door: DoorHandle,
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) states: Arc<States>,
    pub(crate) wireguard: Arc<WireGuard>,
    pub(crate) gate: Gate,
    /// Copies of what the process itself holds.
    pub(crate) named: Named,
}

/// Serves until it is dropped; ends the process when another one has taken its place.
pub(crate) async fn serve(listener: OwnedFd, giver: Arc<Mutex<Giver>>) {
    let listener = match reactor::register(listener, Interest::READABLE) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "an upgrade of the relay will cost its pods: takeover.sock is not served");
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
            Ok(_) => tracing::warn!("a takeover is refused: too many ask"),
            Err(error) => {
                tracing::warn!(%error, "accept on takeover.sock failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn one(connection: OwnedFd, giver: Arc<Mutex<Giver>>) {
    if let Err(error) = check_peer(&connection) {
        tracing::warn!(%error, "a takeover is refused");
        return;
    }
    let Ok(wire) = Wire::new(connection) else { return };
    let asked = match timeout(HELLO, hello(&wire)).await {
        Ok(Ok(who)) => match giver.try_lock() {
            Ok(giver) => giver.hand_over(&wire, &who).await,
            Err(_) => Err(invalid("another process takes over just now")),
        },
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    };
    if let Err(error) = asked {
        tracing::warn!(%error, "no takeover; this process goes on");
        // The other end may be gone.
        drop(timeout(HELLO, wire.say(What::No, &Reason { why: error.to_string() })).await);
    }
}

/// Who asks, if this is somebody who understands us.
async fn hello(wire: &Wire) -> io::Result<Who> {
    let message = wire.hear().await?;
    if message.what != What::Hello {
        return Err(invalid("it did not say hello"));
    }
    let who: Who = message.read()?;
    let (oldest, newest) = who.versions;
    if newest < OLDEST || oldest > VERSION {
        return Err(invalid(format!(
            "the running peerpod-relay {} hands over in version {OLDEST} to {VERSION}, the new one ({}) understands {oldest} to {newest}; \
             upgrade by way of a version between them",
            env!("CARGO_PKG_VERSION"),
            who.program
        )));
    }
    Ok(who)
}

/// Says at its end that the other process must not take over.
struct SaysNo<'a>(&'a Wire);

impl Drop for SaysNo<'_> {
    fn drop(&mut self) {
        // The other end may be gone; and whoever does not hear it sees the connection end, and that this process lives.
        drop(self.0.say_now(What::No, br#"{"why":"the new process had not taken over in time, or the running one ends; its log says which"}"#));
    }
}

impl Giver {
    /// Returns only when it came to nothing: everything goes on then.
    async fn hand_over(&self, wire: &Wire, to: &Who) -> io::Result<()> {
        let version = to.versions.1.min(VERSION);
        let us = Who {
            pid: std::process::id(),
            program: env!("CARGO_PKG_VERSION").to_owned(),
            versions: (version, version),
        };
        wire.say(What::Welcome, &us).await?;
        tracing::info!(to = to.pid, program = to.program, "another process takes over");
        let began = Instant::now();
        // Dropped at the end, in this order: all go on.
        let (_thaw, thawed) = oneshot::channel();
        let shown = async {
            let _closed = self.gate.close().await;
            let (_still, sandboxes) = self.sandboxes.freeze().await.map_err(invalid)?;
            // However this ends, also by the end of this process: it is said before anything moves here again.
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
                let why =
                    answer.read().map_or_else(|_| "it did not say why".to_owned(), |Reason { why }| why);
                return Err(invalid(format!("the new process does not take over: {why}")));
            }
            tracing::info!(to = to.pid, items = count, sent_in = ?sent, still_for = ?began.elapsed(), "another process takes over now; this one leaves");
            // From here there is no way back: this word is what makes it theirs. Nothing may come between it and the end,
            // not even a line for a log that nobody reads.
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
        // By which the new process hears of the end of this one.
        names.push(ENDED.to_owned());
        descriptors.push(pidfd_open(getpid(), PidfdFlags::empty())?);
        let (door, conns) = self.door.freeze(thaw).await?;
        let (epoch, version) = (self.states.epoch().to_owned(), self.states.version());
        let mut items = vec![
            Item::new(PROCESS, &Process { epoch, version, names }, descriptors)?,
            Item::new(DOOR, &door, conns)?,
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
