//! Walks the e2e stages with real machines: libvirtd, QEMU, a kernel and the minimal image, beside the usual relay,
//! node and pod network. Uses KVM where it works, and emulation elsewhere. Needs root and `make image`.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use peerpod_client::{Annotations, exec_request};
use peerpod_tests::machines::{PATIENCE, Place};
use peerpod_tests::{CONTAINER, Sandbox, fresh_id, is_bench, report, sample, stop_in_time};
use peerpod_world::page::{PageServer, page_for};
use peerpod_world::ping::ping;
use peerpod_world::{Daemons, World, eventually, stages};
use tokio::time::timeout;

/// Starts a metadata service as clouds have it: behind the VMs' gateway, which is the node here, so that the node
/// reaches it too. It also has an ordinary address.
fn metadata_service(world: &World) -> PageServer {
    let place = world.namespace("metadata").unwrap();
    world
        .node()
        .ip(&format!(
            "link add metadata0 type veth peer name eth0 netns {}\n\
             addr add 203.0.113.1/24 dev metadata0\n\
             link set metadata0 up\n\
             route add {METADATA} via {ORDINARY}\n",
            place.name()
        ))
        .unwrap();
    place
        .ip(&format!(
            "addr add {ORDINARY}/24 dev eth0\n\
             addr add {METADATA}/32 dev lo\n\
             link set eth0 up\n\
             route add default via 203.0.113.1\n"
        ))
        .unwrap();
    PageServer::start(&place).unwrap()
}

const METADATA: &str = "169.254.169.254";
const ORDINARY: &str = "203.0.113.2";

/// Returns the page that the VM itself gets from the metadata service, outside its pod.
async fn page_of_the_vm(machine: &Sandbox, port: u16) -> String {
    let ask = format!("nsenter -t 1 -n /usr/local/bin/kata-agent tool fetch {METADATA}:{port}");
    machine.prints(&ask).await.unwrap()
}

