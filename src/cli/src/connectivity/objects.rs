//! The objects of the tests, as an API server takes them. Pure.

use serde_json::{Value, json};

/// Port on which each pod serves its own name.
pub(super) const PORT: u16 = 8080;
/// Name of the Service and of the claim.
pub(super) const WEB: &str = "web";
pub(super) const CLAIM: &str = "data";
/// Folder of the volume.
pub(super) const DATA: &str = "/data";
/// User of the pods; it owns no file of the image.
const USER: i64 = 65534;
/// Serves the pod's name, and logs a line.
const SCRIPT: &str = "mkdir -p /tmp/w && hostname >/tmp/w/index.html && echo \"$(hostname) serves\" && \
                      exec httpd -f -p 8080 -h /tmp/w";

/// A test pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct TestPod<'p> {
    pub(super) name: &'p str,
    pub(super) node: &'p str,
    pub(super) image: &'p str,
    /// RuntimeClass of a peer pod; `None`: an ordinary pod.
    pub(super) class: Option<&'p str>,
    /// Whether the claim is mounted.
    pub(super) has_volume: bool,
}

impl TestPod<'_> {
    /// Returns the pod, pinned to its node as a DaemonSet does it.
    pub(super) fn object(&self) -> Value {
        let TestPod { name, node, image, class, has_volume } = self;
        let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": CLAIM}}]);
        let term = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]});
        let affinity =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}});
        let container = json!({
            "name": "c", "image": image, "command": ["sh", "-c", SCRIPT],
            "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
            "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": if *has_volume { json!([{"name": "v", "mountPath": DATA}]) } else { json!([]) },
        });
        json!({"metadata": {"name": name, "labels": {"app": name}}, "spec": {
            "runtimeClassName": class,
            "containers": [container],
            "affinity": {"nodeAffinity": affinity},
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "securityContext": {"runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": if *has_volume { volumes } else { json!([]) },
        }})
    }
}

/// Returns a Service before the pod of this name.
pub(super) fn service(pod: &str) -> Value {
    json!({"metadata": {"name": WEB}, "spec": {"selector": {"app": pod}, "ports": [{"port": PORT}]}})
}

/// Returns a claim of this StorageClass.
pub(super) fn claim(class: &str) -> Value {
    json!({"metadata": {"name": CLAIM}, "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}})
}

/// Returns a NetworkPolicy that permits no connection to any pod of the namespace.
pub(super) fn closed() -> Value {
    json!({"metadata": {"name": "closed"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}})
}

/// Returns the URL of a pod or a Service at this address.
pub(super) fn url(address: &str) -> String {
    if address.contains(':') {
        format!("http://[{address}]:{PORT}/")
    } else {
        format!("http://{address}:{PORT}/")
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
    use k8s_openapi::api::networking::v1::NetworkPolicy;
    use serde_json::from_value;

    use super::*;

    #[test]
    fn the_objects_are_of_their_kinds() {
        let pod = TestPod { name: "p", node: "n", image: "i", class: Some("k"), has_volume: true };
        let spec = from_value::<Pod>(pod.object()).unwrap().spec.unwrap();
        assert_eq!(
            (spec.runtime_class_name.as_deref(), spec.volumes.map(|all| all.len())),
            (Some("k"), Some(1))
        );
        let plain = TestPod { class: None, has_volume: false, ..pod };
        assert_eq!(from_value::<Pod>(plain.object()).unwrap().spec.unwrap().runtime_class_name, None);
        from_value::<Service>(service("p")).unwrap();
        from_value::<PersistentVolumeClaim>(claim("c")).unwrap();
        from_value::<NetworkPolicy>(closed()).unwrap();
        assert_eq!([url("10.0.0.1"), url("fd00::1")], ["http://10.0.0.1:8080/", "http://[fd00::1]:8080/"]);
    }
}
