//! Tests the CSI wrapper with a real API server. It covers the object of a (volume, pod), the driver's attachment of
//! the disk to the pod's VM, and the Lease that names the disk's holder. In the end all of it is removed.

#![cfg(test)]

mod hostile;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use peerpod_proto::csi::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, CreateVolumeRequest,
    CreateVolumeResponse, Empty, NodePublishVolumeRequest, NodeUnpublishVolumeRequest, VolumeCapability,
};
use peerpod_test_csi::grpc::Client;
use peerpod_test_csi::{Driver, Folder, Wrapper, calls};
use peerpod_test_kube::{Cluster, Options, wait_for};
use peerpod_volume::records::{Records, Vm};
use peerpod_volume::{Identity, VolumeId};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);
const DRIVER: &str = "mock.csi.test";
const SECRET: &str = "not-for-objects";
/// RuntimeClass of peer pods.
const CLASS: &str = "kata-remote";

struct Setup {
    cluster: Cluster,
    folder: Folder,
    _driver: Driver,
    flags: Vec<String>,
}

impl Setup {
    async fn new(name: &str, more: &[&str]) -> Result<Setup> {
        Setup::of_driver(name, &[], more).await
    }

    async fn of_driver(name: &str, driver: &[&str], more: &[&str]) -> Result<Setup> {
        let cluster = Cluster::start(Options::default()).await?;
        let mut folder = Folder::new(name)?;
        // A kubeconfig in it replaces the service account's token.
        folder.add_volume(cluster.folder());
        for plural in ["peerpods", "peerpodconfigs", "peerpodvolumes"] {
            let path = format!("{}/../../deploy/crds/{plural}.yaml", env!("CARGO_MANIFEST_DIR"));
            cluster.kubectl(&["apply", "--server-side", "-f", &path])?;
            let name = format!("crd/{plural}.confidentialcontainers.org");
            cluster.kubectl(&["wait", "--for=condition=Established", &name, "--timeout=60s"])?;
        }
        for namespace in ["shop", "peerpod-system"] {
            cluster.kubectl(&["create", "namespace", namespace])?;
        }
        let driver = Driver::start(&folder, driver)?;
        let kubeconfig = cluster.folder().join("admin.kubeconfig");
        let mut flags = vec![
            format!("--kubernetes.kubeconfig={}", kubeconfig.display()),
            "--cluster.node-name=worker-1".to_owned(),
        ];
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        let setup = Setup { cluster, folder, _driver: driver, flags };
        setup.apply(&json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": {"name": "worker-1"},
            "spec": {"drivers": [{"name": DRIVER, "nodeID": "node-of-worker-1"}]},
        }))?;
        for class in [CLASS, "gvisor"] {
            setup.apply(&json!({
                "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": class}, "handler": "k",
            }))?;
        }
        Ok(setup)
    }

    fn start(&self, role: &'static str) -> Result<Wrapper> {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        Wrapper::start(role, &self.folder, &flags)
    }

    fn apply(&self, object: &Value) -> Result<()> {
        let path = self.folder.path("object.json");
        std::fs::write(&path, object.to_string())?;
        self.cluster.kubectl(&["create", "-f", path.to_str().context("path")?]).map(drop)
    }

    fn get(&self, words: &[&str]) -> Result<Value> {
        let mut all = vec!["get", "-o", "json", "--ignore-not-found"];
        all.extend(words);
        let text = self.cluster.kubectl(&all)?;
        Ok(if text.trim().is_empty() { Value::Null } else { serde_json::from_str(&text)? })
    }

    fn objects(&self) -> Result<Vec<Value>> {
        let list = self.get(&["peerpodvolumes", "-n", "shop"])?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    fn lease(&self, volume: &VolumeId) -> Result<Value> {
        self.get(&["lease", "-n", "peerpod-system", &format!("peerpod-volume-{volume}")])
    }

    /// Returns the records and mounts of all volumes on the node.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let mut left = self.folder.mounts()?;
        for folder in ["pods", "names", "targets", "staged", "devices", "owners"] {
            let found =
                std::fs::read_dir(self.folder.path("state/volumes").join(folder)).into_iter().flatten();
            left.extend(found.filter_map(|entry| Some(entry.ok()?.path())));
        }
        Ok(left)
    }

    fn records(&self) -> Records {
        Records::new(self.folder.path("state/volumes"))
    }

    async fn create(&self, controller: &Wrapper, name: &str) -> Result<(String, HashMap<String, String>)> {
        let mut request = CreateVolumeRequest { name: name.to_owned(), ..Default::default() };
        request.parameters.insert("peerpod".to_owned(), "true".to_owned());
        let bytes = protobuf::Message::write_to_bytes(&capability())?;
        request.special_fields.mut_unknown_fields().add_length_delimited(3, bytes);
        let mut client = Client::connect(&controller.socket).await?;
        let answer: CreateVolumeResponse = client.unary("Controller/CreateVolume", &request).await?;
        let volume = answer.volume.into_option().context("no volume")?;
        Ok((volume.volume_id, volume.volume_context))
    }

    /// Makes pod, claim and PersistentVolume as they are when kubelet publishes; returns the pod's UID.
    fn pod(&self, name: &str, class: Option<&str>) -> Result<String> {
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"},
            "spec": {
                "nodeName": "worker-1", "runtimeClassName": class,
                "securityContext": {"fsGroup": 3000, "fsGroupChangePolicy": "OnRootMismatch"},
                "containers": [{"name": "c", "image": "i"}],
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}],
            },
        }))?;
        let pod = self.get(&["pod", "-n", "shop", name])?;
        Ok(pod["metadata"]["uid"].as_str().context("no UID")?.to_owned())
    }

    /// Makes the PeerPod with which the node shows the VM of a pod.
    fn peerpod(&self, pod: &str, uid: &str, vm: &Vm) -> Result<()> {
        self.apply(&json!({
            "apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPod",
            "metadata": {"name": pod, "namespace": "shop",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}]},
            "spec": {"instanceID": vm.instance, "nodeName": "worker-1", "sandboxID": vm.sandbox},
        }))
    }

    fn persistent_volume(&self, id: &str, context: &HashMap<String, String>) -> Result<()> {
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "cloud", "namespace": "shop"},
            "stringData": {"secretKey": SECRET},
        }))?;
        self.apply(&json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"},
            "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                "claimRef": {"namespace": "shop", "name": "data"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                    {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["zone-b"]}]}]}},
                "csi": {
                    "driver": DRIVER, "volumeHandle": id, "volumeAttributes": context,
                    "controllerPublishSecretRef": {"name": "cloud", "namespace": "shop"},
                },
            },
        }))
    }

    fn request(
        &self,
        id: &str,
        context: &HashMap<String, String>,
        pod: &str,
        uid: &str,
    ) -> NodePublishVolumeRequest {
        let target = self.folder.path(&format!("kubelet/pods/{uid}/volumes/kubernetes.io~csi/pv-1/mount"));
        let mut request = NodePublishVolumeRequest {
            volume_id: id.to_owned(),
            target_path: target.display().to_string(),
            volume_context: context.clone(),
            ..Default::default()
        };
        request.volume_capability = Some(capability()).into();
        for (key, value) in [("uid", uid), ("name", pod), ("namespace", "shop")] {
            request.volume_context.insert(format!("csi.storage.k8s.io/pod.{key}"), value.to_owned());
        }
        request
    }
}

