//! A pool of machines for one test, and providers in front of it.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

pub mod machine;
pub mod proxy;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, thread};

use parking_lot::{Mutex, MutexGuard};
use peerpod_provider_api::Owner;
use peerpod_provider_byom::{ByomConfig, ByomProvider};
pub use peerpod_tests::cloud::{PATIENCE, TestCloud, key, owner, placed, request, stranger};
use peerpod_world::eventually_blocking;

pub use machine::Machine;

/// Interval of the guests' looks at their files.
const LOOK: Duration = Duration::from_millis(20);
/// First port of the servers, below those that the kernel chooses. Each process adds its own number to it.
const PORT: u16 = 20_000;

/// Pool of one test. Its machines end with it.
pub struct Site {
    shared: Arc<Shared>,
    guests: Option<JoinHandle<()>>,
    /// The sshd of machines that cannot reboot.
    together: Option<Child>,
}

struct Shared {
    folder: PathBuf,
    machines: Vec<Mutex<Machine>>,
    ends: AtomicBool,
    /// Whether a machine with a new claim hangs for a while.
    delays: AtomicBool,
}

impl Site {
    /// Starts machines with addresses of the loopback device.
    pub fn start(count: u8) -> Site {
        Site::start_at(count, loopback(), None)
    }

    /// Starts many machines with one sshd for all, which costs less. They cannot reboot.
    pub fn start_together(count: u8) -> Site {
        let mut site = Site::prepare(count, loopback(), None);
        let folder = site.folder().to_owned();
        let (mut chroots, mut folders) = (String::new(), Vec::new());
        for machine in site.machines() {
            chroots += &format!("Match LocalAddress {}\n{}", machine.address.ip(), machine.chroot());
            folders.push(machine.folder().to_owned());
        }
        let all = SocketAddr::from((Ipv4Addr::UNSPECIFIED, site.machine(0).address.port()));
        machine::configure(&folder, &folder.join("host_key"), all, &chroots);
        let folders: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
        let sshd = machine::boot(&folder, &folders, None);
        site.machines().for_each(|mut machine| machine.started(sshd.id()));
        site.together = Some(sshd);
        site.run()
    }

    /// Starts machines with these addresses, in this network namespace.
    pub fn start_at(count: u8, address: impl Fn(u8) -> Ipv4Addr, netns: Option<&Path>) -> Site {
        let site = Site::prepare(count, address, netns);
        let host_key = site.folder().join("host_key");
        for mut machine in site.machines() {
            machine.configure(&host_key);
            machine.start();
        }
        site.run()
    }

    fn prepare(count: u8, address: impl Fn(u8) -> Ipv4Addr, netns: Option<&Path>) -> Site {
        // The folders above that of a confined user belong to root alone.
        static NUMBER: AtomicU8 = AtomicU8::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = PathBuf::from(format!("/run/peerpod-byom-{}-{number}", std::process::id()));
        fs::create_dir_all("/run/sshd").unwrap();
        fs::create_dir(&folder).unwrap();
        for (name, comment) in [("key", "node"), ("host_key", "machines"), ("other_key", "other")] {
            keygen(&folder.join(name), comment);
        }
        fs::copy(folder.join("key.pub"), folder.join("authorized_keys")).unwrap();
        // One server has the port at all addresses of the loopback device.
        let process = (std::process::id() % 10_000) as u16;
        let port = PORT + process + u16::from(address(0).octets()[2]);
        let machine = |number: u8| {
            let address = SocketAddr::from((address(number), port));
            Mutex::new(Machine::prepare(&folder, address, netns))
        };
        let machines: Vec<_> = (0..count).map(machine).collect();
        let shared = Shared { folder, machines, ends: false.into(), delays: false.into() };
        let shared = Arc::new(shared);
        shared.pin("host_key");
        Site { shared, guests: None, together: None }
    }

    /// Starts the guests, and waits until all machines are free.
    fn run(mut self) -> Site {
        let shared = self.shared.clone();
        self.guests = Some(thread::spawn(move || shared.run_guests()));
        self.until("all machines are free", || self.machines().all(|machine| machine.is_published()));
        self
    }

    /// Folder of the keys: `key`, `host_key`, `other_key`, `known_hosts`, `authorized_keys`.
    pub fn folder(&self) -> &Path {
        &self.shared.folder
    }

