//! Tests the rights of a CSI driver's accounts: to PeerpodVolumes, and to the Leases of volumes.

use std::path::Path;

use kube::Api;
use kube::api::{Patch, PatchParams};
use peerpod_kube::crds::PeerpodVolume;
use peerpod_test_kube::Cluster;
use peerpod_tests::fresh_id;
use serde_json::{Value, json};

use super::{OWN, as_who, pod, refused};

/// Checks that a driver's own accounts get the rights that peerpod-csi needs besides the driver's. The CSI tests run
/// the programs.
pub(super) async fn works_and_is_bounded(cluster: &Cluster) {
    for account in ["driver-node", "driver-controller"] {
        cluster.kubectl(&["create", "serviceaccount", "-n", "shop", account]).unwrap();
    }
    for node in ["worker-1", "worker-2"] {
        pod(
            cluster,
            "shop",
            &format!("csi-{node}"),
            json!({"nodeName": node, "serviceAccountName": "driver-node"}),
        );
    }
    let node = cluster.kubeconfig_of("shop", "driver-node", Some("csi-worker-1")).await.unwrap();
    let controller = cluster.kubeconfig_of("shop", "driver-controller", None).await.unwrap();
    let volume = |name: &str, node: &str| {
        let file = cluster.folder().join(format!("{name}.json"));
        let object = json!({"apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerpodVolume",
            "metadata": {"name": name, "namespace": "shop"}, "spec": {"volumeID": "v", "nodeName": node}});
        std::fs::write(&file, object.to_string()).unwrap();
        file
    };
    let (own, theirs) = (volume("own", "worker-1"), volume("theirs", "worker-2"));
    as_who(cluster, &node, &["create", "-f", own.to_str().unwrap()]).unwrap();
    let why = "a driver on node worker-1 may not change a PeerpodVolume of another node";
    refused(cluster, &node, &["create", "-f", theirs.to_str().unwrap()], why);
    let other = cluster.kubeconfig_of("shop", "driver-node", Some("csi-worker-2")).await.unwrap();
    as_who(cluster, &other, &["create", "-f", theirs.to_str().unwrap()]).unwrap();
    refused(cluster, &node, &["delete", "peerpodvolume", "-n", "shop", "theirs"], why);
    specs(cluster, &node, &controller).await;
    for words in
        [&["get", "secrets", "-n", "shop"][..], &["get", "peerpodvolumes", "-A"], &["get", "pods", "-A"]]
    {
        refused(cluster, &node, words, "forbidden");
    }
    leases(cluster, &node);
    as_who(cluster, &node, &["get", "pod", "-n", "shop", "web"]).unwrap();
    for words in [
        &["get", "peerpodvolumes", "-A"][..],
        &["get", "pods", "-n", "shop"],
        &["get", "pv"],
        &["get", "csinodes"],
        &["get", "peerpods", "-A"],
        &["auth", "can-i", "create", "events.events.k8s.io", "-n", "shop"],
        &["get", "secret", "-n", "shop", "pull"],
        &["annotate", "peerpodvolume", "-n", "shop", "theirs", "a=b"],
    ] {
        as_who(cluster, &controller, words).unwrap();
    }
    for words in [
        &["get", "secrets", "-n", "shop"][..],
        &["get", "secret", "-n", OWN, "peerpod-webhook-ca"],
        &["get", "leases", "-n", "shop"],
        &["get", "nodes"],
    ] {
        refused(cluster, &controller, words, "forbidden");
    }
    // A driver of shares needs neither pods nor secrets.
    cluster.kubectl(&["create", "serviceaccount", "-n", "files", "shares-controller"]).unwrap();
    let shares = cluster.kubeconfig_of("files", "shares-controller", None).await.unwrap();
    as_who(cluster, &shares, &["get", "pv"]).unwrap();
    for words in [
        &["get", "pods", "-n", "shop"][..],
        &["get", "peerpods", "-n", "shop"],
        &["get", "secret", "-n", "shop", "pull"],
    ] {
        refused(cluster, &shares, words, "forbidden");
    }
}

