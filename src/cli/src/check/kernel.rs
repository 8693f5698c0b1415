//! Checks the kernel's functions and this process's rights, by trial in network namespaces of its own. Makes nothing that
//! stays. May touch: `/proc`, `/sys`, `/dev/net/tun`.

use std::fs::read_to_string;
use std::path::Path;

use landlock::{ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError};
use peerpod_common::tun::open_tun;
use peerpod_podnet::mark::Owner;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::nft::Filter;
use peerpod_podnet::vxlan::Shape;
use peerpod_podnet::{localhost, redirect, vxlan};

use super::config::Config;
use crate::item::{Area, Item, Outcome, failed, skipped, warning};

/// Capabilities that peerpod-node needs, by their numbers.
const CAPABILITIES: [(&str, u32); 2] = [("NET_ADMIN", 12), ("SYS_ADMIN", 21)];
/// Remedy where a trial lacks rights.
const AS_ROOT: &str = "run the check as root, with the capabilities NET_ADMIN and SYS_ADMIN";

/// Facts that files give.
struct Facts {
    release: String,
    /// Cause for which Landlock makes no rules.
    no_landlock: Option<String>,
    seccomp: String,
    status: String,
    profile: String,
    selinux: String,
}

/// Checks kernel, security modules and capabilities.
pub(super) fn check(root: &Path, config: &Config) -> Vec<Item> {
    let read = |path: &str| read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let of_host = |path: &str| super::read(root, path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let facts = Facts {
        release: read("/proc/sys/kernel/osrelease"),
        no_landlock: try_landlock().err().map(|error| error.to_string()),
        seccomp: read("/proc/sys/kernel/seccomp/actions_avail"),
        status: read("/proc/self/status"),
        profile: read("/proc/self/attr/current").trim_end_matches('\0').to_owned(),
        selinux: of_host("/sys/fs/selinux/enforce"),
    };
    let required = config.text("relay.hardening") != "best-effort";
    let mut items = vec![
        Area::Kernel.item("capabilities", capabilities(&facts)),
        Area::Kernel.item("landlock", landlock(&facts, required)),
        Area::Kernel.item("seccomp", seccomp(&facts)),
        Area::Kernel.item("lsm-profile", profile(&facts)),
    ];
    items.extend(trials(config));
    items
}

fn trials(config: &Config) -> Vec<Item> {
    let trial = |name: &str, tried: Result<String, String>, remedy: &str| {
        let outcome = tried.or_else(|error| {
            let denied = ["EPERM", "permitted", "denied"].iter().any(|word| error.contains(word));
            failed(error, if denied { AS_ROOT } else { remedy })
        });
        Area::Kernel.item(name, outcome)
    };
    let scratch = match Netns::scratch() {
        Ok(scratch) => scratch,
        Err(error) => return vec![trial("netns", Err(error.to_string()), "use a kernel with CONFIG_NET_NS")],
    };
    let mut items = vec![trial("netns", Ok("network namespaces can be made".to_owned()), "")];
    let chosen =
        redirect::choose(None).map(|by| format!("tc redirects by {} and {}", by.into.name(), by.back.name()));
    let remedy = "load the modules sch_ingress, act_mirred and one of cls_u32, cls_flower and cls_matchall";
    items.push(trial("tc", chosen.map_err(|error| error.to_string()), remedy));
    let port = config.port("tunnel.port").unwrap_or(4789);
    let vxlan = Netns::current().and_then(|host| {
        let shape = Shape { port, v6: false, udp_checksum: false };
        host.netlink().and_then(|mut host| vxlan::probe(&mut host, shape, None))
    });
    let vxlan = vxlan.map(|()| format!("VXLAN works on UDP port {port}")).map_err(|error| error.to_string());
    items.push(trial(
        "vxlan",
        vxlan,
        "load the module vxlan, or set tunnel.port to a free port of all nodes",
    ));
    let tables = scratch
        .netfilter()
        .and_then(|mut client| Filter::all_of(Owner::of(&["check"]), &mut client))
        .map(|_| "nf_tables answers".to_owned());
    let remedy = "load the module nf_tables, or set tunnel.anti-spoof: false";
    items.push(trial("nftables", tables.map_err(|error| error.to_string()), remedy));
    let tun = scratch.run(|| open_tun("pp-check").map(drop)).and_then(|opened| opened);
    let tun =
        tun.map(|()| "TUN devices can be made".to_owned()).map_err(|error| format!("/dev/net/tun: {error}"));
    items.push(match (tun, config.text("tunnel.kind").as_str()) {
        (Err(error), "vxlan" | "") => {
            Area::Kernel.item("tun", skipped(format!("{error}; tunnel.kind vxlan needs none")))
        }
        (tun, _) => trial("tun", tun, "load the module tun, or set tunnel.kind: vxlan"),
    });
    let localhost = localhost::probe().map(|()| "port-forward reaches the VMs".to_owned());
    items.push(Area::Kernel.item(
        "localhost",
        localhost.or_else(|error| {
            warning(
                error.to_string(),
                "load the modules nft_tproxy and nft_socket, or set tunnel.localhost: false",
            )
        }),
    ));
    items
}

fn capabilities(facts: &Facts) -> Outcome {
    let line = facts.status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(held) = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()) else {
        return skipped("/proc/self/status names no capabilities");
    };
    let missing: Vec<&str> =
        CAPABILITIES.iter().filter(|(_, bit)| held & (1 << bit) == 0).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Ok("NET_ADMIN and SYS_ADMIN are there".to_owned());
    }
    failed(format!("this process lacks {}", missing.join(" and ")), AS_ROOT)
}

