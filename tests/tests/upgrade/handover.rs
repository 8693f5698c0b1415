//! Tests the handover from an old relay to a new one. It disturbs no pod, in any state of its shim and its guest, and
//! even if one of the processes dies meanwhile.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use peerpod_client::{AgentClient, Annotations, exec_request};
use peerpod_tests::{
    CONTAINER, Dice, PATIENCE, Sandbox, fresh_id, long, nothing_beyond, sample, stop_in_time, stop_promptly,
};
use peerpod_world::ping::ping;
use peerpod_world::{Daemons, Settings, Sight, World, eventually, eventually_blocking, stages};
use rustix::net;

/// Runs health checks one after another until `ending` is set, and returns the longest duration.
async fn pulse(agent: AgentClient, ending: Arc<AtomicBool>) -> Duration {
    let mut longest = Duration::ZERO;
    while !ending.load(Ordering::Relaxed) {
        let began = Instant::now();
        agent.check().await.unwrap();
        longest = longest.max(began.elapsed());
    }
    longest
}

/// Returns whether a process has ended, reaped or not.
fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.starts_with(" Z"))
}

/// Returns the types of a process's open descriptors.
fn descriptors(pid: u32) -> Vec<String> {
    let mut all: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|link| link.to_string_lossy().split(':').next().unwrap_or_default().to_owned())
        .collect();
    all.sort();
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_replacements_of_a_relay_do_not_disturb_a_transfer_and_execs() {
    const TOTAL: usize = 256 << 20;
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let before = Sight::of(&world, &[], &daemons).unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "upgraded").await.unwrap();
    let running = Sight::of(&world, &[], &daemons).unwrap();
    let oom = tokio::spawn({
        let agent = sandbox.agent.clone();
        async move { agent.oom_event().await }
    });
    let waiting = tokio::spawn({
        let agent = sandbox.agent.clone();
        async move { agent.wait_process(CONTAINER, "").await }
    });
    sandbox.lives().await.unwrap();
    let ending = Arc::new(AtomicBool::new(false));
    let pulse = tokio::spawn(pulse(sandbox.agent.clone(), ending.clone()));
    let mut counted = 0;
    let mut most = Duration::ZERO;
    let mut last = Vec::new();
    for round in 0..if long() { 5 } else { 1 } {
        let transfer = tokio::spawn({
            let agent = sandbox.agent.clone();
            async move { stages::transfer(&agent, CONTAINER, &format!("transfer-{round}"), TOTAL).await }
        });
        for nth in 0..20 {
            assert!(nth > 10 || !transfer.is_finished(), "the transfer is too short to be interrupted");
            let began = Instant::now();
            let status = daemons.take_over().await.unwrap();
            most = most.max(began.elapsed());
            assert!(status.success(), "{status}\n{}", daemons.log_tails());
            counted += 1;
            last = descriptors(daemons.relay_pid().unwrap());
            // The link must be back, or the transfer would not be under way at the next handover.
            eventually("the guest is connected again", PATIENCE, async || {
                let metrics = daemons.metrics("relay").ok()?;
                (sample(&metrics, "peerpod_relay_guests_connected").ok()? == 1.0).then_some(())
            })
            .await
            .unwrap();
        }
        let ended = tokio::time::timeout(Duration::from_secs(300), transfer).await;
        ended.unwrap_or_else(|_| panic!("{}", daemons.log_tails())).unwrap().unwrap();
    }
    ending.store(true, Ordering::Relaxed);
    let longest = pulse.await.unwrap();
    println!(
        "{counted} handovers; the longest health check of a shim took {longest:?}, start to leave at most {most:?}"
    );
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    sandbox.lives().await.unwrap();
    assert!(!oom.is_finished() && !waiting.is_finished(), "long polls go on");
    sandbox.agent.signal_process(CONTAINER, "", 9).await.unwrap();
    let status = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(status, 137, "the answer reaches who asked twenty relays ago");
    oom.abort();
    let now = descriptors(daemons.relay_pid().unwrap());
    assert!(now.len() <= last.len() + 4, "descriptors pile up: {last:?}, then {now:?}");
    stop_promptly(&sandbox.shim, &sandbox.id).await.unwrap();
    daemons.gone(&sandbox.id, PATIENCE).await.unwrap();
    drop(sandbox);
    nothing_beyond(&world, &[], &daemons, &before, &running).await.unwrap();
}

