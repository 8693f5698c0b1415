//! Builds the NoCloud disk: a FAT image labelled `CIDATA` with the files `user-data` and `meta-data`. Pure.

use std::io::{self, Cursor, Write as _};

/// Space beside the files, for the file system's own data. Some readers do not accept a full disk.
const SPARE: usize = 256 << 10;
/// Size of the image is a multiple of this.
const STEP: usize = 64 << 10;

/// Returns the image. The same files give the same image.
pub(crate) fn image(user_data: &[u8], meta_data: &[u8]) -> io::Result<Vec<u8>> {
    let size = (user_data.len() + meta_data.len() + SPARE).next_multiple_of(STEP);
    let mut disk = Cursor::new(vec![0; size]);
    let options = fatfs::FormatVolumeOptions::new().volume_label(*b"CIDATA     ");
    fatfs::format_volume(&mut disk, options)?;
    {
        let system = fatfs::FileSystem::new(&mut disk, fatfs::FsOptions::new())?;
        for (name, data) in [("user-data", user_data), ("meta-data", meta_data)] {
            system.root_dir().create_file(name)?.write_all(data)?;
        }
    }
    Ok(disk.into_inner())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

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
