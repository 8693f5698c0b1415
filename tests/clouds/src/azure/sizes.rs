//! Lists the sizes that the region sells.

use serde_json::{Value, json};

use super::REGION;

/// Size of virtual machines.
#[derive(Debug, Clone)]
pub struct Size {
    /// Name: `Standard_D2s_v5`.
    pub name: &'static str,
    /// Family, which quotas name.
    pub family: &'static str,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in GiB.
    pub memory: f64,
    /// GPUs.
    pub gpus: u32,
    /// Processor architecture: `x64`, `Arm64`.
    pub arch: &'static str,
    /// Confidential technology: `SNP`, `TDX`, or empty.
    pub confidential: &'static str,
    /// Most data disks.
    pub disks: u32,
    /// Most network interfaces.
    pub nics: u32,
    /// Whether it is sold on the spot market.
    pub spot: bool,
    /// Zones that have it.
    pub zones: Vec<&'static str>,
    /// Zones that this subscription may not use; `["*"]`: it may not use the region.
    pub restricted: Vec<&'static str>,
}

/// Returns all sizes.
pub(super) fn all() -> Vec<Size> {
    let size = |name, family, vcpus, memory| Size {
        name,
        family,
        vcpus,
        memory,
        gpus: 0,
        arch: "x64",
        confidential: "",
        disks: 4,
        nics: 2,
        spot: true,
        zones: vec!["1", "2", "3"],
        restricted: Vec::new(),
    };
    vec![
        Size { disks: 8, ..size("Standard_D2s_v5", "standardDSv5Family", 2, 8.0) },
        Size { disks: 16, ..size("Standard_D4s_v5", "standardDSv5Family", 4, 16.0) },
        Size { zones: vec!["3", "1"], ..size("Standard_D2as_v5", "standardDASv5Family", 2, 8.0) },
        Size { disks: 8, ..size("Standard_D2s_v6", "standardDSv6Family", 2, 8.0) },
        Size { arch: "Arm64", ..size("Standard_D2ps_v5", "standardDPSv5Family", 2, 8.0) },
        Size { confidential: "SNP", ..size("Standard_DC2as_v5", "standardDCASv5Family", 2, 8.0) },
        Size { confidential: "SNP", ..size("Standard_DC4as_v5", "standardDCASv5Family", 4, 16.0) },
        Size { confidential: "TDX", spot: false, ..size("Standard_DC2es_v6", "standardDCEv6Family", 2, 8.0) },
        Size {
            gpus: 1,
            zones: vec!["1"],
            ..size("Standard_NC4as_T4_v3", "Standard NCASv3_T4 Family", 4, 28.0)
        },
        Size { spot: false, restricted: vec!["2"], ..size("Standard_B2s", "standardBSFamily", 2, 4.0) },
        Size { restricted: vec!["*"], ..size("Standard_F2s_v2", "standardFSv2Family", 2, 4.0) },
    ]
}

impl Size {
    /// Returns it as the list of SKUs has it.
    pub(super) fn sku(&self) -> Value {
        let mut capabilities = vec![
            ("vCPUs", self.vcpus.to_string()),
            ("vCPUsAvailable", self.vcpus.to_string()),
            ("MemoryGB", self.memory.to_string()),
            ("MaxDataDiskCount", self.disks.to_string()),
            ("MaxNetworkInterfaces", self.nics.to_string()),
            ("CpuArchitectureType", self.arch.to_owned()),
            ("LowPriorityCapable", if self.spot { "True" } else { "False" }.to_owned()),
            ("HyperVGenerations", "V1,V2".to_owned()),
            ("AcceleratedNetworkingEnabled", "True".to_owned()),
            ("PremiumIO", "True".to_owned()),
        ];
        if self.gpus > 0 {
            capabilities.push(("GPUs", self.gpus.to_string()));
        }
        if !self.confidential.is_empty() {
            capabilities.push(("ConfidentialComputingType", self.confidential.to_owned()));
        }
        let capabilities: Vec<Value> =
            capabilities.into_iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
        json!({
            "resourceType": "virtualMachines",
            "name": self.name,
            "tier": "Standard",
            "size": self.name.trim_start_matches("Standard_"),
            "family": self.family,
            "locations": [REGION],
            "locationInfo": [{"location": REGION, "zones": self.zones, "zoneDetails": []}],
            "capabilities": capabilities,
            "restrictions": self.restrictions(),
        })
    }

    fn restrictions(&self) -> Vec<Value> {
        let reason = "NotAvailableForSubscription";
        match &self.restricted[..] {
            [] => Vec::new(),
            ["*"] => vec![json!({"type": "Location", "values": [REGION],
                "restrictionInfo": {"locations": [REGION]}, "reasonCode": reason})],
            zones => vec![json!({"type": "Zone", "values": [REGION],
                "restrictionInfo": {"locations": [REGION], "zones": zones}, "reasonCode": reason})],
        }
    }

    /// Whether this subscription may have it in the zone; empty: in the region.
    pub(super) fn is_sold(&self, zone: &str) -> bool {
        !self.restricted.iter().any(|one| *one == "*" || *one == zone)
            && (zone.is_empty() || self.zones.contains(&zone))
    }
}
