//! Grants guests their certificates, and supplies running guests.

pub(crate) mod claims;
pub(crate) mod pull;
pub(crate) mod renew;
pub(crate) mod reports;
pub(crate) mod tickets;
