//! One machine: a real sshd in mount and PID namespaces of its own, and a guest program played by the test.

use std::cell::Cell;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io};

use peerpod_world::eventually_blocking;
use serde_json::{Value, json};

use super::PATIENCE;

/// User of the servers: an unprivileged one that every system has.
pub const USER: &str = "nobody";
/// Time between a request for a reboot and the reboot: the guest program does not see files at once.
const REBOOT: Duration = Duration::from_millis(400);
/// Time for which a machine hangs whose answers are delayed.
const HANG: Duration = Duration::from_secs(5);
/// Start of an sshd. `$1` is the folder of its configuration, the others are those of its machines. The tmpfs ends with
/// the namespace, like that of a machine with its boot.
const SCRIPT: &str = r#"
set -e
config="$1/sshd_config"
shift
for machine; do
    mount -t tmpfs -o mode=0700,uid=nobody,size=256k tmpfs "$machine/media/cidata"
    : > "$machine/media/cidata/.mounted"
done
exec /usr/sbin/sshd -D -e -f "$config"
"#;

/// A machine of the pool.
pub struct Machine {
    /// Address of its sshd.
    pub address: SocketAddr,
    /// Number of claims that it got in earlier boots.
    claims: usize,
    /// Number of boots in which it was given to two pods.
    pub doubles: usize,
    /// Pods that got user-data: machine and boot, key, user-data.
    pub delivered: Vec<(String, String, String)>,
    /// Whether the guest program publishes the boot.
    pub publishes: bool,
    /// Whether the guest program reboots on request.
    pub reboots: bool,
    /// Number of processors and memory in MiB that the guest program publishes.
    pub size: (u32, u64),
    folder: PathBuf,
    netns: Option<PathBuf>,
    process: Option<Child>,
    /// Process in the mount namespace with its tmpfs; 0: none.
    root: u32,
    boots: u32,
    /// Boot in which the sshd accepted a connection of this test. Each one costs a process.
    listened: Cell<u32>,
    claim: Option<Value>,
    user_data: Option<String>,
    hangs_until: Option<Instant>,
    reboots_at: Option<Instant>,
}

impl Machine {
    /// Makes the folder of a machine below this one, which has the keys.
    pub fn prepare(keys: &Path, address: SocketAddr, netns: Option<&Path>) -> Machine {
        let folder = keys.join(address.ip().to_string());
        fs::create_dir_all(folder.join("media/cidata")).unwrap();
        Machine {
            address,
            claims: 0,
            doubles: 0,
            delivered: Vec::new(),
            publishes: true,
            reboots: true,
            size: (4, 4096),
            folder,
            netns: netns.map(Path::to_owned),
            process: None,
            root: 0,
            boots: 0,
            listened: Cell::new(0),
            claim: None,
            user_data: None,
            hangs_until: None,
            reboots_at: None,
        }
    }

    /// Writes the configuration of its sshd, with this host key.
    pub fn configure(&self, host_key: &Path) {
        configure(&self.folder, host_key, self.address, &self.chroot());
    }

    /// Returns the line of an sshd's configuration that confines the user.
    pub fn chroot(&self) -> String {
        format!("ChrootDirectory {}\n", self.folder.join("media").display())
    }

