//! Lists the network state of a namespace, as `ip`, `tc`, `nft` and `/proc/sys` report it: one line per thing.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::Namespace;
use crate::command::run;

/// Folder of the kernel's settings.
const SYSCTLS: &str = "/proc/sys/net";
/// Values that are not settings: the number of tracked connections, and keys that the kernel makes at their first use.
const NO_SETTINGS: &[&str] = &["nf_conntrack_count", "tcp_fastopen_key", "stable_secret"];

/// Returns the lines of a namespace; none if it is gone.
pub(super) fn lines(namespace: &Namespace) -> anyhow::Result<Vec<String>> {
    if !namespace.path().exists() {
        return Ok(Vec::new());
    }
    let name = namespace.name();
    let mut lines = Vec::new();
    addresses(name, &mut lines)?;
    routing(name, &mut lines)?;
    traffic_control(name, &mut lines)?;
    // -s leaves out the counters, which grow.
    let rules = namespace.run(|| run("nft", &["-s", "list", "ruleset"], ""))?;
    let rules = rules.context("this test needs nft: apt-get install nftables")?;
    let rules = rules.lines().map(str::trim).filter(|line| line.len() > 1);
    lines.extend(rules.map(|line| format!("nft {line} in {name}")));
    let mut settings = Vec::new();
    namespace.run(|| sysctls(Path::new(SYSCTLS), &mut settings))?;
    lines.extend(settings.into_iter().map(|setting| format!("sysctl {setting} in {name}")));
    Ok(lines)
}

fn ip(name: &str, words: &[&str]) -> anyhow::Result<String> {
    run("ip", &[&["-n", name, "-o"], words].concat(), "")
}

fn addresses(name: &str, lines: &mut Vec<String>) -> anyhow::Result<()> {
    for line in ip(name, &["link", "show"])?.lines() {
        let link = line.split_whitespace().nth(1).unwrap_or_default();
        let link = link.trim_end_matches(':').split('@').next().unwrap_or_default();
        lines.push(format!("link {link} in {name}"));
    }
    for line in ip(name, &["addr", "show"])?.lines() {
        let words: Vec<&str> = line.split_whitespace().skip(1).take(3).collect();
        // The kernel adds a device's link-local address at some later time.
        if !words.iter().any(|word| word.starts_with("fe80:")) {
            lines.push(format!("address {} in {name}", words.join(" ")));
        }
    }
    Ok(())
}

/// Adds the routes of all tables, rules, and permanent and proxy neighbours.
fn routing(name: &str, lines: &mut Vec<String>) -> anyhow::Result<()> {
    for family in ["-4", "-6"] {
        for line in ip(name, &[family, "route", "show", "table", "all"])?.lines() {
            // The kernel adds these with a device or at some later time, and removes them with the device.
            let passing = ["fe80:", "ff00:", "multicast", "anycast"];
            if !line.split_whitespace().any(|word| passing.iter().any(|text| word.starts_with(text))) {
                // Leaves out values that count down.
                let counts = |word: &str| word.strip_suffix("sec").is_some_and(|n| n.parse::<u64>().is_ok());
                let words = line
                    .split_whitespace()
                    .filter(|word| !matches!(*word, "linkdown" | "dead" | "expires") && !counts(word));
                lines.push(format!("route {} in {name}", words.collect::<Vec<_>>().join(" ")));
            }
        }
        for line in ip(name, &[family, "rule", "show"])?.lines() {
            lines.push(format!("rule {family} {} in {name}", line.trim()));
        }
    }
    for kind in [&["nud", "permanent"][..], &["proxy"]] {
        for line in ip(name, &[&["neigh", "show"], kind].concat())?.lines() {
            lines.push(format!("neighbour {} in {name}", line.trim()));
        }
    }
    Ok(())
}

/// Adds the queueing disciplines of all devices, and their filters.
fn traffic_control(name: &str, lines: &mut Vec<String>) -> anyhow::Result<()> {
    for line in run("tc", &["-n", name, "qdisc", "show"], "")?.lines().map(str::trim) {
        let words: Vec<&str> = line.split_whitespace().collect();
        // The default one, which every device has.
        let [_, kind, _, _, device, ..] = words[..] else { continue };
        if kind == "noqueue" {
            continue;
        }
        lines.push(format!("{line} in {name}"));
        let parents: &[&str] = match kind {
            "clsact" => &["ingress", "egress"],
            "ingress" => &["ingress"],
            _ => continue,
        };
        for parent in parents {
            // A device that is gone by now has no filters.
            let filters = run("tc", &["-n", name, "filter", "show", "dev", device, parent], "");
            for filter in filters.unwrap_or_default().lines() {
                lines.push(format!("{} at {parent} of {device} in {name}", filter.trim()));
            }
        }
    }
    Ok(())
}

/// Reads every readable file, on a thread in the namespace.
fn sysctls(folder: &Path, found: &mut Vec<String>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            sysctls(&path, found);
        } else if !path.file_name().is_some_and(|name| NO_SETTINGS.iter().any(|no| name == *no))
            && let Ok(value) = fs::read_to_string(&path)
        {
            let name = path.strip_prefix(SYSCTLS).unwrap_or(&path).display();
            found.push(format!("{name} = {}", value.split_whitespace().collect::<Vec<_>>().join(" ")));
        }
    }
}
