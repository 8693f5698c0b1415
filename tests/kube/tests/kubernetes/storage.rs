//! CSI on the node: a driver whose disks are files, `peerpod-csi` before it with the chart's rights, and Kubernetes'
//! provisioner, attacher and resizer.

use std::fs;
use std::path::Path;

use anyhow::Context;
use peerpod_test_kube::{NODE, Process, program, project};
use peerpod_world::{Container, World};

use crate::node::Node;

/// Name of the driver and of its StorageClass.
pub(crate) const DRIVER: &str = "mock.csi.test";

const OBJECTS: &str = "
{apiVersion: v1, kind: Namespace, metadata: {name: peerpod-system}}
---
{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: mock.csi.test},
 spec: {attachRequired: true, podInfoOnMount: true, fsGroupPolicy: File, volumeLifecycleModes: [Persistent, Ephemeral]}}
---
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: mock.csi.test}, provisioner: mock.csi.test,
 allowVolumeExpansion: true}
---
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: xfs}, provisioner: mock.csi.test,
 allowVolumeExpansion: true, parameters: {csi.storage.k8s.io/fstype: xfs}}
---
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: peers-only}, provisioner: mock.csi.test,
 parameters: {peerpod: 'true'}}";

/// Starts everything. The processes end when they are dropped.
pub(crate) fn start(node: &Node, world: &World) -> anyhow::Result<Vec<Process>> {
    for plural in ["peerpods", "peerpodconfigs", "peerpodvolumes"] {
        let file = project(&format!("deploy/crds/{plural}.yaml"));
        node.kubectl(&["apply", "--server-side", "-f", &file.to_string_lossy()])?;
        let name = format!("crd/{plural}.confidentialcontainers.org");
        node.kubectl(&["wait", "--for=condition=Established", &name, "--timeout=60s"])?;
    }
    node.apply("", OBJECTS)?;
    let folder = world.folder();
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let sockets = folder.join("csi");
    fs::create_dir(&sockets)?;
    let disks = folder.join("state/local/volumes");
    fs::create_dir_all(&disks)?;
    let admin = node.cluster.folder().join("admin.kubeconfig");
    let tool =
        |name: &str| program(&format!("csi/{name}")).context("build it first (tests/csi/build sidecars)");
    let wrapper = |role: &str| {
        vec![
            role.to_owned(),
            format!("--csi.endpoint={}", at(&format!("csi/{role}.sock"))),
            format!("--csi.driver-endpoint={}", at("csi/driver.sock")),
            format!("--paths.run-dir={}", at("run")),
            format!("--paths.state-dir={}", at("state")),
            "--csi.admin-listen=127.0.0.1:0".to_owned(),
            format!("--kubernetes.kubeconfig={}", admin.display()),
            format!("--cluster.node-name={NODE}"),
        ]
    };
    let container = Container {
        name: "peerpod-csi",
        volumes: vec![
            ("socket-dir", sockets),
            ("peerpod-dev", "/dev".into()),
            ("peerpod-kubelet", folder.join("kubelet")),
            ("peerpod-state", folder.join("state")),
            ("peerpod-run", folder.join("run")),
        ],
        // A kubeconfig in it replaces the service account's token.
        extra: vec![node.cluster.folder().to_owned()],
        ..Container::default()
    };
    let own = program("peerpod-csi")?;
    let driver = [
        format!("--endpoint={}", at("csi/driver.sock")),
        format!("--name={DRIVER}"),
        format!("--disks={}", disks.display()),
    ];
    let mut all = vec![
        Process::start("csi-driver", &tool("csi-driver")?, &driver, folder)?,
        Process::start("csi-controller", &own, &wrapper("controller"), folder)?,
        Process::start_in(&container, "csi-node", &own, &wrapper("node"), folder)?,
    ];
    let registration = at(&format!("kubelet/plugins_registry/{DRIVER}.sock"));
    let words = ["register".to_owned(), DRIVER.to_owned(), at("csi/node.sock"), registration];
    all.push(Process::start("csi-registrar", &tool("csi-driver")?, &words, folder)?);
    for name in ["csi-provisioner", "csi-attacher", "csi-resizer"] {
        all.push(sidecar(name, &tool(name)?, &at("csi/controller.sock"), &admin, folder)?);
    }
    Ok(all)
}

fn sidecar(
    name: &str,
    program: &Path,
    socket: &str,
    kubeconfig: &Path,
    folder: &Path,
) -> anyhow::Result<Process> {
    let mut words = vec![format!("--csi-address={socket}"), format!("--kubeconfig={}", kubeconfig.display())];
    if name == "csi-provisioner" {
        words.push("--extra-create-metadata".to_owned());
    }
    Process::start(name, program, &words, folder)
}
