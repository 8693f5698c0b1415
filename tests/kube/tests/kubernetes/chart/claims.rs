//! Claims behind the chart: a CSI driver as its own project deploys it (`deploy/csi-example`), with peerpod-csi before it
//! and Kubernetes' provisioner and attacher. Its disks are volumes of libvirt's pool.

use std::fs;
use std::process::Command;

use anyhow::{Context, ensure};
use peerpod_test_kube::project;
use peerpod_test_reference::capture;
use peerpod_world::{POOL, eventually_blocking};
use serde_json::{Value, json};

use super::{Installed, PATIENCE, copy_folder};
use crate::cases::{Case, NOTE, claims, front_door};
use crate::images_common::{Image, PORT};
use crate::node::ADDRESS;

/// Namespace of the driver.
const NAMESPACE: &str = "csi-hostpath";
/// Namespace and label of the driver's pods.
pub(super) const SELECTORS: [(&str, &str); 2] =
    [(NAMESPACE, "app=driver-controller"), (NAMESPACE, "app=driver-node")];
/// Name of the driver and of its StorageClass.
const DRIVER: &str = "hostpath.csi.k8s.io";
/// Programs of the driver and of its sidecars, each in an image of its own.
const PROGRAMS: [&str; 3] = ["csi-driver", "csi-provisioner", "csi-attacher"];
/// Writes a number into each line of a file.
const COUNTS: &str =
    "trap exit TERM; n=0; while :; do n=$((n+1)); echo $n >> /d/count; sync /d/count; sleep 0.2; done";
/// Rights that the projects of the sidecars give them.
const RIGHTS: &str = "
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: csi-sidecars}, rules: [
  {apiGroups: [''], resources: [persistentvolumes], verbs: [get, list, watch, create, patch, delete]},
  {apiGroups: [''], resources: [persistentvolumeclaims], verbs: [get, list, watch, update]},
  {apiGroups: [''], resources: [events], verbs: [list, watch, create, update, patch]},
  {apiGroups: [''], resources: [nodes], verbs: [get, list, watch]},
  {apiGroups: [storage.k8s.io], resources: [storageclasses, csinodes, volumeattachments], verbs: [get, list, watch]},
  {apiGroups: [storage.k8s.io], resources: [volumeattachments, volumeattachments/status], verbs: [patch]}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: csi-sidecars},
 roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: csi-sidecars},
 subjects: [{kind: ServiceAccount, name: driver-controller, namespace: csi-hostpath}]}
---
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: hostpath.csi.k8s.io},
 provisioner: hostpath.csi.k8s.io, parameters: {csi.storage.k8s.io/fstype: ext4}}";

/// Returns the images of the driver's pods with their names.
pub(super) fn images() -> anyhow::Result<Vec<(String, Image)>> {
    let one = |name: &&str| Ok((format!("{name}:1"), super::images::of_csi(name)?));
    PROGRAMS.iter().map(one).collect()
}

/// Returns the driver's accounts, for the chart's values.
pub(super) fn accounts() -> Value {
    json!({
        "namespace": NAMESPACE, "controllerServiceAccount": "driver-controller",
        "nodeServiceAccount": "driver-node",
    })
}

/// Makes the driver's namespace, in which the chart gives rights.
pub(super) fn make_namespace(on: &Installed<'_>) -> anyhow::Result<()> {
    on.node.kubectl(&["create", "namespace", NAMESPACE]).map(drop)
}

/// Installs the driver by an overlay of `deploy/csi-example`, like a user's.
pub(super) fn install(on: &Installed<'_>) -> anyhow::Result<()> {
    for folder in ["csi", "csi-example"] {
        copy_folder(&project("deploy").join(folder), &on.folder.join(folder))?;
    }
    fs::create_dir(on.folder.join("driver"))?;
    let disks = on.libvirtd.borrow().pool_folder(POOL);
    let patch = |kind: &str, name: &str, spec: Value| {
        let object = json!({
            "apiVersion": "apps/v1", "kind": kind, "metadata": { "name": name },
            "spec": { "template": { "spec": spec } },
        });
        json!({ "patch": object.to_string() })
    };
    let (name, endpoint) = (format!("--name={DRIVER}"), "--endpoint=/csi/csi.sock");
    let controller = json!({
        "containers": [{
            "name": "driver", "args": [name, endpoint, "--disks=/disks"],
            "volumeMounts": [{ "name": "disks", "mountPath": "/disks" }],
        }],
        "volumes": [{ "name": "disks", "hostPath": { "path": disks, "type": "Directory" } }],
    });
    let socket = "/var/lib/kubelet/plugins/csi-hostpath/peerpod.sock";
    let node = json!({ "containers": [
        { "name": "driver", "args": [name, endpoint] },
        { "name": "registrar", "args": ["register", DRIVER, socket, format!("/registration/{DRIVER}-reg.sock")] },
    ] });
    let image = |old: &str, new: &str| {
        let old =
            if old == "peerpod" { old.to_owned() } else { format!("registry.k8s.io/sig-storage/{old}") };
        json!({ "name": old, "newName": format!("{ADDRESS}:{PORT}/{new}"), "newTag": "1" })
    };
    let overlay = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": ["../csi-example"],
        "patches": [patch("Deployment", "driver-controller", controller), patch("DaemonSet", "driver-node", node)],
        "images": [
            image("peerpod", "peerpod"), image("hostpathplugin", "csi-driver"),
            image("csi-node-driver-registrar", "csi-driver"), image("csi-provisioner", "csi-provisioner"),
            image("csi-attacher", "csi-attacher"),
        ],
    });
    fs::write(on.folder.join("driver/kustomization.yaml"), overlay.to_string())?;
    on.node.apply("", RIGHTS)?;
    on.node.kubectl(&["apply", "-k", &on.folder.join("driver").to_string_lossy()])?;
    rolled_out(on)
}

