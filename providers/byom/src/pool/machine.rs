//! Looks at a machine over a kept connection, and acts on the look. One caller at a time works on a machine.

use parking_lot::Mutex as Lock;
use peerpod_provider_api::{IdempotencyKey, OwnedState, Owner};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::Pool;
use super::claim::{Boot, CLAIM, Claim, MACHINE, MAX_FILE, REBOOT, USER_DATA};
use super::connect::SshConnection;
use super::fault::Fault;
use super::files::MachineFiles;
use super::known::{Known, Seen, Step};
use crate::config::MachineAddress;

/// A machine of the pool.
pub(crate) struct Machine {
    /// Address, which is its name.
    pub(crate) address: MachineAddress,
    link: Mutex<Option<Link>>,
    /// Memory of this process about it.
    pub(crate) known: Lock<Known>,
}

/// Connection in one boot of the machine: a reboot ends it. The boot is read once. The claim is read at each look, because
/// a person may free a machine without a reboot.
struct Link {
    connection: SshConnection,
    boot: Option<Boot>,
}

/// State of a machine, as it shows it.
#[derive(Debug, Clone)]
pub(crate) enum MachineState {
    /// It can be claimed.
    Free(Boot),
    /// It has no claim, and cannot be claimed for this reason.
    Resting(&'static str),
    /// It has a claim.
    Claimed(Claimed),
}

/// A claim, and its progress.
#[derive(Debug, Clone)]
pub(crate) struct Claimed {
    /// The claim.
    pub(crate) claim: Claim,
    /// Whether the guest has got user-data.
    pub(crate) has_user_data: bool,
    /// Whether a reboot is requested.
    pub(crate) reboots: bool,
}

impl Claimed {
    /// Returns the state of the VM for a list.
    fn state(&self) -> OwnedState {
        match (self.reboots, self.has_user_data) {
            (true, _) => OwnedState::Deleting,
            (false, true) => OwnedState::Running,
            (false, false) => OwnedState::Pending,
        }
    }
}

/// A machine that has just shown its state, for one caller.
pub(crate) struct Session<'m> {
    machine: &'m Machine,
    pool: &'m Pool,
    link: MutexGuard<'m, Option<Link>>,
    /// Its state.
    pub(crate) state: MachineState,
}

impl Machine {
    /// Returns a machine that was not looked at yet.
    pub(crate) fn new(address: MachineAddress) -> Machine {
        Machine { address, link: Mutex::new(None), known: Lock::default() }
    }

    /// Looks at the machine; dials it unless a connection is open.
    pub(crate) async fn look<'m>(&'m self, pool: &'m Pool) -> Result<Session<'m>, Fault> {
        let asked = Instant::now();
        let mut link = self.link.lock().await;
        if let Some(fault) = self.known.lock().fault_since(asked) {
            return Err(fault);
        }
        let looked = self.look_over(pool, &mut link).await;
        match looked {
            Ok(state) => {
                self.saw(pool, &state);
                let mut session = Session { machine: self, pool, link, state };
                session.free_abandoned().await;
                Ok(session)
            }
            Err(fault) => Err(self.failed(&mut link, fault)),
        }
    }

    async fn look_over(&self, pool: &Pool, link: &mut Option<Link>) -> Result<MachineState, Fault> {
        if let Some(kept) = link.as_mut().filter(|kept| !kept.connection.is_closed()) {
            match kept.look().await {
                // It may have ended since, by itself or with the machine's boot.
                Err(Fault::Away(why)) => tracing::debug!(machine = %self.address, why, "dial again"),
                looked => return looked,
            }
        }
        *link = None;
        let connection = SshConnection::open(&pool.config, self.address).await?;
        link.insert(Link { connection, boot: None }).look().await
    }

    fn saw(&self, pool: &Pool, state: &MachineState) {
        let seen = match state {
            MachineState::Free(boot) => Seen::Free(boot.clone()),
            MachineState::Resting(why) => Seen::Resting(why),
            MachineState::Claimed(found) if found.claim.marks.are_of(&pool.owner) => {
                Seen::Ours(found.claim.clone(), found.state())
            }
            MachineState::Claimed(_) => Seen::Taken,
        };
        let mut known = self.known.lock();
        if let Some(down) = known.down() {
            tracing::info!(machine = %self.address, after = %down.fault, "the machine can be used again");
        }
        let ended = known.saw(seen, Instant::now());
        drop(known);
        if let Some(claim) = ended {
            pool.has_ended(self.address, &claim);
        }
    }

    /// Notes a fault, and ends the connection.
    fn failed(&self, link: &mut Option<Link>, fault: Fault) -> Fault {
        *link = None;
        if self.known.lock().failed(fault.clone(), Instant::now()) {
            tracing::warn!(machine = %self.address, %fault, "the machine cannot be used");
        }
        fault
    }
}

