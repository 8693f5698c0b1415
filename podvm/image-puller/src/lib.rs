//! Pulls container images in the pod VM: requests them from a registry, verifies them, unpacks them layer by layer, and
//! mounts them for a container.
//!
//! A short-lived process (`peerpod-pull`) does all of it: memory, half-open connections and private mounts end with it,
//! and no process that must live on reads foreign bytes. It reads one [`Job`] from its standard input and writes
//! [`Event`]s, one JSON line each, the last of which is the outcome.
//!
//! A layer is unpacked only after its bytes have the digest of the manifest. It goes into an overlay over the layers
//! below it, so that the kernel itself gives links, parents and removals their meaning. One rename gives it its final
//! name, so a killed process leaves nothing that counts as whole. May touch: the store's directory, the network, mounts
//! below the store and the requested one.

mod cause;
mod credentials;
mod mount;
mod process;
mod progress;
mod pull;
mod registry;
mod store;
mod stream;
pub mod unpack;

pub use peerpod_image_job::{Cause, Error, Event, Fetched, Job, Limits, Outcome};
pub use process::run;
