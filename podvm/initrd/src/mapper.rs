//! Creates and removes one device-mapper device with one target, by ioctls (linux/dm-ioctl.h).

use std::fs::File;
use std::os::fd::AsRawFd;

const CONTROL: &str = "/dev/mapper/control";
/// Sizes of `struct dm_ioctl`, and of `struct dm_target_spec` behind it.
const HEADER_LEN: usize = 312;
const SPEC_LEN: usize = 40;
/// Size of the message; the parameters of a verity table have a few hundred bytes.
const LEN: usize = 4096;
const READ_ONLY: u32 = 1;
/// Names of the device (at most 127 bytes) and of its target (at most 15 bytes).
const DEVICE: &str = "root";
const TARGET: &str = "verity";

mod ioctls {
    //! Each ioctl reads and writes a buffer that begins with the header, which holds the buffer's length.
    use super::HEADER_LEN;

    const KIND: u8 = 0xfd;
    nix::ioctl_readwrite!(create, KIND, 3, [u8; HEADER_LEN]);
    nix::ioctl_readwrite!(remove, KIND, 4, [u8; HEADER_LEN]);
    nix::ioctl_readwrite!(resume, KIND, 6, [u8; HEADER_LEN]);
    nix::ioctl_readwrite!(load, KIND, 9, [u8; HEADER_LEN]);
}

type Ioctl = unsafe fn(i32, *mut [u8; HEADER_LEN]) -> nix::Result<i32>;

/// Creates the read-only device; returns its path below /dev.
pub(crate) fn create(sectors: u64, parameters: &str) -> Result<String, String> {
    let what = |step: &str, error: String| format!("{step} the device-mapper device {DEVICE}: {error}");
    let answer = call(ioctls::create, &message(0, None)?).map_err(|error| what("make", error))?;
    let rest = || {
        call(ioctls::load, &message(READ_ONLY, Some((sectors, parameters)))?)?;
        call(ioctls::resume, &message(0, None)?)
    };
    if let Err(error) = rest() {
        remove();
        return Err(what("set up", error));
    }
    let device = u64::from_ne_bytes(answer[40..48].try_into().map_err(|_| "no device number")?);
    // The kernel's "huge" encoding: minor numbers in bits 0-7 and 20-31.
    Ok(format!("/dev/dm-{}", (device & 0xff) | ((device >> 12) & 0xf_ff00)))
}

/// Removes the device; reports a failure on the console.
pub(crate) fn remove() {
    if let Err(error) = message(0, None).and_then(|message| call(ioctls::remove, &message)) {
        eprintln!("peerpod-initrd: remove the device-mapper device {DEVICE}: {error}");
    }
}

#[expect(unsafe_code, reason = "the device mapper has no other interface than ioctls")]
fn call(ioctl: Ioctl, message: &[u8; LEN]) -> Result<[u8; LEN], String> {
    let control = File::options().read(true).write(true).open(CONTROL);
    let control = control.map_err(|error| format!("{CONTROL}: {error}"))?;
    let mut buffer = *message;
    // SAFETY: the kernel reads and writes no more than the length in the message, which is the length of the buffer.
    unsafe { ioctl(control.as_raw_fd(), buffer.as_mut_ptr().cast()) }.map_err(|error| error.to_string())?;
    Ok(buffer)
}

fn message(flags: u32, table: Option<(u64, &str)>) -> Result<[u8; LEN], String> {
    let mut message = [0; LEN];
    let mut put = |at: usize, bytes: &[u8]| message[at..at + bytes.len()].copy_from_slice(bytes);
    if table.is_some_and(|(_, parameters)| parameters.len() >= LEN - HEADER_LEN - SPEC_LEN) {
        return Err("too long for the device mapper".to_owned());
    }
    put(0, &4u32.to_ne_bytes()); // interface version 4.0.0
    put(12, &(LEN as u32).to_ne_bytes());
    put(16, &(HEADER_LEN as u32).to_ne_bytes());
    put(20, &u32::from(table.is_some()).to_ne_bytes());
    put(28, &flags.to_ne_bytes());
    put(48, DEVICE.as_bytes());
    if let Some((sectors, parameters)) = table {
        put(HEADER_LEN + 8, &sectors.to_ne_bytes());
        put(HEADER_LEN + 24, TARGET.as_bytes());
        put(HEADER_LEN + SPEC_LEN, parameters.as_bytes());
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oversize_value_is_refused() {
        message(0, Some((1, &"p".repeat(LEN)))).unwrap_err();
        let message = message(READ_ONLY, Some((7, "1 a b"))).unwrap();
        assert_eq!(&message[48..53], b"root\0");
        assert_eq!(&message[320..328], &7u64.to_ne_bytes());
        assert_eq!(&message[352..358], b"1 a b\0");
    }
}
