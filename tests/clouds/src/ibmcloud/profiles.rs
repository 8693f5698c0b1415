//! Lists the profiles that the region sells.

use serde_json::{Value, json};

use super::{IbmCloud, ZONES};
use crate::fake::{Answer, World};

/// Profile of instances.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Name: `bx3dc-2x10`.
    pub name: &'static str,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in GiB.
    pub memory: u64,
    /// GPUs.
    pub gpus: u32,
    /// Architecture: `amd64`, `s390x`.
    pub arch: &'static str,
    /// Whether it can be confidential by TDX.
    pub tdx: bool,
    /// Whether it is sold on the spot market.
    pub spot: bool,
    /// Most network attachments.
    pub nics: u32,
    /// Zones that have it.
    pub zones: Vec<&'static str>,
}

/// Returns all profiles.
pub(super) fn all() -> Vec<Profile> {
    let profile = |name, vcpus, memory| Profile {
        name,
        vcpus,
        memory,
        gpus: 0,
        arch: "amd64",
        tdx: false,
        spot: false,
        nics: 5,
        zones: ZONES.to_vec(),
    };
    vec![
        profile("bx2-2x8", 2, 8),
        profile("bx3d-2x10", 2, 10),
        profile("bx3d-4x20", 4, 20),
        Profile { tdx: true, ..profile("bx3dc-2x10", 2, 10) },
        Profile { tdx: true, ..profile("bx3dc-4x20", 4, 20) },
        Profile { spot: true, ..profile("bxf-2x8", 2, 8) },
        Profile { spot: true, zones: vec![ZONES[0]], ..profile("bxf-4x16", 4, 16) },
        Profile { gpus: 1, zones: vec![ZONES[1]], ..profile("gx3-16x80x1l4", 16, 80) },
        Profile { arch: "s390x", nics: 1, ..profile("bz2-2x8", 2, 8) },
    ]
}

impl Profile {
    /// Returns it as the list of profiles has it.
    fn view(&self, endpoint: &str) -> Value {
        let fixed = |value: u64| json!({"type": "fixed", "value": value});
        let words =
            |default: &str, values: &[&str]| json!({"type": "enum", "default": default, "values": values});
        let family = self.name.split('-').next().unwrap_or_default();
        let classes: &[&str] = if self.spot { &["standard", "spot"] } else { &["standard"] };
        let modes: &[&str] = if self.tdx { &["disabled", "tdx"] } else { &["disabled"] };
        let is_x86 = self.arch == "amd64";
        let mut view = json!({
            "name": self.name, "href": format!("{endpoint}/v1/instance/profiles/{}", self.name), "family": "balanced",
            "resource_type": "instance_profile", "status": "current", "disks": [],
            "availability_class": words("standard", classes),
            "bandwidth": fixed(4_000), "port_speed": fixed(16_000),
            "cluster_network_attachment_count": {"type": "dependent"},
            "confidential_compute_modes": words("disabled", modes),
            "memory": fixed(self.memory), "vcpu_count": fixed(u64::from(self.vcpus)),
            "network_attachment_count": {"type": "range", "min": 1, "max": self.nics},
            "network_bandwidth_mode": {"type": "fixed", "value": "proportional"},
            "network_interface_count": {"type": "range", "min": 1, "max": self.nics},
            "numa_count": {"type": "fixed", "value": 1},
            "os_architecture": words(self.arch, &[self.arch]),
            "reservation_terms": {"type": "enum", "values": ["one_year", "three_year"]},
            "secure_boot_modes": {"type": "enum", "default": false, "values": [false, is_x86]},
            "supported_cluster_network_profiles": [],
            "threads_per_core": {"type": "enum", "default": 2, "values": [1, 2]},
            "total_volume_bandwidth": {"type": "range", "min": 500, "max": 3_500, "default": 1_000, "step": 1},
            "vcpu_architecture": {"type": "fixed", "value": self.arch},
            "vcpu_burst_limit": {"type": "fixed", "value": 100},
            "vcpu_manufacturer": {"type": "fixed", "value": if is_x86 { "intel" } else { "ibm" },
                "default": if is_x86 { "intel" } else { "ibm" }},
            "vcpu_percentage": {"type": "enum", "default": 100, "values": [100]},
            "volume_bandwidth_qos_modes": words("pooled", &["pooled"]),
            "zones": self.zones.iter().map(|zone| super::facts::zone(zone, endpoint)).collect::<Vec<Value>>(),
        });
        if self.gpus > 0 {
            view["gpu_count"] = fixed(u64::from(self.gpus));
            view["gpu_model"] = json!({"type": "enum", "values": ["L4"]});
            view["gpu_manufacturer"] = json!({"type": "enum", "values": ["nvidia"]});
            view["gpu_memory"] = fixed(24);
        }
        if family.starts_with("gx") {
            view["family"] = json!("gpu");
        }
        view
    }
}

impl IbmCloud {
    pub(super) fn list_profiles(&self, world: &World<'_>) -> Answer {
        let profiles: Vec<Value> = self.profiles.iter().map(|one| one.view(world.endpoint)).collect();
        let first = json!({"href": format!("{}/v1/instance/profiles?limit=50", world.endpoint)});
        let body = json!({"first": first, "limit": 50, "total_count": profiles.len(), "profiles": profiles});
        Answer::json(200, &body)
    }
}
