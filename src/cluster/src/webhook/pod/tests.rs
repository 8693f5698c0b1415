use json_patch::Patch;
use proptest::prelude::*;
use serde_json::json;

use super::super::mutate::{Profile, Totals, any_json, mutate};
use super::super::warnings::warnings;
use super::*;

fn raw(pod: &Value) -> Box<RawValue> {
    RawValue::from_string(pod.to_string()).unwrap()
}

fn profile(totals: Totals) -> Profile {
    Profile {
        runtime_classes: vec!["kata-remote".to_owned()],
        resource: "kata.peerpods.io/vm".to_owned(),
        totals,
        gpus: vec!["nvidia.com/gpu".to_owned()],
    }
}

#[test]
fn unused_fields_are_skipped_and_lists_keep_their_length() {
    let pod = json!({
        "metadata": {"name": "p", "labels": {"a": "b"}, "annotations": {
            "example.org/a": "b", "kubernetes.io/limit-ranger": "x",
        }},
        "spec": {"runtimeClassName": "kata-remote", "hostPID": false, "volumes": [{"name": "v", "hostPath": {}}, {"name": "w"}],
            "securityContext": {"runAsUser": 1, "seccompProfile": {"type": "Localhost", "localhostProfile": "f"}}, "containers": [
            {"name": "a", "image": "x", "env": [{"name": "A"}], "resources": {"limits": {"cpu": 1}, "claims": [{"name": "g"}]}},
            {"image": "y"},
        ]},
        "status": {},
    });
    assert_eq!(
        read(&raw(&pod)).unwrap(),
        json!({
            "metadata": {"annotations": {"kubernetes.io/limit-ranger": "x"}},
            "spec": {"runtimeClassName": "kata-remote", "hostPID": false, "volumes": [{"hostPath": {}}, {}],
                "securityContext": {"seccompProfile": {"type": "Localhost"}}, "containers": [
                {"name": "a", "resources": {"limits": {"cpu": 1}, "claims": [{"name": "g"}]}},
                {},
            ]},
        })
    );
    assert_eq!(runtime_class(&raw(&pod)).as_deref(), Some("kata-remote"));
    assert_eq!(runtime_class(&raw(&json!({"spec": 1}))), None);
}

#[test]
fn a_pod_with_too_many_values_or_too_much_text_is_refused_while_it_is_read() {
    let containers = |one: Value, many: usize| json!({"spec": {"containers": vec![one; many]}});
    assert!(read(&raw(&containers(json!({"name": "c"}), 4000))).is_ok());
    let refused = |pod: Value| read(&raw(&pod)).unwrap_err().to_string();
    let said = refused(containers(json!({"name": "c"}), 5000));
    assert!(said.contains("more than 8192 names, requests, limits"), "{said}");
    let said = refused(containers(json!({"name": "c".repeat(1000)}), 1100));
    assert!(said.contains("more than 1048576 bytes"), "{said}");
    // The number of unused values is not limited.
    assert!(read(&raw(&json!({"": vec![json!({"": 0}); 100_000]}))).is_ok());
}

proptest! {
    /// The unused fields have no influence on patch and warnings.
    #[test]
    fn patch_and_warnings_are_those_of_the_whole_pod(mut pod in any_json()) {
        if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) {
            spec.insert("runtimeClassName".to_owned(), json!("kata-remote"));
        }
        prop_assert_eq!(warnings(&read(&raw(&pod)).unwrap()), warnings(&pod));
        for totals in [Totals::Sum, Totals::Effective] {
            let patch = |pod: &Value| mutate(pod, &profile(totals)).map_err(|why| why.to_string());
            let kept = read(&raw(&pod)).unwrap();
            let (of_kept, of_whole): (Result<Patch, _>, _) = (patch(&kept), patch(&pod));
            prop_assert_eq!(of_kept, of_whole);
        }
    }
}
