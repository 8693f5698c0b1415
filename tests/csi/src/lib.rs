//! Tests the CSI wrapper in front of a real CSI driver. This library starts the programs, runs csi-sanity, and makes
//! gRPC calls without any message type, so the tests check the bytes on the wire.

pub mod calls;
pub mod grpc;
pub mod process;
pub mod sanity;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use peerpod_world::{Container, share};

use crate::process::Process;

/// Time limit of every step, on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Returns whether the long versions are enabled (`make test-long`).
pub fn long() -> bool {
    std::env::var_os("PEERPOD_TEST_LONG").is_some()
}

/// Prints a figure, and adds it to the summary file that `PEERPOD_TEST_BENCH` names, if it is set.
pub fn report(key: &str, value: f64) {
    println!("{key} = {value:.3}");
    let named = std::env::var_os("PEERPOD_TEST_BENCH");
    let Some(path) = named else { return };
    let before = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut all: std::collections::BTreeMap<String, f64> = before.unwrap_or_default();
    all.insert(key.to_owned(), value);
    // A failure to write the file is ignored: the figure was printed.
    serde_json::to_vec_pretty(&all).ok().and_then(|bytes| std::fs::write(&path, bytes).ok());
}

/// Waits until `so` returns true.
///
/// # Errors
/// When it does not within [`PATIENCE`].
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

/// Subfolder of the sockets in a test's folder.
const SOCKETS: &str = "csi";

/// Folder of one test. Drop removes it, and unmounts and detaches its mounts and loop devices.
pub struct Folder {
    root: PathBuf,
    /// Folders of the machine that the node role's container also has.
    extra: Vec<PathBuf>,
}

impl Folder {
    /// Makes a new folder.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(name: &str) -> Result<Folder> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        // The path is short because it holds sockets, which have short path limits.
        let path = std::env::temp_dir().join(format!("pp-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir(&path)?;
        std::fs::create_dir(path.join(SOCKETS))?;
        Ok(Folder { root: path, extra: Vec::new() })
    }

    /// Returns a path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Returns the socket of a program.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.root.join(SOCKETS).join(name).with_extension("sock")
    }

    /// Adds a folder to the volumes of the node role's container.
    pub fn add_volume(&mut self, path: &Path) {
        self.extra.push(path.to_owned());
    }

    /// Returns its path.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the mounts in it and in the kubelet's folder, without the mount of that folder itself.
    ///
    /// # Errors
    /// When the kernel's list cannot be read.
    pub fn mounts(&self) -> Result<Vec<PathBuf>> {
        let kubelet = self.path("kubelet");
        let kubelet = kubelet.canonicalize().unwrap_or(kubelet);
        let inside = |point: &PathBuf| point.starts_with(&self.root) || point.starts_with(&kubelet);
        Ok(mounts()?.into_iter().filter(|point| inside(point) && *point != kubelet).collect())
    }

    /// Makes a folder and returns its real path; tests with several programs keep it elsewhere.
    fn real(&self, name: &str) -> Result<PathBuf> {
        std::fs::create_dir_all(self.path(name))?;
        Ok(self.path(name).canonicalize()?)
    }

    /// Returns the node role's container in the chart's component for CSI drivers, with its volumes in this folder.
    fn container(&self) -> Result<Container> {
        let mut volumes = vec![("socket-dir", self.root.join(SOCKETS)), ("peerpod-dev", "/dev".into())];
        for (volume, name) in
            [("peerpod-kubelet", "kubelet"), ("peerpod-state", "state"), ("peerpod-run", "run")]
        {
            volumes.push((volume, self.real(name)?));
        }
        share(&volumes[2].1)?;
        let extra = self.extra.clone();
        Ok(Container { name: "peerpod-csi", volumes, extra, ..Container::default() })
    }

    /// Returns the loop devices of files in it.
    ///
    /// # Errors
    /// When losetup cannot list them.
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

/// Returns all mounts of this process's mount namespace, oldest first.
fn mounts() -> Result<Vec<PathBuf>> {
    let list = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(list.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from).collect())
}

impl Drop for Folder {
    fn drop(&mut self) {
        let inside = |point: &PathBuf| point.starts_with(&self.root);
        for point in mounts().unwrap_or_default().into_iter().filter(inside).rev() {
            // A failed unmount shows: the folder cannot be removed then.
            nix::mount::umount(&point).ok();
        }
        // The kernel gives an open device to no other file.
        let loops = || self.loops().unwrap_or_default();
        let held: Vec<_> = loops().iter().map(std::fs::File::open).collect();
        for device in loops() {
            Command::new("losetup").arg("--detach").arg(device).status().ok();
        }
        drop(held);
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
    /// Starts a driver in this folder and waits for its socket. It records its calls in `calls.json` there.
    ///
    /// # Errors
    /// When it does not start.
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

/// `peerpod-csi` in one role.
pub struct Wrapper {
    /// The process.
    pub process: Process,
    /// Its socket.
    pub socket: PathBuf,
}

impl Wrapper {
    /// Starts it in front of this folder's driver and waits for its socket.
    ///
    /// # Errors
    /// When it does not start.
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
