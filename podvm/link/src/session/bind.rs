//! The handshake: does the other end still have this session, and from where do both go on?
//!
//! A session is resumed when the relay has the guest's name for it **and** the guest has the relay's (`epoch`), so that
//! neither a restarted guest nor a restarted relay is taken for the one before. A connection that breaks between
//! Welcome and its arrival must not cost the streams that the relay opened meanwhile: as long as the guest cannot have
//! seen any record of this epoch, the relay keeps them and sends them from the beginning.

use super::{Session, Violation};
use crate::record::{Hello, Kind, OLDEST, SessionId, VERSION, Welcome, plain};

/// How a handshake ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The session goes on where it was.
    pub resumed: bool,
    /// A session with all its streams was given up for this one.
    pub lost: bool,
}

impl Session {
    /// Guest: what to say first on a new transport. `None` for a session without a name.
    pub fn hello(&self, program: &str) -> Option<Hello> {
        Some(Hello {
            versions: (OLDEST, VERSION),
            session: self.id?,
            epoch: self.epoch,
            recv: self.recv,
            program: program.to_owned(),
        })
    }

    /// Relay: takes a guest's Hello. The Welcome is put before everything else that is sent on this transport.
    /// `epoch` is a fresh random number (not 0), used if the session begins anew.
    pub fn answer(&mut self, hello: &Hello, epoch: u64, program: &str) -> Result<Joined, Violation> {
        let (oldest, newest) = hello.versions;
        let version = newest.min(VERSION);
        if version < oldest.max(OLDEST) {
            return Err(Violation::Version(oldest, newest));
        }
        let known = self.id == Some(hello.session);
        let resumed = known && self.epoch == hello.epoch && self.may_resume(hello.recv);
        let unseen = known && self.epoch != hello.epoch && self.recv == 0 && self.log.acked() == 0;
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
        let welcome =
            Welcome { version, resumed, epoch: self.epoch, recv: self.recv, program: program.to_owned() };
        self.urgent = plain(Kind::Welcome, &welcome.encode())?;
        Ok(Joined { resumed, lost })
    }

    /// Guest: takes the relay's answer.
    pub fn welcomed(&mut self, welcome: &Welcome) -> Result<Joined, Violation> {
        if !(OLDEST..=VERSION).contains(&welcome.version) {
            return Err(Violation::Version(welcome.version, welcome.version));
        }
        if welcome.resumed {
            if self.epoch == 0 || self.epoch != welcome.epoch || !self.may_resume(welcome.recv) {
                return Err(Violation::Handshake("the relay resumes what this guest never had"));
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

    /// Whether the peer can have received exactly so many.
    fn may_resume(&self, recv: u64) -> bool {
        (self.log.acked()..=self.log.high_sent()).contains(&recv)
    }

    /// A new transport, whose other end has received up to `recv`.
    fn resume(&mut self, recv: u64) {
        self.log.ack(recv);
        self.counts.replayed += self.log.rewind();
        self.urgent = Vec::new();
        self.urgent_taken = 0;
        self.want = super::Want::default();
        self.lines.asked = false;
        self.unacked = 0;
    }

    /// The relay's name for its side of the session; 0 before a handshake.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The highest number received in order.
    pub fn received(&self) -> u64 {
        self.recv
    }

    /// Takes another name after a violation: nothing of the old session can be trusted to be in step.
    pub fn renew(&mut self, id: SessionId) {
        self.reset(Some(id));
    }
}
