//! Tests the guest as pid 1 of real machines: QEMU boots the image's kernel and initramfs (`make image`), with a relay
//! in this test. Emulated in software without KVM.

use super::machine;
use super::relay;
use std::fs;

use machine::{Folder, Vm, Wanted, run};
use peerpod_link::user_data::{TicketSecret, UserData, UserDataNode, UserDataTicket};
use peerpod_proto::guest::request::Body;
use peerpod_proto::guest::{self, Flush, Personalise};
use relay::Relay;
use tokio::runtime::Runtime;

const SANDBOX: &str = "sandbox-1";
/// Address of the test's machine for the VM, in QEMU's own network.
const HOST: &str = "10.0.2.2";
const NIC: [&str; 4] = ["-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n"];

pub(super) fn user_data(relay: &Relay, port: u16, lease_seconds: u32) -> UserData {
    UserData {
        version: 1,
        ticket: UserDataTicket { id: "0".repeat(32), secret: TicketSecret::new(relay::SECRET), claims: 1 },
        node: UserDataNode {
            addresses: vec![format!("{HOST}:{port}").parse().unwrap()],
            ca_sha256: vec![relay.ca_sha256()],
            listen: None,
        },
        lease_seconds,
    }
}

pub(super) fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn fw_cfg(folder: &Folder, user_data: &UserData) -> Vec<String> {
    let file = folder.0.join("user-data");
    fs::write(&file, user_data.to_json()).unwrap();
    words(&["-fw_cfg", &format!("name=opt/io.peerpod/user-data,file={}", file.display())])
}

pub(super) fn plan(lease_seconds: u32) -> Personalise {
    let mut plan = Personalise::new();
    (plan.version, plan.sandbox_id) = (1, SANDBOX.into());
    (plan.lease_seconds, plan.agent_timeout_ms) = (lease_seconds, 60_000);
    let network = plan.network.mut_or_insert_default();
    network.version = 1;
    let mut interface = guest::Interface::new();
    (interface.name, interface.mac) = ("eth0".into(), "02:00:0a:f4:01:07".into());
    (interface.mtu, interface.vni) = (1450, 77);
    let mut address = guest::Address::new();
    address.prefix = "10.244.1.7/24".into();
    interface.addresses.push(address);
    network.interfaces.push(interface);
    let underlay = network.underlay.mut_or_insert_default();
    (underlay.kind, underlay.node_address) = ("vxlan".into(), HOST.into());
    (underlay.port, underlay.overhead) = (4789, 50);
    plan
}

pub(super) struct Home {
    pub(super) runtime: Runtime,
    pub(super) relay: Relay,
    pub(super) port: u16,
}

impl Home {
    pub(super) fn new() -> Home {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build().unwrap();
        let (relay, port) = runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            (Relay::new(SANDBOX).on(listener), port)
        });
        Home { runtime, relay, port }
    }
}

/// Tests the whole life: drivers, root, an address from QEMU's DHCP server, user-data by fw_cfg, the link, the
/// kata-agent, the guest's report of its boot. Then a disk is written to and the lease ends: the machine goes off, and
/// the disk is clean.
#[test]
fn a_machine_boots_dials_the_node_and_ends_with_its_lease_and_a_clean_disk() {
    let folder = Folder::new("life");
    let mut home = Home::new();
    let disk = folder.0.join("disk");
    fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    run("mke2fs", &["-q", "-t", "ext4", disk.to_str().unwrap()]);
    let drive = format!("file={},if=virtio,format=raw", disk.display());
    let mut qemu = fw_cfg(&folder, &user_data(&home.relay, home.port, 300));
    qemu.extend(words(&NIC).into_iter().chain(words(&["-drive", &drive])));
    let mut vm = Vm::boot(&folder, Wanted { line: "probe=disk".into(), qemu, ..Wanted::default() });
    vm.says("the link is up");
    home.relay.up(&home.runtime);
    println!("connected to the node after {:?}", vm.began().elapsed());
    let reply = home.relay.ask(&home.runtime, Body::Personalise(plan(300)));
    assert_eq!(reply.error, "", "{}", vm.console());
    let stages: Vec<_> = reply
        .status
        .stages
        .iter()
        .map(|stage| (stage.name.as_str(), stage.at_us / 1000, stage.took_us / 1000))
        .collect();
    println!("stages (name, at ms, took ms): {stages:?}");
    for name in
        ["boot", "init", "modules", "uplink", "user-data", "dial", "claim", "link", "network", "agent"]
    {
        assert!(stages.iter().any(|stage| stage.0 == name), "{name} in {stages:?}");
    }
    let said = vm.says("PROBE wrote END");
    assert!(said.contains("PROBE pivot_root exit status: 0 END"), "{said}");
    assert!(
        said.contains("PROBE hostname peerpod END") && said.contains("PROBE stdin /proc/self/fd/0 END"),
        "{said}"
    );
    assert!(said.contains("PROBE overlay true END"), "the kernel's own request for a module: {said}");
    let said = vm.says("PROBE resolv nameserver 10.0.2.3,");
    let rss = said.split("PROBE rss serve ").nth(1).unwrap().split(" END").next().unwrap();
    println!("RSS in KiB, idle: serve {rss}");

    // The node is gone.
    let reply = home.relay.ask(&home.runtime, Body::Personalise(plan(3)));
    assert_eq!(reply.error, "");
    drop(home);
    vm.ends();
    let said = vm.console();
    assert!(said.contains("all disks are synced and unmounted"), "{said}");
    let super_block = run("dumpe2fs", &["-h", disk.to_str().unwrap()]);
    assert!(!super_block.contains("needs_recovery"), "{super_block}");
    let state = super_block.lines().find(|line| line.starts_with("Filesystem state:")).unwrap();
    assert!(state.ends_with(" clean"), "{state}");
    let listed = run("debugfs", &["-R", "stat data", disk.to_str().unwrap()]);
    assert!(listed.contains(&format!("Size: {}", 3 << 20)), "{listed}");
}

