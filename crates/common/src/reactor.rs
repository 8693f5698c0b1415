//! Registers descriptors of any kind with tokio. Lives in one place because the call is `unsafe` for types in general.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor, which should not block, with the calling task's runtime. Fails for a plain file.
#[allow(unsafe_code)]
pub fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` returns the same open descriptor for as long as it lives, and it lives in the `AsyncFd`.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
