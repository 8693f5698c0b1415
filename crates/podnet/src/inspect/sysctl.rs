//! Reads the kernel settings of a namespace and selects those that differ from a new namespace.
//!
//! The dump of the devices includes the settings of an interface. The settings of the namespace are files that only a
//! thread in it can read, some three microseconds each, so the module reads a fixed list of the settings that pods, CNI
//! plugins and kubelets use. A guest writes no setting outside this list, regardless of its plan.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::sync::OnceLock;

use netlink_packet_route::link::{Inet6DevConf, InetDevConf};

use super::seen::Sysctl;
use crate::link::Link;
use crate::netns::Netns;
use crate::plan::MAX_INTERFACES;

/// Root of the files, for a thread in the namespace.
pub(crate) const ROOT: &str = "/proc/sys/net";

/// Settings of the namespace: Kubernetes' safe sysctls, further usual ones, and those that CNI plugins and meshes set.
pub(crate) const OF_NAMESPACE: &[&str] = &[
    "core/somaxconn",
    "ipv4/conf/all/accept_local",
    "ipv4/conf/all/accept_redirects",
    "ipv4/conf/all/arp_announce",
    "ipv4/conf/all/arp_ignore",
    "ipv4/conf/all/forwarding",
    "ipv4/conf/all/proxy_arp",
    "ipv4/conf/all/route_localnet",
    "ipv4/conf/all/rp_filter",
    "ipv4/conf/all/send_redirects",
    "ipv4/conf/all/src_valid_mark",
    "ipv4/fib_multipath_hash_policy",
    "ipv4/icmp_echo_ignore_broadcasts",
    "ipv4/ip_default_ttl",
    "ipv4/ip_local_port_range",
    "ipv4/ip_local_reserved_ports",
    "ipv4/ip_nonlocal_bind",
    "ipv4/ip_unprivileged_port_start",
    "ipv4/ping_group_range",
    "ipv4/tcp_congestion_control",
    "ipv4/tcp_ecn",
    "ipv4/tcp_fin_timeout",
    "ipv4/tcp_keepalive_intvl",
    "ipv4/tcp_keepalive_probes",
    "ipv4/tcp_keepalive_time",
    "ipv4/tcp_max_syn_backlog",
    "ipv4/tcp_max_tw_buckets",
    "ipv4/tcp_mtu_probing",
    "ipv4/tcp_notsent_lowat",
    "ipv4/tcp_retries2",
    "ipv4/tcp_rmem",
    "ipv4/tcp_slow_start_after_idle",
    "ipv4/tcp_syn_retries",
    "ipv4/tcp_synack_retries",
    "ipv4/tcp_syncookies",
    "ipv4/tcp_timestamps",
    "ipv4/tcp_tw_reuse",
    "ipv4/tcp_wmem",
    "ipv6/bindv6only",
    "ipv6/conf/all/disable_ipv6",
    "ipv6/conf/all/forwarding",
    "ipv6/fib_multipath_hash_policy",
    "ipv6/ip_nonlocal_bind",
];

/// ARP and ND settings of an interface: `ipv4/neigh/ucast_solicit` stands for `ipv4/neigh/<interface>/ucast_solicit`.
/// They are read from files, because the kernel's dump has other units.
pub(crate) const OF_NEIGHBOURS: &[&str] = &[
    "ipv4/neigh/app_solicit",
    "ipv4/neigh/base_reachable_time_ms",
    "ipv4/neigh/delay_first_probe_time",
    "ipv4/neigh/gc_stale_time",
    "ipv4/neigh/locktime",
    "ipv4/neigh/mcast_resolicit",
    "ipv4/neigh/mcast_solicit",
    "ipv4/neigh/proxy_delay",
    "ipv4/neigh/proxy_qlen",
    "ipv4/neigh/retrans_time_ms",
    "ipv4/neigh/ucast_solicit",
    "ipv4/neigh/unres_qlen_bytes",
    "ipv6/neigh/app_solicit",
    "ipv6/neigh/base_reachable_time_ms",
    "ipv6/neigh/delay_first_probe_time",
    "ipv6/neigh/gc_stale_time",
    "ipv6/neigh/mcast_resolicit",
    "ipv6/neigh/mcast_solicit",
    "ipv6/neigh/proxy_delay",
    "ipv6/neigh/proxy_qlen",
    "ipv6/neigh/retrans_time_ms",
    "ipv6/neigh/ucast_solicit",
    "ipv6/neigh/unres_qlen_bytes",
];

