//! Computes the JSON patch for a pod and its profile. Pure.
//!
//! The containers' requests and limits size the VM, by annotations. They are then removed from the containers: they
//! would be counted on the Kubernetes node, where the pod does not run. The pod asks for one VM instead. The removed
//! values are kept in [`ACCOUNTED`], per container. When the webhook is called again, because another webhook has added
//! a sidecar, the totals are computed from there. Memory limits also go to [`MEMORY_LIMITS`], for the guest to apply.
//!
//! The pod is processed as JSON, so that unknown fields stay as they are.

use std::collections::BTreeMap;

use json_patch::Patch;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::quantity::{Quantity, QuantityError};
use super::totals::{self, Life};

/// Annotation with the original requests and limits of the pod's containers: JSON,
/// `{"version": 1, "containers": {name: {"requests": {…}, "limits": {…}}}, "pod": {…}}`.
pub const ACCOUNTED: &str = "kata.peerpods.io/accounted-resources";

/// Annotation with the containers' memory limits: JSON, names to bytes. `peerpod-guest` applies them in the VM.
/// Container runtimes and Kata's shims pass annotations with this prefix on.
pub(super) const MEMORY_LIMITS: &str = "io.katacontainers.peerpod.memory-limits";

const VCPUS: &str = "io.katacontainers.config.hypervisor.default_vcpus";
const MEMORY: &str = "io.katacontainers.config.hypervisor.default_memory";
const GPUS: &str = "io.katacontainers.config.hypervisor.default_gpus";
/// Annotation that the API server's own LimitRanger writes when it fills in defaults, also between two calls of a
/// webhook.
const LIMIT_RANGER: &str = "kubernetes.io/limit-ranger";
/// Fields of a pod's spec that share a namespace of the node with it, and that namespace.
const SHARED: [(&str, &str); 3] = [("hostNetwork", "network"), ("hostPID", "processes"), ("hostIPC", "IPC")];
const MIB: i64 = 1 << 20;
/// Limit of the record in bytes; the API server limits all annotations together.
const MOST_RECORD: usize = 200 * 1024;

/// Rules for the pods of one RuntimeClass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Name of the class.
    pub runtime_class: String,
    /// Extended resource of which a pod takes one.
    pub resource: String,
    /// Rule for a pod's total.
    pub totals: Totals,
    /// Resources that count as GPUs.
    pub gpus: Vec<String>,
}

/// Rule for a pod's total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Totals {
    /// Kubernetes' rule for effective requests, with limits where there are any; pod-level resources have precedence.
    Effective,
    /// Plain sum over all containers, as in the replaced webhook; pod-level resources are ignored.
    Sum,
}

/// Reasons to refuse a pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A quantity is invalid.
    #[error("{place}: {why}")]
    Quantity {
        /// The container and its resource.
        place: String,
        /// The cause.
        why: QuantityError,
    },
    /// A limit is below its request. Kubernetes would refuse the pod, but the patch removes both values.
    #[error(
        "{place}: the limit {limit} is below the request {request}; raise the limit or lower the request"
    )]
    LimitBelowRequest {
        /// The container and its resource.
        place: String,
        /// The limit.
        limit: Quantity,
        /// The request.
        request: Quantity,
    },
    /// The record in the annotation was changed by another writer.
    #[error(
        "annotation {ACCOUNTED}: {0}; remove the annotation and give the containers their requests again"
    )]
    Record(String),
    /// The pod asks to share namespaces of the node.
    #[error(
        "spec.{key}: true: a peer pod runs in a VM and cannot share the node's {what}; remove it, or give the pod another \
         runtimeClassName"
    )]
    Shared {
        /// The field of the pod's spec.
        key: &'static str,
        /// The namespace of the node.
        what: &'static str,
    },
    /// A part of the pod does not have the form of a Kubernetes pod.
    #[error("{0} is not of the form that a pod has")]
    Form(&'static str),
}

/// Returns the changes that make a pod of one of these profiles a peer pod. The patch is empty for any other pod, and
/// for one that is a peer pod already.
///
/// # Errors
/// See [`Refusal`]. The pod must not be admitted, because the patch would hide its mistake.
pub fn mutate(pod: &Value, profiles: &[Profile]) -> Result<Patch, Refusal> {
    let class = pod.pointer("/spec/runtimeClassName").and_then(Value::as_str);
    let Some(profile) = profiles.iter().find(|profile| Some(profile.runtime_class.as_str()) == class) else {
        return Ok(Patch(Vec::new()));
    };
    if let Some((key, what)) = SHARED.into_iter().find(|(key, _)| pod["spec"][*key] == true) {
        return Err(Refusal::Shared { key, what });
    }
    let mut changed = pod.clone();
    let record = Record::of(pod, profile)?;
    let needs = Needs::of(pod, &record, profile)?;
    annotate(&mut changed, &needs, &record)?;
    replace_resources(&mut changed, profile)?;
    Ok(json_patch::diff(pod, &changed))
}

