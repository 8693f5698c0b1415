//! Tests failures and their error texts, ends of VMs, restarts, and disks. With a real libvirtd and QEMU. Needs root.

use super::common;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{PATIENCE, Place, create, key, owner, request, state, text_of};
use futures_util::StreamExt;
use peerpod_provider_api::{
    Confidential, CreateRequest, DiskIdentity, DiskRequest, Error, EventKind, OwnedState, Provider, Size,
};
use peerpod_provider_libvirt::{LibvirtConfig, LibvirtProvider};
use peerpod_world::eventually;
use peerpod_world::libvirtd::{NETWORK, POOL};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

async fn gone_wrong(place: &Place, settings: &[(&str, &str)], class: &str) -> String {
    let provider = place.provider_with(settings);
    text_of(provider.create(&request("pod"), &key(1)).await, class)
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_settings_and_images_are_refused_with_a_remedy_and_leave_nothing() {
    let place = Place::new();
    let garbage = place.world.folder().join("garbage");
    fs::write(&garbage, "<html>not found</html>").unwrap();
    let garbage = garbage.display().to_string();
    let zeros = "0".repeat(64);
    for (settings, class, parts) in [
        (vec![("image", "/nowhere.img")], "invalid", ["/nowhere.img", "make image"]),
        (vec![("image", &*garbage)], "invalid", ["garbage", "neither a qcow2 nor a raw disk"]),
        (vec![("image-sha256", &*zeros)], "invalid", ["its SHA-256 is", "image-sha256"]),
        (vec![("image", ""), ("volume", "absent")], "invalid", ["no image absent", "image upload"]),
        (vec![("pool", "absent")], "invalid", ["Storage pool not found", "provider.libvirt.pool"]),
        (vec![("network", "absent")], "invalid", ["Network not found", "provider.libvirt.network"]),
        (vec![("bridge", "absent0")], "invalid", ["absent0", "create of pod"]),
        (vec![("firmware", "/nowhere.fd")], "invalid", ["/nowhere.fd", "create of pod"]),
        (
            vec![("uri", "qemu+unix:///system?socket=/nowhere.sock")],
            "transient",
            ["/nowhere.sock", "is it running?"],
        ),
    ] {
        let text = gone_wrong(&place, &settings, class).await;
        assert!(parts.iter().all(|part| text.contains(part)), "{settings:?}: {text}");
    }
    let provider = place.provider();
    for (change, class, parts) in [
        (
            CreateRequest { image: Some("absent".into()), ..request("pod") },
            "invalid",
            ["no image absent", "image upload"],
        ),
        (
            CreateRequest { confidential: Some(Confidential::SevSnp), ..request("pod") },
            "unsupported",
            ["by sev_snp cannot be had", "domcapabilities"],
        ),
        (
            CreateRequest {
                disks: vec![DiskRequest { volume: "absent".into(), ..DiskRequest::default() }],
                ..request("pod")
            },
            "not_found",
            ["no disk absent", "deleted"],
        ),
        (
            CreateRequest {
                disks: vec![DiskRequest { volume: "/etc/shadow".into(), ..DiskRequest::default() }],
                ..request("pod")
            },
            "invalid",
            ["/etc/shadow", "volume-dirs"],
        ),
    ] {
        let text = text_of(provider.create(&change, &key(2)).await, class);
        let emulated = text.contains("there is no KVM");
        assert!(parts.iter().all(|part| text.contains(part)) || emulated, "{text}");
    }
    // More memory than any host has.
    let mut huge = request("pod");
    huge.size.memory_mib = 64 << 20;
    let text = text_of(provider.create(&huge, &key(3)).await, "capacity");
    assert!(text.contains("MiB, and the host has"), "{text}");
    assert_eq!(provider.list_owned().await.unwrap().len(), 0);
    place.assert_clean();
}

/// The host has this memory but QEMU does not get it, as when other processes have taken it. When there is memory
/// again, no remains of the VM are in the way.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_free_memory_gives_an_error_with_the_requested_size() {
    let place = Place::new();
    let known = fs::read_to_string("/proc/meminfo").unwrap();
    let total = known.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let total: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    let asked = (total >> 10) / 2;
    let mut big = request("pod");
    big.size.memory_mib = asked;
    let provider = place.provider();
    place.libvirtd.limit_memory(Some(asked / 4 * 3)).unwrap();
    let text = text_of(provider.create(&big, &key(1)).await, "capacity");
    let how_much = format!("start it with {asked} MiB");
    for part in ["create of pod (", &how_much, "Cannot allocate memory", "stop VMs, or ask for smaller ones"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(place.machines(), Vec::<u32>::new());
    place.libvirtd.limit_memory(None).unwrap();
    let made = provider.create(&big, &key(1)).await.unwrap();
    assert_eq!(place.machines().len(), 1);
    provider.delete(&made.id).await.unwrap();
    place.assert_clean();
}

/// The file system of the pool has no room for an overlay, let alone a disk.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_is_reported() {
    let place = Place::new();
    let folder = place.libvirtd.pool_folder("small");
    fs::create_dir_all(&folder).unwrap();
    // Mounted in this process's namespace before libvirtd's next start, which copies this namespace.
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "peerpod-test"]).arg(&folder).status();
    assert!(mounted.unwrap().success());
    let mut place = place;
    place.libvirtd.kill().unwrap();
    place.libvirtd.begin().unwrap();
    place.libvirtd.make_pool("small").unwrap();
    let text = gone_wrong(&place, &[("pool", "small")], "quota").await;
    assert!(text.contains("No space left on device") && text.contains("make room"), "{text}");
    assert!(place.libvirtd.domains().unwrap().is_empty());
    place.libvirtd.kill().unwrap();
    assert!(Command::new("umount").arg("-l").arg(&folder).status().unwrap().success());
}

