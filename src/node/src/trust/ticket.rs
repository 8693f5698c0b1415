//! One-time tickets with which new VMs request their certificates. Pure except for random numbers.

use std::time::{Duration, SystemTime};

use peerpod_link::user_data::TicketSecret;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Error;

/// A one-time ticket, for user-data and the ledger: serialising it writes the secret, Debug does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// 32 hex digits; not secret, it identifies the ticket in logs.
    pub id: String,
    pub(crate) secret: TicketSecret,
    /// Expiry by the node's clock for records; in JSON milliseconds since 1970.
    #[serde(rename = "expires_ms", with = "millis")]
    pub expires: SystemTime,
}

impl Ticket {
    /// Makes a ticket that expires `ttl` after `now`.
    pub(crate) fn new(now: SystemTime, ttl: Duration) -> Result<Ticket, Error> {
        let (mut id, mut secret) = ([0; 16], [0; 32]);
        getrandom::fill(&mut id).map_err(peerpod_pki::Error::from)?;
        getrandom::fill(&mut secret).map_err(peerpod_pki::Error::from)?;
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

    use std::time::SystemTime;

    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::trust::store::{from_ms, to_ms};

    pub(super) fn serialize<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(to_ms(*time))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        from_ms(u64::deserialize(deserializer)?).ok_or_else(|| D::Error::custom("an impossible time"))
    }
}
