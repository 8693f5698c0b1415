//! Implements the plain kind: VXLAN between the node's address and the VM's address, guarded by the nftables filter.

use std::net::IpAddr;

use peerpod_podnet::Error;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::nft::Peer;
use peerpod_podnet::plan::Underlay;
use peerpod_podnet::tunnel;
use peerpod_podnet::vxlan::{Shape, probe};

use super::anti_spoof::AntiSpoof;
use super::backend::{Backend, ConnectedTunnel, Host, VmPath};
use super::{Reserved, TunnelConfig};

#[derive(Debug)]
pub(super) struct Vxlan {
    host: Host,
    port: u16,
    udp_checksum: bool,
    source_ports: Option<(u16, u16)>,
    anti_spoof: Option<AntiSpoof>,
}

impl Vxlan {
    /// Opens it in the network namespace of the calling thread; checks that the port is usable.
    pub(super) fn open(config: &TunnelConfig) -> Result<Vxlan, Error> {
        let host = Host::new(Netns::current()?);
        let shape = Shape { port: config.port, v6: false, udp_checksum: config.udp_checksum };
        host.with(|client| probe(client, shape, config.source_ports))?;
        let anti_spoof =
            config.anti_spoof.then(|| AntiSpoof::open(host.netns(), config.owner)).transpose()?;
        let TunnelConfig { port, udp_checksum, source_ports, .. } = *config;
        Ok(Vxlan { host, port, udp_checksum, source_ports, anti_spoof })
    }
}

fn peers(connected: &ConnectedTunnel) -> Vec<Peer> {
    connected.reserved.devices.iter().map(|device| Peer { address: connected.vm, vni: device.vni }).collect()
}

impl Backend for Vxlan {
    fn host(&self) -> &Host {
        &self.host
    }

    fn shape(&self, v6: bool) -> Shape {
        Shape { port: self.port, v6, udp_checksum: self.udp_checksum }
    }

    fn source_ports(&self) -> Option<(u16, u16)> {
        self.source_ports
    }

    fn path(&self, reserved: &Reserved, vm: IpAddr) -> Result<VmPath, Error> {
        let shape = self.shape_of(reserved);
        let path = self.host.with(|client| tunnel::path(client, shape, vm))?;
        Ok(VmPath { remote: vm, local: path.source, node: path.source, mtu: path.mtu })
    }

    fn admit(&self, connected: &ConnectedTunnel) -> Result<(), Error> {
        let Some(anti_spoof) = &self.anti_spoof else { return Ok(()) };
        anti_spoof.admit(&connected.sandbox, connected.reserved.port, &peers(connected))
    }

    fn dismiss(&self, reserved: Option<&Reserved>, vm: Option<IpAddr>) -> Result<(), Error> {
        let Some(anti_spoof) = &self.anti_spoof else { return Ok(()) };
        let Some(reserved) = reserved else { return anti_spoof.dismiss_address(vm) };
        let vnis: Vec<u32> = reserved.devices.iter().map(|device| device.vni).collect();
        anti_spoof.dismiss(reserved.port, reserved.v6, &vnis, vm)
    }

    fn forget(&self, sandbox: &str) -> Result<(), Error> {
        self.anti_spoof.as_ref().map_or(Ok(()), |anti_spoof| anti_spoof.forget(sandbox))
    }

    fn reconcile(&self, connected: &[ConnectedTunnel], stay: &[Peer]) -> Result<usize, Error> {
        let Some(anti_spoof) = &self.anti_spoof else { return Ok(0) };
        let of = |connected: &ConnectedTunnel| {
            let port = connected.reserved.port;
            peers(connected).into_iter().map(move |peer| (port, peer)).collect::<Vec<_>>()
        };
        let mut all: Vec<(u16, Peer)> = connected.iter().flat_map(of).collect();
        all.extend(stay.iter().map(|peer| (self.port, *peer)));
        anti_spoof.reconcile(&all)
    }

    fn underlay(&self, connected: &ConnectedTunnel, path: &VmPath) -> Underlay {
        Underlay {
            node: path.node,
            vm: Some(connected.vm),
            port: connected.reserved.port,
            udp_checksum: self.udp_checksum,
            overhead: self.shape_of(&connected.reserved).overhead(),
        }
    }
}