/// The trial of KVM needs a disk in the pool. If the disk cannot be made, the trial has no result.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_not_started_is_no_proof_against_kvm_and_old_trials_are_swept() {
    let place = Place::new();
    let made = create(&*place.provider(), 1).await;
    let domain = place.libvirtd.domains().unwrap().remove(0);
    let (prefix, _) = domain.rsplit_once('-').unwrap();
    let left = format!("{prefix}-probe-1-1.img");
    place.libvirtd.virsh(&["vol-create-as", POOL, &left, "1M", "--format", "raw"]).unwrap();
    place.provider().delete(&made.id).await.unwrap();
    place.provider().preflight().await.unwrap();
    assert_eq!(place.libvirtd.files(POOL).unwrap(), Vec::<String>::new());
    let provider = place.provider_with(&[("acceleration", "kvm")]);
    place.libvirtd.virsh(&["pool-destroy", POOL]).unwrap();
    let text = text_of(provider.create(&request("pod"), &key(1)).await, "invalid");
    for part in ["find out whether KVM works", &format!("pool {POOL}"), "virsh pool-start"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    place.libvirtd.virsh(&["pool-start", POOL]).unwrap();
    // Now KVM is tried, with any result on this host.
    match provider.create(&request("pod"), &key(1)).await {
        Ok(made) => provider.delete(&made.id).await.unwrap(),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("no VM can be started with KVM") && !text.contains("pool"), "{text}");
        }
    }
    place.assert_clean();
}

/// A trial changes the time of the pool's folder, because its disk is there for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn a_dry_preflight_tries_kvm_with_no_vm() {
    let place = Place::new();
    let changed = || fs::metadata(place.libvirtd.pool_folder(POOL)).unwrap().modified().unwrap();
    let before = changed();
    let config = LibvirtConfig { dry: true, ..place.config(&[("acceleration", "auto")]) };
    let found = LibvirtProvider::new(config, owner("node")).preflight().await.unwrap();
    assert_eq!(changed(), before, "{found:?}");
    assert!(found.facts.iter().any(|fact| fact.starts_with("quota storage pool ")), "{found:?}");
    let runs = found.facts.iter().any(|fact| fact.contains("no VM was started to try"));
    assert!(runs || found.warnings.iter().any(|warning| warning.contains("KVM")), "{found:?}");
    place.assert_clean();
}