/// The relay of an older release had all of the state folder and all of kubelet's folder.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_with_fewer_files_takes_over() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::prepare(&world, Settings::none()).unwrap();
    daemons.start_relay_with_all_rights().unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "older").await.unwrap();
    for _ in 0..2 {
        daemons.take_over().await.unwrap();
        sandbox.lives().await.unwrap();
    }
    sandbox.stop(&daemons).await.unwrap();
}

/// A relay that has just taken over has as many descriptors as one several handovers later.
#[tokio::test(flavor = "multi_thread")]
async fn handovers_leak_no_descriptor() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "fds").await.unwrap();
    let mut seen = Vec::new();
    for _ in 0..6 {
        daemons.take_over().await.unwrap();
        eventually("shim and guest are served", PATIENCE, async || sandbox.agent.check().await.ok())
            .await
            .unwrap();
        seen.push(descriptors(daemons.relay_pid().unwrap()));
    }
    let (first, last) = (&seen[1], &seen[5]);
    assert!(last.len() <= first.len() + 1, "{first:?}\n{last:?}");
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_starts_while_relays_change_is_started() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("provider.local.boot-delay", "700ms");
    let mut daemons = Daemons::start(&world, settings).await.unwrap();
    let mut dice = Dice(5);
    for round in 0..if long() { 40 } else { 8 } {
        let pod = world.pod().unwrap();
        let (id, shim) = (fresh_id("starting"), daemons.shim().await.unwrap());
        let start = tokio::spawn({
            let (id, shim, netns) = (id.clone(), shim.clone(), pod.namespace().path());
            async move {
                let socket = shim.create_vm(&id, Annotations::new("default", &id), &netns).await?;
                shim.start_vm(&id).await.map(|()| socket)
            }
        });
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(dice.roll(500))).await;
            daemons.take_over().await.unwrap_or_else(|error| panic!("round {round}: {error:#}"));
        }
        let answered = tokio::time::timeout(PATIENCE, start).await;
        let socket = answered.unwrap_or_else(|_| panic!("round {round}\n{}", daemons.log_tails())).unwrap();
        let socket = socket.unwrap_or_else(|error| panic!("round {round}: {error}\n{}", daemons.log_tails()));
        let agent = AgentClient::connect(&socket).await.unwrap();
        agent.check().await.unwrap();
        stop_in_time(&shim, &id).await.unwrap();
        daemons.gone(&id, PATIENCE).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_wait_for_a_dead_node_wait_on_in_the_next_relay() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let running = Sandbox::start(&world, &daemons, "running").await.unwrap();
    daemons.kill_node().unwrap();
    let (waiting, pod) = (fresh_id("waiting"), world.pod().unwrap());
    let shim = daemons.shim().await.unwrap();
    let start = tokio::spawn({
        let (id, shim, netns) = (waiting.clone(), shim.clone(), pod.namespace().path());
        async move {
            let (created, started) = tokio::join!(
                biased;
                shim.create_vm(&id, Annotations::new("default", &id), &netns),
                shim.start_vm(&id)
            );
            started.and(created)
        }
    });
    let queued = |daemons: &Daemons| {
        let metrics = daemons.metrics("relay").ok()?;
        (sample(&metrics, "peerpod_relay_queued_calls").ok()? == 2.0).then_some(())
    };
    eventually("both calls wait in the relay", PATIENCE, async || queued(&daemons)).await.unwrap();
    for _ in 0..3 {
        daemons.take_over().await.unwrap();
        eventually("they wait in the next one", PATIENCE, async || queued(&daemons)).await.unwrap();
        running.lives().await.unwrap();
    }
    // A stop without a node goes to the inbox, and later calls of that sandbox wait for it.
    stop_in_time(&running.shim, &running.id).await.unwrap();
    daemons.take_over().await.unwrap();
    stop_in_time(&running.shim, &running.id).await.unwrap();
    assert!(!start.is_finished());
    daemons.start_node().unwrap();
    let socket = tokio::time::timeout(PATIENCE, start).await.unwrap().unwrap().unwrap();
    AgentClient::connect(&socket).await.unwrap().check().await.unwrap();
    daemons.gone(&running.id, PATIENCE).await.unwrap();
    stop_in_time(&shim, &waiting).await.unwrap();
    daemons.gone(&waiting, PATIENCE).await.unwrap();
}

