//! Reads identities of disks that sysfs shows only in part: pages of SCSI's vital product data, and the vendor's bytes of
//! an NVMe namespace. Pure, except for [`identify_namespace`]. May read: the device node that the caller passes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use serde::Deserialize;

/// Length of the answer to Identify, and begin of its vendor specific part (NVM Express base specification).
const IDENTIFY: usize = 4096;
const VENDOR: usize = 384;
/// Opcode of Identify. Its first command-specific word is 0 for a namespace.
const OPCODE: u8 = 6;
/// Time limit in milliseconds: the hypervisor itself answers.
const PATIENCE: u32 = 1000;

/// Header of a page of vital product data, and of a descriptor in page 0x83 (SPC-4).
const HEADER: usize = 4;
/// Type of a descriptor in page 0x83 that begins with the vendor's name.
const T10_VENDOR: u8 = 1;

mod ioctls {
    /// `struct nvme_passthru_cmd` of linux/nvme_ioctl.h.
    #[repr(C)]
    #[derive(Default)]
    pub(super) struct NvmeCommand {
        pub(super) opcode: u8,
        pub(super) flags: u8,
        pub(super) reserved: u16,
        pub(super) nsid: u32,
        pub(super) words_2_3: [u32; 2],
        pub(super) metadata: u64,
        pub(super) address: u64,
        pub(super) metadata_length: u32,
        pub(super) length: u32,
        pub(super) words_10_15: [u32; 6],
        pub(super) timeout_ms: u32,
        pub(super) result: u32,
    }

    nix::ioctl_readwrite!(
        /// Sends an administrative command to the controller of a namespace.
        nvme_admin,
        b'N',
        0x41,
        NvmeCommand
    );
}

/// Returns the content of a page of vital product data: the bytes after its header.
fn content(bytes: &[u8], number: u8) -> Option<&[u8]> {
    let (header, content) = bytes.split_at_checked(HEADER)?;
    let length = usize::from(u16::from_be_bytes([header[2], header[3]]));
    content.get(..length).filter(|_| header[1] == number)
}

fn text(bytes: &[u8]) -> Option<String> {
    let text = str::from_utf8(bytes).ok()?.trim_matches(['\0', ' ', '\n']);
    (!text.is_empty()).then(|| text.to_owned())
}

/// Returns the serial number in page 0x80 of a SCSI disk.
pub(super) fn scsi_serial(vpd_pg80: &[u8]) -> Option<String> {
    text(content(vpd_pg80, 0x80)?)
}

/// Returns Google's device name in page 0x83 of a SCSI disk. Its T10 descriptor has 8 bytes for the vendor, `Google`,
/// and 16 bytes for the product, `PersistentDisk`. The name follows.
pub(super) fn google_scsi_name(vpd_pg83: &[u8]) -> Option<String> {
    let mut rest = content(vpd_pg83, 0x83)?;
    while let Some((header, after)) = rest.split_at_checked(HEADER) {
        let (identifier, next) = after.split_at_checked(usize::from(header[3]))?;
        rest = next;
        if header[1] & 0xf != T10_VENDOR {
            continue;
        }
        let name = text(identifier).and_then(|all| {
            let product = all.strip_prefix("Google")?.trim_start();
            text(product.strip_prefix("PersistentDisk")?.as_bytes())
        });
        if name.is_some() {
            return name;
        }
    }
    None
}

/// Returns Google's device name in the answer to Identify of an NVMe namespace. The vendor's bytes are JSON with zeros
/// after it: `{"device_name":"…", …}`.
pub(super) fn google_nvme_name(identify: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Vendor {
        device_name: String,
    }
    let json = identify.get(VENDOR..)?.split(|byte| *byte == 0).next()?;
    let vendor: Vendor = serde_json::from_slice(json).ok()?;
    Some(vendor.device_name).filter(|name| !name.is_empty())
}

