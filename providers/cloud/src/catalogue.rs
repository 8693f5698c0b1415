//! What a cloud offers: types, places, prices. Plain data that a provider fills from its cloud, and the planner reads.

use std::collections::{HashMap, HashSet};

use peerpod_provider_api::{Arch, Confidential, Market};
use serde::{Deserialize, Serialize};

/// A type of VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineType {
    /// The cloud's name for it.
    pub name: String,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// GPUs.
    pub gpus: u32,
    /// Which GPU, by the cloud's name.
    pub gpu_model: Option<String>,
    /// The architectures whose images it boots.
    pub archs: Vec<Arch>,
    /// What it offers for confidential VMs.
    pub confidential: Vec<Confidential>,
    /// Most data disks beside the root disk; `None`: not known, and then not a reason to refuse it.
    pub max_disks: Option<u32>,
    /// Most network cards; `None`: not known, and then not a reason to refuse it.
    pub max_nics: Option<u32>,
}

/// Where a VM can be: a zone, and a subnet in it where the cloud has those.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The zone, by the name that disks and requests use.
    pub zone: String,
    /// The subnet.
    pub subnet: Option<String>,
}

/// Prices in millionths of a currency unit per hour, all in one currency. A price for no zone is that of every zone
/// which has none of its own.
#[derive(Debug, Clone, Default)]
pub struct Prices(HashMap<String, Vec<Price>>);

#[derive(Debug, Clone)]
struct Price {
    market: Market,
    zone: Option<String>,
    millionths: u64,
}

impl Prices {
    /// Notes a price; the later one of the same offering wins.
    pub fn set(&mut self, machine: &str, zone: Option<&str>, market: Market, millionths: u64) {
        let prices = self.0.entry(machine.to_owned()).or_default();
        prices.retain(|one| one.market != market || one.zone.as_deref() != zone);
        prices.push(Price { market, zone: zone.map(str::to_owned), millionths });
    }

    /// The price, if known.
    pub fn get(&self, machine: &str, zone: &str, market: Market) -> Option<u64> {
        let prices = self.0.get(machine)?;
        let of = |wanted: Option<&str>| {
            prices.iter().find(|one| one.market == market && one.zone.as_deref() == wanted)
        };
        of(Some(zone)).or_else(|| of(None)).map(|one| one.millionths)
    }
}

/// Everything on offer. The order of its lists means nothing.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    /// The types, each name once.
    pub types: Vec<MachineType>,
    /// The places.
    pub places: Vec<Place>,
    /// In which zones each type is sold; a type that is missing here is sold in none. `None`: not known, then all in all.
    pub sold: Option<HashMap<String, HashSet<String>>>,
    /// What is known of prices; may be empty.
    pub prices: Prices,
}

impl Catalogue {
    /// Whether the type is sold in the zone, as far as is known.
    pub fn is_sold(&self, machine: &str, zone: &str) -> bool {
        let Some(sold) = &self.sold else { return true };
        sold.get(machine).is_some_and(|zones| zones.contains(zone))
    }
}

/// One thing that a create can name: a type, where, and how it is paid for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Offering {
    /// The type's name.
    #[serde(rename = "type")]
    pub machine: String,
    /// The zone.
    pub zone: String,
    /// The subnet, where the cloud has those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet: Option<String>,
    /// The market.
    pub market: Market,
}

impl std::fmt::Display for Offering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Offering { machine, zone, subnet: _, market } = self;
        write!(f, "{machine} in {zone}")?;
        if *market == Market::Spot { write!(f, " (spot)") } else { Ok(()) }
    }
}
