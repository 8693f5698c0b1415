//! Reads dm-verity's header from the disk and writes the table for the kernel
//! (Documentation/admin-guide/device-mapper/verity.rst). The header is not trusted: with a wrong header no block has
//! the right hash.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Length of the header in bytes; the hashes follow it.
const HEADER_LEN: usize = 512;
const BLOCK: u32 = 4096;
const SECTOR: u64 = 512;
/// Hexadecimal digits of a hash of 32 bytes (SHA-256).
const HASH_LEN: usize = 64;
const MAX_SALT: usize = 256;

/// Reads the hash on which all verification rests from the kernel's command line: lower-case hexadecimal digits. `None`:
/// the root is not verified. An invalid hash is an error, and so are two hashes.
pub(crate) fn root_hash(line: &str) -> Result<Option<&str>, String> {
    let mut words = line.split_whitespace().filter_map(|word| word.strip_prefix("roothash="));
    match (words.next(), words.next()) {
        (Some(_), Some(_)) => Err("the kernel's command line has two root hashes".to_owned()),
        (Some(hash), None) if hash.len() != HASH_LEN || !hash.bytes().all(is_digit) => {
            Err(format!("roothash={hash}: not a SHA-256 hash"))
        }
        (hash, _) => Ok(hash),
    }
}

fn is_digit(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

/// Parameters of the hashes on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    blocks: u64,
    salt: String,
}

impl Header {
    /// Reads the header from the partition with the hashes.
    pub(crate) fn read(device: &Path) -> Result<Header, String> {
        let mut bytes = [0; HEADER_LEN];
        let (read, device) = (File::open(device), device.display());
        read.and_then(|mut file| file.read_exact(&mut bytes))
            .map_err(|error| format!("read {device}: {error}"))?;
        Header::parse(&bytes).ok_or_else(|| format!("{device}: not the header of dm-verity's hashes"))
    }

    fn parse(bytes: &[u8; HEADER_LEN]) -> Option<Header> {
        let number = |at: usize| Some(u32::from_le_bytes(bytes[at..at + 4].try_into().ok()?));
        let right = bytes.starts_with(b"verity\0\0")
            && number(8)? == 1 // version
            && number(12)? == 1 // layout of the hashes: not that of Chrome OS
            && bytes[32..64].starts_with(b"sha256\0")
            && number(64)? == BLOCK
            && number(68)? == BLOCK;
        let blocks = u64::from_le_bytes(bytes[72..80].try_into().ok()?);
        let salt_len = usize::from(u16::from_le_bytes([bytes[80], bytes[81]]));
        // No image of this project has more than 2^40 blocks of 4 KiB; fewer cannot overflow the sectors below.
        if !right || salt_len > MAX_SALT || blocks == 0 || blocks >> 40 != 0 {
            return None;
        }
        let salt = hex::encode(&bytes[88..88 + salt_len]);
        Some(Header { blocks, salt })
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.blocks * u64::from(BLOCK) / SECTOR
    }

    /// Returns the parameters of the table. A block with a wrong hash panics the kernel: a program that got a read
    /// error instead might continue without the data.
    pub(crate) fn table(&self, root: &str, hashes: &str, hash: &str) -> String {
        let Header { blocks, salt } = self;
        let salt = if salt.is_empty() { "-" } else { salt };
        format!(
            "1 /dev/{root} /dev/{hashes} {BLOCK} {BLOCK} {blocks} 1 sha256 {hash} {salt} 1 panic_on_corruption"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(b"verity\0\0");
        (bytes[8], bytes[12]) = (1, 1);
        bytes[32..38].copy_from_slice(b"sha256");
        bytes[64..68].copy_from_slice(&BLOCK.to_le_bytes());
        bytes[68..72].copy_from_slice(&BLOCK.to_le_bytes());
        (bytes[72], bytes[80], bytes[88], bytes[89]) = (5, 2, 0xab, 0x01);
        bytes
    }

    #[test]
    fn the_table_has_the_format_of_the_kernel() {
        let header = Header::parse(&sample()).unwrap();
        assert_eq!(header.sectors(), 40);
        let line = format!("quiet roothash={} panic=1\n", "0a".repeat(32));
        let hash = root_hash(&line).unwrap().unwrap();
        let table =
            format!("1 /dev/a2 /dev/a3 4096 4096 5 1 sha256 {} ab01 1 panic_on_corruption", "0a".repeat(32));
        assert_eq!(header.table("a2", "a3", hash), table);
    }

    #[test]
    fn an_invalid_header_is_refused() {
        for (at, value) in
            [(0, b'x'), (8, 2), (12, 0), (32, b'x'), (64, 1), (68, 1), (72, 0), (78, 1), (81, 2)]
        {
            let mut bytes = sample();
            bytes[at] = value;
            assert_eq!(Header::parse(&bytes), None, "byte {at}");
        }
    }

    #[test]
    fn two_or_invalid_hashes_are_errors() {
        assert_eq!(root_hash("quiet"), Ok(None));
        let right = "0a".repeat(32);
        for wrong in [
            "roothash=",
            "roothash=0a",
            &format!("roothash={}", "0A".repeat(32)),
            &format!("roothash={right} roothash={right}"),
        ] {
            root_hash(wrong).unwrap_err();
        }
    }
}
