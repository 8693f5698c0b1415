//! Shows the use of each running VM in the metrics, as its guest reports it over the link. The number of VMs is bounded,
//! and their figures are read at each scrape.

use std::collections::BTreeMap;
use std::fmt;

use peerpod_proto::guest::{ProcessUsage, Status, Usage};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use protobuf::Message;

use crate::sandbox::Sandboxes;
use crate::sandbox::phase::Phase;

/// Limit of VMs with metrics of their own; those of further pods, by name, are left out.
const MOST_VMS: usize = 256;

/// A running VM.
#[derive(Clone, Debug)]
pub(crate) struct RunningVm {
    namespace: String,
    pod: String,
    is_linked: bool,
    usage: Usage,
}

impl RunningVm {
    /// Returns the running VMs, one for each pod.
    pub(crate) fn all(sandboxes: &Sandboxes) -> Vec<RunningVm> {
        let mut newest = BTreeMap::new();
        let running =
            sandboxes.views().into_iter().filter(|view| matches!(view.phase, Phase::Running { .. }));
        for view in running {
            let known = newest.entry(view.pod.clone()).or_insert_with(|| view.clone());
            if known.created_ms < view.created_ms {
                *known = view;
            }
        }
        let vm = |(pod, view): (std::sync::Arc<str>, crate::sandbox::View)| {
            let (namespace, pod) = pod.split_once('/')?;
            let guest = sandboxes.0.ports.relay.guest(&view.id);
            let guest = guest.borrow();
            let status = Status::parse_from_bytes(&guest.status).unwrap_or_default();
            Some(RunningVm {
                namespace: namespace.to_owned(),
                pod: pod.to_owned(),
                is_linked: guest.connected,
                usage: status.usage.unwrap_or_default(),
            })
        };
        newest.into_iter().filter_map(vm).take(MOST_VMS).collect()
    }
}

/// Reads the running VMs.
type Read = dyn Fn() -> Vec<RunningVm> + Send + Sync;

/// Metrics of the running VMs.
pub(crate) struct VmMetrics(Box<Read>);

impl VmMetrics {
    pub(crate) fn new(read: impl Fn() -> Vec<RunningVm> + Send + Sync + 'static) -> VmMetrics {
        VmMetrics(Box::new(read))
    }
}

impl fmt::Debug for VmMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VmMetrics")
    }
}

/// Name, help text, and label with the values of a VM. A value of 0 is not known.
type Row = (&'static str, &'static str, &'static str, fn(&RunningVm) -> Vec<(&'static str, u64)>);

const BYTES: [Row; 3] = [
    ("peerpod_node_vm_memory_bytes", "Memory of a running VM", "kind", |vm| {
        vec![("total", vm.usage.memory_total_bytes), ("available", vm.usage.memory_available_bytes)]
    }),
    ("peerpod_node_vm_disk_bytes", "File system of a running VM with its container images", "kind", |vm| {
        vec![("total", vm.usage.disk_total_bytes), ("free", vm.usage.disk_free_bytes)]
    }),
    (
        "peerpod_node_vm_process_memory_bytes",
        "Resident memory of the guest program and of the kata-agent in a running VM",
        "process",
        |vm| processes(vm, |process| process.memory_bytes),
    ),
];

/// The values are in milliseconds.
const SECONDS: [Row; 2] = [
    ("peerpod_node_vm_cpu_seconds", "Busy time of a running VM's processors", "kind", |vm| {
        vec![("busy", vm.usage.cpu_ms)]
    }),
    (
        "peerpod_node_vm_process_cpu_seconds",
        "CPU time of the guest program and of the kata-agent in a running VM",
        "process",
        |vm| processes(vm, |process| process.cpu_ms),
    ),
];

fn processes(vm: &RunningVm, value: fn(&ProcessUsage) -> u64) -> Vec<(&'static str, u64)> {
    let both = [("guest", &vm.usage.guest), ("agent", &vm.usage.agent)];
    both.into_iter().filter_map(|(name, process)| Some((name, value(process.as_ref()?)))).collect()
}

impl Collector for VmMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let vms = (self.0)();
        if vms.is_empty() {
            return Ok(());
        }
        let kind = ConstGauge::new(0i64).metric_type();
        let help = "1 if the guest of a running VM has a link to the relay, else 0";
        let mut family = encoder.encode_descriptor("peerpod_node_vm_link_up", help, None, kind)?;
        for vm in &vms {
            let labels = [("namespace", vm.namespace.as_str()), ("pod", vm.pod.as_str())];
            ConstGauge::new(i64::from(vm.is_linked)).encode(family.encode_family(&labels)?)?;
        }
        for (rows, is_time) in [(&BYTES[..], false), (&SECONDS[..], true)] {
            for (name, help, label, values) in rows {
                let kind = match is_time {
                    true => ConstCounter::new(0.0).metric_type(),
                    false => ConstGauge::new(0i64).metric_type(),
                };
                let mut family = encoder.encode_descriptor(name, help, None, kind)?;
                for (vm, (of, value)) in
                    vms.iter().flat_map(|vm| values(vm).into_iter().map(move |one| (vm, one)))
                {
                    if value == 0 {
                        continue;
                    }
                    let labels =
                        [("namespace", vm.namespace.as_str()), ("pod", vm.pod.as_str()), (*label, of)];
                    let place = family.encode_family(&labels)?;
                    match is_time {
                        true => ConstCounter::new(value as f64 / 1000.0).encode(place)?,
                        false => ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(place)?,
                    }
                }
            }
        }
        Ok(())
    }
}

/// A VM with all figures, for the documentation.
#[cfg(test)]
pub(crate) fn sample() -> RunningVm {
    let process = || ProcessUsage { memory_bytes: 1, cpu_ms: 1500, ..ProcessUsage::default() };
    let usage = Usage {
        memory_total_bytes: u64::MAX,
        memory_available_bytes: 1,
        cpu_ms: 2500,
        disk_total_bytes: 1,
        disk_free_bytes: 0,
        guest: Some(process()).into(),
        agent: Some(process()).into(),
        ..Usage::default()
    };
    RunningVm { namespace: "shop".to_owned(), pod: "web".to_owned(), is_linked: true, usage }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn figures_of_a_vm_are_shown_and_unknown_ones_are_left_out() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(VmMetrics::new(|| vec![sample()])));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let labels = "namespace=\"shop\",pod=\"web\"";
        for line in [
            format!("peerpod_node_vm_link_up{{{labels}}} 1\n"),
            format!("peerpod_node_vm_memory_bytes{{{labels},kind=\"total\"}} {}\n", i64::MAX),
            format!("peerpod_node_vm_cpu_seconds_total{{{labels},kind=\"busy\"}} 2.5\n"),
            format!("peerpod_node_vm_process_cpu_seconds_total{{{labels},process=\"agent\"}} 1.5\n"),
        ] {
            assert!(text.contains(&line), "{line} in {text}");
        }
        assert!(!text.contains("free"), "{text}");
    }
}
