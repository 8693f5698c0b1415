//! Orders the offerings that suit a request, best first, and finds the reason against every other one. Pure, and
//! linear: some thousand types in a few zones take a fraction of a millisecond, and "enough memory and enough CPUs" is
//! monotone over no order.
//!
//! Every (type, place, market) of the catalogue is either in [`Plan::offerings`] or covered by one [`Rejection`]. A
//! rejection for all places or markets of a type is one entry.

mod text;

use std::time::Duration;

use peerpod_provider_api::{Arch, Confidential, CreateRequest, Error, Market, Rejected, Size};
use tokio::time::Instant;

use crate::catalogue::{Catalogue, Location, MachineType, Offering};
use crate::exhausted::Exhausted;

/// Settings of the administrator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Types that pods may get. Empty: only the default.
    pub allowed: Vec<String>,
    /// Type for a pod that asks for no type and no size.
    pub default: String,
    /// Markets that pods may use, in any order: the price decides, and without prices spot comes first.
    pub markets: Vec<Market>,
    /// Architecture of the configured image.
    pub arch: Option<Arch>,
    /// Confidential-computing technology for pods that name none.
    pub confidential: Option<Confidential>,
}

/// Reason why an offering does not suit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RejectReason {
    /// It would suit, but the cloud recently had no capacity for it.
    Exhausted {
        /// Reason from the cloud.
        why: String,
        /// Time since then.
        ago: Duration,
    },
    /// The market was not requested, or pods may not use it.
    Market(Market),
    /// The zone was not requested.
    Zone,
    /// The disks are in another zone.
    DisksIn(String),
    /// The cloud does not sell the type in this zone.
    NotSold,
    /// It does not boot images of this architecture.
    Arch(Arch),
    /// It does not offer this technology.
    Confidential(Confidential),
    /// It does not take this many disks.
    Disks(u32),
    /// It does not take this many NICs.
    Nics(u32),
    /// It has fewer CPUs than this.
    Vcpus(u32),
    /// It has less memory than this, in MiB.
    Memory(u64),
    /// It has fewer GPUs than this.
    Gpus(u32),
    /// It has another GPU than this.
    GpuModel(String),
    /// It has GPUs, which were not requested.
    HasGpus,
    /// Another type was requested, or is the default for pods without a size.
    OtherType(String),
    /// It is not in the list of types that pods may get.
    NotAllowed,
}

/// Offerings rejected for one reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection<'c> {
    /// Name of the type.
    pub machine: &'c str,
    /// Place; `None`: all.
    pub place: Option<&'c Location>,
    /// Market; `None`: all.
    pub market: Option<Market>,
    /// Reason against them.
    pub reason: RejectReason,
}

/// Offering that suits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate<'c> {
    /// Type of the VM.
    pub machine: &'c MachineType,
    /// Place of the VM.
    pub place: &'c Location,
    /// Market of the VM.
    pub market: Market,
    /// Price in millionths per hour, if known.
    pub price: Option<u64>,
}

impl Candidate<'_> {
    /// Returns the offering, in the form that a call names and a ledger keeps.
    pub fn offering(&self) -> Offering {
        Offering {
            machine: self.machine.name.clone(),
            zone: self.place.zone.clone(),
            subnet: self.place.subnet.clone(),
            market: self.market,
        }
    }
}

/// Result of [`plan()`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan<'c> {
    /// Offerings that suit: best first, the others as fallbacks.
    pub offerings: Vec<Candidate<'c>>,
    /// All other offerings, in the order of the types' names.
    pub rejections: Vec<Rejection<'c>>,
}

/// All markets. Each type counts as offered on each, because the catalogue has no such data.
pub const MARKETS: [Market; 2] = [Market::Spot, Market::OnDemand];

