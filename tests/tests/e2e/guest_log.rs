//! Tests that the log of a VM appears in the relay's log on its node, with the id of its sandbox.

use super::guest_common;
use std::fs;
use std::time::Duration;

use guest_common::user_data_of;
use peerpod_client::Annotations;
use peerpod_tests::{PATIENCE, Sandbox, fresh_id, sample, vm};
use peerpod_world::{Daemons, Settings, Sight, World, eventually};

/// Returns the lines of the relay's log from this sandbox's VM, once all of `parts` are there.
async fn said(daemons: &Daemons, id: &str, parts: &[&str]) -> Vec<String> {
    let what = format!("the relay's log has, of {id}, {parts:?}");
    let found = eventually(&what, PATIENCE, async || {
        let log = fs::read_to_string(daemons.log("relay")).ok()?;
        let of_it =
            |line: &&str| line.contains("log line of the guest") && line.contains(&format!("sandbox={id} "));
        let lines: Vec<String> = log.lines().filter(of_it).map(str::to_owned).collect();
        parts.iter().all(|part| lines.iter().any(|line| line.contains(part))).then_some(lines)
    });
    found.await.unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()))
}

#[tokio::test]
async fn the_relay_s_log_has_all_lines_of_guest_and_agent_and_no_secret() {
    let world = World::new().unwrap();
    // Long enough to read the VM's user-data.
    let slow = Settings::none().set("provider.local.boot-delay", "1s");
    let daemons = Daemons::start(&world, slow).await.unwrap();
    let (id, pod) = (fresh_id("said"), world.pod().unwrap());
    let shim = daemons.shim().await.unwrap();
    shim.create_vm(&id, Annotations::new("shop", &id), &pod.namespace().path()).await.unwrap();
    let born = user_data_of(&daemons, &id).await;
    tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap();

    // The guest's first lines, from before the link was up; later lines; and the agent's lines.
    let parts = ["from=\"peerpod_guest\"", "the link is up", "from=\"kata-agent\"", "agent listens"];
    let lines = said(&daemons, &id, &parts).await;
    for line in &lines {
        assert!(line.contains(&format!("pod=\"shop/{id}\"")), "{line}");
        assert!(line.contains("guest_level=\"info\"") || !line.contains("agent listens"), "{line}");
    }
    let console = vm::consoles(&daemons);
    assert!(console.contains("agent listens") && console.contains("the link is up"), "{console}");
    let secret = hex::encode(born.ticket.secret.expose());
    for daemon in ["relay", "node"] {
        let log = fs::read_to_string(daemons.log(daemon)).unwrap();
        assert!(!log.contains(&secret) && !log.contains(&secret.to_uppercase()), "{daemon}");
        // As a list of numbers, the debug format of bytes.
        let bytes = format!("{:?}", born.ticket.secret.expose());
        assert!(!log.contains(bytes.trim_matches(['[', ']'])), "{daemon}");
    }
    assert!(!console.contains(&secret));
    let metrics = daemons.metrics("relay").unwrap();
    let written = sample(&metrics, "peerpod_relay_guest_log_lines_total{result=\"written\"}").unwrap();
    assert!(written >= lines.len() as f64, "{written} of {}", lines.len());

    // The log comes to rest: a log line about a log line would never end.
    let count = || fs::read_to_string(daemons.log("relay")).unwrap().matches("log line of the guest").count();
    let mut before = count();
    eventually("the guest says nothing more", PATIENCE, async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        (std::mem::replace(&mut before, count()) == count()).then_some(())
    })
    .await
    .unwrap();
    shim.stop_vm(&id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}

#[tokio::test]
async fn lines_without_a_reader_arrive_later_and_the_agent_outlives_its_reader() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "later").await.unwrap();
    said(&daemons, &sandbox.id, &["agent listens"]).await;

    // The guest dies. The agent survives and keeps writing, and the restarted guest reads its output.
    let sight = Sight::of(&world, &[], &daemons).unwrap();
    assert_eq!(sight.kill("peerpod-guest", "serve").unwrap(), 1, "{sight}");
    said(&daemons, &sandbox.id, &["the guest program was restarted", "found the agent running"]).await;
    sandbox.lives().await.unwrap();

    // Without a relay the lines wait in the VM. (The relay's death closes the agent's connections; the VM survives.)
    daemons.kill_relay().unwrap();
    daemons.start_relay().unwrap();
    daemons.ready().await.unwrap();
    said(&daemons, &sandbox.id, &["the link is down"]).await;
    let shim = daemons.shim().await.unwrap();
    shim.stop_vm(&sandbox.id).await.unwrap();
    daemons.gone(&sandbox.id, PATIENCE).await.unwrap();
}
