//! Replays the recorded frames of a real shim (`tests/transcripts/`) byte for byte, end to end. The responses must be
//! those of the real hypervisor service and the real agent.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_proto::agent::{ReadStreamRequest, ReadStreamResponse, SignalProcessRequest};
use peerpod_proto::hypervisor::{CreateVMRequest, CreateVMResponse};
use peerpod_proto::ttrpc_frame::{Request, Response};
use peerpod_tests::PATIENCE;
use peerpod_world::{Daemons, Pod, Settings, Sight, World, eventually};
use protobuf::Message;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Mutex, watch};

type Answers = BTreeMap<u32, Response>;

/// Connection of the shim: sends requests unchanged, and collects responses by stream.
struct Connection {
    write: Arc<Mutex<OwnedWriteHalf>>,
    answers: watch::Receiver<Arc<Answers>>,
}

impl Connection {
    async fn open(path: &Path) -> Connection {
        let (mut read, write) = UnixStream::connect(path).await.unwrap().into_split();
        let (sender, answers) = watch::channel(Arc::new(Answers::new()));
        tokio::spawn(async move {
            let mut header = [0; 10];
            while read.read_exact(&mut header).await.is_ok() {
                let mut payload = vec![0; u32::from_be_bytes(header[..4].try_into().unwrap()) as usize];
                read.read_exact(&mut payload).await.unwrap();
                let stream = u32::from_be_bytes(header[4..8].try_into().unwrap());
                let answer = Response::parse_from_bytes(&payload).unwrap();
                sender
                    .send_modify(|answers| assert!(Arc::make_mut(answers).insert(stream, answer).is_none()));
            }
        });
        Connection { write: Arc::new(Mutex::new(write)), answers }
    }

    /// Sends a request after the response to the stream `after`.
    fn send_after(&self, after: u32, stream: u32, payload: &[u8]) {
        let (mut answers, write, payload) = (self.answers.clone(), self.write.clone(), payload.to_vec());
        tokio::spawn(async move {
            if answers.wait_for(|answers| answers.contains_key(&after)).await.is_ok() {
                Connection::write(&write, stream, &payload).await;
            }
        });
    }

    async fn send(&self, stream: u32, payload: &[u8]) {
        Connection::write(&self.write, stream, payload).await;
    }

    async fn write(write: &Mutex<OwnedWriteHalf>, stream: u32, payload: &[u8]) {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes().to_vec();
        frame.extend(stream.to_be_bytes());
        frame.extend([1, 0]);
        frame.extend(payload);
        // The shim still writes after StopVM, when the connection may be closed. A lost request shows as a missing
        // response.
        write.lock().await.write_all(&frame).await.ok();
    }

    /// Waits until the other end has closed the connection.
    async fn closed(&mut self) {
        let closed = async { while self.answers.changed().await.is_ok() {} };
        tokio::time::timeout(PATIENCE, closed).await.expect("the connection is closed");
    }

    async fn answer(&mut self, stream: u32, what: &str) -> Response {
        let waiting = self.answers.wait_for(|answers| answers.contains_key(&stream));
        let answered = tokio::time::timeout(PATIENCE, waiting).await;
        answered.unwrap_or_else(|_| panic!("{what} was not answered")).unwrap()[&stream].clone()
    }
}

/// Output of each process, by container, exec and stream.
type Outputs = BTreeMap<Output, Vec<u8>>;
type Output = (String, String, String);

/// Returns the output that a request reads.
fn output_of(request: &Request) -> Option<Output> {
    let reads = matches!(request.method.as_str(), "ReadStdout" | "ReadStderr");
    let asked = reads.then(|| ReadStreamRequest::parse_from_bytes(&request.payload).unwrap())?;
    Some((asked.container_id, asked.exec_id, request.method.clone()))
}

fn data_of(response: &Response) -> Vec<u8> {
    ReadStreamResponse::parse_from_bytes(&response.payload).unwrap().data
}

/// Requirements of a recording.
struct Scene {
    /// The processes need nothing of the recording's image, so they end and print as recorded.
    exact: bool,
    settings: Settings,
    /// The pod's network namespace is gone before CreateVM.
    no_netns: bool,
    /// The shim copies markers of volumes that the node has no record of.
    unknown_volumes: bool,
}

