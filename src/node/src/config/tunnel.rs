//! Reads section `tunnel`.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use peerpod_base::config::Reader;
use peerpod_base::fd_handoff;
use peerpod_podnet::redirect::Classifier;
use peerpod_podnet::vxlan::Vnis;

use crate::tunnel::external::{self, Egress, External};
use crate::tunnel::{NETNS_DIR, TunnelConfig, TunnelKind, WireguardConfig, netns_in};

/// Classifier that redirects a pod's traffic: the first of u32, matchall and bpf that the kernel has.
const REDIRECT: &str = "auto";
/// Interval of a guest's path-MTU probe towards the node: routes change without notice.
const PROBE_INTERVAL: Duration = Duration::from_secs(600);
/// UDP checksums in IPv4 tunnels cost much on most NICs of clouds; the inner packets have their own.
const UDP_CHECKSUM: bool = false;
/// UDP source ports of tunnels: the kernel's range for programs.
const SOURCE_PORTS: &str = "";
/// Upper bound of each list of networks; the guest accepts no more.
const MOST_PREFIXES: usize = 64;

/// Reads section `tunnel`.
pub(super) fn read(reader: &mut Reader, run_dir: &Path, state_dir: &Path) -> TunnelConfig {
    let defaults = TunnelConfig::default();
    let choice = reader.choice(
        "tunnel.kind",
        "vxlan",
        &["auto", "vxlan", "wireguard"],
        "tunnel that carries a pod's frames to its VM: vxlan in clear, wireguard encrypted and through NAT; \
         auto: vxlan where the node reaches the VM at its own private address, else wireguard",
    );
    let wireguard_port: u16 = reader.get(
        "tunnel.wireguard-port",
        "51820",
        "UDP port of this node's encrypted tunnel; 0: the kernel chooses one, which is then kept",
    );
    let wireguard = (choice != "vxlan").then(|| WireguardConfig {
        port: wireguard_port,
        key_dir: state_dir.join("trust"),
        netns: netns_in(run_dir),
        relay: run_dir.join(fd_handoff::SOCKET),
    });
    let by: String = reader.constant("tunnel.redirect", "REDIRECT", REDIRECT.to_owned());
    let vnis = vnis(reader, wireguard.is_some());
    let ports = reader.constant("tunnel.source-ports", "SOURCE_PORTS", SOURCE_PORTS.to_owned());
    let source_ports = range(&ports);
    let probe_interval: Duration = reader.constant("tunnel.probe-interval", "PROBE_INTERVAL", PROBE_INTERVAL);
    TunnelConfig {
        netns_dir: reader.get(
            "node.netns-dir",
            NETNS_DIR,
            "folder in which the container runtime keeps the pods' network namespaces",
        ),
        kind: if choice == "wireguard" { TunnelKind::Wireguard } else { TunnelKind::Vxlan },
        auto: choice == "auto",
        wireguard,
        port: reader.get("tunnel.port", "4789", "UDP port of the pods' tunnels; the same on all nodes"),
        udp_checksum: reader.constant("tunnel.udp-checksum", "UDP_CHECKSUM", UDP_CHECKSUM),
        anti_spoof: reader.get(
            "tunnel.anti-spoof",
            "true",
            "accept a tunnel's packets from its VM's address only, and keep them out of conntrack (nftables)",
        ),
        redirect: Classifier::ALL.into_iter().find(|classifier| classifier.name() == by),
        vnis,
        source_ports,
        external: external(reader),
        probe_interval,
        ..defaults
    }
}

/// Reads the range of VNIs, without those that the encrypted tunnel cannot use.
fn vnis(reader: &mut Reader, encrypted: bool) -> Vnis {
    let text: String = reader.get(
        "tunnel.vnis",
        "1-16777215",
        "VNIs of the pods' tunnels, first-last, of which the node takes any; another VXLAN of the network needs VNIs of \
         its own",
    );
    for key in ["tunnel.vni-min", "tunnel.vni-max"] {
        reader.removed(key, "use tunnel.vnis, first-last");
    }
    let (min, max): (u32, u32) = range(&text).unwrap_or_default();
    let written = Vnis::new(min, max);
    // The encrypted tunnel derives inner addresses from VNIs; the addresses of 0, 1 and 0xffffff are not usable.
    let (min, max) = if encrypted { (min.max(2), max.min(0xff_fffe)) } else { (min, max) };
    let vnis = Vnis::new(min, max);
    if written.is_none() {
        reader.mistake("tunnel.vnis", "no range of VNIs; write 1-16777215 or a part of it");
    } else if vnis.is_none() {
        reader.mistake(
            "tunnel.vnis",
            "no VNI of the encrypted tunnel, which has 2 to 16777214; widen the range",
        );
    }
    vnis.unwrap_or_default()
}

/// Reads the settings of the pods' egress from the cluster.
fn external(reader: &mut Reader) -> Option<External> {
    let egress = reader.choice(
        "tunnel.external",
        "tunnel",
        &["tunnel", "vm", "second-nic"],
        "egress of the pods' default routes: by the node (tunnel), by their VMs' own network (vm), or by a \
         second NIC of their VMs (second-nic; the provider must support it); NetworkPolicy applies to the \
         first only",
    );
    let cluster_cidrs: Vec<String> = reader
        .optional(
            "tunnel.cluster-cidrs",
            "with tunnel.external vm or second-nic: networks of the cluster's pods, services and nodes, which stay in \
             the tunnel",
        )
        .unwrap_or_default();
    let allow: Vec<String> = reader
        .optional(
            "tunnel.external-allow",
            "with tunnel.external vm or second-nic: networks that pods may reach although they are \
             link-local, like the cloud's metadata service, or the VM's own",
        )
        .unwrap_or_default();
    let egress = match egress.as_str() {
        "vm" => Some(Egress::Vm),
        "second-nic" => Some(Egress::SecondNic),
        _ => None,
    };
    for (key, texts) in [("tunnel.cluster-cidrs", &cluster_cidrs), ("tunnel.external-allow", &allow)] {
        if let Some(wrong) = texts.iter().find(|text| external::prefix(text).is_none()) {
            reader.mistake(key, format!("{wrong:?} is not a network; write it like 10.244.0.0/16"));
        }
        if texts.len() > MOST_PREFIXES {
            reader.mistake(key, format!("more than {MOST_PREFIXES}; summarise them"));
        }
        if egress.is_none() && !texts.is_empty() {
            reader.mistake(key, "has no effect without tunnel.external: vm or second-nic");
        }
    }
    if egress.is_some() && cluster_cidrs.is_empty() {
        reader.mistake(
            "tunnel.cluster-cidrs",
            "pods could not reach the cluster; name the networks of its pods, services and nodes",
        );
    }
    egress.map(|egress| External { egress, cluster_cidrs, allow })
}

fn range<T: FromStr + PartialOrd>(text: &str) -> Option<(T, T)> {
    let (first, last) = text.split_once('-')?;
    let range = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (range.0 <= range.1).then_some(range)
}
