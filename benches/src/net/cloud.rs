//! Builds a node with a "cloud network" between it and one VM with its podns.

use std::net::{IpAddr, Ipv4Addr};

use peerpod_node::tunnel::{Netns, Tunnel, inspect};
use peerpod_podnet::guest::{self, Applied};
use peerpod_world::{Namespace, World};

use super::traffic::Path;

/// MTU of most clouds, in bytes.
pub(crate) const MTU: u32 = 1500;
/// The node's address as the VM reaches it.
pub(crate) const NODE: Ipv4Addr = Ipv4Addr::new(192, 168, 100, 1);
/// The VM's address.
pub(crate) const VM: Ipv4Addr = Ipv4Addr::new(192, 168, 100, 2);

/// One node and one VM with its podns.
pub(crate) struct Cloud {
    pub(crate) world: World,
    pub(crate) vm: Namespace,
    pub(crate) podns: Namespace,
}

impl Cloud {
    /// Builds the cloud; the network between node and VM carries packets of `mtu` bytes.
    pub(crate) fn new(mtu: u32) -> anyhow::Result<Cloud> {
        let world = World::new()?;
        let (vm, podns) = (world.namespace("vm")?, world.namespace("vmpod")?);
        let peer = vm.name();
        world.node().ip(&format!(
            "link add ens0 mtu {mtu} type veth peer name ens0 mtu {mtu} netns {peer}\n\
             addr add 192.168.100.1/24 dev ens0\n\
             link set ens0 up\n"
        ))?;
        vm.ip("addr add 192.168.100.2/24 dev ens0\nlink set ens0 up\n")?;
        Ok(Cloud { world, vm, podns })
    }

    /// Sets a pod's network up on both sides, as the node and the guest do.
    pub(crate) fn connect(&self, tunnel: &Tunnel, pod: &Netns, id: &str) -> anyhow::Result<Applied> {
        let seen = inspect(pod)?;
        let reserved = tunnel.reserve(pod, id, &seen, false, None)?;
        let (plan, _) = tunnel.connect(pod, id, &reserved, &seen, VM.into())?;
        let podns = self.podns.path();
        Ok(self.vm.run(move || guest::apply(&plan, None, &podns))??)
    }

    /// Returns the path from the node to an address in another namespace.
    pub(crate) fn path(&self, to: &Namespace, address: IpAddr) -> Path {
        Path { from: self.world.node().netns().clone(), to: to.netns().clone(), address }
    }

    /// Returns the path from the node straight to the VM.
    pub(crate) fn bare(&self) -> Path {
        self.path(&self.vm, VM.into())
    }

    /// Makes a VXLAN with the tunnel's settings and without a redirect, and returns the path over it from the node to
    /// the VM.
    pub(crate) fn plain_vxlan(&self) -> anyhow::Result<Path> {
        let ends = [
            (self.world.node(), "192.168.100.1", "192.168.100.2", 1),
            (&self.vm, "192.168.100.2", "192.168.100.1", 2),
        ];
        for (namespace, local, remote, host) in ends {
            namespace.ip(&format!(
                "link add plain0 type vxlan id 77 local {local} remote {remote} dstport 4789 noudpcsum nolearning\n\
                 addr add 10.77.0.{host}/24 dev plain0\n\
                 link set plain0 mtu 1450 up\n"
            ))?;
        }
        Ok(self.path(&self.vm, Ipv4Addr::new(10, 77, 0, 2).into()))
    }

    /// Returns the path from the node to the pod, which is in the VM.
    pub(crate) fn to_pod(&self, address: IpAddr) -> Path {
        self.path(&self.podns, address)
    }
}
