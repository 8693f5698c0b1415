//! Builds the errors of failed calls, with the real agent's texts where shims compare them.

use nix::errno::Errno;
use ttrpc::{Code, Error};

/// Returns an error with this code and text.
pub(crate) fn status(code: Code, text: impl ToString) -> Error {
    Error::RpcStatus(ttrpc::get_status(code, text))
}

/// The real agent's error for an unknown container.
pub(crate) fn no_container() -> Error {
    status(Code::NOT_FOUND, "Invalid container id")
}

/// The real agent's error for an unknown or removed exec; recorded in the transcripts.
pub(crate) fn no_exec() -> Error {
    status(Code::NOT_FOUND, "InvalidExecId")
}

/// A kernel error in the real agent's form: `ESRCH: No such process`. Shims look for the second half.
pub(crate) fn errno(errno: Errno) -> Error {
    status(Code::INTERNAL, errno)
}

/// An input or output error, in the form of [`errno`] if it has a number.
pub(crate) fn io(error: std::io::Error) -> Error {
    match error.raw_os_error() {
        Some(number) => errno(Errno::from_raw(number)),
        None => status(Code::INTERNAL, error),
    }
}

/// Error for an invalid request.
pub(crate) fn invalid(text: impl ToString) -> Error {
    status(Code::INVALID_ARGUMENT, text)
}
