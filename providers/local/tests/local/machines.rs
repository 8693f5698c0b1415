//! Tests the properties of a local VM. Real namespaces; needs root.

use super::common;
use std::fs;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::{IDLE, Place, console, create, delete, key, reaches, request, run, runtime, state, until};
use nix::mount::{MsFlags, mount};
use peerpod_provider_api::{CreateRequest, Error, OwnedState, Provider};
use peerpod_provider_local::LocalProvider;

/// Guest that inspects its environment and writes the result to its console.
const CURIOUS: &str = r#"
cd /
echo "pid=$$ hostname=$(cat /proc/sys/kernel/hostname)"
echo "links=$(echo $(ls /sys/class/net))"
echo "processes=$(echo $(ls -d /proc/[0-9]* | wc -l))"
for at in /usr/x /etc/ssl/x /media/cidata/x /sys/x /pause_bundle/x; do
  (: > $at) 2>/dev/null && echo "can write $at"
done
for at in /x /tmp/x /run/x /var/lib/x /dev/shm/x /etc/peerpod/x; do
  (: > $at) 2>/dev/null || echo "cannot write $at"
done
echo "user-data=$(stat -c '%a %u' /media/cidata/user-data) $(cat /media/cidata/user-data)"
echo "settings=$(cat /etc/peerpod/guest.json)"
echo "agent=$(test -x /opt/peerpod/kata-agent && echo executable)"
echo "pause=$(cat /pause_bundle/config.json)"
echo "components=$(grep -c 'guest_components_procs = "none"' /etc/agent-config.toml)"
echo "random=$(head -c 4 /dev/urandom | wc -c) null=$(echo x > /dev/null && echo ok)"
echo "tmp=$(stat -c %a /tmp) machine-id=$(wc -c < /etc/machine-id)"
echo "environment=$(echo $(env | grep -v -e ^PWD= -e ^_= -e ^SHLVL= -e ^OLDPWD= | cut -d= -f1 | sort))"
echo "sockets=$(ls -l /proc/$$/fd | grep -c socket)"
echo "mounts-of-the-node=$(grep -c -e /work -e /old_root /proc/mounts)"
echo "user=$(id -un)"
echo done.
exec sleep infinity
"#;

#[test]
fn a_vm_has_its_own_namespaces() {
    let place = Place::new(CURIOUS);
    // As with a real kata-agent, and its bundle beside it.
    let mut config = place.config();
    let folder = config.guest_binary.with_file_name("agent");
    fs::create_dir_all(folder.join("pause_bundle/rootfs")).unwrap();
    fs::write(folder.join("pause_bundle/config.json"), "{}").unwrap();
    config.agent_binary = folder.join("kata-agent");
    fs::copy("/bin/true", &config.agent_binary).unwrap();
    let provider = LocalProvider::open(config).unwrap();
    let (id, _) = create(&provider, 1);
    until("the guest has looked around", || console(&provider, &id).contains("done."));
    let seen = console(&provider, &id);
    for line in [
        "pid=1 hostname=pod-1",
        "links=eth0 lo",
        "user-data=400 0 {\"peerpod\":1}",
        "agent=executable",
        "pause={}",
        "components=1",
        "random=4 null=ok",
        "tmp=1777 machine-id=33",
        "environment=HOME PATH TERM",
        "sockets=0",
        "mounts-of-the-node=0",
        "user=root",
    ] {
        assert!(seen.lines().any(|one| one == line), "{line} in\n{seen}");
    }
    assert!(!seen.contains("write"), "{seen}");
    let settings = seen.lines().find_map(|line| line.strip_prefix("settings=")).unwrap();
    let settings: serde_json::Value = serde_json::from_str(settings).unwrap();
    assert_eq!(settings["version"], 1);
    assert_eq!(settings["agent"][0], "/opt/peerpod/kata-agent");
    assert_eq!(settings["agent_socket"], "/run/peerpod/agent.sock");
    delete(&provider, &id);
    place.assert_clean();
}