/// Requests and limits as a pod holds them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Resources {
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    requests: Map<String, Value>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    limits: Map<String, Value>,
}

impl Resources {
    fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.limits.is_empty()
    }

    /// Reads the resources of a container or of the pod itself, without those that the webhook added.
    fn present(owner: &Value, profile: &Profile) -> Resources {
        let part = |name: &str| {
            let found =
                owner.get("resources").and_then(|resources| resources.get(name)).and_then(Value::as_object);
            let mut found = found.cloned().unwrap_or_default();
            found.remove(&profile.resource);
            found
        };
        Resources { requests: part("requests"), limits: part("limits") }
    }
}

/// Requests and limits that the containers had, including those that were removed since.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    /// By name; init containers share the same namespace of names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    containers: BTreeMap<String, Resources>,
    #[serde(default, skip_serializing_if = "Resources::is_empty")]
    pod: Resources,
}

impl Record {
    /// Returns the record that the pod carries, updated with the present resources of its containers.
    fn of(pod: &Value, profile: &Profile) -> Result<Record, Refusal> {
        let carried = Record::carried(pod)?;
        let filled_in = FilledIn::of(pod);
        let mut record = Record { version: 1, containers: BTreeMap::new(), pod: Resources::default() };
        for (_, container) in containers(pod)? {
            let name = name_of(container);
            let present = Resources::present(container, profile);
            let resources = match carried.as_ref().and_then(|carried| carried.containers.get(name)) {
                Some(known) => merged(known, present, |kind, resource| filled_in.has(name, kind, resource)),
                None => present,
            };
            if carried.is_some() || !resources.is_empty() {
                record.containers.insert(name.to_owned(), resources);
            }
        }
        let present = Resources::present(pod.get("spec").unwrap_or(&Value::Null), profile);
        record.pod = match carried {
            Some(carried) => merged(&carried.pod, present, |_, _| false),
            None => present,
        };
        if !record.is_empty() {
            // A container without resources is recorded, too, so that defaults filled in later do not count as its own.
            for (_, container) in containers(pod)? {
                record.containers.entry(name_of(container).to_owned()).or_default();
            }
        }
        Ok(record)
    }

    fn carried(pod: &Value) -> Result<Option<Record>, Refusal> {
        let Some(text) = annotation(pod, ACCOUNTED) else { return Ok(None) };
        let record: Record = serde_json::from_str(text).map_err(|why| Refusal::Record(why.to_string()))?;
        match record.version {
            1 => Ok(Some(record)),
            other => Err(Refusal::Record(format!("its version is {other}, not 1"))),
        }
    }

    /// Returns the limits in bytes of the containers that have one.
    fn memory_limits(&self) -> Result<BTreeMap<&str, i64>, Refusal> {
        let mut limits = BTreeMap::new();
        for (name, resources) in &self.containers {
            let limit = amount(&format!("container {name}"), &resources.limits, "memory")?;
            if let Some(limit) = limit.filter(|limit| *limit > Quantity::ZERO) {
                limits.insert(name.as_str(), limit.ceil(1));
            }
        }
        Ok(limits)
    }

    fn is_empty(&self) -> bool {
        self.pod.is_empty() && self.containers.values().all(Resources::is_empty)
    }
}

/// Overrides the known resources with the present ones, except those that were only filled in.
fn merged(known: &Resources, present: Resources, filled_in: impl Fn(&str, &str) -> bool) -> Resources {
    let over = |known: &Map<String, Value>, present: Map<String, Value>, kind: &str| {
        let mut all = known.clone();
        all.extend(present.into_iter().filter(|(resource, _)| !filled_in(kind, resource)));
        all
    };
    Resources {
        requests: over(&known.requests, present.requests, "request"),
        limits: over(&known.limits, present.limits, "limit"),
    }
}

/// Defaults that the API server's LimitRanger reports to have filled in: "LimitRanger plugin set: cpu, memory request
/// for container web; cpu limit for init container setup".
struct FilledIn<'p>(Vec<(&'p str, &'p str, Vec<&'p str>)>);

