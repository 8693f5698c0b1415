//! Shapes of the clouds' own CNIs.

use super::Shape;

/// AWS VPC CNI: /32, a gateway that is only a permanent neighbour entry, jumbo frames, and on the node rules and a
/// table for the pod's network interface.
pub(super) const AWS: Shape = Shape {
    name: "aws",
    mtu: 9001,
    underlay_mtu: 9001,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: r#"
        ip route add default via $OTHER4 dev under0 table 2
        ip route add $OTHER4 dev under0 scope link table 2
        ip rule add not to 10.244.0.0/16 priority 1024 fwmark 0x80/0x80 lookup main
    "#,
    pod: r#"
        veth 02:a5:00:00:0$N:$(printf %02x $P) 02:a5:11:00:0$N:$(printf %02x $P)
        p addr add $V4/32 dev eth0
        p route add 169.254.1.1 dev eth0 scope link
        p route add default via 169.254.1.1 dev eth0
        p neigh add 169.254.1.1 lladdr 02:a5:11:00:0$N:$(printf %02x $P) dev eth0 nud permanent
        ip route add $V4/32 dev $HOST scope link
        ip rule add to $V4 priority 512 lookup main
        ip rule add from $V4 to 10.244.0.0/16 priority 1536 lookup 2
    "#,
};

/// AWS VPC CNI in an IPv6 cluster: a link-local gateway that is only a permanent neighbour entry.
pub(super) const AWS_V6: Shape = Shape {
    name: "aws-v6",
    mtu: 9001,
    underlay_mtu: 9001,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: r#"
        ip -6 route add default via $OTHER6 dev under0 table 2
        ip -6 rule add not to fd10:244::/32 priority 1024 fwmark 0x80/0x80 lookup main
    "#,
    pod: r#"
        veth 02:a6:00:00:0$N:$(printf %02x $P) 02:a6:11:00:0$N:$(printf %02x $P)
        p addr add $V6/128 dev eth0 nodad
        p -6 route add fe80::1 dev eth0
        p -6 route add default via fe80::1 dev eth0
        p neigh add fe80::1 lladdr 02:a6:11:00:0$N:$(printf %02x $P) dev eth0 nud permanent router
        ip -6 route add $V6/128 dev $HOST
        ip -6 rule add to $V6 priority 512 lookup main
        ip -6 rule add from $V6 to fd10:244::/32 priority 1536 lookup 2
    "#,
};

/// Azure CNI in its transparent mode: the VNet's prefix without its route, and a gateway with a MAC that no device has.
pub(super) const AZURE: Shape = Shape {
    name: "azure",
    mtu: 1500,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: "ip route add $FAR4 via $OTHER4",
    pod: r#"
        veth 02:a2:00:00:0$N:$(printf %02x $P) 12:34:56:78:9a:bc
        p addr add $V4/16 brd + dev eth0 noprefixroute
        p route add 169.254.1.1 dev eth0 scope link
        p route add default via 169.254.1.1 dev eth0
        p neigh add 169.254.1.1 lladdr 12:34:56:78:9a:bc dev eth0 nud permanent
        ip route add $V4/32 dev $HOST scope link
    "#,
};

/// GKE: point to point with the prefix's route removed, on an underlay with MTU 1460.
pub(super) const GKE: Shape = Shape {
    name: "gke",
    mtu: 1460,
    underlay_mtu: 1460,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: "ip route add $FAR4 via $OTHER4",
    pod: r#"
        veth 02:6e:00:00:0$N:$(printf %02x $P) 02:6e:11:00:0$N:$(printf %02x $P)
        ip addr add $GW4/32 dev $HOST
        ip route add $V4/32 dev $HOST scope host
        p addr add $V4/24 brd + dev eth0 noprefixroute
        p route add $GW4/32 dev eth0 scope link src $V4
        p route add $PODS4 via $GW4 dev eth0 src $V4
        p route add default via $GW4 dev eth0
    "#,
};
