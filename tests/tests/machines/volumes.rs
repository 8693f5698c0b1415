//! Tests persistent volumes in machines that boot: virtio disks from files, iSCSI and NBD, and NFS and SMB over the
//! VM's own uplink. Needs root and `make image`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use futures_util::future::join_all;
use peerpod_proto::volumes::{ExpandRequest, StatsRequest};
use peerpod_proto::volumes_ttrpc::VolumesClient;
use peerpod_tests::machines::PATIENCE;
use peerpod_tests::servers::{Iscsi, Nbd, Nfs, Smb};
use peerpod_tests::volumes::{By, Disk, Node, Running, Volume, at, lives_once, run};
use peerpod_tests::{long, stop_in_time};
use peerpod_volume::{Credentials, Mode, SecretRef, Source, credentials};

/// The node's address in the VMs' network.
const NODE: &str = "10.97.0.1";

fn clean(node: &Node) {
    node.machines.as_ref().unwrap().assert_clean();
}

/// Speed of the slow disk in MiB/s while its pod stops.
const STOP_SPEED: u64 = 6;
/// Seconds that the flush takes at the least.
const LEAST_FLUSH: u64 = 3;

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_at_their_mounts_grow_and_outlive_their_machine() {
    let node = Node::start_in_machines().await;
    // MiB that are not on their disk when the pod ends.
    let late: u64 = if long() { 256 } else { 32 };
    let (full, empty, raw) = (node.disk("full", late + 64), node.disk("empty", 1024), node.disk("raw", 16));
    let slow = node.disk("slow", 2 * late);
    let files = node.world.folder().join("files");
    fs::create_dir_all(&files).unwrap();
    fs::write(files.join("hello"), "from the disk\n").unwrap();
    let (from, to) = ("if=/dev/urandom", format!("of={}", files.join("late").display()));
    run("dd", &[from, &to, "bs=1M", &format!("count={late}"), "status=none"]);
    run("mke2fs", &["-q", "-F", "-t", "ext4", "-d", files.to_str().unwrap(), full.file.to_str().unwrap()]);
    raw.write(0, b"from outside");
    let volumes = vec![empty.volume(), raw.volume().block(), full.volume().fs("ext4"), slow.volume()];
    let first = node.run(node.pod("data-0", volumes)).await;
    // Mounted in another order than they were named and attached in.
    first.create("main", &[at(2, "/full"), at(0, "/empty"), at(3, "/slow")]).await;
    let seen = first.shell("main", "cat /full/hello; ls /empty; grep -c ' /empty ext4 ' /proc/mounts").await;
    assert_eq!(seen, "from the disk\nlost+found\n1\n");
    let fill = "dd if=/dev/urandom of=/empty/file bs=1M count=8 2>/dev/null; sync; sha256sum < /empty/file";
    let sum = first.shell("main", fill).await;

    // A volume grows while it is in use.
    let volumes = volumes_client(&node).await;
    let id = first.pod.volumes[0].volume.id.to_string();
    let ask = StatsRequest { pod_uid: first.pod.uid.clone(), volume_id: id.clone(), ..Default::default() };
    let context = || ttrpc::context::with_duration(*PATIENCE);
    let before = volumes.stats(context(), &ask).await.unwrap();
    assert!(before.used_bytes >= 8 << 20 && before.total_bytes < 1 << 30, "{before:?}");
    empty.grow(2 << 10);
    let expand = ExpandRequest {
        pod_uid: ask.pod_uid.clone(),
        volume_id: id,
        capacity_bytes: 2 << 30,
        ..ExpandRequest::default()
    };
    assert_eq!(volumes.expand(context(), &expand).await.unwrap().capacity_bytes, 2 << 30);
    let after = volumes.stats(context(), &ask).await.unwrap();
    assert!(after.total_bytes > before.total_bytes * 9 / 5, "{before:?} {after:?}");
    assert!(mebibytes(&first, "/empty").await > 1800);
    leave_unwritten(&node, &first, &slow).await;
    // Faster only after StopVM: a busy machine would write most of the data between the two.
    stop_in_time(&first.shim, &first.id).await.unwrap();
    limit_writes(&node, &slow, STOP_SPEED << 10);
    stop_flushed(&node, first).await;
    clean(&node);

    // Another machine has the disks in another order, and finds the data. One disk was enlarged in between.
    full.write((late + 128) << 20, b"\0");
    let volumes = vec![raw.volume().block(), slow.volume(), full.volume(), empty.volume()];
    let second = node.run(node.pod("data-0", volumes)).await;
    second.create("main", &[at(2, "/full"), at(3, "/empty"), at(1, "/slow")]).await;
    second.shell("main", "cmp /full/late /slow/late").await;
    assert_eq!(second.shell("main", "sha256sum < /empty/file").await, sum);
    assert_eq!(second.shell("main", "cat /full/hello").await, "from the disk\n");
    assert!(mebibytes(&second, "/full").await > late + 100);
    node.stop(second).await;
    assert_eq!(&raw.read()[..12], b"from outside");
    clean(&node);
}

