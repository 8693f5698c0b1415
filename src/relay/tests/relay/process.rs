//! Tests of the program itself: start from its settings, dropped privileges, stop on a signal, restart after a kill.

use super::common;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::Raw;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_proto::relay::{DeleteSandboxRequest, PutSandboxRequest};
use peerpod_proto::relay_ttrpc::RelayClient;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter,
};
use sha2::{Digest, Sha256};

struct Relay(Child);

impl Relay {
    fn start(base: &Path) -> Relay {
        let config = base.join("peerpod.yaml");
        std::fs::write(
            &config,
            format!(
                "paths: {{run-dir: {0}/run, state-dir: {0}/state}}\nrelay: {{listen: \"127.0.0.1:0\", admin-listen: \"127.0.0.1:0\", bundles: [{0}/bundles]}}\nnode: {{cluster-id: not ours}}\n",
                base.display()
            ),
        )
        .unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_peerpod-relay"))
            .args(["--config", config.to_str().unwrap()])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Relay(child)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    fn exit_code(&mut self) -> Option<i32> {
        let deadline = Instant::now() + common::PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn folder(name: &str) -> PathBuf {
    let base = std::env::temp_dir().join(format!("ppr-{name}-{}", std::process::id()));
    drop(std::fs::remove_dir_all(&base));
    std::fs::create_dir_all(&base).unwrap();
    base
}

async fn stop_is_answered(base: &Path) {
    let mut shim = Raw::connect(&base.join("run/hypervisor.sock")).await;
    shim.stop("a").await;
    assert_eq!(shim.answer().await.code, 0);
}

async fn put(client: &RelayClient, id: &str, agent_socket: &Path) {
    let request = PutSandboxRequest {
        id: id.into(),
        agent_socket: agent_socket.to_str().unwrap().into(),
        guest_certificates: vec![Sha256::digest(id).to_vec()],
        pod: format!("shop/{id}"),
        ..Default::default()
    };
    client.put_sandbox(Default::default(), &request).await.unwrap();
}

#[tokio::test]
async fn it_serves_without_rights_and_stops_on_sigterm() {
    let base = folder("term");
    let mut relay = Relay::start(&base);
    stop_is_answered(&base).await;
    let status = std::fs::read_to_string(format!("/proc/{}/task/{0}/status", relay.0.id())).unwrap();
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    assert_eq!(field("NoNewPrivs:"), "1");
    assert_eq!(field("CapEff:"), "0000000000000000");
    for task in std::fs::read_dir(format!("/proc/{}/task", relay.0.id())).unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        assert!(status.contains("CapPrm:\t0000000000000000"), "{status}");
        assert!(status.contains("Seccomp:\t2"), "{status}");
    }
    relay.signal(Signal::SIGTERM);
    assert_eq!(relay.exit_code(), Some(0));
    let left = std::fs::read_dir(base.join("run")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: BTreeSet<_> = left.filter_map(|name| name.into_string().ok()).collect();
    assert_eq!(left, BTreeSet::from(["relay.lock", "stops"].map(str::to_owned)));
    std::fs::remove_dir_all(base).unwrap();
}

#[tokio::test]
async fn a_killed_relay_is_replaced_at_the_same_sockets() {
    let base = folder("kill");
    let mut relay = Relay::start(&base);
    stop_is_answered(&base).await;
    let client = common::client(&base.join("run/relay.sock"));
    let socket = |id: &str| base.join(format!("run/pods/{id}/agent.ttrpc"));
    for id in ["kept", "removed"] {
        put(&client, id, &socket(id)).await;
    }
    let request = DeleteSandboxRequest { id: "removed".into(), ..Default::default() };
    client.delete_sandbox(Default::default(), &request).await.unwrap();
    // A relay that is killed right after the removal cannot delete the socket, which late shims may dial.
    relay.signal(Signal::SIGKILL);
    relay.exit_code();
    assert!(base.join("run/hypervisor.sock").exists());
    assert!(socket("removed").exists());
    // This file is no socket, so the relay did not make it.
    std::fs::create_dir(base.join("run/pods/foreign")).unwrap();
    std::fs::write(socket("foreign"), "").unwrap();
    let mut next = Relay::start(&base);
    stop_is_answered(&base).await;
    assert!(!socket("removed").parent().unwrap().exists());
    assert!(socket("foreign").exists());
    Raw::connect(&socket("kept")).await;
    next.signal(Signal::SIGINT);
    assert_eq!(next.exit_code(), Some(0));
    std::fs::remove_dir_all(base).unwrap();
}

/// Starts the program where the kernel does not know this system call, or the command that is its first argument.
fn start_without((call, command): (libc::c_long, Option<u64>), base: &Path, more: &'static str) -> Child {
    let folders = [("paths.run-dir", "run"), ("paths.state-dir", "state"), ("relay.bundles", "bundles")];
    let words = folders.map(|(key, name)| format!("--{key}={}", base.join(name).display()));
    // The filter stays with this thread and its children.
    let started = std::thread::spawn(move || {
        let refused = SeccompAction::Errno(libc::EOPNOTSUPP.unsigned_abs());
        let rule = |command| {
            let is_command = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, command);
            SeccompRule::new(vec![is_command.unwrap()]).unwrap()
        };
        let calls = BTreeMap::from([(call, command.map(rule).into_iter().collect())]);
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filter = SeccompFilter::new(calls, SeccompAction::Allow, refused, arch).unwrap();
        apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_peerpod-relay"));
        command.args(words).args(["--relay.listen=127.0.0.1:0", "--relay.admin-listen=127.0.0.1:0", more]);
        command.stderr(Stdio::piped()).spawn().unwrap()
    });
    started.join().unwrap()
}

#[tokio::test]
async fn a_right_that_cannot_be_dropped_stops_the_start_unless_permitted() {
    let base = folder("rights");
    let no_new_privs = Some(libc::PR_SET_NO_NEW_PRIVS.unsigned_abs().into());
    for (call, step) in [
        ((libc::SYS_prctl, no_new_privs), "set no_new_privs"),
        ((libc::SYS_capset, None), "drop the capabilities"),
        ((libc::SYS_landlock_create_ruleset, None), "restrict the files by Landlock"),
        ((libc::SYS_seccomp, None), "filter system calls"),
    ] {
        let output = start_without(call, &base, "--log.level=info").wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{step}");
        let text = String::from_utf8(output.stderr).unwrap();
        for part in [step, "relay.hardening: best-effort"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let relay = Relay(start_without(call, &base, "--relay.hardening=best-effort"));
        stop_is_answered(&base).await;
        let output = start_without(call, &base, "--log.level=info").wait_with_output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(step) && text.contains("that relay goes on"), "beside a running relay: {text}");
        drop(relay);
    }
    std::fs::remove_dir_all(base).unwrap();
}

#[test]
fn it_exits_with_all_mistakes_in_the_settings() {
    let output = Command::new(env!("CARGO_BIN_EXE_peerpod-relay"))
        .args(["--paths.run-dir=x", "--relay.listen=nowhere", "--relay.pod=x"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    for part in ["paths.run-dir", "relay.listen", "relay.pod"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test]
async fn a_thousand_sandboxes_without_guests_are_small_and_served_again() {
    let base = folder("thousand");
    let mut relay = Relay::start(&base);
    stop_is_answered(&base).await;
    let resident = |relay: &Relay| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", relay.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let empty = resident(&relay);
    let client = common::client(&base.join("run/relay.sock"));
    let begun = Instant::now();
    for n in 0..1000 {
        put(&client, &format!("s{n}"), &base.join(format!("run/pods/s{n}/agent.ttrpc"))).await;
    }
    let (took, full) = (begun.elapsed(), resident(&relay));
    println!("1000 sandboxes in {took:?}; {empty} KiB before, {full} KiB after");
    assert!(full - empty < 12 << 10, "{empty} KiB before, {full} KiB after");
    relay.signal(Signal::SIGKILL);
    relay.exit_code();
    let mut relay = Relay::start(&base);
    let begun = Instant::now();
    stop_is_answered(&base).await;
    println!("served again after {:?}", begun.elapsed());
    for n in [0, 500, 999] {
        Raw::connect(&base.join(format!("run/pods/s{n}/agent.ttrpc"))).await;
    }
    relay.signal(Signal::SIGTERM);
    assert_eq!(relay.exit_code(), Some(0));
    assert_eq!(std::fs::read_dir(base.join("run/pods")).unwrap().count(), 0);
    std::fs::remove_dir_all(base).unwrap();
}
