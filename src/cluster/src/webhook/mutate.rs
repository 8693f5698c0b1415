//! Computes the JSON patch for a pod and its profile. Pure.
//!
//! The containers' requests and limits size the VM, by annotations. They are then removed from the containers: they
//! would be counted on the Kubernetes node, where the pod does not run. The pod asks for one VM instead. The removed
//! values are kept in [`ACCOUNTED`], per container. When the webhook is called again, because another webhook has added
//! a sidecar, the totals are computed from there. Memory limits also go to [`MEMORY_LIMITS`], for the guest to apply.
//!
//! The pod is processed as JSON, so that unknown fields stay as they are. The fields that are used are listed in
//! [`super::pod`], which reads no others.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;

use anyhow::{Result, anyhow, bail};
use json_patch::Patch;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::quantity::Quantity;
use super::totals::{self, Life};

/// Annotation with the original requests and limits of the pod's containers: JSON,
/// `{"version": 1, "containers": {name: {"requests": {…}, "limits": {…}}}, "pod": {…}}`.
const ACCOUNTED: &str = "kata.peerpods.io/accounted-resources";

/// Annotation with the containers' memory limits: JSON, names to bytes. `peerpod-guest` applies them in the VM.
/// Container runtimes and Kata's shims pass annotations with this prefix on.
const MEMORY_LIMITS: &str = "io.katacontainers.peerpod.memory-limits";

const VCPUS: &str = "io.katacontainers.config.hypervisor.default_vcpus";
const MEMORY: &str = "io.katacontainers.config.hypervisor.default_memory";
const GPUS: &str = "io.katacontainers.config.hypervisor.default_gpus";
/// Annotation that the API server's own LimitRanger writes when it fills in defaults, also between two calls of a
/// webhook.
const LIMIT_RANGER: &str = "kubernetes.io/limit-ranger";
/// Annotations that are read or written here.
pub(super) const ANNOTATIONS: [&str; 6] = [ACCOUNTED, MEMORY_LIMITS, VCPUS, MEMORY, GPUS, LIMIT_RANGER];
/// Fields of a pod's spec that share a namespace of the node with it, and that namespace.
pub(super) const SHARED: [(&str, &str); 3] =
    [("hostNetwork", "network"), ("hostPID", "processes"), ("hostIPC", "IPC")];
const MIB: i64 = 1 << 20;
/// Limit of the record in bytes; the API server limits all annotations together.
const MOST_RECORD: usize = 200 * 1024;

/// Rules for the pods of these RuntimeClasses.
pub(super) struct Profile {
    pub(super) runtime_classes: Vec<String>,
    /// Extended resource of which a pod takes one.
    pub(super) resource: String,
    pub(super) totals: Totals,
    /// Resources that count as GPUs.
    pub(super) gpus: Vec<String>,
}

impl Profile {
    /// Whether pods of this RuntimeClass are peer pods.
    pub(super) fn has(&self, class: &str) -> bool {
        self.runtime_classes.iter().any(|one| one == class)
    }
}

/// Rule for a pod's total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Totals {
    /// Kubernetes' rule for effective requests, with limits where there are any; pod-level resources have precedence.
    Effective,
    /// Plain sum over all containers, as in the replaced webhook; pod-level resources are ignored.
    Sum,
}

/// Returns the changes that make a pod of this profile a peer pod. The patch is empty for any other pod, and
/// for one that is a peer pod already. A pod that is an error must not be admitted, because the patch would hide its
/// mistake.
pub(super) fn mutate(pod: &Value, profile: &Profile) -> Result<Patch> {
    if !pod["spec"]["runtimeClassName"].as_str().is_some_and(|class| profile.has(class)) {
        return Ok(Patch(Vec::new()));
    }
    if let Some((key, what)) = SHARED.into_iter().find(|(key, _)| pod["spec"][*key] == true) {
        bail!(
            "spec.{key}: true: a peer pod runs in a VM and cannot share the node's {what}; remove it, or give the pod \
             another runtimeClassName"
        );
    }
    let record = Record::of(pod, profile)?;
    let mut annotations = sizes(pod, &record, profile)?;
    if !record.is_empty() {
        annotations.push((ACCOUNTED, record.write()?));
    }
    let mut changed = pod.clone();
    annotate(&mut changed, annotations)?;
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
            let mut found = owner["resources"][name].as_object().cloned().unwrap_or_default();
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
    /// By name; init containers share the same namespace of names. A container without resources is recorded, too, so
    /// that defaults filled in later do not count as its own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    containers: BTreeMap<String, Resources>,
    #[serde(default, skip_serializing_if = "Resources::is_empty")]
    pod: Resources,
}

