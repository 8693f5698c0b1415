//! Offerings of a cloud: types, places, prices. Plain data that a provider fills from its cloud and the planner reads.

use std::collections::{HashMap, HashSet};

use peerpod_provider_api::{Arch, Chosen, Confidential, Market};
use serde::{Deserialize, Serialize};

/// Type of VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineType {
    /// Cloud's name of the type.
    pub name: String,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// GPUs.
    pub gpus: u32,
    /// GPU model, by the cloud's name.
    pub gpu_model: Option<String>,
    /// Architectures of the images that it boots.
    pub archs: Vec<Arch>,
    /// Confidential-computing technologies that it offers.
    pub confidential: Vec<Confidential>,
    /// Most data disks in addition to the root disk; `None`: unknown, which is no reason to refuse the type.
    pub max_disks: Option<u32>,
    /// Most NICs; `None`: unknown, which is no reason to refuse the type.
    pub max_nics: Option<u32>,
}

/// Place of a VM: a zone, and a subnet in it where the cloud has subnets.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// Zone, by the name that disks and requests use.
    pub zone: String,
    /// Subnet in the zone.
    pub subnet: Option<String>,
}

/// Prices in millionths of a currency unit per hour, all in one currency. A price without a zone applies to every zone
/// that has no price of its own.
#[derive(Debug, Clone, Default)]
pub struct Prices(HashMap<String, Vec<Price>>);

#[derive(Debug, Clone)]
struct Price {
    market: Market,
    zone: Option<String>,
    millionths: u64,
}

impl Prices {
    /// Records a price. It replaces an earlier one of the same offering.
    pub fn set(&mut self, machine: &str, zone: Option<&str>, market: Market, millionths: u64) {
        let prices = self.0.entry(machine.to_owned()).or_default();
        prices.retain(|one| one.market != market || one.zone.as_deref() != zone);
        prices.push(Price { market, zone: zone.map(str::to_owned), millionths });
    }

    /// Returns the price, if known.
    pub fn get(&self, machine: &str, zone: &str, market: Market) -> Option<u64> {
        let prices = self.0.get(machine)?;
        let of = |wanted: Option<&str>| {
            prices.iter().find(|one| one.market == market && one.zone.as_deref() == wanted)
        };
        of(Some(zone)).or_else(|| of(None)).map(|one| one.millionths)
    }
}

/// All offerings of a cloud. The order of its lists has no meaning.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    /// Types, each name once.
    pub types: Vec<MachineType>,
    /// Places of VMs.
    pub places: Vec<Location>,
    /// Zones in which each type is sold; a type without an entry is sold in none. `None`: unknown, so that every type
    /// counts as sold in every zone.
    pub sold: Option<HashMap<String, HashSet<String>>>,
    /// Known prices; may be empty.
    pub prices: Prices,
}

impl Catalogue {
    /// Whether the type is sold in the zone, as far as known.
    pub fn is_sold(&self, machine: &str, zone: &str) -> bool {
        let Some(sold) = &self.sold else { return true };
        sold.get(machine).is_some_and(|zones| zones.contains(zone))
    }
}

/// Offering that a create can name: type, place and market.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Offering {
    /// Name of the type.
    #[serde(rename = "type")]
    pub machine: String,
    /// Zone of the offering.
    pub zone: String,
    /// Subnet, where the cloud has subnets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet: Option<String>,
    /// Market of the offering.
    pub market: Market,
}

impl Offering {
    /// Returns the choices that this offering is, with the VM's image.
    pub fn chosen(&self, image: Option<String>) -> Chosen {
        let zone = Some(self.zone.clone()).filter(|zone| !zone.is_empty());
        Chosen {
            instance_type: Some(self.machine.clone()),
            zone,
            market: Some(self.market),
            image,
            price: None,
        }
    }
}

impl std::fmt::Display for Offering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Offering { machine, zone, subnet: _, market } = self;
        write!(f, "{machine} in {zone}")?;
        if *market == Market::Spot { write!(f, " (spot)") } else { Ok(()) }
    }
}
