//! What a local VM is, and how it lives through the death of others. Real namespaces; needs root.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::net::IpAddr;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{IDLE, Place, key, reaches, request, run, runtime, until};
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_provider_api::{Console, Error, InstanceId, OwnedState, Provider};
use peerpod_provider_local::LocalProvider;

/// A guest that looks around, and says what it sees on its console.
const CURIOUS: &str = r#"
cd /
echo "pid=$$ hostname=$(cat /proc/sys/kernel/hostname)"
echo "links=$(echo $(ls /sys/class/net))"
echo "processes=$(echo $(ls -d /proc/[0-9]* | wc -l))"
for at in /usr/x /etc/ssl/x /media/cidata/x /sys/x; do
  (: > $at) 2>/dev/null && echo "can write $at"
done
for at in /x /tmp/x /run/x /var/lib/x /dev/shm/x /etc/peerpod/x; do
  (: > $at) 2>/dev/null || echo "cannot write $at"
done
echo "user-data=$(stat -c '%a %u' /media/cidata/user-data) $(cat /media/cidata/user-data)"
echo "settings=$(cat /etc/peerpod/guest.json)"
echo "agent=$(test -x /opt/peerpod/kata-agent && echo executable)"
echo "random=$(head -c 4 /dev/urandom | wc -c) null=$(echo x > /dev/null && echo ok)"
echo "tmp=$(stat -c %a /tmp) machine-id=$(wc -c < /etc/machine-id)"
echo "environment=$(echo $(env | grep -v -e ^PWD= -e ^_= -e ^SHLVL= -e ^OLDPWD= | cut -d= -f1 | sort))"
echo "sockets=$(ls -l /proc/$$/fd | grep -c socket)"
echo "mounts-of-the-node=$(grep -c -e /work -e /old_root /proc/mounts)"
echo "user=$(id -un)"
echo done.
exec sleep infinity
"#;

fn create(provider: &LocalProvider, number: u32) -> (InstanceId, Vec<IpAddr>) {
    let made = runtime().block_on(async {
        let made = provider.create(&request(&format!("Pod_{number}")), &key(number)).await.unwrap();
        assert_eq!(provider.addresses(&made.id).await.unwrap(), made.addresses);
        made
    });
    (made.id, made.addresses)
}

fn state(provider: &LocalProvider, id: &InstanceId) -> Option<OwnedState> {
    let owned = runtime().block_on(provider.list_owned()).unwrap();
    owned.into_iter().find(|one| one.id == *id).map(|one| one.state)
}