#[test]
fn node_and_vms_reach_each_other_in_both_families() {
    let place = Place::new(IDLE);
    let provider = LocalProvider::open(place.config()).unwrap();
    let node = runtime().block_on(provider.preflight()).unwrap().node_addresses;
    assert_eq!(node.len(), 2);
    let (first, first_addresses) = create(&provider, 1);
    let (second, second_addresses) = create(&provider, 2);
    for address in first_addresses.iter().chain(&second_addresses) {
        reaches(*address);
    }
    // From inside the first VM: the node and the other VM.
    let (_, pid) = place.pids(&first);
    let namespace = format!("/proc/{pid}/ns/net");
    let targets: Vec<IpAddr> = node.into_iter().chain(second_addresses).collect();
    let routes = run("nsenter", &[&format!("--net={namespace}"), "ip", "route"]);
    assert!(routes.contains("default via 10.99.0.1 dev eth0"), "{routes}");
    let routes = run("nsenter", &[&format!("--net={namespace}"), "ip", "-6", "route"]);
    assert!(routes.contains("default via fd99::1 dev eth0"), "{routes}");
    peerpod_podnet::netns::Netns::open(&namespace)
        .unwrap()
        .run(|| targets.iter().for_each(|target| reaches(*target)))
        .unwrap();
    delete(&provider, &first);
    delete(&provider, &second);
    place.assert_clean();
}

#[test]
fn an_unreadable_record_is_listed_and_can_be_deleted() {
    let place = Place::new(IDLE);
    let provider = LocalProvider::open(place.config()).unwrap();
    let (id, _) = create(&provider, 1);
    for text in ["{\"version\":1,\"key", "{\"version\":99}"] {
        fs::write(place.vm_dir(&id).join("record.json"), text).unwrap();
        assert_eq!(state(&provider, &id), Some(OwnedState::Ended), "{text}");
        let again = runtime().block_on(provider.create(&request("Pod_1"), &key(1)));
        assert!(matches!(again, Err(Error::Invalid { .. })), "{again:?}");
    }
    delete(&provider, &id);
    place.assert_clean();
}

