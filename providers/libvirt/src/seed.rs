//! Builds the NoCloud disk: a FAT12 image labelled `CIDATA` with the files `user-data` and `meta-data`. Pure.
//!
//! Two files of known size in a fresh image need little code. The crate that writes FAT (fatfs) has had no release for
//! years and brings dependencies in versions of its own.

const SECTOR: usize = 512;
const CLUSTER: usize = 2048;
const RESERVED: usize = 1;
const ROOT_ENTRIES: usize = 32;
/// FAT12 ends below 4085 clusters.
const CLUSTERS: usize = 4000;
const FAT_SECTORS: usize = 12;
const DATA: usize = (RESERVED + 2 * FAT_SECTORS) * SECTOR + ROOT_ENTRIES * 32;
const END: u16 = 0xfff;

/// Returns the image; `None` if these files are too large for one (some 8 MB).
pub(crate) fn image(user_data: &[u8], meta_data: &[u8]) -> Option<Vec<u8>> {
    let files = [("user-data", *b"USER-D~1   ", user_data), ("meta-data", *b"META-D~1   ", meta_data)];
    let used: usize = files.iter().map(|(_, _, data)| data.len().div_ceil(CLUSTER)).sum();
    // Spare clusters: some readers do not accept a full disk.
    let clusters = used + 16;
    if clusters > CLUSTERS {
        return None;
    }
    let mut image = vec![0; DATA + clusters * CLUSTER];
    boot_sector(&mut image);
    let mut fat = vec![0xff8, END];
    let mut root = entry(*b"CIDATA     ", 0x08, 0, 0).to_vec();
    for (name, short, data) in files {
        let first = if data.is_empty() { 0 } else { fat.len() };
        let count = data.len().div_ceil(CLUSTER);
        for number in 1..=count {
            let next = u16::try_from(fat.len() + 1).unwrap_or(END);
            fat.push(if number == count { END } else { next });
        }
        let at = DATA + first.saturating_sub(2) * CLUSTER;
        image.get_mut(at..at + data.len())?.copy_from_slice(data);
        root.extend(long_name(name, short));
        root.extend(entry(short, 0x20, u16::try_from(first).ok()?, u32::try_from(data.len()).ok()?));
    }
    for copy in 0..2 {
        write_fat(&mut image, (RESERVED + copy * FAT_SECTORS) * SECTOR, &fat);
    }
    let at = (RESERVED + 2 * FAT_SECTORS) * SECTOR;
    image.get_mut(at..at + root.len())?.copy_from_slice(&root);
    Some(image)
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = image.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

fn boot_sector(image: &mut [u8]) {
    let sectors = u16::try_from(image.len() / SECTOR).unwrap_or(u16::MAX);
    put(image, 0, &[0xeb, 0x3c, 0x90]);
    put(image, 3, b"PEERPOD ");
    put(image, 11, &(SECTOR as u16).to_le_bytes());
    put(image, 13, &[(CLUSTER / SECTOR) as u8]);
    put(image, 14, &(RESERVED as u16).to_le_bytes());
    put(image, 16, &[2]);
    put(image, 17, &(ROOT_ENTRIES as u16).to_le_bytes());
    put(image, 19, &sectors.to_le_bytes());
    put(image, 21, &[0xf8]);
    put(image, 22, &(FAT_SECTORS as u16).to_le_bytes());
    put(image, 24, &[32, 0, 2, 0]);
    put(image, 36, &[0x80, 0, 0x29]);
    put(image, 39, b"PPOD");
    put(image, 43, b"CIDATA     ");
    put(image, 54, b"FAT12   ");
    put(image, 510, &[0x55, 0xaa]);
}

/// Writes entries of twelve bits each.
fn write_fat(image: &mut [u8], at: usize, fat: &[u16]) {
    for (pair, entries) in fat.chunks(2).enumerate() {
        let (one, other) = (entries[0], entries.get(1).copied().unwrap_or(0));
        let bytes = [one as u8, (one >> 8) as u8 | ((other & 0xf) << 4) as u8, (other >> 4) as u8];
        put(image, at + pair * 3, &bytes);
    }
}

fn entry(name: [u8; 11], attributes: u8, cluster: u16, size: u32) -> [u8; 32] {
    let mut entry = [0; 32];
    put(&mut entry, 0, &name);
    entry[11] = attributes;
    // A valid date in FAT: 1980-01-01.
    put(&mut entry, 16, &0x21u16.to_le_bytes());
    put(&mut entry, 24, &0x21u16.to_le_bytes());
    put(&mut entry, 26, &cluster.to_le_bytes());
    put(&mut entry, 28, &size.to_le_bytes());
    entry
}

/// Returns the directory entry of a long name. One entry has room for 13 characters: at most 12, and a terminator.
fn long_name(name: &str, short: [u8; 11]) -> [u8; 32] {
    let sum = short.iter().fold(0u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
    let mut letters: Vec<u16> = name.encode_utf16().take(12).chain([0]).collect();
    letters.resize(13, 0xffff);
    let mut entry = [0; 32];
    (entry[0], entry[11], entry[13]) = (0x41, 0x0f, sum);
    let places = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];
    for (at, letter) in places.into_iter().zip(letters) {
        put(&mut entry, at, &letter.to_le_bytes());
    }
    entry
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

    #[test]
    fn too_much_data_gives_no_image() {
        assert!(image(&vec![0; 9 << 20], b"").is_none());
        assert!(image(b"", b"").is_some());
    }

    /// Checks the image with the independent reader mtools.
    #[test]
    fn mtools_read_the_files_by_their_names_byte_for_byte() {
        let dir = std::env::temp_dir().join(format!("peerpod-seed-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let meta = b"instance-id: x\n";
        for (number, length) in [0usize, 1, 2047, 2048, 2049, 65_536, 1 << 20].into_iter().enumerate() {
            let data: Vec<u8> = (0..length).map(|index| (index * 7 % 251) as u8).collect();
            let file = dir.join(format!("{number}.img"));
            std::fs::write(&file, image(&data, meta).unwrap()).unwrap();
            let read = |name: &str| {
                let output = Command::new("mtype").arg("-i").args([&file, Path::new(name)]).output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                output.stdout
            };
            assert_eq!(read("::user-data"), data, "{length}");
            assert_eq!(read("::meta-data"), meta);
            let label =
                Command::new("blkid").args(["-p", "-o", "value", "-s", "LABEL"]).arg(&file).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&label.stdout).trim(), "CIDATA");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