fn rolled_out(on: &Installed<'_>) -> anyhow::Result<()> {
    for object in ["deploy/driver-controller", "ds/driver-node"] {
        on.node.kubectl(&["-n", NAMESPACE, "rollout", "status", object, "--timeout=240s"])?;
    }
    Ok(())
}

/// `peerpod test` with a volume: the VMs have their own kernel, so that each of its tests passes on the one node.
pub(super) fn connectivity(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::new(on.node, "connectivity")?;
    let refresh = || drop(on.libvirtd.borrow().virsh(&["pool-refresh", POOL])); // as `next_pod` does
    let (command, table) = front_door::test(&case, DRIVER, &[], refresh)?;
    capture("test", &command, &table).map_err(anyhow::Error::msg)
}

/// A pod writes to a claim. The next pod reads it, and writes on until [`removal`].
pub(super) fn next_pod(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::new(on.node, "claims")?;
    claims::claim(&case, DRIVER, "Filesystem", 32)?;
    case.kubectl(&["wait", "--for=jsonpath={.status.phase}=Bound", "pvc/data", "--timeout=120s"])?;
    // The driver of a pool makes its volumes by libvirt, which then knows them.
    on.libvirtd.borrow().virsh(&["pool-refresh", POOL])?;
    claims::hand_over(&case, COUNTS)
}

/// Replaces peerpod-csi, too.
pub(super) fn upgrade(on: &Installed<'_>) -> anyhow::Result<()> {
    let image = format!("peerpod-csi={ADDRESS}:{PORT}/peerpod:2");
    for object in ["deploy/driver-controller", "ds/driver-node"] {
        on.node.kubectl(&["-n", NAMESPACE, "set", "image", object, &image])?;
    }
    rolled_out(on)
}

/// The pod has written each number. Its claim goes, and leaves nothing.
pub(super) fn removal(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::of(on.node, "claims");
    let lines = || -> anyhow::Result<u32> {
        let missing = case.exec("q", &["awk", "$1 != NR", "/d/count"])?;
        ensure!(missing.is_empty(), "lines of the volume that are out of order: {missing}");
        Ok(case.exec("q", &["sh", "-c", "wc -l </d/count"])?.trim().parse()?)
    };
    let before = lines()?;
    case.until("the pod writes on", || Ok((lines()? > before).then_some(())))?;
    let restarts = case.get("pod/q")?["status"]["containerStatuses"][0]["restartCount"].clone();
    ensure!(restarts == 0, "{restarts} restarts of q");
    println!("{NOTE}lines that the pod has written to its volume: {before}");
    let handle = case.kubectl(&["get", "pv", "-o", "jsonpath={.items[*].spec.csi.volumeHandle}"])?;
    let disk = on.libvirtd.borrow().pool_folder(POOL).join(handle.trim());
    ensure!(disk.is_file(), "{} is no file", disk.display());
    claims::remove(&case, "q")?;
    let left = || -> anyhow::Result<Vec<String>> {
        let volumes = on.node.kubectl(&["get", "peerpodvolumes", "-A", "-o", "name"])?;
        let leases = on.node.kubectl(&["get", "leases", "-n", NAMESPACE, "-o", "name"])?;
        let mut left: Vec<String> = volumes.lines().map(str::to_owned).collect();
        left.extend(leases.lines().filter(|name| name.contains("peerpod-volume")).map(str::to_owned));
        let files = Command::new("find").args(["/var/lib/peerpod/volumes", "-type", "f"]).output()?;
        left.extend(String::from_utf8(files.stdout)?.lines().map(str::to_owned));
        left.extend(disk.exists().then(|| disk.display().to_string()));
        Ok(left)
    };
    eventually_blocking("nothing is left of the claim", PATIENCE, || {
        left().ok().filter(Vec::is_empty).map(drop)
    })
    .with_context(|| format!("{:?}", left()))
}

/// Removes the driver.
pub(super) fn uninstall(on: &Installed<'_>) -> anyhow::Result<()> {
    on.node.kubectl(&["delete", "-k", &on.folder.join("driver").to_string_lossy(), "--timeout=120s"])?;
    on.node.kubectl(&["delete", "namespace", NAMESPACE, "--timeout=120s"]).map(drop)
}
