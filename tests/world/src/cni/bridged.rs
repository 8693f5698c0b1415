//! Shapes with a bridge (or its replacement for OVS) on the node.

use super::Shape;

/// The reference `bridge` plugin with `host-local`, both families.
pub(super) const BRIDGE: Shape = Shape {
    name: "bridge",
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
        cni bridge eth0 <<EOF
        {"cniVersion": "0.4.0", "name": "pods", "type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
         "hairpinMode": true, "mtu": $MTU, "ipam": {"type": "host-local", "dataDir": "$DATA",
         "ranges": [[{"subnet": "$PODS4"}], [{"subnet": "$PODS6"}]]}}
EOF
    "#,
};

/// flannel in its VXLAN mode: delegates to the `bridge` plugin, and has its own VXLAN device on port 8472 between the
/// nodes.
pub(super) const FLANNEL: Shape = Shape {
    name: "flannel",
    mtu: 1450,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: false,
    sysctls: &[],
    node: r#"
        ip link add flannel.1 address 02:f1:a0:00:00:0$N mtu 1450 type vxlan id 1 dstport 8472 \
            local $UNDER4 dev under0 nolearning
        ip addr add 10.244.$N.0/32 dev flannel.1
        ip link set flannel.1 up
        ip neigh add 10.244.$O.0 lladdr 02:f1:a0:00:00:0$O dev flannel.1 nud permanent
        bridge fdb add 02:f1:a0:00:00:0$O dst $OTHER4 dev flannel.1
        ip route add $FAR4 via 10.244.$O.0 dev flannel.1 onlink
    "#,
    pod: r#"
        cni bridge eth0 <<EOF
        {"cniVersion": "0.3.1", "name": "cbr0", "type": "bridge", "bridge": "cni0", "isGateway": true,
         "isDefaultGateway": true, "hairpinMode": true, "mtu": $MTU, "ipam": {"type": "host-local",
         "dataDir": "$DATA", "ranges": [[{"subnet": "$PODS4"}]], "routes": [{"dst": "10.244.0.0/16"}]}}
EOF
    "#,
};

/// OpenShift SDN: the cluster's network is on-link, flows match the pod's MAC, and a collect-metadata VXLAN uses port
/// 4789.
pub(super) const OPENSHIFT_SDN: Shape = Shape {
    name: "openshift-sdn",
    mtu: 1450,
    underlay_mtu: 1500,
    port: 4790,
    masquerade_all: true,
    sysctls: &[],
    node: r#"
        ip link add vxlan_sys_4789 type vxlan external dstport 4789
        ip link set vxlan_sys_4789 up
        sys bridge/bridge-nf-call-iptables 0
        ip link add br0 mtu $MTU type bridge forward_delay 0
        ip addr add $GW4/24 dev br0
        ip link set br0 up
        sys ipv4/conf/br0/proxy_arp 1
        sys ipv4/neigh/br0/proxy_delay 0
        ip route add $FAR4 via $OTHER4
    "#,
    pod: r#"
        MAC=0a:58:0a:f4:0$N:$(printf %02x $P)
        veth $MAC 02:5d:00:00:0$N:$(printf %02x $P)
        ip link set $HOST master br0
        bridge link set dev $HOST hairpin on
        p addr add $V4/24 brd + dev eth0
        p route add 10.244.0.0/16 dev eth0
        p route add 224.0.0.0/4 dev eth0
        p route add default via $GW4 dev eth0
        nft -f - <<EOF
        table netdev flows_$HOST {
            chain ingress {
                type filter hook ingress device "$HOST" priority 0
                ether saddr != $MAC drop
            }
        }
EOF
    "#,
};

