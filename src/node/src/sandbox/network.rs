//! Keeps the network of a running pod: `follow` repeats changes in its VM, `localhost` redirects its localhost.

pub(crate) mod follow;
pub(crate) mod localhost;
