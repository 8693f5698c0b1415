//! The chart's objects that change or bound pods: the node's capacity, the webhook, the admission policies.

use anyhow::{Context, ensure};
use peerpod_test_kube::NODE;
use serde_json::Value;

use super::{Installed, NAMESPACE};
use crate::cases::Case;

/// Extended resource of the node, of which a peer pod takes one.
const RESOURCE: &str = "kata.peerpods.io/vm";

fn node(on: &Installed<'_>) -> anyhow::Result<Value> {
    on.node.read(&format!("/api/v1/nodes/{NODE}"))
}

/// Looks at the Node, at the first pod, and at what webhook and policies answer.
pub(super) fn check(on: &Installed<'_>) -> anyhow::Result<()> {
    let status = node(on)?["status"].clone();
    ensure!(status["allocatable"][RESOURCE] == "10", "{}", status["allocatable"]);
    ensure!(crate::cases::has_condition(&status, "PeerPodsReady"), "{}", status["conditions"]);
    let case = Case::of(on.node, "users");
    let limits = case.get("pod/p")?["spec"]["containers"][0]["resources"]["limits"].clone();
    ensure!(limits[RESOURCE] == "1", "the webhook did not change the pod: {limits}");
    let answer = |spec: &str| -> anyhow::Result<String> {
        let pod = format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: refused}}, spec: {{runtimeClassName: kata-remote, {spec}
               containers: [{{name: c, image: x}}]}}}}"
        );
        let output = case.kubectl_with(&["create", "--dry-run=server", "-f", "-"], pod.as_bytes())?;
        Ok(String::from_utf8(output.stderr)?)
    };
    let refused = answer("hostNetwork: true,")?;
    ensure!(refused.contains("spec.hostNetwork: true: a peer pod runs in a VM"), "{refused:?}");
    let warning = answer("volumes: [{name: v, hostPath: {path: /etc}}],")?;
    ensure!(warning.starts_with("Warning: hostPath: a peer pod gets a copy"), "{warning:?}");
    // Without a token that is bound to a pod of the node.
    let account = format!("--as=system:serviceaccount:{NAMESPACE}:peerpod-node");
    let annotation = "kata.peerpods.io/caa-owner=another";
    let changed = on.node.kubectl(&["annotate", "node", NODE, annotation, "--overwrite", &account]);
    let error = changed.err().context("the admission policy lets a daemon of no node change a Node")?;
    ensure!(error.to_string().contains("must be bound to a pod on a node"), "{error:#}");
    Ok(())
}

/// Limits the node to two VMs by the chart's values. The third pod stays, and ends with the drain.
pub(super) fn capacity(on: &Installed<'_>) -> anyhow::Result<()> {
    on.helm_upgrade(&["--reuse-values", "--set", "config.cluster.capacity=2"])?;
    let case = Case::of(on.node, "users");
    case.until("the node offers two VMs", || {
        Ok((node(on)?["status"]["allocatable"][RESOURCE] == "2").then_some(()))
    })?;
    case.sleeper("second")?;
    case.script("third", "Always", crate::cases::SLEEP)?;
    case.event("FailedScheduling", &format!("Insufficient {RESOURCE}"))?;
    case.kubectl(&["delete", "pod", "second", "--timeout=120s"])?;
    case.ready("third")
}
