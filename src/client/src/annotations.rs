//! The nine annotations of CreateVM.

use std::collections::HashMap;

/// What a shim says about the pod. Both shims send exactly these nine keys, always, empty or `"0"` where they know
/// nothing (seen with both); so does this.
#[derive(Debug, Clone)]
pub struct Annotations(HashMap<String, String>);

const POD_NAME: &str = "io.kubernetes.cri.sandbox-name";
const POD_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
const HYPERVISOR: &str = "io.katacontainers.config.hypervisor.";

impl Annotations {
    /// As the Rust shim sends them for a pod without limits: one vCPU, 2048 MiB.
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

    /// vCPUs (`"2.5"`: the Rust shim prints a float) and memory in MiB.
    pub fn size(self, vcpus: &str, memory_mib: u64) -> Annotations {
        self.hypervisor("default_vcpus", vcpus).hypervisor("default_memory", &memory_mib.to_string())
    }

    /// The cloud's instance type.
    pub fn machine_type(self, value: &str) -> Annotations {
        self.hypervisor("machine_type", value)
    }

    /// The cloud's image.
    pub fn image(self, value: &str) -> Annotations {
        self.hypervisor("image", value)
    }

    /// Any of the seven keys below `io.katacontainers.config.hypervisor.`, by its last part.
    pub fn hypervisor(mut self, key: &str, value: &str) -> Annotations {
        self.0.insert(format!("{HYPERVISOR}{key}"), value.into());
        self
    }

    /// Takes a key away or puts any other in, for tests of what a shim never sends.
    pub fn raw(mut self, key: &str, value: Option<&str>) -> Annotations {
        match value {
            Some(value) => self.0.insert(key.into(), value.into()),
            None => self.0.remove(key),
        };
        self
    }

    /// The map as it goes on the wire.
    pub fn into_map(self) -> HashMap<String, String> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_nine_keys_whatever_is_set() {
        let map = Annotations::new("default", "web").size("2.5", 512).image("ami-1").into_map();
        assert_eq!(map.len(), 9);
        assert_eq!(map["io.katacontainers.config.hypervisor.default_vcpus"], "2.5");
        assert_eq!(map["io.katacontainers.config.hypervisor.default_gpus"], "0");
        assert_eq!(map["io.kubernetes.cri.sandbox-name"], "web");
    }
}