/// Makes a ruleset, as the relay does, and does not apply it. A container does not see the list of security modules.
fn try_landlock() -> Result<(), RulesetError> {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    ruleset.handle_access(AccessFs::from_all(ABI::V1))?.create().map(drop)
}

fn landlock(facts: &Facts, required: bool) -> Outcome {
    let Facts { no_landlock, release, .. } = facts;
    let Some(error) = no_landlock else { return Ok(format!("kernel {release} has Landlock")) };
    let cause = format!("kernel {release} makes no rules of Landlock here: {error}");
    let remedy = "use Linux 5.13 or later with landlock in the boot parameter lsm=, and a seccomp profile that permits \
                  it, or set relay.hardening: best-effort";
    if required { failed(cause, remedy) } else { warning(cause, remedy) }
}

fn seccomp(facts: &Facts) -> Outcome {
    if facts.seccomp.split_whitespace().any(|action| action == "errno") {
        return Ok("filters of system calls work".to_owned());
    }
    failed("the kernel has no seccomp filters", "use a kernel with CONFIG_SECCOMP_FILTER")
}

fn profile(facts: &Facts) -> Outcome {
    let Facts { profile, selinux, .. } = facts;
    let name = if profile.is_empty() { "none" } else { profile };
    if selinux == "1" && name.contains(":container_t:") {
        let remedy = "run peerpod-node and peerpod-relay with the SELinux type spc_t";
        return failed(format!("SELinux enforces {name}, which may not enter pods' namespaces"), remedy);
    }
    Ok(format!("profile of this process: {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::Verdict;

    fn facts() -> Facts {
        Facts {
            release: "6.8".to_owned(),
            no_landlock: None,
            seccomp: "kill_process errno allow".to_owned(),
            status: "Name:\tx\nCapEff:\t000001ffffffffff\n".to_owned(),
            profile: "unconfined".to_owned(),
            selinux: String::new(),
        }
    }

    #[test]
    fn missing_functions_and_rights_are_named() {
        let verdict = |outcome| Area::Kernel.item("x", outcome).verdict;
        let all = |facts: &Facts| {
            [capabilities(facts), landlock(facts, true), seccomp(facts), profile(facts)].map(verdict)
        };
        assert_eq!(all(&facts()), [Verdict::Ok; 4]);
        let bad = Facts {
            no_landlock: Some("not supported".to_owned()),
            seccomp: String::new(),
            status: "CapEff:\t0000000000001000".to_owned(),
            profile: "system_u:system_r:container_t:s0".to_owned(),
            selinux: "1".to_owned(),
            ..facts()
        };
        assert_eq!(all(&bad), [Verdict::Failed; 4]);
        assert!(Area::Kernel.item("x", capabilities(&bad)).cause.ends_with("lacks SYS_ADMIN"));
        assert_eq!(verdict(landlock(&bad, false)), Verdict::Warning);
    }
}