/// Namespace settings that overwrite a setting of every interface, which is then recorded even at its default.
const SPREADING: &[(&str, &str)] = &[
    ("ipv4/conf/all/forwarding", "ipv4/forwarding"),
    ("ipv6/conf/all/forwarding", "ipv6/forwarding"),
    ("ipv6/conf/all/disable_ipv6", "ipv6/disable_ipv6"),
];

/// Returns the settings of an interface: `ipv4/rp_filter` stands for `ipv4/conf/<interface>/rp_filter`.
pub(crate) fn of_interface(link: &Link) -> Vec<(&'static str, i32)> {
    let v4 = link.v4.iter().flat_map(|v4| of_v4(v4));
    v4.chain(link.v6.iter().flat_map(|v6| of_v6(v6))).collect()
}

fn of_v4(v4: &InetDevConf) -> [(&'static str, i32); 26] {
    [
        ("ipv4/accept_local", v4.accept_local),
        ("ipv4/accept_redirects", v4.accept_redirects),
        ("ipv4/accept_source_route", v4.accept_source_route),
        ("ipv4/arp_accept", v4.arp_accept),
        ("ipv4/arp_announce", v4.arp_announce),
        ("ipv4/arp_filter", v4.arpfilter),
        ("ipv4/arp_ignore", v4.arp_ignore),
        ("ipv4/arp_notify", v4.arp_notify),
        ("ipv4/bc_forwarding", v4.bc_forwarding),
        ("ipv4/disable_policy", v4.nopolicy),
        ("ipv4/disable_xfrm", v4.noxfrm),
        ("ipv4/drop_gratuitous_arp", v4.drop_gratuitous_arp),
        ("ipv4/drop_unicast_in_l2_multicast", v4.drop_unicast_in_l2_multicast),
        ("ipv4/force_igmp_version", v4.force_igmp_version),
        ("ipv4/forwarding", v4.forwarding),
        ("ipv4/ignore_routes_with_linkdown", v4.ignore_routes_with_linkdown),
        ("ipv4/log_martians", v4.log_martians),
        ("ipv4/promote_secondaries", v4.promote_secondaries),
        ("ipv4/proxy_arp", v4.proxy_arp),
        ("ipv4/proxy_arp_pvlan", v4.proxy_arp_pvlan),
        ("ipv4/route_localnet", v4.route_localnet),
        ("ipv4/rp_filter", v4.rp_filter),
        ("ipv4/secure_redirects", v4.secure_redirects),
        ("ipv4/send_redirects", v4.send_redirects),
        ("ipv4/shared_media", v4.shared_media),
        ("ipv4/src_valid_mark", v4.src_vmark),
    ]
}

fn of_v6(v6: &Inet6DevConf) -> [(&'static str, i32); 23] {
    [
        ("ipv6/accept_dad", v6.accept_dad),
        ("ipv6/accept_ra", v6.accept_ra),
        ("ipv6/accept_ra_defrtr", v6.accept_ra_defrtr),
        ("ipv6/accept_ra_from_local", v6.accept_ra_from_local),
        ("ipv6/accept_ra_mtu", v6.accept_ra_mtu),
        ("ipv6/accept_ra_pinfo", v6.accept_ra_pinfo),
        ("ipv6/accept_redirects", v6.accept_redirects),
        ("ipv6/accept_source_route", v6.accept_source_route),
        ("ipv6/autoconf", v6.autoconf),
        ("ipv6/dad_transmits", v6.dad_transmits),
        ("ipv6/disable_ipv6", v6.disable_ipv6),
        ("ipv6/disable_policy", v6.disable_policy),
        ("ipv6/drop_unicast_in_l2_multicast", v6.drop_unicast_in_l2_multicast),
        ("ipv6/force_mld_version", v6.force_mld_version),
        ("ipv6/forwarding", v6.forwarding),
        ("ipv6/hop_limit", v6.hoplimit),
        ("ipv6/ignore_routes_with_linkdown", v6.ignore_routes_with_linkdown),
        ("ipv6/keep_addr_on_down", v6.keep_addr_on_down),
        ("ipv6/ndisc_notify", v6.ndisc_notify),
        ("ipv6/proxy_ndp", v6.proxy_ndp),
        ("ipv6/router_solicitations", v6.rtr_solicits),
        ("ipv6/use_oif_addrs_only", v6.use_oif_addrs_only),
        ("ipv6/use_tempaddr", v6.use_tempaddr),
    ]
}

/// Returns the path of a setting such as `ipv4/rp_filter` for one interface, below [`ROOT`]; `None` outside the lists.
pub(crate) fn path_of(name: &str, interface: &str) -> Option<String> {
    let (family, setting) =
        name.split_once('/').filter(|_| names_of_interface().any(|known| known == name))?;
    Some(match setting.split_once('/') {
        Some((group, setting)) => format!("{family}/{group}/{interface}/{setting}"),
        None => format!("{family}/conf/{interface}/{setting}"),
    })
}

fn names_of_interface() -> impl Iterator<Item = &'static str> {
    let any = Link { v4: Some(Box::default()), v6: Some(Box::default()), ..Link::default() };
    of_interface(&any).into_iter().map(|(name, _)| name).chain(OF_NEIGHBOURS.iter().copied())
}

/// Values of the files that exist.
pub(crate) type Values = BTreeMap<&'static str, String>;

#[derive(Debug, Default)]
pub(crate) struct Defaults {
    pub(crate) namespace: Values,
    pub(crate) interface: Values,
}

#[derive(Debug, Default)]
pub(crate) struct SysctlFiles {
    pub(crate) namespace: Values,
    /// The settings in [`OF_NEIGHBOURS`] of each interface but `lo`.
    pub(crate) neighbours: BTreeMap<String, Values>,
}

/// Reads the namespace's files, on a thread that is in it.
pub(crate) fn read_own() -> SysctlFiles {
    SysctlFiles { namespace: read_namespace(), neighbours: read_neighbours() }
}

fn read_namespace() -> Values {
    OF_NAMESPACE.iter().filter_map(|name| Some((*name, read(Path::new(ROOT), name).ok()?))).collect()
}

fn read_neighbours() -> BTreeMap<String, Values> {
    let listing = fs::read_dir(Path::new(ROOT).join("ipv4/neigh")).into_iter().flatten().flatten();
    let names = listing.map(|entry| entry.file_name().to_string_lossy().into_owned());
    // More interfaces than a pod may have are an error elsewhere. All devices count here.
    let names = names.filter(|name| name != "lo" && name != "default").take(2 * MAX_INTERFACES);
    names.map(|name| (name.clone(), read_of_neighbours(&name))).collect()
}

fn read_of_neighbours(interface: &str) -> Values {
    let file = |name: &'static str| {
        let (family, setting) = name.split_once("/neigh/")?;
        Some((name, read(Path::new(ROOT), &format!("{family}/neigh/{interface}/{setting}")).ok()?))
    };
    OF_NEIGHBOURS.iter().copied().filter_map(file).collect()
}

