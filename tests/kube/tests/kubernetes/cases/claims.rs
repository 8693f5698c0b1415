//! Volumes of a CSI driver, whose disks are attached to the pod's VM.

use anyhow::ensure;
use serde_json::json;

use super::{Case, SLEEP};
use crate::storage::DRIVER;

/// Makes a claim of a size in MiB.
pub(crate) fn claim(case: &Case<'_>, class: &str, mode: &str, size: u32) -> anyhow::Result<()> {
    case.apply(&format!(
        "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: data}}, \
          spec: {{accessModes: [ReadWriteOnce], storageClassName: {class}, volumeMode: {mode}, \
          resources: {{requests: {{storage: {size}Mi}}}}}}}}"
    ))
}

/// Makes a pod that has the claim's file system at `/d` and runs a shell script, and waits until it is ready.
fn user(case: &Case<'_>, pod: &str, script: &str) -> anyhow::Result<()> {
    let command = json!(["sh", "-c", script]);
    case.pod(
        pod,
        &format!(
            "securityContext: {{fsGroup: 2000}}, volumes: [{{name: d, persistentVolumeClaim: {{claimName: data}}}}],
             containers: [{{name: c, image: IMAGE, command: {command}, volumeMounts: [{{name: d, mountPath: /d}}]}}]"
        ),
    )?;
    case.ready(pod)
}

fn end(case: &Case<'_>, pod: &str) -> anyhow::Result<()> {
    case.kubectl(&["delete", "pod", pod, "--timeout=90s"]).map(drop)
}

/// Returns the name of the claim's PersistentVolume.
fn volume(case: &Case<'_>) -> anyhow::Result<String> {
    case.kubectl(&["get", "pvc", "data", "-o", "jsonpath={.spec.volumeName}"])
}

pub(crate) fn next_pod(case: &Case<'_>) -> anyhow::Result<()> {
    claim(case, DRIVER, "Filesystem", 32)?;
    hand_over(case, SLEEP)
}

/// Lets pod `p` write to the claim and end. Then pod `q`, which runs this script, must have the same bytes.
pub(crate) fn hand_over(case: &Case<'_>, script: &str) -> anyhow::Result<()> {
    user(case, "p", SLEEP)?;
    let seen = case
        .exec("p", &["sh", "-c", "echo kept > /d/f && stat -c %g /d && head -c 1000000 /dev/zero > /d/g"])?;
    ensure!(seen == "2000\n", "the group of the file system is {seen:?}");
    end(case, "p")?;
    user(case, "q", script)?;
    let seen = case.exec("q", &["sh", "-c", "cat /d/f; wc -c < /d/g"])?;
    ensure!(seen == "kept\n1000000\n", "the next pod reads {seen:?}");
    Ok(())
}

pub(crate) fn block(case: &Case<'_>) -> anyhow::Result<()> {
    claim(case, DRIVER, "Block", 32)?;
    for (pod, script) in
        [("p", "echo kept | dd of=/dev/disk conv=fsync 2>/dev/null"), ("q", "head -c 5 /dev/disk")]
    {
        case.pod(
            pod,
            &format!(
                "restartPolicy: Never, volumes: [{{name: d, persistentVolumeClaim: {{claimName: data}}}}],
                 containers: [{{name: c, image: IMAGE, command: [sh, -c, 'PAUSE; {script}'],
                   volumeDevices: [{{name: d, devicePath: /dev/disk}}]}}]"
            ),
        )?;
        case.phase(pod, "Succeeded")?;
        let log = case.kubectl(&["logs", pod])?;
        ensure!(pod == "p" || log == "kept\n", "the next pod reads {log:?}");
        end(case, pod)?;
    }
    Ok(())
}

pub(crate) fn expansion(case: &Case<'_>) -> anyhow::Result<()> {
    // A growing ext4 needs CAP_SYS_RESOURCE, which the machine of a local VM may lack. No XFS is smaller than 300 MiB.
    claim(case, "xfs", "Filesystem", 320)?;
    user(case, "p", SLEEP)?;
    let kib = || -> anyhow::Result<u64> {
        let seen = case.exec("p", &["sh", "-c", "df -k /d | tail -n 1 | awk '{print $2}'"])?;
        Ok(seen.trim().parse()?)
    };
    let before = kib()?;
    case.kubectl(&[
        "patch",
        "pvc",
        "data",
        "-p",
        r#"{"spec":{"resources":{"requests":{"storage":"640Mi"}}}}"#,
    ])?;
    case.until("the file system is larger", || Ok((kib()? > before + before / 2).then_some(())))?;
    case.until("the claim's status has the size", || {
        let seen = case.kubectl(&["get", "pvc", "data", "-o", "jsonpath={.status.capacity.storage}"])?;
        Ok((seen == "640Mi").then_some(()))
    })
}

pub(crate) fn removal(case: &Case<'_>) -> anyhow::Result<()> {
    claim(case, DRIVER, "Filesystem", 32)?;
    user(case, "p", SLEEP)?;
    remove(case, "p")
}

/// Deletes the claim's pod and then the claim, and waits until its volume is gone.
pub(crate) fn remove(case: &Case<'_>, pod: &str) -> anyhow::Result<()> {
    let volume = volume(case)?;
    let attached = || case.kubectl(&["get", "volumeattachments", "-o", "jsonpath={.items[*].spec.source}"]);
    ensure!(attached()?.contains(&volume), "no VolumeAttachment names {volume}");
    end(case, pod)?;
    case.until("the volume is detached", || Ok((!attached()?.contains(&volume)).then_some(())))?;
    case.kubectl(&["delete", "pvc", "data", "--timeout=90s"])?;
    case.until("the volume is gone", || {
        Ok(case
            .kubectl(&["get", "pv", &volume, "--ignore-not-found", "-o", "name"])?
            .is_empty()
            .then_some(()))
    })
}

pub(crate) fn ephemeral(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = format!(
        "volumes: [{{name: d, ephemeral: {{volumeClaimTemplate: {{spec: {{accessModes: [ReadWriteOnce],
           storageClassName: {DRIVER}, resources: {{requests: {{storage: 32Mi}}}}}}}}}}}}],
         containers: [{{name: c, image: IMAGE, command: [sh, -c, 'echo x > /d/x; cat /d/x'],
           volumeMounts: [{{name: d, mountPath: /d}}]}}]"
    );
    case.prints(&spec, "x\n")
}

pub(crate) fn without_vm(case: &Case<'_>) -> anyhow::Result<()> {
    claim(case, "peers-only", "Filesystem", 32)?;
    case.apply(
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {volumes: [{name: d, persistentVolumeClaim: {claimName: data}}],
          containers: [{name: c, image: IMAGE, command: [sleep, '60'], volumeMounts: [{name: d, mountPath: /d}]}]}}",
    )?;
    case.event("FailedMount", "RuntimeClass")?;
    case.kubectl(&["delete", "pod", "p", "--force", "--grace-period=0"]).map(drop)
}

pub(crate) fn inline(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        &format!(
            "volumes: [{{name: d, csi: {{driver: {DRIVER}, volumeAttributes: {{peerpod: 'true'}}}}}}],
             containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}'], volumeMounts: [{{name: d, mountPath: /d}}]}}]"
        ),
    )?;
    case.event("FailedMount", "use a claim")
}