impl<'p> FilledIn<'p> {
    fn of(pod: &'p Value) -> FilledIn<'p> {
        let said =
            annotation(pod, LIMIT_RANGER).and_then(|text| text.strip_prefix("LimitRanger plugin set: "));
        let parts = said.unwrap_or_default().split("; ").filter_map(|part| {
            let (what, name) = part.rsplit_once("container ")?;
            let what = what.trim_end_matches("init ").strip_suffix(" for ")?;
            let (resources, kind) = what.rsplit_once(' ')?;
            Some((name, kind, resources.split(", ").collect()))
        });
        FilledIn(parts.collect())
    }

    fn has(&self, container: &str, kind: &str, resource: &str) -> bool {
        self.0
            .iter()
            .any(|(name, of, resources)| *name == container && *of == kind && resources.contains(&resource))
    }
}

/// Size of the VM.
#[derive(Debug, PartialEq)]
struct Needs {
    cpu: Quantity,
    memory: Quantity,
    gpus: Quantity,
}

impl Needs {
    fn of(pod: &Value, record: &Record, profile: &Profile) -> Result<Needs, Refusal> {
        let none = Resources::default();
        let each: Vec<_> = containers(pod)?
            .into_iter()
            .map(|(life, container)| {
                let name = name_of(container);
                (life, name, record.containers.get(name).unwrap_or(&none))
            })
            .collect();
        for (_, name, resources) in &each {
            check(&format!("container {name}"), resources)?;
        }
        check("the pod's own resources", &record.pod)?;
        let total = |resource: &str| match profile.totals {
            Totals::Sum => total_by_sum(&each, resource),
            Totals::Effective => total_by_rule(&each, &record.pod, resource),
        };
        let mut gpus = Quantity::ZERO;
        for resource in &profile.gpus {
            gpus = gpus.plus(total(resource)?);
        }
        Ok(Needs { cpu: total("cpu")?, memory: total("memory")?, gpus })
    }
}

type Each<'p> = [(Life, &'p str, &'p Resources)];

/// Returns the larger of the sum of the limits and the sum of the requests; zero without any request.
fn total_by_sum(each: &Each<'_>, resource: &str) -> Result<Quantity, Refusal> {
    let (mut requests, mut limits) = (Vec::new(), Vec::new());
    for (life, name, resources) in each {
        requests.push((*life, amount(name, &resources.requests, resource)?.unwrap_or_default()));
        limits.push((*life, amount(name, &resources.limits, resource)?.unwrap_or_default()));
    }
    let (requests, limits) = (totals::sum(&requests), totals::sum(&limits));
    Ok(if requests == Quantity::ZERO { requests } else { requests.max(limits) })
}

/// Returns the total of each container's limit, or else its request, by Kubernetes' rule. A pod-level limit or request
/// takes the place of that total.
fn total_by_rule(each: &Each<'_>, pod: &Resources, resource: &str) -> Result<Quantity, Refusal> {
    let (mut requests, mut most) = (Vec::new(), Vec::new());
    for (life, name, resources) in each {
        let request = amount(name, &resources.requests, resource)?;
        let limit = amount(name, &resources.limits, resource)?;
        requests.push((*life, request.or(limit).unwrap_or_default()));
        most.push((*life, limit.or(request).unwrap_or_default()));
    }
    let own = "the pod's own resources";
    let limit = amount(own, &pod.limits, resource)?;
    let request = amount(own, &pod.requests, resource)?;
    Ok(match (request, limit) {
        (_, Some(limit)) => limit,
        (Some(request), None) => request.max(totals::effective(&most)),
        (None, None) => totals::effective(&most).max(totals::effective(&requests)),
    })
}

/// Checks that every quantity is valid and no limit is below its request. Kubernetes checks the same only after the
/// patch has removed the values.
fn check(place: &str, resources: &Resources) -> Result<(), Refusal> {
    for resource in resources.limits.keys() {
        amount(place, &resources.limits, resource)?;
    }
    for resource in resources.requests.keys() {
        let request = amount(place, &resources.requests, resource)?.unwrap_or_default();
        if let Some(limit) = amount(place, &resources.limits, resource)?
            && limit < request
        {
            return Err(Refusal::LimitBelowRequest { place: format!("{place}, {resource}"), limit, request });
        }
    }
    Ok(())
}

fn amount(place: &str, of: &Map<String, Value>, resource: &str) -> Result<Option<Quantity>, Refusal> {
    let Some(value) = of.get(resource) else { return Ok(None) };
    // The API server writes strings; a user may have written a number.
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let read =
        text.parse().map_err(|why| Refusal::Quantity { place: format!("{place}, {resource}"), why })?;
    Ok(Some(read))
}

/// Returns init containers in their order, then the others.
fn containers(pod: &Value) -> Result<Vec<(Life, &Value)>, Refusal> {
    let list = |path: &str, what| match pod.pointer(path) {
        None | Some(Value::Null) => Ok(&[][..]),
        Some(Value::Array(list)) => Ok(list.as_slice()),
        Some(_) => Err(Refusal::Form(what)),
    };
    let init = list("/spec/initContainers", "spec.initContainers")?.iter().map(|container| {
        let always = container.get("restartPolicy").and_then(Value::as_str) == Some("Always");
        (if always { Life::Sidecar } else { Life::Init }, container)
    });
    let app = list("/spec/containers", "spec.containers")?.iter().map(|container| (Life::App, container));
    Ok(init.chain(app).collect())
}

fn name_of(container: &Value) -> &str {
    container.get("name").and_then(Value::as_str).unwrap_or_default()
}

fn annotation<'p>(pod: &'p Value, key: &str) -> Option<&'p str> {
    pod.get("metadata")?.get("annotations")?.get(key)?.as_str()
}

