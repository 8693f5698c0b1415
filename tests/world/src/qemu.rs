//! Boots machines in QEMU with software emulation, which works on every host: starts them, reads their serial console,
//! kills them.
//!
//! For tests of behaviour that no namespace can show. Several machines can run side by side; each dies with its test.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Kind of machine: QEMU's program and options, Debian's UEFI firmware, and its variables, which each machine needs a
/// copy of.
#[derive(Debug, Clone, Copy)]
struct Board {
    qemu: &'static str,
    machine: &'static str,
    processor: &'static str,
    firmware: &'static str,
    variables: &'static str,
}

const Q35: Board = Board {
    qemu: "qemu-system-x86_64",
    machine: "q35",
    // Without instructions that emulation makes slow, as the VMs of the product.
    processor: "max,-erms,-fsrm",
    firmware: "/usr/share/OVMF/OVMF_CODE_4M.fd",
    variables: "/usr/share/OVMF/OVMF_VARS_4M.fd",
};
const ARM: Board = Board {
    qemu: "qemu-system-aarch64",
    machine: "virt",
    // A newer one has signed pointers, which emulation makes slow.
    processor: "cortex-a72",
    firmware: "/usr/share/AAVMF/AAVMF_CODE.fd",
    variables: "/usr/share/AAVMF/AAVMF_VARS.fd",
};
/// Bare boots that one step of a machine may take: a step does more than a boot, and others run beside it.
const BOOTS_PER_STEP: u32 = 100;
/// Least time limit of a step. The host can become busy after the measurement.
const LEAST: Duration = Duration::from_secs(240);
/// Time limit of the measured boot.
const SLOWEST_BOOT: Duration = Duration::from_secs(600);
const INTERVAL: Duration = Duration::from_millis(20);
/// Number of the console's last characters in an error.
const TAIL: usize = 3000;

/// Returns the time limit of one step of an emulated machine, such as its boot or shutdown, on a host that runs others,
/// too. It follows from a boot of the minimal image in `folder`, which it measures.
///
/// # Errors
/// Fails if there is no image (`make image`), or the machine does not boot.
pub fn patience(folder: &Path) -> anyhow::Result<Duration> {
    let place = std::env::temp_dir().join(format!("peerpod-bare-boot-{}", std::process::id()));
    fs::create_dir_all(&place)?;
    let mut machine = Machine::new(512).minimal_image(folder, "")?.start(&place)?;
    machine.line_blocking("waiting for user-data", SLOWEST_BOOT)?;
    let boot = machine.began().elapsed();
    drop(machine);
    fs::remove_dir_all(&place)?;
    let limit = LEAST.max(BOOTS_PER_STEP * boot);
    println!("a bare boot took {boot:?}; each step of a machine may take {limit:?}");
    Ok(limit)
}

/// Definition of a machine.
#[derive(Debug, Clone)]
pub struct Machine {
    board: Board,
    arguments: Vec<String>,
    firmware: bool,
}

impl Machine {
    /// Defines a q35 machine with `memory` MiB and one emulated processor, without a disk, a network or anything to
    /// boot.
    pub fn new(memory: u32) -> Machine {
        Machine::on(Q35, memory)
    }

    /// Defines the same with a processor of aarch64, on QEMU's board `virt`.
    pub fn aarch64(memory: u32) -> Machine {
        Machine::on(ARM, memory)
    }

    fn on(board: Board, memory: u32) -> Machine {
        let memory = memory.to_string();
        let fixed = [
            "-accel",
            "tcg",
            "-machine",
            board.machine,
            "-cpu",
            board.processor,
            "-m",
            &memory,
            "-display",
            "none",
            "-monitor",
            "none",
            "-nodefaults",
            "-no-reboot",
            "-device",
            "virtio-rng-pci",
        ];
        Machine { board, arguments: fixed.map(str::to_owned).into(), firmware: false }
    }

