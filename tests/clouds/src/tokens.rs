//! Issues bearer tokens and checks them.

use std::collections::BTreeMap;
use std::time::Duration;

/// Tokens of one cloud.
#[derive(Debug, Default)]
pub struct Tokens {
    /// Valid tokens and the times of their ends.
    valid: BTreeMap<String, Duration>,
    issued: u32,
}

impl Tokens {
    /// Issues a token that is valid for this time.
    pub fn issue(&mut self, now: Duration, life: Duration) -> String {
        self.issued += 1;
        let token = format!("token-{}", self.issued);
        self.valid.insert(token.clone(), now + life);
        token
    }

    /// Returns whether this `Authorization` carries a valid token.
    pub fn admits(&self, authorization: &str, now: Duration) -> bool {
        let token = authorization.strip_prefix("Bearer ").unwrap_or_default();
        // The signature of a token with claims.
        let token = token.rsplit('.').next().unwrap_or_default();
        self.valid.get(token).is_some_and(|end| *end > now)
    }

    /// Returns the number of issued tokens.
    pub fn issued(&self) -> u32 {
        self.issued
    }

    /// Ends all tokens.
    pub fn expire(&mut self) {
        self.valid.clear();
    }
}
