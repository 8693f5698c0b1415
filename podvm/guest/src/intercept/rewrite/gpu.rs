//! Selects the containers of a VM with GPUs that get them. The pod's limits apply to the VM, and a container's
//! specification does not show which containers they were for. The guest therefore reads the variable that every GPU
//! image sets, and that a pod may set, with its usual values.

use peerpod_proto::intercept::Spec;

/// Prefix of the annotations that the kata-agent evaluates (CDI).
const CDI: &str = "cdi.k8s.io/";
/// Annotation that the guest sets.
const KEY: &str = "cdi.k8s.io/peer-pods";
const KIND: &str = "nvidia.com/gpu";
const VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES=";
/// Annotations that mark the pod's sandbox container, which runs nothing.
const TYPES: [&str; 2] = ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"];
const MOST: usize = 64;

/// Marks the container if it asks for GPUs. A container that names its devices itself stays unchanged.
pub(super) fn mark(spec: &mut Spec) {
    let sandbox = TYPES.iter().any(|key| spec.Annotations.get(*key).is_some_and(|kind| kind == "sandbox"));
    if sandbox || spec.Annotations.keys().any(|key| key.starts_with(CDI)) {
        return;
    }
    // The last one counts, as for a process.
    let environment = spec.Process.Env.iter().rev();
    let asked = environment.filter_map(|line| line.strip_prefix(VARIABLE)).next();
    if let Some(devices) = asked.and_then(devices) {
        spec.Annotations.insert(KEY.to_owned(), devices);
    }
}

/// Returns the CDI names for the variable's value; `None`: none.
fn devices(asked: &str) -> Option<String> {
    let names: Vec<&str> = asked.split(',').map(str::trim).take(MOST).collect();
    let plain = |name: &&str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.:".contains(c))
    };
    match names[..] {
        ["" | "void" | "none"] => None,
        _ if names.iter().all(plain) => {
            Some(names.iter().map(|name| format!("{KIND}={name}")).collect::<Vec<_>>().join(","))
        }
        _ => Some(format!("{KIND}=all")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(environment: &[&str], annotations: &[(&str, &str)]) -> Option<String> {
        let mut spec = Spec::new();
        spec.Process.mut_or_insert_default().Env = environment.iter().map(|line| line.to_string()).collect();
        spec.Annotations = annotations.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        mark(&mut spec);
        spec.Annotations.remove(KEY)
    }

    #[test]
    fn only_a_container_that_requests_gpus_is_marked() {
        let all = Some("nvidia.com/gpu=all".to_owned());
        assert_eq!(marked(&["PATH=/bin"], &[]), None);
        assert_eq!(marked(&["NVIDIA_VISIBLE_DEVICES=all"], &[]), all);
        assert_eq!(
            marked(&["NVIDIA_VISIBLE_DEVICES=0, GPU-1a"], &[]).as_deref(),
            Some("nvidia.com/gpu=0,nvidia.com/gpu=GPU-1a")
        );
        assert_eq!(marked(&["NVIDIA_VISIBLE_DEVICES=a=b"], &[]), all);
        for none in ["", "void", "none"] {
            let last = format!("NVIDIA_VISIBLE_DEVICES={none}");
            assert_eq!(marked(&["NVIDIA_VISIBLE_DEVICES=all", &last], &[]), None, "{none}");
        }
    }

    #[test]
    fn the_sandbox_container_and_containers_with_named_devices_stay_unchanged() {
        for key in TYPES {
            assert_eq!(marked(&["NVIDIA_VISIBLE_DEVICES=all"], &[(key, "sandbox")]), None);
            assert!(marked(&["NVIDIA_VISIBLE_DEVICES=all"], &[(key, "container")]).is_some());
        }
        assert_eq!(marked(&["NVIDIA_VISIBLE_DEVICES=all"], &[("cdi.k8s.io/mine", "vendor.com/x=1")]), None);
    }
}
