//! Program in the kata-agent's place in a test's VM: prints its observations on the console, and treats the machine as
//! the kernel command line demands. Compiled by the test itself, with the standard library alone.

use std::ffi::{CString, c_char, c_int, c_ulong, c_void};
use std::thread;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

// SAFETY: the C library's own declarations.
unsafe extern "C" {
    fn mount(source: *const c_char, target: *const c_char, kind: *const c_char, flags: c_ulong, data: *const c_void) -> c_int;
    fn unshare(flags: c_int) -> c_int;
    fn chdir(path: *const c_char) -> c_int;
    fn syscall(number: i64, ...) -> i64;
}

const CLONE_NEWNS: c_int = 0x0002_0000;
const MS_BIND: c_ulong = 4096;
const MS_REC: c_ulong = 16384;
const MS_PRIVATE: c_ulong = 1 << 18;
const PIVOT_ROOT: i64 = 155;

fn say(text: &str) {
    let mut console = OpenOptions::new().write(true).open("/dev/console").unwrap();
    console.write_all(format!("\nPROBE {text} END\n").as_bytes()).unwrap();
}

fn text(text: &str) -> CString {
    CString::new(text).unwrap()
}

fn mounted(source: &str, target: &str, kind: &str, flags: c_ulong) -> bool {
    fs::create_dir_all(target).unwrap();
    let (source, target, kind) = (text(source), text(target), text(kind));
    // SAFETY: three strings that end, and no data.
    unsafe { mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) == 0 }
}

/// Pivots the root as container runtimes do.
fn pivot() {
    // SAFETY: only this process's own namespace and folder.
    unsafe {
        assert_eq!(unshare(CLONE_NEWNS), 0);
        assert!(mounted("none", "/", "none", MS_REC | MS_PRIVATE));
        assert!(mounted("tmpfs", "/run/new-root", "tmpfs", 0));
        assert_eq!(chdir(text("/run/new-root").as_ptr()), 0);
        let here = text(".");
        let done = syscall(PIVOT_ROOT, here.as_ptr(), here.as_ptr());
        let error = std::io::Error::last_os_error();
        std::process::exit(if done == 0 { 0 } else { error.raw_os_error().unwrap_or(1) });
    }
}

fn pid_of(words: &str) -> Option<u32> {
    fs::read_dir("/proc").unwrap().find_map(|entry| {
        let pid: u32 = entry.unwrap().file_name().to_str()?.parse().ok()?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        String::from_utf8_lossy(&line).replace('\0', " ").trim().ends_with(words).then_some(pid)
    })
}

fn rss(pid: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().to_owned()
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("pivot") {
        return pivot();
    }
    fs::create_dir_all("/run/peerpod").unwrap();
    let listener = UnixListener::bind("/run/peerpod/agent.sock").unwrap();
    thread::spawn(move || for connection in listener.incoming() { std::mem::forget(connection) });
    let line = fs::read_to_string("/proc/cmdline").unwrap();
    let does = |what: &str| line.contains(&format!("probe={what}"));
    let pivoted = Command::new("/proc/self/exe").arg("pivot").status().unwrap();
    say(&format!("pivot_root {pivoted}"));
    say(&format!("hostname {}", fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim()));
    say(&format!("stdin {}", fs::read_link("/dev/stdin").unwrap().display()));
    // The kernel requests a module that is not loaded: its own modprobe is the guest program.
    say(&format!("overlay {}", mounted_overlay()));
    if does("disk") {
        while !fs::exists("/dev/vda").unwrap() { thread::sleep(Duration::from_millis(20)) }
        assert!(mounted("/dev/vda", "/run/peerpod/volumes/v0", "ext4", 0), "{}", std::io::Error::last_os_error());
        let mut file = File::create("/run/peerpod/volumes/v0/data").unwrap();
        file.write_all(&vec![7; 3 << 20]).unwrap(); // and no sync
        // Held open, as by a container, and bound to a second mount point.
        assert!(mounted("/run/peerpod/volumes/v0", "/run/bound", "none", MS_BIND));
        std::mem::forget(file);
        say("wrote");
    }
    if does("cloud-disks") {
        let google = b"Google  PersistentDisk  pp-one";
        let descriptor = [&[2, 1, 0, google.len() as u8][..], google].concat();
        let page = [&[0, 0x83, 0, descriptor.len() as u8][..], &descriptor].concat();
        cover(&disk_with("device/vpd_pg83", b"pp-one").join("device/vpd_pg83"), "page", &page);
        let model = disk_with("device/serial", b"azure").join("device/model");
        cover(&model, "model", b"MSFT NVMe Accelerator v1.0              \n");
        say("disguised disks");
    }
    if does("stop-serve") {
        let serve = pid_of("peerpod-guest serve").unwrap();
        // SAFETY: a signal.
        unsafe { syscall(62, serve as i64, 19_i64) };
        say(&format!("stopped {serve}"));
    }
    if does("stop-always") {
        // After every restart, so that no live `serve` ever notes the lease.
        loop {
            if let Some(serve) = pid_of("peerpod-guest serve") {
                // SAFETY: a signal.
                unsafe { syscall(62, i64::from(serve), 19_i64) };
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
    let mut said = String::new();
    loop {
        thread::sleep(Duration::from_millis(50));
        let resolv = fs::read_to_string("/etc/resolv.conf").unwrap_or_default().replace('\n', ",");
        let Some(serve) = pid_of("peerpod-guest serve").filter(|_| resolv != said) else { continue };
        say(&format!("rss serve {} init {}", rss(serve), rss(1)));
        say(&format!("resolv {resolv}"));
        said = resolv;
    }
}

/// Waits for a disk whose attribute contains these bytes; returns its folder in sysfs.
fn disk_with(attribute: &str, bytes: &[u8]) -> PathBuf {
    loop {
        for disk in fs::read_dir("/sys/class/block").unwrap().flatten() {
            let content = fs::read(disk.path().join(attribute)).unwrap_or_default();
            if content.windows(bytes.len()).any(|part| part == bytes) { return disk.path() }
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Mounts a file with other content over a file of sysfs.
fn cover(file: &Path, name: &str, content: &[u8]) {
    let other = format!("/run/cover-{name}");
    fs::write(&other, content).unwrap();
    let (other, file) = (text(&other), text(file.to_str().unwrap()));
    // SAFETY: two strings that end, and no data.
    let done = unsafe { mount(other.as_ptr(), file.as_ptr(), std::ptr::null(), MS_BIND, std::ptr::null()) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

fn mounted_overlay() -> bool {
    for folder in ["/run/o/l", "/run/o/u", "/run/o/w", "/run/o/m"] { fs::create_dir_all(folder).unwrap() }
    let (source, target, kind) = (text("overlay"), text("/run/o/m"), text("overlay"));
    let data = text("lowerdir=/run/o/l,upperdir=/run/o/u,workdir=/run/o/w");
    // SAFETY: strings that end.
    unsafe { mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, data.as_ptr().cast()) == 0 }
}
