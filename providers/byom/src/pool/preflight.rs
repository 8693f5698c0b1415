//! Checks that the machines can be reached with the configured keys. Claims none.

use std::collections::BTreeMap;
use std::sync::Arc;

use peerpod_provider_api::{Error, Preflight};

use super::Pool;
use super::fault::Fault;
use super::known::Seen;
use super::{list, metrics};

/// Most machines that a warning names.
const MAX_NAMED: usize = 8;

/// Looks at all machines.
pub(crate) async fn run(pool: &Arc<Pool>) -> Result<Preflight, Error> {
    list::look_at_all(pool).await;
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut warnings = Vec::new();
    let mut denied = 0;
    for machine in &pool.machines {
        let known = machine.known.lock();
        *counts.entry(metrics::state(&known)).or_default() += 1;
        let why = match (known.down(), known.seen()) {
            (Some(down), _) => {
                denied += usize::from(matches!(down.fault, Fault::Denied(_)));
                down.fault.to_string()
            }
            (None, Seen::Resting(why)) => (*why).to_owned(),
            _ => continue,
        };
        warnings.push(format!("machine {} cannot be used: {why}", machine.address));
    }
    let first = warnings.first().cloned().unwrap_or_default();
    let all = pool.machines.len();
    if denied == all {
        return Err(Error::Auth { text: format!("no machine can be reached; {first}") });
    }
    let answered =
        ["free", "resting", "taken", "ours"].iter().filter_map(|state| counts.get(state)).sum::<usize>();
    if answered == 0 {
        return Err(Error::transient(format!("no machine can be reached; {first}")));
    }
    let more = warnings.len().saturating_sub(MAX_NAMED);
    warnings.truncate(MAX_NAMED);
    if more > 0 {
        warnings.push(format!("{more} more machines cannot be used"));
    }
    let free = counts.get("free").copied().unwrap_or_default();
    let counts: Vec<String> = counts.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let facts = vec![
        format!("{all} machines: {}", counts.join(", ")),
        format!("quota machines: {} of {all} in use or away", all.saturating_sub(free)),
    ];
    Ok(Preflight { facts, warnings, node_addresses: Vec::new() })
}
