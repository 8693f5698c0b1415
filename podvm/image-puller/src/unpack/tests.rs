use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use super::*;
use crate::stream::Counted;

struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("pp-unpack-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Place(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Makes an archive of `(kind, name, target, content)`.
fn archive(entries: &[(EntryType, &str, &str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (kind, name, target, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o640);
        header.set_mtime(7);
        header.set_uid(0);
        header.set_gid(0);
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_gnu_mut().unwrap().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        builder.append(&header, content.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap()
}

const FILE: EntryType = EntryType::Regular;
const LINK: EntryType = EntryType::Symlink;
const HARD: EntryType = EntryType::Link;
const DIR: EntryType = EntryType::Directory;

fn unpacked(place: &Place, entries: &[(EntryType, &str, &str, &str)]) -> Result<LeftOut, Error> {
    unpack(&*archive(entries), &place.0, &mut 100, &Cell::new(1 << 20))
}

#[test]
fn removals_delete_lower_files_and_not_files_of_the_same_layer() {
    let place = Place::new("removals");
    for path in ["a/deep/er", "b", "c"] {
        std::fs::create_dir_all(place.0.join(path)).unwrap();
        std::fs::write(place.0.join(path).join("below"), "x").unwrap();
    }
    let entries = [
        (FILE, "b/above", "", "new"),
        (FILE, "b/.wh..wh..opq", "", ""),
        (FILE, ".wh.a", "", ""),
        (FILE, ".wh.nothing", "", ""),
        (FILE, "c/new/er", "", ""),
        (FILE, "c/.wh.new", "", ""),
        (FILE, "c/.wh..wh.plnk", "", ""),
    ];
    unpacked(&place, &entries).unwrap();
    assert!(!place.0.join("a").exists() && !place.0.join("b/below").exists());
    assert_eq!(std::fs::read(place.0.join("b/above")).unwrap(), b"new");
    assert!(place.0.join("c/below").exists() && place.0.join("c/new/er").exists());
}

#[test]
fn a_file_replaces_a_folder_and_attributes_match_the_archive() {
    let place = Place::new("attributes");
    std::fs::create_dir_all(place.0.join("x/y/z")).unwrap();
    unpacked(&place, &[(FILE, "x", "", "now a file"), (HARD, "also", "x", ""), (DIR, "d", "", "")]).unwrap();
    let found = std::fs::metadata(place.0.join("x")).unwrap();
    assert_eq!((found.len(), found.permissions().mode() & 0o7777, found.mtime()), (10, 0o640, 7));
    assert_eq!(found.ino(), std::fs::metadata(place.0.join("also")).unwrap().ino());
    assert_eq!(std::fs::metadata(place.0.join("d")).unwrap().mtime(), 7);
}

#[test]
fn links_stay_inside_the_root() {
    let place = Place::new("links");
    let (root, outside) = (Place(place.0.join("root")), place.0.join("outside"));
    std::fs::create_dir(&root.0).unwrap();
    std::fs::create_dir(&outside).unwrap();
    let there = outside.to_str().unwrap();
    // The image has no such folder: the link dangles, and nothing is made through it.
    let error = unpacked(&root, &[(LINK, "out", there, ""), (FILE, "out/x", "", "x")]).unwrap_err();
    assert_eq!(error.cause, Cause::Malformed, "{error}");
    unpacked(&root, &[(LINK, "up", "../../..", ""), (FILE, "up/x", "", "x")]).unwrap();
    assert!(root.0.join("x").exists(), "upwards ends at the image's root");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    for wrong in ["../x", "a/../../x", "a/..", ".wh..", ".wh.."] {
        let error = unpacked(&root, &[(FILE, wrong, "", "x")]).unwrap_err();
        assert_eq!(error.cause, Cause::Malformed, "{wrong}: {error}");
    }
    let error = unpacked(&root, &[(HARD, "hard", "../outside", "")]).unwrap_err();
    assert_eq!(error.cause, Cause::Malformed, "{error}");
}

#[test]
fn the_number_of_entries_is_bounded() {
    let place = Place::new("bounded");
    let many = archive(&[(FILE, "a", "", ""), (FILE, "b", "", ""), (FILE, "c", "", "")]);
    let error = unpack(&*many, &place.0, &mut 2, &Cell::new(1 << 20)).unwrap_err();
    assert_eq!(error.cause, Cause::TooLarge, "{error}");
}

#[test]
fn holes_of_sparse_files_count_as_bytes() {
    let place = Place::new("sparse");
    // A hole of 1 MiB, then one byte.
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(EntryType::GNUSparse);
    header.set_size(1);
    header.set_mode(0o640);
    header.set_uid(0);
    header.set_gid(0);
    let gnu = header.as_gnu_mut().unwrap();
    gnu.name[..4].copy_from_slice(b"hole");
    gnu.set_real_size((1 << 20) + 1);
    gnu.sparse[0].set_offset(1 << 20);
    gnu.sparse[0].set_length(1);
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append(&header, &b"x"[..]).unwrap();
    let archive = builder.into_inner().unwrap();
    let unpacked = |bytes: u64| {
        let bytes = Cell::new(bytes);
        let counted = Counted::new(&*archive, &bytes);
        unpack(counted, &place.0, &mut 100, &bytes).map(|_| bytes.get())
    };
    let error = unpacked(1 << 20).unwrap_err();
    assert_eq!(error.cause, Cause::TooLarge, "{error}");
    assert_eq!(std::fs::metadata(place.0.join("hole")).unwrap().len(), 0, "nothing was written");
    let left = unpacked(4 << 20).unwrap();
    assert!(left < 3 << 20, "{left} bytes are left");
    assert_eq!(std::fs::metadata(place.0.join("hole")).unwrap().len(), (1 << 20) + 1);
}

proptest::proptest! {
    #[test]
    fn no_damaged_archive_leaves_the_root(at in 0usize..2048, with in proptest::prelude::any::<u8>()) {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let place = Place::new(&format!("damage-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        let root = place.0.join("root");
        std::fs::create_dir(&root).unwrap();
        let mut bytes = archive(&[(LINK, "up", "..", ""), (FILE, "up/x", "", "x"), (DIR, "d", "", "")]);
        let at = at % bytes.len();
        bytes[at] = with;
        drop(unpack(&*bytes, &root, &mut 100, &Cell::new(1 << 20)));
        assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 1);
    }
}
