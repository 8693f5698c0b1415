//! Inspects the VM of a sandbox from outside: its own network namespace, which holds its NICs, and its console.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use peerpod_podnet::netns::Netns;
use peerpod_world::{Daemons, World};

/// Returns the network namespace of the world's only VM.
pub fn network(world: &World, daemons: &Daemons) -> anyhow::Result<Netns> {
    let sight = peerpod_world::Sight::of(world, &[], daemons)?;
    // As pid 1 the guest starts a second process of itself, in the same namespace.
    let mut found: Vec<Netns> = Vec::new();
    for pid in sight.pids("peerpod-guest") {
        let netns = Netns::open(format!("/proc/{pid}/ns/net"))?;
        if found.iter().all(|other| other.id() != netns.id()) {
            found.push(netns);
        }
    }
    ensure!(found.len() == 1, "{} VMs", found.len());
    found.pop().context("a VM")
}

/// Returns the namespace at the end of the encrypted tunnel of the world's only VM.
pub fn tunnel(world: &World, daemons: &Daemons) -> anyhow::Result<Netns> {
    let sight = peerpod_world::Sight::of(world, &[], daemons)?;
    for pid in sight.pids("peerpod-guest") {
        // The path in the guest's own root.
        let path = format!("/proc/{pid}/root/run/peerpod/guest/tunnel.netns");
        if let Ok(netns) = Netns::open(path) {
            return Ok(netns);
        }
    }
    anyhow::bail!("no VM has an encrypted tunnel")
}

/// Runs a command in a network namespace and returns its output. Spaces separate the arguments in `line`.
pub fn run(netns: &Netns, line: &str) -> anyhow::Result<String> {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().context("an empty command")?);
    let output = netns.run(|| command.args(words).output())??;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the global IPv6 address of a NIC, with its prefix length.
pub fn v6_of(netns: &Netns, nic: &str) -> anyhow::Result<String> {
    let shown = run(netns, &format!("ip -6 -o addr show dev {nic} scope global"))?;
    let address = shown.split_whitespace().skip_while(|word| *word != "inet6").nth(1);
    Ok(address.with_context(|| format!("{nic} has no IPv6 address: {shown}"))?.to_owned())
}

/// Returns how many IP packets of both families the network namespace has fragmented so far.
pub fn fragments(netns: &Netns) -> anyhow::Result<u64> {
    let read = |name: &str| netns.run(|| fs::read_to_string(format!("/proc/thread-self/net/{name}")));
    fragments_of(&read("snmp")??, &read("snmp6")??)
}

/// Returns the number of fragmented packets in `/proc/net/snmp` and `/proc/net/snmp6`.
pub fn fragments_of(v4: &str, v6: &str) -> anyhow::Result<u64> {
    let mut lines = v4.lines().filter(|line| line.starts_with("Ip:"));
    let (names, values) = (lines.next().context("no Ip: in snmp")?, lines.next().context("one Ip: in snmp")?);
    let v4 = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "FragCreates");
    let v6 = v6.lines().find_map(|line| line.strip_prefix("Ip6FragCreates"));
    let (_, v4) = v4.context("no FragCreates in snmp")?;
    Ok(v4.parse::<u64>()? + v6.context("no Ip6FragCreates in snmp6")?.trim().parse::<u64>()?)
}

/// Returns the consoles of the world's VMs.
pub fn consoles(daemons: &Daemons) -> String {
    fn below(folder: &Path) -> String {
        let mut all = String::new();
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                all += &below(&path);
            } else if entry.file_name().to_string_lossy().starts_with("console") {
                all += &String::from_utf8_lossy(&fs::read(&path).unwrap_or_default());
            }
        }
        all
    }
    below(&daemons.state_dir().join("local"))
}
