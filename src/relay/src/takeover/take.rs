//! The new process's side: asks, reads everything, and says when it would go on. It touches nothing of what it was given
//! before the old one has said the last word or is dead.

use std::{io, net::SocketAddr, os::fd::OwnedFd, path::Path, time::Duration};

use peerpod_base::handin::{check_peer, connect};
use peerpod_common::reactor;
use thiserror::Error;
use tokio::{
    io::Interest,
    net::{TcpListener, UnixListener},
    time::timeout,
};

use super::{
    Named, OLDEST, Process, SOCKET, VERSION,
    wire::{Item, Reason, What, Who, Wire, invalid},
};
use crate::{
    door::{self, DoorState},
    handin,
    sandboxes::Handed,
};

/// Kinds of items.
pub(super) const PROCESS: &str = "process";
pub(super) const DOOR: &str = "door";
pub(super) const SANDBOX: &str = "sandbox";
pub(super) const WIREGUARD: &str = "wireguard";
/// The name of the descriptor that tells of the old process's end.
pub(super) const ENDED: &str = "ended";

/// The old process must have answered in this time, and shown everything in that.
const ANSWER: Duration = Duration::from_secs(5);
const SHOW: Duration = Duration::from_secs(10);
/// How long its last word is waited for; it gives up long before.
const LAST_WORD: Duration = Duration::from_secs(10);

/// Why the place of the old process was not taken. It goes on, but in the last case.
#[derive(Debug, Error)]
pub enum TakeError {
    /// Nobody answers.
    #[error("nobody answers there: {0}; is it from before takeovers?")]
    Silent(io::Error),
    /// It said no, or what it said cannot be understood.
    #[error("{0}")]
    No(String),
    /// It died before everything was here.
    #[error("the running process died meanwhile; start this one again")]
    Died,
}

/// All of an old process, which stands still.
pub(crate) struct Taken {
    wire: Wire,
    /// Who it is.
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) process: Process,
    named: Named,
    pub(crate) door: door::Restored,
    pub(crate) sandboxes: Vec<(Handed, Vec<OwnedFd>)>,
    pub(crate) wireguard: Option<handin::Handed>,
}

/// Asks the process that serves this run-dir.
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
        let said = welcome.read().map_or_else(|_| "it does not say why".to_owned(), |Reason { why }| why);
        return Err(TakeError::No(said));
    }
    let who: Who = welcome.read().map_err(|error| TakeError::No(error.to_string()))?;
    if !(OLDEST..=VERSION).contains(&who.versions.1) {
        return Err(TakeError::No(format!("it hands over in version {}, not known here", who.versions.1)));
    }
    match timeout(SHOW, show(&wire)).await {
        Ok(Ok(items)) => read(wire, who, items).map_err(TakeError::No),
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Err(TakeError::Died),
        Ok(Err(error)) => Err(TakeError::No(error.to_string())),
        Err(_) => Err(TakeError::No(format!("it did not show everything within {SHOW:?}"))),
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
            other => return Err(invalid(format!("{other:?} where an item was due"))),
        }
    }
}

fn read(wire: Wire, who: Who, items: Vec<Item>) -> Result<Taken, String> {
    let (mut process, mut door, mut wireguard, mut sandboxes) = (None, None, None, Vec::new());
    for mut item in items {
        let descriptors = std::mem::take(&mut item.descriptors);
        match item.kind.as_str() {
            PROCESS => process = Some((item.read::<Process>()?, descriptors)),
            DOOR => door = Some(door::Restored::read(item.read::<DoorState>()?, descriptors)?),
            SANDBOX => sandboxes.push((item.read::<Handed>()?, descriptors)),
            WIREGUARD => {
                let (detail, names) = item.read::<(serde_json::Value, Vec<String>)>()?;
                wireguard = Some(handin::Handed::new(detail, names.into_iter().zip(descriptors).collect()));
            }
            other => {
                return Err(format!(
                    "it hands over a {other:?}, which is not known here; use a newer program"
                ));
            }
        }
    }
    let (process, descriptors) = process.ok_or("it handed over no process")?;
    if process.names.len() != descriptors.len() {
        return Err("descriptors are missing".to_owned());
    }
    let named = process.names.iter().cloned().zip(descriptors).collect();
    let door = door.ok_or("it handed over no door")?;
    Ok(Taken { wire, pid: who.pid, program: who.program, process, named, door, sandboxes, wireguard })
}

impl Taken {
    /// The descriptor of this name.
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

    /// Tells the old process why it has to go on.
    pub(crate) async fn refuse(&self, why: &str) {
        // It may be gone, or have given up before.
        drop(timeout(ANSWER, self.wire.say(What::No, &Reason { why: why.to_owned() })).await);
    }

    /// Says that everything is here, and returns once it is ours.
    ///
    /// # Errors
    /// The old process goes on.
    pub(crate) async fn commit(&mut self) -> Result<(), TakeError> {
        let ended = self.descriptor(ENDED).map_err(|error| TakeError::No(error.to_string()))?;
        let ended = reactor::register(ended, Interest::READABLE).map_err(TakeError::Silent)?;
        let word = async {
            // One that is dead already does not hear it, and that is found out below.
            drop(self.wire.say(What::Taken, &()).await);
            self.wire.hear().await
        };
        let word = match timeout(LAST_WORD, word).await {
            Ok(word) => word,
            // After this its word would not be sent: either it is here now, or never was.
            Err(_) => self.wire.last_words(),
        };
        match word {
            Ok(message) if message.what == What::Yours => Ok(()),
            Ok(message) => {
                let said =
                    message.read().map_or_else(|_| "it does not say why".to_owned(), |Reason { why }| why);
                Err(TakeError::No(said))
            }
            // Not a word, and the connection is closed. If it is dead, nobody else is left to go on.
            Err(error) => match timeout(ANSWER, ended.readable()).await {
                Ok(Ok(_)) => {
                    tracing::warn!(
                        pid = self.pid,
                        "the old process died before its last word; this one goes on"
                    );
                    Ok(())
                }
                _ => Err(TakeError::Silent(error)),
            },
        }
    }
}
