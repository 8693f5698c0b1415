//! Derives the wanted VM from the shim's annotations and the sandbox id, and checks both. Pure. Both of Kata's shims
//! always send exactly nine keys, and fill values that were not asked for with `""` or `"0"`; the Rust shim prints
//! vCPUs as a float. Only this module knows the differences between the shims.

pub(crate) mod vm_options;

use std::collections::HashMap;
use std::fmt;

pub(crate) use peerpod_common::id::SandboxId;
use peerpod_link::initdata::Initdata;
pub(crate) use peerpod_provider_api::Size;
use serde::{Deserialize, Serialize};
pub(crate) use vm_options::VmOptions;

/// The pod's name; with the Go shim under CRI-O `k8s_<pod>_<namespace>_<uid>_<attempt>`.
pub(crate) const SANDBOX_NAME: &str = "io.kubernetes.cri.sandbox-name";
pub(crate) const SANDBOX_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
pub(crate) const MACHINE_TYPE: &str = "io.katacontainers.config.hypervisor.machine_type";
pub(crate) const IMAGE: &str = "io.katacontainers.config.hypervisor.image";
/// vCPUs: an integer from the Go shim, a decimal from the Rust shim.
pub(crate) const DEFAULT_VCPUS: &str = "io.katacontainers.config.hypervisor.default_vcpus";
pub(crate) const DEFAULT_MEMORY: &str = "io.katacontainers.config.hypervisor.default_memory";
/// Initdata: TOML that the shim has already decoded.
pub(crate) const INIT_DATA: &str = "io.katacontainers.config.hypervisor.cc_init_data";
pub(crate) const DEFAULT_GPUS: &str = "io.katacontainers.config.hypervisor.default_gpus";
pub(crate) const DEFAULT_GPU_MODEL: &str = "io.katacontainers.config.hypervisor.default_gpu_model";

/// More vCPUs than any cloud offers in one VM.
const MAX_VCPUS: u64 = 4096;
/// 64 TiB, in MiB.
const MAX_MEMORY: u64 = 64 << 20;
/// More GPUs than any cloud offers in one VM.
const MAX_GPUS: u64 = 256;

/// Memory in MiB that a guest needs besides its pod, where neither the configuration nor the provider sets it.
pub(crate) const GUEST_MEMORY: u64 = 256;
/// Least memory in MiB with which a VM boots.
const LEAST_MEMORY: u64 = 128;
/// Divisor for the kernel's share: the description of every page, and the pages that it keeps free.
const PAGES_SHARE: u64 = 32;

const MAX_POD_NAME: usize = 253;

/// A pod by name. Display is `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    /// The UID, known only from the Go shim under CRI-O; a pod of the same name may be another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The VM that a pod wants. Values that were not asked for are zero or `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub pod: PodRef,
    /// vCPUs are rounded up, memory is in MiB.
    pub size: Size,
    pub instance_type: Option<String>,
    pub image: Option<String>,
    /// Initdata, as the shim sent it.
    pub initdata: Option<String>,
    pub vm_options: VmOptions,
    /// W3C `traceparent` of the call, if its caller records a trace.
    pub traceparent: Option<String>,
}

/// Reason that the annotations do not describe a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("read the annotations: {0} is missing or empty; the pod must be started by containerd or CRI-O")]
    Missing(&'static str),
    /// A value that its key does not allow, cut to 64 characters; `why` names the mistake and an accepted form.
    #[error("read the annotations: {key} = {value:?}: {why}")]
    Bad { key: &'static str, value: String, why: String },
}

impl Error {
    fn bad(key: &'static str, value: &str, why: impl Into<String>) -> Error {
        Error::Bad { key, value: value.chars().take(64).collect(), why: why.into() }
    }
}

/// Limit of initdata. One call to the guest carries it beside a pod's network; such a call is a ttrpc frame of 4 MiB.
const MAX_INITDATA: usize = 3 << 20;

/// Returns the MiB of a VM for a pod of `pod` MiB (0: not said, nor is the result) and a guest that needs `guest`.
pub(crate) fn vm_memory(pod: u64, guest: u64) -> u64 {
    if pod == 0 {
        return 0;
    }
    let sum = pod.saturating_add(guest);
    sum.saturating_add(sum.div_ceil(PAGES_SHARE)).max(LEAST_MEMORY)
}

/// Reads the shim's annotations, and Peerpod's own ([`vm_options`]). All others are ignored.
pub(crate) fn parse(annotations: &HashMap<String, String>) -> Result<Wanted, Error> {
    let given = |key: &'static str| given(annotations, key);
    let text = |key| Some(given(key)).filter(|value| !value.is_empty()).map(str::to_owned);
    let number = |key, max| whole(given(key), max).map_err(|why| Error::bad(key, given(key), why));
    let vcpus = given(DEFAULT_VCPUS);
    let size = Size {
        vcpus: rounded_up(vcpus, MAX_VCPUS).map_err(|why| Error::bad(DEFAULT_VCPUS, vcpus, why))?,
        memory_mib: number(DEFAULT_MEMORY, MAX_MEMORY)?,
        gpus: u32::try_from(number(DEFAULT_GPUS, MAX_GPUS)?).unwrap_or(u32::MAX),
        gpu_model: text(DEFAULT_GPU_MODEL),
    };
    // Kept unchanged, white space included: it may be measured.
    let initdata = annotations.get(INIT_DATA).filter(|value| !value.is_empty());
    let wanted = Wanted {
        pod: pod_of(annotations)?,
        size,
        instance_type: text(MACHINE_TYPE),
        image: text(IMAGE),
        initdata: initdata.cloned(),
        vm_options: VmOptions::read(annotations)?,
        traceparent: None,
    };
    if let Some(text) = initdata {
        if text.len() > MAX_INITDATA {
            let why = format!("{} bytes, and {MAX_INITDATA} are the most that reach the VM", text.len());
            return Err(Error::bad(INIT_DATA, text, why));
        }
        Initdata::parse(text).map_err(|why| Error::bad(INIT_DATA, "…", why.to_string()))?;
    }
    Ok(wanted)
}

/// Returns the value of an annotation without white space around it; empty if it is missing.
fn given<'a>(annotations: &'a HashMap<String, String>, key: &str) -> &'a str {
    annotations.get(key).map_or("", |value| value.trim())
}

