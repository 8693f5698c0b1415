//! Defines a reservation of tunnels, as the ledger keeps it: version 2. Version 1, of one device, is still read.

use peerpod_podnet::inspect::PodNetworkState;
use peerpod_podnet::plan::Carry;
use peerpod_podnet::vxlan::Held;
use serde::{Deserialize, Serialize};

/// Encapsulation that carries a pod's frames to its VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TunnelKind {
    /// VXLAN, in clear; both ends must reach each other's UDP port.
    #[default]
    Vxlan,
    /// VXLAN inside WireGuard: encrypted, and works through NAT.
    Wireguard,
}

impl TunnelKind {
    /// Returns the word for it in settings and records.
    pub fn word(self) -> &'static str {
        match self {
            TunnelKind::Vxlan => "vxlan",
            TunnelKind::Wireguard => "wireguard",
        }
    }
}

/// Tunnels with VNIs that the kernel holds for this node. Stored in the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Stored")]
pub struct Reserved {
    /// Encapsulation of the tunnels.
    pub kind: TunnelKind,
    /// Whether node and VM use IPv6.
    pub v6: bool,
    /// The UDP port.
    pub port: u16,
    /// One device for each carried interface; the first belongs to the primary interface.
    pub devices: Vec<Device>,
}

/// The tunnel of one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Index of the pod's interface; 0 in a record of version 1, for the primary interface.
    pub interface: u32,
    /// The number in the device's name, `pp-vx<slot>`.
    #[serde(default)]
    pub slot: u32,
    /// The VXLAN network identifier, 24 bits, unique on this node for port and family.
    pub vni: u32,
    /// The device's index in the pod's namespace.
    pub ifindex: u32,
    /// Whether another program had an ingress qdisc on the interface before; then it must not be removed.
    #[serde(default)]
    pub shared: bool,
}

impl Device {
    pub(super) fn held(&self) -> Held {
        Held { vni: self.vni, ifindex: self.ifindex }
    }
}

impl Reserved {
    /// Returns the tunnel of one of the pod's interfaces.
    pub(super) fn device_of(&self, interface: u32, is_primary: bool) -> Option<&Device> {
        let exact = self.devices.iter().find(|device| device.interface == interface);
        exact.or_else(|| self.devices.iter().find(|device| is_primary && device.interface == 0))
    }

    /// Whether each interface in `seen` has its tunnel, and no other interface has one.
    pub(crate) fn carries(&self, seen: &PodNetworkState) -> bool {
        let has = |(at, index): (usize, u32)| self.device_of(index, at == 0).is_some();
        self.devices.len() == seen.interfaces.len()
            && seen.interfaces.iter().map(|interface| interface.index).enumerate().all(has)
    }

    /// Returns the VNI of the first tunnel, which identifies a sandbox where one number is needed.
    pub fn vni(&self) -> Option<u32> {
        self.devices.first().map(|device| device.vni)
    }

    /// Whether both hold the same VNIs, so that a guest's plan for one is true for the other.
    pub(crate) fn is_same(&self, other: &Reserved) -> bool {
        let vnis = |reserved: &Reserved| reserved.devices.iter().map(|d| d.vni).collect::<Vec<_>>();
        (self.kind, self.v6, self.port) == (other.kind, other.v6, other.port) && vnis(self) == vnis(other)
    }
}

/// Assigns one device to each interface: the recorded one, or else the first free number, without a VNI (0).
pub(super) fn assign(interfaces: &[u32], recorded: Option<&Reserved>) -> Vec<Device> {
    let known = |at: usize, interface: u32| {
        let device = recorded.and_then(|recorded| recorded.device_of(interface, at == 0))?;
        Some(Device { interface, ..*device })
    };
    let mut devices: Vec<Option<Device>> =
        interfaces.iter().enumerate().map(|(at, interface)| known(at, *interface)).collect();
    // Includes interfaces that are gone: their devices may still exist.
    let mut taken: Vec<u32> =
        recorded.into_iter().flat_map(|recorded| &recorded.devices).map(|device| device.slot).collect();
    for (device, interface) in devices.iter_mut().zip(interfaces) {
        if device.is_none() {
            let slot = (0..).find(|slot| !taken.contains(slot)).unwrap_or_default();
            taken.push(slot);
            *device = Some(Device { interface: *interface, slot, vni: 0, ifindex: 0, shared: false });
        }
    }
    devices.into_iter().flatten().collect()
}

/// Pairs the interfaces with their tunnels. An interface that came up since the reservation has no tunnel yet.
pub(super) fn carried(reserved: &Reserved, carries: Vec<Carry>) -> Vec<(Carry, Device)> {
    let device = |carry: &Carry| reserved.device_of(carry.interface, carry.slot == 0).copied();
    carries.into_iter().filter_map(|carry| device(&carry).map(|device| (carry, device))).collect()
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stored {
    Two { kind: TunnelKind, v6: bool, port: u16, devices: Vec<Device> },
    One { vni: u32, ifindex: u32, v6: bool, port: u16 },
}

impl From<Stored> for Reserved {
    fn from(stored: Stored) -> Reserved {
        match stored {
            Stored::Two { kind, v6, port, devices } => Reserved { kind, v6, port, devices },
            Stored::One { vni, ifindex, v6, port } => {
                let only = Device { interface: 0, slot: 0, vni, ifindex, shared: false };
                Reserved { kind: TunnelKind::Vxlan, v6, port, devices: vec![only] }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_a_reservation_are_read() {
        let one: Reserved =
            serde_json::from_str(r#"{"vni":4242,"ifindex":3,"v6":true,"port":4789}"#).unwrap();
        assert_eq!((one.kind, one.v6, one.port, one.vni()), (TunnelKind::Vxlan, true, 4789, Some(4242)));
        assert_eq!(one.device_of(2, true).map(|d| d.ifindex), Some(3), "the primary interface's");
        assert_eq!(one.device_of(5, false), None);
        let written = serde_json::to_string(&one).unwrap();
        let again: Reserved = serde_json::from_str(&written).unwrap();
        assert_eq!(again, one);
        // Exactly the form of version 2 on disk.
        let two = r#"{"kind":"wireguard","v6":false,"port":4790,"devices":[{"interface":2,"slot":0,"vni":7,"ifindex":1048576,"shared":true}]}"#;
        let read: Reserved = serde_json::from_str(two).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), two);
    }

    fn reserved(devices: &[(u32, u32)]) -> Reserved {
        let devices = devices
            .iter()
            .map(|&(interface, slot)| Device {
                interface,
                slot,
                vni: 100 + interface,
                ifindex: 1000 + slot,
                shared: false,
            })
            .collect();
        Reserved { kind: TunnelKind::Vxlan, v6: false, port: 4789, devices }
    }

    #[test]
    fn interfaces_keep_their_tunnels_when_others_come_and_go() {
        let slots =
            |devices: &[Device]| devices.iter().map(|d| (d.interface, d.slot, d.vni)).collect::<Vec<_>>();
        assert_eq!(slots(&assign(&[2, 5], None)), [(2, 0, 0), (5, 1, 0)]);
        let recorded = reserved(&[(2, 0), (5, 1), (7, 2)]);
        assert_eq!(slots(&assign(&[2, 7, 9], Some(&recorded))), [(2, 0, 102), (7, 2, 107), (9, 3, 0)]);
        // A record of version 1 has no interface: it was the primary one.
        let old = reserved(&[(0, 0)]);
        assert_eq!(slots(&assign(&[2, 5], Some(&old))), [(2, 0, 100), (5, 1, 0)]);
    }
}
