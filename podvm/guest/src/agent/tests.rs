//! Tests with a real process: this test program starts itself again as a kata-agent that only listens.

use std::os::unix::net::UnixListener;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_proto::agent::Empty;
use peerpod_proto::agent_ttrpc::{AgentService, create_agent_service};
use ttrpc::Code;
use ttrpc::asynchronous::transport::Listener;
use ttrpc::asynchronous::{Server, TtrpcContext};

use super::*;
use crate::files::testing::TempDir;

const SOCKET: &str = "PEERPOD_TEST_AGENT_SOCKET";
const KEEPER: &str = "PEERPOD_TEST_AGENT_KEEPER";
const DELAY: &str = "PEERPOD_TEST_AGENT_DELAY_MS";
const POLICIES: &str = "PEERPOD_TEST_AGENT_POLICIES";

/// Role of the kata-agent: not a test by itself, does nothing without its variable.
#[test]
#[ignore = "role: started by the tests below as their agent"]
fn be_an_agent() {
    let Ok(socket) = std::env::var(SOCKET) else { return };
    let delay = std::env::var(DELAY).ok().and_then(|ms| ms.parse().ok()).unwrap_or(0);
    std::thread::sleep(Duration::from_millis(delay));
    let listener = UnixListener::bind(socket).unwrap();
    if let Ok(policies) = std::env::var(POLICIES) {
        // The look for the socket, that for its process, and a first SetPolicy, which gets no answer.
        listener.incoming().take(3).for_each(drop);
        return serve_policies(listener, policies.into());
    }
    let connections: Vec<_> = listener.incoming().take(1000).collect();
    drop(connections);
}

/// Kata-agent that accepts one policy, which forbids any other, and keeps it in a file. Without a file it accepts none.
struct Policies(PathBuf);

#[async_trait::async_trait]
impl AgentService for Policies {
    async fn set_policy(&self, _: &TtrpcContext, request: SetPolicyRequest) -> ttrpc::Result<Empty> {
        let refused = |code, text| Err(ttrpc::Error::RpcStatus(ttrpc::get_status(code, text)));
        if self.0.as_os_str().is_empty() {
            return refused(Code::UNIMPLEMENTED, "SetPolicy is not supported");
        }
        if self.0.exists() {
            return refused(Code::PERMISSION_DENIED, "SetPolicyRequest is blocked by policy");
        }
        std::fs::write(&self.0, request.policy).unwrap();
        Ok(Empty::new())
    }
}

fn serve_policies(listener: UnixListener, file: PathBuf) {
    listener.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener).unwrap();
        let services = create_agent_service(Arc::new(Policies(file)));
        let mut server = Server::new().add_listener(Listener::from(listener)).register_service(services);
        server.start().await.unwrap();
        std::future::pending::<()>().await;
    });
}

fn settings(dir: &Path, delay_ms: u32) -> Settings {
    let socket = dir.join("agent.sock");
    let test = std::env::current_exe().unwrap().display().to_string();
    let agent = [
        "/usr/bin/env".to_owned(),
        format!("{SOCKET}={}", socket.display()),
        format!("{DELAY}={delay_ms}"),
        test,
        "agent::tests::be_an_agent".to_owned(),
        "--exact".to_owned(),
        "--ignored".to_owned(),
    ];
    let mut settings = Settings::default();
    (settings.agent, settings.agent_socket, settings.state_dir) = (agent.into(), socket, dir.to_owned());
    settings
}

struct Kept {
    agent: Arc<Agent>,
    status: Arc<Status>,
    task: tokio::task::JoinHandle<()>,
}

fn keep(settings: &Settings) -> Kept {
    keep_with(None, settings)
}

fn keep_with(policy: Option<&str>, settings: &Settings) -> Kept {
    let status = Arc::new(Status::new(std::path::Path::new("/nonexistent"), false));
    let agent = Arc::new(Agent::new(settings, status.clone(), Ring::new(true)));
    agent.assign(policy);
    let task = tokio::spawn({
        let agent = agent.clone();
        async move { agent.run().await }
    });
    Kept { agent, status, task }
}

impl Kept {
    async fn listening(&self) {
        self.agent.listening(Duration::from_secs(20)).await.unwrap();
    }

    fn pid(&self) -> u32 {
        self.agent.read_record().unwrap().unwrap().process.unwrap().pid
    }

    /// Stops the task as if this program were killed; the kata-agent stays.
    fn die(self) {
        self.task.abort();
    }
}

fn kill_9(pid: u32) {
    kill(Pid::from_raw(pid as i32), Signal::SIGKILL).unwrap();
}

