//! A node, its pods and a cloud network out of namespaces in one machine; processes under test; witnesses.
//!
//! * [`World`]: a network namespace that is the node, with a CNI's bridge, and [`Pod`]s on it.
//! * [`Daemons`]: the real `peerpod-relay` and `peerpod-node` in it, with the local provider, to be killed and started.
//! * [`cni`]: two nodes and pods in the shape of one CNI or another; [`picture`]: what a pod's namespace looks like.
//! * [`ping`], [`page`], [`proxy`], [`traffic`]: traffic and troubles; [`spy`]: which way it took.
//! * [`stop`]: StopVM as shims ask for it, and whether it was answered in time.
//! * [`Sight`]: what `ip`, `tc`, `nft` and `/proc` see, so that "nothing is left" is said by somebody else than us.
//! * [`road`]: one pod from CreateVM to a running exec and away again, as `make demo` shows it and the tests check it.
//!
//! Needs root. Everything is named after the process and a counter, so any number of worlds live side by side, and is
//! taken away when the world is dropped, and when the process dies without dropping anything.

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
pub mod road;
mod sight;
mod spawner;
pub mod spy;
pub mod stop;
pub mod traffic;
mod wait;
mod world;

pub use command::ip;
pub use container::{Container, share};
pub use daemons::{Daemons, LedgerEntry, Settings, binary};
pub use libvirtd::Libvirtd;
pub use sight::Sight;
pub use spawner::Spawner;
pub use wait::{eventually, eventually_blocking};
pub use world::{Namespace, Pod, World};
