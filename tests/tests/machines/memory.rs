//! Tests the memory of a pod's VM in real machines. The pod's share is there in addition to the guest's share, and each
//! container ends at its own limit. A VM with too little memory is reported. Needs root and `make image`.

use std::fs;

use peerpod_client::{Annotations, ContainerSpec, exec_request};
use peerpod_tests::machines::{PATIENCE, Place};
use peerpod_tests::{CONTAINER, Sandbox, fresh_id, image, stop_in_time};
use peerpod_world::Daemons;
use serde_json::Value;

/// Annotation that `peerpod-cluster webhook` writes.
const LIMITS: &str = "io.katacontainers.peerpod.memory-limits";

/// Returns the image's `image.json`.
fn about_image() -> Value {
    let file = image::minimal().unwrap().join("image.json");
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

/// Boots a pod with containers that may use `mib` MiB together, in its own VM.
async fn boot(place: &Place, daemons: &Daemons, mib: u64) -> anyhow::Result<Sandbox> {
    let size = |annotations: Annotations| annotations.size("1", mib);
    Sandbox::boot(daemons, place.world.pod()?, "memory", size, *PATIENCE).await
}

/// Creates a container that sleeps, with the annotations of the webhook and of containerd.
async fn limited(machine: &Sandbox, container: &str, limits: &str) {
    let request = ContainerSpec::new(container, &["sleep", "infinity"])
        .annotation("io.kubernetes.cri.container-type", "container")
        .annotation("io.kubernetes.cri.container-name", container)
        .annotation(LIMITS, limits)
        .request();
    machine.agent.create_container(&request).await.unwrap();
    machine.agent.start_container(container).await.unwrap();
}

/// Runs a program in the container that writes to `mib` MiB of memory, and returns its exit code.
async fn touch(machine: &Sandbox, container: &str, mib: u64) -> i32 {
    let block = format!("bs={mib}M");
    let command = ["dd", "if=/dev/zero", "of=/dev/null", &block, "count=1"];
    machine.agent.exec(&exec_request(container, &fresh_id("touch"), &command)).await.unwrap().status
}

/// Returns a value of /proc/meminfo, in MiB.
async fn meminfo(machine: &Sandbox, key: &str) -> u64 {
    let text = machine.prints("cat /proc/meminfo").await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

async fn end(place: &Place, daemons: &Daemons, machine: &Sandbox) {
    stop_in_time(&machine.shim, &machine.id).await.unwrap();
    daemons.gone(&machine.id, *PATIENCE).await.unwrap();
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_can_use_its_limit_and_ends_at_it() {
    let place = Place::new();
    // Without the share for container images, of which this test has none.
    let base = about_image()["guest_memory"]["base_mib"].as_u64().unwrap();
    let settings = place.settings.clone().set("node.guest-memory-mib", base);
    let daemons = Daemons::start(&place.world, settings).await.unwrap();
    let machine = boot(&place, &daemons, 256).await;
    let machine = machine.unwrap_or_else(|error| panic!("{error:#}\n{}", place.consoles()));
    let events = machine.agent.clone();
    let out_of_memory = tokio::spawn(async move { events.oom_event().await });
    limited(&machine, CONTAINER, r#"{"main": 268435456, "other": 16777216}"#).await;
    let available = meminfo(&machine, "MemAvailable").await;
    assert!(available >= 256, "{available} MiB");
    assert_eq!(touch(&machine, CONTAINER, 250).await, 0, "{}", place.consoles());
    assert!(!out_of_memory.is_finished());
    assert_eq!(touch(&machine, CONTAINER, 270).await, 137);
    let container = tokio::time::timeout(*PATIENCE, out_of_memory).await.unwrap().unwrap().unwrap();
    assert_eq!(container, CONTAINER);
    // The limit applies to this container alone: its machine has more memory, and the other container has less.
    limited(&machine, "other", r#"{"main": 268435456, "other": 16777216}"#).await;
    assert_eq!(touch(&machine, "other", 20).await, 137);
    assert_eq!(touch(&machine, CONTAINER, 250).await, 0);
    end(&place, &daemons, &machine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_smallest_pod_starts_and_can_use_its_limit() {
    let place = Place::new();
    let daemons = Daemons::start(&place.world, place.settings.clone()).await.unwrap();
    let machine = boot(&place, &daemons, 32).await;
    let machine = machine.unwrap_or_else(|error| panic!("{error:#}\n{}", place.consoles()));
    // The image's figures, which the provider reads beside the kernel.
    let memory = &about_image()["guest_memory"];
    let sum = 32 + memory["base_mib"].as_u64().unwrap() + memory["images_mib"].as_u64().unwrap();
    let domain = place.libvirtd.domains().unwrap().remove(0);
    let info = place.libvirtd.virsh(&["dominfo", &domain]).unwrap();
    let kib = info.lines().find_map(|line| line.strip_prefix("Max memory:")).unwrap();
    assert_eq!(kib.trim(), format!("{} KiB", (sum + sum.div_ceil(32)) << 10));
    limited(&machine, CONTAINER, r#"{"main": 33554432}"#).await;
    assert_eq!(touch(&machine, CONTAINER, 28).await, 0, "{}", place.consoles());
    assert_eq!(touch(&machine, CONTAINER, 40).await, 137);
    end(&place, &daemons, &machine).await;
}

/// The VM has 128 MiB, of which its kernel may use 96 (`mem=`), too little to unpack the image.
#[tokio::test(flavor = "multi_thread")]
async fn error_and_log_of_a_vm_with_too_little_memory_name_the_cause() {
    let place = Place::new();
    let little = format!("{} mem=96M", about_image()["cmdline"].as_str().unwrap());
    let settings =
        place.settings.clone().set("provider.libvirt.cmdline", little).set("node.guest-memory-mib", 64);
    let daemons = Daemons::start(&place.world, settings).await.unwrap();
    let id = fresh_id("little");
    let shim = daemons.shim().await.unwrap();
    let pod = place.world.pod().unwrap();
    let annotations = Annotations::new("default", &id).size("1", 32);
    shim.create_vm(&id, annotations, &pod.namespace().path()).await.unwrap();
    let error = tokio::time::timeout(*PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap_err().to_string();
    let reason = "has ended: Kernel panic - not syncing: System is deadlocked on memory (";
    assert!(error.contains(reason), "{error}\n{}", place.consoles());
    assert!(error.contains("node.guest-memory-mib (the VM has 128 MiB)"), "{error}");
    let log = fs::read_to_string(daemons.log("node")).unwrap();
    assert!(log.contains(reason), "{log}");
    stop_in_time(&shim, &id).await.unwrap();
    daemons.gone(&id, *PATIENCE).await.unwrap();
    place.assert_clean();
}
