//! Tests volumes for peer pods: they are recorded, not published, and unpublished in any order, twice, after a kill.

#![cfg(test)]

use std::collections::HashMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use peerpod_proto::csi::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, CreateVolumeRequest,
    CreateVolumeResponse, Empty, NodeExpandVolumeRequest, NodeExpandVolumeResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use peerpod_proto::volumes::{ExpandRequest, ExpandResponse, StatsRequest, StatsResponse};
use peerpod_proto::volumes_ttrpc::{Volumes, create_volumes};
use peerpod_test_csi::grpc::Client;
use peerpod_test_csi::{Driver, Folder, Wrapper, calls, eventually, long, report, sanity};
use peerpod_volume::records::{MARKER, Records, Vm};
use peerpod_volume::{Mode, Source, VolumeId};

const DRIVER: &str = "mock.csi.test";

/// Plays peerpod-node's service of the guest's volumes: every volume has a gibibyte.
struct Guest;

#[async_trait]
impl Volumes for Guest {
    async fn stats(
        &self,
        _: &ttrpc::r#async::TtrpcContext,
        asked: StatsRequest,
    ) -> ttrpc::Result<StatsResponse> {
        if asked.volume_id.parse::<VolumeId>().is_err() || asked.pod_uid.is_empty() {
            return Err(ttrpc::Error::RpcStatus(ttrpc::get_status(ttrpc::Code::INVALID_ARGUMENT, "who?")));
        }
        Ok(StatsResponse {
            total_bytes: 1 << 30,
            available_bytes: 1 << 29,
            used_bytes: 1 << 29,
            total_inodes: 100,
            free_inodes: 60,
            used_inodes: 40,
            ..StatsResponse::default()
        })
    }

    async fn expand(
        &self,
        _: &ttrpc::r#async::TtrpcContext,
        asked: ExpandRequest,
    ) -> ttrpc::Result<ExpandResponse> {
        Ok(ExpandResponse { capacity_bytes: asked.capacity_bytes + 512, ..ExpandResponse::default() })
    }
}

/// Driver, both roles and the guest's service, in one folder.
struct Setup {
    folder: Folder,
    _driver: Driver,
    controller: Option<Wrapper>,
    node: Option<Wrapper>,
    _guest: ttrpc::asynchronous::Server,
}

impl Setup {
    async fn new(name: &str, driver_flags: &[&str]) -> Result<Setup> {
        let folder = Folder::new(name)?;
        let mut flags = vec!["--name=mock.csi.test"];
        flags.extend(driver_flags);
        let driver = Driver::start(&folder, &flags)?;
        std::fs::create_dir(folder.path("run"))?;
        let address = format!("unix://{}", folder.path("run/volumes.sock").display());
        let mut guest = ttrpc::asynchronous::Server::new()
            .bind(&address)?
            .register_service(create_volumes(Arc::new(Guest)));
        guest.start().await?;
        let controller = Some(Wrapper::start("controller", &folder, &[])?);
        let node = Some(Wrapper::start("node", &folder, &[])?);
        Ok(Setup { folder, _driver: driver, controller, node, _guest: guest })
    }

    async fn node(&self) -> Result<Client> {
        Client::connect(&self.folder.socket("node")).await
    }

    async fn controller(&self) -> Result<Client> {
        Client::connect(&self.folder.socket("controller")).await
    }

    fn records(&self) -> Records {
        Records::new(self.folder.path("state/volumes"))
    }

    /// Returns all records, mounts and loop devices of volumes that are left on the node.
    fn left(&self) -> Result<Vec<PathBuf>> {
        let mut left = self.folder.mounts()?;
        left.extend(self.folder.loops()?);
        let root = self.folder.path("state/volumes");
        for folder in ["pods", "names", "targets", "staged", "devices", "owners"] {
            let found = std::fs::read_dir(root.join(folder)).into_iter().flatten();
            left.extend(found.filter_map(|entry| Some(entry.ok()?.path())));
        }
        Ok(left)
    }

