//! Tests the test agent over its socket, like a shim: the same calls in the same order as the transcripts.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use peerpod_client::{AgentClient, ContainerSpec, copy_file, exec_request};
use peerpod_podnet::netns;
use peerpod_proto::agent::{CreateSandboxRequest, PauseContainerRequest};
use ttrpc::Code;

struct Agent {
    child: Child,
    folder: PathBuf,
    client: AgentClient,
}

impl Agent {
    async fn start(name: &str) -> Agent {
        let folder = std::env::temp_dir().join(format!("peerpod-test-agent-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("agent.sock");
        let config = folder.join("agent-config.toml");
        std::fs::write(&config, format!("dev_mode = true\nserver_addr = \"unix://{}\"\n", socket.display()))
            .unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_peerpod-test-agent"))
            .arg("--config")
            .arg(&config)
            .arg("--root")
            .arg(folder.join("root"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let client = AgentClient::connect(&socket).await.unwrap();
        Agent { child, folder, client }
    }

    fn root(&self) -> PathBuf {
        self.folder.join("root")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        drop(std::fs::remove_dir_all(&self.folder));
    }
}

fn sandbox(id: &str) -> CreateSandboxRequest {
    let mut request = CreateSandboxRequest::new();
    request.sandbox_id = id.into();
    request.hostname = "pod1".into();
    request
}

#[tokio::test]
async fn a_container_lives_as_in_the_transcripts() {
    let agent = Agent::start("life").await;
    let client = &agent.client;
    std::fs::create_dir_all(agent.root().join("left-over")).unwrap();
    client.create_sandbox(&sandbox("s1")).await.unwrap();
    assert!(!agent.root().join("left-over").exists(), "CreateSandbox empties the tree");
    assert!(!client.guest_details().await.unwrap().agent_details.storage_handlers.is_empty());
    let oom = tokio::spawn({
        let client = client.clone();
        async move { client.oom_event().await }
    });
    client.copy_file(&copy_file("c1-0123456789abcdef-hosts", 0o644, b"127.0.0.1 localhost\n")).await.unwrap();
    let script = "trap 'echo bye; exit 7' TERM; echo hello; echo oops >&2; while :; do sleep 0.05; done";
    client.create_container(&ContainerSpec::new("c1", &["/bin/sh", "-c", script]).request()).await.unwrap();
    client.start_container("c1").await.unwrap();
    assert_eq!(client.read_stdout("c1", "", 8192).await.unwrap(), b"hello\n");
    assert_eq!(client.read_stderr("c1", "", 8192).await.unwrap(), b"oops\n");

    let output = client
        .exec(&exec_request("c1", "e1", &["/bin/sh", "-c", "echo in-exec; echo err >&2; exit 3"]))
        .await
        .unwrap();
    assert_eq!(
        (output.status, &output.stdout[..], &output.stderr[..]),
        (3, &b"in-exec\n"[..], &b"err\n"[..])
    );
    let late = client.signal_process("c1", "e1", 9).await.unwrap_err();
    assert_eq!((late.code(), late.answer()), (Some(Code::NOT_FOUND), "InvalidExecId"));
    assert!(client.stats_container("c1").await.unwrap().cgroup_stats.pids_stats.current > 0);
    assert_eq!(client.check().await.unwrap().status.value(), 1);

    client.signal_process("c1", "", 15).await.unwrap();
    assert_eq!(client.output("c1", "").await.unwrap().stdout, b"bye\n");
    assert_eq!(client.wait_process("c1", "").await.unwrap(), 7);
    client.signal_process("c1", "", 9).await.unwrap();
    client.remove_container("c1").await.unwrap();
    assert_eq!(client.remove_container("c1").await.unwrap_err().answer(), "Invalid container id");
    assert!(!oom.is_finished(), "GetOOMEvent is pending for life");
    oom.abort();
    assert!(client.silent_is_quiet().await);
}

#[tokio::test]
async fn input_comes_back_byte_for_byte_and_ends() {
    let agent = Agent::start("stdin").await;
    let client = &agent.client;
    client.create_sandbox(&sandbox("s1")).await.unwrap();
    client.create_container(&ContainerSpec::new("c1", &["cat"]).request()).await.unwrap();
    client.start_container("c1").await.unwrap();
    let sent: Vec<u8> =
        (0..4_000_000u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let writer = tokio::spawn({
        let (client, sent) = (client.clone(), sent.clone());
        async move {
            for piece in sent.chunks(1 << 20) {
                assert_eq!(client.write_stdin("c1", "", piece.to_vec()).await.unwrap() as usize, piece.len());
            }
            // The Rust shim's form of end of input.
            client.write_stdin("c1", "", Vec::new()).await.unwrap();
        }
    });
    let output = client.output("c1", "").await.unwrap();
    writer.await.unwrap();
    assert_eq!(output.status, 0);
    assert!(output.stdout == sent, "{} bytes came back", output.stdout.len());
}

#[tokio::test]
async fn a_missing_working_directory_is_made() {
    let agent = Agent::start("cwd").await;
    let cwd = agent.folder.join("not/there");
    let mut request = ContainerSpec::new("c1", &["/bin/sh", "-c", "pwd"]).request();
    request.OCI.as_mut().unwrap().Process.as_mut().unwrap().Cwd = cwd.to_str().unwrap().into();
    agent.client.create_container(&request).await.unwrap();
    agent.client.start_container("c1").await.unwrap();
    let output = agent.client.output("c1", "").await.unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}\n", cwd.display()));
}

#[tokio::test]
async fn a_terminal_is_one_stream() {
    let agent = Agent::start("tty").await;
    let mut request = ContainerSpec::new(
        "c1",
        &["/bin/sh", "-c", "tty >/dev/null && echo terminal; read line; echo got $line"],
    )
    .request();
    request.OCI.as_mut().unwrap().Process.as_mut().unwrap().Terminal = true;
    agent.client.create_container(&request).await.unwrap();
    agent.client.start_container("c1").await.unwrap();
    agent.client.write_stdin("c1", "", b"word\n".to_vec()).await.unwrap();
    let output = agent.client.output("c1", "").await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("terminal\r\n") && text.contains("got word\r\n"), "{text:?}");
}

#[tokio::test]
async fn the_network_namespace_of_the_specification_is_the_process_s() {
    let agent = Agent::start("netns").await;
    let path = agent.folder.join("podns");
    netns::create_named(&path).unwrap();
    let mut request =
        ContainerSpec::new("c1", &["/bin/sh", "-c", "readlink /proc/self/ns/net; sleep 1000"]).request();
    let namespaces = &mut request.OCI.as_mut().unwrap().Linux.as_mut().unwrap().Namespaces;
    let mut network = peerpod_proto::agent::LinuxNamespace::new();
    (network.Type, network.Path) = ("network".into(), path.to_str().unwrap().into());
    namespaces.push(network);
    let mut missing = request.clone();
    missing.container_id = "c2".into();
    missing.OCI.as_mut().unwrap().Linux.as_mut().unwrap().Namespaces[3].Path = "/nonexistent".into();

    let error = agent.client.create_container(&missing).await.unwrap_err();
    assert_eq!((error.code(), error.answer().contains("ENOENT")), (Some(Code::INTERNAL), true), "{error}");
    agent.client.create_container(&request).await.unwrap();
    agent.client.start_container("c1").await.unwrap();
    let seen = agent.client.read_stdout("c1", "", 8192).await.unwrap();
    let id = netns::NetnsId::of(&path).unwrap();
    assert_eq!(String::from_utf8_lossy(&seen).trim(), format!("net:[{}]", id.inode));
    let exec =
        agent.client.exec(&exec_request("c1", "e1", &["readlink", "/proc/self/ns/net"])).await.unwrap();
    assert_eq!(exec.stdout, seen);
    agent.client.signal_process("c1", "", 9).await.unwrap();
    assert_eq!(agent.client.wait_process("c1", "").await.unwrap(), 137);
    netns::delete_named(&path).unwrap();
}

#[tokio::test]
async fn what_is_not_there_is_unimplemented_and_destroy_ends_the_agent() {
    let mut agent = Agent::start("end").await;
    let context = ttrpc::context::with_duration(Duration::from_secs(5));
    let error =
        agent.client.service().pause_container(context, &PauseContainerRequest::new()).await.unwrap_err();
    assert!(
        matches!(error, ttrpc::Error::RpcStatus(ref status) if status.code() == Code::UNIMPLEMENTED),
        "{error}"
    );
    agent.client.create_container(&ContainerSpec::new("c1", &["sleep", "1000"]).request()).await.unwrap();
    agent.client.start_container("c1").await.unwrap();
    agent.client.destroy_sandbox().await.unwrap();
    let began = Instant::now();
    while agent.child.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(15), "the agent ends");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
