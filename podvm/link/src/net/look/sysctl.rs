//! The kernel's settings of a namespace: which of them are carried, what they are in a new namespace, and what they are
//! in a pod's.
//!
//! Those of an interface come with the dump of the links and cost nothing. Those of the namespace are files, which
//! only a thread in that namespace can read, some three microseconds each: so it is a list of those that pods,
//! CNI plugins and kubelets do set, no walk. The list is also the whole of what a guest writes on a plan's word.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::OnceLock;

use super::seen::Sysctl;
use crate::net::link::Link;
use crate::net::netns::Netns;

/// Where they are, for a thread in the namespace.
pub(crate) const ROOT: &str = "/proc/sys/net";

/// The namespace's: Kubernetes' safe ones, what people allow besides, and what CNI plugins (`tuning`, `bridge`, `ptp`)
/// and meshes set.
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

/// Whose change changes every interface's: an interface that is as a new one is then to be said, too.
const SPREADING: &[(&str, &str)] = &[
    ("ipv4/conf/all/forwarding", "ipv4/forwarding"),
    ("ipv6/conf/all/forwarding", "ipv6/forwarding"),
    ("ipv6/conf/all/disable_ipv6", "ipv6/disable_ipv6"),
];

/// An interface's, `ipv4/rp_filter` for `ipv4/conf/<interface>/rp_filter`, with what it is now.
pub(crate) fn of_interface(link: &Link) -> Vec<(&'static str, i32)> {
    let mut all = Vec::with_capacity(48);
    if let Some(v4) = &link.v4 {
        all.extend([
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
        ]);
    }
    if let Some(v6) = &link.v6 {
        all.extend([
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
        ]);
    }
    all
}

/// `ipv4/rp_filter` as a path below [`ROOT`], for one interface; `None` where it is none of ours.
pub(crate) fn path_of(name: &str, interface: &str) -> Option<String> {
    let (family, setting) =
        name.split_once('/').filter(|_| names_of_interface().any(|known| known == name))?;
    Some(format!("{family}/conf/{interface}/{setting}"))
}

fn names_of_interface() -> impl Iterator<Item = &'static str> {
    let any = Link { v4: Some(Box::default()), v6: Some(Box::default()), ..Link::default() };
    of_interface(&any).into_iter().map(|(name, _)| name)
}

/// What a new namespace has.
pub(crate) fn namespace_default(name: &str) -> Option<String> {
    defaults().namespace.get(name).cloned()
}

/// What a new interface has.
pub(crate) fn interface_default(name: &str) -> Option<String> {
    defaults().interface.get(name).cloned()
}

/// What the namespace's files say; of those that are there.
pub(crate) type Values = BTreeMap<&'static str, String>;

/// What they are in a namespace nobody has touched.
#[derive(Debug, Default)]
pub(crate) struct Defaults {
    pub(crate) namespace: Values,
    pub(crate) interface: Values,
}

/// Reads the namespace's files, on a thread that is in it.
pub(crate) fn read_own() -> Values {
    OF_NAMESPACE.iter().filter_map(|name| Some((*name, read(Path::new(ROOT), name).ok()?))).collect()
}

/// One file; a blank between several numbers.
pub(crate) fn read(root: &Path, name: &str) -> io::Result<String> {
    let mut room = [0; 256];
    let length = File::open(root.join(name))?.read(&mut room)?;
    let text = String::from_utf8_lossy(room.get(..length).unwrap_or_default());
    Ok(text.split_ascii_whitespace().collect::<Vec<_>>().join(" "))
}

/// What a new namespace has, from one that is made for it, once in the life of the process. Empty where none can be
/// made: then every setting is as good as unset, and none is carried.
pub(crate) fn defaults() -> &'static Defaults {
    static DEFAULTS: OnceLock<Defaults> = OnceLock::new();
    DEFAULTS.get_or_init(|| {
        let read_all = || Defaults { namespace: read_own(), interface: read_new_interface() };
        Netns::scratch().ok().and_then(|scratch| scratch.run(read_all).ok()).unwrap_or_default()
    })
}

/// What an interface has that is made now, by the names of [`of_interface`].
fn read_new_interface() -> Values {
    let default = |name: &'static str| {
        let (family, setting) = name.split_once('/')?;
        Some((name, read(Path::new(ROOT), &format!("{family}/conf/default/{setting}")).ok()?))
    };
    names_of_interface().filter_map(default).collect()
}

/// Those of the namespace that are not as in a new one.
pub(crate) fn changed(values: &Values, defaults: &Defaults) -> Vec<Sysctl> {
    let differs = |(name, value): &(&&'static str, &String)| {
        defaults.namespace.get(**name).is_some_and(|default| default != *value)
    };
    let owned =
        |(name, value): (&&'static str, &String)| Sysctl { name: (*name).to_owned(), value: value.clone() };
    values.iter().filter(differs).map(owned).collect()
}

/// Those of an interface that are not as a new one's would be, after the namespace's `changed` ones were written.
pub(crate) fn changed_of(link: &Link, changed: &[Sysctl], defaults: &Defaults) -> Vec<Sysctl> {
    let spread = |name: &str| {
        SPREADING.iter().any(|(all, one)| *one == name && changed.iter().any(|sysctl| sysctl.name == *all))
    };
    let of_link = of_interface(link).into_iter().filter_map(|(name, value)| {
        let (default, value) = (defaults.interface.get(name)?, value.to_string());
        (*default != value || spread(name)).then(|| Sysctl { name: name.to_owned(), value })
    });
    of_link.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(all: &[Sysctl]) -> Vec<String> {
        all.iter().map(|s| format!("{}={}", s.name, s.value)).collect()
    }

    #[test]
    fn only_what_differs_is_carried_and_what_spreads_is_said_of_each_interface() {
        let default = |all: &[(&'static str, &str)]| all.iter().map(|(n, v)| (*n, (*v).to_owned())).collect();
        let defaults = Defaults {
            namespace: default(&[("core/somaxconn", "4096"), ("ipv6/conf/all/disable_ipv6", "0")]),
            interface: default(&[
                ("ipv4/rp_filter", "0"),
                ("ipv6/disable_ipv6", "0"),
                ("ipv4/arp_notify", "0"),
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
            "what a new namespace does not have is not judged"
        );
        let mut link = Link { v4: Some(Box::default()), v6: Some(Box::default()), ..Link::default() };
        link.v4.as_mut().unwrap().rp_filter = 2;
        assert_eq!(text(&changed_of(&link, &all, &defaults)), ["ipv4/rp_filter=2", "ipv6/disable_ipv6=0"]);
        assert_eq!(text(&changed_of(&link, &[], &defaults)), ["ipv4/rp_filter=2"]);
    }

    #[test]
    fn the_list_names_what_this_kernel_has_and_a_plan_can_name_nothing_else() {
        assert!(defaults().namespace.len() > OF_NAMESPACE.len() - 8, "{:?}", defaults().namespace);
        assert_eq!(path_of("ipv4/rp_filter", "net1.5").as_deref(), Some("ipv4/conf/net1.5/rp_filter"));
        for other in ["ipv4/../../kernel/core_pattern", "rp_filter", "ipv4/mc_forwarding", ""] {
            assert_eq!(path_of(other, "eth0"), None, "{other}");
        }
    }
}
