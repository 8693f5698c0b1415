//! Tests faulty and hostile callers of a node: every call fails with a reason and has no other effect.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use peerpod_client::{AgentClient, Annotations, Error, ShimClient, exec_request};
use peerpod_proto::agent::{ReadStreamRequest, WaitProcessRequest};
use peerpod_proto::ttrpc_frame;
use peerpod_tests::{
    CONTAINER, Dice, PATIENCE, Sandbox, fresh_id, nothing_beyond, resident, sample, stop_in_time,
};
use peerpod_world::{Daemons, Pod, Settings, Sight, World, binary, eventually};
use protobuf::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use ttrpc::Code;

/// Encodes a ttrpc frame; `announced` may differ from the payload's length.
fn frame(announced: usize, stream: u32, kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(announced).unwrap().to_be_bytes().to_vec();
    frame.extend(stream.to_be_bytes());
    frame.extend([kind, 0]);
    frame.extend(payload);
    frame
}

/// Encodes a request frame as a shim does.
fn request(stream: u32, service: &str, method: &str, message: &impl Message) -> Vec<u8> {
    let mut request = ttrpc_frame::Request::new();
    request.service = service.into();
    request.method = method.into();
    request.payload = message.write_to_bytes().unwrap();
    let payload = request.write_to_bytes().unwrap();
    frame(payload.len(), stream, 1, &payload)
}

/// Reads one frame, and returns its stream id and its response.
async fn response(stream: &mut UnixStream) -> std::io::Result<(u32, ttrpc_frame::Response)> {
    let mut header = [0; 10];
    stream.read_exact(&mut header).await?;
    let length = u32::from_be_bytes(header[..4].try_into().unwrap());
    let mut payload = vec![0; length as usize];
    stream.read_exact(&mut payload).await?;
    let id = u32::from_be_bytes(header[4..8].try_into().unwrap());
    Ok((id, ttrpc_frame::Response::parse_from_bytes(&payload).unwrap()))
}

/// Asserts that nothing was begun: nothing exists right now, and the provider received no create call. A check that
/// waits would miss resources that were made and removed again.
fn assert_untouched(world: &World, pod: &Pod, daemons: &Daemons, before: &Sight, case: &str) {
    let mut more = Sight::of(world, &[pod.namespace()], daemons).unwrap().beyond(before, None);
    // Ignores the test's own file. Ignores processes too: those of other tests may have copies of this test's mounts.
    // The provider's counter shows that no VM was begun.
    more.retain(|line| line != "file state/filler" && !line.starts_with("process "));
    assert!(more.is_empty(), "{case}: {more:?}");
    let metrics = daemons.metrics("node").unwrap();
    let made: Vec<&str> = metrics
        .lines()
        .filter(|line| line.starts_with("peerpod_provider_calls_total{") && line.contains("\"create\""))
        .collect();
    assert!(made.is_empty(), "{case}: {made:?}");
}

async fn create(shim: &ShimClient, id: &str, netns: &Path) -> Result<PathBuf, Error> {
    shim.create_vm(id, Annotations::new("default", "pod"), netns).await
}

#[tokio::test]
async fn an_invalid_id_is_refused_before_anything_is_made() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let pod = world.pod().unwrap();
    let netns = pod.namespace().path();
    let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    let shim = daemons.shim().await.unwrap();
    let long = "x".repeat(129);
    let huge = "x".repeat(100_000);
    for id in
        ["", ".", "..", "../escape", "a/b", "/abs", "a b", "-a", ".hidden", "a\0b", "a\nb", "ü", &long, &huge]
    {
        let shown = &id[..id.len().min(20)];
        let error = create(&shim, id, &netns).await.expect_err(shown);
        assert_eq!(error.code(), Some(Code::INVALID_ARGUMENT), "{shown:?}: {error}");
        assert!(error.answer().len() < 1000, "{shown:?}: the answer does not repeat it all");
        assert!(shim.start_vm(id).await.is_err(), "{shown:?}");
        // Refused or ignored, but with a response and without a trace.
        let answer = stop_in_time(&shim, id).await.map_err(|error| error.downcast::<Error>());
        if let Err(error) = answer {
            assert!(matches!(&error, Ok(error) if error.code().is_some()), "{shown:?}: {error:?}");
        }
    }
    // A valid id, but its socket path would be too long.
    let unfit = "x".repeat(128);
    assert_eq!(create(&shim, &unfit, &netns).await.unwrap_err().code(), Some(Code::INVALID_ARGUMENT));
    assert_untouched(&world, &pod, &daemons, &before, "ids that are none");
    assert_eq!(daemons.ledger().unwrap().iter().filter(|entry| !entry.is_tombstone()).count(), 0);
}

