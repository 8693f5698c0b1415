//! Volumes of files that kubelet writes.

use std::thread;
use std::time::Duration;

use anyhow::ensure;
use peerpod_world::eventually_blocking;
use serde_json::json;

use super::{Case, SLEEP};

/// Time limit of a change in the pod: 10 s, and up to 7.5 s until kubelet looks again (`syncFrequency` 5 s).
const CHANGE: Duration = Duration::from_millis(17_500);
/// Time limit of the renewal of a token that lives for ten minutes.
const RENEWAL: Duration = Duration::from_secs(700);

pub(crate) fn live_update(case: &Case<'_>) -> anyhow::Result<()> {
    case.kubectl(&["create", "configmap", "m", "--from-literal=a=1", "--from-literal=b=1"])?;
    case.kubectl(&["create", "secret", "generic", "s", "--from-literal=k=1"])?;
    case.pod(
        "p",
        &format!(
            "volumes: [{{name: m, configMap: {{name: m}}}}, {{name: s, secret: {{secretName: s}}}}],
             containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}'],
               volumeMounts: [{{name: m, mountPath: /m}}, {{name: s, mountPath: /s}}]}}]"
        ),
    )?;
    case.ready("p")?;
    case.kubectl(&["patch", "configmap", "m", "-p", r#"{"data":{"a":"2","b":"2"}}"#])?;
    case.kubectl(&["patch", "secret", "s", "-p", r#"{"stringData":{"k":"2"}}"#])?;
    case.within(CHANGE, "both are new", || {
        let seen = case.exec("p", &["sh", "-c", "cat /m/a /m/b /s/k"])?;
        Ok((seen == "222").then_some(()))
    })
}

pub(crate) fn atomic_update(case: &Case<'_>) -> anyhow::Result<()> {
    let set = |value: &str| {
        let literals: Vec<_> = (0..20).map(|n| format!("--from-literal=k{n}={value}")).collect();
        let words: Vec<&str> = literals.iter().map(String::as_str).collect();
        case.kubectl(&[&["create", "configmap", "m", "--dry-run=client", "-o", "json"], &words[..]].concat())
    };
    case.apply(&set("1")?)?;
    // A reader reads all files of the version that counts. Those of a version that was replaced meanwhile may be gone.
    let script = "while :; do
        version=$(readlink /m/..data) || { echo no version; exit 1; }
        values=$(cd /m/$version && cat k* 2>/dev/null)
        case $values in
            11111111111111111111) continue;;
            22222222222222222222) exit 0;;
        esac
        [ \"$(readlink /m/..data)\" != $version ] || { echo \"$version has $values\"; exit 1; }
    done";
    let command = json!(["sh", "-c", script]);
    case.pod(
        "p",
        &format!(
            "restartPolicy: Never, volumes: [{{name: m, configMap: {{name: m}}}}],
             containers: [{{name: c, image: IMAGE, volumeMounts: [{{name: m, mountPath: /m}}], command: {command}}}]"
        ),
    )?;
    case.ready("p")?;
    case.apply(&set("2")?)?;
    case.until("the reader ends", || {
        let status = case.get("pod/p")?["status"].clone();
        ensure!(status["phase"] != "Failed", "{}", case.kubectl(&["logs", "p"])?);
        Ok((status["phase"] == "Succeeded").then_some(()))
    })
}

pub(crate) fn changed_labels(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        &format!(
            "volumes: [{{name: d, downwardAPI: {{items: [{{path: labels, fieldRef: {{fieldPath: metadata.labels}}}}]}}}}],
             containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}'], volumeMounts: [{{name: d, mountPath: /d}}]}}]"
        ),
    )?;
    case.ready("p")?;
    case.kubectl(&["label", "pod", "p", "colour=green"])?;
    case.within(CHANGE, "the label is in the pod", || {
        Ok(case.exec("p", &["cat", "/d/labels"])?.contains("colour=\"green\"").then_some(()))
    })
}

pub(crate) fn projected(case: &Case<'_>) -> anyhow::Result<()> {
    case.kubectl(&["create", "configmap", "m", "--from-literal=a=alpha"])?;
    case.kubectl(&["create", "secret", "generic", "s", "--from-literal=key=hidden"])?;
    let spec = "volumes: [{name: v, projected: {sources: [{configMap: {name: m}}, {secret: {name: s}},
          {downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}},
          {serviceAccountToken: {path: token, audience: somebody, expirationSeconds: 600}}]}}],
        containers: [{name: c, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'ls /v; cat /v/name; echo; cut -d. -f2 /v/token | base64 -d 2>/dev/null | grep -c somebody']}]";
    case.prints(spec, "a\nkey\nname\ntoken\np\n1\n")
}

