//! A pod and its profile in, a JSON patch out. Pure.
//!
//! The VM is sized by annotations from what the containers ask for; the containers' own requests and limits are taken
//! away, because they would be counted on the node, where the pod does not run, and one VM is asked for instead. What was
//! taken away is kept in [`ACCOUNTED`], per container: called again (another webhook has added a sidecar), it is from
//! there that the totals are made again. Memory limits also go to [`MEMORY_LIMITS`], for the VM to apply.
//!
//! The pod is looked at as JSON, so that fields which we do not know stay as they are.

use std::collections::BTreeMap;

use json_patch::Patch;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    quantity::{Quantity, QuantityError},
    totals::{self, Life},
};

/// The annotation with the requests and limits that the pod's containers had: JSON, `{"version": 1, "containers": {name:
/// {"requests": {…}, "limits": {…}}}, "pod": {…}}`.
pub const ACCOUNTED: &str = "kata.peerpods.io/accounted-resources";

/// The annotation with the containers' memory limits: JSON, names to bytes. `peerpod-guest` applies them in the VM.
/// Container runtimes and Kata's shims pass annotations on that begin so.
pub(super) const MEMORY_LIMITS: &str = "io.katacontainers.peerpod.memory-limits";

const VCPUS: &str = "io.katacontainers.config.hypervisor.default_vcpus";
const MEMORY: &str = "io.katacontainers.config.hypervisor.default_memory";
const GPUS: &str = "io.katacontainers.config.hypervisor.default_gpus";
/// Written by the API server's own LimitRanger when it fills in defaults, also between two calls of a webhook.
const LIMIT_RANGER: &str = "kubernetes.io/limit-ranger";
/// Fields of a pod's spec that share a namespace of the node with it, and the namespace.
const SHARED: [(&str, &str); 3] = [("hostNetwork", "network"), ("hostPID", "processes"), ("hostIPC", "IPC")];
const MIB: i64 = 1 << 20;
/// The API server takes this much of all annotations together.
const MOST_RECORD: usize = 200 * 1024;

/// What is done with the pods of one RuntimeClass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The class's name.
    pub runtime_class: String,
    /// The extended resource of which a pod takes one.
    pub resource: String,
    /// How a pod's need is added up.
    pub totals: Totals,
    /// The resources that are GPUs.
    pub gpus: Vec<String>,
}

/// How a pod's need is added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Totals {
    /// By Kubernetes' rule for effective requests, limits where there are any, pod-level resources before all.
    Effective,
    /// The plain sum over all containers, as the replaced webhook does; pod-level resources are not looked at.
    Sum,
}

/// Why a pod is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A quantity is none.
    #[error("{place}: {why}")]
    Quantity {
        /// The container and its resource.
        place: String,
        /// Why not.
        why: QuantityError,
    },
    /// Kubernetes would refuse it; it cannot see it any more after us.
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
    /// Our record, changed by somebody else.
    #[error(
        "annotation {ACCOUNTED}: {0}; remove the annotation and give the containers their requests again"
    )]
    Record(String),
    /// The pod is to share namespaces of the node.
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
    /// A part of the pod has not the form that it has in Kubernetes.
    #[error("{0} is not of the form that a pod has")]
    Form(&'static str),
}

/// The changes that make a pod of one of these profiles a peer pod; none for any other pod, and none for one that has
/// been changed already.
///
/// # Errors
/// See [`Refusal`]: the pod must not be admitted, because what is wrong with it could not be seen after us.
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

/// Requests and limits as they stand in a pod.
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

    /// Of a container or of the pod itself, without what we put there.
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

/// What the containers asked for, whoever took it away since.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    /// By name; init containers are of the same space of names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    containers: BTreeMap<String, Resources>,
    #[serde(default, skip_serializing_if = "Resources::is_empty")]
    pod: Resources,
}

impl Record {
    /// The record that the pod carries, brought up to date with what stands in its containers now.
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
            // A container that asks for nothing is known, too: what is filled in for it later is not its own.
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

    /// In bytes, of the containers that have one.
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

/// What is known, and over it what stands there now, unless it was only filled in.
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

/// What the API server's LimitRanger says that it has filled in: "LimitRanger plugin set: cpu, memory request for container
/// web; cpu limit for init container setup".
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

/// What the VM must have.
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

/// The sum of the limits if it is not below that of the requests, which is that of the requests where limits are missing.
/// Without any request: nothing.
fn total_by_sum(each: &Each<'_>, resource: &str) -> Result<Quantity, Refusal> {
    let (mut requests, mut limits) = (Vec::new(), Vec::new());
    for (life, name, resources) in each {
        requests.push((*life, amount(name, &resources.requests, resource)?.unwrap_or_default()));
        limits.push((*life, amount(name, &resources.limits, resource)?.unwrap_or_default()));
    }
    let (requests, limits) = (totals::sum(&requests), totals::sum(&limits));
    Ok(if requests == Quantity::ZERO { requests } else { requests.max(limits) })
}

/// What each container may use (its limit, or else its request) by Kubernetes' rule; the pod's own resources take the
/// place of what they speak of.
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

/// Every quantity can be read, and no limit is below its request: what Kubernetes checks after us, when it is gone.
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
    // The API server writes texts; a number is what a person may have written.
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let read =
        text.parse().map_err(|why| Refusal::Quantity { place: format!("{place}, {resource}"), why })?;
    Ok(Some(read))
}

/// Init containers in their order, then the others.
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

/// Takes requests and limits away, and nothing else: claims of devices stay.
fn take(owner: &mut Map<String, Value>) {
    match owner.get_mut("resources") {
        Some(Value::Object(resources)) => {
            resources.remove("requests");
            resources.remove("limits");
        }
        // Not of the form that it has in Kubernetes.
        Some(other) => *other = json!({}),
        None => {}
    }
}

fn object<'v>(value: &'v mut Value, what: &'static str) -> Result<&'v mut Map<String, Value>, Refusal> {
    value.as_object_mut().ok_or(Refusal::Form(what))
}

#[cfg(test)]
mod tests;
