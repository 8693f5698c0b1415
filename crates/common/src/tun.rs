//! Opens TUN devices, and queries them: the requests that no dependency offers. Touches `/dev/net/tun`.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;

/// An open TUN device. Dropping it closes the descriptor; a persistent device stays.
#[derive(Debug)]
pub struct Tun(OwnedFd);

#[allow(unsafe_code)] // from the macro; each call below has its SAFETY comment
mod requests {
    nix::ioctl_write_int!(tun_set_iff, b'T', 202);
    nix::ioctl_write_int!(tun_set_persist, b'T', 203);
    nix::ioctl_read!(tun_get_iff, b'T', 210, nix::libc::c_uint);
    nix::ioctl_none!(tun_get_dev_netns, b'T', 227);
}

/// Opens the TUN device `name` in the calling thread's network namespace, or creates it: layer 3, with a header that
/// describes the segmentation of packets (`Tun::has_prefix`). The device persists until its namespace ends.
///
/// # Errors
/// `ResourceBusy` if it is open already; `NotFound` without the module tun; `PermissionDenied` without CAP_NET_ADMIN.
pub fn open_tun(name: &str) -> io::Result<Tun> {
    let file: File =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // Layout of <linux/if.h>: 16 bytes of name, then a union; its first bytes here are the flags.
    let mut request = [0u8; size_of::<libc::ifreq>()];
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ || bytes.contains(&0) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no name of a network device"));
    }
    let flags = (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
    for (to, from) in request.iter_mut().zip(bytes) {
        *to = *from;
    }
    for (to, from) in request.iter_mut().skip(libc::IFNAMSIZ).zip(flags.to_ne_bytes()) {
        *to = from;
    }
    // SAFETY: the descriptor is open, and the kernel reads and writes one `ifreq`, of which `request` has the size.
    // Only this request selects a TUN device by name.
    #[allow(unsafe_code)]
    let named = unsafe { requests::tun_set_iff(file.as_raw_fd(), request.as_mut_ptr() as libc::c_ulong) };
    named.map_err(io::Error::from)?;
    // SAFETY: the descriptor is open, and the argument is a number, not an address.
    #[allow(unsafe_code)]
    let kept = unsafe { requests::tun_set_persist(file.as_raw_fd(), 1) };
    kept.map_err(io::Error::from)?;
    Ok(Tun(file.into()))
}

impl Tun {
    /// Returns the network namespace of the device.
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_NET_ADMIN; kernels before 5.7 do not support the request.
    pub fn netns(&self) -> io::Result<OwnedFd> {
        // SAFETY: the descriptor is open, and the request has no argument.
        #[allow(unsafe_code)]
        let opened = unsafe { requests::tun_get_dev_netns(self.0.as_raw_fd()) }.map_err(io::Error::from)?;
        // SAFETY: the kernel made this descriptor for the result of this call; it has no other owner.
        #[allow(unsafe_code)]
        Ok(unsafe { OwnedFd::from_raw_fd(opened) })
    }

    /// Returns whether a `virtio_net_hdr` precedes each packet, which depends on the opener of the device.
    pub fn has_prefix(&self) -> io::Result<bool> {
        let mut request = [0u8; size_of::<libc::ifreq>()];
        // SAFETY: the descriptor is open, and the kernel writes one `ifreq`, of which `request` has the size.
        #[allow(unsafe_code)]
        let read = unsafe { requests::tun_get_iff(self.0.as_raw_fd(), request.as_mut_ptr().cast()) };
        read.map_err(io::Error::from)?;
        let flags = request.get(libc::IFNAMSIZ..).and_then(|rest| rest.first_chunk());
        Ok(flags.is_some_and(|flags| i16::from_ne_bytes(*flags) & libc::IFF_VNET_HDR as i16 != 0))
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Tun {
    fn from(fd: OwnedFd) -> Tun {
        Tun(fd)
    }
}

impl From<Tun> for OwnedFd {
    fn from(tun: Tun) -> OwnedFd {
        tun.0
    }
}
