//! Makes two nodes and their pods as a certain CNI leaves them, in real kernel state. The reference plugins make it
//! where they exist; `ip`, `bridge`, `tc` and `nft` replace CNIs that are daemons.
//!
//! A [`Shape`] is two shell scripts: the CNI's set-up of a node, and its set-up of a pod. Both run in the node's
//! namespace. `network.md` of the reference names the source of each shape. Device kinds that a kernel may lack (IPIP,
//! macvlan, OVS) are replaced by others that look the same from the pod.

mod bridged;
mod clouds;
mod routed;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, ensure};

use crate::picture::Picture;
use crate::traffic::ECHO_PORT;
use crate::{Namespace, World};

/// State that a CNI leaves in a pod and around it.
pub struct Shape {
    /// Name of the CNI.
    pub name: &'static str,
    /// Largest packet of its pods: the MTU of their interface or of their default route.
    pub mtu: u64,
    /// MTU of the network between the nodes.
    pub underlay_mtu: u64,
    /// Port of Peerpod's tunnels on such nodes; not 4789 where the CNI uses it.
    pub port: u16,
    /// Whether services see the node's address instead of the client's address. Needed where the bridge replaces a
    /// switch that routes: the answers must return by the node.
    pub masquerade_all: bool,
    /// Sysctls below `/proc/sys/net` that the CNI sets in the pod.
    pub sysctls: &'static [&'static str],
    /// Set-up of a node: `$N` is the node's number, `$O` that of the other node; see also `PRELUDE`.
    pub node: &'static str,
    /// Set-up of a pod, number `$P` on its node: `$POD` is its namespace, `$HOST` the name of the device on the node.
    pub pod: &'static str,
}

/// All shapes.
pub const SHAPES: &[&Shape] = &[
    &bridged::BRIDGE,
    &bridged::FLANNEL,
    &bridged::OPENSHIFT_SDN,
    &bridged::OVN_KUBERNETES,
    &bridged::MULTUS,
    &routed::PTP,
    &routed::V6_ONLY,
    &routed::CALICO_IPIP,
    &routed::CALICO_VXLAN,
    &routed::CILIUM,
    &clouds::AWS,
    &clouds::AWS_V6,
    &clouds::AZURE,
    &clouds::GKE,
    &routed::EVERYTHING,
];

/// Returns a shape by its name.
pub fn shape(name: &str) -> anyhow::Result<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name).copied().with_context(|| format!("no shape {name}"))
}

/// Common part of the scripts. Pods of node N are in 10.244.N.0/24 and fd10:244:N::/64 unless a shape sets other
/// subnets. Nodes are 192.168.50.N and fd50::N on `under0`.
const PRELUDE: &str = r#"
UNDER4=192.168.50.$N UNDER6=fd50::$N OTHER4=192.168.50.$O OTHER6=fd50::$O
PODS4=10.244.$N.0/24 PODS6=fd10:244:$N::/64 FAR4=10.244.$O.0/24 FAR6=fd10:244:$O::/64
GW4=10.244.$N.1 GW6=fd10:244:$N::1
V4=10.244.$N.$P V6=fd10:244:$N::$P
p() { ip -n "$POD" "$@"; }
sys() { echo "$2" > "/proc/sys/net/$1"; }
psys() { ip netns exec "$POD" sh -c 'echo "$2" > "/proc/sys/net/$1"' sh "$1" "$2"; }
# veth MAC MAC-OF-THE-NODE'S-END
veth() {
    ip link add "$HOST" mtu "$MTU" address "$2" type veth peer name eth0 mtu "$MTU" address "$1" netns "$POD"
    ip link set "$HOST" up
    p link set eth0 up
}
# cni PLUGIN INTERFACE, with its configuration as input
cni() {
    CNI_COMMAND=ADD CNI_CONTAINERID="$POD" CNI_NETNS="/run/netns/$POD" CNI_IFNAME="$2" CNI_PATH=/usr/lib/cni \
        "/usr/lib/cni/$1"
}
"#;

/// Two nodes with one CNI. The first node is that of the world, which runs the daemons.
pub struct Cluster {
    world: World,
    /// The second node's world, if it has one.
    _away: Option<World>,
    /// Shape of the CNI.
    pub shape: &'static Shape,
    nodes: [Namespace; 2],
    pods: [AtomicU32; 2],
}

impl Cluster {
    /// Makes the second node, the network between the nodes, and the CNI's set-up of both.
    pub fn new(world: &World, shape: &'static Shape) -> anyhow::Result<Cluster> {
        let far = world.namespace("far")?;
        far.sysctl("ipv4/ip_forward", "1")?;
        far.sysctl("ipv6/conf/all/forwarding", "1")?;
        Cluster::of(world, far, None, shape)
    }

    /// Does the same with the nodes of two worlds, so that both nodes can run daemons.
    pub fn between(world: &World, away: &World, shape: &'static Shape) -> anyhow::Result<Cluster> {
        Cluster::of(world, away.node().clone(), Some(away.clone()), shape)
    }

