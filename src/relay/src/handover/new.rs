//! The new relay's side of a handover: asks, reads everything, and confirms that it can serve it. It changes nothing of
//! it before the old relay has sent `Yours` or is dead.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use peerpod_base::fd_handoff::{check_peer, connect};
use peerpod_common::reactor;
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::{TcpListener, UnixListener};
use tokio::time::timeout;

use super::protocol::{Item, MessageKind, ProcessInfo, Reason, Wire, invalid};
use super::{OLDEST, Process, SOCKET, VERSION};
use crate::hypervisor::{self, HypervisorState};
use crate::sandboxes::Handed;
use crate::{fd_handoff, socket};

/// Kinds of items.
pub(super) const PROCESS: &str = "process";
pub(super) const HYPERVISOR: &str = "door";
pub(super) const SANDBOX: &str = "sandbox";
pub(super) const WIREGUARD: &str = "wireguard";
/// Name of the descriptor that signals the end of the old process.
pub(super) const ENDED: &str = "ended";

/// Time limit of the old process's answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Time limit for the old process to send everything.
const SHOW: Duration = Duration::from_secs(10);
/// Time limit of the old process's `Yours`; the old process gives up long before.
const OWNERSHIP: Duration = Duration::from_secs(10);

/// Reason why the handover failed. The old process continues, except after `Died`.
#[derive(Debug, Error)]
pub enum HandoverError {
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
    named: fd_handoff::Passed,
    pub(crate) hypervisor: hypervisor::Restored,
    pub(crate) sandboxes: Vec<(Handed, Vec<OwnedFd>)>,
    pub(crate) wireguard: Option<fd_handoff::Passed>,
}

/// Requests the handover from the process that serves this run-dir.
pub(crate) async fn ask(run_dir: &Path) -> Result<Taken, HandoverError> {
    let path = run_dir.join(SOCKET);
    let socket = connect(&path).map_err(HandoverError::Silent)?;
    check_peer(&socket).map_err(|error| HandoverError::No(error.to_string()))?;
    let wire = Wire::new(socket).map_err(HandoverError::Silent)?;
    let us = ProcessInfo::this(OLDEST, VERSION);
    let late = || io::Error::from(io::ErrorKind::TimedOut);
    let welcome = async {
        wire.send(MessageKind::Hello, &us).await?;
        wire.receive().await
    };
    let welcome =
        timeout(ANSWER, welcome).await.unwrap_or_else(|_| Err(late())).map_err(HandoverError::Silent)?;
    if welcome.kind != MessageKind::Welcome {
        return Err(HandoverError::No(welcome.reason()));
    }
    let who: ProcessInfo = welcome.read().map_err(|error| HandoverError::No(error.to_string()))?;
    if !(OLDEST..=VERSION).contains(&who.versions.1) {
        return Err(HandoverError::No(format!(
            "it hands over in version {}, which this program does not support",
            who.versions.1
        )));
    }
    match timeout(SHOW, show(&wire)).await {
        Ok(Ok(items)) => read(wire, who, items).map_err(HandoverError::No),
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Err(HandoverError::Died),
        Ok(Err(error)) => Err(HandoverError::No(error.to_string())),
        Err(_) => Err(HandoverError::No(format!("it did not send its state within {SHOW:?}"))),
    }
}

async fn show(wire: &Wire) -> io::Result<Vec<Item>> {
    let mut items = Vec::new();
    loop {
        let message = wire.receive().await?;
        match message.kind {
            MessageKind::Item => items.push(wire.receive_item(&message).await?),
            MessageKind::End if message.read::<usize>()? == items.len() => return Ok(items),
            MessageKind::No => return Err(invalid(message.read::<Reason>()?.why)),
            other => return Err(invalid(format!("{other:?} instead of an item"))),
        }
    }
}

fn read(wire: Wire, who: ProcessInfo, items: Vec<Item>) -> Result<Taken, String> {
    let (mut process, mut hypervisor, mut wireguard, mut sandboxes) = (None, None, None, Vec::new());
    for mut item in items {
        let descriptors = std::mem::take(&mut item.descriptors);
        match item.kind.as_str() {
            PROCESS => process = Some((item.read::<Process>()?, descriptors)),
            HYPERVISOR => {
                hypervisor = Some(hypervisor::Restored::read(item.read::<HypervisorState>()?, descriptors)?)
            }
            SANDBOX => sandboxes.push((item.read::<Handed>()?, descriptors)),
            WIREGUARD => {
                let (detail, names) = item.read::<(serde_json::Value, Vec<String>)>()?;
                let passed = names.into_iter().zip(descriptors).collect();
                wireguard = Some(fd_handoff::Passed::new(detail, passed));
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
    let named = fd_handoff::Passed::new(serde_json::Value::Null, named);
    let hypervisor = hypervisor.ok_or("it did not hand over its hypervisor API")?;
    Ok(Taken { wire, pid: who.pid, program: who.program, process, named, hypervisor, sandboxes, wireguard })
}

impl Taken {
    /// Removes and returns the descriptor of this name.
    pub(crate) fn descriptor(&mut self, name: &str) -> io::Result<OwnedFd> {
        self.named.descriptor(name).map_err(invalid)
    }

    pub(crate) fn unix(&mut self, name: &str) -> io::Result<UnixListener> {
        socket::unix_listener(self.descriptor(name)?)
    }

    pub(crate) fn tcp(&mut self, name: &str) -> io::Result<TcpListener> {
        socket::tcp_listener(self.descriptor(name)?)
    }

    /// Sends the old process the reason to continue.
    pub(crate) async fn refuse(&self, why: &str) {
        // The old process may be gone, or have given up before.
        drop(timeout(ANSWER, self.wire.send(MessageKind::No, &Reason { why: why.to_owned() })).await);
    }

    /// Confirms that everything was received, and returns once this process owns it.
    ///
    /// # Errors
    /// The handover failed; the old process continues.
    pub(crate) async fn commit(&mut self) -> Result<(), HandoverError> {
        let ended = self.descriptor(ENDED).map_err(|error| HandoverError::No(error.to_string()))?;
        let ended = reactor::register(ended, Interest::READABLE).map_err(HandoverError::Silent)?;
        let owned = async {
            // Fails if the old process is dead, which is detected below.
            drop(self.wire.send(MessageKind::Taken, &()).await);
            self.wire.receive().await
        };
        let answer = match timeout(OWNERSHIP, owned).await {
            Ok(answer) => answer,
            // After this shutdown the old process cannot send `Yours`: either it has arrived by now, or it never will.
            Err(_) => self.wire.drain(),
        };
        match answer {
            Ok(message) if message.kind == MessageKind::Yours => Ok(()),
            Ok(message) => Err(HandoverError::No(message.reason())),
            // No message, and the connection is closed. If the old process is dead, only this one is left to continue.
            Err(error) => match timeout(ANSWER, ended.readable()).await {
                Ok(Ok(_)) => {
                    tracing::warn!(
                        pid = self.pid,
                        "the old relay exited before it confirmed the handover; this one takes over"
                    );
                    Ok(())
                }
                _ => Err(HandoverError::Silent(error)),
            },
        }
    }
}