/// Returns the page that the pod gets from an address, or the error.
async fn page_of_the_pod(machine: &Sandbox, address: &str, port: u16) -> Result<String, String> {
    let address = format!("{address}:{port}");
    let command = ["peerpod-test-tool", "fetch", address.as_str()];
    let output = machine.agent.exec(&exec_request("main", &fresh_id("exec"), &command)).await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status == 0 { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Walks with the encrypted tunnel, like the test of the disk image. The other tests use the plain one; one lets the node
/// choose it.
#[tokio::test(flavor = "multi_thread")]
async fn one_pod_in_a_real_machine_with_the_encrypted_tunnel_from_create_to_exec_and_removal() {
    let place = Place::new();
    let settings = place.settings.clone().set("tunnel.kind", "wireguard");
    let walked = stages::walk_in(&place.world, settings, &mut stages::Silent).await;
    let report = walked.unwrap_or_else(|error| panic!("{error:#}\n{}", place.consoles()));
    for stage in &report.passed {
        println!("{:>8.1?} {}: {}", stage.took, stage.name, stage.seen);
    }
    for (name, at) in &report.inside {
        println!("{at:>8.1?} {name}");
    }
    place.assert_clean();
}

/// Makes two disks, one with a file on it and one empty.
fn disks(folder: &Path) -> [(&'static str, String); 2] {
    let (full, empty) = (folder.join("full.img"), folder.join("empty.img"));
    fs::create_dir_all(folder.join("full")).unwrap();
    fs::write(folder.join("full/hello"), "from the disk\n").unwrap();
    for file in [&full, &empty] {
        fs::File::create(file).unwrap().set_len(16 << 20).unwrap();
    }
    let made = std::process::Command::new("mke2fs")
        .args(["-q", "-t", "ext4", "-d"])
        .args([&folder.join("full"), &full])
        .status()
        .unwrap();
    assert!(made.success());
    [("ppfull", full.display().to_string()), ("ppempty", empty.display().to_string())]
}

/// Shell function that finds a disk by its serial number, as the guest must.
const FIND: &str = "find() { for disk in /sys/block/vd*; do \
                    [ \"$(cat $disk/serial)\" = \"$1\" ] && echo /dev/${disk##*/} && return; done; return 1; }\n";

/// The node chooses the tunnel by the VM's address, also after its restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_does_not_disturb_pod_exec_and_disks() {
    let place = Place::new();
    let settings = place.settings.clone().set("tunnel.kind", "auto");
    let mut daemons = Daemons::start(&place.world, settings).await.unwrap();
    let machine = place.machine(&daemons, "whole").await;
    let other = place.world.pod().unwrap();
    // Ping and HTTP through the tunnel, in both families and directions.
    let server = PageServer::start(other.namespace()).unwrap();
    for (to, from) in machine.pod.addresses().into_iter().zip(other.addresses()) {
        ping(other.namespace(), to, 56, *PATIENCE).unwrap();
        // The largest payload that fits with either family of the tunnel.
        ping(other.namespace(), to, 1380, *PATIENCE).unwrap();
        let url = std::net::SocketAddr::new(from, server.port());
        let page = machine.run(&["peerpod-test-tool", "fetch", &url.to_string()]).await.unwrap();
        assert!(page.contains(&to.to_string()), "{page}");
    }
    drop(server);
    // The VM reaches the cloud's metadata service; the pod does not, on any path.
    let service = metadata_service(&place.world);
    assert!(page_of_the_vm(&machine, service.port()).await.contains("a page for 10.97.0."));
    let ordinary = page_of_the_pod(&machine, ORDINARY, service.port()).await;
    assert_eq!(ordinary, Ok(page_for(machine.pod.v4())));
    let refused = page_of_the_pod(&machine, METADATA, service.port()).await.unwrap_err();
    assert!(refused.contains("Permission denied"), "{refused}");
    let peers = service.peers();
    assert_eq!(peers.len(), 2, "{peers:?}");
    drop(service);
    // Two disks, attached in another order than they are used in; each is found by its serial number.
    let [full, empty] = disks(place.world.folder());
    for ((serial, file), target) in [&empty, &full].into_iter().zip(["vdx", "vdy"]) {
        let domain = place.libvirtd.domains().unwrap().remove(0);
        place
            .libvirtd
            .virsh(&[
                "attach-disk",
                &domain,
                file,
                target,
                "--serial",
                serial,
                "--subdriver",
                "raw",
                "--targetbus",
                "virtio",
                "--live",
            ])
            .unwrap();
    }
    let script = format!(
        "{FIND}mkdir -p /run/full /run/empty\n\
         until full=$(find ppfull) && empty=$(find ppempty); do sleep 0.1; done\n\
         mount -t ext4 $full /run/full && cat /run/full/hello\n\
         dd if=$empty bs=4096 count=1 2>/dev/null | tr -d '\\000' | wc -c\n"
    );
    assert_eq!(machine.prints(&script).await.unwrap(), "from the disk\n0\n");
    // Kill the node in the middle of an exec that streams.
    let streaming =
        exec_request("main", "stream", &["/bin/sh", "-c", "while :; do echo tick; sleep 0.1; done"]);
    machine.agent.exec_process(&streaming).await.unwrap();
    assert!(machine.agent.read_stdout("main", "stream", 4096).await.unwrap().starts_with(b"tick"));
    daemons.kill_node().unwrap();
    for _ in 0..5 {
        let ticks = timeout(*PATIENCE, machine.agent.read_stdout("main", "stream", 4096)).await;
        assert!(ticks.unwrap().unwrap().starts_with(b"tick"), "with the node dead");
    }
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    assert!(machine.agent.read_stdout("main", "stream", 4096).await.unwrap().starts_with(b"tick"));
    ping(other.namespace(), machine.pod.v4(), 56, *PATIENCE).unwrap();
    let peers = sample(&daemons.metrics("relay").unwrap(), "peerpod_relay_wireguard_peers").unwrap();
    assert_eq!(peers, 0.0, "the node reaches the VM at its own private address");
    stop_in_time(&machine.shim, &machine.id).await.unwrap();
    daemons.gone(&machine.id, *PATIENCE).await.unwrap();
    place.assert_clean();
}

/// A provider can open the cloud's metadata service to pods that leave by their VM: the pod then has the VM's address.
#[tokio::test(flavor = "multi_thread")]
async fn a_provider_may_open_its_metadata_service_to_pods() {
    let line = include_str!("../../../providers/libvirt/guest.toml");
    let line = format!("{line}\n[metadata]\naddresses = [\"{METADATA}\"]\nopen-to-pods = true\n");
    let line: serde_json::Value = basic_toml::from_str(&line).unwrap();
    let place = Place::with(&[("etc/peerpod/sources/libvirt.json", line.to_string().as_bytes())]);
    let settings = place
        .settings
        .clone()
        .set("tunnel.external", "vm")
        .set("tunnel.cluster-cidrs", vec!["10.244.0.0/16", "fd10:244::/32"]);
    let daemons = Daemons::start(&place.world, settings).await.unwrap();
    let service = metadata_service(&place.world);
    let machine = place.machine(&daemons, "open").await;
    let of_the_vm = page_of_the_vm(&machine, service.port()).await;
    assert!(of_the_vm.contains("a page for 10.97.0."), "{of_the_vm}");
    assert_eq!(page_of_the_pod(&machine, METADATA, service.port()).await, Ok(of_the_vm));
    stop_in_time(&machine.shim, &machine.id).await.unwrap();
    daemons.gone(&machine.id, *PATIENCE).await.unwrap();
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_destroyed_from_outside_is_known_at_once_and_by_its_pods_name() {
    let place = Place::new();
    let daemons = Daemons::start(&place.world, place.settings.clone()).await.unwrap();
    let machine = place.machine(&daemons, "victim").await;
    let domain = place.libvirtd.domains().unwrap().remove(0);
    // A shim takes the end of this call for the end of its pod.
    let agent = machine.agent.clone();
    let waiting = tokio::spawn(async move { (agent.wait_process(CONTAINER, "").await, Instant::now()) });
    let began = Instant::now();
    place.libvirtd.virsh(&["destroy", &domain]).unwrap();
    let destroyed = Instant::now();
    let (waited, over) = timeout(*PATIENCE, waiting).await.expect("WaitProcess ends").unwrap();
    waited.unwrap_err();
    let known = over.saturating_duration_since(destroyed);
    report("vm_death_shim_s", known.as_secs_f64());
    assert!(!is_bench() || known < Duration::from_millis(1500), "{known:?}");
    let cause = eventually("StartVM says what became of it", *PATIENCE, async || {
        machine.shim.start_vm(&machine.id).await.err().map(|error| error.to_string())
    });
    let cause = cause.await.unwrap();
    report("vm_death_detect_s", began.elapsed().as_secs_f64());
    assert!(cause.contains("has ended: it was destroyed from outside"), "{cause}");
    let log = fs::read_to_string(daemons.log("node")).unwrap();
    assert!(log.contains(&format!("default/{}", machine.id)), "{log}");
    stop_in_time(&machine.shim, &machine.id).await.unwrap();
    daemons.gone(&machine.id, *PATIENCE).await.unwrap();
    place.assert_clean();
}

/// The power button (ACPI), with which an administrator shuts a machine down: the guest writes back and unmounts first.
/// A file that was just being written is complete on the disk, and the journal needs no recovery.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_ends_in_order_after_a_press_of_its_power_button() {
    let place = Place::new();
    let daemons = Daemons::start(&place.world, place.settings.clone()).await.unwrap();
    let machine = place.machine(&daemons, "button").await;
    let [(serial, disk), _] = disks(place.world.folder());
    let domain = place.libvirtd.domains().unwrap().remove(0);
    let how = ["--serial", serial, "--subdriver", "raw", "--targetbus", "virtio", "--live"];
    place.libvirtd.virsh(&[&["attach-disk", &domain, &disk, "vdx"], &how[..]].concat()).unwrap();
    let script = format!(
        "{FIND}mkdir -p /run/full\n\
         until disk=$(find {serial}); do sleep 0.1; done\n\
         mount -t ext4 $disk /run/full && dd if=/dev/zero of=/run/full/late bs=65536 count=48 2>/dev/null\n\
         echo written\n"
    );
    assert_eq!(machine.prints(&script).await.unwrap(), "written\n");
    let before = filesystem(&disk);
    assert!(before.contains("needs_recovery"), "it is mounted: {before}");

    // The driver of the button is loaded after the pod's start, and the kernel discards an earlier press.
    let watched = eventually("the guest watches the power button", *PATIENCE, async || {
        place.consoles().contains("watching the power button").then_some(())
    });
    watched.await.unwrap_or_else(|error| panic!("{error:#}\n{}", place.consoles()));
    place.libvirtd.virsh(&["shutdown", &domain, "--mode", "acpi"]).unwrap();
    let off = eventually("the machine is off", *PATIENCE, async || {
        let running = place.libvirtd.virsh(&["list", "--name"]).ok()?;
        (!running.contains(&domain)).then_some(())
    });
    off.await.unwrap_or_else(|error| panic!("{error:#}\n{}", place.consoles()));
    let after = filesystem(&disk);
    assert!(!after.contains("needs_recovery"), "{after}");
    let state = after.lines().find(|line| line.starts_with("Filesystem state:")).unwrap();
    assert!(state.ends_with(" clean"), "{state}");
    let late = run("debugfs", &["-R", "stat late", &disk]);
    assert!(late.contains(&format!("Size: {}", 48 * 65536)), "{late}");

    // The pod ends as with any other end of its VM, and the node names the cause.
    let cause = eventually("StartVM says what became of it", *PATIENCE, async || {
        machine.shim.start_vm(&machine.id).await.err().map(|error| error.to_string())
    });
    let cause = cause.await.unwrap();
    assert!(cause.contains("has ended: it was shut down or powered itself off"), "{cause}");
    stop_in_time(&machine.shim, &machine.id).await.unwrap();
    daemons.gone(&machine.id, *PATIENCE).await.unwrap();
    place.assert_clean();
}

/// Returns the file system's header of a disk, from e2fsprogs.
fn filesystem(disk: &str) -> String {
    run("dumpe2fs", &["-h", disk])
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = std::process::Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}; scripts/setup installs it"));
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_of_a_machine_that_never_dials_the_node_has_the_end_of_its_console() {
    let place = Place::new();
    // The kernel finds no init to start.
    let settings = place
        .settings
        .clone()
        .set("provider.libvirt.cmdline", "console=ttyS0 rdinit=/nowhere init=/nowhere panic=0")
        // Counted from CreateVM: includes the upload of the image, QEMU, and an emulated kernel up to its panic.
        .set("node.boot-timeout", "60s");
    let daemons = Daemons::start(&place.world, settings).await.unwrap();
    let (id, pod) = (fresh_id("mute"), place.world.pod().unwrap());
    let shim = daemons.shim().await.unwrap();
    shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    let error = timeout(*PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("Kernel panic") || error.contains("not syncing"), "{error}");
    stop_in_time(&shim, &id).await.unwrap();
    daemons.gone(&id, *PATIENCE).await.unwrap();
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_machines_at_once_come_and_go() {
    let place = Place::new();
    let daemons = Daemons::start(&place.world, place.settings.clone()).await.unwrap();
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let machines = futures_util::future::join_all(names.map(|name| place.machine(&daemons, name))).await;
    assert_eq!(place.libvirtd.domains().unwrap().len(), names.len());
    for machine in &machines {
        assert_eq!(machine.prints("echo alive").await.unwrap(), "alive\n");
    }
    for machine in machines {
        stop_in_time(&machine.shim, &machine.id).await.unwrap();
        daemons.gone(&machine.id, *PATIENCE).await.unwrap();
    }
    place.assert_clean();
}
