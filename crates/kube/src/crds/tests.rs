use std::path::Path;

use peerpod_test_reference as reference;
use serde_json::{Value, json};

use super::*;

/// `deploy/crds` holds the definitions that the types generate. After a change of the types:
/// `PEERPOD_UPDATE=1 cargo test -p peerpod-kube crds`.
#[test]
fn deployed_files_are_those_of_the_types() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
    for crd in all() {
        let path = folder.join(format!("{}.yaml", crd.spec.names.plural));
        let ours = yaml(&crd).unwrap();
        if std::env::var_os("PEERPOD_UPDATE").is_some() {
            std::fs::write(&path, &ours).unwrap();
        }
        let deployed = std::fs::read_to_string(&path).unwrap();
        assert!(deployed == ours, "{} differs from the types; see this test", path.display());
    }
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), all().len());
}

#[test]
fn documented_fields_are_up_to_date() {
    for crd in all() {
        let definition = serde_json::to_value(&crd).unwrap();
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let text = format!("{}\n\n{}", schema["description"].as_str().unwrap(), reference::fields(schema));
        reference::section("crds.md", &crd.spec.names.plural, &text).unwrap();
    }
}

#[test]
fn the_replaced_systems_names_are_kept() {
    let fields = |crd: &CustomResourceDefinition, part: &str| {
        let schema = crd.spec.versions[0].schema.clone().unwrap().open_api_v3_schema.unwrap();
        let part = schema.properties.unwrap()[part].clone();
        part.properties.unwrap().into_keys().collect::<Vec<_>>()
    };
    let [peerpod, config, volume] = all().try_into().unwrap();
    for name in ["cloudProvider", "instanceID"] {
        assert!(fields(&peerpod, "spec").contains(&name.to_owned()), "{name}");
    }
    assert!(fields(&peerpod, "status").contains(&"cleand".to_owned()));
    for name in ["cloudSecretName", "configMapName", "instanceType", "limit", "nodeSelector"] {
        assert!(fields(&config, "spec").contains(&name.to_owned()), "{name}");
    }
    assert!(fields(&config, "status").contains(&"setupCompleted".to_owned()));
    assert_eq!(
        fields(&volume, "spec"),
        [
            "devicePath",
            "nodeID",
            "nodeName",
            "podName",
            "podNamespace",
            "podUid",
            "stagingTargetPath",
            "targetPath",
            "vmID",
            "vmName",
            "volumeID",
            "volumeName",
            "wrapperControllerPublishVolumeReq",
            "wrapperControllerPublishVolumeRes",
            "wrapperNodePublishVolumeReq",
            "wrapperNodeStageVolumeReq",
            "wrapperNodeUnpublishVolumeReq",
            "wrapperNodeUnstageVolumeReq",
        ]
    );
}

#[test]
fn an_old_object_is_written_back_as_it_was() {
    let old = json!({
        "apiVersion": "confidentialcontainers.org/v1alpha1",
        "kind": "PeerPod",
        "metadata": {"name": "web-resource-x7k2p", "namespace": "shop", "finalizers": [FINALIZER]},
        "spec": {"cloudProvider": "libvirt", "instanceID": "17"},
        "status": {"cleand": false},
    });
    let read: PeerPod = serde_json::from_value(old.clone()).unwrap();
    assert_eq!(read.spec.instance_id.as_deref(), Some("17"));
    assert_eq!(serde_json::to_value(&read).unwrap(), old);
}

#[test]
fn names_of_secret_and_settings_have_their_old_defaults() {
    let empty: PeerPodConfigSpec = serde_json::from_value(Value::Object(Default::default())).unwrap();
    assert_eq!(empty.cloud_secret_name, "peer-pods-secret");
    assert_eq!(empty.config_map_name, "peer-pods-cm");
}

#[test]
fn a_sandboxs_object_has_one_name_that_the_api_server_takes() {
    let name = PeerPod::name_of("web-0", "8f14e45f");
    assert_eq!(name, PeerPod::name_of("web-0", "8f14e45f"));
    assert_ne!(name, PeerPod::name_of("web-0", "8f14e460"), "of a pod whose sandbox was made anew");
    assert!(name.starts_with("web-0-") && name.len() == 16, "{name}");
    let long = PeerPod::name_of(&format!("{}.-b", "a".repeat(250)), "8f14e45f");
    assert!(long.len() <= 253 && !long.contains(".-"), "{long}");
}