/// Returns the offerings that suit a request, in order: cheapest first (those without a price last), then fewest GPUs, least
/// memory, fewest CPUs, the type's name, spot before on-demand, the names of zone and subnet.
///
/// # Errors
/// [`Error::Invalid`] when the named or default type is not in the catalogue, or the named one is not allowed.
pub fn plan<'c>(
    catalogue: &'c Catalogue,
    request: &CreateRequest,
    policy: &Policy,
    marks: &Exhausted,
    now: Instant,
) -> Result<Plan<'c>, Error> {
    let only = only(catalogue, request, policy)?;
    let mut types: Vec<&MachineType> = catalogue.types.iter().collect();
    types.sort_by(|a, b| a.name.cmp(&b.name));
    let mut places: Vec<&Location> = catalogue.places.iter().collect();
    places.sort();
    places.dedup();
    let mut plan = Plan { offerings: Vec::new(), rejections: Vec::new() };
    for machine in types {
        let mut reject = |place, market, reason| {
            plan.rejections.push(Rejection { machine: &machine.name, place, market, reason });
        };
        if let Some(reason) = unfit(machine, request, policy, only.as_deref()) {
            reject(None, None, reason);
            continue;
        }
        for place in &places {
            if let Some(reason) = misplaced(catalogue, machine, place, request) {
                reject(Some(*place), None, reason);
                continue;
            }
            for market in MARKETS {
                if let Some(reason) = unavailable(machine, place, market, request, policy, marks, now) {
                    reject(Some(*place), Some(market), reason);
                    continue;
                }
                let price = catalogue.prices.get(&machine.name, &place.zone, market);
                plan.offerings.push(Candidate { machine, place, market, price });
            }
        }
    }
    plan.offerings.sort_by(|a, b| rank(a).cmp(&rank(b)));
    Ok(plan)
}

impl Plan<'_> {
    /// Groups the rejections by reason, most telling first, into at most [`Error::MAX_REJECTED`] groups.
    pub fn rejected(&self) -> Vec<Rejected> {
        text::groups(&self.rejections)
    }

    /// Returns the error for a plan without offerings: [`Error::Capacity`] when an offering would suit but was recently
    /// exhausted, otherwise [`Error::Invalid`].
    pub fn nothing_left(&self, request: &CreateRequest) -> Error {
        let what = &request.name;
        let rejected = self.rejected();
        let exhausted =
            self.rejections.iter().any(|one| matches!(one.reason, RejectReason::Exhausted { .. }));
        let because = text::sentence(&rejected);
        if exhausted {
            let text = format!(
                "create of {what}: all that fits is exhausted for the moment: {because}; \
                 allow more instance types, zones or markets, or wait"
            );
            return Error::Capacity { offering: "everything that fits".into(), rejected, text };
        }
        let no_type_is_large_enough = self.rejections.iter().all(|one| {
            use RejectReason::{GpuModel, Gpus, HasGpus, Memory, NotAllowed, Vcpus};
            matches!(one.reason, Vcpus(_) | Memory(_) | Gpus(_) | GpuModel(_) | HasGpus | NotAllowed)
        });
        if no_type_is_large_enough {
            return Error::invalid(format!("{} (of {because})", text::nothing_fits(&request.size)));
        }
        Error::invalid(format!(
            "create of {what}: nothing on offer fits: {because}; change the request, or allow more instance types, \
             zones or markets"
        ))
    }
}

/// Returns the only allowed type, where it is fixed.
fn only(catalogue: &Catalogue, request: &CreateRequest, policy: &Policy) -> Result<Option<String>, Error> {
    let name = match request.instance_type.as_ref().filter(|name| !name.is_empty()) {
        Some(name) => {
            verify(name, policy)?;
            name.clone()
        }
        None if request.size == Size::default() => policy.default.clone(),
        None => return Ok(None),
    };
    if !catalogue.types.iter().any(|one| one.name == name) {
        return Err(Error::invalid(format!(
            "instance type {name} is not offered here; check its name and the region, or name another one"
        )));
    }
    Ok(Some(name))
}

/// Checks whether pods may get a type. The error texts are those of cloud-api-adaptor, which users search for in a pod's
/// Events.
fn verify(name: &str, Policy { allowed, default, .. }: &Policy) -> Result<(), Error> {
    let why = match &allowed[..] {
        // The administrator chose the default; the list need not contain it.
        _ if name == default => return Ok(()),
        [] => format!(
            "requested instance type (\"{name}\") is not default (\"{default}\") \
             and supported instance types list is empty"
        ),
        list if list.iter().any(|one| one == name) => return Ok(()),
        _ => format!("requested instance type (\"{name}\") is not part of supported instance types list"),
    };
    Err(Error::invalid(format!("failed to verify instance type: {why}")))
}

