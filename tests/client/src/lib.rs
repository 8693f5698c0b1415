//! Calls `hypervisor.sock` and `agent.ttrpc` exactly as a Kata shim does: the same nine annotations, the same
//! deadlines, the same order and number of connections. The demo, the tests and the benches use it, so their results
//! apply to a real shim. It touches only those two sockets.

mod agent;
mod annotations;
mod container;
mod error;
mod shim;

pub use agent::{AgentClient, Output};
pub use annotations::Annotations;
pub use container::{ContainerSpec, SHARED_CONTAINERS, bundle_annotation, copy_file, exec_request};
pub use error::Error;
pub use shim::{START_TIMEOUT, STOP_TIMEOUT, ShimClient};
