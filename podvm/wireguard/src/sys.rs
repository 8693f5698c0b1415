//! Makes the kernel request that no dependency offers: for datagrams that may be fragmented.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;

/// Lets routers (and this kernel) fragment the socket's datagrams: a path that is unexpectedly narrow is then slow
/// instead of silent.
pub(crate) fn may_be_fragmented(socket: BorrowedFd<'_>, v6: bool) -> io::Result<()> {
    let mut options = vec![(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)];
    if v6 {
        options.push((libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DONT));
        options.push((libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 0));
    }
    for (level, option, value) in options {
        let value: libc::c_int = value;
        // SAFETY: the descriptor is open, and the kernel reads `size_of::<c_int>()` bytes of a local variable.
        // nix and socket2 do not have these options.
        #[allow(unsafe_code)]
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                level,
                option,
                std::ptr::from_ref(&value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        nix::errno::Errno::result(result)?;
    }
    Ok(())
}