    /// Machine by number.
    pub fn machine(&self, number: usize) -> MutexGuard<'_, Machine> {
        self.shared.machines[number].lock()
    }

    fn machines(&self) -> impl Iterator<Item = MutexGuard<'_, Machine>> {
        self.shared.machines.iter().map(Mutex::lock)
    }

    /// Address of a machine, which is its name.
    pub fn address(&self, number: usize) -> String {
        self.machine(number).address.to_string()
    }

    /// Waits until a condition holds.
    pub fn until(&self, what: &str, condition: impl Fn() -> bool) {
        eventually_blocking(what, PATIENCE, || condition().then_some(())).unwrap();
    }

    /// Ids of all machines with a claim, from their files.
    pub fn claimed(&self) -> Vec<String> {
        self.machines()
            .filter(|machine| machine.files().claim().is_some())
            .map(|machine| machine.id())
            .collect()
    }

    /// Machines that were given to two pods in one boot.
    pub fn doubles(&self) -> usize {
        self.machines().map(|machine| machine.doubles).sum()
    }

    /// Pods that got their user-data, over all boots: machine and boot, key, user-data.
    pub fn delivered(&self) -> Vec<(String, String, String)> {
        self.machines().flat_map(|machine| machine.delivered.clone()).collect()
    }

    fn config(&self, settings: &[(&str, &str)], creates: bool) -> ByomConfig {
        self.read(settings, |reader| ByomConfig::read(reader, creates))
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<ByomProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<ByomProvider> {
        Arc::new(ByomProvider::new(self.config(settings, true), owner))
    }

    /// Provider as in the cluster's controller.
    pub fn collector(&self, settings: &[(&str, &str)]) -> Arc<ByomProvider> {
        Arc::new(ByomProvider::new(self.config(settings, false), owner("")))
    }
}

impl Shared {
    /// Writes the machines' host keys, all of them the key of this name.
    fn pin(&self, name: &str) {
        let key = fs::read_to_string(self.folder.join(format!("{name}.pub"))).unwrap();
        let line = |machine: &Mutex<Machine>| {
            let address = machine.lock().address;
            format!("[{}]:{} {key}", address.ip(), address.port())
        };
        let lines: String = self.machines.iter().map(line).collect();
        fs::write(self.folder.join("known_hosts"), lines).unwrap();
    }

    /// Plays the guest program of every machine.
    fn run_guests(&self) {
        while !self.ends.load(Ordering::Relaxed) {
            for machine in &self.machines {
                machine.lock().guest(&self.delays);
            }
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        let ended = self.guests.take().map(JoinHandle::join);
        self.machines().for_each(|mut machine| machine.kill());
        if let Some(sshd) = &mut self.together {
            sshd.kill().unwrap();
            sshd.wait().unwrap();
        }
        fs::remove_dir_all(&self.shared.folder).unwrap();
        if !thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

impl TestCloud for Site {
    const KIND: &'static str = "byom";

    fn settings(&self) -> Vec<(String, String)> {
        let machines: Vec<String> = self.machines().map(|machine| machine.address.to_string()).collect();
        let file = |name: &str| self.folder().join(name).display().to_string();
        [
            ("machines", machines.join(",")),
            ("username", machine::USER.to_owned()),
            ("private-key-file", file("key")),
            ("known-hosts-file", file("known_hosts")),
            // The tests share their processors with others.
            ("connect-timeout", "60s".to_owned()),
            ("call-timeout", "60s".to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
    }

    async fn ids(&self) -> Vec<String> {
        self.claimed()
    }

    fn creates(&self) -> usize {
        self.machines().map(|machine| machine.claims()).sum()
    }

    fn delay_answer(&self) {
        self.shared.delays.store(true, Ordering::Relaxed);
    }

    fn late(&self) -> usize {
        self.machines().filter(|machine| machine.hangs()).count()
    }

    fn heal(&self) {
        self.shared.delays.store(false, Ordering::Relaxed);
        self.machines().for_each(|mut machine| machine.thaw());
    }
}

/// Returns addresses that no other site of this process and hardly another process has.
fn loopback() -> impl Fn(u8) -> Ipv4Addr {
    static NUMBER: AtomicU8 = AtomicU8::new(0);
    let site = NUMBER.fetch_add(1, Ordering::Relaxed);
    let process = u8::try_from(std::process::id() % 250).unwrap() + 2;
    move |number| Ipv4Addr::new(127, process, site, number + 1)
}

/// Makes a key pair.
fn keygen(file: &Path, comment: &str) {
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", comment, "-f"])
        .arg(file)
        .status()
        .unwrap();
    assert!(made.success(), "ssh-keygen: {made}");
}
