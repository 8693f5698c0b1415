//! Uploads disk images into the pool of a real libvirtd.

use std::fs;
use std::io::{BufRead, BufReader};
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use super::common;
use common::{Place, create};
use peerpod_provider_api::{Error, Provider};
use peerpod_provider_cloud::image::{ImageSettings, Upload};
use peerpod_provider_libvirt::upload;
use peerpod_world::libvirtd::POOL;
use sha2::{Digest, Sha256};

/// Size of an image in bytes: many pieces of a stream.
const BYTES: usize = 16 << 20;

/// Makes a built image with this number, and returns its folder.
fn image(place: &Place, number: u64) -> PathBuf {
    let folder = place.world.folder().join(format!("image-{number}"));
    fs::create_dir_all(&folder).unwrap();
    let (raw, disk) = (folder.join("disk.raw"), folder.join("peerpod.qcow2"));
    let blocks = (0..BYTES as u64 / 32).flat_map(|at| Sha256::digest((number << 32 | at).to_be_bytes()));
    fs::write(&raw, blocks.collect::<Vec<u8>>()).unwrap();
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    let made = Command::new("qemu-img").args(convert).args([&raw, &disk]).status().unwrap();
    assert!(made.success());
    let digest = hex::encode(Sha256::digest(fs::read(&disk).unwrap()));
    let about = format!(r#"{{"version": 1, "arch": "x86_64", "sha256": {{"peerpod.qcow2": "{digest}"}}}}"#);
    fs::write(folder.join("image.json"), about).unwrap();
    folder
}

/// Uploads an image; returns the settings and the lines about the progress.
async fn try_upload(
    place: &Place,
    folder: &Path,
    keep: usize,
) -> (Result<ImageSettings, Error>, Vec<String>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&lines);
    let request = Upload {
        folder: folder.to_owned(),
        keep: NonZeroUsize::new(keep),
        tpm: false,
        say: Arc::new(move |line: &str| to.lock().unwrap().push(line.to_owned())),
    };
    let done = upload(place.config(&[("call-timeout", "5s")]), request).await;
    let lines = lines.lock().unwrap().clone();
    (done, lines)
}

/// Returns the name of the uploaded volume, and the lines.
async fn uploaded(place: &Place, folder: &Path, keep: usize) -> (String, String) {
    let (done, lines) = try_upload(place, folder, keep).await;
    let chosen = done.unwrap();
    assert_eq!(chosen["pool"], POOL);
    (chosen["volume"].clone(), lines.join("\n"))
}

fn path(place: &Place, volume: &str) -> PathBuf {
    place.libvirtd.pool_folder(POOL).join(volume)
}

