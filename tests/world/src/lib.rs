//! Builds a node, its pods and a cloud network from namespaces on one machine, and runs the daemons under test in it.
//!
//! * [`World`]: a network namespace that is the node, with a CNI's bridge, and [`Pod`]s on it.
//! * [`Daemons`]: the real `peerpod-relay` and `peerpod-node` in it, with the local provider; tests kill and restart
//!   them.
//! * [`cni`]: two nodes and their pods in the shape of a certain CNI; [`picture`]: the state of a pod's namespace.
//! * [`ping`], [`page`], [`proxy`], [`traffic`]: traffic and its disturbance; [`spy`]: the path that traffic took.
//! * [`stop`]: StopVM as shims call it, with a check of its duration.
//! * [`Sight`]: the state that `ip`, `tc`, `nft` and `/proc` show, as independent witnesses of the clean-up.
//! * [`stages`]: one pod from CreateVM to a running exec and StopVM, for `make demo` and for the tests.
//!
//! Needs root. All names contain the pid and a counter, so any number of worlds can exist side by side. A world is
//! removed when it is dropped, and also when the process dies without dropping it.

pub mod cni;
mod command;
mod container;
mod daemons;
mod janitor;
pub mod libvirtd;
pub mod many;
pub mod page;
pub mod picture;
pub mod ping;
pub mod proxy;
pub mod qemu;
mod sight;
mod spawner;
pub mod spy;
pub mod stages;
pub mod stop;
pub mod traffic;
mod wait;
mod world;

pub use command::ip;
pub use container::{Container, share};
pub use daemons::{Daemons, LedgerEntry, Settings, binary};
pub use libvirtd::{Libvirtd, NETWORK, POOL};
pub use sight::Sight;
pub use spawner::Spawner;
pub use wait::{Patience, eventually, eventually_blocking, slowness};
pub use world::{Namespace, Pod, World};
