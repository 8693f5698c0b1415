//! Picks an instance type: orders all types that fit, best first. Pure.
//!
//! The search is linear on purpose. "Enough memory and enough CPUs" is not monotone over any one order, so a binary
//! search misses types that fit. 1 400 types take microseconds.

use serde::{Deserialize, Serialize};

use crate::{Error, Size};

/// Type of VM that a cloud offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceType {
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
    /// Price in millionths of a currency unit per hour, when known; all of a catalogue in one currency.
    pub price: Option<u64>,
}

/// Selection rules that an administrator set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy<'p> {
    /// Types that pods may get. Empty: only the default.
    pub allowed: &'p [String],
    /// Type for a pod that asks for no type and no size.
    pub default: &'p str,
}

/// Returns the names of the types to try, best first; at least one.
///
/// * A named type takes precedence over all sizes, if it is allowed. It is then the only one.
/// * Without a name and a size, the result is the default.
/// * Otherwise the result is all allowed types that fit, ordered by [`fitting`].
///
/// # Errors
/// [`Error::Invalid`] when the named type is not allowed, or nothing allowed fits.
pub fn choose(
    named: Option<&str>,
    size: &Size,
    catalogue: &[InstanceType],
    policy: &Policy<'_>,
) -> Result<Vec<String>, Error> {
    if let Some(name) = named.filter(|name| !name.is_empty()) {
        return verify(name, policy).map(|name| vec![name]);
    }
    if *size == Size::default() {
        return verify(policy.default, policy).map(|name| vec![name]);
    }
    let allowed = |one: &&InstanceType| match policy.allowed {
        [] => one.name == policy.default,
        list => list.contains(&one.name),
    };
    let names: Vec<String> =
        fitting(catalogue.iter().filter(allowed), size).into_iter().map(|one| one.name.clone()).collect();
    if names.is_empty() { Err(nothing_fits(size)) } else { Ok(names) }
}

/// Returns the types of at least this size, best first: cheapest if prices are known, then fewest GPUs, least memory,
/// fewest CPUs, name. A type with GPUs fits only a request for GPUs.
pub fn fitting<'t>(types: impl IntoIterator<Item = &'t InstanceType>, size: &Size) -> Vec<&'t InstanceType> {
    // A model without a number is a request for one GPU.
    let gpus = size.gpus.max(u32::from(size.gpu_model.is_some()));
    let fits = |one: &&InstanceType| {
        one.vcpus >= size.vcpus
            && one.memory_mib >= size.memory_mib
            && if gpus > 0 { one.gpus >= gpus } else { one.gpus == 0 }
            && size.gpu_model.as_ref().is_none_or(|wanted| {
                one.gpu_model.as_ref().is_some_and(|model| model.eq_ignore_ascii_case(wanted))
            })
    };
    let mut fitting: Vec<_> = types.into_iter().filter(fits).collect();
    fitting.sort_by(|a, b| rank(a).cmp(&rank(b)));
    fitting
}

/// Total order over types. Without prices it is (GPUs, memory, CPUs, name). With prices, the price comes first, and
/// types without a price come last.
fn rank(one: &InstanceType) -> (bool, u64, u32, u64, u32, &str) {
    (one.price.is_none(), one.price.unwrap_or(0), one.gpus, one.memory_mib, one.vcpus, &one.name)
}

/// Checks whether a type may be used and returns its name. The error texts are those of cloud-api-adaptor, which users
/// search for in a pod's Events.
///
/// # Errors
/// [`Error::Invalid`] when it may not.
pub fn verify(name: &str, policy: &Policy<'_>) -> Result<String, Error> {
    let (allowed, default) = (policy.allowed, policy.default);
    let why = match allowed {
        // The administrator chose the default; the list need not contain it.
        _ if name == default => return Ok(name.to_owned()),
        [] => format!(
            "requested instance type (\"{name}\") is not default (\"{default}\") \
             and supported instance types list is empty"
        ),
        list if list.iter().any(|one| one == name) => return Ok(name.to_owned()),
        _ => format!("requested instance type (\"{name}\") is not part of supported instance types list"),
    };
    Err(Error::invalid(format!("failed to verify instance type: {why}")))
}

/// Error for a size that no type reaches. The texts are those of cloud-api-adaptor, which users search for.
pub fn nothing_fits(size: &Size) -> Error {
    let Size { vcpus, memory_mib, gpus, gpu_model } = size;
    let model = gpu_model.as_ref().map(|model| format!(" of model {model}")).unwrap_or_default();
    Error::invalid(if *gpus > 0 || gpu_model.is_some() {
        format!(
            "failed to get instance type based on GPU, vCPU, and memory annotations: no instance type found for \
             the given GPUs ({gpus}){model}, vCPUs ({vcpus}), and memory ({memory_mib}), the guest's own included"
        )
    } else {
        format!(
            "failed to get instance type based on vCPU and memory annotations: no instance type found for the \
             given vcpus ({vcpus}) and memory ({memory_mib}), the guest's own included"
        )
    })
}

#[cfg(test)]
mod tests;