    async fn create(&self, name: &str, parameter: Option<&str>) -> Result<(String, HashMap<String, String>)> {
        let mut request = CreateVolumeRequest { name: name.to_owned(), ..Default::default() };
        request.parameters.extend(parameter.map(|value| ("peerpod".to_owned(), value.to_owned())));
        // Field 3, volume_capabilities, which csi.proto lacks and carries as an unknown field.
        let capability = protobuf::Message::write_to_bytes(&capability(false, 1))?;
        request.special_fields.mut_unknown_fields().add_length_delimited(3, capability);
        let mut client = self.controller().await?;
        let answer: CreateVolumeResponse = client.unary("Controller/CreateVolume", &request).await?;
        let volume = answer.volume.into_option().context("no volume")?;
        Ok((volume.volume_id, volume.volume_context))
    }
}

fn capability(block: bool, access_mode: i32) -> VolumeCapability {
    let mut capability = VolumeCapability::new();
    capability.access_mode.mut_or_insert_default().mode = access_mode;
    if block {
        capability.set_block(Default::default());
    } else {
        let mount = capability.mut_mount();
        mount.fs_type = "xfs".to_owned();
        mount.mount_flags = vec!["noatime".to_owned()];
        mount.volume_mount_group = "2000".to_owned();
    }
    capability
}

/// Returns kubelet's request for a pod, with paths below this folder.
fn publish(
    root: &Path,
    id: &str,
    context: &HashMap<String, String>,
    pod: &str,
    block: bool,
) -> NodePublishVolumeRequest {
    let target = if block {
        root.join(format!("kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv-{id}/{pod}"))
    } else {
        root.join(format!("kubelet/pods/{pod}/volumes/kubernetes.io~csi/pv-{id}/mount"))
    };
    let mut request = NodePublishVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: root.join("staging").display().to_string(),
        target_path: target.display().to_string(),
        volume_context: context.clone(),
        ..Default::default()
    };
    request.volume_capability = Some(capability(block, 1)).into();
    for (key, value) in [("uid", pod), ("name", "web-0"), ("namespace", "shop")] {
        request.volume_context.insert(format!("csi.storage.k8s.io/pod.{key}"), value.to_owned());
    }
    request
}

/// Returns the attacher's request.
fn attachment(id: &str, context: &HashMap<String, String>) -> ControllerPublishVolumeRequest {
    let mut attach = ControllerPublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: DRIVER.to_owned(),
        volume_context: context.clone(),
        ..Default::default()
    };
    attach.volume_capability = Some(capability(false, 1)).into();
    attach
}

async fn unpublish(client: &mut Client, request: &NodePublishVolumeRequest) -> Result<Empty> {
    let request = NodeUnpublishVolumeRequest {
        volume_id: request.volume_id.clone(),
        target_path: request.target_path.clone(),
        ..Default::default()
    };
    client.unary("Node/NodeUnpublishVolume", &request).await
}