impl Link {
    async fn look(&mut self) -> Result<MachineState, Fault> {
        let files = &self.connection.files;
        let claim = async { Ok(files.read(CLAIM, MAX_FILE).await?.map(|text| Claim::parse(&text))) };
        let boot = async {
            match &self.boot {
                Some(boot) => Ok(Some(boot.clone())),
                None => Ok(files.read(MACHINE, MAX_FILE).await?.and_then(|text| Boot::parse(&text))),
            }
        };
        let (claim, boot, has_user_data, reboots) =
            tokio::try_join!(claim, boot, files.has(USER_DATA), files.has(REBOOT))?;
        self.boot = boot;
        Ok(match (claim, &self.boot) {
            (Some(claim), Some(boot)) if !claim.is_of(boot) => {
                MachineState::Resting("its claim is of an earlier boot: its cidata must be a tmpfs")
            }
            (Some(claim), _) => MachineState::Claimed(Claimed { claim, has_user_data, reboots }),
            (None, _) if reboots => MachineState::Resting("it is about to reboot"),
            (None, _) if has_user_data => MachineState::Resting("it has user-data and no claim; reboot it"),
            (None, None) => MachineState::Resting("its guest program does not run yet"),
            (None, Some(boot)) => MachineState::Free(boot.clone()),
        })
    }
}

impl Session<'_> {
    /// Claims a free machine. Returns the claim that it has then, which may be another one.
    pub(crate) async fn claim(&mut self, claim: &Claim, holder: &str) -> Result<Claimed, Fault> {
        let aside = self.files()?.write_aside(CLAIM, &claim.text()).await;
        let aside = self.check(aside)?;
        {
            let mut known = self.machine.known.lock();
            known.step(holder, Step::Claiming, Instant::now());
            known.may_be_ours(claim);
        }
        let linked = self.files()?.link_aside(&aside, CLAIM).await;
        self.check(linked)?;
        // Our own writes are read back, too: the machine has the truth.
        let Some(link) = self.link.as_mut() else { return Err(lost()) };
        let looked = link.look().await;
        match looked {
            Ok(state) => {
                self.machine.saw(self.pool, &state);
                self.state = state;
            }
            Err(fault) => return Err(self.machine.failed(&mut self.link, fault)),
        }
        match &self.state {
            MachineState::Claimed(claimed) => Ok(claimed.clone()),
            MachineState::Free(_) | MachineState::Resting(_) => {
                let fault =
                    Fault::Refused("its claim vanished; find out what removes files there".to_owned());
                Err(self.machine.failed(&mut self.link, fault))
            }
        }
    }

    /// Delivers user-data to the guest.
    pub(crate) async fn deliver(&mut self, user_data: &str, holder: &str) -> Result<(), Fault> {
        let aside = self.files()?.write_aside(USER_DATA, user_data.as_bytes()).await;
        let aside = self.check(aside)?;
        self.machine.known.lock().step(holder, Step::Delivering, Instant::now());
        let renamed = self.files()?.rename_aside(&aside, USER_DATA).await;
        self.check(renamed)?;
        if let MachineState::Claimed(claimed) = &mut self.state {
            claimed.has_user_data = true;
        }
        let state = self.state.clone();
        self.machine.saw(self.pool, &state);
        Ok(())
    }

    /// Requests the reboot that frees the machine.
    pub(crate) async fn reboot(&mut self) -> Result<(), Fault> {
        let touched = self.files()?.touch(REBOOT).await;
        self.check(touched)?;
        self.machine.known.lock().will_reboot();
        if let MachineState::Claimed(claimed) = &mut self.state {
            claimed.reboots = true;
        }
        Ok(())
    }

    /// Returns the claim, if it is one of this owner.
    pub(crate) fn ours(&self, owner: &Owner) -> Option<&Claimed> {
        match &self.state {
            MachineState::Claimed(claimed) if claimed.claim.marks.are_of(owner) => Some(claimed),
            _ => None,
        }
    }

    /// Has the machine rebooted if it has the claim of a create that gave up.
    async fn free_abandoned(&mut self) {
        let MachineState::Claimed(found) = &self.state else { return };
        let key: Option<&IdempotencyKey> = found.claim.marks.key.as_ref();
        let is_ours = found.claim.marks.are_of(&self.pool.owner);
        if is_ours && !found.reboots && self.machine.known.lock().is_abandoned(key) {
            // Otherwise the next look tries again.
            match self.reboot().await {
                Ok(()) => {
                    tracing::info!(machine = %self.machine.address, "freed the claim of an earlier attempt")
                }
                Err(fault) => {
                    tracing::warn!(machine = %self.machine.address, %fault, "cannot free an earlier claim");
                }
            }
        }
    }

    fn files(&self) -> Result<&MachineFiles, Fault> {
        self.link.as_ref().map(|link| &link.connection.files).ok_or_else(lost)
    }

    /// Returns the result of a step. A failed one ends the connection and counts as a fault of the machine.
    fn check<T>(&mut self, done: Result<T, Fault>) -> Result<T, Fault> {
        done.map_err(|fault| self.machine.failed(&mut self.link, fault))
    }
}

fn lost() -> Fault {
    Fault::Away("the connection was lost".to_owned())
}