    /// Folder of the machine.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Boots the machine.
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "it runs");
        let process = boot(&self.folder, &[&self.folder], self.netns.as_deref());
        self.started(process.id());
        self.process = Some(process);
    }

    /// Notes that the machine boots, with its tmpfs in this process's namespace.
    pub fn started(&mut self, root: u32) {
        self.claims += usize::from(self.claim.is_some());
        (self.root, self.boots, self.claim, self.user_data) = (root, self.boots + 1, None, None);
    }

    /// Cuts the power: no connection is ended in order, and the tmpfs is gone.
    pub fn kill(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        let files = self.files();
        // Before, its processes have no namespaces that end with it.
        let mut boots = || files.has(".mounted") || process.try_wait().unwrap().is_some();
        eventually_blocking("a machine boots", PATIENCE, || boots().then_some(())).unwrap();
        let inside = processes_in(&process);
        process.kill().unwrap();
        process.wait().unwrap();
        // The port is free when the last process is gone.
        let is_left = |(pid, namespace): &(u32, PathBuf)| namespace_of(*pid).as_ref() == Some(namespace);
        let gone = || inside.iter().all(|one| !is_left(one)).then_some(());
        eventually_blocking("a machine is off", PATIENCE, gone).unwrap();
        (self.root, self.hangs_until, self.reboots_at) = (0, None, None);
    }

    /// Boots the machine again.
    pub fn reboot(&mut self) {
        self.kill();
        self.start();
    }

    /// Stops all processes of the machine, as if it hung.
    pub fn freeze(&mut self, time: Duration) {
        self.signal("STOP");
        self.hangs_until = Some(Instant::now() + time);
    }

    /// Continues them.
    pub fn thaw(&mut self) {
        if self.hangs_until.take().is_some() {
            self.signal("CONT");
        }
    }

    /// Number of claims that the machine got.
    pub fn claims(&self) -> usize {
        self.claims + usize::from(self.files().has("claim"))
    }

    /// Whether the machine hangs.
    pub fn hangs(&self) -> bool {
        self.hangs_until.is_some()
    }

    fn signal(&self, signal: &str) {
        let Some(process) = &self.process else { return };
        // A session may end meanwhile.
        let pids = processes_in(process).into_iter().map(|(pid, _)| pid.to_string());
        Command::new("kill").arg(format!("-{signal}")).args(pids).stderr(Stdio::null()).status().unwrap();
    }

    /// Whether its sshd listens and its boot is published.
    pub fn is_published(&self) -> bool {
        if !self.files().has("machine") {
            return false;
        }
        // Of another namespace the published boot is all that is seen.
        let is_seen = self.netns.is_some() || self.listened.get() == self.boots;
        if !is_seen && TcpStream::connect(self.address).is_ok() {
            self.listened.set(self.boots);
        }
        is_seen || self.listened.get() == self.boots
    }

    /// Files of the machine's present boot.
    pub fn files(&self) -> Files {
        let folder = self.folder.strip_prefix("/").unwrap().join("media/cidata");
        Files(Path::new(&format!("/proc/{}/root", self.root)).join(folder))
    }

    /// Id of the present boot.
    pub fn boot_id(&self) -> String {
        format!("{:08x}-{:04x}", u32::from_be_bytes(octets(self.address)), self.boots)
    }

    /// Id of the VM in the present boot.
    pub fn id(&self) -> String {
        format!("{}/{}", self.address, self.boot_id())
    }

    /// Does one step of the guest program.
    pub fn guest(&mut self, delays: &AtomicBool) {
        if self.hangs_until.is_some_and(|until| until <= Instant::now()) {
            self.thaw();
        }
        let files = self.files();
        if self.root == 0 || self.hangs() || !files.has(".mounted") {
            return;
        }
        if self.publishes && !files.has("machine") {
            let (vcpus, memory_mib) = self.size;
            let boot =
                json!({"version": 1, "boot_id": self.boot_id(), "vcpus": vcpus, "memory_mib": memory_mib});
            files.write("machine", boot.to_string().as_bytes());
        }
        self.witness(&files, delays);
        if self.reboots && files.has("reboot") {
            let at = *self.reboots_at.get_or_insert_with(|| Instant::now() + REBOOT);
            if at <= Instant::now() {
                self.reboot();
            }
        }
    }

    /// Records the claim and the user-data of this boot, and whether they changed.
    fn witness(&mut self, files: &Files, delays: &AtomicBool) {
        let Some(claim) = files.claim() else { return };
        match &self.claim {
            None => {
                if delays.swap(false, Ordering::Relaxed) {
                    self.freeze(HANG);
                }
            }
            Some(before) => self.doubles += usize::from(*before != claim),
        }
        let key = claim["marks"]["key"].as_str().unwrap_or_default().to_owned();
        self.claim = Some(claim);
        let Some(user_data) = files.text("user-data") else { return };
        match &self.user_data {
            None => self.delivered.push((self.id(), key, user_data.clone())),
            Some(before) => self.doubles += usize::from(*before != user_data),
        }
        self.user_data = Some(user_data);
    }
}

/// Writes the configuration of an sshd below the folder of the keys.
pub fn configure(folder: &Path, host_key: &Path, address: SocketAddr, chroots: &str) {
    let keys = host_key.parent().unwrap().join("authorized_keys");
    let config = format!(
        "ListenAddress {address}\nHostKey {}\nAuthorizedKeysFile {}\nSubsystem sftp internal-sftp\n\
         ForceCommand internal-sftp\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\n\
         UseDNS no\nPidFile none\nLogLevel ERROR\nMaxStartups 1000\n{chroots}",
        host_key.display(),
        keys.display(),
    );
    fs::write(folder.join("sshd_config"), config).unwrap();
}

/// Starts the sshd that is configured in `folder`, in namespaces of its own, for these machines.
pub fn boot(folder: &Path, machines: &[&Path], netns: Option<&Path>) -> Child {
    let log = fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
    let mut words: Vec<String> = ["setpriv", "--pdeathsig", "KILL", "--"].map(str::to_owned).into();
    if let Some(netns) = netns {
        words.extend(["nsenter".to_owned(), format!("--net={}", netns.display()), "--".to_owned()]);
    }
    let script = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", SCRIPT, "sh"];
    words.extend(script.map(str::to_owned));
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).arg(folder).args(machines);
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

/// Returns the processes in the PID namespace of a machine, which is not that of this test.
fn processes_in(machine: &Child) -> Vec<(u32, PathBuf)> {
    let ours = fs::read_link(format!("/proc/{}/ns/pid_for_children", machine.id())).ok();
    let Some(ours) = ours.filter(|ours| namespace_of(std::process::id()).as_ref() != Some(ours)) else {
        return Vec::new();
    };
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| namespace_of(*pid).as_ref() == Some(&ours)).map(|pid| (pid, ours.clone())).collect()
}

fn namespace_of(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

fn octets(address: SocketAddr) -> [u8; 4] {
    match address {
        SocketAddr::V4(address) => address.ip().octets(),
        SocketAddr::V6(_) => [0; 4],
    }
}

/// Files of a machine in one boot, seen from outside.
pub struct Files(pub PathBuf);

impl Files {
    /// Whether there is a file of this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.join(name).symlink_metadata().is_ok()
    }

    /// Content of a file.
    pub fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.0.join(name)).ok()
    }

    /// Claim of the machine.
    pub fn claim(&self) -> Option<Value> {
        Some(serde_json::from_str(&self.text("claim")?).unwrap_or_default())
    }

    /// Writes a file that every user may read, at once. A machine that is just killed has no files.
    pub fn write(&self, name: &str, content: &[u8]) {
        let aside = self.0.join(format!("{name}.new"));
        let written: io::Result<()> =
            fs::write(&aside, content).and_then(|()| fs::rename(&aside, self.0.join(name)));
        drop(written);
    }

    /// Removes a file.
    pub fn remove(&self, name: &str) {
        fs::remove_file(self.0.join(name)).unwrap();
    }

    /// Names of all files.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.retain(|name| name != ".mounted");
        names.sort();
        names
    }
}