fn capability() -> VolumeCapability {
    let mut capability = VolumeCapability::new();
    capability.access_mode.mut_or_insert_default().mode = 1;
    capability.mut_mount().fs_type = "ext4".to_owned();
    capability
}

async fn publish(node: &Wrapper, request: &NodePublishVolumeRequest) -> Result<Empty> {
    Client::connect(&node.socket).await?.unary("Node/NodePublishVolume", request).await
}

async fn unpublish(node: &Wrapper, request: &NodePublishVolumeRequest) -> Result<Empty> {
    let request = unpublishing(request);
    Client::connect(&node.socket).await?.unary("Node/NodeUnpublishVolume", &request).await
}

fn unpublishing(published: &NodePublishVolumeRequest) -> NodeUnpublishVolumeRequest {
    NodeUnpublishVolumeRequest {
        volume_id: published.volume_id.clone(),
        target_path: published.target_path.clone(),
        ..Default::default()
    }
}

fn vm(gone: bool) -> Vm {
    // The mock driver knows one node, by its own name.
    Vm { version: 1, sandbox: "s".into(), instance: Some(format!("projects/p/vms/{DRIVER}")), gone }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_custom_resources_it_names_the_command_and_goes_on_when_they_are_there() -> Result<()> {
    const INSTALL: &str = "peerpod-cluster crds | kubectl apply --server-side -f -";
    let setup = Setup::new("crds", &["--csi.attach=driver", "--csi.node-id={name}"]).await?;
    setup.cluster.kubectl(&["delete", "crd", "peerpodvolumes.confidentialcontainers.org"])?;
    let (controller, node) = (setup.start("controller")?, setup.start("node")?);
    wait_for("the controller names the missing kinds", LIMIT, async || {
        let said = controller.process.said();
        let line = said.lines().find(|line| line.contains("the PeerpodVolumes cannot be followed"));
        Ok(line.map(|line| assert!(line.contains(INSTALL), "{line}")))
    })
    .await?;
    let (id, context) = setup.create(&controller, "disk").await?;
    setup.persistent_volume(&id, &context)?;
    let uid = setup.pod("web-0", Some(CLASS))?;
    let request = setup.request(&id, &context, "web-0", &uid);
    let why = publish(&node, &request).await.unwrap_err().to_string();
    ensure!(why.contains(INSTALL) && !why.contains("Failed to parse"), "{why}");
    let path = format!("{}/../../deploy/crds/peerpodvolumes.yaml", env!("CARGO_MANIFEST_DIR"));
    setup.cluster.kubectl(&["apply", "--server-side", "-f", &path])?;
    wait_for("the volume is published", LIMIT, async || Ok(publish(&node, &request).await.ok())).await?;
    setup.peerpod("web-0", &uid, &vm(false))?;
    setup.records().put_vm(&uid, &vm(false))?;
    let volume = VolumeId::of(DRIVER, &id);
    wait_for("the disk is attached", LIMIT, async || Ok(setup.records().attached(&uid, &volume)?)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_attaches_to_the_vm_and_detaches_when_it_is_gone() -> Result<()> {
    let setup = Setup::new("attach", &["--csi.attach=driver", "--csi.node-id={name}"]).await?;
    let (mut controller, mut node) = (setup.start("controller")?, setup.start("node")?);
    let (id, context) = setup.create(&controller, "disk").await?;
    setup.persistent_volume(&id, &context)?;
    let volume = VolumeId::of(DRIVER, &id);
    let (one, two) = (setup.pod("web-0", Some(CLASS))?, setup.pod("web-1", Some(CLASS))?);
    let (first, second) =
        (setup.request(&id, &context, "web-0", &one), setup.request(&id, &context, "web-1", &two));

    // The attacher's call for the worker attaches nothing, and an unknown volume is refused.
    let mut attach = ControllerPublishVolumeRequest {
        volume_id: id.clone(),
        node_id: "node-of-worker-1".to_owned(),
        volume_context: context.clone(),
        ..Default::default()
    };
    attach.volume_capability = Some(capability()).into();
    let mut client = Client::connect(&controller.socket).await?;
    let _: ControllerPublishVolumeResponse =
        client.unary("Controller/ControllerPublishVolume", &attach).await?;
    attach.node_id = "nobody".to_owned();
    let why =
        client.unary::<Empty>("Controller/ControllerPublishVolume", &attach).await.unwrap_err().to_string();
    ensure!(why.starts_with("5:"), "{why}");

    publish(&node, &first).await?;
    let [object] = &setup.objects()?[..] else { panic!("one object per volume and pod") };
    assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], one.as_str());
    assert_eq!(object["metadata"]["finalizers"], json!(["peerpod.io/detach"]));
    assert_eq!(object["spec"]["volumeID"], id.as_str());
    assert_eq!(object["spec"]["volumeName"], "pv-1");
    assert_eq!(object["spec"]["nodeName"], "worker-1");
    assert_eq!(setup.lease(&volume)?["spec"]["holderIdentity"], one.as_str());
    let records = setup.records().of_pod(&one)?;
    let text = serde_json::to_string(&records)?;
    assert!(text.contains("zone-b") && text.contains("\"attach\":\"driver\""), "{text}");
    assert!(text.contains("\"gid\":3000") && text.contains("OnRootMismatch"), "{text}");
    let why = publish(&node, &second).await.unwrap_err().to_string();
    assert!(why.starts_with("9:") && why.contains(&one), "{why}");

    // The node made the VM. The disk is attached even if both roles of the wrapper are killed and restarted.
    drop(controller);
    setup.peerpod("web-0", &one, &vm(false))?;
    setup.records().put_vm(&one, &vm(false))?;
    drop(node);
    (controller, node) = (setup.start("controller")?, setup.start("node")?);
    let attached =
        wait_for("the disk is attached", LIMIT, async || Ok(setup.records().attached(&one, &volume)?))
            .await?;
    assert_eq!(attached.identity, Identity::Serial(id.clone()));
    assert_eq!(Some(attached.instance), vm(false).instance);
    let asked = calls::of(&setup.folder, "ControllerPublishVolume")?;
    let seen = &asked.last().context("not asked")?["request"];
    assert_eq!(seen["nodeId"], DRIVER, "the VM, by the template");
    assert_eq!(seen["secrets"]["secretKey"], SECRET, "resolved at the replay");
    assert_eq!(seen["volumeCapability"]["mount"]["fsType"], "ext4");
    assert!(seen["volumeContext"].get("peerpod").is_none());
    let object = &setup.objects()?[0];
    assert!(!object.to_string().contains(SECRET), "a secret in the object");
    let conditions = object["status"]["conditions"].as_array().context("no conditions")?;
    assert!(
        conditions.iter().any(|one| one["type"] == "Attached" && one["status"] == "True"),
        "{conditions:?}"
    );
    // A disk that is attached to a VM cannot be deleted.
    let delete = peerpod_proto::csi::DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() };
    let mut client = Client::connect(&controller.socket).await?;
    let why = client.unary::<Empty>("Controller/DeleteVolume", &delete).await.unwrap_err().to_string();
    assert!(why.starts_with("9:"), "{why}");

    // The pod ends; its object stays until its VM is gone.
    unpublish(&node, &first).await?;
    setup.cluster.kubectl(&["delete", "pod", "-n", "shop", "web-0", "--force", "--grace-period=0"])?;
    assert_eq!(setup.objects()?.len(), 1);
    assert!(publish(&node, &second).await.is_err());
    assert!(calls::of(&setup.folder, "ControllerUnpublishVolume")?.is_empty(), "detached under a running VM");
    drop(controller);
    // Pod, PeerPod and PersistentVolume may be gone before the disk is detached.
    setup.cluster.kubectl(&["delete", "peerpod", "-n", "shop", "web-0"])?;
    setup.cluster.kubectl(&["delete", "pv", "pv-1", "--wait=false"])?;
    let finalizers = r#"{"metadata":{"finalizers":null}}"#;
    setup.cluster.kubectl(&["patch", "pv", "pv-1", "--type=merge", "-p", finalizers])?;
    assert!(setup.get(&["pv", "pv-1"])?.is_null());
    setup.records().put_vm(&one, &vm(true))?;
    drop(node);
    let (_controller, node) = (setup.start("controller")?, setup.start("node")?);
    wait_for("the object is gone", LIMIT, async || Ok(setup.objects()?.is_empty().then_some(()))).await?;
    let detached = calls::of(&setup.folder, "ControllerUnpublishVolume")?;
    assert_eq!(detached.last().context("not detached")?["request"]["nodeId"], DRIVER);
    wait_for("the record is gone", LIMIT, async || {
        Ok(setup.records().of_pod(&one)?.is_empty().then_some(()))
    })
    .await?;
    publish(&node, &second).await?;
    assert_eq!(setup.lease(&volume)?["spec"]["holderIdentity"], two.as_str());
    // This pod never had a VM, so the object is removed at once.
    unpublish(&node, &second).await?;
    wait_for("the second object is gone", LIMIT, async || Ok(setup.objects()?.is_empty().then_some(())))
        .await?;
    wait_for("the Lease is gone", LIMIT, async || Ok(setup.lease(&volume)?.is_null().then_some(()))).await?;
    assert_eq!(setup.folder.mounts()?, Vec::<PathBuf>::new());
    Ok(())
}

