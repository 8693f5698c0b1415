//! Performs the handshake: decides whether the session continues, and from which record.
//!
//! A session resumes when the relay holds the guest's session id **and** the guest holds the relay's epoch: a restarted
//! guest or relay resumes none. A connection that breaks before Welcome arrives must not cost the streams that the
//! relay opened meanwhile. The relay keeps them as long as the guest cannot have received any record of this epoch.

use super::{Session, Violation};
use crate::record::{Hello, OLDEST, RecordKind, VERSION, Welcome, plain};

/// Version of this program, for display at the peer.
const PROGRAM: &str = env!("CARGO_PKG_VERSION");

/// Result of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The session continues.
    pub resumed: bool,
    /// An earlier session with all its streams was dropped for this one.
    pub lost: bool,
}

impl Session {
    /// Guest: returns the first record for a new transport. `None` for a session without an id.
    pub fn hello(&self) -> Option<Hello> {
        Some(Hello {
            versions: (OLDEST, VERSION),
            session: self.id?,
            epoch: self.epoch,
            recv: self.inbound.recv,
            program: PROGRAM.to_owned(),
        })
    }

    /// Relay: processes a guest's Hello. The Welcome precedes all other records. A new session takes the random
    /// `epoch`.
    pub fn answer(&mut self, hello: &Hello, epoch: u64) -> Result<Joined, Violation> {
        let (oldest, newest) = hello.versions;
        let version = newest.min(VERSION);
        if version < oldest.max(OLDEST) {
            return Err(Violation::Version(oldest, newest));
        }
        let known = self.id == Some(hello.session);
        let resumed = known && self.epoch == hello.epoch && self.may_resume(hello.recv);
        let unseen = known && self.epoch != hello.epoch && self.inbound.recv == 0 && self.log.acked() == 0;
        let lost = self.id.is_some() && !resumed && !unseen;
        if lost {
            self.reset(None);
        }
        if !resumed {
            self.id = Some(hello.session);
            self.epoch = epoch.max(1);
        }
        self.resume(if resumed { hello.recv } else { 0 });
        self.version = version;
        let welcome = Welcome {
            version,
            resumed,
            epoch: self.epoch,
            recv: self.inbound.recv,
            program: PROGRAM.to_owned(),
        };
        self.urgent.bytes = plain(RecordKind::Welcome, &welcome.encode())?;
        Ok(Joined { resumed, lost })
    }

    /// Guest: processes the relay's Welcome.
    pub fn welcomed(&mut self, welcome: &Welcome) -> Result<Joined, Violation> {
        if !(OLDEST..=VERSION).contains(&welcome.version) {
            return Err(Violation::Version(welcome.version, welcome.version));
        }
        if welcome.resumed {
            if self.epoch == 0 || self.epoch != welcome.epoch || !self.may_resume(welcome.recv) {
                return Err(Violation::Handshake("the relay resumes a session that this guest never had"));
            }
            self.resume(welcome.recv);
            self.version = welcome.version;
            return Ok(Joined { resumed: true, lost: false });
        }
        if welcome.recv != 0 || welcome.epoch == 0 {
            return Err(Violation::Handshake("a new session that has begun already"));
        }
        let lost = self.epoch != 0;
        if lost {
            self.reset(self.id);
        }
        self.epoch = welcome.epoch;
        self.version = welcome.version;
        self.resume(0);
        Ok(Joined { resumed: false, lost })
    }

    /// Returns whether `recv` can be the last record that the peer has received.
    fn may_resume(&self, recv: u64) -> bool {
        (self.log.acked()..=self.log.high_sent()).contains(&recv)
    }

    /// Prepares for a new transport to a peer that has received the records up to `recv`.
    fn resume(&mut self, recv: u64) {
        self.log.ack(recv);
        self.counts.replayed += self.log.rewind();
        self.urgent = super::Urgent::default();
        self.lines.asked = false;
        self.inbound.unacked = 0;
    }

    /// Returns the epoch of the relay's side of the session; 0 before a handshake.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}