#[tokio::test]
async fn a_missing_pod_name_and_invalid_numbers_are_named() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let pod = world.pod().unwrap();
    let shim = daemons.shim().await.unwrap();
    const NAME: &str = "io.kubernetes.cri.sandbox-name";
    const VCPUS: &str = "io.katacontainers.config.hypervisor.default_vcpus";
    let fine = || Annotations::new("default", "pod");
    for (annotations, named) in [
        (fine().raw(NAME, Some("")), NAME),
        (fine().raw(NAME, None), NAME),
        (fine().raw(VCPUS, Some("many")), VCPUS),
        (fine().raw(VCPUS, Some("-1")), VCPUS),
        (fine().raw("io.katacontainers.config.hypervisor.default_memory", Some("1e99")), "default_memory"),
    ] {
        let answer = shim.create_vm(&fresh_id("bad"), annotations, &pod.namespace().path()).await;
        let error = answer.unwrap_err();
        assert_eq!(error.code(), Some(Code::INVALID_ARGUMENT), "{error}");
        assert!(error.answer().contains(named), "{error} names {named}");
    }
    assert!(daemons.ledger().unwrap().is_empty());
}

#[tokio::test]
async fn a_path_that_is_no_network_namespace_is_refused() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let shim = daemons.shim().await.unwrap();
    let fifo = world.folder().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let relative = PathBuf::from("relative/path");
    for path in [
        Path::new(""),
        Path::new("/nonexistent"),
        Path::new("/etc/passwd"),
        Path::new("/etc"),
        Path::new("/proc/self/ns/uts"),
        &fifo,
        &relative,
    ] {
        let began = Instant::now();
        let id = fresh_id("netns");
        // Refused at once, or at StartVM, which then fails at once.
        let outcome = match create(&shim, &id, path).await {
            Ok(_) => shim.start_vm(&id).await,
            Err(error) => Err(error),
        };
        let error = outcome.expect_err(&path.display().to_string());
        assert!(error.answer().contains("namespace"), "{}: {error}", path.display());
        assert!(began.elapsed() < PATIENCE, "{}: {:?}", path.display(), began.elapsed());
    }
    eventually("nothing lives", PATIENCE, async || {
        daemons.ledger().ok()?.iter().all(|entry| entry.is_tombstone()).then_some(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_network_namespace_that_vanishes_between_the_calls_ends_the_start() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let before = Sight::of(&world, &[], &daemons).unwrap();
    let pod = world.pod().unwrap();
    let shim = daemons.shim().await.unwrap();
    let id = fresh_id("vanishing");
    create(&shim, &id, &pod.namespace().path()).await.unwrap();
    drop(pod);
    let error = tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap_err();
    assert!(error.answer().contains("namespace"), "{error}");
    stop_in_time(&shim, &id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
    nothing_beyond(&world, &[], &daemons, &before, &before).await.unwrap();
}

#[tokio::test]
async fn two_sandboxes_cannot_have_one_network_namespace() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let first = Sandbox::start(&world, &daemons, "first").await.unwrap();
    let second = fresh_id("second");
    let netns = first.pod.namespace().path();
    let error = create(&first.shim, &second, &netns).await.unwrap_err();
    assert!(error.answer().contains(&first.id), "{error} names the other");
    first.lives().await.unwrap();
    stop_in_time(&first.shim, &first.id).await.unwrap();
    daemons.gone(&first.id, PATIENCE).await.unwrap();
    // The namespace is free again.
    create(&first.shim, &second, &netns).await.unwrap();
    first.shim.start_vm(&second).await.unwrap();
    stop_in_time(&first.shim, &second).await.unwrap();
    daemons.gone(&second, PATIENCE).await.unwrap();
}

/// Returns invalid input for a ttrpc socket, one piece per connection.
fn garbage(dice: &mut Dice) -> Vec<Vec<u8>> {
    let noise: Vec<u8> = (0..4096).map(|_| dice.roll(256) as u8).collect();
    vec![
        noise.clone(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        frame(0, 1, 1, &[]),                    // an empty request
        frame(noise.len(), 1, 1, &noise),       // an invalid request
        frame(noise.len(), 0, 1, &noise),       // stream 0
        frame(noise.len(), 2, 2, &noise),       // a response without a request
        frame(noise.len(), 3, 3, &noise),       // data without a stream
        frame(noise.len(), 5, 99, &noise),      // an unknown type
        frame(u32::MAX as usize, 1, 1, &noise), // 4 GiB announced
        frame(4 << 20, 1, 1, &noise),           // 4 MiB announced, 4 KiB sent
        frame(1000, 1, 1, &noise[..10]),        // the beginning of a frame
        vec![0; 3],                             // the beginning of a header
    ]
}

#[tokio::test]
async fn garbage_on_either_socket_affects_only_its_sender() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "garbage").await.unwrap();
    let before = Sight::of(&world, &[sandbox.pod.namespace()], &daemons).unwrap();
    let guests = before.pids("peerpod-guest");
    assert!(!guests.is_empty());
    let mut dice = Dice(3);
    for socket in [daemons.hypervisor_socket(), sandbox.socket.clone()] {
        for bytes in garbage(&mut dice) {
            for hold in [false, true] {
                let mut stream = UnixStream::connect(&socket).await.unwrap();
                // The relay may close the connection in the middle.
                drop(stream.write_all(&bytes).await);
                if hold {
                    // With any response or none, the open connection must not affect others.
                    let mut answer = [0; 256];
                    drop(tokio::time::timeout(Duration::from_millis(50), stream.read(&mut answer)).await);
                }
            }
        }
    }
    sandbox.agent.check().await.unwrap();
    // No program was restarted and no connection made again: the session is the same.
    assert_eq!(before.pids("peerpod-guest"), guests, "the guest's program is another one");
    let metrics = daemons.metrics("relay").unwrap();
    for name in ["sessions_lost", "reconnects", "panics"] {
        assert_eq!(sample(&metrics, &format!("peerpod_relay_{name}_total")).unwrap(), 0.0, "{name}");
    }
    sandbox.shim.version().await.unwrap();
    sandbox.agent.check().await.unwrap();
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn an_oversize_frame_is_answered_and_the_connection_goes_on() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "oversize").await.unwrap();
    for (socket, service, method) in [
        (daemons.hypervisor_socket(), "hypervisor.Hypervisor", "Version"),
        (sandbox.socket.clone(), "grpc.Health", "Check"),
    ] {
        let mut stream = UnixStream::connect(&socket).await.unwrap();
        let size = (4 << 20) + 1;
        stream.write_all(&frame(size, 7, 1, &[])).await.unwrap();
        let body = vec![7; 1 << 20];
        for _ in 0..4 {
            stream.write_all(&body).await.unwrap();
        }
        stream.write_all(&[7]).await.unwrap();
        let (id, answer) = tokio::time::timeout(PATIENCE, response(&mut stream)).await.unwrap().unwrap();
        assert_eq!((id, answer.status.code), (7, 3), "{answer}");
        let expected = format!("message length {size} exceed maximum message size of 4194304");
        assert!(answer.status.message.contains(&expected), "{answer}");
        stream.write_all(&request(9, service, method, &peerpod_proto::agent::Empty::new())).await.unwrap();
        let (id, answer) = tokio::time::timeout(PATIENCE, response(&mut stream)).await.unwrap().unwrap();
        assert_eq!((id, answer.status.code), (9, 0), "{answer}");
    }
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_announcements_cost_no_memory() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "announce").await.unwrap();
    let relay = daemons.relay_pid().unwrap();
    let idle = resident(relay).unwrap();
    // Without some that the start of the sandbox had open, and that are closed since.
    let descriptors = fs::read_dir(format!("/proc/{relay}/fd")).unwrap().count().saturating_sub(20);
    for socket in [daemons.hypervisor_socket(), sandbox.socket.clone()] {
        let mut streams = Vec::new();
        for _ in 0..500 {
            let mut stream = UnixStream::connect(&socket).await.unwrap();
            stream.write_all(&frame(4 << 20, 1, 1, &[])).await.unwrap();
            streams.push(stream);
        }
        // The relay accepts all of them and waits for the announced bytes.
        let open = eventually("the relay holds 500 connections", PATIENCE, async || {
            let open = fs::read_dir(format!("/proc/{relay}/fd")).ok()?.count();
            (open >= descriptors + 500).then_some(open)
        });
        let open = open.await.unwrap();
        let mut peak = 0;
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            peak = peak.max(resident(relay).unwrap());
            sandbox.agent.check().await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let now = resident(relay).unwrap();
        println!("idle {idle}, at most {peak}, after 5 s {now} bytes with {open} descriptors");
        assert!(now < 2 * idle, "{now} bytes, {peak} at most, {idle} when idle");
        assert!(fs::read_dir(format!("/proc/{relay}/fd")).unwrap().count() >= descriptors + 500);
        drop(streams);
        eventually("the relay lets go of them", PATIENCE, async || {
            let open = fs::read_dir(format!("/proc/{relay}/fd")).ok()?.count();
            (open < descriptors + 70).then_some(())
        })
        .await
        .unwrap();
    }
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_thousand_unanswered_calls_are_carried() {
    const CALLS: u32 = 20_000;
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "unanswered").await.unwrap();
    let mut wait = WaitProcessRequest::new();
    wait.container_id = CONTAINER.into();
    let mut stream = UnixStream::connect(&sandbox.socket).await.unwrap();
    for call in 0..CALLS {
        stream.write_all(&request(2 * call + 1, "grpc.AgentService", "WaitProcess", &wait)).await.unwrap();
    }
    let began = Instant::now();
    sandbox.agent.check().await.unwrap();
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    sandbox.lives().await.unwrap();
    assert!(resident(daemons.relay_pid().unwrap()).unwrap() < 128 << 20);
    // Each of them gets a response once the process has ended.
    sandbox.agent.signal_process(CONTAINER, "", 9).await.unwrap();
    for _ in 0..CALLS {
        let (_, answer) = tokio::time::timeout(PATIENCE, response(&mut stream)).await.unwrap().unwrap();
        assert_eq!(answer.status.code, 0, "{answer}");
    }
    drop(stream);
    sandbox.agent.check().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_and_a_reader_that_never_reads_do_not_delay_a_health_check() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "flood").await.unwrap();
    let (_, calm, _) = health_checks(&sandbox, 100).await;
    // A flood of output with a reader that is as fast as it can be …
    let flood = exec_request(CONTAINER, "flood", &["yes", "a line of the flood of output"]);
    sandbox.agent.exec_process(&flood).await.unwrap();
    let reads = Arc::new(AtomicUsize::new(0));
    let reader = tokio::spawn({
        let agent = AgentClient::connect(&sandbox.socket).await.unwrap();
        let reads = reads.clone();
        async move {
            while agent.read_stdout(CONTAINER, "flood", 65_536).await.is_ok() {
                reads.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    // … and one with responses that are never read.
    let stuck = exec_request(CONTAINER, "stuck", &["yes", "a line that nobody reads"]);
    sandbox.agent.exec_process(&stuck).await.unwrap();
    let mut never = UnixStream::connect(&sandbox.socket).await.unwrap();
    let mut read = ReadStreamRequest::new();
    (read.container_id, read.exec_id, read.len) = (CONTAINER.into(), "stuck".into(), 1 << 20);
    for call in 0..64 {
        never.write_all(&request(2 * call + 1, "grpc.AgentService", "ReadStdout", &read)).await.unwrap();
    }
    let (p50, p99, worst) = health_checks(&sandbox, 300).await;
    println!("p50 {p50:?}, p99 {p99:?}, worst {worst:?}; without a flood p99 {calm:?}");
    // The flood gets its share of the processor, and no more.
    let words = format!("p50 {p50:?}, p99 {p99:?}, worst {worst:?}; without a flood p99 {calm:?}");
    assert!(p99 < Duration::from_secs(1).max(20 * calm), "{words}");
    // The median is not late on any machine unless the flood delays it.
    assert!(p50 < Duration::from_millis(100).max(5 * calm), "{words}");
    assert!(!reader.is_finished(), "the flood went on");
    assert!(reads.load(Ordering::Relaxed) > 100, "and was one: {reads:?} reads");
    reader.abort();
    drop(never);
    sandbox.stop(&daemons).await.unwrap();
}

/// Returns the median, the 99th percentile and the maximum of the durations of health checks.
async fn health_checks(sandbox: &Sandbox, count: usize) -> (Duration, Duration, Duration) {
    let mut times = Vec::new();
    for _ in 0..count {
        let began = Instant::now();
        sandbox.agent.check().await.unwrap();
        times.push(began.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    times.sort_unstable();
    (times[count / 2], times[count * 99 / 100], times[count - 1])
}

#[test]
fn all_five_mistakes_of_a_configuration_are_reported() {
    let folder = std::env::temp_dir().join(format!("peerpod-mistakes-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let config = folder.join("peerpod.yaml");
    fs::write(
        &config,
        "paths:\n  run-dir: relative\nlog:\n  level: loud\nnode:\n  ticket-ttl: 5\n  no-such-key: 1\ntunnel:\n  port: 70000\nprovider:\n  kind: local\n",
    )
    .unwrap();
    let output = Command::new(binary("peerpod-node").unwrap()).arg("--config").arg(&config).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{told}");
    for key in ["paths.run-dir", "log.level", "node.ticket-ttl", "node.no-such-key", "tunnel.port"] {
        assert!(told.contains(key), "{key} is named:\n{told}");
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[tokio::test]
async fn a_full_state_folder_prevents_the_start() {
    let world = World::new().unwrap();
    let state = world.folder().join("state");
    fs::create_dir_all(&state).unwrap();
    let mount = |program: &str, arguments: &[&str], path: &Path| {
        let done = Command::new(program).args(arguments).arg(path).status().unwrap();
        assert!(done.success(), "{program} {arguments:?}");
    };
    mount("mount", &["-t", "tmpfs", "-o", "size=2m,mode=0700", "none"], &state);
    // All rights, because a mount that is made below a volume later does not reach a container.
    let daemons = Daemons::start(&world, Settings::privileged()).await.unwrap();
    let pod = world.pod().unwrap();
    let shim = daemons.shim().await.unwrap();
    let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();

    // Full to the last byte.
    let filler = state.join("filler");
    let mut size = 2 << 20;
    while size > 0 {
        let mut bytes = fs::read(&filler).unwrap_or_default();
        bytes.resize(bytes.len() + size, 0);
        if fs::write(&filler, &bytes).is_err() {
            bytes.truncate(bytes.len() - size);
            drop(fs::write(&filler, &bytes));
            size /= 2;
        }
    }
    let error = create(&shim, &fresh_id("full"), &pod.namespace().path()).await.unwrap_err();
    assert!(error.answer().contains("space"), "{error}");
    assert_untouched(&world, &pod, &daemons, &before, "a full state directory");
    fs::remove_file(&filler).unwrap();

    // A file system cannot become read-only while a file is open for writing; a bind mount of the records can.
    let records = state.join("sandboxes");
    mount("mount", &["--bind", records.to_str().unwrap()], &records);
    mount("mount", &["-o", "remount,bind,ro"], &records);
    let error = create(&shim, &fresh_id("read-only"), &pod.namespace().path()).await.unwrap_err();
    assert!(error.answer().to_lowercase().contains("read-only"), "{error}");
    mount("umount", &[], &records);
    assert_untouched(&world, &pod, &daemons, &before, "records that cannot be written");

    // With free space again it works again, which the witness sees.
    let sandbox = Sandbox::start(&world, &daemons, "room").await.unwrap();
    let metrics = daemons.metrics("node").unwrap();
    assert!(metrics.contains("operation=\"create\""), "{metrics}");
    let there = Sight::of(&world, &[], &daemons).unwrap().beyond(&before, None);
    assert!(there.len() > 5, "{there:?}");
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn a_broken_or_newer_record_is_set_aside_and_the_others_run() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let kept = Sandbox::start(&world, &daemons, "kept").await.unwrap();
    let broken = Sandbox::start(&world, &daemons, "broken").await.unwrap();
    daemons.kill_node().unwrap();
    let (log, state) = (daemons.log("node"), daemons.state_dir());
    let file = |id: &str| state.join(format!("sandboxes/{id}.json"));
    let whole = fs::read(file(&broken.id)).unwrap();
    fs::write(file(&broken.id), &whole[..whole.len() / 2]).unwrap();
    let newer = String::from_utf8(whole.clone()).unwrap().replacen("\"version\":1", "\"version\":99", 1);
    let newer = newer.replacen("\"version\": 1", "\"version\": 99", 1).replace(&broken.id, "newer-1");
    fs::write(file("newer-1"), newer).unwrap();
    fs::write(file("empty-1"), "").unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    kept.lives().await.unwrap();
    let quarantined = || {
        let listing = fs::read_dir(state.join("quarantine")).unwrap().flatten();
        listing.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    eventually("three records are in quarantine", PATIENCE, async || {
        (quarantined().len() >= 3).then_some(())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}: {:?}", quarantined()));
    let log = fs::read_to_string(&log).unwrap();
    for id in [&broken.id, "newer-1", "empty-1"] {
        assert!(log.contains(id), "{id} is reported");
    }
    // Nothing was lost with it: the node resumes it once the record is complete again.
    daemons.kill_node().unwrap();
    fs::write(file(&broken.id), &whole).unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    broken.lives().await.unwrap();
    broken.stop(&daemons).await.unwrap();
    kept.stop(&daemons).await.unwrap();
}