/// Volumes are published and unpublished while the node role is killed at a different instant of each call. kubelet
/// repeats unanswered calls.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_without_a_pod_leaves_nothing() -> Result<()> {
    const VOLUMES: u64 = 12;
    let setup = Setup::new("leaves", &[]).await?;
    let controller = setup.start("controller")?;
    let uid = setup.pod("web-0", Some(CLASS))?;
    for number in 0..VOLUMES {
        let (id, context) = setup.create(&controller, &format!("disk-{number}")).await?;
        let request = setup.request(&id, &context, "web-0", &uid);
        let lease = || setup.lease(&VolumeId::of(DRIVER, &id));
        for up in [true, false] {
            let killed = setup.start("node")?;
            let (socket, asked) = (killed.socket.clone(), request.clone());
            let call = tokio::spawn(async move {
                // The call may or may not have been answered.
                let Ok(mut client) = Client::connect(&socket).await else { return };
                if up {
                    drop(client.unary::<Empty>("Node/NodePublishVolume", &asked).await);
                } else {
                    drop(client.unary::<Empty>("Node/NodeUnpublishVolume", &unpublishing(&asked)).await);
                }
            });
            tokio::time::sleep(Duration::from_millis(7 * number + 3 * u64::from(up))).await;
            drop(killed);
            call.await?;
            let node = setup.start("node")?;
            if up {
                publish(&node, &request).await?;
                assert_eq!(lease()?["spec"]["holderIdentity"], uid.as_str());
                // The same pod held the Lease all the time.
                let taken = lease()?["spec"]["leaseTransitions"].as_u64().context("never taken")?;
                ensure!((1..=2).contains(&taken), "taken {taken} times by one pod");
            } else {
                unpublish(&node, &request).await?;
                wait_for("nothing is left", LIMIT, async || {
                    let left =
                        !lease()?.is_null() || !setup.objects()?.is_empty() || !setup.files()?.is_empty();
                    Ok((!left).then_some(()))
                })
                .await
                .with_context(|| format!("{:?} {:?} {:?}", lease(), setup.objects(), setup.files()))?;
            }
        }
    }
    let leases = setup.get(&["leases", "-n", "peerpod-system"])?.to_string();
    ensure!(!leases.contains("peerpod-volume-"), "{leases}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_class_opts_its_pods_volumes_in() -> Result<()> {
    let setup = Setup::new("class", &[]).await?;
    let (controller, node) = (setup.start("controller")?, setup.start("node")?);
    let (id, mut context) = setup.create(&controller, "disk").await?;
    // As a StorageClass without the peer pod parameter makes it.
    context.remove("peerpod");
    setup.persistent_volume(&id, &context)?;
    let uid = setup.pod("web-0", Some(CLASS))?;
    let mut attach = ControllerPublishVolumeRequest {
        volume_id: id.clone(),
        node_id: "node-of-worker-1".to_owned(),
        volume_context: context.clone(),
        ..Default::default()
    };
    attach.volume_capability = Some(capability()).into();
    let mut client = Client::connect(&controller.socket).await?;
    let answer: ControllerPublishVolumeResponse =
        client.unary("Controller/ControllerPublishVolume", &attach).await?;
    assert!(answer.publish_context.contains_key("peerpod.io/intercepted"));
    let mut request = setup.request(&id, &context, "web-0", &uid);
    request.publish_context = answer.publish_context;
    publish(&node, &request).await?;
    assert_eq!(setup.records().of_pod(&uid)?.len(), 1);
    // Without the mark of the attach call the worker may have the disk, so the pod must not start.
    request.publish_context.clear();
    let why = publish(&node, &request).await.unwrap_err().to_string();
    assert!(why.starts_with("9:") && why.contains("runtime-classes"), "{why}");
    unpublish(&node, &request).await?;
    // When the provider attaches disks, the node role releases the object itself.
    wait_for("the object is gone", LIMIT, async || Ok(setup.objects()?.is_empty().then_some(()))).await?;
    // A pod without a VM uses the same volume, so neither pod may have it.
    let plain = setup.pod("plain", None)?;
    let why =
        client.unary::<Empty>("Controller/ControllerPublishVolume", &attach).await.unwrap_err().to_string();
    assert!(why.starts_with("9:") && why.contains("keep them apart"), "{why}");
    // Nor does that pod get a volume that is marked for peer pods.
    context.insert("peerpod".to_owned(), "true".to_owned());
    let why = publish(&node, &setup.request(&id, &context, "plain", &plain)).await.unwrap_err().to_string();
    assert!(why.starts_with("9:") && why.contains("pv-1") && why.contains("shop/plain"), "{why}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_without_a_vm_gets_no_volume_of_peer_pods() -> Result<()> {
    let mut setup = Setup::new("novm", &[]).await?;
    let controller = setup.start("controller")?;
    let (id, context) = setup.create(&controller, "disk").await?;
    setup.persistent_volume(&id, &context)?;
    let uid = setup.pod("plain", None)?;
    let refused = async |setup: &Setup, name: &str, uid: &str, what: &str| -> Result<()> {
        let node = setup.start("node")?;
        let why = publish(&node, &setup.request(&id, &context, name, uid)).await.unwrap_err().to_string();
        assert!(why.starts_with("9:") && why.contains("pv-1") && why.contains(what), "{why}");
        assert!(setup.records().of_pod(uid)?.is_empty() && setup.objects()?.is_empty());
        assert!(setup.lease(&VolumeId::of(DRIVER, &id))?.is_null(), "nobody's");
        assert_eq!(setup.folder.mounts()?, Vec::<PathBuf>::new());
        Ok(())
    };
    refused(&setup, "plain", &uid, "pod shop/plain has no RuntimeClass").await?;
    let sandboxed = setup.pod("sandboxed", Some("gvisor"))?;
    refused(&setup, "sandboxed", &sandboxed, "has RuntimeClass gvisor").await?;
    // Only the configured classes count as those of peer pods.
    let other = setup.pod("web-0", Some(CLASS))?;
    setup.flags.push("--csi.runtime-classes=other".to_owned());
    refused(&setup, "web-0", &other, "has RuntimeClass kata-remote").await?;
    setup.flags.pop();
    let node = setup.start("node")?;
    let request = setup.request(&id, &context, "web-0", &other);
    publish(&node, &request).await?;
    unpublish(&node, &request).await?;
    Ok(())
}

/// Neither the object nor the records contain the volume's credentials; the pod's owner gets the secret's name in the
/// error.
#[tokio::test(flavor = "multi_thread")]
async fn a_shares_secret_is_not_in_its_object() -> Result<()> {
    let setup = Setup::of_driver("share", &["--name=smb.csi.k8s.io"], &[]).await?;
    let node = setup.start("node")?;
    let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    let context = HashMap::from([("peerpod", "true"), ("source", "//10.0.0.2/share")].map(owned));
    setup.apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"],
            "claimRef": {"namespace": "shop", "name": "data"},
            "csi": {
                "driver": "smb.csi.k8s.io", "volumeHandle": "share-1", "volumeAttributes": context,
                "nodeStageSecretRef": {"name": "files", "namespace": "shop"},
            },
        },
    }))?;
    let uid = setup.pod("web-0", Some(CLASS))?;
    let mut request = setup.request("share-1", &context, "web-0", &uid);
    let why = publish(&node, &request).await.unwrap_err().to_string();
    ensure!(why.starts_with("3:") && why.contains("secret shop/files"), "{why}");
    request.secrets = HashMap::from([("username", "joe"), ("password", "words, hidden")].map(owned));
    publish(&node, &request).await?;
    let volume = VolumeId::of("smb.csi.k8s.io", "share-1");
    let kept = setup.records().credentials(&uid, &volume)?.context("no credentials")?;
    assert_eq!((kept.username.as_str(), kept.password.as_str()), ("joe", "words, hidden"));
    let shown = serde_json::to_string(&(setup.objects()?, setup.records().of_pod(&uid)?))?;
    ensure!(shown.contains("\"name\":\"files\"") && shown.contains("share-1"), "{shown}");
    ensure!(!shown.contains("hidden") && !shown.contains("joe"), "{shown}");
    unpublish(&node, &request).await?;
    ensure!(setup.records().credentials(&uid, &volume)?.is_none());
    Ok(())
}
