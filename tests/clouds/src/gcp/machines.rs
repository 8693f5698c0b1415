//! Lists the machine types that the region sells.

use serde_json::{Value, json};

use super::route::Route;
use super::{BASE, Gcp, ZONES};
use crate::fake::{Answer, Refused, Request, World};

/// Machine type.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Name: `n2-standard-2`.
    pub name: &'static str,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory: u32,
    /// Type and number of its GPUs.
    pub gpus: Option<(&'static str, u32)>,
    /// Architecture: `X86_64`, `ARM64`.
    pub arch: &'static str,
    /// Confidential technologies, which the list does not have.
    pub confidential: &'static [&'static str],
    /// Whether it shares its processors.
    pub shared: bool,
    /// Letters of the zones that have it.
    pub zones: &'static str,
}

/// Returns all machine types.
pub(super) fn all() -> Vec<Machine> {
    let machine = |name, vcpus, memory| Machine {
        name,
        vcpus,
        memory,
        gpus: None,
        arch: "X86_64",
        confidential: &[],
        shared: false,
        zones: "abc",
    };
    vec![
        Machine { shared: true, ..machine("e2-medium", 2, 4_096) },
        machine("e2-standard-2", 2, 8_192),
        machine("e2-standard-4", 4, 16_384),
        machine("n2-standard-2", 2, 8_192),
        Machine { confidential: &["SEV", "SEV_SNP"], zones: "ab", ..machine("n2d-standard-2", 2, 8_192) },
        Machine { confidential: &["TDX"], zones: "ac", ..machine("c3-standard-4", 4, 16_384) },
        Machine { arch: "ARM64", zones: "bc", ..machine("t2a-standard-2", 2, 8_192) },
        Machine { gpus: Some(("nvidia-l4", 1)), zones: "a", ..machine("g2-standard-4", 4, 16_384) },
    ]
}

impl Machine {
    /// Whether this zone has it.
    pub(super) fn is_in(&self, zone: &str) -> bool {
        zone.chars().last().is_some_and(|letter| self.zones.contains(letter))
    }

    fn view(&self, zone: &str) -> Value {
        let mut view = json!({
            "kind": "compute#machineType", "id": "1", "name": self.name, "guestCpus": self.vcpus,
            "memoryMb": self.memory, "architecture": self.arch, "isSharedCpu": self.shared,
            "imageSpaceGb": 0, "maximumPersistentDisks": 128, "maximumPersistentDisksSizeGb": "263168",
            "description": format!("{} vCPUs", self.vcpus), "zone": zone,
            "selfLink": format!("{BASE}/zones/{zone}/machineTypes/{}", self.name),
        });
        if let Some((kind, count)) = self.gpus {
            view["accelerators"] = json!([{"guestAcceleratorType": kind, "guestAcceleratorCount": count}]);
        }
        view
    }
}

impl Gcp {
    pub(super) fn list_machines(
        &self,
        request: &Request,
        route: &Route,
        _world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let here = self.machines.iter().filter(|one| one.is_in(&route.zone));
        self.page(request, "machineTypeList", here.map(|one| one.view(&route.zone)).collect())
    }

    pub(super) fn get_machine(&self, route: &Route) -> Result<Answer, Box<Refused>> {
        let here = self.machines.iter().filter(|one| one.is_in(&route.zone));
        match here.into_iter().find(|one| one.name == route.name) {
            Some(machine) => Ok(Answer::json(200, &machine.view(&route.zone))),
            None => route.not_found(),
        }
    }

    pub(super) fn region(&self, route: &Route) -> Result<Answer, Box<Refused>> {
        if route.name != super::REGION {
            return route.not_found();
        }
        let used = self.cores();
        let limit = self.quota.map_or(1_000, |left| used + left);
        let quota = |metric: &str, usage: u32, limit: u32| {
            let (usage, limit) = (f64::from(usage), f64::from(limit));
            json!({"metric": metric, "limit": limit, "usage": usage})
        };
        let zones: Vec<String> = ZONES.iter().map(|zone| format!("{BASE}/zones/{zone}")).collect();
        Ok(Answer::json(
            200,
            &json!({
                "kind": "compute#region", "id": "1", "name": route.name, "description": route.name, "status": "UP",
                "zones": zones, "selfLink": format!("{BASE}/regions/{}", route.name),
                "quotas": [quota("CPUS", used, limit), quota("N2D_CPUS", 0, 500), quota("PREEMPTIBLE_CPUS", 0, 0),
                    quota("SSD_TOTAL_GB", 0, 4_096), quota("IN_USE_ADDRESSES", 0, 8)],
            }),
        ))
    }
}
