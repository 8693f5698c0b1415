//! Computes StatsContainer from /proc, without cgroups.

use std::fs;

use peerpod_proto::agent::{NetworkStats, StatsContainerResponse};

/// Nanoseconds of a clock tick (USER_HZ is 100 on every Linux of interest).
const TICK_NS: u64 = 10_000_000;
const PAGE: u64 = 4096;

/// Sums up the processes. A process that ends meanwhile adds nothing.
pub(crate) fn of(processes: &[i32]) -> StatsContainerResponse {
    let mut answer = StatsContainerResponse::new();
    let stats = answer.cgroup_stats.mut_or_insert_default();
    let cpu = stats.cpu_stats.mut_or_insert_default().cpu_usage.mut_or_insert_default();
    let mut resident = 0;
    for pid in processes {
        if let Some((user, kernel)) = times(*pid) {
            cpu.usage_in_usermode += user * TICK_NS;
            cpu.usage_in_kernelmode += kernel * TICK_NS;
        }
        let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        resident += statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * PAGE;
    }
    cpu.total_usage = cpu.usage_in_usermode + cpu.usage_in_kernelmode;
    stats.memory_stats.mut_or_insert_default().usage.mut_or_insert_default().usage = resident;
    stats.pids_stats.mut_or_insert_default().current = processes.len() as u64;
    if let Some(first) = processes.first() {
        answer.network_stats =
            network(&fs::read_to_string(format!("/proc/{first}/net/dev")).unwrap_or_default());
    }
    answer
}

/// Returns utime and stime, fields 14 and 15 of `/proc/<pid>/stat`; the name in field 2 may hold any character.
fn times(pid: i32) -> Option<(u64, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn network(table: &str) -> Vec<NetworkStats> {
    let mut interfaces = Vec::new();
    for line in table.lines().skip(2) {
        let Some((name, numbers)) = line.split_once(':') else { continue };
        let numbers: Vec<u64> = numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let number = |index: usize| numbers.get(index).copied().unwrap_or(0);
        let mut stats = NetworkStats::new();
        stats.name = name.trim().into();
        (stats.rx_bytes, stats.rx_packets, stats.rx_errors, stats.rx_dropped) =
            (number(0), number(1), number(2), number(3));
        (stats.tx_bytes, stats.tx_packets, stats.tx_errors, stats.tx_dropped) =
            (number(8), number(9), number(10), number(11));
        interfaces.push(stats);
    }
    interfaces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_use_memory_and_have_a_loopback() {
        let stats = of(&[std::process::id() as i32]);
        assert!(stats.cgroup_stats.memory_stats.usage.usage > 0);
        assert!(stats.network_stats.iter().any(|interface| interface.name == "lo"));
    }
}
