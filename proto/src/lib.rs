//! Holds the wire types and ttrpc services, generated from `protos/` at build time. No logic lives here.
//!
//! * [`hypervisor`], [`podvminfo`]: the calls of Kata's shims on `hypervisor.sock`.
//! * [`agent`]: the kata-agent's API (`grpc.AgentService`, `grpc.Health`) with its real field numbers.
//! * [`hub`]: the kata-agent's calls for images.
//! * [`csi`]: the parts of the Container Storage Interface that the CSI wrapper uses.
//! * [`ttrpc_frame`]: the request and response envelopes inside ttrpc frames, for code that handles frames itself.
//! * [`node`], [`relay`], [`guest`], [`volumes`]: calls between Peerpod's own processes.
//! * [`provider`]: calls to providers in other processes, repositories and languages.
//!
//! Unknown fields survive decoding and encoding (rust-protobuf keeps them); `tests/` checks this.

// Generated code is exempt from the workspace's lints.
#[allow(clippy::all, clippy::unwrap_used, clippy::let_underscore_must_use)]
#[allow(missing_docs, unreachable_pub, rust_2018_idioms, unused)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}

pub use generated::*;
