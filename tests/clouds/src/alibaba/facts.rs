//! Answers questions about images, instance types, vSwitches and sold types, which no test changes.

use serde_json::{Value, json};

use super::{Alibaba, IMAGES, OTHER_VSWITCH, Parameters, REGION, VSWITCHES, ZONES, answer, check, get, list};
use crate::fake::{Answer, Refused};

/// Image.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) id: &'static str,
    pub(super) arch: &'static str,
    pub(super) boot: &'static str,
    /// Size in GiB.
    pub(super) size: u32,
}

const ALL_IMAGES: [Image; 3] = [
    Image { id: IMAGES[0], arch: "x86_64", boot: "UEFI", size: 5 },
    Image { id: IMAGES[1], arch: "arm64", boot: "UEFI", size: 5 },
    Image { id: IMAGES[2], arch: "x86_64", boot: "BIOS", size: 30 },
];

/// Returns the image of this id.
pub(super) fn image(id: &str) -> Option<&'static Image> {
    ALL_IMAGES.iter().find(|one| one.id == id)
}

/// Instance type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machine {
    pub(super) name: &'static str,
    pub(super) vcpus: u32,
    pub(super) arch: &'static str,
    pub(super) has_tdx: bool,
    gpu: &'static str,
    /// Letters of the zones that sell it.
    zones: &'static str,
}

const MACHINES: [Machine; 6] = {
    let plain =
        Machine { name: "ecs.g7.large", vcpus: 2, arch: "X86", has_tdx: false, gpu: "", zones: "hik" };
    [
        plain,
        Machine { name: "ecs.g7.xlarge", vcpus: 4, ..plain },
        Machine { name: "ecs.g8i.xlarge", vcpus: 4, has_tdx: true, zones: "hi", ..plain },
        Machine { name: "ecs.g8i.2xlarge", vcpus: 8, has_tdx: true, zones: "hi", ..plain },
        Machine { name: "ecs.g8y.large", vcpus: 2, arch: "ARM", zones: "ik", ..plain },
        Machine { name: "ecs.gn6i-c4g1.xlarge", vcpus: 4, gpu: "NVIDIA T4", zones: "h", ..plain },
    ]
};

/// Returns the instance type of this name.
pub(super) fn machine(name: &str) -> Option<Machine> {
    MACHINES.into_iter().find(|one| one.name == name)
}

impl Machine {
    /// Whether this zone sells it.
    pub(super) fn is_in(&self, zone: &str) -> bool {
        zone.chars().last().is_some_and(|letter| self.zones.contains(letter))
    }

    fn view(self) -> Value {
        let family: Vec<&str> = self.name.split('.').take(2).collect();
        json!({"InstanceTypeId": self.name, "InstanceTypeFamily": family.join("."), "CpuCoreCount": self.vcpus,
            "MemorySize": f64::from(self.vcpus * 4), "CpuArchitecture": self.arch, "EniQuantity": 3, "DiskQuantity": 17,
            "GPUAmount": u32::from(!self.gpu.is_empty()), "GPUSpec": self.gpu, "LocalStorageCategory": "",
            "SupportedBootModes": {"SupportedBootMode": ["UEFI", "BIOS"]}, "NvmeSupport": "unsupported"})
    }
}

/// Returns the zone of a vSwitch.
pub(super) fn zone_of(vswitch: &str) -> Option<&'static str> {
    if vswitch == OTHER_VSWITCH {
        return ZONES.first().copied();
    }
    VSWITCHES.iter().zip(ZONES).find(|(id, _)| **id == vswitch).map(|(_, zone)| zone)
}

impl Alibaba {
    pub(super) fn facts(&self, action: &str, parameters: &Parameters) -> Result<Answer, Box<Refused>> {
        match action {
            "DescribeImages" => images(parameters),
            "DescribeInstanceTypes" => types(parameters),
            "DescribeAvailableResource" => available(parameters),
            _ => self.vswitches(parameters),
        }
    }

    fn vswitches(&self, parameters: &Parameters) -> Result<Answer, Box<Refused>> {
        let wanted = get(parameters, "VSwitchId");
        let all = VSWITCHES.iter().copied().chain([OTHER_VSWITCH]);
        let view = |id: &str| {
            let vpc = if id == OTHER_VSWITCH { "vpc-other" } else { "vpc-pods" };
            json!({"VSwitchId": id, "VpcId": vpc, "ZoneId": zone_of(id), "Status": "Available",
                "CidrBlock": "10.0.0.0/24", "AvailableIpAddressCount": self.free, "VSwitchName": id,
                "CreationTime": "2026-01-01T00:00:00Z"})
        };
        let found: Vec<Value> = all.filter(|id| wanted.is_empty() || *id == wanted).map(view).collect();
        answer(
            json!({"TotalCount": found.len(), "PageNumber": 1, "PageSize": 10, "VSwitches": {"VSwitch": found}}),
        )
    }
}

fn images(parameters: &Parameters) -> Result<Answer, Box<Refused>> {
    let wanted = get(parameters, "ImageId");
    let view = |one: &Image| {
        json!({"ImageId": one.id, "ImageName": "podvm-1", "Architecture": one.arch, "BootMode": one.boot,
            "Size": one.size, "Status": "Available", "OSType": "linux", "Platform": "Others Linux", "ImageOwnerAlias": "self",
            "Features": {"ImdsSupport": "v2", "NvmeSupport": "supported"}})
    };
    let found: Vec<Value> =
        ALL_IMAGES.iter().filter(|one| wanted.is_empty() || one.id == wanted).map(view).collect();
    answer(
        json!({"TotalCount": found.len(), "PageNumber": 1, "PageSize": 10, "RegionId": REGION, "Images": {"Image": found}}),
    )
}

fn types(parameters: &Parameters) -> Result<Answer, Box<Refused>> {
    let wanted = list(parameters, "InstanceTypes");
    if wanted.len() > 10 {
        return check::invalid("InstanceTypes", "of more than 10");
    }
    let is_wanted = |one: &Machine| wanted.is_empty() || wanted.contains(&one.name);
    let found: Vec<Value> = MACHINES.into_iter().filter(is_wanted).map(Machine::view).collect();
    answer(json!({"InstanceTypes": {"InstanceType": found}, "NextToken": ""}))
}

fn available(parameters: &Parameters) -> Result<Answer, Box<Refused>> {
    if get(parameters, "DestinationResource") != "InstanceType" {
        return check::invalid("DestinationResource", get(parameters, "DestinationResource"));
    }
    let zones: Vec<Value> = ZONES
        .iter()
        .map(|zone| {
            let sold: Vec<Value> = MACHINES
                .iter()
                .filter(|one| one.is_in(zone))
                .map(|one| json!({"Value": one.name, "Status": "Available", "StatusCategory": "WithStock"}))
                .collect();
            json!({"ZoneId": zone, "RegionId": REGION, "Status": "Available", "StatusCategory": "WithStock",
                "AvailableResources": {"AvailableResource": [{"Type": "InstanceType",
                    "SupportedResources": {"SupportedResource": sold}}]}})
        })
        .collect();
    answer(json!({"AvailableZones": {"AvailableZone": zones}}))
}