    /// Adds arguments to QEMU's command line.
    pub fn with<S: AsRef<str>>(mut self, arguments: impl IntoIterator<Item = S>) -> Machine {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Boots this kernel directly.
    pub fn kernel(self, kernel: &Path, initrd: &Path, command_line: &str) -> Machine {
        let (kernel, initrd) = (kernel.display().to_string(), initrd.display().to_string());
        self.with(["-kernel", &kernel, "-initrd", &initrd, "-append", command_line])
    }

    /// Boots the image that `make image` built in `folder`; `more` is appended to the image's command line.
    ///
    /// # Errors
    /// Fails if there is no image (`make image`).
    pub fn minimal_image(self, folder: &Path, more: &str) -> anyhow::Result<Machine> {
        let path = folder.join("image.json");
        let text =
            fs::read(&path).with_context(|| format!("{}: is there none? `make image`", path.display()))?;
        let image: serde_json::Value = serde_json::from_slice(&text)?;
        let text = |key: &str| image[key].as_str().with_context(|| format!("{}: no {key}", path.display()));
        let command_line = format!("{} {more}", text("cmdline_emulated")?);
        Ok(self.kernel(&folder.join(text("kernel")?), &folder.join(text("initrd")?), command_line.trim()))
    }

    /// Boots by UEFI.
    pub fn firmware(mut self) -> Machine {
        self.firmware = true;
        self
    }

    /// Adds a virtio disk; with `snapshot` QEMU discards the writes at the end.
    pub fn disk(self, file: &Path, format: &str, snapshot: bool) -> Machine {
        let snapshot = if snapshot { "on" } else { "off" };
        let drive = format!("if=virtio,format={format},snapshot={snapshot},file={}", file.display());
        self.with(["-drive", &drive])
    }

    /// Adds a virtio NIC behind QEMU's NAT and DHCP server. `forward` has QEMU's syntax, as in
    /// `hostfwd=tcp:127.0.0.1:5555-:80`, or is empty.
    pub fn user_network(self, forward: &str) -> Machine {
        let comma = if forward.is_empty() { "" } else { "," };
        let network = format!("user,id=uplink{comma}{forward}");
        self.with(["-netdev", &network, "-device", "virtio-net-pci,netdev=uplink,romfile="])
    }

    /// Starts the machine. Its console goes to a file below `folder`, which must exist.
    ///
    /// # Errors
    /// Fails if QEMU or its firmware is not installed, or QEMU does not start.
    pub fn start(self, folder: &Path) -> anyhow::Result<Running> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let console = folder.join(format!("console-{number}"));
        let errors = folder.join(format!("qemu-{number}"));
        File::create(&console).with_context(|| format!("make {}", console.display()))?;
        let mut command = Command::new("setpriv");
        // QEMU dies with the thread that starts it. The thread lives as long as `Running`, and dies with this process.
        command.args(["--pdeathsig", "KILL", self.board.qemu]).args(&self.arguments);
        command.arg("-serial").arg(format!("file:{}", console.display()));
        if self.firmware {
            let variables = folder.join(format!("firmware-{number}"));
            let Board { firmware, variables: from, .. } = self.board;
            fs::copy(from, &variables).with_context(|| {
                format!("copy {from}; install it (scripts/setup test, or long for aarch64)")
            })?;
            command.arg("-drive").arg(format!("if=pflash,unit=0,format=raw,readonly=on,file={firmware}"));
            command.arg("-drive").arg(format!("if=pflash,unit=1,format=raw,file={}", variables.display()));
        }
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&errors)?);
        let (started, starts) = mpsc::channel();
        let (hold, held) = mpsc::channel::<()>();
        let parent = thread::spawn(move || {
            let spawned = command.spawn();
            if started.send(spawned).is_ok() {
                // No message is ever sent: the loop ends when the sender is dropped.
                while held.recv().is_ok() {}
            }
        });
        let child = starts.recv()?.context("start QEMU by setpriv")?;
        Ok(Running { child, began: Instant::now(), console, errors, hold: Some(hold), parent: Some(parent) })
    }
}

/// A running machine; killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    began: Instant,
    console: PathBuf,
    errors: PathBuf,
    hold: Option<mpsc::Sender<()>>,
    parent: Option<JoinHandle<()>>,
}

impl Running {
    /// Returns the time of QEMU's start.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// Returns QEMU's pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the console so far. Invalid UTF-8 is replaced.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// Waits for a complete console line that contains the text, and returns the line without its end.
    ///
    /// # Errors
    /// Fails after `patience`, or when the machine ends before; the error contains the end of the console.
    pub async fn line(&mut self, what: &str, patience: Duration) -> anyhow::Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(line) = self.inspect(what, deadline)? {
                return Ok(line);
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Does the same as [`Running::line`], for code without a runtime.
    ///
    /// # Errors
    /// Fails like [`Running::line`].
    pub fn line_blocking(&mut self, what: &str, patience: Duration) -> anyhow::Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(line) = self.inspect(what, deadline)? {
                return Ok(line);
            }
            thread::sleep(INTERVAL);
        }
    }

    /// Waits until the machine is off.
    ///
    /// # Errors
    /// Fails after `patience`.
    pub fn off_blocking(&mut self, patience: Duration) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("the machine is not off within {patience:?}{}", self.tail());
            }
            thread::sleep(INTERVAL);
        }
    }

    fn inspect(&mut self, what: &str, deadline: Instant) -> anyhow::Result<Option<String>> {
        // Before the console is read: the output until the machine's end counts.
        let over = self.child.try_wait()?;
        let console = self.console();
        let whole = console.rfind('\n').map_or("", |end| &console[..end]);
        if let Some(line) = whole.lines().find(|line| line.contains(what)) {
            return Ok(Some(line.trim_end().to_owned()));
        }
        if let Some(status) = over {
            bail!("the machine ended ({status}) before it printed {what:?}{}", self.tail());
        }
        if Instant::now() > deadline {
            bail!("the machine did not print {what:?} in time{}", self.tail());
        }
        Ok(None)
    }

    fn tail(&self) -> String {
        let (console, errors) = (self.console(), fs::read_to_string(&self.errors).unwrap_or_default());
        let start = console.char_indices().rev().nth(TAIL).map_or(0, |(at, _)| at);
        format!("; QEMU: {}; its console:\n{}", errors.trim(), &console[start..])
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may be gone already; it is reaped either way.
        drop(self.child.kill());
        drop(self.child.wait());
        self.hold = None;
        if let Some(parent) = self.parent.take() {
            drop(parent.join());
        }
    }
}
