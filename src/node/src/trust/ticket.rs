//! One-time tickets with which new VMs request their certificates. Pure except for random numbers.

use std::time::Duration;

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
    /// Expiry by the node's clock for records, in milliseconds since 1970.
    pub expires_ms: u64,
}

impl Ticket {
    /// Makes a ticket that expires `ttl` after `now_ms`.
    pub(crate) fn new(now_ms: u64, ttl: Duration) -> Result<Ticket, Error> {
        let (mut id, mut secret) = ([0; 16], [0; 32]);
        getrandom::fill(&mut id).map_err(peerpod_pki::Error::from)?;
        getrandom::fill(&mut secret).map_err(peerpod_pki::Error::from)?;
        let expires_ms = now_ms.saturating_add(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
        Ok(Ticket { id: hex::encode(id), secret: TicketSecret::new(secret), expires_ms })
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
    pub fn is_expired(&self, now_ms: u64) -> bool {
        now_ms >= self.expires_ms
    }

    /// Returns the secret, for user-data and for tests that act as the guest.
    pub fn secret(&self) -> &TicketSecret {
        &self.secret
    }
}
