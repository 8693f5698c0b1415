//! Reads from the node whether the UDP probes of its running VMs come back. No other item tries the way between a VM and
//! this node.

use std::path::Path;

use peerpod_node::admin::{Detail, SOCKET, Sandbox};

use super::open_ports;
use crate::check::config::Config;
use crate::item::{Outcome, skipped, warning};
use crate::source::Node;

/// Most VMs that are looked at.
const MOST_VMS: usize = 16;

/// Checks the way between VMs and node by the reports of the VMs.
pub(in crate::check) async fn check(config: &Config) -> Outcome {
    match running(config).await {
        Ok(vms) => judge(&vms, &open_ports(config)),
        Err(why) => {
            let why = peerpod_base::chain::chain(why.as_ref());
            skipped(format!("the reports of VMs are not known: {why}"))
        }
    }
}

async fn running(config: &Config) -> anyhow::Result<Vec<Detail>> {
    let node = Node::new(Path::new(&config.text("paths.run-dir")).join(SOCKET));
    let all: Vec<Sandbox> = node.get("/v1/sandboxes").await?;
    let mut vms = Vec::new();
    for one in all.iter().filter(|one| one.phase == "running").take(MOST_VMS) {
        // A VM may end meanwhile.
        if let Ok(vm) = node.get(&format!("/v1/sandboxes/{}", one.id)).await {
            vms.push(vm);
        }
    }
    Ok(vms)
}

fn judge(vms: &[Detail], remedy: &str) -> Outcome {
    let fault = |vm: &Detail| Some(format!("{}: {}", vm.sandbox.pod, vm.network.path_fault.as_ref()?));
    let faults: Vec<String> = vms.iter().filter_map(fault).collect();
    let probed = vms.iter().filter(|vm| vm.network.path_mtu.is_some()).count();
    match (faults.is_empty(), probed) {
        (false, _) => warning(faults.join("; "), remedy),
        (true, 0) => skipped("no VM of this node has reported its path, so the way from VMs is not tried"),
        (true, probed) => Ok(format!("the UDP probes of {probed} VMs come back from the relay")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;
    use crate::item::{Area, Verdict};

    fn vm(path: Value) -> Detail {
        let mut vm = json!({
            "id": "a", "pod": "shop/web", "phase": "running", "vm": null, "created_ms": 0, "started": true,
            "failed": false, "cause": null, "uid": null, "attempt": 0, "addresses": [], "volumes": [],
            "instance_type": null, "image": null, "guest_connected": true, "guest_address": null, "stages": [],
            "gone_ms": null,
        });
        vm.as_object_mut().unwrap().extend(path.as_object().unwrap().clone());
        from_value(vm).unwrap()
    }

    #[test]
    fn a_vm_without_udp_to_the_relay_is_named() {
        let judged = |vms: &[Detail]| Area::Network.item("vms", judge(vms, "open UDP 15151"));
        assert_eq!(judged(&[]).verdict, Verdict::Skipped);
        assert_eq!(judged(&[vm(json!({}))]).verdict, Verdict::Skipped, "not reported yet");
        let good = vm(json!({"path_mtu": 1500}));
        assert_eq!(judged(std::slice::from_ref(&good)).verdict, Verdict::Ok);
        let item = judged(&[good, vm(json!({"path_mtu": 1500, "path_fault": "no probe came back"}))]);
        assert_eq!((item.verdict, &*item.cause), (Verdict::Warning, "shop/web: no probe came back"));
        assert_eq!(item.remedy, "open UDP 15151");
    }
}
