//! Walks the e2e stages with the disk image in a real libvirtd: UEFI, a verified root, systemd, the guest as a service,
//! and the encrypted tunnel. `pods.rs` tests all other behaviour of machines with the minimal image, which boots faster.
//! Needs root and `make image`.

use super::images_common;
use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;

use images_common::{Registry, ordinary};
use peerpod_client::{SHARED_CONTAINERS, copy_file, exec_request};
use peerpod_tests::machines::{PATIENCE, Place};
use peerpod_tests::{CONTAINER, Sandbox, of_image, sample, stop_promptly};
use peerpod_world::page::PageServer;
use peerpod_world::ping::ping;
use peerpod_world::{Daemons, binary, eventually};

/// Bytes of a file in one request.
const PIECE: usize = 1 << 20;
/// File that the image lacks and the test adds, below [`SHARED_CONTAINERS`], where the shim may put files.
const BUSYBOX: &str = "busybox";
const IMAGE: &str = "team/app:v1";

/// Pod in its own machine.
struct Machine(Sandbox);

impl Machine {
    async fn start(place: &Place, daemons: &Daemons) -> Machine {
        let machine = place.boot(daemons, place.world.pod().unwrap(), "uefi").await;
        // The image has no shell and no `sleep`.
        machine.create_container(CONTAINER, &["peerpod-test-tool", "pause"]).await.unwrap();
        let busybox = fs::read("/bin/busybox").unwrap();
        for (number, piece) in busybox.chunks(PIECE).enumerate() {
            let mut request = copy_file(BUSYBOX, 0o755, piece);
            request.file_size = i64::try_from(busybox.len()).unwrap();
            request.offset = i64::try_from(number * PIECE).unwrap();
            machine.agent.copy_file(&request).await.unwrap();
        }
        Machine(machine)
    }

    /// Runs a container of the registry's image, and checks the number of its layers on the disk.
    async fn runs(&self, registry: &Registry) {
        let image = format!("{}/{IMAGE}", registry.address);
        let says = of_image(&image, "image", &["/bin/sh", "-c", "busybox cat /old/one"]);
        self.0.agent.create_container(&says).await.unwrap();
        self.0.agent.start_container("image").await.unwrap();
        assert_eq!(self.0.agent.output("image", "").await.unwrap().stdout, b"one");
        let layers = self.shell("$B ls /var/lib/peerpod/images/l | $B wc -l").await.unwrap();
        assert_eq!(layers, "3\n");
    }

    /// Runs a script in the added shell; `$B` is needed for every command that the shell has not built in.
    async fn shell(&self, script: &str) -> anyhow::Result<String> {
        self.0.run(&shell(script).each_ref().map(String::as_str)).await
    }
}