/// Makes a disk slow and copies data to it, of which much is unwritten afterwards. On a busy machine a copy can take
/// longer than the disk needs for the data, so several are tried. A slower disk would stop the copy itself for minutes: it
/// can wait for a commit of the file system.
async fn leave_unwritten(node: &Node, pod: &Running, disk: &Disk) {
    limit_writes(node, disk, 256);
    let deadline = Instant::now() + *PATIENCE;
    loop {
        pod.shell("main", "rm -f /slow/late; cp /full/late /slow/late").await;
        let unwritten = unwritten_mebibytes(pod).await;
        println!("{unwritten} MiB are not written at the stop");
        if unwritten > LEAST_FLUSH * STOP_SPEED {
            return;
        }
        assert!(Instant::now() < deadline, "{unwritten} MiB, too few for a test");
    }
}

/// Returns the data that the VM's kernel has not written yet.
async fn unwritten_mebibytes(pod: &Running) -> u64 {
    let lines = pod.shell("main", "grep -E '^(Dirty|Writeback):' /proc/meminfo").await;
    let kib = lines.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.sum::<u64>() >> 10
}

/// Stops a pod, and asserts that its flush was complete: the VM's shutdown by ACPI would write the data, too.
async fn stop_flushed(node: &Node, pod: Running) {
    let id = pod.id.clone();
    node.stop(pod).await;
    let entry = node.daemons.ledger().unwrap().into_iter().find(|entry| entry.id == id).unwrap();
    assert!(entry.stages().iter().any(|(name, _)| name == "flushed"), "{entry:?}");
}

/// Limits the speed of the only machine's writes to a disk.
fn limit_writes(node: &Node, disk: &Disk, kib_per_second: u64) {
    let libvirtd = &node.machines.as_ref().unwrap().libvirtd;
    let domain = libvirtd.domains().unwrap().remove(0);
    let disks = libvirtd.virsh(&["domblklist", &domain]).unwrap();
    let line = disks.lines().find(|line| line.ends_with(&disk.source)).unwrap();
    let target = line.split_whitespace().next().unwrap();
    let speed = (kib_per_second << 10).to_string();
    libvirtd.virsh(&["blkdeviotune", &domain, target, "--live", "--write-bytes-sec", &speed]).unwrap();
}