#[test]
fn a_guest_that_cannot_be_started_is_an_error_that_names_it() {
    let place = Place::new(IDLE);
    let mut config = place.config();
    config.guest_binary = "/nowhere/peerpod-guest".into();
    let provider = LocalProvider::open(config).unwrap();
    let runtime = runtime();
    for answer in [
        runtime.block_on(provider.preflight()).map(drop),
        runtime.block_on(provider.create(&request("a"), &key(1))).map(drop),
    ] {
        match answer {
            Err(Error::Invalid { text }) => {
                assert!(text.contains("/nowhere/peerpod-guest: "), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }
    place.assert_clean();
}

#[test]
fn a_foreign_bridge_stays_unchanged() {
    let place = Place::new(IDLE);
    run("ip", &["link", "add", "pplocal0", "type", "bridge"]);
    let provider = LocalProvider::open(place.config()).unwrap();
    match runtime().block_on(provider.create(&request("a"), &key(1))) {
        Err(Error::Invalid { text }) => assert!(text.contains("is not ours"), "{text}"),
        other => panic!("{other:?}"),
    }
    let owned = runtime().block_on(provider.list_owned()).unwrap();
    assert_eq!(owned[0].state, OwnedState::Pending);
    delete(&provider, &owned[0].id);
    run("ip", &["link", "del", "pplocal0"]);
    place.assert_clean();
}

#[test]
fn one_directory_has_one_provider() {
    let place = Place::new(IDLE);
    let first = LocalProvider::open(place.config()).unwrap();
    match LocalProvider::open_within(place.config(), Duration::from_millis(200)) {
        Err(Error::Invalid { text }) => assert!(text.contains("another process uses it"), "{text}"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("two providers in one directory"),
    }
    drop(first);
    drop(LocalProvider::open(place.config()).unwrap());
}

#[test]
fn a_vm_has_a_second_nic_when_it_is_asked_for() {
    let place = Place::new(IDLE);
    let provider = LocalProvider::open(place.config()).unwrap();
    let (plain, _) = create(&provider, 1);
    let wanted = CreateRequest { second_nic: true, ..request("two") };
    let (made, addresses) = runtime().block_on(async {
        let made = provider.create(&wanted, &key(2)).await.unwrap();
        assert_eq!(provider.create(&wanted, &key(2)).await.unwrap(), made);
        let addresses = provider.addresses(&made.id).await.unwrap();
        (made.id, addresses)
    });
    let words: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    assert!(words.len() == 2 && words[0].starts_with("10.99.") && words[1].starts_with("fd99:"), "{words:?}");
    let inside = |id| {
        let namespace = format!("/proc/{}/ns/net", place.pids(id).1);
        let ip = |what| run("nsenter", &[&format!("--net={namespace}"), "ip", "-o", what, "show"]);
        (ip("link"), ip("route"), peerpod_podnet::netns::Netns::open(&namespace).unwrap())
    };
    assert!(!inside(&plain).0.contains("eth1"), "no pod asked for one");
    let (_, routes, netns) = inside(&made);
    assert!(routes.contains("default via 10.99.0.1 dev eth0"), "{routes}");
    assert!(routes.contains("default via 10.98.0.1 dev eth1 proto dhcp metric 4000"), "{routes}");
    let targets = ["10.99.0.1", "fd99::1", "10.98.0.1", "fd98::1"].map(|text| text.parse().unwrap());
    netns.run(|| targets.into_iter().for_each(reaches)).unwrap();
    delete(&provider, &made);
    delete(&provider, &plain);
    place.assert_clean();
}

#[test]
fn a_cloud_may_have_jumbo_frames_and_no_ipv4() {
    let place = Place::new(IDLE);
    let mut config = place.config();
    (config.mtu, config.ipv4) = (9001, false);
    let provider = LocalProvider::open(config).unwrap();
    let node = runtime().block_on(provider.preflight()).unwrap().node_addresses;
    assert_eq!(node, ["fd99::1".parse::<IpAddr>().unwrap()]);
    let (id, addresses) = create(&provider, 1);
    assert!(addresses.len() == 1 && addresses[0].is_ipv6(), "{addresses:?}");
    reaches(addresses[0]);
    let namespace = format!("--net=/proc/{}/ns/net", place.pids(&id).1);
    let links = run("nsenter", &[&namespace, "ip", "-o", "link"]) + &run("ip", &["-o", "link"]);
    let wide = links.lines().filter(|line| line.contains(" mtu 9001 ")).count();
    assert_eq!(wide, 3, "the bridge and both ends: {links}");
    assert_eq!(run("nsenter", &[&namespace, "ip", "-4", "route"]), "");
    delete(&provider, &id);
    place.assert_clean();
}

#[test]
fn addresses_run_out_with_a_typed_error_and_come_back() {
    let place = Place::new(IDLE);
    let mut config = place.config();
    config.network.subnet4 = "10.77.0.0/29".parse().unwrap();
    let provider = LocalProvider::open(config).unwrap();
    let start = Instant::now();
    let ids: Vec<_> = (0..5).map(|number| create(&provider, number).0).collect();
    println!("5 creates, one after the other: {:?}", start.elapsed());
    let full = runtime().block_on(provider.create(&request("one too many"), &key(9)));
    assert!(matches!(full, Err(Error::Capacity { .. })), "{full:?}");
    delete(&provider, &ids[0]);
    let (id, _) = create(&provider, 9);
    for id in ids[1..].iter().chain([&id]) {
        delete(&provider, id);
    }
    place.assert_clean();
}

#[test]
fn a_slow_boot_does_not_delay_the_answer() {
    let place = Place::new("echo booted; exec sleep infinity");
    let mut config = place.config();
    config.boot_delay = Duration::from_secs(6);
    let provider = LocalProvider::open(config).unwrap();
    let start = Instant::now();
    let (id, _) = create(&provider, 1);
    // Checked by the order of events, independent of the time that the create took.
    assert_eq!(console(&provider, &id), "");
    until("it has booted", || console(&provider, &id) == "booted\n");
    assert!(start.elapsed() >= Duration::from_secs(6), "{:?}", start.elapsed());
    delete(&provider, &id);
    place.assert_clean();
}

#[test]
fn a_full_or_read_only_state_directory_fails_the_create_before_any_effect() {
    let place = Place::new(IDLE);
    let state = place.dir.join("state");
    fs::create_dir(&state).unwrap();
    // Mounts of this thread and of its children only.
    let none: Option<&str> = None;
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    mount(Some("tmpfs"), &state, Some("tmpfs"), MsFlags::empty(), Some("size=64k")).unwrap();
    let provider = LocalProvider::open(place.config()).unwrap();
    let fails = |what: &str| {
        match runtime().block_on(provider.create(&request("a"), &key(1))) {
            Err(Error::Invalid { text }) => assert!(text.contains(what), "{text}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(runtime().block_on(provider.list_owned()).unwrap(), vec![]);
        assert_eq!(run("ip", &["-o", "link"]).lines().count(), 1);
        assert_eq!(place.machines(), Vec::<u32>::new());
    };
    let filler = state.join("filler");
    fs::write(&filler, vec![0; 128 * 1024]).unwrap_err();
    fails("make room");
    fs::remove_file(&filler).unwrap();
    let vms = state.join("vms");
    mount(Some("tmpfs"), &vms, Some("tmpfs"), MsFlags::MS_RDONLY, none).unwrap();
    fails("make paths.state-dir writable");
    nix::mount::umount2(&vms, nix::mount::MntFlags::MNT_DETACH).unwrap();
    let (id, _) = create(&provider, 1);
    delete(&provider, &id);
    assert_eq!(place.machines(), Vec::<u32>::new());
    drop(provider);
    nix::mount::umount2(&state, nix::mount::MntFlags::MNT_DETACH).unwrap();
}
