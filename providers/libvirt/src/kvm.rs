//! Asks this host's kernel for a VM of KVM. May touch: the device.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;

/// Device of KVM.
pub(crate) const DEVICE: &str = "/dev/kvm";

/// Errors that prove nothing about KVM: the process has no device or no right to it, as in a container, or the host is
/// short of a resource at the moment.
const NO_PROOF: [Errno; 7] =
    [Errno::ENOENT, Errno::EACCES, Errno::EPERM, Errno::ENOMEM, Errno::EMFILE, Errno::ENFILE, Errno::EINTR];

#[allow(unsafe_code)] // from the macro; the call below has its SAFETY comment
mod requests {
    nix::ioctl_write_int_bad!(kvm_create_vm, nix::request_code_none!(0xae, 0x01));
}

/// Returns whether the kernel makes a VM, or its refusal; `None`: this process cannot ask it.
pub(crate) fn ask(device: &Path) -> Option<io::Result<()>> {
    let made = OpenOptions::new().read(true).write(true).open(device).and_then(|file| make(&file));
    let is_proof =
        |error: &io::Error| !NO_PROOF.map(|no_proof| Some(no_proof as i32)).contains(&error.raw_os_error());
    made.as_ref().err().is_none_or(is_proof).then_some(made)
}

/// Makes a VM, and ends it.
fn make(device: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the argument is a number, the default type of VM.
    #[allow(unsafe_code)]
    let vm = unsafe { requests::kvm_create_vm(device.as_raw_fd(), 0) }.map_err(io::Error::from)?;
    // SAFETY: the kernel made this descriptor for the result of this call; it has no other owner.
    #[allow(unsafe_code)]
    drop(unsafe { OwnedFd::from_raw_fd(vm) });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_that_makes_no_vm_is_a_proof_against_kvm() {
        for no_kvm in ["/dev/null", "/proc/self/comm"] {
            let error = ask(Path::new(no_kvm)).unwrap().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::ENOTTY as i32), "{no_kvm}");
        }
        assert!(ask(Path::new("/dev/absent")).is_none());
    }
}