/// libvirtd answers neither whether there is KVM nor a trial, as where QEMU's user has no right to the device.
#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_is_silent_about_kvm_is_not_waited_for() {
    const GET_DOMAIN_CAPABILITIES: u32 = 342;
    const DOMAIN_CREATE_XML: u32 = 10;
    let place = Place::new();
    let socket = without_answers(&place, &[GET_DOMAIN_CAPABILITIES, DOMAIN_CREATE_XML]);
    let uri = format!("qemu+unix:///system?socket={}", socket.display());
    let provider = place.provider_with(&[("acceleration", "auto"), ("uri", &uri), ("call-timeout", "120s")]);
    let found =
        timeout(PATIENCE, provider.preflight()).await.expect("it ends before a call's limit").unwrap();
    let warnings: Vec<&String> =
        found.warnings.iter().filter(|one| one.contains("VMs are emulated")).collect();
    let [warning] = warnings[..] else { panic!("{found:?}") };
    assert!(warning.contains("gave no answer within 5s") && warning.contains("group kvm"), "{warning}");
    let made = create(&*provider, 1).await;
    assert!(place.libvirtd.virsh(&["dumpxml", made.id.as_str()]).unwrap().contains("<domain type='qemu'"));
    provider.delete(&made.id).await.unwrap();
    place.assert_clean();
}

/// Returns the socket of a proxy before libvirtd that drops these calls.
fn without_answers(place: &Place, dropped: &'static [u32]) -> PathBuf {
    let (socket, libvirtd) = (place.world.folder().join("proxy.sock"), place.libvirtd.socket());
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = UnixStream::connect(&libvirtd).await.unwrap().into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            tokio::spawn(async move {
                while let Ok(length) = from_client.read_u32().await {
                    // The length counts itself; program, version and procedure begin the message.
                    let mut message = vec![0; length as usize - 4];
                    from_client.read_exact(&mut message).await.unwrap();
                    let procedure = u32::from_be_bytes(message[8..12].try_into().unwrap());
                    if !dropped.contains(&procedure) {
                        to_server.write_all(&[&length.to_be_bytes()[..], &message].concat()).await.unwrap();
                    }
                }
            });
        }
    });
    socket
}

#[tokio::test(flavor = "multi_thread")]
async fn user_data_are_private_and_in_no_command_line() {
    let place = Place::new();
    for kind in ["fw-cfg", "nocloud"] {
        let provider = place.provider_with(&[("user-data", kind)]);
        let made = create(&*provider, 1).await;
        for name in place.libvirtd.files(POOL).unwrap() {
            let metadata = fs::metadata(place.libvirtd.pool_folder(POOL).join(&name)).unwrap();
            assert_eq!(metadata.mode() & 0o077, 0, "{name}: {:o}", metadata.mode());
        }
        let xml = place.libvirtd.virsh(&["dumpxml", made.id.as_str()]).unwrap();
        assert!(!xml.contains("s3cr3t"));
        for pid in place.machines() {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
            assert!(!String::from_utf8_lossy(&line).contains("s3cr3t"));
        }
        provider.delete(&made.id).await.unwrap();
        place.assert_clean();
    }
}