impl Scene {
    fn plain() -> Scene {
        Scene { exact: true, settings: Settings::none(), no_netns: false, unknown_volumes: false }
    }
}

async fn replay(name: &str, scene: Scene) {
    let Scene { exact, settings, no_netns, unknown_volumes } = scene;
    let mut refused = false;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("transcripts").join(name);
    let text = std::fs::read_to_string(path).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let pod = world.pod().unwrap();
    if no_netns {
        pod.namespace().delete().unwrap();
    }
    let mut hypervisor = Connection::open(&daemons.hypervisor_socket()).await;
    let mut agent: Option<(Connection, UnixStream)> = None;
    let mut socket = String::new();
    let (mut requests, mut reads) = (BTreeMap::new(), BTreeMap::<Output, u32>::new());
    let (mut recorded, mut seen) = (Outputs::new(), Outputs::new());
    for line in &lines {
        let on_agent = line["sock"] == "agent";
        let Some(payload) = line["payload_b64"].as_str() else {
            // Both connections to the agent are opened together, and the second one never sends anything.
            if on_agent && line["event"] == "open" && agent.is_none() {
                let silent = UnixStream::connect(&socket).await.unwrap();
                agent = Some((Connection::open(Path::new(&socket)).await, silent));
            }
            if on_agent && line["event"] == "close" && line["by"] == "agent" && line["conn"] == 0 {
                // Only the end of its VM closes an agent's connections: the shim then treats the pod as dead.
                let sight = Sight::of(&world, &[], &daemons).unwrap();
                assert!(sight.kill("peerpod-guest", "").unwrap() > 0);
                let (connection, silent) = agent.as_mut().unwrap();
                connection.closed().await;
                let read = tokio::time::timeout(PATIENCE, silent.read(&mut [0])).await.unwrap();
                assert!(matches!(read, Ok(0) | Err(_)), "the silent connection is closed too: {read:?}");
            }
            continue;
        };
        let payload = BASE64_STANDARD.decode(payload).unwrap();
        let (stream, method) = (line["stream"].as_u64().unwrap() as u32, line["method"].as_str().unwrap());
        let connection = if on_agent { &mut agent.as_mut().unwrap().0 } else { &mut hypervisor };
        let what = format!("{name}: {method} of stream {stream}");
        if line["type"] == 1 {
            if method == "SignalProcess" && signal(&payload) == 15 && !refused {
                // In the recording the shim was idle for seconds before; here the program must have installed its
                // handler.
                eventually("a program catches SIGTERM", PATIENCE, async || {
                    let sight = Sight::of(&world, &[], &daemons).ok()?;
                    sight.pids("sh").into_iter().any(catches_sigterm).then_some(())
                })
                .await
                .unwrap();
            }
            let payload = if method == "CreateVM" { here(&payload, &pod) } else { payload };
            let request = Request::parse_from_bytes(&payload).unwrap();
            // Like the shim: one pending read per output. The agent may answer two reads in either order.
            match output_of(&request).and_then(|output| reads.insert(output, stream)) {
                Some(before) => connection.send_after(before, stream, &payload),
                None => connection.send(stream, &payload).await,
            }
            requests.insert((on_agent, stream), request);
            continue;
        }
        let expected = Response::parse_from_bytes(&payload).unwrap();
        if let Some(output) = output_of(&requests[&(on_agent, stream)]) {
            // The split of output into pieces is random: collected here, compared at the end. The first piece must come
            // as early as in the recording.
            if !recorded.contains_key(&output) {
                connection.answer(stream, &what).await;
            }
            recorded.entry(output).or_default().extend(data_of(&expected));
            continue;
        }
        let answer = connection.answer(stream, &what).await;
        if expected.status.code != 0 && !on_agent {
            // The message is Peerpod's own; only an error with a message is required.
            assert!(answer.status.code != 0 && !answer.status.message.is_empty(), "{what}: {answer}");
            continue;
        }
        if unknown_volumes && method == "CreateContainer" && answer.status.code != 0 {
            assert!(answer.status.message.contains("has the marker of a volume"), "{what}: {answer}");
            refused = true;
        }
        if refused && on_agent {
            // The container does not exist; only a response to each call is required.
            continue;
        }
        assert_eq!(answer.status, expected.status, "{what}");
        match method {
            "CreateVM" => {
                socket = CreateVMResponse::parse_from_bytes(&answer.payload).unwrap().agentSocketPath
            }
            "WaitProcess" | "Check" if exact => assert_eq!(answer.payload, expected.payload, "{what}"),
            _ => {}
        }
    }
    assert_eq!(refused, unknown_volumes, "{name}");
    if let Some((connection, mut silent)) = agent {
        for (stream, answer) in connection.answers.borrow().iter() {
            if let Some(output) = output_of(&requests[&(true, *stream)]) {
                seen.entry(output).or_default().extend(data_of(answer));
            }
        }
        assert!(!recorded.is_empty());
        for (process, output) in recorded.into_iter().filter(|_| exact) {
            // The containers have this VM's files and names, not those of the recording's image.
            let first = output.split_inclusive(|byte| *byte == b'\n').next().unwrap_or_default();
            let ours = seen.remove(&process).unwrap_or_default();
            assert!(ours.starts_with(first), "{name}: {process:?}: {:?}", String::from_utf8_lossy(&ours));
        }
        let mut byte = [0];
        let read = silent.try_read(&mut byte);
        assert!(!matches!(read, Ok(1)), "the silent connection heard something");
        drop(silent.shutdown().await);
    }
    let id = lines.iter().find_map(|line| {
        let payload = (line["method"] == "CreateVM").then(|| line["payload_b64"].as_str()).flatten()?;
        let request = Request::parse_from_bytes(&BASE64_STANDARD.decode(payload).ok()?).ok()?;
        Some(CreateVMRequest::parse_from_bytes(&request.payload).ok()?.id)
    });
    daemons.gone(&id.unwrap(), PATIENCE).await.unwrap();
}