fn annotate(pod: &mut Value, needs: &Needs, record: &Record) -> Result<(), Refusal> {
    let mut wanted = Vec::new();
    for (key, need, value) in [
        (VCPUS, needs.cpu, needs.cpu.ceil(1).to_string()),
        (MEMORY, needs.memory, needs.memory.ceil(MIB).to_string()),
        (GPUS, needs.gpus, needs.gpus.to_string()),
    ] {
        if need > Quantity::ZERO {
            wanted.push((key, value));
        }
    }
    if !record.is_empty() {
        let text = serde_json::to_string(record).map_err(|why| Refusal::Record(why.to_string()))?;
        if text.len() > MOST_RECORD {
            return Err(Refusal::Record("the containers' resources together are too long".to_owned()));
        }
        wanted.push((ACCOUNTED, text));
    }
    let limits = record.memory_limits()?;
    if !limits.is_empty() {
        wanted.push((MEMORY_LIMITS, json!(limits).to_string()));
    }
    if wanted.is_empty() {
        return Ok(());
    }
    let metadata = object(pod, "the pod")?.entry("metadata").or_insert_with(|| json!({}));
    let annotations = object(metadata, "metadata")?.entry("annotations").or_insert_with(|| json!({}));
    if annotations.is_null() {
        *annotations = json!({});
    }
    let annotations = object(annotations, "metadata.annotations")?;
    annotations.extend(wanted.into_iter().map(|(key, value)| (key.to_owned(), Value::String(value))));
    Ok(())
}

fn replace_resources(pod: &mut Value, profile: &Profile) -> Result<(), Refusal> {
    let Some(spec) = pod.get_mut("spec") else { return Ok(()) };
    let spec = object(spec, "spec")?;
    take(spec);
    if spec.get("resources").and_then(Value::as_object).is_some_and(Map::is_empty) {
        spec.remove("resources");
    }
    let one = json!({ profile.resource.as_str(): "1" });
    for (list, what) in [("initContainers", "an init container"), ("containers", "a container")] {
        let Some(Value::Array(list)) = spec.get_mut(list) else { continue };
        for (place, container) in list.iter_mut().enumerate() {
            let container = object(container, what)?;
            take(container);
            if place == 0 && what == "a container" {
                let resources = container.entry("resources").or_insert_with(|| json!({}));
                let resources = object(resources, "a container's resources")?;
                resources.insert("requests".to_owned(), one.clone());
                resources.insert("limits".to_owned(), one.clone());
            }
        }
    }
    Ok(())
}

/// Removes requests and limits, and nothing else: claims of devices stay.
fn take(owner: &mut Map<String, Value>) {
    match owner.get_mut("resources") {
        Some(Value::Object(resources)) => {
            resources.remove("requests");
            resources.remove("limits");
        }
        // It does not have the form of a Kubernetes pod.
        Some(other) => *other = json!({}),
        None => {}
    }
}

fn object<'v>(value: &'v mut Value, what: &'static str) -> Result<&'v mut Map<String, Value>, Refusal> {
    value.as_object_mut().ok_or(Refusal::Form(what))
}

#[cfg(test)]
mod tests;
