//! Tests failures of the link between relay and guest.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use peerpod_client::{Output, exec_request};
use peerpod_tests::{CONTAINER, PATIENCE, Sandbox, long, sample, stop_in_time};
use peerpod_world::proxy::Proxy;
use peerpod_world::{Daemons, Settings, Sight, World, eventually, stages};

/// Starts daemons with guests that connect through a proxy.
async fn with_proxy(world: &World) -> (Daemons, Arc<Proxy>) {
    let relay: SocketAddr = "127.0.0.1:15151".parse().unwrap();
    let proxy = Arc::new(Proxy::start(world.node(), 25_151, relay).unwrap());
    let settings = Settings::none().set("node.relay-addresses", vec!["10.99.0.1:25151"]);
    (Daemons::start(world, settings).await.unwrap(), proxy)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_cut_many_times_loses_and_doubles_nothing() {
    let (cuts_made, total): (u64, usize) = if long() { (100, 1 << 30) } else { (25, 1 << 28) };
    let world = World::new().unwrap();
    let (daemons, proxy) = with_proxy(&world).await;
    let sandbox = Sandbox::start(&world, &daemons, "cut").await.unwrap();
    assert!(proxy.connections() > 0, "the guest came through the proxy");
    let cuts = Arc::new(AtomicU32::new(0));
    let began = proxy.bytes();
    let cutter = tokio::spawn({
        let (proxy, cuts) = (proxy.clone(), cuts.clone());
        async move {
            // Evenly over the transferred bytes, in both directions, at any point of a record.
            for cut in 1..=cuts_made {
                let next = began + cut * (2 * total as u64 / (cuts_made + 2));
                while proxy.bytes() < next {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                proxy.cut();
                cuts.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let transfer = stages::transfer(&sandbox.agent, CONTAINER, "transfer", total);
    let outcome = tokio::time::timeout(Duration::from_secs(600), transfer).await;
    let stands = || format!("{} cuts, {} bytes", cuts.load(Ordering::Relaxed), proxy.bytes());
    outcome.unwrap_or_else(|_| panic!("{}\n{}", stands(), daemons.log_tails())).unwrap();
    cutter.await.unwrap();
    assert!(proxy.connections() >= cuts_made, "{} connections", proxy.connections());
    // The metrics show it. Two cuts in a row may hit one connection, before there is a new one.
    let metrics = daemons.metrics("relay").unwrap();
    let counted = sample(&metrics, "peerpod_relay_reconnects_total").unwrap();
    let most = proxy.connections() as f64;
    assert!(counted > cuts_made as f64 / 2.0 && counted < most, "{counted} reconnects of {most} connections");
    assert_eq!(sample(&metrics, "peerpod_relay_sessions_lost_total").unwrap(), 0.0);
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

/// Prints numbers until the VM has the file.
const COUNT: &str = "i=0; while [ ! -e /run/enough ]; do i=$((i+1)); echo $i; done; echo end; exit 4";

/// Returns the number of equal bytes before the first different ones.
fn equal<'a>(pairs: impl Iterator<Item = (&'a u8, &'a u8)>) -> usize {
    pairs.take_while(|(one, other)| one == other).count()
}

/// Asserts that this is the output of [`COUNT`] without one answer of the agent at most, which a shim limits to 8 KiB.
fn counts_on(seen: &[u8]) {
    let text = String::from_utf8_lossy(seen);
    let last = text.trim_end().strip_suffix("\nend").and_then(|text| text.rsplit('\n').next());
    let last: u32 = last.unwrap_or_default().parse().unwrap_or_else(|_| panic!("its end: {text}"));
    let all: String = (1..=last).map(|n| format!("{n}\n")).chain(["end\n".to_owned()]).collect();
    let front = equal(all.as_bytes().iter().zip(seen));
    let back = equal(all.as_bytes().iter().rev().zip(seen.iter().rev()));
    assert!(front + back >= seen.len(), "bytes out of order behind {front} of {} bytes", seen.len());
    assert!(all.len() - seen.len() <= 8192, "{} of {} bytes", seen.len(), all.len());
}

#[tokio::test]
async fn a_killed_guest_program_returns_and_no_process_is_lost() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "guest").await.unwrap();
    let oom = tokio::spawn({
        let agent = sandbox.agent.clone();
        async move { agent.oom_event().await }
    });
    let waiting = tokio::spawn({
        let agent = sandbox.agent.clone();
        async move { agent.wait_process(CONTAINER, "").await }
    });
    let exec = |exec: &str, script: &str| {
        let (agent, request) =
            (sandbox.agent.clone(), exec_request(CONTAINER, exec, &["/bin/sh", "-c", script]));
        tokio::spawn(async move { agent.exec(&request).await })
    };
    let counting = exec("count", COUNT);
    let reading = exec("read", "read line; echo $line; echo $line >&2; exit 3");
    sandbox.lives().await.unwrap();
    let sight = Sight::of(&world, &[], &daemons).unwrap();
    let killed = sight.kill("peerpod-guest", "serve").unwrap();
    assert_eq!(killed, 1, "{sight}");
    // A shim ends its pod after one health check with an error.
    sandbox.agent.check().await.unwrap();
    let rejoined = eventually("the node hears of it", PATIENCE, async || {
        let log = std::fs::read_to_string(daemons.log("node")).ok()?;
        log.lines().find(|line| line.contains("the guest rejoined")).map(str::to_owned)
    });
    let rejoined = rejoined.await.unwrap();
    assert!(
        rejoined.contains("lost=\"") && !rejoined.contains("lost=\"\""),
        "what was lost is said: {rejoined}"
    );
    sandbox.lives().await.unwrap();
    // The calls that waited in the agent get their answers now, and each only once.
    sandbox.agent.write_stdin(CONTAINER, "read", b"line\n".to_vec()).await.unwrap();
    let output = tokio::time::timeout(PATIENCE, reading).await.unwrap().unwrap().unwrap();
    let expected = Output { status: 3, stdout: b"line\n".to_vec(), stderr: b"line\n".to_vec() };
    assert_eq!(output, expected);
    sandbox.prints(": > /run/enough").await.unwrap();
    let output = tokio::time::timeout(PATIENCE, counting).await.unwrap().unwrap().unwrap();
    assert_eq!(output.status, 4);
    counts_on(&output.stdout);
    assert!(!oom.is_finished() && !waiting.is_finished(), "long polls go on");
    oom.abort();
    sandbox.agent.signal_process(CONTAINER, "", 9).await.unwrap();
    let status = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(status, 137);
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_relay_ends_only_its_pods() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "relay").await.unwrap();
    daemons.kill_relay().unwrap();
    assert!(sandbox.agent.check().await.is_err());
    daemons.start_relay().unwrap();
    daemons.ready().await.unwrap();
    // The shim's connections are gone with the relay; a clean-up process opens new ones, and a stop still works.
    let shim = daemons.shim().await.unwrap();
    stop_in_time(&shim, &sandbox.id).await.unwrap();
    daemons.gone(&sandbox.id, PATIENCE).await.unwrap();
    let next = Sandbox::start(&world, &daemons, "after").await.unwrap();
    next.stop(&daemons).await.unwrap();
}
