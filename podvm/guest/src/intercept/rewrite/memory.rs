//! Restores memory limits of containers. The cluster's webhook removes them from the containers, so that they do not
//! count on the node, and stores them in an annotation of the pod. The kata-agent applies the limit in a container's
//! specification.

use std::collections::HashMap;

use peerpod_proto::intercept::Spec;

/// JSON of container names to bytes. Kata's shims and container runtimes pass annotations with this prefix on.
pub(super) const LIMITS: &str = "io.katacontainers.peerpod.memory-limits";
/// Annotations with the container's name in its pod: of containerd, and kubelet's label, which CRI-O adds to its
/// annotations. CRI-O's own have `k8s_<container>_<pod>_<namespace>_<uid>_<attempt>`.
const NAMES: [&str; 2] = ["io.kubernetes.cri.container-name", "io.kubernetes.container.name"];

/// Sets the container's limit, unless it has one, and removes the annotation: a kata-agent policy need not know it.
/// Fails if the annotation is not in the webhook's format: the container would run without its limit.
pub(super) fn limit(spec: &mut Spec) -> Result<(), serde_json::Error> {
    let Some(text) = spec.Annotations.remove(LIMITS) else { return Ok(()) };
    let limits: HashMap<String, u64> = serde_json::from_str(&text)?;
    let name = NAMES.iter().find_map(|key| spec.Annotations.get(*key));
    let Some(limit) = name.and_then(|name| limits.get(name)) else { return Ok(()) };
    let memory =
        spec.Linux.mut_or_insert_default().Resources.mut_or_insert_default().Memory.mut_or_insert_default();
    if memory.Limit <= 0 {
        memory.Limit = i64::try_from(*limit).unwrap_or(i64::MAX);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the limit that a container has in the end, and its annotations.
    fn limited(name: (&str, &str), own: i64, limits: &str) -> Result<(i64, Vec<String>), serde_json::Error> {
        let mut spec = Spec::new();
        for (key, value) in [name, (LIMITS, limits)] {
            spec.Annotations.insert(key.to_owned(), value.to_owned());
        }
        spec.Linux
            .mut_or_insert_default()
            .Resources
            .mut_or_insert_default()
            .Memory
            .mut_or_insert_default()
            .Limit = own;
        limit(&mut spec)?;
        Ok((spec.Linux.Resources.Memory.Limit, spec.Annotations.into_keys().collect()))
    }

    #[test]
    fn each_container_gets_the_limit_of_its_name_and_keeps_an_existing_one() {
        const LISTED: &str = r#"{"web": 268435456, "huge": 18446744073709551615}"#;
        for key in NAMES {
            let of = |name: &str, own| limited((key, name), own, LISTED).unwrap();
            assert_eq!(of("web", 0), (256 << 20, vec![key.to_owned()]));
            assert_eq!(of("web", 1 << 20).0, 1 << 20);
            assert_eq!(of("other", 0).0, 0);
            assert_eq!(of("huge", 0).0, i64::MAX);
        }
        assert_eq!(limited(("io.kubernetes.cri.container-type", "sandbox"), 0, LISTED).unwrap().0, 0);
        for bad in ["", "[]", r#"{"web": -1}"#, r#"{"web": "256Mi"}"#] {
            assert!(limited((NAMES[0], "web"), 0, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_container_of_cri_o_gets_its_limit() {
        let mut spec = Spec::new();
        for (key, value) in [
            ("io.kubernetes.cri-o.ContainerType", "container"),
            ("io.kubernetes.cri-o.Name", "k8s_web_shop_default_5b3c1f6e_0"),
            ("io.kubernetes.container.name", "web"),
            (LIMITS, r#"{"web": 268435456}"#),
        ] {
            spec.Annotations.insert(key.to_owned(), value.to_owned());
        }
        limit(&mut spec).unwrap();
        assert_eq!(spec.Linux.Resources.Memory.Limit, 256 << 20);
    }

    #[test]
    fn a_container_without_the_annotation_stays_unchanged() {
        let mut spec = Spec::new();
        limit(&mut spec).unwrap();
        assert_eq!(spec, Spec::new());
    }
}