/// The program on the disk image is not signed. libvirt makes a file for the data that UEFI keeps of a VM between
/// boots.
#[tokio::test(flavor = "multi_thread")]
async fn uefi_boots_a_disk_without_signature_or_kept_variables() {
    let place = Place::new();
    let provider = place.provider_with(&[("firmware", "efi")]);
    let found = provider.preflight().await.unwrap();
    assert!(found.facts.iter().any(|fact| fact.contains("halt.img")), "{found:?}");
    let size = Size { vcpus: 1, memory_mib: 256, ..Size::default() };
    let request = CreateRequest { size, ..request("vm") };
    let made = provider.create(&request, &key(1)).await.unwrap();
    assert_eq!(state(&*provider, &made.id).await, Some(OwnedState::Running));
    let xml = place.libvirtd.virsh(&["dumpxml", made.id.as_str()]).unwrap();
    assert!(xml.contains("type='pflash'") && xml.contains("<nvram"), "no UEFI: {xml}");
    for signed in ["secure='yes'", "<smm state='on'", "enabled='yes' name='secure-boot'", ".ms.fd"] {
        assert!(!xml.contains(signed), "{signed}: {xml}");
    }
    assert_eq!(place.libvirtd.firmware().unwrap().len(), 1);
    provider.delete(&made.id).await.unwrap();
    assert_eq!(state(&*provider, &made.id).await, None);
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn vms_survive_a_restart_of_libvirtd() {
    let mut place = Place::new();
    let provider = place.provider();
    let (mut events, mut health) = (provider.events().unwrap(), provider.health().unwrap());
    let (one, two) = (create(&*provider, 1).await, create(&*provider, 2).await);
    let before = place.machines();
    assert_eq!(before.len(), 2);
    place.libvirtd.kill().unwrap();
    // Known without a call.
    let away = timeout(PATIENCE, health.next()).await.expect("its end is noticed").unwrap();
    assert!(away.as_ref().is_some_and(|why| why.contains("libvirtd")), "{away:?}");
    let text = text_of(provider.list_owned().await, "transient");
    assert!(text.contains("libvirtd"), "{text}");
    // One VM ends while libvirtd is down.
    let victim = before.iter().find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        String::from_utf8_lossy(&line).contains(one.id.as_str())
    });
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(*victim.unwrap() as i32),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    place.libvirtd.begin().unwrap();
    let told = timeout(PATIENCE, events.next()).await.expect("the event arrives").unwrap();
    assert_eq!(told.id, one.id);
    let again = async { while health.next().await.unwrap().is_some() {} };
    timeout(PATIENCE, again).await.expect("its return is noticed");
    assert_eq!(state(&*provider, &one.id).await, Some(OwnedState::Ended));
    assert_eq!(state(&*provider, &two.id).await, Some(OwnedState::Running));
    // A repeated create from another provider does not start an ended VM, either.
    assert_eq!(create(&*place.provider(), 1).await.id, one.id);
    assert_eq!(state(&*provider, &one.id).await, Some(OwnedState::Ended));
    for id in [&one.id, &two.id] {
        provider.delete(id).await.unwrap();
    }
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_destroyed_from_outside_is_reported_and_our_deletes_are_not() {
    let place = Place::new();
    let provider = place.provider();
    let mut events = provider.events().unwrap();
    let (ours, theirs) = (create(&*provider, 1).await, create(&*provider, 2).await);
    provider.delete(&ours.id).await.unwrap();
    place.libvirtd.virsh(&["destroy", theirs.id.as_str()]).unwrap();
    let told = timeout(PATIENCE, events.next()).await.expect("the event arrives").unwrap();
    assert_eq!(told.id, theirs.id);
    let EventKind::Ended { reason } = told.kind else { panic!("{told:?}") };
    assert!(reason.contains("destroyed from outside"), "{reason}");
    let text = text_of(provider.addresses(&theirs.id).await, "not_found");
    assert!(text.contains("it has ended"), "{text}");
    provider.delete(&theirs.id).await.unwrap();
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_of_all_kinds_are_attached_at_creation_and_later_and_one_in_use_is_refused() {
    let place = Place::new();
    let files = place.world.folder().join("disks");
    fs::create_dir(&files).unwrap();
    for name in ["a.raw", "b.raw"] {
        fs::write(files.join(name), vec![0; 1 << 20]).unwrap();
    }
    place.libvirtd.virsh(&["vol-create-as", POOL, "volume", "8M", "--format", "qcow2"]).unwrap();
    // A server of network disks, like one on another host.
    let nbd = files.join("nbd.sock");
    let mut server = Command::new("qemu-nbd")
        .args(["--persistent", "--shared=4", "--format=raw", "--export-name=x", "--socket"])
        .args([&nbd, &files.join("b.raw")])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the server listens", PATIENCE, async || nbd.exists().then_some(())).await.unwrap();
    let folder = files.display().to_string();
    let settings = [("volume-dirs", &*folder)];
    let provider = place.provider_with(&settings);
    let disk = |volume: String| DiskRequest { volume, ..DiskRequest::default() };
    let (file, network) =
        (files.join("a.raw").display().to_string(), format!("nbd+unix:///x?socket={}", nbd.display()));
    let with_disks =
        CreateRequest { disks: vec![disk(file.clone()), disk("volume".into())], ..request("disks") };
    let made = provider.create(&with_disks, &key(1)).await.unwrap();
    let hot = provider.extensions().volumes.unwrap().attach(&made.id, &disk(network.clone())).await.unwrap();
    assert_eq!(
        provider.extensions().volumes.unwrap().attach(&made.id, &disk(network.clone())).await.unwrap(),
        hot
    );
    // The witness: the serials of QEMU's disks.
    let xml = place.libvirtd.virsh(&["dumpxml", made.id.as_str()]).unwrap();
    let serials: Vec<_> = made.disks.iter().map(|(_, identity)| identity.clone()).chain([hot]).collect();
    assert_eq!(serials.len(), 3);
    for serial in &serials {
        let DiskIdentity::Serial(serial) = serial else { panic!("{serial:?}") };
        assert_eq!(xml.matches(&format!("<serial>{serial}</serial>")).count(), 1, "{serial}\n{xml}");
    }
    // Another cluster's provider neither attaches a disk to this VM nor asks its guest for one.
    let stranger = place.stranger(&settings);
    let theirs = stranger.extensions().volumes.unwrap();
    text_of(theirs.attach(&made.id, &disk(network.clone())).await, "not_found");
    theirs.detach(&made.id, &network).await.unwrap();
    assert_eq!(place.libvirtd.virsh(&["dumpxml", made.id.as_str()]).unwrap(), xml);
    // Another VM must not get a disk that this VM writes to.
    let thief = CreateRequest { disks: vec![disk("volume".into())], ..request("thief") };
    let text = text_of(provider.create(&thief, &key(2)).await, "transient");
    assert!(text.contains("\"write\" lock") && text.contains("another VM has this disk"), "{text}");
    let owned = provider.list_owned().await.unwrap();
    for one in owned.iter().filter(|one| one.id != made.id) {
        provider.delete(&one.id).await.unwrap();
    }
    provider.delete(&made.id).await.unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    // A pod's disks outlive its VM.
    assert!(files.join("a.raw").exists());
    assert_eq!(place.libvirtd.files(POOL).unwrap(), ["volume"]);
    assert!(place.libvirtd.domains().unwrap().is_empty());
}

/// Two clusters have equal names and one libvirtd. The preflight of one removes its own remains, and nothing of a VM of
/// the other one, which runs or is being created meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_preflight_leaves_the_vms_of_another_installation_alone() {
    let place = Place::new();
    let (ours, theirs) = (place.provider(), place.stranger(&[]));
    // Their domain is removed by hand: its files and its DHCP entry are left.
    create(&*theirs, 1).await;
    let remains = place.libvirtd.domains().unwrap().remove(0);
    place.libvirtd.virsh(&["destroy", &remains]).unwrap();
    place.libvirtd.virsh(&["undefine", &remains]).unwrap();
    let left =
        || place.libvirtd.files(POOL).unwrap().into_iter().filter(|file| file.starts_with(&remains)).count();
    assert!(left() > 0 && place.reservations(NETWORK).contains_key(&remains));
    let creates = async {
        // The same key as theirs.
        let mut made = Vec::new();
        for number in 1..4 {
            made.push(create(&*ours, number).await.id);
        }
        made
    };
    let mut creates = std::pin::pin!(creates);
    let made = loop {
        tokio::select! {
            made = &mut creates => break made,
            // Another process of theirs each time.
            found = async { place.stranger(&[]).preflight().await } => drop(found.unwrap()),
        }
    };
    let files = place.libvirtd.files(POOL).unwrap();
    let found = place.stranger(&[]).preflight().await.unwrap();
    assert_eq!(left(), 0, "{found:?}");
    assert_eq!(theirs.list_owned().await.unwrap().len(), 0);
    let names = place.libvirtd.domains().unwrap();
    let reserved = place.reservations(NETWORK);
    assert_eq!((names.len(), reserved.len(), place.machines().len()), (3, 3, 3), "{reserved:?}");
    for name in &names {
        let of_it = |file: &&String| file.starts_with(name.as_str());
        let now = place.libvirtd.files(POOL).unwrap();
        assert!(reserved.contains_key(name), "{reserved:?}");
        assert!(now.iter().any(|file| of_it(&file)), "{now:?}");
        assert_eq!(now.iter().filter(of_it).count(), files.iter().filter(of_it).count(), "{now:?}");
    }
    for id in &made {
        theirs.delete(id).await.unwrap();
        assert_eq!(state(&*ours, id).await, Some(OwnedState::Running));
        ours.delete(id).await.unwrap();
    }
    place.assert_clean();
}

