//! Container images in the pod VM: asked of a registry, verified, unpacked layer by layer, mounted for a container.
//!
//! All of it is the work of a short-lived process (`peerpod-pull`): memory, half-open connections and private
//! mounts go with it, and bytes of strangers are read by nothing that must live on. It reads one [`Job`] from its
//! standard input and writes [`Event`]s, one JSON line each, the last of which is the outcome.
//!
//! A layer is unpacked only after its bytes have the digest that the manifest says, into an overlay over the layers
//! below it, so that the kernel itself gives links, parents and removals their meaning; it gets its final name by one
//! rename, so a process that is killed leaves nothing that anybody takes for whole. May touch: the store's directory,
//! the network, mounts below the store and the one that was asked for.

mod cause;
pub mod credentials;
mod fetch;
mod mount;
mod process;
mod pull;
mod registry;
mod store;
mod stream;
pub mod unpack;

pub use peerpod_image_job::{Cause, Error, Event, Job, Limits, Outcome};
pub use process::run;