/// Returns the size of a file system, as seen from its container.
async fn mebibytes(pod: &Running, place: &str) -> u64 {
    let size = pod.shell("main", &format!("df -m {place} | grep -v Filesystem")).await;
    size.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn network_disks_are_connected_by_the_hypervisor_and_shares_by_the_machine() {
    let node = Node::start_in_machines().await;
    let (unit, export) = (node.disk("unit", 64), node.disk("export", 64));
    let _iscsi = Iscsi::start(&node.world, &unit.file);
    let _nbd = Nbd::start(&node.world, &export.file);
    let nfs = Nfs::start(&node.world);
    fs::write(nfs.folder.join("notice"), "shared\n").unwrap();
    let volumes = || {
        let iscsi = Source::Iscsi {
            portals: vec![format!("{NODE}:{}", Iscsi::PORT)],
            iqn: Iscsi::TARGET.into(),
            lun: 1,
            secret: None,
        };
        let nbd = Source::Nbd { host: NODE.into(), port: Nbd::PORT, export: Nbd::EXPORT.into() };
        let share = Source::Nfs { server: NODE.into(), export: "/export".into() };
        let mode = Mode::Filesystem {
            fs_type: None,
            mount_options: vec![format!("port={}", Nfs::PORT)],
            fs_group: None,
        };
        let share = Volume { handle: "share".into(), source: share, mode, ..unit.volume() };
        vec![Volume { source: iscsi, ..unit.volume() }, share, Volume { source: nbd, ..export.volume() }]
    };
    let mounts = [at(0, "/iscsi"), at(1, "/nfs"), at(2, "/nbd")];
    let first = node.run(node.pod("net-0", volumes())).await;
    first.create("main", &mounts).await;
    let write = "grep -c ' /nfs nfs4 ' /proc/mounts; cat /nfs/notice; for d in iscsi nbd nfs; do echo $d > /$d/name; done; sync";
    assert_eq!(first.shell("main", write).await, "1\nshared\n");
    node.stop(first).await;
    assert_eq!(fs::read_to_string(nfs.folder.join("name")).unwrap(), "nfs\n");
    let second = node.run(node.pod("net-0", volumes())).await;
    second.create("main", &mounts).await;
    assert_eq!(second.shell("main", "cat /iscsi/name /nbd/name /nfs/name").await, "iscsi\nnbd\nnfs\n");
    node.stop(second).await;
    clean(&node);
}

/// Contains characters that an option of mount(8) cannot contain, and characters that a shell would split at.
const PASSWORD: &str = "pass,word of \\ 'files'";

#[tokio::test(flavor = "multi_thread")]
async fn a_share_is_mounted_with_its_secret_and_no_file_shows_it() {
    let node = Node::start_in_machines().await;
    let smb = Smb::start(&node.world, PASSWORD);
    fs::write(smb.folder.join("notice"), "for members\n").unwrap();
    let disk = node.disk("unused", 1);
    let share = |handle: &str, password: &str| {
        let secret = Some(SecretRef { namespace: "default".into(), name: handle.into() });
        let source = Source::Smb { server: NODE.into(), share: "files".into(), secret };
        let mount_options = vec![format!("port={}", Smb::PORT)];
        let mode = Mode::Filesystem { fs_type: None, mount_options, fs_group: None };
        let credentials = Some(Credentials {
            version: credentials::VERSION,
            username: Smb::USER.to_owned().into(),
            password: password.to_owned().into(),
            domain: None,
        });
        Volume { handle: handle.into(), source, mode, credentials, ..disk.volume() }
    };
    let volumes = vec![share("right", PASSWORD), share("wrong", "pass"), share("read", PASSWORD).read_only()];
    let pod = node.run(node.pod("smb-0", volumes)).await;
    pod.create("main", &[at(0, "/files"), at(2, "/read")]).await;
    let script = "cat /files/notice; echo mine > /files/name; sync; cat /read/name; ! echo x > /read/name";
    assert_eq!(pod.shell("main", &format!("{{ {script}; }} 2>/dev/null")).await, "for members\nmine\n");
    assert_eq!(fs::read_to_string(smb.folder.join("name")).unwrap(), "mine\n");
    let mounts = pod.shell("main", "cat /proc/mounts").await;
    for part in [" /files cifs rw,", " /read cifs ro,", &format!(",username={},", Smb::USER)] {
        assert!(mounts.contains(part), "no {part}: {mounts}");
    }
    assert!(!mounts.contains("pass,word"), "{mounts}");
    // A second container mounts the share. A third one is denied, which must not affect the others.
    pod.create("second", &[at(0, "/files")]).await;
    assert_eq!(pod.shell("second", "cat /files/name").await, "mine\n");
    let refused = pod.try_create("third", &[at(1, "/files")], By::Bundle).await.unwrap_err().to_string();
    for part in ["pvc-wrong", &format!("//{NODE}/files"), "secret default/wrong", "denies access"] {
        assert!(refused.contains(part), "no {part}: {refused}");
    }
    pod.remove("second").await;
    assert_eq!(pod.shell("main", "cat /files/name").await, "mine\n");

    let known = holding_password(node.world.folder());
    assert_eq!(known.len(), 2, "the right one's and the reader's: {known:?}");
    for file in known {
        assert!(file.to_string_lossy().ends_with(".secret.json"), "{}", file.display());
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600, "{}", file.display());
    }
    node.stop(pod).await;
    assert_eq!(holding_password(node.world.folder()), Vec::<PathBuf>::new());
    let consoles = node.machines.as_ref().unwrap().consoles();
    assert!(!consoles.contains("pass,word"), "{consoles}");
    clean(&node);
}

/// Returns the files below this folder that contain the password: records, ledger, logs, machine definitions. It is
/// matched by a part of it that no format escapes.
fn holding_password(folder: &Path) -> Vec<PathBuf> {
    let (mut left, mut found) = (vec![folder.to_owned()], Vec::new());
    while let Some(path) = left.pop() {
        let Ok(there) = fs::symlink_metadata(&path) else { continue };
        if there.is_dir() {
            left.extend(
                fs::read_dir(&path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())),
            );
        } else if there.is_file() && there.len() < 64 << 20 {
            let content = fs::read(&path).unwrap_or_default();
            if content.windows(9).any(|part| part == b"pass,word") {
                found.push(path);
            }
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_at_once_each_see_their_own_disks() {
    const VOLUMES: usize = 3;
    let pods = if long() { 20 } else { 3 };
    let node = Node::start_in_machines().await;
    let all: Vec<Vec<Disk>> = (0..pods)
        .map(|pod| (0..VOLUMES).map(|n| node.disk(&format!("disk-{pod}-{n}"), 16)).collect())
        .collect();
    for again in [false, true] {
        join_all(all.iter().enumerate().map(|(pod, disks)| lives_once(&node, pod, disks, again))).await;
    }
    clean(&node);
}

async fn volumes_client(node: &Node) -> VolumesClient {
    let socket = format!("unix://{}", node.daemons.run_dir().join("volumes.sock").display());
    VolumesClient::new(ttrpc::asynchronous::Client::connect(&socket).await.unwrap())
}
