//! The CSI wrapper before a real CSI driver. This library starts the programs, runs csi-sanity, and speaks gRPC without
//! knowing any message: what the tests assert of the wire they see on it.

pub mod calls;
pub mod grpc;
pub mod process;
pub mod sanity;

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use peerpod_world::{Container, share};

use crate::process::Process;

/// How long anything may take on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Whether the long versions were asked for (`make test-long`).
pub fn long() -> bool {
    std::env::var_os("PEERPOD_TEST_LONG").is_some()
}

/// Adds a figure to the summary that `PEERPOD_BENCH` or `PEERPOD_TEST_BENCH` names, where one does, and prints it.
pub fn report(key: &str, value: f64) {
    println!("{key} = {value:.3}");
    let named = ["PEERPOD_BENCH", "PEERPOD_TEST_BENCH"].iter().find_map(std::env::var_os);
    let Some(path) = named else { return };
    let before = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut all: std::collections::BTreeMap<String, f64> = before.unwrap_or_default();
    all.insert(key.to_owned(), value);
    // A figure that cannot be kept was printed.
    serde_json::to_vec_pretty(&all).ok().and_then(|bytes| std::fs::write(&path, bytes).ok());
}

/// Waits until this is so.
///
/// # Errors
/// It is not within [`PATIENCE`].
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) -> Result<()> {
    let began = Instant::now();
    while !so() {
        if began.elapsed() > PATIENCE {
            bail!("{what}: not within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The folder of the sockets in a test's folder.
const SOCKETS: &str = "csi";

/// A folder of one test, gone with it; nothing stays mounted in it, nor a loop device of its files.
pub struct Folder {
    root: PathBuf,
    /// Folders of the machine that the node role's container has, too.
    extra: Vec<PathBuf>,
}

impl Folder {
    /// A new one.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(name: &str) -> Result<Folder> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        // Short: sockets are in it.
        let path = std::env::temp_dir().join(format!("pp-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir(&path)?;
        std::fs::create_dir(path.join(SOCKETS))?;
        Ok(Folder { root: path, extra: Vec::new() })
    }

    /// Something in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The socket of a program.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.root.join(SOCKETS).join(name).with_extension("sock")
    }

    /// Adds a folder to those that the node role's container has.
    pub fn add_volume(&mut self, path: &Path) {
        self.extra.push(path.to_owned());
    }

    /// Itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The mounts in it and in the kubelet's folder, which is a mount itself and not among them.
    ///
    /// # Errors
    /// The kernel's list cannot be read.
    pub fn mounts(&self) -> Result<Vec<PathBuf>> {
        let kubelet = self.path("kubelet");
        let kubelet = kubelet.canonicalize().unwrap_or(kubelet);
        let inside = |point: &PathBuf| point.starts_with(&self.root) || point.starts_with(&kubelet);
        Ok(mounts()?.into_iter().filter(|point| inside(point) && *point != kubelet).collect())
    }

    /// A folder in it, which a test of several programs has elsewhere.
    fn real(&self, name: &str) -> Result<PathBuf> {
        std::fs::create_dir_all(self.path(name))?;
        Ok(self.path(name).canonicalize()?)
    }

    /// The node role's container in the chart's component for CSI drivers, with its volumes in this folder.
    fn container(&self) -> Result<Container> {
        let mut volumes = vec![("socket-dir", self.root.join(SOCKETS)), ("peerpod-dev", "/dev".into())];
        for (volume, name) in
            [("peerpod-kubelet", "kubelet"), ("peerpod-state", "state"), ("peerpod-run", "run")]
        {
            volumes.push((volume, self.real(name)?));
        }
        share(&volumes[2].1)?;
        Ok(Container { name: "peerpod-csi", volumes, extra: self.extra.clone() })
    }

    /// The loop devices of files in it.
    ///
    /// # Errors
    /// losetup cannot list them.
    pub fn loops(&self) -> Result<Vec<PathBuf>> {
        let words = ["--list", "--noheadings", "--raw", "--output", "NAME,BACK-FILE"];
        let listed = Command::new("losetup").args(words).output()?;
        ensure!(listed.status.success(), "losetup: {}", String::from_utf8_lossy(&listed.stderr));
        let listed = String::from_utf8_lossy(&listed.stdout);
        let pairs = listed.lines().filter_map(|line| line.split_once(' '));
        let ours = pairs.filter(|(_, file)| Path::new(file.trim()).starts_with(&self.root));
        Ok(ours.map(|(device, _)| PathBuf::from(device)).collect())
    }
}

/// All mounts of this process's mount namespace, oldest first.
fn mounts() -> Result<Vec<PathBuf>> {
    let list = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(list.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from).collect())
}

impl Drop for Folder {
    fn drop(&mut self) {
        let inside = |point: &PathBuf| point.starts_with(&self.root);
        for point in mounts().unwrap_or_default().into_iter().filter(inside).rev() {
            // What stays mounted stays visible, too: the folder cannot be removed then.
            nix::mount::umount(&point).ok();
        }
        for device in self.loops().unwrap_or_default() {
            Command::new("losetup").arg("--detach").arg(device).status().ok();
        }
        if !std::thread::panicking() {
            drop(std::fs::remove_dir_all(&self.root));
        }
    }
}

/// A real driver.
pub struct Driver {
    /// The process.
    pub process: Process,
    /// Its socket.
    pub socket: PathBuf,
}

impl Driver {
    /// Starts one in this folder and waits for its socket; what it is asked goes to `calls.json` there.
    ///
    /// # Errors
    /// It does not come up.
    pub fn start(folder: &Folder, flags: &[&str]) -> Result<Driver> {
        let socket = folder.socket("driver");
        drop(std::fs::remove_file(&socket));
        let mut words = vec![
            format!("--endpoint={}", socket.display()),
            format!("--calls={}", folder.path("calls.json").display()),
        ];
        words.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let process = Process::start("driver", &process::tool("csi-driver")?, &words, folder.root())?;
        eventually("the driver's socket", || UnixStream::connect(&socket).is_ok())?;
        Ok(Driver { process, socket })
    }
}

/// Our program in one role.
pub struct Wrapper {
    /// The process.
    pub process: Process,
    /// Its socket.
    pub socket: PathBuf,
}

impl Wrapper {
    /// Starts one before the driver of this folder and waits for its socket.
    ///
    /// # Errors
    /// It does not come up.
    pub fn start(role: &'static str, folder: &Folder, flags: &[&str]) -> Result<Wrapper> {
        let socket = folder.socket(role);
        drop(std::fs::remove_file(&socket));
        let mut words = vec![
            role.to_owned(),
            format!("--csi.endpoint={}", socket.display()),
            format!("--csi.driver-endpoint={}", folder.socket("driver").display()),
            format!("--paths.run-dir={}", folder.real("run")?.display()),
            format!("--paths.state-dir={}", folder.real("state")?.display()),
            "--csi.admin-listen=127.0.0.1:0".to_owned(),
        ];
        words.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let program = process::ours("peerpod-csi")?;
        let mut process = match role {
            "node" => Process::start_in(&folder.container()?, role, &program, &words, folder.root()),
            _ => Process::start(role, &program, &words, folder.root()),
        }?;
        let mut ended = Ok(());
        eventually("the wrapper's socket", || {
            ended = process.check();
            ended.is_err() || UnixStream::connect(&socket).is_ok()
        })?;
        ended?;
        Ok(Wrapper { process, socket })
    }
}
