//! One-time tickets with which newly booted VMs request their certificates. Pure except for random numbers; the ledger
//! records their use.

use std::time::{Duration, SystemTime};

use peerpod_link::user_data::TicketSecret;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Error;

/// A one-time ticket. It goes into user-data and, before the cloud is called, into the ledger: serialising it writes
/// the secret, Debug does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// 32 hex digits; not secret, it identifies the ticket in logs.
    pub id: String,
    /// The secret that the VM must show.
    pub(crate) secret: TicketSecret,
    /// Expiry by the node's wall clock; in JSON milliseconds since 1970.
    #[serde(rename = "expires_ms", with = "millis")]
    pub expires: SystemTime,
}

impl Ticket {
    /// A new ticket that expires `ttl` from now by the system's clock.
    ///
    /// # Errors
    /// The kernel gave no random bytes.
    pub fn new(ttl: Duration) -> Result<Ticket, Error> {
        Ticket::new_at(SystemTime::now(), ttl)
    }

    /// A new ticket that expires `ttl` after `now`.
    ///
    /// # Errors
    /// The kernel gave no random bytes.
    pub fn new_at(now: SystemTime, ttl: Duration) -> Result<Ticket, Error> {
        let mut id = [0; 16];
        let mut secret = [0; 32];
        getrandom::fill(&mut id).map_err(Error::Random)?;
        getrandom::fill(&mut secret).map_err(Error::Random)?;
        Ok(Ticket { id: hex::encode(id), secret: TicketSecret::new(secret), expires: now + ttl })
    }

    /// Whether `secret`, as raw bytes, is the ticket's secret. Takes the same time for every wrong one.
    pub fn matches(&self, secret: &[u8]) -> bool {
        // Hashing first makes the compared bytes unpredictable and equally long for every input.
        let ours = Sha256::digest(self.secret.expose());
        let theirs = Sha256::digest(secret);
        let difference = ours.iter().zip(theirs).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(difference) == 0
    }

    /// Whether it is too late for a first use.
    pub fn is_expired(&self, now: SystemTime) -> bool {
        now >= self.expires
    }

    /// Returns the secret, for user-data and for tests that act as the guest.
    pub fn secret(&self) -> &TicketSecret {
        &self.secret
    }
}

mod millis {
    //! Times as milliseconds since 1970.

    use std::time::{Duration, SystemTime};

    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        serializer.serialize_u64(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        let ms = u64::deserialize(deserializer)?;
        SystemTime::UNIX_EPOCH
            .checked_add(Duration::from_millis(ms))
            .ok_or_else(|| D::Error::custom("an impossible time"))
    }
}