/// Reads one file; several numbers are separated by one blank.
pub(crate) fn read(root: &Path, name: &str) -> io::Result<String> {
    let mut room = [0; 256];
    let length = File::open(root.join(name))?.read(&mut room)?;
    let text = String::from_utf8_lossy(room.get(..length).unwrap_or_default());
    Ok(text.split_ascii_whitespace().collect::<Vec<_>>().join(" "))
}

/// Writes one file if its value differs; returns whether it did.
pub(crate) fn ensure(path: &str, value: &str) -> io::Result<bool> {
    let root = Path::new(ROOT);
    if read(root, path)? == value {
        return Ok(false);
    }
    fs::write(root.join(path), value)?;
    Ok(true)
}

/// Returns the values of a new namespace, made once. Empty where none can be made: then no setting is carried.
pub(crate) fn defaults() -> &'static Defaults {
    static DEFAULTS: OnceLock<Defaults> = OnceLock::new();
    DEFAULTS.get_or_init(|| {
        let read_all = || Defaults { namespace: read_namespace(), interface: read_new_interface() };
        Netns::scratch().ok().and_then(|scratch| scratch.run(read_all).ok()).unwrap_or_default()
    })
}

/// Reads the values of a new interface, by the names of [`of_interface`].
fn read_new_interface() -> Values {
    let default = |name: &'static str| {
        let (family, setting) = name.split_once('/')?;
        Some((name, read(Path::new(ROOT), &format!("{family}/conf/default/{setting}")).ok()?))
    };
    // `neigh/default` exists only in the first namespace; `lo` has the values that every new interface gets.
    let mut all = read_of_neighbours("lo");
    all.extend(names_of_interface().filter_map(default));
    all
}