impl Record {
    /// Returns the record that the pod carries, updated with the present resources of its containers.
    fn of(pod: &Value, profile: &Profile) -> Result<Record> {
        let carried = Record::carried(pod)?;
        let filled_in = filled_in(pod);
        let mut record = Record { version: 1, containers: BTreeMap::new(), pod: Resources::default() };
        for (_, container) in containers(pod)? {
            let name = name_of(container);
            let present = Resources::present(container, profile);
            let resources = match carried.as_ref().and_then(|carried| carried.containers.get(name)) {
                Some(known) => {
                    merged(known, present, |kind, resource| filled_in.contains(&(name, kind, resource)))
                }
                None => present,
            };
            record.containers.insert(name.to_owned(), resources);
        }
        let present = Resources::present(&pod["spec"], profile);
        record.pod = match carried {
            Some(carried) => merged(&carried.pod, present, |_, _| false),
            None => present,
        };
        Ok(record)
    }

    fn carried(pod: &Value) -> Result<Option<Record>> {
        let Some(text) = annotation(pod, ACCOUNTED) else { return Ok(None) };
        if text.len() > MOST_RECORD {
            return Err(unusable("it is too long"));
        }
        let record: Record = serde_json::from_str(text).map_err(unusable)?;
        match record.version {
            1 => Ok(Some(record)),
            other => Err(unusable(format!("its version is {other}, not 1"))),
        }
    }