/// Returns the signal of a recorded SignalProcess.
fn signal(payload: &[u8]) -> u32 {
    let request = Request::parse_from_bytes(payload).unwrap();
    SignalProcessRequest::parse_from_bytes(&request.payload).unwrap().signal
}

fn catches_sigterm(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (15 - 1)) != 0
}

/// Replaces the network namespace of the recorded CreateVM. No other bytes differ from those of the shim.
fn here(payload: &[u8], pod: &Pod) -> Vec<u8> {
    let mut request = Request::parse_from_bytes(payload).unwrap();
    let mut create = CreateVMRequest::parse_from_bytes(&request.payload).unwrap();
    create.networkNamespacePath = pod.namespace().path().to_string_lossy().into_owned();
    request.payload = create.write_to_bytes().unwrap();
    request.write_to_bytes().unwrap()
}

#[tokio::test]
async fn a_recorded_cri_pod_is_replayed() {
    replay("rust-cri-pod.jsonl", Scene::plain()).await;
}

#[tokio::test]
async fn a_recorded_ctr_run_is_replayed() {
    replay("rust-ctr-run.jsonl", Scene::plain()).await;
}

#[tokio::test]
async fn volumes_without_a_record_fail_only_their_recorded_container() {
    replay("rust-volume.jsonl", Scene { exact: false, unknown_volumes: true, ..Scene::plain() }).await;
}

#[tokio::test]
async fn a_recorded_startvm_that_fails_is_followed_by_one_stop() {
    let settings = Settings::none().set("node.boot-timeout", "1s").set("provider.local.boot-delay", "60s");
    replay("rust-startvm-fails.jsonl", Scene { settings, ..Scene::plain() }).await;
}

#[tokio::test]
async fn a_recorded_createvm_that_fails_is_followed_by_one_stop() {
    replay("rust-createvm-fails.jsonl", Scene { no_netns: true, ..Scene::plain() }).await;
}

#[tokio::test]
async fn a_recorded_lost_agent_is_a_dead_vm() {
    let settings = Settings::none().set("node.vm-gone-grace", "1s");
    replay("rust-agent-lost.jsonl", Scene { settings, ..Scene::plain() }).await;
}