/// Returns libvirtd's reason for the end of the only VM that has run.
fn end_of_vm(place: &Place) -> String {
    let folder = place.world.folder().join("libvirt/log/qemu");
    let log = fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let text = fs::read_to_string(&log).unwrap();
    fs::remove_file(log).unwrap();
    text.rsplit_once("shutting down, reason=").unwrap().1.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_with_a_writable_volume_is_shut_down_before_its_power_is_cut() {
    let place = Place::new();
    fs::write(&place.image, common::button()).unwrap();
    let files = place.world.folder().join("disks");
    fs::create_dir(&files).unwrap();
    let file = files.join("a.raw");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let disk = DiskRequest { volume: file.display().to_string(), ..DiskRequest::default() };
    let folder = files.display().to_string();
    let settings = [("volume-dirs", &*folder), ("shutdown-timeout", "60s")];
    let provider = place.provider_with(&settings);
    let read_only = DiskRequest { read_only: true, ..disk.clone() };
    for (number, disks, end) in
        [(1, vec![disk.clone()], "shutdown"), (2, vec![read_only], "destroyed"), (3, vec![], "destroyed")]
    {
        let made = provider.create(&CreateRequest { disks, ..request("vm") }, &key(number)).await.unwrap();
        let watches = eventually("the VM watches its button", PATIENCE, async || {
            let console =
                provider.extensions().console.unwrap().tail(&made.id, 4096).await.unwrap_or_default();
            console.contains(&common::WATCHES).then_some(())
        });
        watches.await.unwrap();
        provider.delete(&made.id).await.unwrap();
        assert_eq!(end_of_vm(&place), end, "{number}");
    }
    // A VM that ignores the button is ended all the same.
    fs::write(&place.image, common::halt()).unwrap();
    let provider = place.provider_with(&[settings[0]]);
    let request = CreateRequest { disks: vec![disk], ..request("vm") };
    let made = provider.create(&request, &key(4)).await.unwrap();
    provider.delete(&made.id).await.unwrap();
    assert_eq!(end_of_vm(&place), "destroyed");
    place.assert_clean();
}

/// Line that the node prints for each VM.
const STARTED: &str = "a VM was started";

#[test]
#[ignore = "a process that another test starts"]
fn the_node_that_works() {
    let Ok(flags) = std::env::var("PEERPOD_TEST_SETTINGS") else { return };
    let flags =
        flags.lines().filter_map(|line| line.split_once('=')).map(|(key, value)| (key.into(), value.into()));
    let provider = LibvirtProvider::new(common::config(flags.collect()).unwrap(), common::owner("node"));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        for round in 0.. {
            let made = create(&provider, round % 3).await;
            if round < 3 || round % 3 == 2 {
                println!("{STARTED}");
            }
            if round % 3 == 2 {
                provider.delete(&made.id).await.unwrap();
            }
        }
    });
}

