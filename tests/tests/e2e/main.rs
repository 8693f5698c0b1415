//! Tests sandboxes from CreateVM to their end, on one node with real daemons and guests.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod batches;
mod cases;
mod crio;
mod dials;
mod external;
mod front_door;
#[path = "../guest_common/mod.rs"]
mod guest_common;
mod guest_log;
mod image;
mod images;
#[path = "../images_common/mod.rs"]
mod images_common;
mod link;
mod provider_external;
mod replay;
mod stages;
mod volumes;