/// Peer in a handover, under the test's control.
struct Asker(OwnedFd);

impl Asker {
    fn connect(daemons: &Daemons) -> Asker {
        let kind = net::SocketType::SEQPACKET;
        let socket =
            net::socket_with(net::AddressFamily::UNIX, kind, net::SocketFlags::CLOEXEC, None).unwrap();
        let path = daemons.run_dir().join("takeover.sock");
        net::connect(&socket, &net::SocketAddrUnix::new(path).unwrap()).unwrap();
        let patience = Some(PATIENCE);
        net::sockopt::set_socket_timeout(&socket, net::sockopt::Timeout::Recv, patience).unwrap();
        Asker(socket)
    }

    fn say(&self, what: u8, body: &str) {
        let mut control = net::SendAncillaryBuffer::new(&mut []);
        let message = [IoSlice::new(std::slice::from_ref(&what)), IoSlice::new(body.as_bytes())];
        net::sendmsg(&self.0, &message, &mut control, net::SendFlags::NOSIGNAL).unwrap();
    }

    fn hello(&self, oldest: u32, newest: u32) {
        self.say(1, &format!(r#"{{"pid":1,"program":"test","versions":[{oldest},{newest}]}}"#));
    }

    /// Returns type and text of the next message; closes its descriptors.
    fn hear(&self) -> Option<(u8, String)> {
        self.hear_all().map(|(kind, text, _)| (kind, text))
    }

    fn hear_all(&self) -> Option<(u8, String, Vec<OwnedFd>)> {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = net::RecvAncillaryBuffer::new(&mut room);
        let mut bytes = vec![0; 64 << 10];
        let flags = net::RecvFlags::CMSG_CLOEXEC;
        let got =
            net::recvmsg(self.0.as_fd(), &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).unwrap();
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let net::RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        let text = String::from_utf8_lossy(bytes.get(1..got.bytes)?).into_owned();
        Some((bytes[0], text, descriptors))
    }

    fn pass_on(&self, (kind, text, descriptors): (u8, String, Vec<OwnedFd>)) {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = net::SendAncillaryBuffer::new(&mut room);
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        if !descriptors.is_empty() {
            assert!(control.push(net::SendAncillaryMessage::ScmRights(&descriptors)));
        }
        let message = [IoSlice::new(std::slice::from_ref(&kind)), IoSlice::new(text.as_bytes())];
        net::sendmsg(&self.0, &message, &mut control, net::SendFlags::NOSIGNAL).unwrap();
    }
}

/// Interposes the test between the running relay and a new one, and returns both ends.
fn between(daemons: &Daemons) -> (Asker, Asker, Child) {
    let (name, aside) = (daemons.run_dir().join("takeover.sock"), daemons.run_dir().join("aside.sock"));
    let old = Asker::connect(daemons);
    std::fs::rename(&name, &aside).unwrap();
    let kind = net::SocketType::SEQPACKET;
    let ours = net::socket_with(net::AddressFamily::UNIX, kind, net::SocketFlags::CLOEXEC, None).unwrap();
    net::bind(&ours, &net::SocketAddrUnix::new(&name).unwrap()).unwrap();
    net::listen(&ours, 1).unwrap();
    let child = daemons.relay_beside().unwrap();
    let new = Asker(net::accept_with(&ours, net::SocketFlags::CLOEXEC).unwrap());
    std::fs::rename(&aside, &name).unwrap();
    net::sockopt::set_socket_timeout(&new.0, net::sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
    (old, new, child)
}

/// Forwards the handover from Hello up to the new relay's Taken, but at most `most` messages of the old relay. Returns
/// whether it got that far.
fn until_taken(old: &Asker, new: &Asker, most: usize) -> bool {
    old.pass_on(new.hear_all().unwrap());
    for _ in 0..most {
        let message = old.hear_all().unwrap();
        let kind = message.0;
        assert_ne!(kind, 3, "{}", message.1);
        new.pass_on(message);
        if kind == 7 {
            assert_eq!(new.hear().unwrap().0, 8);
            return true;
        }
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_relay_killed_before_it_confirms_is_replaced() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "old").await.unwrap();
    for _ in 0..5 {
        let (old, new, child) = between(&daemons);
        assert!(until_taken(&old, &new, usize::MAX));
        daemons.kill_relay().unwrap();
        drop((old, new));
        daemons.adopt_relay(child).unwrap();
        let lives = tokio::time::timeout(PATIENCE, sandbox.lives()).await;
        lives.unwrap_or_else(|_| panic!("{}", daemons.log_tails())).unwrap();
        daemons.take_over().await.unwrap();
        sandbox.lives().await.unwrap();
    }
    sandbox.stop(&daemons).await.unwrap();
}

fn terminate(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_old_relay_waits_for_the_new_one() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "stopped").await.unwrap();
    let (old, new, child) = between(&daemons);
    assert!(until_taken(&old, &new, usize::MAX));
    terminate(daemons.relay_pid().unwrap());
    old.say(8, "null");
    assert_eq!(old.hear().unwrap().0, 9);
    new.say(9, "{}");
    assert!(daemons.taken_over_by(child).await.unwrap().success());
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_old_relay_cancels_the_handover() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let (old, new, mut child) = between(&daemons);
    assert!(until_taken(&old, &new, usize::MAX));
    terminate(daemons.relay_pid().unwrap());
    // The old relay never receives Taken, and gives up.
    let (what, why) = old.hear().unwrap();
    assert_eq!(what, 3, "{why}");
    new.say(3, &why);
    let ended = eventually("the new one gives up", PATIENCE, async || child.try_wait().unwrap());
    assert!(!ended.await.unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_relay_without_a_confirmation_does_not_take_over() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "unsure").await.unwrap();
    // Taken is lost although the old relay lives; the connection breaks after some messages, and after the first one.
    for most in [usize::MAX, 3, 1] {
        let (old, new, mut child) = between(&daemons);
        assert_eq!(until_taken(&old, &new, most), most == usize::MAX);
        drop((old, new));
        let ended = eventually("the new one gives up", PATIENCE, async || child.try_wait().unwrap());
        assert!(!ended.await.unwrap().success());
        sandbox.lives().await.unwrap();
    }
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_encrypted_tunnel_goes_on_without_a_node() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none().set("tunnel.kind", "wireguard")).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "encrypted").await.unwrap();
    ping(other.namespace(), sandbox.pod.addresses()[0], 56, PATIENCE).unwrap();
    daemons.kill_node().unwrap();
    for round in 0..3 {
        daemons.take_over().await.unwrap();
        for address in sandbox.pod.addresses() {
            let began = Instant::now();
            ping(other.namespace(), address, 56, PATIENCE).unwrap();
            println!("round {round}: the first answer after {:?}", began.elapsed());
        }
    }
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    ping(other.namespace(), sandbox.pod.addresses()[0], 56, PATIENCE).unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_goes_on_whenever_the_next_one_dies_or_falls_silent() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "stays").await.unwrap();
    let pid = daemons.relay_pid();
    let ending = Arc::new(AtomicBool::new(false));
    let transfers = tokio::spawn({
        let (agent, ending) = (sandbox.agent.clone(), ending.clone());
        async move {
            let mut round = 0;
            while !ending.load(Ordering::Relaxed) {
                stages::transfer(&agent, CONTAINER, &format!("t{round}"), 8 << 20).await?;
                round += 1;
            }
            anyhow::Ok(round)
        }
    });
    // After each message, up to the last.
    let mut messages = 0;
    'dying: for heard in 0.. {
        let asker = Asker::connect(&daemons);
        asker.hello(1, 1);
        for _ in 0..heard {
            match asker.hear() {
                Some((7, _)) => break 'dying,
                Some((3, why)) => panic!("{why}"),
                Some(_) => {}
                None => panic!("the relay closed the connection\n{}", daemons.log_tails()),
            }
        }
        drop(asker);
        messages = heard;
        sandbox.lives().await.unwrap();
    }
    assert!(messages > 5, "{messages} messages");
    // Silent, in the middle and at the end, until the time limit.
    let asker = eventually_blocking("the relay has noticed the end of the last one", PATIENCE, || {
        let asker = Asker::connect(&daemons);
        asker.hello(1, 1);
        (asker.hear()?.0 == 2).then_some(asker)
    });
    let asker = asker.unwrap();
    let other = Asker::connect(&daemons);
    other.hello(1, 1);
    let (kind, why) = other.hear().unwrap();
    assert!(kind == 3 && why.contains("another handover is under way"), "{why}");
    let late = tokio::task::spawn_blocking(move || {
        loop {
            match asker.hear() {
                Some((3, why)) => return why,
                Some((9, _)) => panic!("handed over to nobody"),
                Some(_) => {}
                None => panic!("closed without a word"),
            }
        }
    });
    let why = late.await.unwrap();
    assert!(why.contains("had not taken over"), "{why}");
    sandbox.lives().await.unwrap();
    ending.store(true, Ordering::Relaxed);
    assert!(transfers.await.unwrap().unwrap() > 0);
    assert_eq!(daemons.relay_pid(), pid);
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_of_another_version_gets_the_remedy_and_unknown_messages_are_ignored() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "version").await.unwrap();
    for versions in [(2, 7), (0, 0)] {
        let asker = Asker::connect(&daemons);
        asker.hello(versions.0, versions.1);
        let (kind, why) = asker.hear().unwrap();
        assert!(kind == 3 && why.contains("version 1 to 1") && why.contains("upgrade by way of"), "{why}");
    }
    for (what, body) in [(8, "null"), (9, "{}"), (1, "{"), (1, "{}"), (77, ""), (4, "{}")] {
        let asker = Asker::connect(&daemons);
        asker.say(what, body);
        assert_eq!(asker.hear().unwrap().0, 3, "{what} {body}");
    }
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_relay_killed_before_the_handover_changes_nothing() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let mut sandbox = Sandbox::start(&world, &daemons, "killed").await.unwrap();
    let mut dice = Dice(23);
    let (mut before, mut after) = (0, 0);
    for round in 0..if long() { 200 } else { 40 } {
        let mut new = daemons.relay_beside().unwrap();
        tokio::time::sleep(Duration::from_millis(dice.roll(24))).await;
        new.kill().unwrap();
        new.wait().unwrap();
        // Either the pod continues, or the old relay had handed it over and exits.
        let lives = tokio::time::timeout(PATIENCE, sandbox.lives()).await;
        let lives = lives.unwrap_or_else(|_| panic!("round {round}\n{}", daemons.log_tails()));
        if let Err(error) = lives {
            let left = eventually("the old relay leaves", Duration::from_secs(5), async || {
                has_ended(daemons.relay_pid().unwrap()).then_some(())
            });
            left.await.unwrap_or_else(|_| panic!("round {round}: {error:#}\n{}", daemons.log_tails()));
            after += 1;
            daemons.kill_relay().unwrap();
            daemons.start_relay().unwrap();
            daemons.ready().await.unwrap();
            let shim = daemons.shim().await.unwrap();
            stop_in_time(&shim, &sandbox.id).await.unwrap();
            daemons.gone(&sandbox.id, PATIENCE).await.unwrap();
            sandbox = Sandbox::start(&world, &daemons, "killed").await.unwrap();
        } else {
            before += 1;
        }
    }
    println!("killed {before} times before it had taken over, {after} times after that");
    assert!(before > 0);
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_new_relays_at_once_leave_one_relay() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "two").await.unwrap();
    for _ in 0..if long() { 20 } else { 4 } {
        let (one, mut two) = (daemons.relay_beside().unwrap(), daemons.relay_beside().unwrap());
        let mut one = one;
        // One relay is left at the end: the other was refused, or it took over first and was then replaced itself.
        let left = eventually("one of three is left", PATIENCE, async || {
            let gone = [one.try_wait(), two.try_wait()].map(|status| status.ok().flatten().is_some());
            let old = daemons.relay_pid().map(has_ended);
            match (gone, old) {
                ([false, true], Some(true)) => Some(false),
                ([true, false], Some(true)) => Some(true),
                _ => None,
            }
        });
        let second = left.await.unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
        let new = if second { two } else { one };
        daemons.taken_over_by(new).await.unwrap();
        sandbox.lives().await.unwrap();
    }
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frame_split_by_a_handover_stays_one_frame() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "halves").await.unwrap();
    // The requests of Version and Check have the same form on both sockets: an envelope of service and method.
    let envelope = |service: &str, method: &str| {
        let (s, m) = (service.as_bytes(), method.as_bytes());
        let body = [&[0x0a, s.len() as u8], s, &[0x12, m.len() as u8], m].concat();
        [&(body.len() as u32).to_be_bytes()[..], &1u32.to_be_bytes(), &[1, 0], &body].concat()
    };
    for (path, frame) in [
        (daemons.hypervisor_socket(), envelope("hypervisor.Hypervisor", "Version")),
        (sandbox.socket.clone(), envelope("grpc.Health", "Check")),
    ] {
        let mut whole = Vec::new();
        for cut in 0..frame.len() {
            if cut > 12 && cut % 7 != 0 {
                continue;
            }
            let mut shim = tokio::net::UnixStream::connect(&path).await.unwrap();
            shim.write_all(&frame[..cut]).await.unwrap();
            daemons.take_over().await.unwrap();
            shim.write_all(&frame[cut..]).await.unwrap();
            let mut answer = [0; 10];
            let read = tokio::time::timeout(PATIENCE, shim.read_exact(&mut answer)).await;
            read.unwrap_or_else(|_| panic!("cut at {cut}\n{}", daemons.log_tails())).unwrap();
            assert_eq!(answer[4..9], [0, 0, 0, 1, 2], "cut at {cut}: {answer:?}");
            whole.push(answer);
        }
    }
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exec_streams_through_handovers_without_a_gap() {
    const NUMBERS: usize = 200_000;
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "stream").await.unwrap();
    let expected: String = (1..=NUMBERS).map(|number| format!("{number}\n")).collect();
    let ending = Arc::new(AtomicBool::new(false));
    let streams: Vec<_> = (0..3)
        .map(|index| {
            let (agent, expected, ending) = (sandbox.agent.clone(), expected.clone(), ending.clone());
            tokio::spawn(async move {
                let mut round = 0;
                while !ending.load(Ordering::Relaxed) {
                    let exec =
                        exec_request(CONTAINER, &format!("s{index}-{round}"), &["seq", &NUMBERS.to_string()]);
                    let output = agent.exec(&exec).await.unwrap();
                    assert!(output.status == 0 && output.stdout == expected.as_bytes(), "{index} {round}");
                    round += 1;
                }
                round
            })
        })
        .collect();
    for _ in 0..10 {
        daemons.take_over().await.unwrap();
        sandbox.lives().await.unwrap();
        assert!(streams.iter().all(|stream| !stream.is_finished()));
    }
    ending.store(true, Ordering::Relaxed);
    for stream in streams {
        assert!(stream.await.unwrap() > 0);
    }
    sandbox.stop(&daemons).await.unwrap();
}