#[test]
fn a_node_killed_at_any_time_leaves_nothing_that_its_successor_does_not_find() {
    let place = Place::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let settings: String = place.settings().iter().map(|(key, value)| format!("{key}={value}\n")).collect();
    // Each VM is also stopped, by the node or by its successor.
    let (mut starts, enough) = (0, if std::env::var_os("PEERPOD_TEST_LONG").is_some() { 500 } else { 0 });
    for round in 0u64.. {
        if round >= 12 && starts >= enough {
            break;
        }
        let said = place.world.folder().join("said");
        let mut node = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::the_node_that_works", "--ignored", "--nocapture"])
            .env("PEERPOD_TEST_SETTINGS", &settings)
            .stdout(fs::File::create(&said).unwrap())
            .spawn()
            .unwrap();
        // This waits for no condition: any moment will do.
        std::thread::sleep(Duration::from_millis(60 + round * 137 % 1500));
        node.kill().unwrap();
        node.wait().unwrap();
        starts += fs::read_to_string(&said).unwrap().matches(STARTED).count();
        let provider = place.provider();
        runtime.block_on(async {
            provider.preflight().await.unwrap();
            starts += 3 - provider.list_owned().await.unwrap().len().min(3);
            // The same requests again make one VM each, from any state that was left.
            for number in 0..3 {
                let made = create(&*provider, number).await;
                let state = state(&*provider, &made.id).await;
                // A VM with an interrupted delete has ended, and is not started again.
                let deleted = number == 2 && state == Some(OwnedState::Ended);
                assert!(deleted || state == Some(OwnedState::Running), "round {round}: {state:?}");
            }
            let owned = provider.list_owned().await.unwrap();
            assert_eq!(owned.len(), 3, "{owned:?}");
            for one in owned {
                provider.delete(&one.id).await.unwrap();
            }
        });
        place.assert_clean();
    }
}

