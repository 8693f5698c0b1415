//! Formats rejections, grouped by reason and bounded in length.

use std::collections::{BTreeMap, BTreeSet};

use peerpod_provider_api::{Error, Market, Rejected, Size};

use super::{RejectReason, Rejection};
use crate::text::{ago, clip};

/// Most names of types or zones in a list; above that, only their number is given.
const LISTED: usize = 3;
/// Longest sentence of all groups.
const SENTENCE: usize = 1024;
/// Longest description of one group's offerings.
const OFFERINGS: usize = 200;

/// Rejections for one reason, by type: zones and markets.
type Group<'r> = BTreeMap<&'r str, BTreeSet<(Option<&'r str>, Option<Market>)>>;

pub(super) fn groups(rejections: &[Rejection<'_>]) -> Vec<Rejected> {
    // The order of `RejectReason` is the order of the text, so that offerings that would have suited come first. Exhausted
    // ones are grouped by the cloud's reason, not by the second.
    let mut groups: BTreeMap<RejectReason, Group<'_>> = BTreeMap::new();
    for one in rejections {
        let at = (one.place.map(|place| place.zone.as_str()), one.market);
        groups.entry(rounded(&one.reason)).or_default().entry(one.machine).or_default().insert(at);
    }
    groups
        .iter()
        .take(Error::MAX_REJECTED)
        .map(|(reason, group)| Rejected { offerings: offerings(group), reason: words(reason) })
        .collect()
}

/// Formats all groups as half a sentence. Without groups, it states that there is nothing on offer.
pub(super) fn sentence(rejected: &[Rejected]) -> String {
    let mut text = String::new();
    for (index, Rejected { offerings, reason }) in rejected.iter().enumerate() {
        let next = format!("{offerings}: {reason}");
        if !text.is_empty() && text.len() + next.len() > SENTENCE {
            text.push_str(&format!("; and {} more reasons", rejected.len() - index));
            return text;
        }
        if !text.is_empty() {
            text.push_str("; ");
        }
        text.push_str(&clip(&next, SENTENCE));
    }
    if text.is_empty() { "no instance types or places at all".into() } else { text }
}

/// Returns the text for a size that no type reaches. It is that of cloud-api-adaptor, which users search for.
pub(super) fn nothing_fits(size: &Size) -> String {
    let Size { vcpus, memory_mib, gpus, gpu_model } = size;
    let model = gpu_model.as_ref().map(|model| format!(" of model {model}")).unwrap_or_default();
    if *gpus > 0 || gpu_model.is_some() {
        format!(
            "failed to get instance type based on GPU, vCPU, and memory annotations: no instance type found for \
             the given GPUs ({gpus}){model}, vCPUs ({vcpus}), and memory ({memory_mib}), the guest's own included"
        )
    } else {
        format!(
            "failed to get instance type based on vCPU and memory annotations: no instance type found for the \
             given vcpus ({vcpus}) and memory ({memory_mib}), the guest's own included"
        )
    }
}

fn rounded(reason: &RejectReason) -> RejectReason {
    match reason {
        RejectReason::Exhausted { why, ago } => {
            let step = if ago.as_secs() < 60 { 10 } else { 60 };
            let ago = std::time::Duration::from_secs(ago.as_secs() / step * step);
            RejectReason::Exhausted { why: why.clone(), ago }
        }
        other => other.clone(),
    }
}

fn offerings(group: &Group<'_>) -> String {
    if group.len() > LISTED {
        return format!("{} types", group.len());
    }
    let each: Vec<String> = group.iter().map(|(machine, at)| one_type(machine, at)).collect();
    clip(&each.join(", "), OFFERINGS)
}

/// Formats one type, e.g. `m6a.large in eu-1a, eu-1b (spot)`.
fn one_type(machine: &str, at: &BTreeSet<(Option<&str>, Option<Market>)>) -> String {
    let zones: BTreeSet<&str> = at.iter().filter_map(|(zone, _)| *zone).collect();
    let markets: BTreeSet<Market> = at.iter().filter_map(|(_, market)| *market).collect();
    let mut text = machine.to_owned();
    if zones.len() > LISTED {
        text.push_str(&format!(" in {} zones", zones.len()));
    } else if !zones.is_empty() {
        text.push_str(" in ");
        text.push_str(&zones.into_iter().collect::<Vec<_>>().join(", "));
    }
    match markets.into_iter().collect::<Vec<_>>()[..] {
        [Market::Spot] => text.push_str(" (spot)"),
        [Market::OnDemand] => text.push_str(" (on demand)"),
        _ => {}
    }
    text
}

fn words(reason: &RejectReason) -> String {
    match reason {
        RejectReason::Exhausted { why, ago: time } => format!("{why} ({})", ago(*time)),
        RejectReason::Market(Market::Spot) => "spot is not wanted".into(),
        RejectReason::Market(Market::OnDemand) => "on demand is not wanted".into(),
        RejectReason::Zone => "not in a zone that is asked for".into(),
        RejectReason::DisksIn(zone) => format!("the pod's disks are in {zone}"),
        RejectReason::NotSold => "not sold there".into(),
        RejectReason::Arch(arch) => format!("does not boot {arch} images"),
        RejectReason::Confidential(what) => format!("has no {what}"),
        RejectReason::Disks(wanted) => format!("takes less than {wanted} disks"),
        RejectReason::Nics(wanted) => format!("takes less than {wanted} NICs"),
        RejectReason::Vcpus(wanted) => format!("less than {wanted} vCPUs"),
        RejectReason::Memory(wanted) => format!("less than {wanted} MiB"),
        RejectReason::Gpus(wanted) => format!("less than {wanted} GPUs"),
        RejectReason::GpuModel(wanted) => format!("no {}", clip(wanted, 80)),
        RejectReason::HasGpus => "has GPUs, which were not asked for".into(),
        RejectReason::OtherType(only) => format!("it must be {}", clip(only, 80)),
        RejectReason::NotAllowed => "not in the list of allowed types".into(),
    }
}
