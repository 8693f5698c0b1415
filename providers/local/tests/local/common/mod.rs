//! Local provider in a network namespace and a directory of its own.

#![allow(unreachable_pub, missing_docs)] // a module of tests
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ipnet::{Ipv4Net, Ipv6Net};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_provider_api::{Console, CreateRequest, IdempotencyKey, InstanceId, OwnedState, Provider};
use peerpod_provider_local::config::LocalNetwork;
use peerpod_provider_local::{LocalConfig, LocalProvider};

/// Guest of most tests: does nothing, for ever.
pub const IDLE: &str = "exec sleep infinity";

pub struct Place {
    pub dir: PathBuf,
}

impl Place {
    /// Moves the calling thread (and all that it starts) into a fresh network namespace, and creates a directory.
    pub fn new(guest: &str) -> Place {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        let dir = std::env::temp_dir().join(format!("peerpod-local-{}-{number}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let script = dir.join("guest");
        fs::write(&script, format!("#!/bin/sh\n{guest}\n")).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        Place { dir }
    }

    pub fn config(&self) -> LocalConfig {
        config(&self.dir)
    }

    /// Returns the processes that are pid 1 of a VM made here, according to the namespaces and mounts in `/proc`.
    pub fn machines(&self) -> Vec<u32> {
        let mark = format!("{}/guest ", self.dir.display());
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap() {
            let Some(pid) = entry.unwrap().file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
            let spaces = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
            let first = spaces.split_whitespace().count() > 1 && spaces.trim_end().ends_with("\t1");
            let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
            if first && mounts.contains(&mark) {
                found.push(pid);
            }
        }
        found
    }

    pub fn vm_dir(&self, id: &InstanceId) -> PathBuf {
        self.dir.join("state/vms").join(id.as_str())
    }

    /// Returns the pids that the hypervisor process recorded: its own and that of pid 1.
    pub fn pids(&self, id: &InstanceId) -> (u32, u32) {
        let text = fs::read_to_string(self.vm_dir(id).join("machine.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let pid = |which: &str| u32::try_from(json[which]["pid"].as_u64().unwrap()).unwrap();
        (pid("hypervisor"), pid("guest"))
    }

    /// Asserts that nothing of any VM is left: processes, network devices, mounts, directories.
    pub fn assert_clean(&self) {
        assert_eq!(self.machines(), Vec::<u32>::new(), "processes");
        let links = run("ip", &["-o", "link"]);
        assert_eq!(links.lines().count(), 1, "only lo: {links}");
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&self.dir.display().to_string()), "mounts: {mounts}");
        let left: Vec<_> = fs::read_dir(self.dir.join("state/vms")).unwrap().collect();
        assert!(left.is_empty(), "directories: {left:?}");
        let left: Vec<_> = fs::read_dir(self.dir.join("state/disks")).unwrap().collect();
        assert!(left.is_empty(), "disks: {left:?}");
        // The kernel detaches a loop device with its last close, and `losetup` of another test opens all of them.
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let loops = run("losetup", &["--list", "--noheadings", "--output", "BACK-FILE"]);
            if !loops.contains(&self.dir.display().to_string()) {
                return;
            }
            assert!(Instant::now() < deadline, "loop devices: {loops}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // After a failed test, VMs of this place may be left.
        for pid in self.machines() {
            let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
            let _gone = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
        // Their hypervisor processes still record the end.
        let deadline = Instant::now() + Duration::from_secs(2);
        while fs::remove_dir_all(&self.dir).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

pub fn config(dir: &Path) -> LocalConfig {
    LocalConfig {
        state_dir: dir.join("state"),
        helper_binary: env!("CARGO_BIN_EXE_peerpod-local-vm").into(),
        guest_binary: dir.join("guest"),
        agent_binary: "/bin/true".into(),
        network: network("pplocal0", 99, 0xfd99),
        second: network("pplocal1", 98, 0xfd98),
        mtu: 1500,
        ipv4: true,
        boot_delay: Duration::ZERO,
        max_batch: 8,
        volumes_dir: dir.join("volumes"),
    }
}

fn network(bridge: &str, v4: u8, v6: u16) -> LocalNetwork {
    LocalNetwork {
        bridge: bridge.into(),
        subnet4: Ipv4Net::new(Ipv4Addr::new(10, v4, 0, 0), 16).unwrap(),
        subnet6: Ipv6Net::new(Ipv6Addr::new(v6, 0, 0, 0, 0, 0, 0, 0), 64).unwrap(),
    }
}

pub fn request(name: &str) -> CreateRequest {
    CreateRequest { name: name.into(), user_data: "{\"peerpod\":1}".into(), ..CreateRequest::default() }
}

/// Returns a key of this test alone: VMs of tests that run at once share the host's cgroups, which have the VM's name.
pub fn key(number: u32) -> IdempotencyKey {
    let space = fs::read_link("/proc/thread-self/ns/net").unwrap();
    IdempotencyKey::derive("test", &space.display().to_string(), number)
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Runs a program in the namespace of the calling thread and returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}{error}");
    text
}

/// Asserts that the address is reachable: its kernel refuses a connection to a closed port.
pub fn reaches(address: IpAddr) {
    until(&format!("{address} answers"), || {
        let to = std::net::SocketAddr::new(address, 9);
        match std::net::TcpStream::connect_timeout(&to, Duration::from_secs(1)) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
        }
    });
}

pub fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn create(provider: &LocalProvider, number: u32) -> (InstanceId, Vec<IpAddr>) {
    let made = runtime().block_on(async {
        let made = provider.create(&request(&format!("Pod_{number}")), &key(number)).await.unwrap();
        assert_eq!(provider.addresses(&made.id).await.unwrap(), made.addresses);
        made
    });
    (made.id, made.addresses)
}

pub fn state(provider: &LocalProvider, id: &InstanceId) -> Option<OwnedState> {
    let owned = runtime().block_on(provider.list_owned()).unwrap();
    owned.into_iter().find(|one| one.id == *id).map(|one| one.state)
}

pub fn delete(provider: &LocalProvider, id: &InstanceId) {
    runtime().block_on(async {
        provider.delete(id).await.unwrap();
        while !provider.list_owned().await.unwrap().iter().all(|one| one.id != *id) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}

pub fn console(provider: &LocalProvider, id: &InstanceId) -> String {
    String::from_utf8(runtime().block_on(provider.tail(id, 64 * 1024)).unwrap()).unwrap()
}

pub fn sigkill(pid: u32) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
}