fn assert_whole(place: &Place, volume: &str, folder: &Path) {
    let (found, expected) = (fs::read(path(place, volume)), fs::read(folder.join("peerpod.qcow2")));
    assert!(found.unwrap() == expected.unwrap(), "{volume} is not {}", folder.display());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_uploaded_once_and_a_vm_has_it_as_its_base() {
    let place = Place::new();
    let folder = image(&place, 1);
    let (volume, lines) = uploaded(&place, &folder, 0).await;
    assert!(lines.contains("uploaded 100 %"), "{lines}");
    assert_whole(&place, &volume, &folder);
    let before = fs::metadata(path(&place, &volume)).unwrap();
    let (again, lines) = uploaded(&place, &folder, 0).await;
    assert_eq!(again, volume);
    assert!(lines.contains("nothing is uploaded") && !lines.contains('%'), "{lines}");
    let after = fs::metadata(path(&place, &volume)).unwrap();
    assert_eq!((after.ino(), after.mtime_nsec()), (before.ino(), before.mtime_nsec()));

    let provider = place.provider_with(&[("image", ""), ("volume", &volume)]);
    let made = create(&*provider, 1).await;
    let overlay = place
        .libvirtd
        .files(POOL)
        .unwrap()
        .into_iter()
        .find(|file| file.ends_with(".qcow2") && *file != volume);
    let info = ["info", "-U", "--output=json"];
    let shown = Command::new("qemu-img").args(info).arg(path(&place, &overlay.unwrap())).output().unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    let base = path(&place, &volume).display().to_string();
    assert_eq!(
        (&shown["full-backing-filename"], &shown["backing-filename-format"]),
        (&base.into(), &"qcow2".into())
    );
    provider.delete(&made.id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_deletes_only_unused_images_of_ours() {
    let place = Place::new();
    let (old, _) = uploaded(&place, &image(&place, 1), 0).await;
    let provider = place.provider_with(&[("image", ""), ("volume", &old)]);
    let made = create(&*provider, 1).await;
    // Two volumes of strangers. One has the name of an image, and an image as its content.
    let stranger = format!("peerpod-image-{}.qcow2", "0".repeat(32));
    fs::copy(path(&place, &old), path(&place, &stranger)).unwrap();
    fs::write(path(&place, "peerpod.qcow2"), "x").unwrap();
    place.libvirtd.virsh(&["pool-refresh", POOL]).unwrap();

    let newer = image(&place, 2);
    let (current, lines) = uploaded(&place, &newer, 1).await;
    assert!(lines.contains(&format!("kept {old}: VM ")), "{lines}");
    assert!(lines.contains(&format!("kept {stranger}: its content has not the digest")), "{lines}");
    provider.delete(&made.id).await.unwrap();

    let kept = |files: Vec<String>| {
        let all =
            [&current, &old, &stranger, "peerpod.qcow2"].map(|name| files.iter().any(|file| file == name));
        all.to_vec()
    };
    let (_, lines) = uploaded(&place, &newer, 3).await;
    assert!(!lines.contains("deleted"), "{lines}");
    assert_eq!(kept(place.libvirtd.files(POOL).unwrap()), [true, true, true, true]);
    let (_, lines) = uploaded(&place, &newer, 1).await;
    assert!(lines.contains(&format!("deleted {old}")), "{lines}");
    assert_eq!(kept(place.libvirtd.files(POOL).unwrap()), [true, false, true, true]);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_volume_of_the_images_name_stays() {
    let place = Place::new();
    let folder = image(&place, 1);
    let (volume, _) = uploaded(&place, &folder, 0).await;
    fs::write(path(&place, &volume), "of a stranger").unwrap();
    let (done, _) = try_upload(&place, &folder, 0).await;
    let why = done.unwrap_err().to_string();
    assert!(why.contains("exists and is not this image") && why.contains("virsh vol-delete"), "{why}");
    assert_eq!(fs::read(path(&place, &volume)).unwrap(), b"of a stranger");
}

/// Line that the upload prints at half of the image, before it stops for good.
const HALF: &str = "half is uploaded";

#[test]
#[ignore = "a process that another test starts"]
fn the_upload_that_stops_in_the_middle() {
    let (Ok(flags), Ok(folder)) =
        (std::env::var("PEERPOD_TEST_SETTINGS"), std::env::var("PEERPOD_TEST_IMAGE"))
    else {
        return;
    };
    let flags =
        flags.lines().filter_map(|line| line.split_once('=')).map(|(key, value)| (key.into(), value.into()));
    let say = |line: &str| {
        if line.contains("uploaded 50 %") {
            println!("{HALF}");
            loop {
                std::thread::park();
            }
        }
    };
    let request = Upload { folder: folder.into(), keep: None, tpm: false, say: Arc::new(say) };
    let config = common::config(flags.collect()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { upload(config, request).await.unwrap() });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_was_killed_in_the_middle_is_replaced() {
    let place = Place::new();
    let folder = image(&place, 1);
    let settings: String = place.settings().iter().map(|(key, value)| format!("{key}={value}\n")).collect();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "upload::the_upload_that_stops_in_the_middle", "--ignored", "--nocapture"])
        .env("PEERPOD_TEST_SETTINGS", &settings)
        .env("PEERPOD_TEST_IMAGE", &folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains(HALF)), "the upload ended");
    child.kill().unwrap();
    child.wait().unwrap();
    let left = place.libvirtd.files(POOL).unwrap();
    assert_eq!(left.len(), 1, "{left:?}");

    let (volume, lines) = uploaded(&place, &folder, 0).await;
    assert_eq!(left, std::slice::from_ref(&volume));
    for part in ["is unfinished", "uploading it again", "uploaded 100 %"] {
        assert!(lines.contains(part), "{part}: {lines}");
    }
    assert_whole(&place, &volume, &folder);
}
