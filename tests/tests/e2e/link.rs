//! Tests failures of the link between relay and guest.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use peerpod_tests::{CONTAINER, PATIENCE, Sandbox, long, sample, stop_in_time};
use peerpod_world::proxy::Proxy;
use peerpod_world::{Daemons, Settings, Sight, World, eventually, stages};
use ttrpc::Code;

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

#[tokio::test]
async fn a_killed_guest_program_returns_and_reports_the_loss() {
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
    sandbox.lives().await.unwrap();
    let sight = Sight::of(&world, &[], &daemons).unwrap();
    let killed = sight.kill("peerpod-guest", "serve").unwrap();
    assert_eq!(killed, 1, "{sight}");
    // In-flight calls get a response, except those that a shim would repeat at once.
    let answer = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap();
    assert_eq!(answer.unwrap_err().code(), Some(Code::UNAVAILABLE));
    eventually("the agent answers again on the shim's old connection", PATIENCE, async || {
        sandbox.agent.check().await.ok()
    })
    .await
    .unwrap();
    sandbox.lives().await.unwrap();
    assert!(!oom.is_finished(), "GetOOMEvent stays pending");
    oom.abort();
    let rejoined = eventually("the node hears of it", PATIENCE, async || {
        let log = std::fs::read_to_string(daemons.log("node")).ok()?;
        log.lines().find(|line| line.contains("the guest rejoined")).map(str::to_owned)
    });
    let rejoined = rejoined.await.unwrap();
    assert!(
        rejoined.contains("lost=\"") && !rejoined.contains("lost=\"\""),
        "what was lost is said: {rejoined}"
    );
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