/// Returns the reason against the type, independent of the place.
fn unfit(
    machine: &MachineType,
    request: &CreateRequest,
    policy: &Policy,
    only: Option<&str>,
) -> Option<RejectReason> {
    let arch = request.arch.or(policy.arch);
    let confidential = request.confidential.or(policy.confidential);
    let disks = u32::try_from(request.disks.len()).unwrap_or(u32::MAX);
    let nics = 1 + u32::from(request.second_nic);
    let by_type = match only {
        Some(only) => (machine.name != only).then(|| RejectReason::OtherType(only.to_owned())),
        None => too_small(machine, &request.size, policy),
    };
    by_type
        .or_else(|| arch.filter(|arch| !machine.archs.contains(arch)).map(RejectReason::Arch))
        .or_else(|| {
            confidential.filter(|one| !machine.confidential.contains(one)).map(RejectReason::Confidential)
        })
        .or_else(|| machine.max_disks.filter(|most| *most < disks).map(|_| RejectReason::Disks(disks)))
        .or_else(|| machine.max_nics.filter(|most| *most < nics).map(|_| RejectReason::Nics(nics)))
}

fn too_small(machine: &MachineType, size: &Size, policy: &Policy) -> Option<RejectReason> {
    let Size { vcpus, memory_mib, gpus, gpu_model } = size;
    let allowed = match &policy.allowed[..] {
        [] => machine.name == policy.default,
        list => list.contains(&machine.name),
    };
    // A model without a number is a request for one GPU.
    let gpus = (*gpus).max(u32::from(gpu_model.is_some()));
    let is_model =
        |wanted: &String| machine.gpu_model.as_ref().is_some_and(|model| model.eq_ignore_ascii_case(wanted));
    Some(match () {
        () if !allowed => RejectReason::NotAllowed,
        () if gpus == 0 && machine.gpus > 0 => RejectReason::HasGpus,
        () if machine.gpus < gpus => RejectReason::Gpus(gpus),
        () if machine.vcpus < *vcpus => RejectReason::Vcpus(*vcpus),
        () if machine.memory_mib < *memory_mib => RejectReason::Memory(*memory_mib),
        () => {
            let other = gpu_model.as_ref().filter(|wanted| !is_model(wanted))?;
            RejectReason::GpuModel(other.clone())
        }
    })
}

/// Returns the reason against the place for this type, on any market.
fn misplaced(
    catalogue: &Catalogue,
    machine: &MachineType,
    place: &Location,
    request: &CreateRequest,
) -> Option<RejectReason> {
    if !request.zones.is_empty() && !request.zones.contains(&place.zone) {
        return Some(RejectReason::Zone);
    }
    let disk_zone = request.disks.iter().find_map(|disk| disk.zone.as_ref());
    if let Some(zone) = disk_zone.filter(|zone| **zone != place.zone) {
        return Some(RejectReason::DisksIn(zone.clone()));
    }
    (!catalogue.is_sold(&machine.name, &place.zone)).then_some(RejectReason::NotSold)
}

fn unavailable(
    machine: &MachineType,
    place: &Location,
    market: Market,
    request: &CreateRequest,
    policy: &Policy,
    marks: &Exhausted,
    now: Instant,
) -> Option<RejectReason> {
    let wanted = match request.market {
        Some(wanted) => wanted == market,
        None => policy.markets.contains(&market),
    };
    if !wanted {
        return Some(RejectReason::Market(market));
    }
    let mark = marks.find(&machine.name, &place.zone, place.subnet.as_deref(), market, now)?;
    Some(RejectReason::Exhausted { why: mark.why.clone(), ago: now.saturating_duration_since(mark.at) })
}

/// Total order: no two candidates of a catalogue are equal in it.
#[expect(clippy::type_complexity, reason = "it is compared, and never named")]
fn rank<'a>(one: &'a Candidate<'_>) -> ((bool, u64), (u32, u64, u32, &'a str), (Market, &'a Location)) {
    let MachineType { name, gpus, memory_mib, vcpus, .. } = one.machine;
    (
        (one.price.is_none(), one.price.unwrap_or(0)),
        (*gpus, *memory_mib, *vcpus, name),
        (one.market, one.place),
    )
}

#[cfg(test)]
mod tests;
