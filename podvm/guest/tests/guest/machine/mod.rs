//! Runs a real VM in QEMU: the minimal image's kernel and initramfs, and on top of it the additions of a test.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use peerpod_world::qemu::{self, Machine, Running};

/// Time limit of one step of an emulated machine.
pub(crate) static PATIENCE: LazyLock<Duration> =
    LazyLock::new(|| qemu::patience(&built("image/minimal")).unwrap());

/// Folder that is removed with the test.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("peerpod-vm-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}; scripts/setup installs it"));
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    said
}

fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"), PathBuf::from)
}

/// Returns the path of a file of the VM image. The image is under test: `make image` makes it.
pub(crate) fn image(name: &str) -> PathBuf {
    built(&format!("image/minimal/{name}"))
}

fn built(name: &str) -> PathBuf {
    let file = target().join(name);
    assert!(file.exists(), "{} is not there: run `make image` (ARCH=aarch64)", file.display());
    file
}

/// Compiles the program of `probe.rs`, static.
fn probe(folder: &Path) -> Vec<u8> {
    let out = folder.join("probe");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest/machine/probe.rs");
    let (source, to) = (source.to_str().unwrap(), out.to_str().unwrap());
    run("rustc", &["--edition", "2024", "--target", "x86_64-unknown-linux-musl", "-O", "-o", to, source]);
    fs::read(out).unwrap()
}

/// Makes an archive in the kernel's format (newc) with a file per entry: path, mode, content.
pub(crate) fn cpio(files: &[(&str, u32, Vec<u8>)]) -> Vec<u8> {
    let mut archive = Vec::new();
    let mut made: Vec<String> = Vec::new();
    let mut entry = |name: &str, mode: u32, content: &[u8]| {
        let name_length = name.len() + 1;
        let mut numbers = [0_u32; 13];
        (numbers[1], numbers[4], numbers[6]) = (mode, 1, content.len() as u32);
        numbers[11] = name_length as u32;
        archive.extend_from_slice(b"070701");
        for number in numbers {
            write!(archive, "{number:08x}").unwrap();
        }
        for part in [&[name.as_bytes(), b"\0"].concat()[..], content] {
            archive.extend_from_slice(part);
            archive.resize(archive.len().next_multiple_of(4), 0);
        }
    };
    for (path, mode, content) in files {
        for (at, _) in path.match_indices('/') {
            if !made.contains(&path[..at].to_owned()) {
                entry(&path[..at], 0o040_755, &[]);
                made.push(path[..at].to_owned());
            }
        }
        entry(path, 0o100_000 | mode, content);
    }
    entry("TRAILER!!!", 0, &[]);
    archive
}

/// Parts of a VM.
#[derive(Default)]
pub(crate) struct Wanted {
    /// Parameters for the kernel command line.
    pub(crate) line: String,
    /// Arguments for QEMU.
    pub(crate) qemu: Vec<String>,
    /// Settings besides the kata-agent.
    pub(crate) settings: Vec<(&'static str, serde_json::Value)>,
    pub(crate) files: Vec<(&'static str, u32, Vec<u8>)>,
}

/// Running VM, which ends with this value.
pub(crate) struct Vm(Running);

impl Vm {
    /// Boots a VM.
    pub(crate) fn boot(folder: &Folder, wanted: Wanted) -> Vm {
        let mut settings = serde_json::json!({"version": 1, "agent": ["/opt/probe"], "log": "info"});
        for (key, value) in wanted.settings {
            settings[key] = value;
        }
        let mut files = vec![
            ("opt/probe", 0o755, probe(&folder.0)),
            ("etc/peerpod/guest.json", 0o644, settings.to_string().into_bytes()),
        ];
        if let Some(guest) = std::env::var_os("PEERPOD_TEST_GUEST") {
            files.push(("init", 0o755, fs::read(guest).unwrap())); // not that of the image
        }
        files.extend(wanted.files);
        let initrd = folder.0.join("initrd");
        let mut archives = fs::read(image("initrd.img")).unwrap();
        archives.resize(archives.len().next_multiple_of(4), 0);
        archives.extend(cpio(&files));
        fs::write(&initrd, archives).unwrap();
        let line = format!("console=ttyS0 quiet no_timer_check panic=1 {}", wanted.line);
        let machine = Machine::new(512).kernel(&image("vmlinuz"), &initrd, &line);
        Vm(machine.with(&wanted.qemu).start(&folder.0).unwrap())
    }

    /// Boots the unmodified image of `make image ARCH=aarch64`.
    pub(crate) fn boot_aarch64(folder: &Folder, qemu: &[String]) -> Vm {
        let image = built("image/aarch64/minimal");
        let machine = Machine::aarch64(512).minimal_image(&image, "loglevel=6").unwrap();
        Vm(machine.with(qemu).start(&folder.0).unwrap())
    }

    pub(crate) fn began(&self) -> Instant {
        self.0.began()
    }

    pub(crate) fn console(&self) -> String {
        self.0.console()
    }

    /// Waits until the console has a line with this text; returns the console.
    pub(crate) fn says(&mut self, what: &str) -> String {
        self.0.line_blocking(what, *PATIENCE).unwrap();
        self.console()
    }

    pub(crate) fn until(&self, what: &str, is: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + *PATIENCE;
        while !is(&self.console()) {
            assert!(Instant::now() < deadline, "{what}: not within {:?}:\n{}", *PATIENCE, self.console());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until QEMU itself has ended, as it does when the machine is switched off. The console is complete then.
    pub(crate) fn ends(&mut self) {
        self.0.off_blocking(*PATIENCE).unwrap();
    }
}