/// Asks an NVMe namespace for its Identify data. Blocks, for a second at most.
#[expect(unsafe_code, reason = "sysfs has no vendor's bytes of a namespace; only this ioctl returns them")]
pub(super) fn identify_namespace(node: &Path, nsid: u32) -> io::Result<Vec<u8>> {
    let device = File::open(node)?;
    let mut answer = vec![0_u8; IDENTIFY];
    let mut command = ioctls::NvmeCommand {
        opcode: OPCODE,
        nsid,
        address: answer.as_mut_ptr() as u64,
        length: IDENTIFY as u32,
        timeout_ms: PATIENCE,
        ..ioctls::NvmeCommand::default()
    };
    // SAFETY: the descriptor is open; the kernel writes at most `length` bytes at `address`, which is the buffer of this
    // length, and both live until the call returns.
    let status = unsafe { ioctls::nvme_admin(device.as_raw_fd(), &raw mut command) }?;
    if status == 0 { Ok(answer) } else { Err(io::Error::other(format!("NVMe status {status:#x}"))) }
}

#[cfg(test)]
pub(super) mod testing {
    use super::{HEADER, IDENTIFY, VENDOR};

    /// Makes a page of vital product data.
    pub(crate) fn page(number: u8, content: &[u8]) -> Vec<u8> {
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        [&[0, number][..], &length, content].concat()
    }

    /// Makes a descriptor of page 0x83.
    pub(crate) fn descriptor(kind: u8, identifier: &[u8]) -> Vec<u8> {
        let header: [u8; HEADER] = [2, kind, 0, u8::try_from(identifier.len()).unwrap()];
        [&header[..], identifier].concat()
    }

    /// Makes an answer to Identify with these bytes of the vendor.
    pub(crate) fn identify(vendor: &[u8]) -> Vec<u8> {
        let mut answer = vec![0; IDENTIFY];
        answer[VENDOR..VENDOR + vendor.len()].copy_from_slice(vendor);
        answer
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::*;
    use super::*;

    #[test]
    fn the_command_has_the_size_of_the_kernels() {
        assert_eq!(size_of::<ioctls::NvmeCommand>(), 72);
    }

    #[test]
    fn a_scsi_disk_has_its_serial_in_page_80() {
        let serial = |bytes: &[u8]| scsi_serial(bytes);
        assert_eq!(serial(&page(0x80, b"  6000c29a  ")).as_deref(), Some("6000c29a"));
        assert_eq!(serial(&page(0x80, b"    ")), None);
        assert_eq!(serial(&page(0x83, b"6000c29a")), None, "another page");
        assert_eq!(serial(&page(0x80, b"6000c29a")[..8]), None, "cut off");
        assert_eq!(serial(&page(0x80, &[0xff; 4])), None, "no text");
    }

    #[test]
    fn google_names_its_scsi_disks_in_page_83() {
        let named = |kind, identifier: &[u8]| google_scsi_name(&page(0x83, &descriptor(kind, identifier)));
        let google = b"Google  PersistentDisk  pp-data-1";
        assert_eq!(named(1, google).as_deref(), Some("pp-data-1"));
        assert_eq!(named(1, b"Google  PersistentDisk  pp-data-1\0\0\0").as_deref(), Some("pp-data-1"));
        assert_eq!(named(3, google), None, "a World Wide Name");
        assert_eq!(named(1, b"Google  EphemeralDisk   local-ssd-0"), None, "a disk of the VM itself");
        assert_eq!(named(1, b"Google  PersistentDisk  "), None);
        assert_eq!(named(1, b"Msft    Virtual Disk    pp-data-1"), None);
        let several = [descriptor(3, &[0x60; 16]), descriptor(1, google)].concat();
        assert_eq!(google_scsi_name(&page(0x83, &several)).as_deref(), Some("pp-data-1"));
        assert_eq!(google_scsi_name(&page(0x83, &several[..30])), None, "cut off");
    }

    #[test]
    fn google_names_its_nvme_disks_in_the_vendors_bytes() {
        let named = |vendor: &[u8]| google_nvme_name(&identify(vendor));
        let json = br#"{"device_name":"pp-data-1","disk_type":"PERSISTENT"}"#;
        assert_eq!(named(json).as_deref(), Some("pp-data-1"));
        assert_eq!(named(br#"{"device_name":""}"#), None);
        assert_eq!(named(b"type=data,lun=4,name=data-db"), None);
        assert_eq!(named(b""), None);
        assert_eq!(google_nvme_name(&[0; 100]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_of_a_disk_are_handled(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _maybe = (scsi_serial(&bytes), google_scsi_name(&bytes), google_nvme_name(&bytes));
            let _maybe = google_scsi_name(&page(0x83, &bytes));
            let _maybe = google_nvme_name(&identify(&bytes));
        }
    }
}
