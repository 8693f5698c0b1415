//! Checks that the Python provider, a separate program in another language, keeps every promise. Runs
//! `peerpod provider check` with all optional parts and reports the number of broken promises.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context;
use peerpod_world::binary;

use crate::report::{Goal, Report};

/// Witness that reads the records which are the "VMs".
const PROBE: &str = r#"#!/usr/bin/env python3
import glob, json, os, sys
vms = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vms")
if sys.argv[1] == "machines":
    print(len(glob.glob(vms + "/*.json")))
else:
    sys.stdout.buffer.write(json.load(open(f"{vms}/{sys.argv[2]}.json"))["user_data"].encode())
"#;

/// Runs the check.
pub(crate) fn run(folder: &Path, report: &mut Report) -> anyhow::Result<()> {
    let folder = folder.join("check");
    fs::create_dir_all(folder.join("volumes"))?;
    fs::write(folder.join("volumes/disk-1"), "")?;
    let probe = folder.join("probe");
    fs::write(&probe, PROBE)?;
    fs::set_permissions(&probe, fs::Permissions::from_mode(0o755))?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/providers/python/provider.py");
    let command = ["/usr/bin/env".as_ref(), "python3".as_ref(), script.as_os_str(), folder.as_os_str()];
    let config = serde_json::json!({
        "log": { "level": "warn" },
        "provider": { "kind": "external", "external": { "command": command.map(|word| word.to_string_lossy()) } },
    });
    let file = folder.join("config.yaml");
    fs::write(&file, config.to_string())?;
    let output = Command::new(binary("peerpod")?)
        .args(["provider", "check"])
        .arg(&file)
        .args(["--yes", "--volume", "disk-1", "--probe"])
        .arg(&probe)
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let broken = broken(&said)
        .with_context(|| format!("{}: {said}\n{}", output.status, String::from_utf8_lossy(&output.stderr)))?;
    report.figure(
        "provider_check_external_failed",
        broken,
        Goal::Exactly(0.0),
        "promises that the provider in Python breaks",
    );
    Ok(())
}

/// Reads the number from the table's last line, `21 kept, 0 broken, 3 not applicable`.
fn broken(said: &str) -> Option<f64> {
    let sums = said.lines().last()?;
    sums.split(", ").find_map(|part| part.strip_suffix(" broken"))?.parse().ok()
}
