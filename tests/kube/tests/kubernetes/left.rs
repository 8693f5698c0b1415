//! Lists everything on the node that a removal must leave as it was: interfaces, routes, rules, network namespaces, mounts,
//! kernel settings and files.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use peerpod_world::eventually_blocking;

use crate::node::Node;

/// Time limit of kubelet's clean-up after a pod's end, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// Limit of the differences that an error shows.
const MOST_SHOWN: usize = 50;
/// Pause between two listings.
const PAUSE: Duration = Duration::from_secs(1);

/// State of the node's kernel and files.
pub(crate) struct Listing(BTreeSet<String>);

impl Listing {
    /// Lists the state after a pod without a VM has come and gone: the node's network plugin and kubelet keep what the
    /// first pod makes.
    pub(crate) fn before(node: &Node) -> anyhow::Result<Listing> {
        let pod = "{apiVersion: v1, kind: Pod, metadata: {name: first}, spec: {restartPolicy: Never,
            terminationGracePeriodSeconds: 0, containers: [{name: c, image: IMAGE, command: ['true']}]}}";
        eventually_blocking("the service account is there", PATIENCE, || {
            node.kubectl(&["get", "serviceaccount", "default"]).ok()
        })?;
        node.apply("default", &pod.replace("IMAGE", &crate::cases::image()))?;
        let phase = "--for=jsonpath={.status.phase}=Succeeded";
        node.kubectl(&["wait", phase, "pod/first", "--timeout=180s"])?;
        node.kubectl(&["delete", "pod", "first", "--timeout=180s"])?;
        // The listing counts when nothing of the pod is left.
        let is_of_pod = |line: &&String| {
            (line.starts_with("network namespace") && line.contains("/cni-")) || line.contains("_first_")
        };
        let (mut before, mut changing) = (list(node)?, String::new());
        let settled = eventually_blocking("nothing of the first pod is left", PATIENCE, || {
            std::thread::sleep(PAUSE);
            let now = list(node).ok()?;
            changing = differences(&before, &now);
            let left = now.iter().filter(is_of_pod).map(|line| format!("\n{line}"));
            changing.extend(left);
            before = now;
            changing.is_empty().then_some(())
        });
        settled.with_context(|| changing)?;
        Ok(Listing(before))
    }

    /// Waits until the state is the same again. The error has the differences.
    pub(crate) fn is_again(&self, node: &Node) -> anyhow::Result<()> {
        let mut changed = String::new();
        let same = eventually_blocking("everything is as before", PATIENCE, || {
            changed = differences(&self.0, &list(node).ok()?);
            if !changed.is_empty() {
                std::thread::sleep(PAUSE);
            }
            changed.is_empty().then_some(())
        });
        same.with_context(|| changed)
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Returns a line for each thing that is new or gone.
fn differences(before: &BTreeSet<String>, now: &BTreeSet<String>) -> String {
    let new = now.difference(before).map(|line| format!("+ {line}"));
    let gone = before.difference(now).map(|line| format!("- {line}"));
    new.chain(gone).take(MOST_SHOWN).collect::<Vec<_>>().join("\n")
}

fn list(node: &Node) -> anyhow::Result<BTreeSet<String>> {
    let script = include_str!("left.sh");
    let done = Command::new("bash").args(["-c", script, "bash"]).arg(node.folder()).output()?;
    ensure!(done.status.success(), "left.sh: {}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8(done.stdout)?.lines().map(str::to_owned).collect())
}
