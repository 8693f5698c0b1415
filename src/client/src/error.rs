//! What can go wrong between us and a socket.

use std::{io, path::PathBuf, time::Duration};

/// An error of a call, with what was attempted on what.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket did not accept a connection.
    #[error("connect to {}: {source}", path.display())]
    Connect {
        /// The unix socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The socket accepted nobody within the shim's patience.
    #[error("connect to {}: no answer within {waited:?}; last error: {last}", path.display())]
    ConnectTimeout {
        /// The unix socket.
        path: PathBuf,
        /// How long it was tried.
        waited: Duration,
        /// What the last attempt met.
        last: io::Error,
    },
    /// A call was answered with an error, or not at all.
    #[error("{method} of {subject}: {}", text(source))]
    Call {
        /// The method's name.
        method: &'static str,
        /// The sandbox, container or process it was about.
        subject: String,
        /// The answer.
        source: ttrpc::Error,
    },
    /// CreateVM was answered without a path.
    #[error("CreateVM of {0}: the answer has no agent socket path")]
    NoAgentSocket(String),
}

impl Error {
    /// The gRPC code of the answer, if there was one.
    pub fn code(&self) -> Option<ttrpc::Code> {
        match self {
            Error::Call { source: ttrpc::Error::RpcStatus(status), .. } => Some(status.code()),
            _ => None,
        }
    }

    /// The answer's own text, without what was attempted; empty when there was no answer.
    pub fn answer(&self) -> &str {
        match self {
            Error::Call { source: ttrpc::Error::RpcStatus(status), .. } => &status.message,
            _ => "",
        }
    }
}

/// `rpc status: Status {…}` is for machines; people get code and text.
fn text(error: &ttrpc::Error) -> String {
    match error {
        ttrpc::Error::RpcStatus(status) => format!("{:?}: {}", status.code(), status.message),
        other => other.to_string(),
    }
}