/// Returns the sandbox's pod, and ignores all other annotations.
pub(crate) fn pod_of(annotations: &HashMap<String, String>) -> Result<PodRef, Error> {
    let (name, namespace) = (given(annotations, SANDBOX_NAME), given(annotations, SANDBOX_NAMESPACE));
    if name.is_empty() {
        return Err(Error::Missing(SANDBOX_NAME));
    }
    // A name of Kubernetes has no underscore, so the two forms cannot be confused.
    let pod = if name.starts_with("k8s_") {
        let parts: Vec<&str> = name.split('_').collect();
        let [_, pod, from_name, uid, attempt] = parts[..] else {
            let why = "not k8s_<pod>_<namespace>_<uid>_<attempt>; CRI-O sends that";
            return Err(Error::bad(SANDBOX_NAME, name, why));
        };
        if uid.is_empty() || attempt.is_empty() || !attempt.bytes().all(|b| b.is_ascii_digit()) {
            let why = "its uid or attempt is missing or not valid; CRI-O sends both";
            return Err(Error::bad(SANDBOX_NAME, name, why));
        }
        if !namespace.is_empty() && namespace != from_name {
            let why = "not the namespace in the sandbox's name; they must agree";
            return Err(Error::bad(SANDBOX_NAMESPACE, namespace, why));
        }
        PodRef { namespace: from_name.to_owned(), name: pod.to_owned(), uid: Some(uid.to_owned()) }
    } else {
        PodRef { namespace: namespace.to_owned(), name: name.to_owned(), uid: None }
    };
    if pod.namespace.is_empty() {
        return Err(Error::Missing(SANDBOX_NAMESPACE));
    }
    // Both end up in log lines, labels and file names.
    let names = [(SANDBOX_NAME, &pod.name), (SANDBOX_NAMESPACE, &pod.namespace)];
    for (key, value) in names.into_iter().chain(pod.uid.iter().map(|uid| (SANDBOX_NAME, uid))) {
        if !is_name(value) {
            let why = "not a name of Kubernetes; it has letters, digits, '-' and '.', at most 253";
            return Err(Error::bad(key, value, why));
        }
    }
    Ok(pod)
}

fn is_name(text: &str) -> bool {
    let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= MAX_POD_NAME
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'))
}

/// Parses a whole number up to `max`; 0: not asked for.
fn whole(text: &str, max: u64) -> Result<u64, String> {
    if text.is_empty() {
        return Ok(0);
    }
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err("not a whole number; write digits only, without a unit".to_owned());
    }
    text.parse().ok().filter(|n| *n <= max).ok_or_else(|| too_large(max))
}

/// Parses a decimal number up to `max`, rounded up; 0: not asked for.
///
/// The Rust shim adds CPU limits as 32-bit floats, so `2.0000002` stands for 2. The unit is a thousandth, as in
/// Kubernetes, and a rest of less than half a thousandth is noise. Anything above zero is at least one.
fn rounded_up(text: &str, max: u64) -> Result<u32, String> {
    if text.is_empty() {
        return Ok(0);
    }
    let (whole_part, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole_part) || !digits(fraction) {
        return Err("not a number; write it like 2 or 1.5".to_owned());
    }
    let whole_part: u64 = whole_part.parse().map_err(|_| too_large(max))?;
    let thousandths = fraction.bytes().chain(*b"0000").take(4).fold(0, |n, b| n * 10 + u64::from(b - b'0'));
    let above_zero = fraction.bytes().any(|b| b != b'0');
    let rounded = match (whole_part, thousandths) {
        (0, _) => u64::from(above_zero),
        // In tenths of thousandths: 5 is half a thousandth.
        (n, 0..5) => n,
        (n, _) => n.saturating_add(1),
    };
    u32::try_from(rounded).ok().filter(|n| u64::from(*n) <= max).ok_or_else(|| too_large(max))
}

fn too_large(max: u64) -> String {
    format!("larger than in any VM; write at most {max}")
}

#[cfg(test)]
mod tests;
