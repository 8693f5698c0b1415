//! The new relay's side of a handover: asks, reads everything, and confirms that it can serve it. It changes nothing of
//! it before the old relay has sent `Yours` or is dead.

use std::{io, net::SocketAddr, os::fd::OwnedFd, path::Path, time::Duration};

use peerpod_base::fd_handoff::{check_peer, connect};
use peerpod_common::reactor;
use thiserror::Error;
use tokio::{
    io::Interest,
    net::{TcpListener, UnixListener},
    time::timeout,
};

use super::{
    Named, OLDEST, Process, SOCKET, VERSION,
    protocol::{Item, Reason, What, Who, Wire, invalid},
};
use crate::{
    fd_handoff,
    hypervisor::{self, DoorState},
    sandboxes::Handed,
};

/// Kinds of items.
pub(super) const PROCESS: &str = "process";
pub(super) const DOOR: &str = "door";
pub(super) const SANDBOX: &str = "sandbox";
pub(super) const WIREGUARD: &str = "wireguard";
/// Name of the descriptor that signals the end of the old process.
pub(super) const ENDED: &str = "ended";

/// Time limit of the old process's answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Time limit for the old process to send everything.
const SHOW: Duration = Duration::from_secs(10);
/// Time limit of the old process's `Yours`; the old process gives up long before.
const LAST_WORD: Duration = Duration::from_secs(10);

/// Reason why the handover failed. The old process continues, except after `Died`.
#[derive(Debug, Error)]
pub enum TakeError {
    /// No process answers, or the connection failed.
    #[error("no answer on takeover.sock: {0}; a relay without handovers may be running")]
    Silent(io::Error),
    /// The old process refused, or its messages cannot be read.
    #[error("{0}")]
    No(String),
    /// The old process died before everything was received.
    #[error("the running process died during the handover; start the new process again")]
    Died,
}

/// Complete state of an old process, which is frozen.
pub(crate) struct Taken {
    wire: Wire,
    /// Pid of the old process.
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) process: Process,
    named: Named,
    pub(crate) hypervisor: hypervisor::Restored,
    pub(crate) sandboxes: Vec<(Handed, Vec<OwnedFd>)>,
    pub(crate) wireguard: Option<fd_handoff::Handed>,
}

/// Requests the handover from the process that serves this run-dir.
pub(crate) async fn ask(run_dir: &Path) -> Result<Taken, TakeError> {
    let path = run_dir.join(SOCKET);
    let socket = connect(&path).map_err(TakeError::Silent)?;
    check_peer(&socket).map_err(|error| TakeError::No(error.to_string()))?;
    let wire = Wire::new(socket).map_err(TakeError::Silent)?;
    let us = Who {
        pid: std::process::id(),
        program: env!("CARGO_PKG_VERSION").to_owned(),
        versions: (OLDEST, VERSION),
    };
    let late = || io::Error::from(io::ErrorKind::TimedOut);
    let welcome = async {
        wire.say(What::Hello, &us).await?;
        wire.hear().await
    };
    let welcome =
        timeout(ANSWER, welcome).await.unwrap_or_else(|_| Err(late())).map_err(TakeError::Silent)?;
    if welcome.what != What::Welcome {
        let said = welcome.read().map_or_else(|_| "it gave no reason".to_owned(), |Reason { why }| why);
        return Err(TakeError::No(said));
    }
    let who: Who = welcome.read().map_err(|error| TakeError::No(error.to_string()))?;
    if !(OLDEST..=VERSION).contains(&who.versions.1) {
        return Err(TakeError::No(format!(
            "it hands over in version {}, which this program does not support",
            who.versions.1
        )));
    }
    match timeout(SHOW, show(&wire)).await {
        Ok(Ok(items)) => read(wire, who, items).map_err(TakeError::No),
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Err(TakeError::Died),
        Ok(Err(error)) => Err(TakeError::No(error.to_string())),
        Err(_) => Err(TakeError::No(format!("it did not send its state within {SHOW:?}"))),
    }
}

async fn show(wire: &Wire) -> io::Result<Vec<Item>> {
    let mut items = Vec::new();
    loop {
        let message = wire.hear().await?;
        match message.what {
            What::Item => items.push(wire.hear_item(&message).await?),
            What::End if message.read::<usize>()? == items.len() => return Ok(items),
            What::No => return Err(invalid(message.read::<Reason>()?.why)),
            other => return Err(invalid(format!("{other:?} instead of an item"))),
        }
    }
}

