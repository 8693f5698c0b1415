//! Tests the unit file for images that boot with systemd: systemd's own verdict, and settings that must never be lost.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn unit() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("peerpod-guest.service")).unwrap()
}

/// Folder that is removed with the test.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

#[test]
fn systemd_accepts_the_unit() {
    let folder = Folder(std::env::temp_dir().join(format!("peerpod-unit-{}", std::process::id())));
    fs::create_dir_all(&folder.0).unwrap();
    // The program's path in the VM image does not exist where tests run.
    let text = unit().replace("/usr/local/bin/peerpod-guest", env!("CARGO_BIN_EXE_peerpod-guest"));
    assert_ne!(text, unit());
    let file = folder.0.join("peerpod-guest.service");
    fs::write(&file, text).unwrap();
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&file).output();
    let verified = verified.expect("this test needs systemd-analyze: apt-get install systemd");
    let said = String::from_utf8_lossy(&verified.stderr);
    // Other units of the machine that runs the tests may have faults of their own; these lines name the other units.
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("peerpod-guest")).collect();
    assert!(ours.is_empty(), "{said}");
}

#[test]
fn the_unit_keeps_the_agent_and_restarts_the_guest() {
    let unit = unit();
    let settings: Vec<&str> = unit.lines().filter(|line| !line.starts_with('#')).collect();
    for needed in [
        "ExecStart=/usr/local/bin/peerpod-guest serve",
        "KillMode=process",
        "Restart=always",
        "StartLimitIntervalSec=0",
        "OOMPolicy=continue",
        "Delegate=yes",
    ] {
        assert!(settings.contains(&needed), "{needed}");
    }
    // Children inherit these; each would break some pod.
    for (setting, harmless) in [
        ("NoNewPrivileges", "no"),
        ("ProtectSystem", "no"),
        ("PrivateMounts", "no"),
        ("PrivateTmp", "no"),
        ("PrivateDevices", "no"),
        ("ProtectKernelTunables", "no"),
        ("ProtectControlGroups", "no"),
        ("RestrictNamespaces", "no"),
        ("RestrictSUIDSGID", "no"),
        ("SystemCallFilter", ""),
        ("CapabilityBoundingSet", ""),
        ("UMask", "0022"),
    ] {
        let given = settings.iter().filter_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
        assert!(given.into_iter().all(|value| value == harmless), "{setting}");
    }
}
