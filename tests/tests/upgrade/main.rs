//! Daemons that are killed, restarted and replaced under running pods.

mod survive;
mod takeover;