/// Checks that a driver alone writes the volumes `own` and `theirs`, and that its controller alone writes their VM.
async fn specs(cluster: &Cluster, node: &Path, controller: &Path) {
    cluster.kubectl(&["create", "serviceaccount", "-n", "shop", "stranger"]).unwrap();
    let all = ["create", "clusterrolebinding", "stranger", "--clusterrole=cluster-admin"];
    cluster.kubectl(&[&all[..], &["--serviceaccount=shop:stranger"]].concat()).unwrap();
    let stranger = cluster.kubeconfig_of("shop", "stranger", None).await.unwrap();
    let file = |name: &str, spec: Value| {
        let file = cluster.folder().join(format!("{}.json", fresh_id("volume")));
        let object = json!({"apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerpodVolume",
            "metadata": {"name": name, "namespace": "shop"}, "spec": spec});
        std::fs::write(&file, object.to_string()).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let patch = |who: &Path, part: &[&str], change: &Value| {
        let (words, change) = (["patch", "peerpodvolume", "-n", "shop", "own"], change.to_string());
        as_who(cluster, who, &[&words[..], part, &["--type=merge", "-p", &change]].concat())
    };
    let denied = |done: anyhow::Result<String>, why: &str| {
        let error = format!("{:#}", done.unwrap_err());
        assert!(error.contains(why), "{error}");
    };
    let status = &["--subresource=status"][..];
    let (vm, proven) = (json!({"spec": {"vmID": "i-1"}}), json!({"spec": {"nodeID": "i-1"}}));
    let released = json!({"status": {"conditions": [{"type": "Released", "status": "True", "reason": "VMGone",
        "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    let labels = json!({"metadata": {"labels": {"peerpod.io/attach": "driver"}}});
    let only = "only a CSI driver makes a PeerpodVolume";
    for who in [&cluster.folder().join("admin.kubeconfig"), &stranger] {
        let file = file("strange", json!({"volumeID": "v", "nodeName": "worker-1"}));
        refused(cluster, who, &["create", "-f", &file], only);
        for (part, change) in [(&[][..], &vm), (&[], &proven), (&[], &labels), (status, &released)] {
            denied(patch(who, part, change), only);
        }
        as_who(cluster, who, &["annotate", "peerpodvolume", "-n", "shop", "own", "a=b", "--overwrite"])
            .unwrap();
    }
    let file = file("proven", json!({"volumeID": "v", "nodeName": "worker-1", "nodeID": "i-1"}));
    refused(cluster, node, &["create", "-f", &file], "only a CSI driver's controller writes the VM");
    patch(node, &[], &vm).unwrap();
    // `kubectl patch` would read the status first.
    let uid = ["get", "pod", "-n", "shop", "csi-worker-1", "-o", "jsonpath={.metadata.uid}"];
    let uid = cluster.kubectl(&uid).unwrap();
    for (account, pod, change) in [
        ("driver-node", Some(("csi-worker-1", uid.as_str())), released),
        ("driver-controller", None, json!({"status": {"state": "controllerPublishVolumeApplied"}})),
    ] {
        let token = cluster.token("shop", account, &[], pod).await.unwrap();
        let volumes: Api<PeerpodVolume> = Api::namespaced(cluster.client_with(&token).unwrap(), "shop");
        volumes.patch_status("own", &PatchParams::default(), &Patch::Merge(change)).await.unwrap();
    }
    for change in [&proven, &json!({"spec": {"volumeName": "another"}})] {
        denied(patch(node, &[], change), "nothing of a PeerpodVolume's spec but vmID");
    }
    patch(controller, &[], &proven).unwrap();
}

/// Checks that a driver's node may change the Leases of its own pods' volumes only.
fn leases(cluster: &Cluster, who: &Path) {
    let lease = |name: &str, node: Option<&str>, holder: &str| {
        let file = cluster.folder().join(format!("{}.json", fresh_id("lease")));
        let marks = node.map(|node| json!({"peerpod.io/node": node})).unwrap_or_else(|| json!({}));
        let object = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": name, "namespace": "shop", "annotations": marks},
            "spec": {"holderIdentity": holder}});
        std::fs::write(&file, object.to_string()).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (own, theirs) = (Some("worker-1"), Some("worker-2"));
    let free = lease("peerpod-volume-free", theirs, "");
    let taken = lease("peerpod-volume-taken", theirs, "pod-2");
    let unmarked = lease("peerpod-volume-unmarked", None, "pod-1");
    let leader = lease("peerpod-csi-x", None, "replica");
    for file in [&free, &taken, &unmarked, &leader] {
        cluster.kubectl(&["create", "-f", file]).unwrap();
    }
    as_who(cluster, who, &["create", "-f", &lease("peerpod-volume-own", own, "pod-1")]).unwrap();
    as_who(cluster, who, &["replace", "-f", &lease("peerpod-volume-free", own, "pod-1")]).unwrap();
    for name in ["own", "free"] {
        as_who(cluster, who, &["delete", "lease", "-n", "shop", &format!("peerpod-volume-{name}")]).unwrap();
    }
    let why = "a driver on node worker-1 may not change lease peerpod-volume-taken of another node";
    refused(cluster, who, &["replace", "-f", &lease("peerpod-volume-taken", own, "pod-1")], why);
    refused(cluster, who, &["delete", "lease", "-n", "shop", "peerpod-volume-taken"], why);
    refused(cluster, who, &["replace", "-f", &lease("peerpod-volume-taken", None, "pod-1")], why);
    for node in [theirs, None] {
        let file = lease("peerpod-volume-new", node, "pod-2");
        refused(cluster, who, &["create", "-f", &file], "may not change lease peerpod-volume-new");
    }
    let why = "may not change lease peerpod-volume-unmarked";
    refused(cluster, who, &["replace", "-f", &lease("peerpod-volume-unmarked", own, "pod-1")], why);
    refused(cluster, who, &["delete", "lease", "-n", "shop", "peerpod-volume-unmarked"], why);
    let why = "may not change lease peerpod-csi-x, which is of no volume";
    refused(cluster, who, &["replace", "-f", &lease("peerpod-csi-x", own, "x")], why);
}
