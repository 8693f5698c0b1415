//! Lists the partitions that may hold the root: those with the labels of the image. A pod's own disk may carry such
//! labels too; only the root hash decides.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

const ROOT: &str = "peerpod-root";
const HASHES: &str = "peerpod-verity";

/// Partitions of one disk, as names below /dev.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) root: String,
    /// Partition with the dm-verity hashes of the root.
    pub(crate) hashes: Option<String>,
}

pub(crate) fn candidates() -> io::Result<Vec<Candidate>> {
    read(Path::new("/sys/class/block"))
}

fn read(folder: &Path) -> io::Result<Vec<Candidate>> {
    // Grouped by disk, the folder above that of the partition.
    let mut roots = BTreeMap::new();
    let mut hashes = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        // The partition may have disappeared again.
        let Ok(said) = fs::read_to_string(path.join("uevent")) else { continue };
        let value = |key: &str| said.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let (Some(label), Some(name)) = (value("PARTNAME"), value("DEVNAME")) else { continue };
        let Some(disk) = fs::canonicalize(&path)?.parent().map(Path::to_owned) else { continue };
        match label {
            ROOT => drop(roots.insert(disk, name.to_owned())),
            HASHES => drop(hashes.insert(disk, name.to_owned())),
            _ => {}
        }
    }
    Ok(roots.into_iter().map(|(disk, root)| Candidate { root, hashes: hashes.remove(&disk) }).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn partitions_of_one_disk_belong_together() {
        let folder = std::env::temp_dir().join(format!("peerpod-initrd-{}", std::process::id()));
        let class = folder.join("class");
        fs::create_dir_all(&class).unwrap();
        for (disk, partition, label) in [
            ("vda", "vda1", "esp"),
            ("vda", "vda2", "peerpod-root"),
            ("vda", "vda3", "peerpod-verity"),
            ("vdb", "vdb1", "peerpod-root"),
        ] {
            let place = folder.join(disk).join(partition);
            fs::create_dir_all(&place).unwrap();
            fs::write(place.join("uevent"), format!("DEVNAME={partition}\nPARTN=2\nPARTNAME={label}\n"))
                .unwrap();
            symlink(&place, class.join(partition)).unwrap();
        }
        let found = read(&class).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let candidate = |root: &str, hashes: Option<&str>| Candidate {
            root: root.into(),
            hashes: hashes.map(Into::into),
        };
        assert_eq!(found, [candidate("vda2", Some("vda3")), candidate("vdb1", None)]);
    }
}