    fn write(&self) -> Result<String> {
        let text = serde_json::to_string(self).map_err(unusable)?;
        if text.len() > MOST_RECORD {
            return Err(unusable("the containers' resources together are too long"));
        }
        Ok(text)
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

/// Returns container, kind and resource of the defaults that the API server's LimitRanger reports to have filled in:
/// "LimitRanger plugin set: cpu, memory request for container web; cpu limit for init container setup".
fn filled_in(pod: &Value) -> HashSet<(&str, &str, &str)> {
    let said = annotation(pod, LIMIT_RANGER).and_then(|text| text.strip_prefix("LimitRanger plugin set: "));
    let parts = said.unwrap_or_default().split("; ").filter_map(|part| {
        let (what, name) = part.rsplit_once("container ")?;
        let what = what.trim_end_matches("init ").strip_suffix(" for ")?;
        let (resources, kind) = what.rsplit_once(' ')?;
        Some(resources.split(", ").map(move |resource| (name, kind, resource)))
    });
    parts.flatten().collect()
}

/// Returns the annotations with the size of the VM and with the containers' memory limits.
fn sizes(pod: &Value, record: &Record, profile: &Profile) -> Result<Vec<(&'static str, String)>> {
    let (mut each, mut memory_limits) = (Vec::new(), BTreeMap::new());
    for (life, container) in containers(pod)? {
        let name = name_of(container);
        let amounts = Amounts::of(&format!("container {name}"), &record.containers[name])?;
        if let Some(limit) = amounts.limits.get("memory").filter(|limit| **limit > Quantity::ZERO) {
            memory_limits.insert(name, limit.ceil(1));
        }
        each.push((life, amounts));
    }
    let own = Amounts::of("the pod's own resources", &record.pod)?;
    let total = |resource: &str| match profile.totals {
        Totals::Sum => total_by_sum(&each, resource),
        Totals::Effective => total_by_rule(&each, &own, resource),
    };
    let (cpu, memory) = (total("cpu"), total("memory"));
    let gpus = totals::sum(profile.gpus.iter().map(|resource| total(resource)));
    let mut sizes = Vec::new();
    for (key, need, value) in [
        (VCPUS, cpu, cpu.ceil(1).to_string()),
        (MEMORY, memory, memory.ceil(MIB).to_string()),
        (GPUS, gpus, gpus.to_string()),
    ] {
        if need > Quantity::ZERO {
            sizes.push((key, value));
        }
    }
    if !memory_limits.is_empty() {
        sizes.push((MEMORY_LIMITS, json!(memory_limits).to_string()));
    }
    Ok(sizes)
}

/// Requests and limits as quantities, by resource.
struct Amounts<'r> {
    requests: BTreeMap<&'r str, Quantity>,
    limits: BTreeMap<&'r str, Quantity>,
}

impl<'r> Amounts<'r> {
    /// Checks that every quantity is valid and no limit is below its request. Kubernetes checks the same only after the
    /// patch has removed the values.
    fn of(place: &str, resources: &'r Resources) -> Result<Amounts<'r>> {
        let read = |(resource, value): (&'r String, &Value)| {
            // The API server writes strings; a user may have written a number.
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let amount = text.parse::<Quantity>().map_err(|why| anyhow!("{place}, {resource}: {why}"))?;
            Ok((resource.as_str(), amount))
        };
        let requests = resources.requests.iter().map(read).collect::<Result<BTreeMap<_, _>>>()?;
        let limits = resources.limits.iter().map(read).collect::<Result<BTreeMap<_, _>>>()?;
        for (resource, request) in &requests {
            if let Some(limit) = limits.get(resource).filter(|limit| *limit < request) {
                bail!(
                    "{place}, {resource}: the limit {limit} is below the request {request}; raise the limit or lower \
                     the request"
                );
            }
        }
        Ok(Amounts { requests, limits })
    }

    fn request(&self, resource: &str) -> Option<Quantity> {
        self.requests.get(resource).copied()
    }

    fn limit(&self, resource: &str) -> Option<Quantity> {
        self.limits.get(resource).copied()
    }
}

/// Returns the larger of the sum of the limits and the sum of the requests; zero without any request.
fn total_by_sum(each: &[(Life, Amounts<'_>)], resource: &str) -> Quantity {
    let requests = totals::sum(each.iter().filter_map(|(_, amounts)| amounts.request(resource)));
    let limits = totals::sum(each.iter().filter_map(|(_, amounts)| amounts.limit(resource)));
    if requests == Quantity::ZERO { requests } else { requests.max(limits) }
}

/// Returns the total of each container's limit, or else its request, by Kubernetes' rule. A pod-level limit or request
/// takes the place of that total.
fn total_by_rule(each: &[(Life, Amounts<'_>)], pod: &Amounts<'_>, resource: &str) -> Quantity {
    let total = |need: fn(Option<Quantity>, Option<Quantity>) -> Option<Quantity>| {
        totals::effective(each.iter().map(|(life, amounts)| {
            (*life, need(amounts.request(resource), amounts.limit(resource)).unwrap_or_default())
        }))
    };
    let most = total(|request, limit| limit.or(request));
    match (pod.request(resource), pod.limit(resource)) {
        (_, Some(limit)) => limit,
        (Some(request), None) => request.max(most),
        (None, None) => most.max(total(Option::or)),
    }
}

/// Returns init containers in their order, then the others.
fn containers(pod: &Value) -> Result<Vec<(Life, &Value)>> {
    let list = |path: &str, what| match pod.pointer(path) {
        None | Some(Value::Null) => Ok(&[][..]),
        Some(Value::Array(list)) => Ok(list.as_slice()),
        Some(_) => Err(malformed(what)),
    };
    let init = list("/spec/initContainers", "spec.initContainers")?.iter().map(|container| {
        let always = container["restartPolicy"] == "Always";
        (if always { Life::Sidecar } else { Life::Init }, container)
    });
    let app = list("/spec/containers", "spec.containers")?.iter().map(|container| (Life::App, container));
    Ok(init.chain(app).collect())
}

fn name_of(container: &Value) -> &str {
    container["name"].as_str().unwrap_or_default()
}

fn annotation<'p>(pod: &'p Value, key: &str) -> Option<&'p str> {
    pod["metadata"]["annotations"][key].as_str()
}

fn annotate(pod: &mut Value, wanted: Vec<(&'static str, String)>) -> Result<()> {
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

fn replace_resources(pod: &mut Value, profile: &Profile) -> Result<()> {
    let Some(spec) = pod.get_mut("spec") else { return Ok(()) };
    let spec = object(spec, "spec")?;
    take(spec);
    if spec.get("resources").and_then(Value::as_object).is_some_and(Map::is_empty) {
        spec.remove("resources");
    }
    for (list, what) in [("initContainers", "an init container"), ("containers", "a container")] {
        let Some(Value::Array(list)) = spec.get_mut(list) else { continue };
        for container in list {
            take(object(container, what)?);
        }
    }
    if let Some(first) = spec.get_mut("containers").and_then(|list| list.get_mut(0)) {
        let one = json!({ profile.resource.as_str(): "1" });
        let resources = object(first, "a container")?.entry("resources").or_insert_with(|| json!({}));
        let resources = object(resources, "a container's resources")?;
        resources.insert("requests".to_owned(), one.clone());
        resources.insert("limits".to_owned(), one);
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

fn object<'v>(value: &'v mut Value, what: &'static str) -> Result<&'v mut Map<String, Value>> {
    value.as_object_mut().ok_or_else(|| malformed(what))
}

fn malformed(what: &str) -> anyhow::Error {
    anyhow!("{what} is not of the form that a pod has")
}

/// Returns the error of a record that another writer has changed.
fn unusable(why: impl Display) -> anyhow::Error {
    anyhow!(
        "annotation {ACCOUNTED}: {why}; remove the annotation and give the containers their requests again"
    )
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(super) use tests::any_json;
