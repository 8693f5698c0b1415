//! The command line with a kubeconfig, and a real node that answers it. No kubelet runs here: the test's kubectl starts
//! the command's program itself.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use peerpod_test_kube::{program, wait_for};
use serde_json::{from_value, json};

use super::front_door::daemon_set;
use super::node_common::{LIMIT, NODE, OWN, Rig};

/// Describes the sandbox, whose VM has no UDP to the relay, and collects both halves of the state.
pub(super) async fn seen(rig: &Rig, pod: &str, id: &str) {
    daemon(rig).await;
    let bin = rig.cluster.folder().join("bin");
    fs::create_dir(&bin).unwrap();
    let script = format!(
        "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift 2\nexec {} \"$@\"\n",
        program("peerpod").unwrap().display()
    );
    fs::write(bin.join("kubectl"), script).unwrap();
    fs::set_permissions(bin.join("kubectl"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let run = |words: &[&str]| {
        let mut command = Command::new(program("peerpod").unwrap());
        command.args(words).env("PATH", &path).current_dir(rig.cluster.folder());
        command.arg("--kubeconfig").arg(rig.cluster.folder().join("admin.kubeconfig"));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.success(), text)
    };
    let mut described = String::new();
    // The guest reports the path after its probes.
    let reported = wait_for("the guest's report of its path", LIMIT, async || {
        described = run(&["describe", pod]).1;
        Ok(described.contains(" between VM and node").then_some(()))
    });
    reported.await.unwrap_or_else(|error| panic!("{error}: {described}\n{}", rig.daemons.log_tails()));
    for part in [
        "guest       connected from ",
        "tunnel      vxlan, UDP port 4789",
        "vni         ",
        " in the VM, ",
        "path        no probe came back: UDP to the relay's port is blocked",
        "end of the console",
    ] {
        assert!(described.contains(part), "{part}: {described}");
    }
    println!("{described}");
    let (is_done, contents) = run(&["sysdump", "--out", "both.tar.gz"]);
    assert!(is_done, "{contents}");
    for part in
        [" peerpods.yaml", "node/status.yaml", "node/readyz.txt", "node/metrics.txt", "ledger-index.txt"]
    {
        let part = if part.starts_with(' ') { part.to_owned() } else { format!(" nodes/{NODE}/{part}") };
        assert!(contents.contains(&part), "{part}: {contents}");
    }
    assert!(contents.contains(&format!(" nodes/{NODE}/sandboxes/{id}.yaml")), "{contents}");
}

/// Makes the node's pod of a DaemonSet, as the chart does.
async fn daemon(rig: &Rig) {
    let ours = json!({"app.kubernetes.io/name": "peerpod", "app.kubernetes.io/component": "node"});
    let owner = daemon_set(&rig.client, OWN, &ours).await;
    let run_dir = rig.daemons.run_dir();
    let pod = json!({
        "metadata": {"name": "peerpod-node-x", "labels": ours, "ownerReferences": [owner]},
        "spec": {"nodeName": NODE, "serviceAccountName": "peerpod-node", "containers": [
            {"name": "node", "image": "x", "volumeMounts": [{"name": "run", "mountPath": run_dir}]}],
            "volumes": [{"name": "run", "hostPath": {"path": run_dir}}]},
    });
    let pods: Api<Pod> = Api::namespaced(rig.client.clone(), OWN);
    pods.create(&PostParams::default(), &from_value(pod).unwrap()).await.unwrap();
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    pods.patch_status("peerpod-node-x", &PatchParams::default(), &running).await.unwrap();
}
