//! Reads the use of the VM's resources, and that of the guest program and of the kata-agent. May touch: `/proc`, the file
//! system of container images.

use std::fs;
use std::path::Path;

use nix::sys::statvfs::statvfs;
use nix::unistd::{SysconfVar, sysconf};
use peerpod_proto::guest::{ProcessUsage, Usage};

/// Reads the present use. `agent`: process id of the kata-agent, 0 for none. A figure that cannot be read is 0.
pub(crate) fn read(agent: u32, images: &Path) -> Usage {
    let ticks = Ticks::of_kernel();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let [disk_total_bytes, disk_free_bytes] = disk(images).unwrap_or_default();
    Usage {
        memory_total_bytes: kilobytes(&memory, "MemTotal:"),
        memory_available_bytes: kilobytes(&memory, "MemAvailable:"),
        cpu_ms: ticks.to_ms(busy(&fs::read_to_string("/proc/stat").unwrap_or_default())),
        disk_total_bytes,
        disk_free_bytes,
        guest: process(std::process::id(), &ticks).into(),
        agent: Some(agent).filter(|pid| *pid > 0).and_then(|pid| process(pid, &ticks)).into(),
        ..Usage::default()
    }
}

/// Clock ticks per second of the kernel's files.
struct Ticks(u64);

impl Ticks {
    fn of_kernel() -> Ticks {
        let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten().and_then(|ticks| u64::try_from(ticks).ok());
        Ticks(ticks.filter(|ticks| *ticks > 0).unwrap_or(100))
    }

    fn to_ms(&self, ticks: u64) -> u64 {
        ticks.saturating_mul(1000) / self.0
    }
}

fn kilobytes(meminfo: &str, name: &str) -> u64 {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name));
    let value = value.and_then(|value| value.trim().trim_end_matches(" kB").trim().parse::<u64>().ok());
    value.unwrap_or_default().saturating_mul(1024)
}

/// Returns the ticks of all processors in `/proc/stat` without those of idle time and of waits for disks.
fn busy(stat: &str) -> u64 {
    let Some(line) = stat.lines().find_map(|line| line.strip_prefix("cpu ")) else { return 0 };
    let ticks = line.split_ascii_whitespace().map(|word| word.parse::<u64>().unwrap_or_default());
    // user, nice, system, idle, iowait, irq, softirq, steal; the later ones are part of user and nice.
    ticks.take(8).enumerate().filter(|(at, _)| !matches!(at, 3 | 4)).map(|(_, ticks)| ticks).sum()
}

/// Returns size and free space in bytes.
fn disk(path: &Path) -> Option<[u64; 2]> {
    let found = statvfs(path).ok()?;
    let unit = found.fragment_size();
    Some([found.blocks(), found.blocks_available()].map(|blocks| blocks.saturating_mul(unit)))
}

fn process(pid: u32, ticks: &Ticks) -> Option<ProcessUsage> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    // Fields 14, 15 and 24 of proc_pid_stat(5).
    let (user, system, pages) = (number(11)?, number(12)?, number(21)?);
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|size| u64::try_from(size).ok());
    Some(ProcessUsage {
        memory_bytes: pages.saturating_mul(page.unwrap_or(4096)),
        cpu_ms: ticks.to_ms(user.saturating_add(system)),
        ..ProcessUsage::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_figures() {
        let Usage { memory_total_bytes, memory_available_bytes, cpu_ms, guest, agent, .. } =
            read(0, Path::new("/"));
        assert!(memory_total_bytes > memory_available_bytes && memory_available_bytes > 0 && cpu_ms > 0);
        assert!(guest.memory_bytes > 1 << 20 && agent.is_none());
        assert!(read(std::process::id(), Path::new("/")).agent.memory_bytes > 1 << 20);
        let missing = read(0, Path::new("/does/not/exist"));
        assert_eq!(missing.disk_total_bytes, 0);
        assert!(read(0, Path::new("/")).disk_total_bytes > 0);
    }

    #[test]
    fn idle_time_does_not_count() {
        assert_eq!(busy("cpu  1 2 4 1000 2000 8 16 32 64 128\ncpu0 9 9 9 9\n"), 1 + 2 + 4 + 8 + 16 + 32);
        assert_eq!(busy(""), 0);
        assert_eq!(kilobytes("MemTotal:       2 kB\nMemFree: 1 kB\n", "MemTotal:"), 2048);
    }
}
