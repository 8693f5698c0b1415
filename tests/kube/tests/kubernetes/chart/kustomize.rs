//! The same with kustomize.

use std::fs;
use std::path::Path;

use peerpod_test_kube::{NODE, project};
use serde_json::{Value, json};

use super::{Installed, NAMESPACE, copy_folder};
use crate::cases::Case;
use crate::images_common::PORT;
use crate::node::ADDRESS;

/// Installs the base of deploy/kustomize with an overlay like a user's.
pub(super) fn run(on: &Installed<'_>) -> anyhow::Result<()> {
    let overlay = on.folder.join("overlay");
    fs::create_dir(&overlay)?;
    let values: Value = serde_json::from_slice(&fs::read(&on.values)?)?;
    let libvirt = &values["config"]["provider"]["libvirt"];
    let literals = [
        ("PROVIDER_KIND", json!("libvirt")),
        ("PROVIDER_LIBVIRT_URI", json!("qemu:///system")),
        ("PROVIDER_LIBVIRT_POOL", libvirt["pool"].clone()),
        ("PROVIDER_LIBVIRT_NETWORK", libvirt["network"].clone()),
        ("PROVIDER_LIBVIRT_KERNEL", libvirt["kernel"].clone()),
        ("PROVIDER_LIBVIRT_INITRD", libvirt["initrd"].clone()),
        ("PROVIDER_LIBVIRT_CMDLINE", libvirt["cmdline"].clone()),
        ("NODE_PLAIN_HTTP_REGISTRIES", values["config"]["node"]["plain-http-registries"].clone()),
    ]
    .map(|(name, value)| format!("PEERPOD_{name}={}", value.as_str().unwrap_or_default()));
    // Of a Deployment and of a DaemonSet. The controller reads libvirt's socket, too.
    let patch = |kind: &str, name: &str, more: Value| {
        let mut spec = json!({ "volumes": values["node"]["extraVolumes"] });
        let mounts = &values["node"]["extraVolumeMounts"];
        spec["containers"] = json!([{ "name": name, "volumeMounts": mounts }]);
        if let (Some(spec), Some(more)) = (spec.as_object_mut(), more.as_object()) {
            spec.extend(more.clone());
        }
        let object = json!({
            "apiVersion": "apps/v1", "kind": kind,
            "metadata": { "name": format!("peerpod-{name}"), "namespace": NAMESPACE },
            "spec": { "template": { "spec": spec } },
        });
        json!({ "patch": object.to_string() })
    };
    let as_root = json!({ "securityContext": { "runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": false } });
    let base = Path::new("..").join("base");
    copy_folder(&project("deploy/kustomize/base"), &on.folder.join("base"))?;
    let text = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": [base],
        "images": [{ "name": "peerpod", "newName": format!("{ADDRESS}:{PORT}/peerpod"), "newTag": "1" }],
        "configMapGenerator": [{ "name": "peer-pods-cm", "namespace": NAMESPACE, "literals": literals }],
        "generatorOptions": { "disableNameSuffixHash": true },
        "patches": [patch("DaemonSet", "node", json!({})), patch("Deployment", "controller", as_root)],
    });
    fs::write(overlay.join("kustomization.yaml"), text.to_string())?;
    on.node.kubectl(&["uncordon", NODE])?;
    let overlay = overlay.to_string_lossy();
    on.node.kubectl(&["apply", "--server-side", "-k", &overlay])?;
    on.ready()?;
    let case = Case::new(on.node, "kustomized")?;
    case.sleeper("p")?;
    case.exec("p", &["true"])?;
    case.kubectl(&["delete", "pod", "p", "--timeout=120s"])?;
    on.node.kubectl(&["delete", "-k", &overlay, "--timeout=120s"]).map(drop)
}
