//! Grants guests their certificates, and supplies running guests.
//!
//! * `tickets`: maps a ticket to its sandbox. `claims`: exchanges a ticket for a certificate.
//! * `renew`: follows a rotation of the node's CA. `pull`: pull secrets.
//! * `reports`: the guests' reports on their networks.

pub(crate) mod claims;
pub(crate) mod pull;
pub(crate) mod renew;
pub(crate) mod reports;
pub(crate) mod tickets;