fn delete(provider: &LocalProvider, id: &InstanceId) {
    runtime().block_on(async {
        provider.delete(id).await.unwrap();
        while !provider.list_owned().await.unwrap().iter().all(|one| one.id != *id) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}

fn console(provider: &LocalProvider, id: &InstanceId) -> String {
    String::from_utf8(runtime().block_on(provider.tail(id, 64 * 1024)).unwrap()).unwrap()
}

fn sigkill(pid: u32) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
}

#[test]
fn a_vm_is_a_world_of_its_own() {
    let place = Place::new(CURIOUS);
    let provider = LocalProvider::open(place.config()).unwrap();
    let (id, _) = create(&provider, 1);
    until("the guest has looked around", || console(&provider, &id).contains("done."));
    let seen = console(&provider, &id);
    for line in [
        "pid=1 hostname=pod-1",
        "links=eth0 lo",
        "user-data=400 0 {\"peerpod\":1}",
        "agent=executable",
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
    // And from inside the first VM: the node and the other VM.
    let (_, pid) = place.pids(&first);
    let namespace = format!("/proc/{pid}/ns/net");
    let targets: Vec<IpAddr> = node.into_iter().chain(second_addresses).collect();
    let routes = run("nsenter", &[&format!("--net={namespace}"), "ip", "route"]);
    assert!(routes.contains("default via 10.99.0.1 dev eth0"), "{routes}");
    let routes = run("nsenter", &[&format!("--net={namespace}"), "ip", "-6", "route"]);
    assert!(routes.contains("default via fd99::1 dev eth0"), "{routes}");
    peerpod_link::net::netns::Netns::open(&namespace)
        .unwrap()
        .run(|| targets.iter().for_each(|target| reaches(*target)))
        .unwrap();
    delete(&provider, &first);
    delete(&provider, &second);
    place.assert_clean();
}

#[test]
fn a_restarted_provider_finds_its_vms() {
    let place = Place::new(IDLE);
    let mut vms = Vec::new();
    {
        let provider = LocalProvider::open(place.config()).unwrap();
        for number in 0..3 {
            vms.push(create(&provider, number));
        }
    }
    let before = place.machines();
    assert_eq!(before.len(), 3);
    let provider = LocalProvider::open(place.config()).unwrap();
    runtime().block_on(provider.preflight()).unwrap();
    for (number, (id, addresses)) in (0..).zip(&vms) {
        assert_eq!(state(&provider, id), Some(OwnedState::Running));
        assert_eq!(create(&provider, number), (id.clone(), addresses.clone()));
        reaches(addresses[0]);
    }
    assert_eq!(place.machines(), before, "the same processes");
    // A new one gets an address that no old one has.
    let (id, addresses) = create(&provider, 99);
    assert!(vms.iter().all(|(_, others)| others[0] != addresses[0]));
    delete(&provider, &id);
    for (id, _) in &vms {
        delete(&provider, id);
    }
    place.assert_clean();
}

/// Not a test of its own: the node that the next test kills.
#[test]
#[ignore = "a process that another test starts"]
fn the_node_that_dies() {
    let Some(dir) = std::env::var_os("PEERPOD_TEST_PLACE") else { return };
    let provider = LocalProvider::open(common::config(dir.as_ref())).unwrap();
    let (id, _) = create(&provider, 1);
    println!("made {id}");
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_vm_survives_the_death_of_its_node() {
    let place = Place::new(IDLE);
    let mut node = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_node_that_dies", "--ignored", "--nocapture"])
        .env("PEERPOD_TEST_PLACE", &place.dir)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("the node has made its VM", || place.machines().len() == 1);
    let before = place.machines();
    node.kill().unwrap();
    assert_eq!(node.wait().unwrap().signal(), Some(9));
    let provider = LocalProvider::open(place.config()).unwrap();
    let (id, addresses) = create(&provider, 1);
    assert_eq!(place.machines(), before);
    reaches(addresses[0]);
    delete(&provider, &id);
    place.assert_clean();
}

#[test]
fn a_vm_that_ends_by_itself_says_how_until_it_is_deleted() {
    let place = Place::new("echo last words; exit 7");
    let provider = LocalProvider::open(place.config()).unwrap();
    let made = runtime().block_on(provider.create(&request("short"), &key(1))).unwrap();
    until("the VM has ended", || state(&provider, &made.id) == Some(OwnedState::Ended));
    until("its end is written down", || place.vm_dir(&made.id).join("exit.json").exists());
    match runtime().block_on(provider.addresses(&made.id)) {
        Err(Error::NotFound { text }) => assert!(text.contains("exit status: 7"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(console(&provider, &made.id), "last words\n");
    // The same key still means the same VM.
    assert_eq!(runtime().block_on(provider.create(&request("short"), &key(1))).unwrap().id, made.id);
    assert_eq!(place.machines(), Vec::<u32>::new());
    delete(&provider, &made.id);
    place.assert_clean();
}

#[test]
fn a_vm_ends_with_its_hypervisor_process_and_with_its_pid_1() {
    // With a second process inside, which must not stay behind.
    let place = Place::new("sleep infinity & exec sleep infinity");
    let provider = LocalProvider::open(place.config()).unwrap();
    for (number, whom) in [(1, "hypervisor"), (2, "pid 1")] {
        let (id, _) = create(&provider, number);
        let (hypervisor, guest) = place.pids(&id);
        let inside = fs::read_link(format!("/proc/{guest}/ns/pid")).unwrap();
        let others = || {
            let all = fs::read_dir("/proc").unwrap();
            all.filter(|entry| {
                let path = entry.as_ref().unwrap().path().join("ns/pid");
                fs::read_link(path).is_ok_and(|link| link == inside)
            })
            .count()
        };
        until("both processes run", || others() == 2);
        sigkill(if whom == "hypervisor" { hypervisor } else { guest });
        until(&format!("all is gone after {whom}"), || others() == 0);
        until("it is seen", || state(&provider, &id) == Some(OwnedState::Ended));
        delete(&provider, &id);
    }
    place.assert_clean();
}

#[test]
fn a_create_whose_hypervisor_process_is_killed_at_any_time_is_repeated_and_makes_one_vm() {
    let place = Place::new(IDLE);
    let provider = LocalProvider::open(place.config()).unwrap();
    let runtime = runtime();
    for number in 0..30 {
        let (request, key) = (request("often"), key(number));
        let dirs = place.dir.join("state/vms");
        let stop = std::sync::atomic::AtomicBool::new(false);
        let made = std::thread::scope(|scope| {
            // Kills the first hypervisor process it sees, a little later each time.
            scope.spawn(|| {
                let start = Instant::now();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) && start.elapsed().as_secs() < 5 {
                    let Some(Ok(dir)) = fs::read_dir(&dirs).unwrap().next() else { continue };
                    let Ok(text) = fs::read_to_string(dir.path().join("machine.json")) else { continue };
                    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
                    std::thread::sleep(Duration::from_micros(u64::from(number) * 300));
                    let pid = i32::try_from(json["hypervisor"]["pid"].as_u64().unwrap()).unwrap();
                    // It may be gone by itself already, where it failed.
                    let _gone = kill(Pid::from_raw(pid), Signal::SIGKILL);
                    return;
                }
            });
            let made = runtime.block_on(async {
                loop {
                    match provider.create(&request, &key).await {
                        Ok(made) => return made,
                        Err(Error::Transient { .. }) => {}
                        Err(other) => panic!("{other:?}"),
                    }
                }
            });
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            made
        });
        // Killed after the answer is a VM that has ended; before it, there is one that runs.
        until("there is one or none", || match state(&provider, &made.id) {
            Some(OwnedState::Running) => place.machines().len() == 1,
            Some(OwnedState::Ended) => place.machines().is_empty(),
            _ => false,
        });
        delete(&provider, &made.id);
        place.assert_clean();
    }
}

#[test]
fn an_interrupted_deletion_is_finished_by_preflight() {
    let place = Place::new(IDLE);
    let provider = LocalProvider::open(place.config()).unwrap();
    let (running, _) = create(&provider, 1);
    let (half_gone, _) = create(&provider, 2);
    let (no_record, _) = create(&provider, 3);
    let runtime = runtime();
    // A node that dies right after each step: its task is dropped with its runtime, its files are as they were.
    drop(provider);
    for id in [&running, &half_gone] {
        let path = place.vm_dir(id).join("record.json");
        let record = fs::read_to_string(&path).unwrap().replace("\"deleting\":false", "\"deleting\":true");
        fs::write(&path, record).unwrap();
    }
    sigkill(place.pids(&half_gone).1);
    until("its hypervisor process has left", || {
        fs::metadata(format!("/proc/{}", place.pids(&half_gone).0)).is_err()
            || fs::read_to_string(format!("/proc/{}/stat", place.pids(&half_gone).0))
                .unwrap()
                .contains(") Z ")
    });
    fs::remove_file(place.vm_dir(&half_gone).join("lock")).unwrap();
    fs::remove_file(place.vm_dir(&half_gone).join("machine.json")).unwrap();
    fs::remove_file(place.vm_dir(&no_record).join("record.json")).unwrap();

    let provider = LocalProvider::open(place.config()).unwrap();
    runtime.block_on(async {
        provider.preflight().await.unwrap();
        loop {
            let owned = provider.list_owned().await.unwrap();
            match &owned[..] {
                // What has no record is nobody's to delete by itself, but it is listed, and can be deleted.
                [one] if one.id == no_record => break,
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
        provider.delete(&no_record).await.unwrap();
    });
    until("nothing is listed", || runtime.block_on(provider.list_owned()).unwrap().is_empty());
    place.assert_clean();
}

#[test]
fn what_cannot_be_read_is_listed_and_can_be_deleted() {
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
fn machines_of_another_boot_are_gone() {
    let place = Place::new(IDLE);
    let provider = LocalProvider::open(place.config()).unwrap();
    let (id, _) = create(&provider, 1);
    let (hypervisor, _) = place.pids(&id);
    sigkill(hypervisor);
    until("the VM has ended", || state(&provider, &id) == Some(OwnedState::Ended));
    // As if this process had the number and even the start time of the old pid 1, after a reboot.
    let path = place.vm_dir(&id).join("machine.json");
    let us = std::process::id();
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let started: u64 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    json["guest"] = serde_json::json!({"pid": us, "started": started});
    json["boot"] = "another".into();
    fs::write(&path, json.to_string()).unwrap();
    assert_eq!(state(&provider, &id), Some(OwnedState::Ended));
    delete(&provider, &id); // and we are still alive
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
                assert!(text.contains("provider.local.guest-binary = /nowhere/peerpod-guest"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }
    place.assert_clean();
}

#[test]
fn a_bridge_of_somebody_else_is_left_alone() {
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
    match LocalProvider::open(place.config()) {
        Err(Error::Invalid { text }) => assert!(text.contains("another process uses it"), "{text}"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("two providers in one directory"),
    }
    drop(first);
    drop(LocalProvider::open(place.config()).unwrap());
}

#[test]
fn addresses_run_out_with_a_typed_error_and_come_back() {
    let place = Place::new(IDLE);
    let mut config = place.config();
    config.subnet4 = peerpod_provider_local::config::Subnet::parse("10.77.0.0/29").unwrap();
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
    config.boot_delay = Duration::from_secs(2);
    let provider = LocalProvider::open(config).unwrap();
    let start = Instant::now();
    let (id, _) = create(&provider, 1);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(console(&provider, &id), "");
    until("it has booted", || console(&provider, &id) == "booted\n");
    assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
    delete(&provider, &id);
    place.assert_clean();
}

#[test]
fn a_full_or_read_only_state_directory_fails_the_create_before_any_effect() {
    let place = Place::new(IDLE);
    let state = place.dir.join("state");
    fs::create_dir(&state).unwrap();
    // Mounts of this thread and of what it starts only.
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
