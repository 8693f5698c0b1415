//! Tests PeerpodVolumes that are not true, as someone with the right to write them makes them. The API server has no
//! policy here, which would refuse them (`tests/kube`, `rbac`).

use anyhow::{Context, Result, ensure};
use peerpod_test_csi::calls;
use peerpod_test_kube::wait_for;
use peerpod_volume::VolumeId;
use peerpod_volume::records::Vm;
use serde_json::{Value, json};

use super::{CLASS, DRIVER, LIMIT, Setup, publish, vm};

impl Setup {
    /// Makes an object as only a driver's accounts may where the chart's policy holds.
    fn forged(&self, namespace: &str, name: &str, id: &str, spec: Value) -> Result<()> {
        let mut all = json!({"volumeID": id, "volumeName": "pv-1", "nodeName": "worker-1"});
        all.as_object_mut().context("object")?.extend(spec.as_object().context("spec")?.clone());
        self.apply(&json!({
            "apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerpodVolume",
            "metadata": {"name": name, "namespace": namespace, "finalizers": ["peerpod.io/detach"],
                "labels": {"peerpod.io/csi-driver": DRIVER, "peerpod.io/attach": "driver"}},
            "spec": all,
        }))
    }

    /// Marks an object as a node does when the VM is gone.
    fn released(&self, name: &str) -> Result<()> {
        let status = json!({"status": {"conditions": [{"type": "Released", "status": "True", "reason": "VMGone",
            "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        let words =
            ["patch", "peerpodvolume", "-n", "shop", name, "--subresource=status", "--type=merge", "-p"];
        self.cluster.kubectl(&[&words[..], &[&status.to_string()]].concat()).map(drop)
    }

    /// Waits for the condition and the Event of a refusal; returns the condition.
    async fn refused(&self, namespace: &str, name: &str, reason: &str) -> Result<Value> {
        let condition = wait_for(&format!("{name}: {reason}"), LIMIT, async || {
            let object = self.get(&["peerpodvolume", "-n", namespace, name])?;
            let all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            Ok(all.into_iter().find(|one| one["type"] == "Attached" && one["reason"] == reason))
        })
        .await?;
        let selector = format!("reason={reason},involvedObject.name={name}");
        let events = self.get(&["events", "-n", namespace, "--field-selector", &selector])?;
        ensure!(events["items"].as_array().is_some_and(|all| all.len() == 1), "{events}");
        Ok(condition)
    }
}

/// Objects whose spec is not true: no call of the driver, a condition and an Event. Volumes of several nodes and of
/// several pods of one node are attached.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_elses_disk_is_attached_or_detached() -> Result<()> {
    let setup = Setup::new("others", &["--csi.attach=driver", "--csi.node-id={name}"]).await?;
    let (controller, node) = (setup.start("controller")?, setup.start("node")?);
    let (id, context) = setup.create(&controller, "disk").await?;
    setup.persistent_volume(&id, &context)?;
    let (shared, context_of_shared) = setup.create(&controller, "shared").await?;
    setup.apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-2"},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"],
            "claimRef": {"namespace": "shop", "name": "data"},
            "csi": {"driver": DRIVER, "volumeHandle": shared, "volumeAttributes": context_of_shared},
        },
    }))?;
    let (one, two) = (setup.pod("web-0", Some(CLASS))?, setup.pod("web-1", Some(CLASS))?);
    let another = Vm { instance: Some(format!("projects/q/vms/{DRIVER}")), ..vm(false) };
    publish(&node, &setup.request(&id, &context, "web-0", &one)).await?;
    for (name, uid, vm) in [("web-0", &one, vm(false)), ("web-1", &two, another.clone())] {
        let mut request = setup.request(&shared, &context_of_shared, name, uid);
        request.target_path = request.target_path.replace("pv-1", "pv-2");
        request.volume_capability.mut_or_insert_default().access_mode.mut_or_insert_default().mode = 5;
        publish(&node, &request).await?;
        setup.peerpod(name, uid, &vm)?;
        setup.records().put_vm(uid, &vm)?;
    }
    let (volume, of_both) = (VolumeId::of(DRIVER, &id), VolumeId::of(DRIVER, &shared));
    for (uid, volume) in [(&one, &volume), (&one, &of_both), (&two, &of_both)] {
        wait_for("the disk is attached", LIMIT, async || Ok(setup.records().attached(uid, volume)?)).await?;
    }
    ensure!(setup.lease(&of_both)?.is_null(), "a Lease of a volume with several pods");
    let called = || {
        let all = calls::of(&setup.folder, "")?.into_iter();
        let ours = |call: &Value| call["method"].as_str().is_some_and(|name| name.ends_with("publishVolume"));
        Ok::<_, anyhow::Error>(all.filter(ours).collect::<Vec<_>>())
    };
    let before = called()?;

    // A pod with the same claim and its own VM, which waits for the disk.
    let taken = json!({"podUid": two, "vmID": another.instance, "nodeID": "of-the-other"});
    setup.forged("shop", "taken", &id, taken.clone())?;
    let condition = setup.refused("shop", "taken", "NotTheOwner").await?;
    ensure!(condition.to_string().contains(&one), "{condition}");
    setup.forged("shop", "gone", &id, taken)?;
    setup.released("gone")?;
    setup.cluster.kubectl(&["delete", "peerpodvolume", "-n", "shop", "gone", "--wait=false"])?;
    setup.refused("shop", "gone", "NotTheOwner").await?;
    // A namespace without the claim, and a pod that is not on the node.
    for (namespace, name, node) in
        [("peerpod-system", "strange", "worker-1"), ("shop", "elsewhere", "worker-2")]
    {
        let spec = json!({"podUid": one, "vmID": vm(false).instance, "nodeName": node});
        setup.forged(namespace, name, &id, spec)?;
        setup.refused(namespace, name, "NotTheClaim").await?;
    }
    // Another node ends nothing of the volume's owner.
    setup.forged("shop", "lease", &id, json!({"podUid": one, "nodeName": "worker-2"}))?;
    setup.released("lease")?;
    wait_for("the object is gone", LIMIT, async || {
        Ok(setup.get(&["peerpodvolume", "-n", "shop", "lease"])?.is_null().then_some(()))
    })
    .await?;
    ensure!(setup.lease(&volume)?["spec"]["holderIdentity"] == one.as_str(), "{}", setup.lease(&volume)?);
    // A VM that is not the pod's: the disk stays attached to the pod's VM.
    let objects = setup.objects()?;
    let own =
        objects.iter().find(|one| one["spec"]["volumeName"] == "pv-1" && !one["spec"]["podName"].is_null());
    let own = own.and_then(|own| own["metadata"]["name"].as_str()).context("no object")?;
    let patch = json!({"spec": {"vmID": "projects/p/vms/of-another"}}).to_string();
    setup.cluster.kubectl(&["patch", "peerpodvolume", "-n", "shop", own, "--type=merge", "-p", &patch])?;
    let condition = setup.refused("shop", own, "VMNotOurs").await?;
    ensure!(condition["status"] == "True", "{condition}");
    assert_eq!(called()?, before);
    Ok(())
}
