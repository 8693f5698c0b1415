//! Runs the controller, which manages VMs and objects that must be right whether or not their node still runs.
//!
//! One process runs several parts ([`parts`]), started by [`app`]. Parts that act for the whole cluster run in one
//! replica at a time, under a Lease (`peerpod_kube::lease`), and check the Lease before each effect. The others run in
//! every replica.
//!
//! The controller uses Kubernetes, and providers only through `peerpod-providers`, none by name. May touch: the API
//! server, the provider (lists and deletes, never creates), its admin port.

mod app;
mod config;
mod parts;
mod vms;

use kube::Client;
use kube::runtime::events::Recorder;
use peerpod_base::admin::Ready;
use peerpod_base::lifecycle::{Drain, Shutdown};

pub(crate) use app::build;
pub(crate) use parts::ControllerSettings;

/// Context of a running part. Clones share everything.
#[derive(Clone)]
pub(crate) struct Context {
    /// Client of the API server. Every call uses `peerpod_kube::client::within`.
    pub(crate) client: Client,
    /// Namespace of the controller, for Leases and its own Secrets.
    pub(crate) namespace: String,
    pub(crate) events: Recorder,
    /// Reports the state of a part, under the part's name.
    pub(crate) ready: Ready,
    /// Signals the end of the process. A leader's part is dropped then, or when the Lease is lost. The others end
    /// themselves soon after.
    pub(crate) shutdown: Shutdown,
    /// Guards of operations that must not be cut off at the end.
    pub(crate) drain: Drain,
}