/// Tests the image for aarch64, in long runs: the lock of its kernel, user-data by fw_cfg, the link, the pod's network and
/// the test agent.
#[test]
fn a_machine_of_aarch64_dials_the_node_and_takes_its_assignment() {
    if std::env::var_os("PEERPOD_TEST_LONG").is_none() {
        println!("not run without PEERPOD_TEST_LONG");
        return;
    }
    let (folder, mut home) = (Folder::new("aarch64"), Home::new());
    let mut qemu = fw_cfg(&folder, &user_data(&home.relay, home.port, 300));
    qemu.extend(words(&NIC));
    let mut vm = Vm::boot_aarch64(&folder, &qemu);
    vm.says("Kernel is locked down from securityfs");
    vm.says("the link is up");
    home.relay.up(&home.runtime);
    let reply = home.relay.ask(&home.runtime, Body::Personalise(plan(300)));
    assert_eq!(reply.error, "", "{}", vm.console());
    for name in ["user-data", "claim", "link", "network", "agent"] {
        assert!(
            reply.status.stages.iter().any(|stage| stage.name == name),
            "{name}: {:?}",
            reply.status.stages
        );
    }
    vm.says("it is not for production");
    assert_eq!(home.relay.ask(&home.runtime, Body::Flush(Flush::new())).error, "");
}

/// Tests the three kinds of disk on which clouds and hypervisors provide user-data.
#[test]
fn user_data_is_found_on_disks_of_each_kind() {
    let config_drive = "version = 1\n[[when]]\ndisk = \"config-2\"\n[[user-data]]\ndisk = \"config-2\"\n\
        path = \"openstack/latest/user_data\"\n";
    for kind in ["vfat", "iso", "config-drive"] {
        let folder = Folder::new(kind);
        let mut home = Home::new();
        let disk = folder.0.join("seed");
        let (at, tree) = (disk.to_str().unwrap(), folder.0.join("tree"));
        let file = if kind == "config-drive" { "openstack/latest/user_data" } else { "user-data" };
        fs::create_dir_all(tree.join(file).parent().unwrap()).unwrap();
        fs::write(tree.join(file), user_data(&home.relay, home.port, 300).to_json()).unwrap();
        match kind {
            "vfat" => {
                fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
                run("mkfs.vfat", &["-n", "CIDATA", at]);
                run("mcopy", &["-i", at, tree.join(file).to_str().unwrap(), "::user-data"]);
            }
            _ => {
                let label = if kind == "iso" { "cidata" } else { "config-2" };
                run(
                    "xorriso",
                    &["-as", "mkisofs", "-quiet", "-J", "-R", "-V", label, "-o", at, tree.to_str().unwrap()],
                );
            }
        }
        let mut qemu = words(&NIC);
        qemu.extend(words(&["-drive", &format!("file={at},if=virtio,format=raw,readonly=on")]));
        let line: serde_json::Value = basic_toml::from_str(config_drive).unwrap();
        let files = vec![("etc/peerpod/sources/openstack.json", 0o644, line.to_string().into_bytes())];
        let mut vm = Vm::boot(&folder, Wanted { qemu, files, ..Wanted::default() });
        let said = vm.says("the link is up");
        home.relay.up(&home.runtime);
        assert!(said.contains("found user-data"), "{said}");
    }
}

