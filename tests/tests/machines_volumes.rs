//! Persistent volumes in machines that boot: virtio disks of files, iSCSI and NBD, and NFS from the VM's own uplink. Needs
//! root and `make image`.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::fs;

use futures_util::future::join_all;
use peerpod_proto::{
    volumes::{ExpandRequest, StatsRequest},
    volumes_ttrpc::VolumesClient,
};
use peerpod_tests::{
    PATIENCE, long,
    servers::{Iscsi, Nbd, Nfs},
    volumes::{Disk, Node, Running, Volume, at, lives_once, run},
};
use peerpod_volume::{Mode, Source};

/// The node, as the VMs' network has it.
const NODE: &str = "10.97.0.1";

fn clean(node: &Node) {
    node.machines.as_ref().unwrap().assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_land_where_they_belong_grow_and_outlive_their_machine() {
    let node = Node::start_in_machines().await;
    let (full, empty, raw) = (node.disk("full", 64), node.disk("empty", 1024), node.disk("raw", 16));
    let files = node.world.folder().join("files");
    fs::create_dir_all(&files).unwrap();
    fs::write(files.join("hello"), "from the disk\n").unwrap();
    run("mke2fs", &["-q", "-F", "-t", "ext4", "-d", files.to_str().unwrap(), full.file.to_str().unwrap()]);
    raw.write(0, b"from outside");
    let volumes = vec![empty.volume(), raw.volume().block(), full.volume().fs("ext4")];
    let first = node.run(node.pod("data-0", volumes)).await;
    // Mounted in the other order than they were named, and than they were attached.
    first.create("main", &[at(2, "/full"), at(0, "/empty")]).await;
    let seen = first.shell("main", "cat /full/hello; ls /empty; grep -c ' /empty ext4 ' /proc/mounts").await;
    assert_eq!(seen, "from the disk\nlost+found\n1\n");
    let fill = "dd if=/dev/urandom of=/empty/file bs=1M count=8 2>/dev/null; sync; sha256sum < /empty/file";
    let sum = first.shell("main", fill).await;

    // It grows while it is used.
    let volumes = volumes_client(&node).await;
    let id = first.pod.volumes[0].volume.id.to_string();
    let ask = StatsRequest { pod_uid: first.pod.uid.clone(), volume_id: id.clone(), ..Default::default() };
    let context = || ttrpc::context::with_duration(PATIENCE);
    let before = volumes.stats(context(), &ask).await.unwrap();
    assert!(before.used_bytes >= 8 << 20 && before.total_bytes < 1 << 30, "{before:?}");
    let libvirtd = &node.machines.as_ref().unwrap().libvirtd;
    let domain = libvirtd.domains().unwrap().remove(0);
    libvirtd.virsh(&["blockresize", &domain, empty.file.to_str().unwrap(), "2GiB"]).unwrap();
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
    node.stop(first).await;
    clean(&node);

    // Another machine has them in another order, and finds what was written. One was made larger in between.
    full.write(128 << 20, b"\0");
    let volumes = vec![raw.volume().block(), full.volume(), empty.volume()];
    let second = node.run(node.pod("data-0", volumes)).await;
    second.create("main", &[at(1, "/full"), at(2, "/empty")]).await;
    assert_eq!(second.shell("main", "sha256sum < /empty/file").await, sum);
    assert_eq!(second.shell("main", "cat /full/hello").await, "from the disk\n");
    assert!(mebibytes(&second, "/full").await > 100);
    node.stop(second).await;
    assert_eq!(&raw.read()[..12], b"from outside");
    clean(&node);
}

/// How large a file system is, seen from its container.
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
