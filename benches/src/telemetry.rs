//! Measures the cost of the relay's counters on a small call: pairs of relay and guest that differ in the counters alone.
//! The bursts are short and take turns, so that other load on the machine affects all pairs alike. All run on one
//! processor (see `on_one_processor`).

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use crate::chain::{Kind, Pair, make_certificates, with_agent};
use crate::load::{Call, Client, median, quantile};
use crate::report::{Goal, Report};

/// The pairs of one start. The second and the third are the same, so they show the error of the measurement.
const PAIRS: [Kind; 3] = [Kind::Relay, Kind::Uncounted, Kind::Uncounted];
/// New processes for all pairs, in another order each time, because place in memory and age affect all their calls.
const STARTS: usize = 5;
/// Bursts of each pair in one start.
const ROUNDS: usize = 20;
const BURST: Duration = Duration::from_millis(50);

/// Runs the measurement.
pub(crate) fn run(folder: &Path, report: &mut Report) -> anyhow::Result<()> {
    let folder = folder.join("telemetry");
    fs::create_dir_all(&folder)?;
    let (mut costs, mut errors) = (Vec::new(), Vec::new());
    with_agent(&folder, |agent| {
        for start in 0..STARTS {
            for [counted, uncounted, again] in rounds(start, &folder.join(start.to_string()), agent)? {
                costs.push(counted / uncounted);
                errors.push(again / uncounted);
            }
        }
        Ok(())
    })?;
    report.figure(
        "telemetry_cost_small_call",
        median(&mut costs).context("no rounds")?,
        Goal::Limit(1.03),
        "p50 of a Check, TLS: the relay / the relay without counters",
    );
    for (name, ratios) in [("with and without counters", &mut costs), ("both without counters", &mut errors)]
    {
        let [low, middle, high] = [0.25, 0.5, 0.75].map(|share| quantile(ratios, share).unwrap_or(f64::NAN));
        report.row(format!("  {name}: quartiles {low:.3}, {middle:.3}, {high:.3}"));
    }
    Ok(())
}

/// Starts the pairs and returns the p50 of each pair in each round, in seconds.
fn rounds(start: usize, folder: &Path, agent: &Path) -> anyhow::Result<Vec<[f64; PAIRS.len()]>> {
    let mut pairs = Vec::new();
    for turn in 0..PAIRS.len() {
        let number = (start + turn) % PAIRS.len();
        let own = folder.join(number.to_string());
        fs::create_dir_all(&own)?;
        make_certificates(&own)?;
        let pair = Pair::start(PAIRS[number], true, &own, agent)?;
        let mut client = Client::connect(&pair.socket)?;
        client.burst(Call::Check, BURST)?; // Warm: connection, pages, pools.
        pairs.push((number, pair, client));
    }
    pairs.sort_by_key(|(number, ..)| *number);
    let mut rounds = Vec::new();
    for first in 0..ROUNDS {
        let mut round = [0.0; PAIRS.len()];
        for turn in 0..PAIRS.len() {
            let number = (first + turn) % PAIRS.len();
            let burst = pairs[number].2.burst(Call::Check, BURST)?;
            let mut all: Vec<f64> = burst.into_iter().map(|took| took.as_secs_f64()).collect();
            round[number] = median(&mut all).context("an empty burst")?;
        }
        rounds.push(round);
    }
    Ok(rounds)
}
