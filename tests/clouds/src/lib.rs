//! Provides clouds for tests of providers: fakes of our own, because no obtainable program behaves like these clouds.
//!
//! * [`Cloud`]: an HTTP server with one cloud for one test. It injects faults, throttles as the cloud does, checks tokens
//!   and records every call. Its time can be stopped.
//! * [`Fake`]: the part of one cloud.
//! * [`Alibaba`]: Alibaba Cloud's Elastic Compute Service with instances, disks, types and vSwitches, the check of
//!   signatures, and the services that issue temporary keys.
//! * [`Azure`]: Azure Resource Manager with virtual machines, network interfaces, disks, sizes and usages, and the
//!   services that issue tokens.
//! * [`Gcp`]: Google's Compute Engine with instances, bulk inserts, disks, operations and machine types, and the
//!   services that issue tokens.
//! * [`IbmCloud`]: IBM Cloud's VPC API with instances, volumes and profiles, [`iam`] and Global Tagging.
//! * [`PowerVs`]: IBM Power Virtual Server with VMs, networks and DHCP leases.
//! * [`Vcsim`]: govmomi's simulator of a vCenter, behind a proxy that breaks connections.
//! * [`witness`]: the vendors' models and clients.
//!
//! The fakes are kept honest from both sides: the vendors' models check our requests, and the vendors' clients read the
//! fakes' answers.

pub mod alibaba;
pub mod azure;
mod body;
mod clock;
mod cloud;
mod core;
mod fake;
mod faults;
pub mod gcp;
pub mod iam;
pub mod ibmcloud;
pub mod powervs;
mod rates;
mod server;
mod store;
mod tokens;
pub mod vcsim;
pub mod witness;

pub use alibaba::Alibaba;
pub use azure::Azure;
pub use clock::stamp;
pub use cloud::Cloud;
pub use core::Call;
pub use fake::{Answer, Fake, Request, World, pairs};
pub use faults::{Fault, Faults};
pub use gcp::Gcp;
pub use ibmcloud::IbmCloud;
pub use powervs::PowerVs;
pub use rates::{Rate, Rates};
pub use server::listen;
pub use store::{Store, Stored};
pub use tokens::Tokens;
pub use vcsim::Vcsim;
