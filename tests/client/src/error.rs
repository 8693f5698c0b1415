//! Errors of the calls to a socket.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Error of a call, with its method and subject.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket did not accept a connection.
    #[error("connect to {}: {source}", path.display())]
    Connect {
        /// Path of the Unix socket.
        path: PathBuf,
        /// Reason.
        source: io::Error,
    },
    /// The socket accepted no connection within the shim's time limit.
    #[error("connect to {}: no answer within {waited:?}; last error: {last}", path.display())]
    ConnectTimeout {
        /// Path of the Unix socket.
        path: PathBuf,
        /// Time spent on attempts.
        waited: Duration,
        /// Error of the last attempt.
        last: io::Error,
    },
    /// A call got an error, or no answer.
    #[error("{method} of {subject}: {}", text(source))]
    Call {
        /// Name of the method.
        method: &'static str,
        /// Sandbox, container or process of the call.
        subject: String,
        /// Error from ttrpc.
        source: ttrpc::Error,
    },
    /// An earlier call of this method got an error, and a shim does not repeat it.
    #[error("{method} of {subject} is over: a shim does not ask again after an error")]
    Over {
        /// Name of the method.
        method: &'static str,
        /// Process of the call.
        subject: String,
    },
    /// CreateVM returned no path.
    #[error("CreateVM of {0}: the answer has no agent socket path")]
    NoAgentSocket(String),
}

impl Error {
    /// Returns the gRPC code of the answer, if there was one.
    pub fn code(&self) -> Option<ttrpc::Code> {
        match self {
            Error::Call { source: ttrpc::Error::RpcStatus(status), .. } => Some(status.code()),
            _ => None,
        }
    }

    /// Returns the text of the answer alone; empty if there was no answer.
    pub fn answer(&self) -> &str {
        match self {
            Error::Call { source: ttrpc::Error::RpcStatus(status), .. } => &status.message,
            _ => "",
        }
    }
}

/// Formats an error as code and text, because `rpc status: Status {…}` is for machines.
fn text(error: &ttrpc::Error) -> String {
    match error {
        ttrpc::Error::RpcStatus(status) => format!("{:?}: {}", status.code(), status.message),
        other => other.to_string(),
    }
}
