//! Warns of a pod's fields that have another effect in a VM than on a node. Pure.

use serde_json::Value;

/// Fields of a security context whose profile has no effect in the VM, and the warning about each.
pub(super) const PROFILES: [(&str, &str); 2] = [
    (
        "seccompProfile",
        "seccompProfile: no seccomp filter in a peer pod's VM while Kata's configuration has disable_guest_seccomp = true",
    ),
    ("appArmorProfile", "appArmorProfile: no AppArmor profile is applied in a peer pod's VM"),
];
const HOST_PATH: &str = "hostPath: a peer pod gets a copy of the node's files; later changes on either side do not reach the other";

/// Returns the warnings about a peer pod, one for each kind of field.
pub(super) fn warnings(pod: &Value) -> Vec<&'static str> {
    let spec = &pod["spec"];
    let list = |key: &str| spec[key].as_array().into_iter().flatten();
    let mut warnings = Vec::new();
    if list("volumes").any(|volume| !volume["hostPath"].is_null()) {
        warnings.push(HOST_PATH);
    }
    for (key, warning) in PROFILES {
        let asks = |owner: &Value| {
            let kind = owner["securityContext"][key]["type"].as_str();
            kind.is_some_and(|kind| kind != "Unconfined")
        };
        if asks(spec) || list("initContainers").chain(list("containers")).any(asks) {
            warnings.push(warning);
        }
    }
    warnings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_kind_of_field_has_one_warning() {
        let profile = |kind: &str, key: &str| json!({"securityContext": {key: {"type": kind}}});
        let pods = [
            (json!({"volumes": [{"emptyDir": {}}], "securityContext": {"runAsUser": 1}}), &[][..]),
            (json!({"volumes": [{"hostPath": {"path": "/a"}}, {"hostPath": {"path": "/b"}}]}), &[HOST_PATH]),
            (profile("RuntimeDefault", "seccompProfile"), &[PROFILES[0].1]),
            (profile("Unconfined", "seccompProfile"), &[]),
            (json!({"containers": [{}, profile("Localhost", "appArmorProfile")]}), &[PROFILES[1].1]),
            (json!({"initContainers": [profile("RuntimeDefault", "seccompProfile")]}), &[PROFILES[0].1]),
        ];
        for (spec, expected) in pods {
            assert_eq!(warnings(&json!({"spec": spec})), expected, "{spec}");
        }
        // The API server cuts longer ones.
        assert!([HOST_PATH, PROFILES[0].1, PROFILES[1].1].iter().all(|warning| warning.len() <= 120));
    }
}