/// The network hands out both families. The VM is known by its IPv4 address first, even if the other server was faster.
#[tokio::test(flavor = "multi_thread")]
async fn an_early_ipv6_lease_is_not_the_only_address() {
    let place = Place::new();
    let provider = place.provider();
    let made = create(&*provider, 1).await;
    let v6 = |[first, middle, last]: [u8; 3]| format!("fd97::{first:x}:{middle:x}:{last:x}");
    place.libvirtd.lease(|own| vec![v6(own)]).unwrap();
    let mut asked = tokio::spawn({
        let (provider, id) = (provider.clone(), made.id.clone());
        async move { provider.addresses(&id).await.unwrap() }
    });
    let early = timeout(Duration::from_secs(1), &mut asked).await;
    assert!(early.is_err(), "the single address is not returned yet: {early:?}");
    place.libvirtd.lease(|own| vec![v6(own), format!("10.97.{}.{}", own[1], own[2])]).unwrap();
    let told = asked.await.unwrap();
    assert!(told.len() == 2 && told[0].is_ipv4() && told[1].is_ipv6(), "{told:?}");
    // The address of a VM that never gets another one is returned all the same.
    place.libvirtd.lease(|own| vec![v6(own)]).unwrap();
    let told = provider.addresses(&made.id).await.unwrap();
    assert!(told.len() == 1 && told[0].is_ipv6(), "{told:?}");
    provider.delete(&made.id).await.unwrap();
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_test_driver_does_what_it_can() {
    let place = Place::new();
    let uri = format!("test+unix:///default?socket={}", place.libvirtd.socket().display());
    let provider = place.provider_with(&[("uri", &uri), ("pool", "default-pool"), ("network", "default")]);
    let made = create(&*provider, 1).await;
    assert_eq!(create(&*provider, 1).await.id, made.id);
    assert!(matches!(provider.create(&request("another"), &key(1)).await, Err(Error::KeyReused { .. })));
    assert_eq!(state(&*provider, &made.id).await, Some(OwnedState::Running));
    // The test driver makes leases up.
    assert!(!provider.addresses(&made.id).await.unwrap().is_empty());
    provider.delete(&made.id).await.unwrap();
    provider.delete(&made.id).await.unwrap();
    assert!(provider.list_owned().await.unwrap().is_empty());
}