/// OVN-Kubernetes, both families: port security for MAC and IP; the switch answers ARP and never broadcasts it to pods.
///
/// Linux bridges answer for neighbours in IPv4 only. A neighbour solicitation in IPv6 therefore reaches the pod that
/// has the address, and no other pod. For that the ports have `proxy_arp_wifi`: the bridge never floods to a port with
/// `proxy_arp`, also not in IPv6.
pub(super) const OVN_KUBERNETES: Shape = Shape {
    name: "ovn-kubernetes",
    mtu: 1400,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: true,
    sysctls: &[],
    node: r#"
        sys bridge/bridge-nf-call-iptables 0
        sys bridge/bridge-nf-call-ip6tables 0
        ip link add br-int address 0a:58:0a:f4:0$N:01 mtu $MTU type bridge forward_delay 0 mcast_snooping 0
        ip addr add $GW4/24 dev br-int
        ip addr add $GW6/64 dev br-int nodad
        ip link set br-int up
        ip route add $FAR4 via $OTHER4
        ip route add $FAR6 via $OTHER6
    "#,
    pod: r#"
        MAC=0a:58:0a:f4:0$N:$(printf %02x $P)
        veth $MAC 02:0e:00:00:0$N:$(printf %02x $P)
        ip link set $HOST master br-int
        bridge link set dev $HOST flood off bcast_flood off learning off hairpin on
        ip link set $HOST type bridge_slave proxy_arp_wifi on
        bridge fdb replace $MAC dev $HOST master static
        ip neigh replace $V4 lladdr $MAC dev br-int nud permanent
        ip neigh replace $V6 lladdr $MAC dev br-int nud permanent
        p addr add $V4/24 brd + dev eth0
        p addr add $V6/64 dev eth0 nodad
        p route add default via $GW4 dev eth0
        p route add 10.244.0.0/16 via $GW4 dev eth0
        p route add 10.96.0.0/16 via $GW4 dev eth0
        p route add 100.64.0.0/16 via $GW4 dev eth0
        p -6 route add default via $GW6 dev eth0
        p -6 route add fd10:244::/32 via $GW6 dev eth0
        p -6 route add fd10:96::/112 via $GW6 dev eth0
        p -6 route add fd98::/64 via $GW6 dev eth0
        nft -f - <<EOF
        table netdev security_$HOST {
            chain ingress {
                type filter hook ingress device "$HOST" priority 0
                ether saddr != $MAC drop
                ether type arp arp saddr ether != $MAC drop
                ether type arp arp saddr ip != { $V4, 0.0.0.0 } drop
                ip saddr != $V4 drop
                ip6 saddr != { $V6, fe80::/64, :: } drop
            }
            chain egress {
                type filter hook egress device "$HOST" priority 0
                ip6 daddr ff02::1:ff00:$P accept
                ether daddr & 01:00:00:00:00:00 == 01:00:00:00:00:00 drop
            }
        }
EOF
    "#,
};

/// Multus: the interface of flannel first, then two more, the last with its own rule and table made by `sbr`.
pub(super) const MULTUS: Shape = Shape {
    name: "multus",
    mtu: 1450,
    underlay_mtu: 1500,
    port: 4789,
    masquerade_all: false,
    sysctls: &["ipv4/conf/net1/arp_notify", "ipv4/neigh/net1/ucast_solicit", "ipv4/conf/net2/rp_filter"],
    node: r#"
        ip route add $FAR4 via $OTHER4
        ip route add 10.56.$O.0/24 via $OTHER4
        ip route add 10.57.$O.0/24 via $OTHER4
        ip route add fd10:57:$O::/64 via $OTHER6
    "#,
    pod: r#"
        cni bridge eth0 <<EOF
        {"cniVersion": "0.4.0", "name": "pods", "type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
         "hairpinMode": true, "mtu": $MTU, "ipam": {"type": "host-local", "dataDir": "$DATA",
         "ranges": [[{"subnet": "$PODS4"}]]}}
EOF
        RESULT=$(cni bridge net1 <<EOF
        {"cniVersion": "0.4.0", "name": "storage", "type": "bridge", "bridge": "br1", "isGateway": true,
         "mtu": 1400, "ipam": {"type": "host-local", "dataDir": "$DATA",
         "ranges": [[{"subnet": "10.56.$N.0/24"}]],
         "routes": [{"dst": "10.56.0.0/16"}, {"dst": "172.30.0.0/16", "gw": "10.56.$N.1"}]}}
EOF
        )
        cni tuning net1 <<EOF
        {"cniVersion": "0.4.0", "name": "storage", "type": "tuning", "sysctl":
         {"net.ipv4.conf.net1.arp_notify": "1", "net.ipv4.neigh.net1.ucast_solicit": "7"}, "prevResult": $RESULT}
EOF
        RESULT=$(cni bridge net2 <<EOF
        {"cniVersion": "0.4.0", "name": "media", "type": "bridge", "bridge": "br2", "isGateway": true,
         "mtu": 1500, "ipam": {"type": "host-local", "dataDir": "$DATA",
         "ranges": [[{"subnet": "10.57.$N.0/24"}], [{"subnet": "fd10:57:$N::/64"}]],
         "routes": [{"dst": "10.57.0.0/16"}, {"dst": "fd10:57::/32"}]}}
EOF
        )
        cni sbr net2 <<EOF
        {"cniVersion": "0.4.0", "name": "media", "type": "sbr", "prevResult": $RESULT}
EOF
        psys ipv4/conf/net2/rp_filter 2
    "#,
};
