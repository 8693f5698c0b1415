//! Shapes without a bridge: the node has a route to the veth of each pod.

use super::Shape;

/// The reference `ptp` plugin, both families: the prefix's route uses the gateway.
pub(super) const PTP: Shape = Shape {
    name: "ptp",
    mtu: 1500,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: r#"
        ip route add $FAR4 via $OTHER4
        ip route add $FAR6 via $OTHER6
    "#,
    pod: r#"
        cni ptp eth0 <<EOF
        {"cniVersion": "0.4.0", "name": "pods", "type": "ptp", "mtu": $MTU, "ipam": {"type": "host-local",
         "dataDir": "$DATA", "ranges": [[{"subnet": "$PODS4"}], [{"subnet": "$PODS6"}]],
         "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}
EOF
    "#,
};

/// Cluster without IPv4.
pub(super) const V6_ONLY: Shape = Shape {
    name: "v6-only",
    mtu: 1500,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: "ip route add $FAR6 via $OTHER6",
    pod: r#"
        cni ptp eth0 <<EOF
        {"cniVersion": "0.4.0", "name": "pods", "type": "ptp", "mtu": $MTU, "ipam": {"type": "host-local",
         "dataDir": "$DATA", "ranges": [[{"subnet": "$PODS6"}]], "routes": [{"dst": "::/0"}]}}
EOF
    "#,
};

/// Calico in its IPIP mode (plain routes replace the tunnel between the nodes): /32, a gateway address that no device
/// has, and proxy ARP on the node's end.
pub(super) const CALICO_IPIP: Shape = Shape {
    name: "calico-ipip",
    mtu: 1480,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: r#"
        ip route add $FAR4 via $OTHER4 proto 80 onlink dev under0
        ip route add blackhole $PODS4 proto 80
    "#,
    pod: r#"
        veth 02:ca:11:00:0$N:$(printf %02x $P) ee:ee:ee:ee:ee:ee
        sys ipv4/conf/$HOST/proxy_arp 1
        sys ipv4/neigh/$HOST/proxy_delay 0
        sys ipv4/conf/$HOST/rp_filter 1
        ip route add $V4/32 dev $HOST scope link
        p addr add $V4/32 dev eth0
        p route add 169.254.1.1 dev eth0 scope link
        p route add default via 169.254.1.1 dev eth0
    "#,
};

/// Calico in its VXLAN mode, both families: its rules drop packets to port 4789 from hosts that are not Calico's nodes.
pub(super) const CALICO_VXLAN: Shape = Shape {
    name: "calico-vxlan",
    mtu: 1430,
    underlay_mtu: 1500,
    port: 4790,
    masquerade_all: false,
    sysctls: &[],
    node: r#"
        ip link add vxlan.calico address 66:ca:11:00:00:0$N mtu 1450 type vxlan id 4096 dstport 4789 \
            local $UNDER4 dev under0 nolearning
        ip addr add 10.244.$N.0/32 dev vxlan.calico
        ip link set vxlan.calico up
        ip neigh add 10.244.$O.0 lladdr 66:ca:11:00:00:0$O dev vxlan.calico nud permanent
        bridge fdb add 66:ca:11:00:00:0$O dst $OTHER4 dev vxlan.calico
        ip route add $FAR4 via 10.244.$O.0 dev vxlan.calico onlink proto 80
        ip route add blackhole $PODS4 proto 80
        ip link add vxlan-v6.calico address 66:ca:16:00:00:0$N mtu 1430 type vxlan id 4097 dstport 4789 \
            local $UNDER6 dev under0 nolearning
        ip addr add fd10:244:$N::/128 dev vxlan-v6.calico nodad
        ip link set vxlan-v6.calico up
        ip neigh add fd10:244:$O:: lladdr 66:ca:16:00:00:0$O dev vxlan-v6.calico nud permanent
        bridge fdb add 66:ca:16:00:00:0$O dst $OTHER6 dev vxlan-v6.calico
        ip route add $FAR6 via fd10:244:$O:: dev vxlan-v6.calico onlink proto 80
        ip route add blackhole $PODS6 proto 80
        nft -f - <<EOF
        table inet calico {
            chain input {
                type filter hook input priority filter
                udp dport 4789 ip saddr $OTHER4 accept
                udp dport 4789 ip6 saddr $OTHER6 accept
                udp dport 4789 drop
                ct state invalid drop
            }
            chain forward {
                type filter hook forward priority filter
                ct state invalid drop
            }
        }
EOF
    "#,
    pod: r#"
        veth 02:ca:11:00:0$N:$(printf %02x $P) ee:ee:ee:ee:ee:ee
        sys ipv4/conf/$HOST/proxy_arp 1
        sys ipv4/neigh/$HOST/proxy_delay 0
        sys ipv4/conf/$HOST/rp_filter 1
        ip route add $V4/32 dev $HOST scope link
        ip -6 route add $V6/128 dev $HOST
        p addr add $V4/32 dev eth0
        p addr add $V6/128 dev eth0 nodad
        p route add 169.254.1.1 dev eth0 scope link
        p route add default via 169.254.1.1 dev eth0
        p -6 route add fe80::ecee:eeff:feee:eeee dev eth0
        p -6 route add default via fe80::ecee:eeff:feee:eeee dev eth0
    "#,
};

/// Cilium with veth: /32 and /128, its own programs on the node's end and on the pod's `eth0`, and a collect-metadata
/// VXLAN on port 8472. Classic BPF replaces its programs; proxy ARP and NDP replace their answers for the gateway.
pub(super) const CILIUM: Shape = Shape {
    name: "cilium",
    mtu: 1450,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: r#"
        ip link add cilium_vxlan type vxlan external dstport 8472
        ip link set cilium_vxlan up
        ip link add cilium_host type veth peer name cilium_net
        ip link set cilium_net up
        ip link set cilium_host up
        ip addr add $GW4/32 dev cilium_host
        ip addr add $GW6/128 dev cilium_host nodad
        ip route add $FAR4 via $OTHER4 mtu $MTU
        ip route add $FAR6 via $OTHER6 mtu $MTU
    "#,
    pod: r#"
        MTU=1500
        veth 02:c1:11:00:0$N:$(printf %02x $P) 02:c1:12:00:0$N:$(printf %02x $P)
        sys ipv4/conf/$HOST/proxy_arp 1
        sys ipv4/neigh/$HOST/proxy_delay 0
        sys ipv6/conf/$HOST/proxy_ndp 1
        sys ipv6/neigh/$HOST/proxy_delay 0
        ip neigh add proxy $GW6 dev $HOST
        ip route add $V4/32 dev $HOST scope link
        ip -6 route add $V6/128 dev $HOST
        tc qdisc add dev $HOST clsact
        tc filter add dev $HOST ingress prio 1 protocol all bpf bytecode '1,6 0 0 4294967295,' flowid 1:1
        ip netns exec $POD tc qdisc add dev eth0 clsact
        ip netns exec $POD tc filter add dev eth0 ingress prio 1 protocol all bpf bytecode '1,6 0 0 0,' flowid 1:1
        p addr add $V4/32 dev eth0
        p addr add $V6/128 dev eth0 nodad
        p route add $GW4 dev eth0 scope link
        p route add default via $GW4 dev eth0 mtu 1450
        p -6 route add $GW6 dev eth0
        p -6 route add default via $GW6 dev eth0 mtu 1450
    "#,
};

/// Combination of state that plugins may leave, of no particular CNI: several addresses, metrics, tables, rules, and
/// routes to nowhere.
pub(super) const EVERYTHING: Shape = Shape {
    name: "everything",
    mtu: 1400,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: false,
    sysctls: &[
        "ipv4/conf/eth0/rp_filter",
        "ipv4/conf/eth0/arp_ignore",
        "ipv4/conf/eth0/arp_announce",
        "ipv6/conf/eth0/accept_ra",
        "ipv6/conf/eth0/disable_ipv6",
    ],
    node: r#"
        ip route add $FAR4 via $OTHER4
        ip route add $FAR6 via $OTHER6
    "#,
    pod: r#"
        veth 02:0d:0d:00:0$N:$(printf %02x $P) 02:0d:1d:00:0$N:$(printf %02x $P)
        sys ipv4/conf/$HOST/proxy_arp 1
        sys ipv4/neigh/$HOST/proxy_delay 0
        ip route add $V4/32 dev $HOST scope link
        ip -6 addr add fe80::1/64 dev $HOST nodad
        ip -6 route add $V6/128 dev $HOST
        p link set eth0 txqueuelen 500
        p addr add $V4/32 dev eth0
        p addr add 10.77.$N.$P/24 brd + dev eth0
        p addr add 10.78.$N.$P peer 10.78.$O.$P/32 dev eth0
        p addr add fd10:76:$N::$P/64 dev eth0 nodad valid_lft 3600 preferred_lft 0
        p addr add fd10:77:$N::$P/64 dev eth0 nodad
        p addr add $V6/128 dev eth0 nodad
        p route add 169.254.1.1 dev eth0 scope link
        p route add default via 169.254.1.1 dev eth0 src $V4 advmss 1300
        p route add default via 169.254.1.1 dev eth0 metric 100
        p -6 route add default via fe80::1 dev eth0 src $V6 metric 50
        p route add 10.96.0.0/12 via 169.254.1.1 dev eth0 mtu 1380 proto 17
        p route add 192.0.2.0/25 via 203.0.113.1 dev eth0 onlink
        p route add 198.51.100.0/24 nexthop via 169.254.1.1 dev eth0 weight 2 \
            nexthop via 10.77.$N.254 dev eth0 weight 1
        p route add blackhole 203.0.113.0/26
        p route add unreachable 203.0.113.64/26 metric 7
        p route add prohibit 203.0.113.128/26
        p -6 route add blackhole 2001:db8:1::/48
        p -6 route add unreachable 2001:db8:2::/48
        p route add default via 169.254.1.1 dev eth0 table 500
        p route add throw 10.0.0.0/8 table 500
        p -6 route add default via fe80::1 dev eth0 table 500
        p rule add from 10.77.$N.$P lookup 500 priority 900
        p rule add to 192.0.2.128/25 unreachable priority 901
        p rule add fwmark 0x10/0xff lookup 500 priority 902
        p -6 rule add from fd10:77:$N::$P lookup 500 priority 900
        p neigh add 10.77.$N.254 lladdr 02:0d:1d:00:0$N:$(printf %02x $P) dev eth0 nud permanent
        p addr add 10.79.$N.$P/32 dev lo
        p addr add fd10:79:$N::$P/128 dev lo
        p addr add fd10:75:$N::$P/64 dev lo
        p addr add 10.75.$N.$P/24 dev lo
        p addr add 10.74.$N.$P/24 dev lo noprefixroute
        p addr add fd10:74:$N::$P/64 dev lo noprefixroute
        p route add 192.0.2.250/32 dev lo
        p addr add 10.76.$N.$P/24 dev eth0 valid_lft 3600 preferred_lft 1800
        p -6 route add 2001:db8:3::/48 via fe80::1 dev eth0 expires 3600
        psys ipv4/conf/eth0/rp_filter 2
        psys ipv4/conf/eth0/arp_ignore 1
        psys ipv4/conf/eth0/arp_announce 2
        psys ipv6/conf/eth0/accept_ra 0
    "#,
};