fn read(wire: Wire, who: Who, items: Vec<Item>) -> Result<Taken, String> {
    let (mut process, mut hypervisor, mut wireguard, mut sandboxes) = (None, None, None, Vec::new());
    for mut item in items {
        let descriptors = std::mem::take(&mut item.descriptors);
        match item.kind.as_str() {
            PROCESS => process = Some((item.read::<Process>()?, descriptors)),
            DOOR => hypervisor = Some(hypervisor::Restored::read(item.read::<DoorState>()?, descriptors)?),
            SANDBOX => sandboxes.push((item.read::<Handed>()?, descriptors)),
            WIREGUARD => {
                let (detail, names) = item.read::<(serde_json::Value, Vec<String>)>()?;
                wireguard =
                    Some(fd_handoff::Handed::new(detail, names.into_iter().zip(descriptors).collect()));
            }
            other => {
                return Err(format!(
                    "it hands over a {other:?}, which this program does not support; use a newer program"
                ));
            }
        }
    }
    let (process, descriptors) = process.ok_or("it did not hand over its process state")?;
    if process.names.len() != descriptors.len() {
        return Err("descriptors are missing".to_owned());
    }
    let named = process.names.iter().cloned().zip(descriptors).collect();
    let hypervisor = hypervisor.ok_or("it did not hand over its hypervisor API")?;
    Ok(Taken { wire, pid: who.pid, program: who.program, process, named, hypervisor, sandboxes, wireguard })
}

impl Taken {
    /// Removes and returns the descriptor of this name.
    pub(crate) fn descriptor(&mut self, name: &str) -> io::Result<OwnedFd> {
        let at = self.named.iter().position(|(known, _)| known == name);
        at.map(|at| self.named.swap_remove(at).1)
            .ok_or_else(|| invalid(format!("the running process did not hand over {name}")))
    }

    pub(crate) fn unix(&mut self, name: &str) -> io::Result<UnixListener> {
        let listener = std::os::unix::net::UnixListener::from(self.descriptor(name)?);
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener)
    }

    pub(crate) fn tcp(&mut self, name: &str) -> io::Result<(TcpListener, SocketAddr)> {
        let listener = std::net::TcpListener::from(self.descriptor(name)?);
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((TcpListener::from_std(listener)?, address))
    }

    /// Sends the old process the reason to continue.
    pub(crate) async fn refuse(&self, why: &str) {
        // The old process may be gone, or have given up before.
        drop(timeout(ANSWER, self.wire.say(What::No, &Reason { why: why.to_owned() })).await);
    }

    /// Confirms that everything was received, and returns once this process owns it.
    ///
    /// # Errors
    /// The handover failed; the old process continues.
    pub(crate) async fn commit(&mut self) -> Result<(), TakeError> {
        let ended = self.descriptor(ENDED).map_err(|error| TakeError::No(error.to_string()))?;
        let ended = reactor::register(ended, Interest::READABLE).map_err(TakeError::Silent)?;
        let word = async {
            // Fails if the old process is dead, which is detected below.
            drop(self.wire.say(What::Taken, &()).await);
            self.wire.hear().await
        };
        let word = match timeout(LAST_WORD, word).await {
            Ok(word) => word,
            // After this shutdown the old process cannot send `Yours`: either it has arrived by now, or it never will.
            Err(_) => self.wire.drain(),
        };
        match word {
            Ok(message) if message.what == What::Yours => Ok(()),
            Ok(message) => {
                let said =
                    message.read().map_or_else(|_| "it gave no reason".to_owned(), |Reason { why }| why);
                Err(TakeError::No(said))
            }
            // No message, and the connection is closed. If the old process is dead, only this one is left to continue.
            Err(error) => match timeout(ANSWER, ended.readable()).await {
                Ok(Ok(_)) => {
                    tracing::warn!(
                        pid = self.pid,
                        "the old relay exited before it confirmed the handover; this one takes over"
                    );
                    Ok(())
                }
                _ => Err(TakeError::Silent(error)),
            },
        }
    }
}