/// Returns the settings of the namespace that differ from a new one's.
pub(crate) fn changed(values: &Values, defaults: &Defaults) -> Vec<Sysctl> {
    let differing = values.iter().filter_map(|(name, value)| {
        let default = defaults.namespace.get(name)?;
        (default != value).then(|| Sysctl { name: (*name).to_owned(), value: value.clone() })
    });
    differing.collect()
}

/// Returns the settings of an interface that differ from a new one's, after the namespace's `changed` ones were
/// written. `neighbours` are the values that were read of the interface.
pub(crate) fn changed_of(
    link: &Link,
    neighbours: Option<&Values>,
    changed: &[Sysctl],
    defaults: &Defaults,
) -> Vec<Sysctl> {
    let spread = |name: &str| {
        SPREADING.iter().any(|(all, one)| *one == name && changed.iter().any(|sysctl| sysctl.name == *all))
    };
    let of_link = of_interface(link).into_iter().map(|(name, value)| (name, value.to_string()));
    let of_neighbours = neighbours.into_iter().flatten().map(|(name, value)| (*name, value.clone()));
    let all = of_link.chain(of_neighbours).filter_map(|(name, value)| {
        let default = defaults.interface.get(name)?;
        (*default != value || spread(name)).then(|| Sysctl { name: name.to_owned(), value })
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(all: &[Sysctl]) -> Vec<String> {
        all.iter().map(|s| format!("{}={}", s.name, s.value)).collect()
    }

    #[test]
    fn only_changed_sysctls_are_copied_and_inherited_ones_are_set_per_interface() {
        let default = |all: &[(&'static str, &str)]| all.iter().map(|(n, v)| (*n, (*v).to_owned())).collect();
        let defaults = Defaults {
            namespace: default(&[("core/somaxconn", "4096"), ("ipv6/conf/all/disable_ipv6", "0")]),
            interface: default(&[
                ("ipv4/rp_filter", "0"),
                ("ipv6/disable_ipv6", "0"),
                ("ipv4/arp_notify", "0"),
                ("ipv4/neigh/ucast_solicit", "3"),
                ("ipv6/neigh/ucast_solicit", "3"),
            ]),
        };
        let values = default(&[
            ("core/somaxconn", "4096"),
            ("ipv6/conf/all/disable_ipv6", "1"),
            ("ipv4/tcp_ecn", "9"),
        ]);
        let all = changed(&values, &defaults);
        assert_eq!(
            text(&all),
            ["ipv6/conf/all/disable_ipv6=1"],
            "a sysctl that a new namespace lacks is not compared"
        );
        let mut link = Link { v4: Some(Box::default()), v6: Some(Box::default()), ..Link::default() };
        link.v4.as_mut().unwrap().rp_filter = 2;
        assert_eq!(
            text(&changed_of(&link, None, &all, &defaults)),
            ["ipv4/rp_filter=2", "ipv6/disable_ipv6=0"]
        );
        let neighbours = default(&[("ipv4/neigh/ucast_solicit", "5"), ("ipv6/neigh/ucast_solicit", "3")]);
        let found = changed_of(&link, Some(&neighbours), &[], &defaults);
        assert_eq!(text(&found), ["ipv4/rp_filter=2", "ipv4/neigh/ucast_solicit=5"]);
    }

    #[test]
    fn the_list_names_sysctls_of_this_kernel_and_a_plan_can_name_no_others() {
        assert!(defaults().namespace.len() > OF_NAMESPACE.len() - 8, "{:?}", defaults().namespace);
        for name in OF_NEIGHBOURS {
            assert!(defaults().interface.contains_key(name), "{name}");
        }
        assert_eq!(path_of("ipv4/rp_filter", "net1.5").as_deref(), Some("ipv4/conf/net1.5/rp_filter"));
        let neighbours = path_of("ipv6/neigh/app_solicit", "net1");
        assert_eq!(neighbours.as_deref(), Some("ipv6/neigh/net1/app_solicit"));
        for other in
            ["ipv4/../../kernel/core_pattern", "rp_filter", "ipv4/mc_forwarding", "ipv4/neigh/../x", ""]
        {
            assert_eq!(path_of(other, "eth0"), None, "{other}");
        }
    }
}
