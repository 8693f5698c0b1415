//! Measures the relay with the same calls over the bare socket, the splice pair and the relay pair. The bursts are
//! short and interleaved, so that other load on the machine affects all of them alike. All run on one processor (see
//! `on_one_processor`).

use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use crate::chain::{Kind, Pair, make_certificates, with_agent};
use crate::load::{Call, Client, median};
use crate::report::{Goal, Report};

const ROUNDS: usize = 8;
const BURST: Duration = Duration::from_millis(200);
const K64: u32 = 64 << 10;
const M1: u32 = 1 << 20;

/// The chains by index: 0 direct, 1 splice, 2 relay, 3 splice with TLS, 4 relay with TLS.
const DIRECT: usize = 0;
const SPLICE: usize = 1;
const RELAY: usize = 2;
const SPLICE_TLS: usize = 3;
const RELAY_TLS: usize = 4;

/// Runs all measurements.
pub(crate) fn run(folder: &Path, report: &mut Report) -> anyhow::Result<()> {
    make_certificates(folder)?;
    with_agent(folder, |agent| chains(folder, agent, report))
}

fn chains(folder: &Path, agent: &Path, report: &mut Report) -> anyhow::Result<()> {
    let pairs = [(Kind::Splice, false), (Kind::Relay, false), (Kind::Splice, true), (Kind::Relay, true)]
        .into_iter()
        .map(|(kind, tls)| Pair::start(kind, tls, folder, agent))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut clients = vec![Client::connect(agent)?];
    for pair in &pairs {
        clients.push(Client::connect(&pair.socket)?);
    }
    for client in &mut clients {
        client.burst(Call::Check, BURST)?; // Warm: connections, pages, pools.
    }

    let small = latencies(&mut clients, Call::Check)?;
    let k64 = latencies(&mut clients, Call::Read(K64))?;
    let m1 = latencies(&mut clients, Call::Read(M1))?;
    let ratio = |of: &[f64], a: usize, b: usize| of[a] / of[b];
    report.figure("relay_small_vs_direct", ratio(&small, RELAY, DIRECT), Goal::None, "Check, p50, plain TCP");
    report.figure(
        "splice_small_vs_direct",
        ratio(&small, SPLICE, DIRECT),
        Goal::None,
        "copy_bidirectional pair",
    );
    report.figure("relay_small_vs_splice", ratio(&small, RELAY, SPLICE), Goal::None, "");
    report.figure(
        "relay_small_tls_vs_direct",
        ratio(&small, RELAY_TLS, DIRECT),
        Goal::AtMost(4.0),
        "Check, p50, TLS 1.3",
    );
    report.figure("splice_small_tls_vs_direct", ratio(&small, SPLICE_TLS, DIRECT), Goal::None, "");
    report.figure(
        "relay_64k_tls_vs_direct",
        ratio(&k64, RELAY_TLS, DIRECT),
        Goal::None,
        "ReadStdout 64 KiB, p50",
    );
    report.figure("splice_64k_tls_vs_direct", ratio(&k64, SPLICE_TLS, DIRECT), Goal::None, "");
    report.figure(
        "relay_1m_tls_vs_direct",
        ratio(&m1, RELAY_TLS, DIRECT),
        Goal::AtMost(5.7),
        "ReadStdout 1 MiB, p50",
    );
    report.figure("splice_1m_tls_vs_direct", ratio(&m1, SPLICE_TLS, DIRECT), Goal::None, "");
    report.figure("direct_small_us", small[DIRECT] * 1e6, Goal::None, "the 1x of this run");

    let (mut direct, mut relay) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        direct.push(clients[DIRECT].flood(16, BURST)?);
        relay.push(clients[RELAY_TLS].flood(16, BURST)?);
    }
    let c16 = median(&mut relay).context("no rounds")? / median(&mut direct).context("no rounds")?;
    report.figure("relay_c16_vs_direct", c16, Goal::AtLeast(0.45), "calls/s, 16 in flight, TLS, one CPU");

    with_a_real_agent(folder, report)?;

    let relay_tls = &pairs[RELAY_TLS - 1];
    let before = relay_tls.cpu()?;
    let calls = clients[RELAY_TLS].burst(Call::Check, Duration::from_secs(2))?.len();
    let spent = relay_tls.cpu()? - before;
    let per_100k = spent.as_secs_f64() * 1e5 / calls as f64;
    report.figure(
        "relay_cpu_s_per_100k",
        per_100k,
        Goal::AtMost(4.0),
        "CPU s per 100k Checks, both ends, TLS",
    );
    Ok(())
}

/// Measures the same small call with an agent that is a ttrpc server with Kata's whole API, like the real one.
fn with_a_real_agent(folder: &Path, report: &mut Report) -> anyhow::Result<()> {
    let socket = folder.join("test-agent.sock");
    let mut agent = std::process::Command::new(peerpod_world::binary("peerpod-test-agent")?)
        .arg("--socket")
        .arg(&socket)
        .env("RUST_LOG", "error")
        .spawn()?;
    let outcome = (|| {
        peerpod_world::eventually_blocking("the agent listens", Duration::from_secs(10), || {
            Client::connect(&socket).ok().map(drop)
        })?;
        let deeper = folder.join("deeper");
        std::fs::create_dir_all(&deeper)?;
        make_certificates(&deeper)?;
        let pair = Pair::start(Kind::Relay, true, &deeper, &socket)?;
        let mut clients = [Client::connect(&socket)?, Client::connect(&pair.socket)?];
        let small = latencies(&mut clients, Call::Check)?;
        let about = "Check, p50, TLS 1.3, a real ttrpc agent";
        report.figure("relay_small_tls_vs_direct_ttrpc_agent", small[1] / small[0], Goal::None, about);
        anyhow::Ok(())
    })();
    agent.kill()?;
    agent.wait()?;
    outcome
}

/// Returns the p50 of each chain in seconds: the median over the better half of the rounds.
fn latencies(clients: &mut [Client], call: Call) -> anyhow::Result<Vec<f64>> {
    let mut rounds = vec![Vec::new(); clients.len()];
    for _ in 0..ROUNDS {
        for (client, rounds) in clients.iter_mut().zip(&mut rounds) {
            let mut all: Vec<f64> =
                client.burst(call, BURST)?.into_iter().map(|took| took.as_secs_f64()).collect();
            rounds.push(median(&mut all).context("an empty burst")?);
        }
    }
    rounds
        .iter_mut()
        .map(|rounds| {
            rounds.sort_by(f64::total_cmp);
            median(&mut rounds[..ROUNDS / 2]).context("no rounds")
        })
        .collect()
}