pub(crate) fn optional(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "volumes: [{name: v, configMap: {name: absent, optional: true}}],
        containers: [{name: c, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}], command: [sh, -c, 'ls /v | wc -l']}]";
    case.prints(spec, "0\n")
}

pub(crate) fn missing(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "volumes: [{name: v, configMap: {name: absent}}],
         containers: [{name: c, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}], command: [sleep, '9']}]",
    )?;
    case.event("FailedMount", "absent")?;
    // The pod starts when the map comes.
    case.kubectl(&["create", "configmap", "absent", "--from-literal=a=1"])?;
    case.until("the pod's containers started", || {
        Ok(case.get("pod/p")?["status"]["startTime"].is_string().then_some(()))
    })?;
    case.ready("p")
}

pub(crate) fn missing_variable(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod("p", "containers: [{name: c, image: IMAGE, envFrom: [{secretRef: {name: absent}}], command: [sleep, '9']}]")?;
    case.waiting("p", &["CreateContainerConfigError"], "absent")
}

pub(crate) fn binary_data(case: &Case<'_>) -> anyhow::Result<()> {
    case.apply("{apiVersion: v1, kind: ConfigMap, metadata: {name: m}, binaryData: {b: AAEC/w==}}")?;
    let spec = "volumes: [{name: v, configMap: {name: m}}], containers: [{name: c, image: IMAGE,
        volumeMounts: [{name: v, mountPath: /v}], command: [sh, -c, 'od -An -tx1 /v/b']}]";
    case.prints(spec, " 00 01 02 ff\n")
}

pub(crate) fn large_secret(case: &Case<'_>) -> anyhow::Result<()> {
    let value = "x".repeat(900_000);
    case.apply(&format!("{{apiVersion: v1, kind: Secret, metadata: {{name: s}}, stringData: {{k: {value}}}}}"))
        .or_else(|_| {
            case.kubectl_with(&["create", "-f", "-"], format!("{{\"apiVersion\":\"v1\",\"kind\":\"Secret\",\"metadata\":{{\"name\":\"s\"}},\"stringData\":{{\"k\":\"{value}\"}}}}").as_bytes()).map(drop)
        })?;
    let spec = "volumes: [{name: v, secret: {secretName: s}}], containers: [{name: c, image: IMAGE,
        volumeMounts: [{name: v, mountPath: /v}], command: [sh, -c, 'wc -c </v/k']}]";
    case.prints(spec, "900000\n")
}

pub(crate) fn empty_dir(case: &Case<'_>) -> anyhow::Result<()> {
    // It outlives a container, and not the pod.
    case.pod(
        "p",
        "restartPolicy: OnFailure, volumes: [{name: v, emptyDir: {sizeLimit: 100Mi}}], containers: [{name: c, image: IMAGE,
           volumeMounts: [{name: v, mountPath: /v}], command: [sh, -c, 'PAUSE; cat /v/f && exit 0; echo kept >/v/f; exit 1']}]",
    )?;
    case.phase("p", "Succeeded")?;
    let log = case.kubectl(&["logs", "p"])?;
    ensure!(log == "kept\n", "{log:?}");
    Ok(())
}

pub(crate) fn token_renewal(case: &Case<'_>) -> anyhow::Result<()> {
    // kubelet renews a token after four fifths of its life, which has at least ten minutes.
    case.pod(
        "p",
        &format!(
            "volumes: [{{name: v, projected: {{sources: [{{serviceAccountToken: {{path: token, expirationSeconds: 600}}}}]}}}}],
             containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}'], volumeMounts: [{{name: v, mountPath: /v}}]}}]"
        ),
    )?;
    case.ready("p")?;
    let token = || case.exec("p", &["cat", "/v/token"]);
    let first = token()?;
    let second = eventually_blocking("another token", RENEWAL, || {
        thread::sleep(Duration::from_secs(1));
        token().ok().filter(|now| *now != first)
    })?;
    // The API server knows it.
    let server = case.node.cluster.url();
    let words = [
        "auth",
        "whoami",
        "-o",
        "jsonpath={.status.userInfo.username}",
        "--server",
        &server,
        "--token",
        &second,
    ];
    let user = case.kubectl(&words)?;
    ensure!(user == format!("system:serviceaccount:{}:default", case.namespace), "{user}");
    Ok(())
}
