//! Tests providers outside the tree with the real binaries: the Python provider under `peerpod provider check`, and a
//! pod with a VM that a separate program makes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_tests::{PATIENCE, Sandbox, fresh_id};
use peerpod_world::{Daemons, Settings, World, binary, eventually};

/// Folder with a configuration for a provider that is a Python script.
struct Place(PathBuf);

impl Place {
    fn new(script: &[&str]) -> Place {
        let folder = std::env::temp_dir().join(fresh_id("peerpod-check-test"));
        fs::create_dir_all(folder.join("volumes")).unwrap();
        fs::write(folder.join("volumes/disk-1"), "").unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("providers/python").join(script[0]);
        let mut command = vec!["/usr/bin/env".into(), "python3".into(), path.display().to_string()];
        command.push(folder.display().to_string());
        command.extend(script[1..].iter().map(ToString::to_string));
        let config = serde_json::json!({
            "log": { "level": "warn" },
            "provider": { "kind": "external", "external": { "command": command, "handshake-timeout": "20s" } },
        });
        fs::write(folder.join("config.yaml"), config.to_string()).unwrap();
        // The witness: reads the "VM" itself and not the provider's report.
        let probe = "#!/usr/bin/env python3\n\
             import glob, json, os, sys\n\
             vms = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'vms')\n\
             if sys.argv[1] == 'machines':\n    print(len(glob.glob(vms + '/*.json')))\n\
             else:\n    sys.stdout.buffer.write(json.load(open(f'{vms}/{sys.argv[2]}.json'))['user_data'].encode())\n";
        fs::write(folder.join("probe"), probe).unwrap();
        fs::set_permissions(folder.join("probe"), fs::Permissions::from_mode(0o755)).unwrap();
        Place(folder)
    }

    fn check(&self, words: &[&str]) -> Command {
        let mut command = Command::new(binary("peerpod").unwrap());
        command.args(["provider", "check"]).arg(self.0.join("config.yaml")).args(words);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn machines(&self) -> usize {
        let files = fs::read_dir(self.0.join("vms")).map(|files| files.flatten().collect()).unwrap_or(vec![]);
        files.iter().filter(|file| file.file_name().to_string_lossy().ends_with(".json")).count()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn text(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_provider_in_python_keeps_every_promise() {
    let place = Place::new(&["provider.py"]);
    let probe = place.0.join("probe").display().to_string();
    let output = place.check(&["--yes", "--volume", "disk-1", "--probe", &probe]).output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    // Checks that need a second process or a fault in the cloud, and features that the provider lacks.
    let not: Vec<&str> = text.lines().filter(|line| line.starts_with("n/a ")).collect();
    assert_eq!(not.len(), 7, "{text}");
    for words in [
        "another process finds",
        "only our vms are listed",
        "a vm of another owner",
        "a batch is",
        "a recorded place",
        "a late refusal",
        "a list with an unread page",
    ] {
        assert!(not.iter().any(|line| line.contains(words)), "{words} in {not:?}");
    }
    assert!(text.contains("23 kept, 0 broken, 7 not applicable"), "{text}");
    peerpod_tests::report("provider_check_external_failed", 0.0);
    assert_eq!(place.machines(), 0);
}

#[test]
fn without_consent_nothing_is_made() {
    let place = Place::new(&["provider.py"]);
    let output = place.check(&[]).output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("up to 50 at once") && text.contains("--yes"), "{text}");
    assert!(!place.0.join("vms").exists(), "the provider was not even started");
}

#[test]
fn a_broken_promise_is_named_and_fails_without_leftovers() {
    let place = Place::new(&["faulty.py", "forgets-keys"]);
    let output = place.check(&["--yes", "--only", "a repeated create", "--crowd", "3"]).output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("BROKEN  a repeated create finds the same vm: two creates with one key"), "{text}");
    assert!(text.contains("0 kept, 1 broken, 0 not applicable"), "{text}");
    assert_eq!(place.machines(), 0);
}

#[test]
fn the_error_of_a_provider_that_cannot_be_loaded_names_the_cause() {
    let place = Place::new(&["faulty.py", "exits"]);
    let output = place.check(&["--yes"]).output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("there is no region set") && text.contains("exit status: 7"), "{text}");
}

#[test]
fn all_mistakes_of_the_configuration_are_reported() {
    let place = Place::new(&["provider.py"]);
    let words = ["--yes", "--provider.external.peer-uid", "x", "--provider.external.adress", "x:1"];
    let output = place.check(&words).output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("2 mistakes") && text.contains("did you mean provider.external.address?"),
        "{text}"
    );
}

#[tokio::test]
async fn ctrl_c_removes_everything() {
    let place = Place::new(&["faulty.py", "no-addresses"]);
    let child: Child = place.check(&["--yes", "--only", "many creates"]).spawn().unwrap();
    eventually("VMs are there", PATIENCE, async || (place.machines() > 10).then_some(())).await.unwrap();
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("Ctrl-C: deleting the VMs of this check"), "{text}");
    assert_eq!(place.machines(), 0, "{text}");
}

#[test]
fn a_failed_clean_up_names_the_node_of_the_vms_that_are_left() {
    let place = Place::new(&["faulty.py", "keeps-vms"]);
    let words = ["--yes", "--only", "a repeated create", "--patience", "1s"];
    let child = place.check(&words).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    fs::remove_dir_all(std::env::temp_dir().join(format!("peerpod-check-{pid}"))).unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("CLEAN-UP FAILED") && text.contains("this account deletes nothing"), "{text}");
    assert!(
        text.contains(&format!("look for VMs of this cluster with the node name check-{pid}-")),
        "{text}"
    );
    assert!(place.machines() > 0, "{text}");
}

/// Returns the process that listens on the provider's socket.
fn plugin_of(daemons: &Daemons) -> Option<Pid> {
    let socket = daemons.state_dir().join("external/provider.sock");
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    let peer = nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials).ok()?;
    Some(Pid::from_raw(peer.pid()))
}

#[tokio::test]
async fn a_pod_gets_its_vm_from_a_program_of_its_own_and_survives_that_programs_death() {
    let world = World::new().unwrap();
    let vms = world.folder().join("plugin");
    fs::create_dir_all(&vms).unwrap();
    let command = [
        env!("CARGO_BIN_EXE_peerpod-test-plugin").to_owned(),
        "--paths.state-dir".to_owned(),
        vms.display().to_string(),
    ];
    // This provider makes its VMs on the node itself, which needs all rights.
    let settings = Settings::privileged()
        .set("provider.kind", "external")
        .set("provider.external.command", command.to_vec())
        .set("provider.external.health-every", "200ms");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "external").await.unwrap();
    sandbox.lives().await.unwrap();

    let first = plugin_of(&daemons).expect("the plugin serves");
    kill(first, Signal::SIGKILL).unwrap();
    sandbox.lives().await.unwrap();
    let another = async || plugin_of(&daemons).filter(|pid| *pid != first);
    eventually("the plugin is started again", PATIENCE, another).await.unwrap();
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
    let gone = async || fs::read_dir(vms.join("local/vms")).unwrap().next().is_none().then_some(());
    eventually("its VM is gone", Duration::from_secs(20), gone).await.unwrap();
}