    fn of(
        world: &World,
        far: Namespace,
        away: Option<World>,
        shape: &'static Shape,
    ) -> anyhow::Result<Cluster> {
        let nodes = [world.node().clone(), far];
        let (near, far) = (&nodes[0], &nodes[1]);
        for node in &nodes {
            // No other node has the address, and the second that duplicate address detection takes makes tests slow.
            node.sysctl("ipv6/conf/default/accept_dad", "0")?;
            // As on every Kubernetes node: services work between pods of one bridge.
            node.sysctl("bridge/bridge-nf-call-iptables", "1")?;
            node.sysctl("bridge/bridge-nf-call-ip6tables", "1")?;
        }
        let mtu = shape.underlay_mtu;
        near.ip(&format!(
            "link add under0 mtu {mtu} type veth peer name under0 mtu {mtu} netns {}\n",
            far.name()
        ))?;
        for (node, number, other) in [(near, 1, 2), (far, 2, 1)] {
            node.ip(&format!(
                "link set under0 up\n\
                 addr add 192.168.50.{number}/24 dev under0\n\
                 addr add fd50::{number}/64 dev under0 nodad\n\
                 route add default via 192.168.50.{other}\n\
                 route add default via fd50::{other}\n"
            ))?;
        }
        let cluster = Cluster {
            world: world.clone(),
            _away: away,
            shape,
            nodes,
            // .1 is usually the gateway; IPAM plugins count by themselves.
            pods: [AtomicU32::new(2), AtomicU32::new(2)],
        };
        for number in [1, 2] {
            cluster.run(number, shape.node, &[])?;
        }
        Ok(cluster)
    }

    /// Returns node 1 or 2.
    pub fn node(&self, number: usize) -> &Namespace {
        &self.nodes[number - 1]
    }

    /// Returns the address of node 1 or 2, of the same family as `like`.
    pub fn node_address(&self, number: usize, like: IpAddr) -> anyhow::Result<IpAddr> {
        let text = if like.is_ipv4() { format!("192.168.50.{number}") } else { format!("fd50::{number}") };
        Ok(text.parse()?)
    }

    fn run(&self, node: usize, script: &str, more: &[(&str, &str)]) -> anyhow::Result<()> {
        let (number, other, mtu) = (node.to_string(), (3 - node).to_string(), self.shape.mtu.to_string());
        let data = self.world.folder().join(format!("cni{node}")).display().to_string();
        let mut variables =
            vec![("N", number.as_str()), ("O", &other), ("MTU", &mtu), ("DATA", &data), ("P", "0")];
        variables.extend_from_slice(more);
        self.node(node).shell(&format!("{PRELUDE}{script}"), &variables)?;
        Ok(())
    }

    /// Adds a pod on node 1 or 2.
    pub fn pod(&self, node: usize) -> anyhow::Result<Attached> {
        let number = self.pods[node - 1].fetch_add(1, Ordering::Relaxed).to_string();
        let namespace = self.world.namespace(&format!("p{node}-{number}"))?;
        namespace.sysctl("ipv6/conf/default/accept_dad", "0")?;
        let host = format!("veth{number}");
        self.run(
            node,
            self.shape.pod,
            &[("P", number.as_str()), ("POD", namespace.name()), ("HOST", &host)],
        )?;
        let addresses = Picture::of(namespace.netns(), &[])?.addresses();
        ensure!(!addresses.is_empty(), "the pod has no address");
        Ok(Attached { namespace, addresses })
    }

    /// Does the work of kube-proxy for a service with one pod behind it: DNAT on both nodes to the pod's first address
    /// of each family, and masquerade for a pod that connects to itself. Returns the service's addresses, in the order
    /// of the pod's addresses.
    pub fn service(&self, number: u8, backend: &Attached) -> anyhow::Result<Vec<SocketAddr>> {
        const PORT: u16 = 80;
        let mut services = Vec::new();
        let (mut there, mut hairpin) = (String::new(), String::new());
        for pod in backend.primary() {
            let (service, family, target) = match pod {
                IpAddr::V4(pod) => (format!("10.96.0.{number}"), "ip", pod.to_string()),
                IpAddr::V6(pod) => (format!("fd10:96::{number}"), "ip6", format!("[{pod}]")),
            };
            for protocol in ["tcp", "udp"] {
                there.push_str(&format!(
                    "{family} daddr {service} {protocol} dport {PORT} dnat {family} to {target}:{ECHO_PORT}\n"
                ));
            }
            let asker = if self.shape.masquerade_all {
                "ct status dnat".to_owned()
            } else {
                format!("{family} saddr {pod}")
            };
            hairpin.push_str(&format!("{asker} {family} daddr {pod} masquerade\n"));
            services.push(SocketAddr::new(service.parse()?, PORT));
        }
        let table = format!(
            "table inet service{number} {{\n\
             chain pre {{\n type nat hook prerouting priority dstnat;\n{there}}}\n\
             chain out {{\n type nat hook output priority -100;\n{there}}}\n\
             chain post {{\n type nat hook postrouting priority srcnat;\n{hairpin}}}\n}}\n"
        );
        for node in &self.nodes {
            node.shell(&format!("nft -f - <<EOF\n{table}EOF\n"), &[])?;
        }
        Ok(services)
    }
}

/// Pod that a CNI made. Its namespace is removed with the world, or by [`Attached::remove`].
#[derive(Debug)]
pub struct Attached {
    /// Its network namespace.
    pub namespace: Namespace,
    /// Its global addresses, with the interface of each, in the kernel's order.
    pub addresses: Vec<(String, IpAddr)>,
}

impl Attached {
    /// Returns the addresses of its first interface, at most one of each family.
    pub fn primary(&self) -> Vec<IpAddr> {
        let mut found: Vec<IpAddr> = Vec::new();
        for (name, address) in &self.addresses {
            if *name == self.addresses[0].0 && !found.iter().any(|it| it.is_ipv4() == address.is_ipv4()) {
                found.push(*address);
            }
        }
        found
    }

    /// Deletes its namespace, as the CNI does at the end, or unexpectedly.
    pub fn remove(&self) -> anyhow::Result<()> {
        self.namespace.delete()
    }
}