/// Tests `ip=` of the kernel command line.
#[test]
fn a_machine_gets_the_static_address_of_the_kernels_line() {
    let folder = Folder::new("static");
    let mut home = Home::new();
    let mut qemu = fw_cfg(&folder, &user_data(&home.relay, home.port, 300));
    qemu.extend(words(&NIC));
    let line = "ip=10.0.2.77::10.0.2.2:255.255.255.0::eth0:off:10.0.2.3".to_owned();
    let mut vm = Vm::boot(&folder, Wanted { line, qemu, ..Wanted::default() });
    vm.says("the link is up");
    home.relay.up(&home.runtime);
    let reply = home.relay.ask(&home.runtime, Body::Personalise(plan(300)));
    assert_eq!(reply.error, "");
    // On a slow machine QEMU's router has given it an IPv6 address by now.
    let addresses = reply.status.uplink_addresses.iter();
    let v4: Vec<_> = addresses.filter(|address| !address.contains(':')).collect();
    assert_eq!(v4, ["10.0.2.77"], "{}", vm.console());
    assert!(!vm.console().contains("DHCP lease"));
    assert_eq!(home.relay.ask(&home.runtime, Body::Flush(Flush::new())).error, "");
}

/// Tests an image whose /usr cannot be mounted: the node gets the cause, and not only the kernel's lack of a driver.
#[test]
fn without_its_usr_a_machine_refuses_the_pod_with_the_cause() {
    let (folder, mut home) = (Folder::new("usr"), Home::new());
    let mut qemu = fw_cfg(&folder, &user_data(&home.relay, home.port, 300));
    qemu.extend(words(&NIC));
    let files = vec![("usr.squashfs", 0o644, b"no file system".to_vec())];
    let mut vm = Vm::boot(&folder, Wanted { qemu, files, ..Wanted::default() });
    vm.says("cannot mount /usr.squashfs");
    home.relay.up(&home.runtime);
    let error = home.relay.ask(&home.runtime, Body::Personalise(plan(300))).error;
    assert!(error.contains("tunnel device") && error.contains("/usr is not mounted"), "{error}");
}

/// A guest program that hangs is killed and comes back; if it hangs every time, the watchdog resets the machine.
#[test]
fn a_guest_program_that_hangs_is_started_again_and_then_the_machine() {
    let folder = Folder::new("hang");
    let mut home = Home::new();
    let settings = || vec![("hang_seconds", 10.into())];
    let mut qemu = fw_cfg(&folder, &user_data(&home.relay, home.port, 300));
    qemu.extend(words(&NIC));
    let line = "probe=stop-serve softdog.soft_margin=20".to_owned();
    let mut vm =
        Vm::boot(&folder, Wanted { line, qemu: qemu.clone(), settings: settings(), ..Wanted::default() });
    vm.says("PROBE stopped ");
    vm.says("serve hangs: it is killed and started again");
    vm.says("found the agent running");
    vm.says("the link is up");
    home.relay.up(&home.runtime);
    let said = vm.console();
    assert_eq!(said.matches("the watchdog is active").count(), 1, "the machine itself went on: {said}");
    drop(vm);

    let line = "probe=stop-always softdog.soft_margin=20".to_owned();
    qemu.extend(words(&["-action", "reboot=reset"]));
    let mut vm = Vm::boot(&folder, Wanted { line, qemu, settings: settings(), ..Wanted::default() });
    vm.says("the watchdog is not fed any more");
    vm.until("a second boot", |said| said.matches("the watchdog is active").count() == 2);
}

/// Tests the log of a machine without a NIC, a disk or modules for them, and that their lack is not fatal.
#[test]
fn a_missing_module_is_logged_on_the_console() {
    let folder = Folder::new("missing");
    let files = vec![("etc/peerpod/modules", 0o644, b"# none of these\nno_such_module # really\n".to_vec())];
    let mut vm = Vm::boot(&folder, Wanted { files, ..Wanted::default() });
    vm.says("waiting for user-data");
    vm.says("the image has no kernel module for \"no_such_module\"");
    vm.says("PROBE pivot_root exit status: 0 END");
}
