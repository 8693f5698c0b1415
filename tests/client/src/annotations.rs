//! The nine annotations of CreateVM.

use std::collections::HashMap;

/// Annotations that a shim sends about the pod. Both shims always send exactly these nine keys, empty or `"0"` without
/// a value (seen with both); so does this client.
#[derive(Debug, Clone)]
pub struct Annotations(HashMap<String, String>);

const POD_NAME: &str = "io.kubernetes.cri.sandbox-name";
const POD_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
const HYPERVISOR: &str = "io.katacontainers.config.hypervisor.";

impl Annotations {
    /// Makes the annotations that the Rust shim sends for a pod without limits: one vCPU, 2048 MiB.
    pub fn new(namespace: &str, name: &str) -> Annotations {
        let mut map =
            HashMap::from([(POD_NAME.into(), name.into()), (POD_NAMESPACE.into(), namespace.into())]);
        for (key, value) in [
            ("machine_type", ""),
            ("image", ""),
            ("default_vcpus", "1"),
            ("default_memory", "2048"),
            ("cc_init_data", ""),
            ("default_gpus", "0"),
            ("default_gpu_model", ""),
        ] {
            map.insert(format!("{HYPERVISOR}{key}"), value.into());
        }
        Annotations(map)
    }

    /// Sets vCPUs (`"2.5"`: the Rust shim prints a float) and memory in MiB.
    pub fn size(self, vcpus: &str, memory_mib: u64) -> Annotations {
        self.hypervisor("default_vcpus", vcpus).hypervisor("default_memory", &memory_mib.to_string())
    }

    /// Sets the cloud's instance type.
    pub fn machine_type(self, value: &str) -> Annotations {
        self.hypervisor("machine_type", value)
    }

    /// Sets the cloud's image.
    pub fn image(self, value: &str) -> Annotations {
        self.hypervisor("image", value)
    }

    /// Sets any of the seven keys below `io.katacontainers.config.hypervisor.`, by its last part.
    pub fn hypervisor(mut self, key: &str, value: &str) -> Annotations {
        self.0.insert(format!("{HYPERVISOR}{key}"), value.into());
        self
    }

    /// Removes a key or sets any other, for tests of requests that a shim never sends.
    pub fn raw(mut self, key: &str, value: Option<&str>) -> Annotations {
        match value {
            Some(value) => self.0.insert(key.into(), value.into()),
            None => self.0.remove(key),
        };
        self
    }

    /// Returns the map of the request.
    pub fn into_map(self) -> HashMap<String, String> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_always_nine_keys() {
        let map = Annotations::new("default", "web").size("2.5", 512).image("ami-1").into_map();
        assert_eq!(map.len(), 9);
        assert_eq!(map["io.katacontainers.config.hypervisor.default_vcpus"], "2.5");
        assert_eq!(map["io.katacontainers.config.hypervisor.default_gpus"], "0");
        assert_eq!(map["io.kubernetes.cri.sandbox-name"], "web");
    }
}
