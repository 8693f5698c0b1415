//! Tests local VMs across the death of their node, of their hypervisor process and of themselves, and across an
//! interrupted deletion. Real namespaces; needs root.

use super::common;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{IDLE, Place, console, create, delete, key, reaches, request, runtime, sigkill, state, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_provider_api::{Error, OwnedState, Provider};
use peerpod_provider_local::LocalProvider;

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
    // A new VM gets an address that no old one has.
    let (id, addresses) = create(&provider, 99);
    assert!(vms.iter().all(|(_, others)| others[0] != addresses[0]));
    delete(&provider, &id);
    for (id, _) in &vms {
        delete(&provider, id);
    }
    place.assert_clean();
}

#[test]
#[ignore = "a process that another test starts"]
fn the_node_that_is_killed() {
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
        .args(["--exact", "deaths::the_node_that_is_killed", "--ignored", "--nocapture"])
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
#[ignore = "a process that another test starts"]
fn the_node_that_works() {
    let Some(dir) = std::env::var_os("PEERPOD_TEST_PLACE") else { return };
    let provider = LocalProvider::open(common::config(dir.as_ref())).unwrap();
    runtime().block_on(async {
        provider.preflight().await.unwrap();
        for round in 0.. {
            let creates = (0..3).map(|number| {
                let (provider, key) = (&provider, key(round * 3 + number));
                async move {
                    let made = provider.create(&request("work"), &key).await.unwrap();
                    provider.delete(&made.id).await.unwrap();
                }
            });
            let [a, b, c]: [_; 3] = creates.collect::<Vec<_>>().try_into().unwrap_or_else(|_| unreachable!());
            tokio::join!(a, b, c);
        }
    });
}

#[test]
fn a_node_killed_at_any_time_leaves_nothing_that_its_successor_does_not_find() {
    let place = Place::new(IDLE);
    for round in 0..25u64 {
        let mut node = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "deaths::the_node_that_works", "--ignored", "--nocapture"])
            .env("PEERPOD_TEST_PLACE", &place.dir)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        until("the node works", || {
            fs::read_dir(place.dir.join("state/vms")).is_ok_and(|mut vms| vms.next().is_some())
        });
        std::thread::sleep(Duration::from_micros(round * 7_300 % 100_000));
        node.kill().unwrap();
        assert_eq!(node.wait().unwrap().signal(), Some(9), "it was killed, it did not fail");
        // A helper that the node had just started may not have an effect yet, so the list is read until it is empty.
        let provider = LocalProvider::open(place.config()).unwrap();
        runtime().block_on(async {
            provider.preflight().await.unwrap();
            loop {
                let owned = provider.list_owned().await.unwrap();
                if owned.is_empty() {
                    break;
                }
                for one in owned {
                    provider.delete(&one.id).await.unwrap();
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // The bridge goes after the last directory, in the background.
            provider.preflight().await.unwrap();
        });
        until("its processes are gone", || place.machines().is_empty());
        place.assert_clean();
    }
}

#[test]
fn an_ended_vm_reports_its_exit_until_deletion() {
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
    // The same key still identifies the same VM.
    assert_eq!(runtime().block_on(provider.create(&request("short"), &key(1))).unwrap().id, made.id);
    assert_eq!(place.machines(), Vec::<u32>::new());
    delete(&provider, &made.id);
    place.assert_clean();
}

#[test]
fn a_vm_ends_with_its_hypervisor_process_and_with_its_pid_1() {
    // With a second process inside, which must not survive.
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
            // Kills the first hypervisor process it finds, a little later each time.
            scope.spawn(|| {
                let start = Instant::now();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) && start.elapsed().as_secs() < 5 {
                    let Some(Ok(dir)) = fs::read_dir(&dirs).unwrap().next() else { continue };
                    let Ok(text) = fs::read_to_string(dir.path().join("machine.json")) else { continue };
                    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
                    std::thread::sleep(Duration::from_micros(u64::from(number) * 300));
                    let pid = i32::try_from(json["hypervisor"]["pid"].as_u64().unwrap()).unwrap();
                    // The process may be gone by itself already, if it failed.
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
        // A kill after the answer leaves a VM that has ended. After an earlier kill, the repeated create leaves one
        // that runs.
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
    // As after a node that dies right after each step: its task is dropped with its runtime, and its files stay as they
    // were.
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
                // A VM without a record is not deleted automatically, but it is listed and can be deleted.
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
fn machines_of_another_boot_are_gone() {
    let place = Place::new(IDLE);
    let provider = LocalProvider::open(place.config()).unwrap();
    let (id, _) = create(&provider, 1);
    let (hypervisor, _) = place.pids(&id);
    sigkill(hypervisor);
    until("the VM has ended", || state(&provider, &id) == Some(OwnedState::Ended));
    // As after a reboot in which this process has the pid and even the start time of the old pid 1.
    let path = place.vm_dir(&id).join("machine.json");
    let us = std::process::id();
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let started: u64 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    json["guest"] = serde_json::json!({"pid": us, "started": started});
    json["boot"] = "another".into();
    fs::write(&path, json.to_string()).unwrap();
    assert_eq!(state(&provider, &id), Some(OwnedState::Ended));
    delete(&provider, &id); // and this process is still alive
    place.assert_clean();
}
