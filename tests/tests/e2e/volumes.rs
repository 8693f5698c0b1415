//! Tests persistent volumes from the CSI wrapper's records to the containers, with the real daemons and guests of the
//! local provider. Disks are loop devices.

use std::time::Duration;

use futures_util::future::join_all;
use nix::mount::{MntFlags, umount2};
use peerpod_client::exec_request;
use peerpod_link::frame::{self, HEADER_LEN, Header, MAX_PAYLOAD};
use peerpod_proto::agent::{ReadStreamRequest, ReadStreamResponse, StatsContainerRequest};
use peerpod_proto::ttrpc_frame;
use peerpod_proto::volumes::{ExpandRequest, StatsRequest};
use peerpod_proto::volumes_ttrpc::VolumesClient;
use peerpod_tests::volumes::{At, By, Disk, Node, at, lives_once, run};
use peerpod_tests::{PATIENCE, long, stop_in_time};
use peerpod_volume::descriptor::Attach;
use peerpod_volume::records::Attached;
use peerpod_volume::{FsGroupPolicy, Identity, Source};
use peerpod_world::{Sight, eventually};
use protobuf::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread")]
async fn the_next_pod_reads_the_data_of_the_first() {
    let node = Node::start().await;
    let disk = node.disk("data", 64);
    let first = node.run(node.pod("web-0", vec![disk.volume()])).await;
    first.create("main", &[at(0, "/data")]).await;
    let made =
        first.shell("main", "cat /proc/mounts | grep ' /data '; echo hello > /data/greeting; sync").await;
    assert!(made.contains("ext4"), "{made}");
    node.stop(first).await;
    assert_eq!(node.loops(), [""; 0], "the disk is free");

    let second = node.run(node.pod("web-0", vec![disk.volume()])).await;
    second.try_create("main", &[at(0, "/data")], By::Marker).await.unwrap();
    assert_eq!(second.shell("main", "cat /data/greeting").await, "hello\n");
    node.stop(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_at_their_mounts_in_any_order() {
    let node = Node::start().await;
    let (one, other) = (node.disk("one", 32), node.disk("other", 32));
    // Labelled from outside by another program.
    for disk in [&one, &other] {
        run("mke2fs", &["-q", "-F", "-t", "ext4", "-L", &disk.name, disk.file.to_str().unwrap()]);
    }
    // Two pods name them in opposite orders, and their containers mount them in different orders.
    for (number, volumes) in
        [vec![one.volume(), other.volume()], vec![other.volume(), one.volume()]].into_iter().enumerate()
    {
        let pod = node.run(node.pod("order", volumes)).await;
        for (name, mounts) in
            [("a", [at(0, "/first"), at(1, "/second")]), ("b", [at(1, "/second"), at(0, "/first")])]
        {
            pod.create(name, &mounts).await;
            let script = "for d in first second; do n=$(grep \" /$d \" /proc/mounts | cut -d' ' -f1); \
                          echo $d $(dd if=$n bs=1 skip=1144 count=16 2>/dev/null | tr -d '\\0'); done";
            let wanted = [["one", "other"], ["other", "one"]][number];
            let seen = pod.shell(name, script).await;
            assert_eq!(seen, format!("first {}\nsecond {}\n", wanted[0], wanted[1]));
        }
        node.stop(pod).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_pods_at_once_each_have_only_their_own_volumes() {
    const VOLUMES: usize = 3;
    let pods = if long() { 20 } else { 5 };
    let node = Node::start().await;
    let all: Vec<Vec<Disk>> = (0..pods)
        .map(|pod| (0..VOLUMES).map(|n| node.disk(&format!("disk-{pod}-{n}"), 16)).collect())
        .collect();
    // All at once, then again with the data they wrote.
    for again in [false, true] {
        join_all(all.iter().enumerate().map(|(pod, disks)| lives_once(&node, pod, disks, again))).await;
    }
    assert_eq!(node.loops(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_with_one_writer_is_refused_to_a_second_pod_until_it_is_free() {
    let node = Node::start().await;
    let disk = node.disk("shared", 32);
    let first = node.run(node.pod("first", vec![disk.volume()])).await;
    let error = node.boot(node.pod("second", vec![disk.volume()])).await.err().expect("it has a writer");
    let words = format!("{error:#}");
    assert!(
        words.contains("pvc-shared") && words.contains(&first.id) && words.contains("one writer"),
        "{words}"
    );
    let vm = node.records.vm(&first.pod.uid).unwrap().unwrap();
    assert!(vm.instance.is_some() && !vm.gone && vm.sandbox == first.id, "{vm:?}");
    // The node records that the VM is gone before it forgets the sandbox: a pod that waits for the disk may then have
    // it.
    stop_in_time(&first.shim, &first.id).await.unwrap();
    node.daemons.gone(&first.id, PATIENCE).await.unwrap();
    assert!(node.records.vm(&first.pod.uid).unwrap().unwrap().gone);
    assert_eq!(node.loops(), [""; 0]);
    let second = node.run(node.pod("third", vec![disk.volume()])).await;
    node.stop(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stats_come_from_the_guest_and_growth_is_visible_inside() {
    let node = Node::start().await;
    // XFS needs at least 300 MiB. ext4 grows only if its owner may override limits, which test machines may forbid; a
    // test in real machines covers it.
    let (small, large) = if long() { (1024, 2048) } else { (320, 640) };
    let disk = node.disk("growing", small);
    let pod = node.run(node.pod("grow", vec![disk.volume().fs("xfs")])).await;
    let volumes = volumes_client(&node).await;
    let id = pod.pod.volumes[0].volume.id.to_string();
    let ask = StatsRequest { pod_uid: pod.pod.uid.clone(), volume_id: id.clone(), ..StatsRequest::default() };
    // Also before any container uses it.
    let context = || ttrpc::context::with_duration(PATIENCE);
    let unused = volumes.stats(context(), &ask).await.unwrap();
    pod.create("main", &[at(0, "/data")]).await;
    pod.shell("main", "dd if=/dev/zero of=/data/file bs=1M count=8 2>/dev/null; sync").await;
    let used = volumes.stats(context(), &ask).await.unwrap();
    assert!(
        used.used_bytes >= unused.used_bytes + (8 << 20) && used.total_bytes == unused.total_bytes,
        "{used:?}"
    );
    assert!(used.total_inodes > 0 && used.used_inodes == unused.used_inodes + 1, "{used:?}");

    let mut expand =
        ExpandRequest { pod_uid: ask.pod_uid.clone(), volume_id: id, ..ExpandRequest::default() };
    disk.grow(large);
    expand.capacity_bytes = large << 20;
    for _ in 0..2 {
        let expanded = volumes.expand(context(), &expand).await.unwrap();
        assert_eq!(expanded.capacity_bytes, large << 20);
    }
    let kib: u64 = pod.shell("main", "df -k --output=size /data | tail -1").await.trim().parse().unwrap();
    assert!(kib > small * 1024 * 3 / 2, "{kib} KiB of {large} MiB");
    pod.shell("main", "test $(stat -c %s /data/file) = 8388608").await;

    let code = |error: ttrpc::Error| match error {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("{other}"),
    };
    let unknown = StatsRequest { volume_id: "0".repeat(32), ..ask.clone() };
    assert_eq!(code(volumes.stats(context(), &unknown).await.unwrap_err()), ttrpc::Code::NOT_FOUND);
    let nobody = StatsRequest { pod_uid: "nobody".into(), ..ask };
    assert_eq!(code(volumes.stats(context(), &nobody).await.unwrap_err()), ttrpc::Code::NOT_FOUND);
    node.stop(pod).await;
}

async fn volumes_client(node: &Node) -> VolumesClient {
    let socket = format!("unix://{}", node.daemons.run_dir().join("volumes.sock").display());
    VolumesClient::new(ttrpc::asynchronous::Client::connect(&socket).await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_with_content_is_never_formatted() {
    let node = Node::start().await;
    let foreign = node.disk("foreign", 32);
    foreign.write(4096, b"somebody's");
    let swapped = node.disk("swapped", 32);
    run("mke2fs", &["-q", "-F", "-t", "ext3", swapped.file.to_str().unwrap()]);
    let half = node.disk("half", 32);
    run("mke2fs", &["-q", "-F", "-t", "ext4", half.file.to_str().unwrap()]);
    half.write(1024 + 56, &[0, 0]);
    let disks = [&foreign, &swapped, &half];
    let before: Vec<Vec<u8>> = disks.iter().map(|disk| disk.read()).collect();
    let volumes = disks.iter().map(|disk| disk.volume().fs("ext4")).collect();
    let pod = node.run(node.pod("careful", volumes)).await;
    for (volume, said) in [(0, "is not empty"), (1, "ext3"), (2, "is not empty")] {
        let name = format!("c{volume}");
        let error = pod.try_create(&name, &[at(volume, "/data")], By::Bundle).await.unwrap_err().to_string();
        let called = format!("pvc-{}", disks[volume].name);
        assert!(error.contains(said) && error.contains(&called), "{error}");
    }
    node.stop(pod).await;
    for (disk, before) in disks.iter().zip(before) {
        assert!(disk.read() == before, "{} was written to", disk.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_cannot_be_matched_fails_the_container() {
    let node = Node::start().await;
    let disk = node.disk("lost", 32);
    let pod = node.run(node.pod("unmatched", vec![disk.volume()])).await;
    let error = pod.try_create("a", &[At { path: "sub", ..at(0, "/data") }], By::Nothing).await.unwrap_err();
    assert!(error.to_string().contains("may be a subPath"), "{error}");
    // Published after the VM was made.
    let late = node.disk("late", 32);
    let mut stranger = node.pod("stranger", vec![late.volume()]).volumes;
    let (mut copies, request) = pod.container("b", &[at(0, "/data")], By::Marker);
    copies[1].data = stranger.remove(0).marker.into_bytes();
    for copied in &copies {
        pod.agent.copy_file(copied).await.unwrap();
    }
    let error = pod.agent.create_container(&request).await.unwrap_err().to_string();
    assert!(error.contains("start the pod anew"), "{error}");
    // The pod still works.
    pod.create("c", &[at(0, "/data")]).await;
    node.stop(pod).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_is_refused_under_a_large_answer_costs_only_itself() {
    const LARGE: usize = 1 << 20;
    let node = Node::start().await;
    let disk = node.disk("large", 32);
    let pod = node.run(node.pod("large", vec![disk.volume()])).await;
    pod.create("main", &[at(0, "/data")]).await;
    // The pipe holds all of it before the first read, so that one response contains it.
    let script = "import fcntl, os; fcntl.fcntl(1, 1031, 1 << 20); \
                  os.write(1, bytes(range(256)) * 4096); os.write(2, b'!'); os.read(0, 1)";
    pod.agent.exec_process(&exec_request("main", "writer", &["python3", "-c", script])).await.unwrap();
    assert_eq!(pod.agent.read_stderr("main", "writer", 1).await.unwrap(), b"!");

    let socket = node.daemons.run_dir().join("pods").join(&pod.id).join("agent.ttrpc");
    let mut shim = Shim(UnixStream::connect(socket).await.unwrap());
    let (copies, refused) = pod.container("refused", &[At { path: "sub", ..at(0, "/data") }], By::Nothing);
    for copied in &copies {
        shim.ask(1, "CopyFile", copied).await;
        assert_eq!(shim.answer().await.0, 1);
    }
    let mut read = ReadStreamRequest::new();
    (read.container_id, read.exec_id) = ("main".into(), "writer".into());
    read.len = LARGE as u32;
    shim.ask(3, "ReadStdout", &read).await;
    // The response has begun. The client does not read on, so the rest waits in the relay and, beyond the stream's
    // window, in the guest.
    let head = shim.head().await;
    assert!(head.stream == 3 && head.length as usize > LARGE, "{head:?}");
    shim.ask(5, "CreateContainer", &refused).await;
    let log = node.daemons.log("relay");
    let is_refused = || std::fs::read_to_string(&log).unwrap().contains("container refused");
    eventually("the container is refused", PATIENCE, async || is_refused().then_some(())).await.unwrap();

    let answer = shim.body(head).await;
    let data = ReadStreamResponse::parse_from_bytes(&answer.payload).unwrap().data;
    assert!(answer.status.code == 0 && data == (0..=255).collect::<Vec<u8>>().repeat(LARGE / 256));
    let (stream, refusal) = shim.answer().await;
    assert_eq!((stream, refusal.status.code), (5, ttrpc::Code::FAILED_PRECONDITION as i32), "{refusal}");
    // The same connection and the pod still work.
    let mut stats = StatsContainerRequest::new();
    stats.container_id = "main".into();
    shim.ask(7, "StatsContainer", &stats).await;
    let (stream, stats) = shim.answer().await;
    assert_eq!((stream, stats.status.code), (7, 0), "{stats}");
    pod.create("next", &[at(0, "/data")]).await;
    node.stop(pod).await;
}

/// Connection of a shim to the agent that reads only on request.
struct Shim(UnixStream);

impl Shim {
    async fn ask(&mut self, stream: u32, method: &str, request: &impl Message) {
        let request = ttrpc_frame::Request {
            service: "grpc.AgentService".into(),
            method: method.into(),
            payload: request.write_to_bytes().unwrap(),
            ..Default::default()
        };
        let body = request.write_to_bytes().unwrap();
        let head = Header { length: body.len() as u32, stream, kind: frame::REQUEST, flags: 0 };
        self.0.write_all(&[&head.encode()[..], &body].concat()).await.unwrap();
    }

    async fn head(&mut self) -> Header {
        let mut head = [0; HEADER_LEN];
        let read = timeout(PATIENCE, self.0.read_exact(&mut head)).await;
        read.expect("the header of an answer").unwrap();
        Header::decode(&head)
    }

    async fn body(&mut self, head: Header) -> ttrpc_frame::Response {
        assert!(head.kind == frame::RESPONSE && head.length as usize <= MAX_PAYLOAD, "{head:?}");
        let mut body = vec![0; head.length as usize];
        let read = timeout(PATIENCE, self.0.read_exact(&mut body)).await;
        read.unwrap_or_else(|_| panic!("an answer as announced: {head:?}")).unwrap();
        ttrpc_frame::Response::parse_from_bytes(&body).unwrap()
    }

    async fn answer(&mut self) -> (u32, ttrpc_frame::Response) {
        let head = self.head().await;
        (head.stream, self.body(head).await)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_come_and_go_without_the_node_and_share_one_mount() {
    let mut node = Node::start().await;
    let disk = node.disk("kept", 32);
    let pod = node.run(node.pod("restart", vec![disk.volume()])).await;
    pod.create("one", &[at(0, "/data")]).await;
    pod.shell("one", "echo kept > /data/file").await;
    node.daemons.kill_node().unwrap();
    pod.create("two", &[at(0, "/other")]).await;
    assert_eq!(pod.shell("two", "cat /other/file").await, "kept\n");
    pod.remove("one").await;
    assert_eq!(pod.shell("two", "cat /other/file").await, "kept\n", "it is still mounted");
    pod.remove("two").await;
    // No container has it mounted any more; a restart mounts it again.
    pod.create("one", &[at(0, "/data")]).await;
    assert_eq!(pod.shell("one", "cat /data/file").await, "kept\n");
    // A new relay has the volume's record too.
    node.daemons.take_over().await.unwrap();
    pod.create("three", &[at(0, "/data")]).await;
    assert_eq!(pod.shell("three", "cat /data/file").await, "kept\n");
    node.daemons.start_node().unwrap();
    node.daemons.ready().await.unwrap();
    node.stop(pod).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sub_paths_group_and_read_only_mounts_of_a_volume() {
    let node = Node::start().await;
    let (data, shelf) = (node.disk("data", 32), node.disk("shelf", 32));
    run("mke2fs", &["-q", "-F", "-t", "ext4", "-d", "/etc/alternatives", shelf.file.to_str().unwrap()]);
    let volumes = vec![
        data.volume().group(4711, FsGroupPolicy::Always).published_as_tmpfs(),
        shelf.volume().read_only(),
    ];
    let pod = node.run(node.pod("parts", volumes)).await;
    // As kubelet does for a subPath: a folder in the published target, bound to another path.
    let published = pod.pod.volumes[0].target_path.join("nested/part");
    let bound = node.world.folder().join("kubelet/pods/volume-subpaths/part/0");
    std::fs::create_dir_all(&published).unwrap();
    std::fs::create_dir_all(&bound).unwrap();
    run("mount", &["--bind", published.to_str().unwrap(), bound.to_str().unwrap()]);
    let part = At { path: "nested/part", source: Some(bound.clone()), ..at(0, "/part") };
    let below = At { path: "nested", ..at(0, "/nested") };
    let again = At { read_only: true, ..at(0, "/again") };
    pod.create("main", &[at(0, "/data"), part, below, again, at(1, "/shelf")]).await;
    pod.shell("main", "echo deep > /part/file").await;
    assert_eq!(
        pod.shell("main", "cat /data/nested/part/file /nested/part/file /again/nested/part/file").await,
        "deep\n".repeat(3)
    );
    assert_eq!(pod.shell("main", "stat -c '%g %a' /data").await, "4711 2775\n");
    for place in ["/again", "/shelf"] {
        let refused = pod.try_shell("main", &format!("touch {place}/new")).await;
        assert!(
            refused.status != 0 && String::from_utf8_lossy(&refused.stderr).contains("Read-only"),
            "{refused:?}"
        );
    }
    assert!(pod.shell("main", "ls /shelf").await.contains("awk"));
    // A link that one container made must not lead the next container out of the volume.
    pod.shell("main", "ln -s /run/peerpod /data/out").await;
    let out = At { path: "out", ..at(0, "/x") };
    let error = pod.try_create("evil", &[out], By::Bundle).await.unwrap_err().to_string();
    assert!(error.contains("leads out of the volume"), "{error}");
    // The relay opens no bundle outside the container runtime's folder.
    let (copies, mut request) = pod.container("stray", &[At { path: "part", ..at(0, "/x") }], By::Bundle);
    let annotations = &mut request.OCI.mut_or_insert_default().Annotations;
    let bundle = annotations.get_mut("io.katacontainers.pkg.oci.bundle_path").unwrap();
    let stray = node.world.folder().join("stray");
    std::fs::rename(&*bundle, &stray).unwrap();
    *bundle = stray.display().to_string();
    pod.agent.copy_file(&copies[0]).await.unwrap();
    let error = pod.agent.create_container(&request).await.unwrap_err().to_string();
    assert!(error.contains("its folder must be in relay.bundles"), "{error}");
    umount2(&bound, MntFlags::MNT_DETACH).unwrap();
    node.stop(pod).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_device_is_one_in_the_container() {
    let node = Node::start().await;
    let disk = node.disk("raw", 16);
    disk.write(0, b"from outside");
    let pod = node.run(node.pod("raw", vec![disk.volume().block()])).await;
    // As the container runtime lists the published device, and as both shims pass it on.
    let path = format!("/dev/xvda/{}", pod.pod.volumes[0].volume.id);
    let (_, mut request) = pod.container("main", &[], By::Bundle);
    let bundle = request.OCI.Annotations["io.katacontainers.pkg.oci.bundle_path"].clone();
    let config = serde_json::json!({ "linux": { "devices": [{ "path": path, "type": "c", "major": 1, "minor": 7 }] } });
    std::fs::write(format!("{bundle}/config.json"), config.to_string()).unwrap();
    let mut device = peerpod_proto::agent::LinuxDevice::new();
    (device.Path, device.Type, device.Major, device.Minor, device.FileMode) = (path, "c".into(), 1, 7, 0o640);
    request.OCI.mut_or_insert_default().Linux.mut_or_insert_default().Devices.push(device);
    pod.agent.create_container(&request).await.unwrap();
    pod.agent.start_container("main").await.unwrap();
    assert_eq!(pod.shell("main", "head -c 12 /dev/xvda; test -b /dev/xvda").await, "from outside");
    pod.shell("main", "printf inside | dd of=/dev/xvda conv=notrunc,fsync 2>/dev/null").await;
    let asked = StatsRequest {
        pod_uid: pod.pod.uid.clone(),
        volume_id: pod.pod.volumes[0].volume.id.to_string(),
        ..StatsRequest::default()
    };
    let stats =
        volumes_client(&node).await.stats(ttrpc::context::with_duration(PATIENCE), &asked).await.unwrap();
    assert!(stats.block && stats.total_bytes == 16 << 20, "{stats:?}");
    node.stop(pod).await;
    assert_eq!(&disk.read()[..12], b"insideutside");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attaching_driver_gets_the_vm_and_is_waited_for() {
    let node = Node::start().await;
    let disk = node.disk("drivers", 32);
    let mut volume = disk.volume();
    volume.source =
        Source::AttachedBlock { volume: "drivers-own-id".into(), zone: None, attach: Attach::Driver };
    let pod = node.pod("driver", vec![volume]);
    let (uid, id) = (pod.uid.clone(), pod.volumes[0].volume.id.clone());
    let records = node.records.clone();
    // The CSI wrapper waits for the VM, has the disk attached, and records that. Here the test calls the provider in
    // the driver's place.
    let file = disk.file.clone();
    let wrapper = async move {
        let vm = eventually("the VM is told", PATIENCE, async || records.vm(&uid).unwrap()?.instance)
            .await
            .unwrap();
        let made = run("losetup", &["--find", "--show", file.to_str().unwrap()]);
        let name = made.trim().trim_start_matches("/dev/").to_owned();
        let other =
            Attached { version: 1, instance: "another-vm".into(), identity: Identity::ById("wrong".into()) };
        records.put_attached(&uid, &id, &other).unwrap();
        let attached =
            Attached { version: 1, instance: vm, identity: Identity::ById(format!("driver-{name}")) };
        records.put_attached(&uid, &id, &attached).unwrap();
        made.trim().to_owned()
    };
    let (running, device) = tokio::join!(node.run(pod), wrapper);
    // The hypervisor's part: the device appears in the VM late.
    let guest = Sight::of(&node.world, &[], &node.daemons).unwrap().pids("peerpod-guest");
    let name = device.trim_start_matches("/dev/").to_owned();
    let plugged = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        for pid in guest {
            let dev = format!("/proc/{pid}/root/dev");
            if !std::path::Path::new(&dev).join("disk/by-id").exists() {
                std::fs::create_dir_all(format!("{dev}/disk/by-id")).unwrap();
                let minor = name.trim_start_matches("loop");
                run("mknod", &[&format!("{dev}/{name}"), "b", "7", minor]);
                std::os::unix::fs::symlink(
                    format!("../../{name}"),
                    format!("{dev}/disk/by-id/driver-{name}"),
                )
                .unwrap();
            }
        }
    });
    running.create("main", &[at(0, "/data")]).await;
    plugged.await.unwrap();
    running.shell("main", "touch /data/x").await;
    node.stop(running).await;
    run("losetup", &["--detach", &device]);
}