fn shell(script: &str) -> [String; 4] {
    let busybox = format!("{SHARED_CONTAINERS}/{BUSYBOX}");
    let script = format!("B={busybox}\n{script}");
    [busybox, "sh".to_owned(), "-c".to_owned(), script]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_in_a_machine_that_boots_the_disk_by_uefi_from_create_to_exec_and_removal() {
    let place = Place::uefi();
    let registry = Registry::for_machines(&place.world, &[(IMAGE, &ordinary())]);
    let settings = registry.settings(&place.settings, IMAGE).set("tunnel.kind", "wireguard");
    let mut daemons = Daemons::start(&place.world, settings).await.unwrap();
    let machine = Machine::start(&place, &daemons).await;
    for entry in daemons.ledger().unwrap() {
        for (name, at) in entry.stages() {
            println!("{at:>8.1?} {name}");
        }
    }

    // Ping and HTTP through the tunnel, in both families and directions.
    let other = place.world.pod().unwrap();
    let server = PageServer::start(other.namespace()).unwrap();
    for (to, from) in machine.0.pod.addresses().into_iter().zip(other.addresses()) {
        ping(other.namespace(), to, 56, *PATIENCE).unwrap();
        ping(other.namespace(), to, 1380, *PATIENCE).unwrap();
        let url = SocketAddr::new(from, server.port()).to_string();
        let page = machine.0.run(&["peerpod-test-tool", "fetch", &url]).await.unwrap();
        assert!(page.contains(&to.to_string()), "{page}");
    }
    drop(server);

    let peers = sample(&daemons.metrics("relay").unwrap(), "peerpod_relay_wireguard_peers").unwrap();
    assert_eq!(peers, 1.0);

    // A program of the image.
    let version = machine.0.run(&["/bin/mount", "--version"]).await.unwrap();
    assert!(version.contains("util-linux"), "{version}");
    // Checks the machine: firmware, pid 1, the read-only root, and the rest of the disk.
    let script = "[ -d /sys/firmware/efi ] && echo efi\n\
                  $B cat /proc/1/comm\n\
                  $B grep -c 'roothash=' /proc/cmdline\n\
                  $B grep -c ' / erofs ro' /proc/mounts\n\
                  $B grep -c ' /var/lib/peerpod ext4 rw' /proc/mounts\n\
                  $B cat /proc/sys/vm/dirty_bytes\n";
    let seen = machine.shell(script).await;
    let seen = seen.unwrap_or_else(|error| panic!("{error:#}\n{}", place.consoles()));
    assert_eq!(seen, "efi\nsystemd\n1\n1\n1\n134217728\n", "{}", place.consoles());

    // A container image is on that disk and not in memory.
    machine.runs(&registry).await;
    drop(registry);

    // Kill the node in the middle of an exec that streams.
    let ticks = shell("while :; do echo tick; $B sleep 0.1; done");
    let streaming = exec_request("main", "stream", &ticks.each_ref().map(String::as_str));
    machine.0.agent.exec_process(&streaming).await.unwrap();
    assert!(machine.0.agent.read_stdout("main", "stream", 4096).await.unwrap().starts_with(b"tick"));
    daemons.kill_node().unwrap();
    for _ in 0..5 {
        let ticks =
            tokio::time::timeout(*PATIENCE, machine.0.agent.read_stdout("main", "stream", 4096)).await;
        assert!(ticks.unwrap().unwrap().starts_with(b"tick"), "with the node dead");
    }
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    assert!(machine.0.agent.read_stdout("main", "stream", 4096).await.unwrap().starts_with(b"tick"));
    for to in machine.0.pod.addresses() {
        ping(other.namespace(), to, 56, *PATIENCE).unwrap();
    }

    assert_eq!(place.libvirtd.firmware().unwrap().len(), 1, "libvirt keeps what UEFI remembers");
    // The power button: the guest flushes, and systemd shuts the machine down in order.
    let domain = place.libvirtd.domains().unwrap().remove(0);
    place.libvirtd.virsh(&["shutdown", &domain, "--mode", "acpi"]).unwrap();
    let cause = eventually("the node says what became of it", *PATIENCE, async || {
        machine.0.shim.start_vm(&machine.0.id).await.err().map(|error| error.to_string())
    });
    let cause = cause.await.unwrap_or_else(|error| panic!("{error:#}\n{}", place.consoles()));
    assert!(cause.contains("has ended: it was shut down or powered itself off"), "{cause}");
    assert!(cause.contains("power button was pressed"), "its console is told: {cause}");
    stop_promptly(&machine.0.shim, &machine.0.id).await.unwrap();
    daemons.gone(&machine.0.id, *PATIENCE).await.unwrap();
    place.assert_clean();
}

/// The disk has no space left for a partition: images are in memory, and the boot waits for no disk.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_boots_a_disk_of_the_size_of_its_image() {
    let mut place = Place::uefi();
    place.settings = place.settings.set("provider.libvirt.root-disk-gib", 0);
    let registry = Registry::for_machines(&place.world, &[(IMAGE, &ordinary())]);
    let settings = registry.settings(&place.settings, IMAGE);
    let daemons = Daemons::start(&place.world, settings).await.unwrap();
    let machine = Machine::start(&place, &daemons).await;
    let scratch = machine.shell("$B grep -c ' /var/lib/peerpod ' /proc/mounts || true").await.unwrap();
    assert_eq!(scratch, "0\n");
    let consoles = place.consoles();
    let skipped = |line: &str| line.contains("Dependency failed") && line.contains("container images");
    assert!(consoles.lines().any(skipped) && !consoles.contains("Timed out"), "{consoles}");
    machine.runs(&registry).await;
    stop_promptly(&machine.0.shim, &machine.0.id).await.unwrap();
    daemons.gone(&machine.0.id, *PATIENCE).await.unwrap();
    place.assert_clean();
}

/// `peerpod provider check` with these settings: preflight, create, list and delete, without waiting for a boot.
#[tokio::test(flavor = "multi_thread")]
async fn a_provider_with_the_disk_passes_its_check() {
    let place = Place::uefi();
    let daemons = Daemons::prepare(&place.world, place.settings.clone()).unwrap();
    let config = daemons.config().as_os_str();
    let words = ["provider", "check", "--yes", "--only", "a second delete is fine"].map(OsStr::new);
    let words = [&words[..2], &[config], &words[2..]].concat();
    let log = place.world.folder().join("check.log");
    let mut check = place.world.spawn(&binary("peerpod").unwrap(), &words, &log).unwrap();
    let ended = eventually("the check ends", *PATIENCE, async || check.try_wait().unwrap()).await;
    let said = fs::read_to_string(&log).unwrap_or_default();
    let status = ended.unwrap_or_else(|error| panic!("{error:#}: {said}"));
    assert!(status.success(), "{status}: {said}");
    for part in ["libvirt: image ", "/peerpod.qcow2, SHA-256 ", "1 kept, 0 broken, 0 not applicable"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    place.assert_clean();
}
