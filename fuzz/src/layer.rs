//! Fuzzes the archive of an image layer, which any user with push access to a registry controls. No file appears
//! outside the folder that it is unpacked to; a link there leads outside on purpose.

use std::cell::Cell;
use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

/// Largest input in bytes that is unpacked.
const MOST: u64 = 1 << 20;

pub(crate) fn run(input: &[u8]) {
    let dir = place();
    let (root, outside) = (dir.join("root"), dir.join("outside"));
    fs::create_dir_all(&root).expect("a temporary folder");
    fs::create_dir_all(&outside).expect("a temporary folder");
    fs::write(outside.join("file"), b"untouched").expect("a temporary file");
    symlink(&outside, root.join("out")).expect("a link");
    let mut entries = 1000;
    // Limited to a budget, like real layers.
    drop(peerpod_images::unpack::unpack(input.take(MOST), &root, &mut entries, &Cell::new(MOST)));
    let left: Vec<_> = fs::read_dir(&outside).expect("it is still there").flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(fs::read(outside.join("file")).expect("it is still there"), b"untouched");
    let beside = fs::read_dir(&dir).expect("it is still there").count();
    assert_eq!(beside, 2, "something appeared beside the root");
    fs::remove_dir_all(&dir).ok();
}

/// Returns a folder in memory, if /dev/shm exists: each input makes files.
fn place() -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let base = PathBuf::from("/dev/shm");
    let base = if base.is_dir() { base } else { std::env::temp_dir() };
    base.join(format!("pp-fuzz-layer-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}
