//! Answers to calls that cannot be done, in the words of the real agent where shims look at them.

use nix::errno::Errno;
use ttrpc::{Code, Error};

/// An answer with this code and text.
pub(crate) fn status(code: Code, text: impl ToString) -> Error {
    Error::RpcStatus(ttrpc::get_status(code, text))
}

/// What the real agent says about a container it does not know.
pub(crate) fn no_container() -> Error {
    status(Code::NOT_FOUND, "Invalid container id")
}

/// What the real agent says about an exec it does not know (any more); recorded in the transcripts.
pub(crate) fn no_exec() -> Error {
    status(Code::NOT_FOUND, "InvalidExecId")
}

/// A kernel error as the real agent words it: `ESRCH: No such process`. Shims look for the second half.
pub(crate) fn errno(errno: Errno) -> Error {
    status(Code::INTERNAL, errno)
}

/// An input or output error, worded like [`errno`] where it has a number.
pub(crate) fn io(error: std::io::Error) -> Error {
    match error.raw_os_error() {
        Some(number) => errno(Errno::from_raw(number)),
        None => status(Code::INTERNAL, error),
    }
}

/// Something in the request that cannot be.
pub(crate) fn invalid(text: impl ToString) -> Error {
    status(Code::INVALID_ARGUMENT, text)
}
