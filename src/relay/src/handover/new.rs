//! The new relay's side of a handover: asks, reads everything, and confirms that it can serve it. It changes nothing of
//! it before the old relay has sent `Yours` or is dead.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use peerpod_base::fd_handoff::{check_peer, connect};
use peerpod_common::reactor;
use tokio::io::Interest;
use tokio::time::timeout;

use super::protocol::{Item, MessageKind, ProcessInfo, Reason, Wire, invalid};
use super::{OLDEST, Process, SOCKET, VERSION};
use crate::fd_handoff::Passed;
use crate::hypervisor::{self, HypervisorState};
use crate::sandboxes::Handed;

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

/// Complete state of an old process, which is frozen.
pub(crate) struct Taken {
    wire: Wire,
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) process: Process,
    named: Passed,
    pub(crate) hypervisor: hypervisor::Restored,
    pub(crate) sandboxes: Vec<(Handed, Vec<OwnedFd>)>,
    pub(crate) wireguard: Option<Passed>,
}

fn silent(error: io::Error) -> String {
    format!("no answer on takeover.sock: {error}; a relay without handovers may be running")
}

/// Requests the handover from the process that serves this run-dir. On an error that process continues, if it lives.
pub(crate) async fn ask(run_dir: &Path) -> Result<Taken, String> {
    let socket = connect(&run_dir.join(SOCKET)).map_err(silent)?;
    check_peer(&socket).map_err(|error| error.to_string())?;
    let wire = Wire::new(socket).map_err(silent)?;
    let welcome = async {
        wire.send(MessageKind::Hello, &ProcessInfo::this(OLDEST, VERSION)).await?;
        wire.receive().await
    };
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    let welcome = timeout(ANSWER, welcome).await.unwrap_or_else(late).map_err(silent)?;
    if welcome.kind != MessageKind::Welcome {
        return Err(welcome.reason());
    }
    let who: ProcessInfo = welcome.read().map_err(|error| error.to_string())?;
    let version = who.versions.1;
    if !(OLDEST..=VERSION).contains(&version) {
        return Err(format!("it hands over in version {version}, which this program does not support"));
    }
    match timeout(SHOW, show(&wire)).await {
        Ok(Ok(items)) => read(wire, who, items),
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err("the running process died during the handover; start the new process again".to_owned())
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("it did not send its state within {SHOW:?}")),
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
                let descriptors = names.into_iter().zip(descriptors).collect();
                wireguard = Some(Passed { detail, descriptors });
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
    let descriptors = process.names.iter().cloned().zip(descriptors).collect();
    let named = Passed { detail: serde_json::Value::Null, descriptors };
    let hypervisor = hypervisor.ok_or("it did not hand over its hypervisor API")?;
    Ok(Taken { wire, pid: who.pid, program: who.program, process, named, hypervisor, sandboxes, wireguard })
}

impl Taken {
    pub(crate) fn descriptor(&mut self, name: &str) -> io::Result<OwnedFd> {
        self.named.descriptor(name).map_err(invalid)
    }

    /// Sends the old process the reason to continue.
    pub(crate) async fn refuse(&self, why: &str) {
        // The old process may be gone, or have given up before.
        drop(timeout(ANSWER, self.wire.send(MessageKind::No, &Reason { why: why.to_owned() })).await);
    }

    /// Confirms that everything was received; on return this process owns it. On an error the old one continues.
    pub(crate) async fn commit(&mut self) -> Result<(), String> {
        let ended = self.named.descriptor(ENDED)?;
        let ended = reactor::register(ended, Interest::READABLE).map_err(silent)?;
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
            Ok(message) => Err(message.reason()),
            // No message, and the connection is closed. If the old process is dead, only this one is left to continue.
            Err(error) => match timeout(ANSWER, ended.readable()).await {
                Ok(Ok(_)) => {
                    tracing::warn!(
                        pid = self.pid,
                        "the old relay exited before it confirmed the handover; this one takes over"
                    );
                    Ok(())
                }
                _ => Err(silent(error)),
            },
        }
    }
}
