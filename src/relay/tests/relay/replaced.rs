//! Tests of the supervisor in a container's place: after a handover it stays until a signal ends it, and it passes on
//! every other exit status.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::common::PATIENCE;

struct Kept(Child, PathBuf);

impl Kept {
    fn start(folder: &Path, name: &str) -> Kept {
        let log = folder.join(name);
        let out = File::create(&log).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_peerpod-relay"));
        command
            .arg("--paths.run-dir")
            .arg(folder.join("run"))
            .arg("--paths.state-dir")
            .arg(folder.join("state"))
            .arg("--relay.bundles")
            .arg(folder.join("bundles"));
        command.args([
            "--relay.listen=127.0.0.1:0",
            "--relay.admin-listen=127.0.0.1:0",
            "--relay.replaced=wait",
        ]);
        command.stderr(out.try_clone().unwrap()).stdout(out);
        Kept(command.spawn().unwrap(), log)
    }

    fn said(&self, what: &str) -> bool {
        fs::read_to_string(&self.1).unwrap().contains(what)
    }

    fn tell(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id().cast_signed()), signal).unwrap();
    }

    fn child(&self) -> Option<i32> {
        let id = self.0.id();
        let all = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        all.split_whitespace().next().map(|pid| pid.parse().unwrap())
    }

    fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        until("its end", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Killed with it, because it would outlive the supervisor.
        if let Some(child) = self.0.try_wait().unwrap().is_none().then(|| self.child()).flatten() {
            kill(Pid::from_raw(child), Signal::SIGKILL).ok();
        }
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

#[test]
fn a_replaced_relay_stays_until_it_gets_a_signal() {
    let folder = Folder(std::env::temp_dir().join(format!("peerpod-replaced-{}", std::process::id())));
    let folder = folder.0.as_path();
    fs::create_dir_all(folder).unwrap();
    let socket = folder.join("run/hypervisor.sock");
    let mut first = Kept::start(folder, "first");
    until("the first one serves", || first.said("peerpod-relay serves"));
    let mut second = Kept::start(folder, "second");
    until("the second one has taken over", || second.said("took over from another process"));
    until("the first one waits", || first.said("waiting for a signal to end"));
    assert_eq!(first.child(), None);
    assert!(first.0.try_wait().unwrap().is_none(), "it would be started again");
    first.tell(Signal::SIGTERM);
    assert_eq!(first.ended().code(), Some(0));
    UnixStream::connect(&socket).unwrap();

    // The relay of the third supervisor is killed, which is no handover.
    let mut third = Kept::start(folder, "third");
    until("the third one has taken over", || third.said("took over from another process"));
    until("the second one waits", || second.said("waiting for a signal to end"));
    kill(Pid::from_raw(third.child().unwrap()), Signal::SIGKILL).unwrap();
    assert_eq!(third.ended().code(), Some(137));

    // A signal during service reaches the relay, which cleans up.
    let mut last = Kept::start(folder, "last");
    until("the last one serves", || last.said("peerpod-relay serves"));
    last.tell(Signal::SIGTERM);
    assert_eq!(last.ended().code(), Some(0));
    assert!(!socket.exists());
    second.tell(Signal::SIGINT);
    assert_eq!(second.ended().code(), Some(0));
}