/// Runs kubelet's own code for a raw volume that is published at this target.
fn kubelet(what: &str, target: &Path) -> Result<()> {
    let mapped = mapped(target);
    let (global, uid) = (mapped.parent().context("no folder")?, mapped.file_name().context("no name")?);
    let folder = target.ancestors().nth(8).context("no folder")?.join("devices");
    let mut command = std::process::Command::new(peerpod_test_csi::process::tool("csi-driver")?);
    command.args(["kubelet", what]);
    if what == "map" {
        command.arg(target);
    }
    let output = command.arg(global).arg(uid).arg(folder).arg("pv").output()?;
    ensure!(output.status.success(), "kubelet {what}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Returns kubelet's mapping path of a raw volume that is published at this target.
fn mapped(target: &Path) -> PathBuf {
    let parts: Vec<_> = target.iter().rev().take(2).collect();
    let devices = target.ancestors().nth(3).unwrap();
    devices.join(parts[1]).join("dev").join(parts[0])
}

const PUBLISH: &str = "Node/NodePublishVolume";
const ATTACH: &str = "Controller/ControllerPublishVolume";

#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_passes_for_volumes_of_peer_pods() -> Result<()> {
    let setup = Setup::new("intercept", &["--attach-limit=3", "--topology"]).await?;
    let parameters = setup.folder.path("parameters.yaml");
    std::fs::write(&parameters, "peerpod: \"true\"\n")?;
    let flags = [format!("--csi.testvolumeparameters={}", parameters.display())];
    let (node, controller) = (setup.folder.socket("node"), setup.folder.socket("controller"));
    let cases = {
        let folder = &setup.folder;
        tokio::task::block_in_place(|| sanity::run(folder, "peerpod", &node, Some(&controller), &flags))?
    };
    println!(
        "{} passed, {} failed, {} skipped",
        cases.count("passed"),
        cases.count("failed"),
        cases.count("skipped")
    );
    report("csi_sanity_peerpod_passed", cases.count("passed") as f64);
    report("csi_sanity_peerpod_failed", cases.count("failed") as f64);
    assert_eq!(cases.which("failed"), Vec::<&str>::new());
    assert!(cases.count("passed") > 60);
    assert_eq!(setup.left()?, Vec::<PathBuf>::new());
    for call in calls::of(&setup.folder, "")? {
        assert!(!call.to_string().contains("\"peerpod\""), "our parameter reached the driver: {call}");
    }
    Ok(())
}

#[tokio::test]
async fn a_peer_pods_volume_is_recorded_and_the_driver_is_not_asked() -> Result<()> {
    let setup = Setup::new("record", &[]).await?;
    let (id, context) = setup.create("one", Some("true")).await?;
    assert_eq!(context.get("peerpod").map(String::as_str), Some("true"));
    let mut controller = setup.controller().await?;
    let mut attach = attachment(&id, &context);
    let answer: ControllerPublishVolumeResponse = controller.unary(ATTACH, &attach).await?;
    assert_eq!(answer.publish_context.keys().collect::<Vec<_>>(), ["peerpod.io/intercepted"]);
    attach.node_id = "no-such-node".to_owned();
    let refused = controller.unary::<Empty>(ATTACH, &attach).await.unwrap_err();
    assert!(refused.to_string().starts_with("5:"), "{refused}");

    let mut client = setup.node().await?;
    for block in [false, true] {
        let request = publish(setup.folder.root(), &id, &context, "uid-1", block);
        let target = PathBuf::from(&request.target_path);
        for _ in 0..2 {
            let _: Empty = client.unary(PUBLISH, &request).await?;
        }
        let records = setup.records().of_pod("uid-1")?;
        let [record] = records.as_slice() else { panic!("{records:?}") };
        assert_eq!((record.driver.as_str(), record.handle.as_str()), (DRIVER, id.as_str()));
        assert_eq!(record.volume.id, VolumeId::of(DRIVER, &id));
        assert_eq!(record.volume.name, format!("pv-{id}"));
        assert_eq!((record.pod.namespace.as_str(), record.pod.name.as_str()), ("shop", "web-0"));
        assert!(matches!(&record.volume.source, Source::AttachedBlock { volume, .. } if *volume == id));
        assert_eq!(record.target_path, target);
        assert!(record.fence.is_some(), "it has one pod at a time");
        assert_eq!(setup.records().uids("shop", "web-0")?, ["uid-1"]);
        if block {
            assert_eq!(record.volume.mode, Mode::Block);
            let placeholder = std::fs::symlink_metadata(target.join(record.volume.id.as_str()))?;
            assert!(placeholder.file_type().is_char_device(), "{placeholder:?}");
            assert_eq!(std::fs::read_dir(&target)?.count(), 2, "nothing but the marker and the placeholder");
            let mapped = mapped(&target);
            let kind = std::fs::symlink_metadata(&mapped)?;
            assert!(kind.file_type().is_block_device(), "{kind:?}");
            assert_eq!((placeholder.mode() & 0o777, placeholder.gid()), (kind.mode() & 0o777, kind.gid()));
            let there = std::fs::read(&mapped)?;
            assert!(there.starts_with(record.marker.as_bytes()) && there.len() == 4096);
            assert_eq!(setup.folder.mounts()?, [target.clone(), mapped]);
            assert_eq!(setup.folder.loops()?.len(), 1, "published twice, attached once");
            // kubelet maps it, and maps it again after a restart; the container runtime finds the folder with the
            // placeholder.
            for _ in 0..2 {
                kubelet("map", &target)?;
                let _: Empty = client.unary(PUBLISH, &request).await?;
            }
            assert_eq!(std::fs::read_link(setup.folder.path("devices/pv"))?, target);
            assert_eq!(setup.folder.loops()?.len(), 2, "kubelet's loop device backs our device");
            kubelet("unmap", &target)?;
            assert_eq!(setup.folder.mounts()?, std::slice::from_ref(&target));
            assert_eq!(setup.folder.loops()?.len(), 1);
        } else {
            let Mode::Filesystem { fs_type, mount_options, fs_group } = &record.volume.mode else { panic!() };
            assert_eq!(
                (fs_type.as_deref(), mount_options.as_slice()),
                (Some("xfs"), &["noatime".to_owned()][..])
            );
            assert_eq!(fs_group.map(|group| group.gid), Some(2000));
            assert_eq!(std::fs::read_to_string(target.join(MARKER))?, record.marker);
            assert_eq!(std::fs::read_dir(&target)?.count(), 1, "nothing but the marker");
            assert_eq!(setup.folder.mounts()?, std::slice::from_ref(&target));
        }
        assert_eq!(record.marker.len(), 64);
        let mut asked = NodeGetVolumeStatsRequest { volume_id: id.clone(), ..Default::default() };
        asked.volume_path.clone_from(&request.target_path);
        let stats: NodeGetVolumeStatsResponse = client.unary("Node/NodeGetVolumeStats", &asked).await?;
        assert_eq!((stats.usage[0].total, stats.usage[0].unit, stats.usage[1].available), (1 << 30, 1, 60));
        let mut grow = NodeExpandVolumeRequest { volume_id: id.clone(), ..Default::default() };
        grow.volume_path.clone_from(&request.target_path);
        grow.capacity_range.mut_or_insert_default().required_bytes = 1 << 20;
        let grown: NodeExpandVolumeResponse = client.unary("Node/NodeExpandVolume", &grow).await?;
        assert_eq!(grown.capacity_bytes, 1 << 20, "no VM yet: it grows when it is mounted");
        for _ in 0..2 {
            unpublish(&mut client, &request).await?;
        }
        assert!(!target.exists());
        assert_eq!(setup.left()?, Vec::<PathBuf>::new());
    }
    assert!(calls::of(&setup.folder, "NodePublishVolume")?.is_empty());
    assert!(calls::of(&setup.folder, "ControllerPublishVolume")?.is_empty());
    Ok(())
}

/// Returns the files below this folder that contain these words, logs included; all of them must be private.
fn holding(folder: &Path, words: &str) -> Result<Vec<String>> {
    let (mut left, mut found) = (vec![folder.to_owned()], Vec::new());
    while let Some(path) = left.pop() {
        let Ok(there) = std::fs::symlink_metadata(&path) else { continue };
        if there.is_dir() {
            left.extend(std::fs::read_dir(&path)?.filter_map(|entry| Some(entry.ok()?.path())));
        } else if there.is_file() && String::from_utf8_lossy(&std::fs::read(&path)?).contains(words) {
            ensure!(there.mode() & 0o7777 == 0o600, "{}: {:o}", path.display(), there.mode());
            found.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
    }
    Ok(found)
}

#[tokio::test]
async fn a_shares_secret_is_kept_for_the_pod_and_goes_with_it() -> Result<()> {
    const SMB: &str = "smb.csi.k8s.io";
    let mut setup = Setup::new("secret", &["--name=smb.csi.k8s.io"]).await?;
    let root = setup.folder.root().to_owned();
    let volume = VolumeId::of(SMB, "share-1");
    let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    let context = HashMap::from([("peerpod", "true"), ("source", "//10.0.0.2/share")].map(owned));
    let secrets = |password: &str| {
        HashMap::from([("username", "joe"), ("password", password), ("token", "unused words")].map(owned))
    };
    let mut request = publish(&root, "share-1", &context, "uid-1", false);
    let mut stage = NodeStageVolumeRequest {
        volume_id: "share-1".to_owned(),
        staging_target_path: request.staging_target_path.clone(),
        volume_context: context.clone(),
        ..Default::default()
    };
    stage.volume_capability = Some(capability(false, 1)).into();
    let mut client = setup.node().await?;

    // Secrets that no guest could use are refused; the error names the key.
    let bad = secrets("first,\nwords");
    (request.secrets, stage.secrets) = (bad.clone(), bad);
    let refused = [
        client.unary::<Empty>(PUBLISH, &request).await.unwrap_err().to_string(),
        client.unary::<Empty>("Node/NodeStageVolume", &stage).await.unwrap_err().to_string(),
    ];
    for why in refused {
        assert!(why.starts_with("3:") && why.contains("\"password\"") && !why.contains("words"), "{why}");
    }
    request.secrets = HashMap::from([("username".to_owned(), "joe".to_owned())]);
    let why = client.unary::<Empty>(PUBLISH, &request).await.unwrap_err().to_string();
    assert!(why.starts_with("3:") && why.contains("\"password\""), "{why}");
    assert_eq!(holding(&root, "words")?, Vec::<String>::new());
    assert_eq!(setup.left()?, Vec::<PathBuf>::new());

    // Staged with the secret; published by a restarted role, without a secret in the call.
    stage.secrets = secrets("first, words");
    let _: Empty = client.unary("Node/NodeStageVolume", &stage).await?;
    drop(client);
    setup.node = None;
    setup.node = Some(Wrapper::start("node", &setup.folder, &[])?);
    let mut client = setup.node().await?;
    request.secrets.clear();
    let _: Empty = client.unary(PUBLISH, &request).await?;
    let kept = || setup.records().credentials("uid-1", &volume)?.context("no credentials");
    assert_eq!((kept()?.username.as_str(), kept()?.password.as_str()), ("joe", "first, words"));
    // A secret in the publish call replaces the staged one.
    request.secrets = secrets("second, words");
    let _: Empty = client.unary(PUBLISH, &request).await?;
    assert_eq!(kept()?.password.as_str(), "second, words");
    assert_eq!(holding(&root, "second, words")?, [format!("{volume}.secret.json")]);
    let staged = holding(&root, "first, words")?;
    assert!(staged.len() == 1 && staged[0].ends_with(".secret.json"), "{staged:?}");
    assert_eq!(holding(&root, "unused words")?, Vec::<String>::new());

    unpublish(&mut client, &request).await?;
    assert_eq!(holding(&root, "second, words")?, Vec::<String>::new());
    let unstage = NodeUnstageVolumeRequest {
        volume_id: stage.volume_id.clone(),
        staging_target_path: stage.staging_target_path.clone(),
        ..Default::default()
    };
    let _: Empty = client.unary("Node/NodeUnstageVolume", &unstage).await?;
    assert_eq!(holding(&root, "words")?, Vec::<String>::new());
    assert_eq!(setup.left()?, Vec::<PathBuf>::new());
    Ok(())
}

#[tokio::test]
async fn only_true_opts_in_and_other_calls_pass_unchanged() -> Result<()> {
    let setup = Setup::new("optin", &["--disable-attach"]).await?;
    for bad in ["", "True", "yes"] {
        let refused = setup.create("bad", Some(bad)).await.unwrap_err().to_string();
        assert!(refused.starts_with("3:") && refused.contains("peerpod"), "{refused}");
    }
    let mut client = setup.node().await?;
    for (name, parameter) in [("no", Some("false")), ("nil", Some("0")), ("nothing", None)] {
        let (id, context) = setup.create(name, parameter).await?;
        assert!(!context.contains_key("peerpod"));
        std::fs::create_dir_all(
            setup.folder.path(&format!("kubelet/pods/uid-1/volumes/kubernetes.io~csi/pv-{id}")),
        )?;
        let mut request = publish(setup.folder.root(), &id, &context, "uid-1", false);
        request.volume_context.insert("other".to_owned(), "kept".to_owned());
        if parameter.is_some() {
            request.volume_context.insert("peerpod".to_owned(), "false".to_owned());
        }
        let _: Empty = client.unary(PUBLISH, &request).await?;
        let calls = calls::of(&setup.folder, "NodePublishVolume")?;
        let seen = &calls.last().context("not asked")?["request"];
        assert_eq!(seen["volumeId"], id.as_str());
        assert_eq!(seen["volumeContext"]["other"], "kept");
        assert!(seen["volumeContext"].get("peerpod").is_none());
        assert_eq!(seen["volumeCapability"]["mount"]["volumeMountGroup"], "2000");
        unpublish(&mut client, &request).await?;
    }
    assert_eq!(setup.left()?, Vec::<PathBuf>::new());
    Ok(())
}

#[tokio::test]
async fn a_disk_belongs_to_one_pod_until_its_vm_is_gone() -> Result<()> {
    let mut setup = Setup::new("owner", &[]).await?;
    let (id, context) = setup.create("one", Some("1")).await?;
    let mut client = setup.node().await?;
    let (first, second) = (
        publish(setup.folder.root(), &id, &context, "uid-1", false),
        publish(setup.folder.root(), &id, &context, "uid-2", false),
    );
    let _: Empty = client.unary(PUBLISH, &first).await?;
    let refused = |answer: Result<Empty>| {
        let why = answer.unwrap_err().to_string();
        assert!(why.starts_with("9:") && why.contains("uid-1"), "{why}");
    };
    refused(client.unary(PUBLISH, &second).await);
    assert!(setup.records().of_pod("uid-2")?.is_empty() && !Path::new(&second.target_path).exists());
    let noted = |instance: Option<&str>, gone| Vm {
        version: 1,
        sandbox: "s".into(),
        instance: instance.map(str::to_owned),
        gone,
    };
    let vm = |gone| noted(Some("i-1"), gone);
    // The VM is requested and does not exist yet: it may appear after the pod ends.
    setup.records().put_vm("uid-1", &noted(None, false))?;
    // The pod has ended, its VM has not.
    unpublish(&mut client, &first).await?;
    assert!(!Path::new(&first.target_path).exists());
    refused(client.unary(PUBLISH, &second).await);
    setup.records().put_vm("uid-1", &vm(false))?;
    // A restart does not forget it either.
    drop(setup.node.take());
    setup.node = Some(Wrapper::start("node", &setup.folder, &[])?);
    let mut client = setup.node().await?;
    refused(client.unary(PUBLISH, &second).await);
    setup.records().put_vm("uid-1", &vm(true))?;
    eventually("the first pod's record is gone", || {
        setup.records().of_pod("uid-1").is_ok_and(|records| records.is_empty())
    })?;
    let _: Empty = client.unary(PUBLISH, &second).await?;
    unpublish(&mut client, &second).await?;
    assert_eq!(setup.left()?, Vec::<PathBuf>::new());
    Ok(())
}

#[tokio::test]
async fn content_of_a_target_is_never_removed() -> Result<()> {
    let setup = Setup::new("careful", &[]).await?;
    let (id, context) = setup.create("one", Some("true")).await?;
    let mut client = setup.node().await?;
    let request = publish(setup.folder.root(), &id, &context, "uid-1", false);
    let target = PathBuf::from(&request.target_path);
    std::fs::create_dir_all(&target)?;
    std::fs::write(target.join("precious"), "data")?;
    let _: Empty = client.unary(PUBLISH, &request).await?;
    assert!(!target.join("precious").exists(), "hidden below the tmpfs");
    let why = unpublish(&mut client, &request).await.unwrap_err().to_string();
    assert!(why.contains("not empty") || why.contains("ENOTEMPTY"), "{why}");
    assert_eq!(std::fs::read_to_string(target.join("precious"))?, "data");
    std::fs::remove_file(target.join("precious"))?;
    unpublish(&mut client, &request).await?;
    assert_eq!(setup.left()?, Vec::<PathBuf>::new());
    // peerpod-node cannot find pods of a driver without pod info.
    let mut nameless = publish(setup.folder.root(), &id, &context, "uid-1", false);
    nameless.volume_context.retain(|key, _| !key.starts_with("csi.storage"));
    let why = client.unary::<Empty>(PUBLISH, &nameless).await.unwrap_err().to_string();
    assert!(why.starts_with("9:") && why.contains("podInfoOnMount"), "{why}");
    Ok(())
}

#[tokio::test]
async fn a_pod_that_comes_back_while_its_vm_goes_has_its_volume_again() -> Result<()> {
    let setup = Setup::new("again", &[]).await?;
    let (id, context) = setup.create("one", Some("true")).await?;
    let mut client = setup.node().await?;
    let request = publish(setup.folder.root(), &id, &context, "uid-1", true);
    let _: Empty = client.unary(PUBLISH, &request).await?;
    let before = setup.records().of_pod("uid-1")?;
    let vm = |gone| Vm { version: 1, sandbox: "s".into(), instance: Some("i-1".into()), gone };
    setup.records().put_vm("uid-1", &vm(false))?;
    unpublish(&mut client, &request).await?;
    assert!(!Path::new(&request.target_path).exists() && setup.folder.loops()?.is_empty());
    let _: Empty = client.unary(PUBLISH, &request).await?;
    let after = setup.records().of_pod("uid-1")?;
    assert_eq!(after, before, "the same marker and token");
    assert!(std::fs::read(mapped(request.target_path.as_ref()))?.starts_with(after[0].marker.as_bytes()));
    setup.records().put_vm("uid-1", &vm(true))?;
    // The pod is back, so the end of its old VM removes nothing.
    for _ in 0..2 {
        unpublish(&mut client, &request).await?;
    }
    assert_eq!(setup.left()?, Vec::<PathBuf>::new());
    Ok(())
}

#[tokio::test]
async fn an_unreadable_publication_is_refused_and_blocks_no_other() -> Result<()> {
    let mut setup = Setup::new("bounds", &[]).await?;
    let mut client = setup.node().await?;
    let (large, large_context) = setup.create("large", Some("true")).await?;
    let mut request = publish(setup.folder.root(), &large, &large_context, "uid-1", false);
    request.volume_capability.mut_or_insert_default().mut_mount().mount_flags = vec!["x".repeat(70 << 10)];
    let why = client.unary::<Empty>(PUBLISH, &request).await.unwrap_err().to_string();
    assert!(why.starts_with("3:") && why.contains("65536") && why.contains("mount options"), "{why}");
    assert_eq!(setup.left()?, Vec::<PathBuf>::new());

    let (id, context) = setup.create("one", Some("true")).await?;
    let request = publish(setup.folder.root(), &id, &context, "uid-1", false);
    let _: Empty = client.unary(PUBLISH, &request).await?;
    let vm = |gone| Vm { version: 1, sandbox: "s".into(), instance: None, gone };
    setup.records().put_vm("uid-1", &vm(false))?;
    unpublish(&mut client, &request).await?;
    drop(setup.node.take());
    let bad = setup.folder.path(&format!("state/volumes/targets/{}", VolumeId::of(DRIVER, "bad")));
    std::fs::create_dir(&bad)?;
    std::fs::write(bad.join("x.json"), "{")?;
    setup.node = Some(Wrapper::start("node", &setup.folder, &[])?);
    setup.records().put_vm("uid-1", &vm(true))?;
    eventually("the good one is given back", || setup.left().is_ok_and(|left| left == [bad.clone()]))?;
    std::fs::remove_dir_all(bad)?;
    Ok(())
}

/// Both roles are killed at random instants; kubelet repeats unanswered calls. In the end the state is exact.
#[tokio::test(flavor = "multi_thread")]
async fn random_kills_lose_and_leave_nothing() -> Result<()> {
    let rounds = if long() { 200 } else { 20 };
    let mut setup = Setup::new("killed", &[]).await?;
    let mut volumes = Vec::new();
    for number in 0..3 {
        volumes.push(setup.create(&format!("v{number}"), Some("true")).await?);
    }
    let attachments: Vec<_> = volumes.iter().map(|(id, context)| attachment(id, context)).collect();
    let mut kills = 0;
    for round in 0..rounds {
        let requests: Vec<NodePublishVolumeRequest> = volumes
            .iter()
            .enumerate()
            .map(|(number, (id, context))| {
                publish(setup.folder.root(), id, context, &format!("uid-{round}"), number == 2)
            })
            .collect();
        for up in [true, false] {
            // A multiple of prime numbers of microseconds, more each round, so that kills reach every instant of the
            // work.
            let delay = std::time::Duration::from_micros(211 * (round % 40) + 97 * u64::from(up));
            let sockets = [setup.folder.socket("controller"), setup.folder.socket("node")];
            let (work, asked) = (requests.clone(), attachments.clone());
            // The calls may or may not have been answered.
            let attaching = tokio::spawn({
                let socket = sockets[0].clone();
                async move {
                    let Ok(mut client) = Client::connect(&socket).await else { return };
                    for attach in &asked {
                        drop(client.unary::<Empty>(ATTACH, attach).await);
                    }
                }
            });
            let publishing = tokio::spawn({
                let socket = sockets[1].clone();
                async move {
                    let Ok(mut client) = Client::connect(&socket).await else { return };
                    for request in &work {
                        if up {
                            drop(client.unary::<Empty>(PUBLISH, request).await);
                        } else {
                            drop(unpublish(&mut client, request).await);
                        }
                    }
                }
            });
            tokio::time::sleep(delay).await;
            drop(setup.controller.take());
            drop(setup.node.take());
            kills += 2;
            attaching.await?;
            publishing.await?;
            setup.controller = Some(Wrapper::start("controller", &setup.folder, &[])?);
            setup.node = Some(Wrapper::start("node", &setup.folder, &[])?);
            let mut client = setup.controller().await?;
            for attach in &attachments {
                let answer: ControllerPublishVolumeResponse = client.unary(ATTACH, attach).await?;
                ensure!(answer.publish_context.contains_key("peerpod.io/intercepted"), "round {round}");
            }
            let mut client = setup.node().await?;
            for request in &requests {
                let answer = if up {
                    client.unary(PUBLISH, request).await
                } else {
                    unpublish(&mut client, request).await
                };
                let _: Empty = answer.with_context(|| format!("round {round}, up {up}"))?;
            }
            if up {
                let records = setup.records().of_pod(&format!("uid-{round}"))?;
                ensure!(records.len() == 3, "round {round}: {records:?}");
                for record in &records {
                    let mut files = vec![record.target_path.join(MARKER)];
                    files.extend((record.volume.mode == Mode::Block).then(|| mapped(&record.target_path)));
                    for file in files {
                        ensure!(std::fs::read(file)?.starts_with(record.marker.as_bytes()), "round {round}");
                    }
                }
                ensure!(setup.folder.mounts()?.len() == 4, "round {round}: {:?}", setup.folder.mounts()?);
                ensure!(setup.folder.loops()?.len() == 1, "round {round}: {:?}", setup.folder.loops()?);
            } else {
                // The target is gone at the answer; its records go a moment later, when no VM has the volume.
                eventually("nothing is left", || setup.left().is_ok_and(|left| left.is_empty()))
                    .with_context(|| format!("round {round}: {:?}", setup.left()))?;
            }
        }
    }
    ensure!(calls::of(&setup.folder, "ControllerPublishVolume")?.is_empty(), "attached to the worker");
    println!("{kills} kills, {} publications exact after each", rounds * 3);
    Ok(())
}