async fn until(what: impl Fn() -> bool) {
    timeout(Duration::from_secs(20), async {
        while !what() {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the condition holds within 20 s");
}

#[tokio::test]
async fn a_slow_agent_is_waited_for_and_connections_wait_with_it() {
    let dir = TempDir::new();
    let kept = keep(&settings(dir.path(), 150));
    let late = kept.agent.listening(Duration::from_millis(20)).await.unwrap_err().to_string();
    assert!(late.contains("did not listen on"), "{late}");
    kept.agent.connect().await.unwrap();
    let report = kept.status.report();
    assert!(report.agent_running && report.agent_exits == 0);
    assert!(report.stages.iter().any(|stage| stage.name == "agent" && stage.took_us >= 150_000));
    kill_9(kept.pid());
}

#[tokio::test]
async fn an_agent_that_dies_before_there_are_containers_is_started_again() {
    let dir = TempDir::new();
    let kept = keep(&settings(dir.path(), 0));
    kept.listening().await;
    let first = kept.pid();
    kill_9(first);
    until(|| kept.status.report().agent_exits == 1 && kept.status.report().agent_running).await;
    kept.listening().await;
    assert_ne!(kept.pid(), first);
    kept.agent.connect().await.unwrap();
    kill_9(kept.pid());
}

#[tokio::test]
async fn an_agent_that_dies_with_containers_is_reported_and_not_restarted() {
    let dir = TempDir::new();
    let kept = keep(&settings(dir.path(), 0));
    kept.listening().await;
    kept.agent.has_containers();
    kill_9(kept.pid());
    let mut phase = kept.agent.watch();
    timeout(Duration::from_secs(20), phase.wait_for(|p| matches!(p, Phase::Unusable(_))))
        .await
        .unwrap()
        .unwrap();
    kept.task.await.unwrap();
    let report = kept.status.report();
    assert!(!report.agent_running && report.error.contains("died with running containers"));
    assert_eq!(kept.agent.connect().await.unwrap_err().kind(), io::ErrorKind::NotConnected);

    // The next run of this program reports the same.
    let again = keep(&settings(dir.path(), 0));
    again.task.await.unwrap();
    assert_eq!(again.status.report().agent_exits, 1);
}

#[tokio::test]
async fn a_restarted_guest_finds_its_agent_with_and_without_a_record() {
    let dir = TempDir::new();
    let settings = settings(dir.path(), 0);
    let first = keep(&settings);
    first.listening().await;
    let pid = first.pid();
    first.die();

    let second = keep(&settings);
    second.listening().await;
    assert_eq!(second.pid(), pid, "by its record");
    second.die();

    std::fs::remove_file(dir.path().join("agent.json")).unwrap();
    let third = keep(&settings);
    third.listening().await;
    assert_eq!(third.pid(), pid, "by its socket");
    third.agent.has_containers();
    kill_9(pid);
    let mut phase = third.agent.watch();
    timeout(Duration::from_secs(20), phase.wait_for(|p| matches!(p, Phase::Unusable(_))))
        .await
        .unwrap()
        .unwrap();
}

/// Runs in a process of its own, because the descriptor limit is per process: a kata-agent runs, and this program has
/// no descriptor left to find it.
#[tokio::test]
#[ignore = "role: started by the test below"]
async fn a_supervisor_without_descriptors() {
    let Ok(dir) = std::env::var(KEEPER) else { return };
    let settings = settings(Path::new(&dir), 0);
    let first = keep(&settings);
    first.listening().await;
    let pid = first.pid();
    first.die();
    let mut held = Vec::new();
    for by in ["its record", "its socket"] {
        let agent = Agent::new(
            &settings,
            Arc::new(Status::new(std::path::Path::new("/nonexistent"), false)),
            Ring::new(true),
        );
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 64, most).unwrap();
        let full = loop {
            match std::fs::File::open("/dev/null") {
                Ok(file) => held.push(file),
                Err(error) => break error,
            }
        };
        assert!(says_nothing(&full), "{full}");
        for free in 0..4 {
            // With zero to three free descriptors, each step of the look-up fails once.
            held.truncate(held.len() - usize::from(free > 0));
            match agent.find().await {
                Err(error) => assert!(says_nothing(&error), "{error}"),
                Ok((found, exits)) => {
                    assert_eq!(
                        (found.map(|found| found.process.pid), exits),
                        (Some(pid), 0),
                        "{by}, {free} free"
                    );
                }
            }
            assert!(ProcessId::inspect(pid).is_err() || free > 0);
        }
        held.clear();
        let (found, exits) = agent.find().await.unwrap();
        assert_eq!((found.unwrap().process.pid, exits), (pid, 0), "{by}");
        std::fs::remove_file(Path::new(&dir).join("agent.json")).ok();
    }
    kill_9(pid);
    println!("the supervisor is done");
}

#[test]
fn without_descriptors_no_second_agent_is_started_beside_the_first() {
    let dir = TempDir::new();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["agent::tests::a_supervisor_without_descriptors", "--exact", "--ignored", "--nocapture"])
        .env(KEEPER, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("the supervisor is done"), "{text}");
}

#[tokio::test]
async fn an_agent_that_died_while_no_guest_ran_is_reported() {
    let dir = TempDir::new();
    let settings = settings(dir.path(), 0);
    let first = keep(&settings);
    first.listening().await;
    let pid = first.pid();
    first.agent.has_containers();
    first.die();
    kill_9(pid);
    until(|| matches!(ProcessId::inspect(pid), Ok(None))).await;
    let second = keep(&settings);
    second.task.await.unwrap();
    let report = second.status.report();
    assert_eq!(report.lost.len(), 1);
    assert!(report.error.contains("died with running containers"));
}

#[tokio::test]
async fn a_missing_command_is_named() {
    let dir = TempDir::new();
    let mut settings = settings(dir.path(), 0);
    settings.agent = vec!["/nonexistent/kata-agent".into()];
    let kept = keep(&settings);
    until(|| kept.status.report().error.contains("/nonexistent/kata-agent")).await;
    kept.die();
}

#[tokio::test]
async fn an_agent_of_another_program_is_only_waited_for() {
    let dir = TempDir::new();
    let mut settings = settings(dir.path(), 0);
    settings.agent.clear();
    let kept = keep(&settings);
    sleep(Duration::from_millis(20)).await;
    let listener = UnixListener::bind(&settings.agent_socket).unwrap();
    kept.listening().await;
    drop(listener);
    kept.task.await.unwrap();
}

#[test]
fn a_file_that_is_no_socket_is_not_removed() {
    let dir = TempDir::new();
    let path = dir.path().join("file");
    remove_stale_socket(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    assert!(remove_stale_socket(&path).unwrap_err().to_string().contains("not a socket"));
    assert!(path.exists());
}

/// Settings whose kata-agent accepts one policy into this file; with an empty path it accepts none.
fn with_policies(dir: &Path, file: &Path) -> Settings {
    let mut settings = settings(dir, 0);
    let mut agent = settings.agent.clone();
    agent.insert(1, format!("{POLICIES}={}", file.display()));
    settings.agent = agent;
    settings
}

#[tokio::test]
async fn nobody_reaches_the_agent_before_the_assignment() {
    let dir = TempDir::new();
    let settings = settings(dir.path(), 0);
    let status = Arc::new(Status::new(Path::new("/nonexistent"), false));
    let agent = Arc::new(Agent::new(&settings, status.clone(), Ring::new(true)));
    let kept = agent.clone();
    let task = tokio::spawn(async move { kept.run().await });
    until(|| status.report().stages.iter().any(|stage| stage.name == "agent" && stage.took_us > 0)).await;
    timeout(Duration::from_millis(50), agent.connect()).await.unwrap_err();
    agent.assign(None);
    agent.connect().await.unwrap();
    kill_9(agent.read_record().unwrap().unwrap().process.unwrap().pid);
    task.abort();
}

#[tokio::test]
async fn each_agent_gets_the_first_policy_once_before_anyone_reaches_it() {
    let dir = TempDir::new();
    let file = dir.path().join("accepted");
    let settings = with_policies(dir.path(), &file);
    let first = keep_with(Some("package first"), &settings);
    first.agent.assign(Some("package second"));
    first.agent.connect().await.unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "package first");
    // The kata-agent refuses a second policy, and the next run of this program sends none.
    first.die();
    let second = keep_with(Some("package first"), &settings);
    second.agent.connect().await.unwrap();
    // A new kata-agent has no policy.
    std::fs::remove_file(&file).unwrap();
    let mut phase = second.agent.watch();
    kill_9(second.pid());
    phase.changed().await.unwrap();
    second.agent.connect().await.unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "package first");
    kill_9(second.pid());
    second.die();
}

#[tokio::test]
async fn an_agent_that_takes_no_policy_is_never_reached() {
    let dir = TempDir::new();
    let kept = keep_with(Some("package agent_policy"), &with_policies(dir.path(), Path::new("")));
    let error = kept.agent.listening(Duration::from_secs(20)).await.unwrap_err();
    assert!(error.contains("policy.rego") && error.contains("SetPolicy is not supported"), "{error}");
    assert_eq!(kept.agent.connect().await.unwrap_err().kind(), io::ErrorKind::NotConnected);
    assert!(kept.status.report().error.contains("policy.rego"));
    kill_9(kept.pid());
    kept.task.await.unwrap();
}
