//! Wire types and ttrpc services, generated from `protos/` at build time. No logic lives here.
//!
//! * [`hypervisor`], [`podvminfo`]: what Kata's shims call on `hypervisor.sock`.
//! * [`agent`]: the kata-agent's API (`grpc.AgentService`, `grpc.Health`) with its real field numbers.
//! * [`hub`]: what the kata-agent asks for images.
//! * [`csi`]: of the Container Storage Interface what our wrapper touches.
//! * [`ttrpc_frame`]: the request and response envelopes inside ttrpc frames, for code that handles frames itself.
//! * [`node`], [`relay`], [`guest`], [`volumes`]: our own processes among themselves.
//! * [`provider`]: providers in other processes, repositories and languages.
//!
//! Unknown fields survive decoding and encoding (rust-protobuf keeps them); `tests/` holds us to it.

// What the generator writes is not held to our lints.
#[allow(clippy::all, clippy::unwrap_used, clippy::let_underscore_must_use)]
#[allow(missing_docs, unreachable_pub, rust_2018_idioms, unused)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}

pub use generated::*;
