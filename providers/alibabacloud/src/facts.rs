//! Loads the facts about the account that a create needs: image, instance types, vSwitches. They are loaded at first use
//! and cached; a delete needs none of them. May call DescribeImages, DescribeInstanceTypes, DescribeAvailableResource and
//! DescribeVSwitches.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use peerpod_provider_api::{Arch, Confidential, Error};
use peerpod_provider_cloud::refusal::{clip, together};
use peerpod_provider_cloud::{ApiCall, Catalogue, Location, MachineType, Prices};
use peerpod_provider_rest::read;
use serde_json::Value;

use crate::client::{Ecs, Parameters};
use crate::config::AlibabaCloudConfig;

/// Time for which facts are used. Types and zones hardly ever change.
pub(crate) const FRESH: Duration = Duration::from_secs(12 * 3600);
/// Owner of these calls, for the scheduler.
const OWNER: &str = "facts";
/// Most instance types of one call.
const MOST_TYPES: usize = 10;

/// Facts about the account.
#[derive(Debug)]
pub(crate) struct AlibabaCloudFacts {
    pub image: AlibabaCloudImageFacts,
    pub catalogue: Catalogue,
    pub vswitches: Vec<VSwitch>,
    /// vSwitches of second NICs.
    pub second: Vec<VSwitch>,
}

/// An image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AlibabaCloudImageFacts {
    pub id: String,
    pub size_gib: u32,
    /// `None`: the image does not name its architecture.
    pub arch: Option<Arch>,
    /// Whether its VMs start by UEFI.
    pub is_uefi: bool,
}

/// A vSwitch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VSwitch {
    pub id: String,
    pub zone: String,
    pub vpc: String,
    /// Number of free addresses.
    pub free: u64,
}

impl AlibabaCloudFacts {
    /// Loads all facts, independent ones at the same time. An error has all refusals: every missing right and every
    /// wrong setting.
    pub(crate) async fn load(ecs: &Ecs, config: &AlibabaCloudConfig) -> Result<AlibabaCloudFacts, Error> {
        let (image, types, sold, vswitches, second) = tokio::join!(
            configured_image(ecs, config),
            types(ecs, config),
            sold(ecs, config),
            vswitches(ecs, &config.vswitch_ids),
            vswitches(ecs, &config.second_vswitch_ids)
        );
        let errors = [
            image.as_ref().err(),
            types.as_ref().err(),
            sold.as_ref().err(),
            vswitches.as_ref().err(),
            second.as_ref().err(),
        ];
        let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
        if !errors.is_empty() {
            return Err(together(errors));
        }
        let (vswitches, second) = (vswitches?, second?);
        one_vpc(&vswitches, &second)?;
        let places =
            vswitches.iter().map(|one| Location { zone: one.zone.clone(), subnet: Some(one.id.clone()) });
        let mut prices = Prices::default();
        for one in &config.prices {
            prices.set(&one.machine, None, one.market, one.millionths);
        }
        let catalogue = Catalogue { types: types?, places: places.collect(), sold: Some(sold?), prices };
        Ok(AlibabaCloudFacts { image: image?, catalogue, vswitches, second })
    }
}

async fn configured_image(ecs: &Ecs, config: &AlibabaCloudConfig) -> Result<AlibabaCloudImageFacts, Error> {
    let image = config.image.as_ref();
    let image =
        image.ok_or_else(|| Error::invalid("there is no image; set provider.alibabacloud.image-id"))?;
    let remedy = "set provider.alibabacloud.image-id to one for these, or provider.alibabacloud.arch";
    image_facts(ecs, image, config.arch, ("look at the image", remedy)).await
}

/// Looks at an image. Fails if there is none, or if it is for another architecture than the pods.
pub(crate) async fn image_facts(
    ecs: &Ecs,
    id: &str,
    arch: Arch,
    (what, remedy): (&str, &str),
) -> Result<AlibabaCloudImageFacts, Error> {
    let what = format!("{what} {id}");
    let asked = Parameters::default()
        .with("ImageId", id)
        .with("Status", "Creating,Waiting,Available,UnAvailable,CreateFailed,Deprecated");
    let body = ecs.ask(ApiCall::new("DescribeImages", OWNER, &what), asked).await?;
    let found = read::list(&body, "/Images/Image").iter().find(|one| read::text(one, "/ImageId") == Some(id));
    let found = found.ok_or_else(|| {
        Error::invalid(format!(
            "{what}: there is none; set image-id to an image of this region that is shared with the account"
        ))
    })?;
    if let Some(other) = read::text(found, "/Status").filter(|state| *state != "Available") {
        return Err(Error::invalid(format!(
            "{what}: it is {}, not Available; wait until it is, or make it again",
            clip(other)
        )));
    }
    let facts = AlibabaCloudImageFacts {
        id: id.to_owned(),
        size_gib: read::number(found, "/Size").and_then(|size| u32::try_from(size).ok()).unwrap_or(0),
        arch: read::text(found, "/Architecture").and_then(architecture),
        is_uefi: read::text(found, "/BootMode").is_some_and(|mode| mode.starts_with("UEFI")),
    };
    match facts.arch.filter(|of_image| *of_image != arch) {
        Some(other) => {
            Err(Error::invalid(format!("{what}: it is for {other}, the pods are for {arch}; {remedy}")))
        }
        None => Ok(facts),
    }
}

/// Returns an architecture by the words of images and of instance types.
fn architecture(word: &str) -> Option<Arch> {
    match word {
        "x86_64" | "X86" => Some(Arch::X86_64),
        "arm64" | "ARM" => Some(Arch::Aarch64),
        _ => None,
    }
}

/// Looks at these vSwitches, in their order.
async fn vswitches(ecs: &Ecs, ids: &[String]) -> Result<Vec<VSwitch>, Error> {
    let each = join_all(ids.iter().map(|id| vswitch(ecs, id))).await;
    if each.iter().any(Result::is_err) {
        return Err(together(each.into_iter().filter_map(Result::err).collect()));
    }
    Ok(each.into_iter().flatten().collect())
}

async fn vswitch(ecs: &Ecs, id: &str) -> Result<VSwitch, Error> {
    let what = format!("look at the vSwitch {id}");
    let asked = Parameters::default().with("VSwitchId", id);
    let body = ecs.vswitches(ApiCall::new("DescribeVSwitches", OWNER, &what), asked).await?;
    let mut found = read::list(&body, "/VSwitches/VSwitch").iter();
    let found = found.find(|one| read::text(one, "/VSwitchId") == Some(id)).ok_or_else(|| {
        Error::invalid(format!(
            "{what}: there is none in this region; correct vswitch-ids or second-vswitch-ids"
        ))
    })?;
    let text = |pointer| read::text(found, pointer).unwrap_or_default().to_owned();
    Ok(VSwitch {
        id: id.to_owned(),
        zone: text("/ZoneId"),
        vpc: text("/VpcId"),
        free: read::number(found, "/AvailableIpAddressCount").unwrap_or(u64::MAX),
    })
}

/// Refuses vSwitches of several VPCs: a VM is in one.
fn one_vpc(vswitches: &[VSwitch], second: &[VSwitch]) -> Result<(), Error> {
    let Some(first) = vswitches.first() else { return Ok(()) };
    match vswitches.iter().chain(second).find(|one| one.vpc != first.vpc) {
        Some(other) => Err(Error::invalid(format!(
            "look at the vSwitches: {} is in {} and {} in {}; give those of one VPC",
            first.id, first.vpc, other.id, other.vpc
        ))),
        None => Ok(()),
    }
}

/// Returns the allowed instance types.
async fn types(ecs: &Ecs, config: &AlibabaCloudConfig) -> Result<Vec<MachineType>, Error> {
    let what = "look at the instance types";
    let each = try_join_all(config.instance_types.chunks(MOST_TYPES).map(|names| async move {
        let asked = Parameters::default().list("InstanceTypes", names);
        ecs.ask(ApiCall::new("DescribeInstanceTypes", OWNER, what), asked).await
    }));
    let each = each.await?;
    let found = each.iter().flat_map(|body| read::list(body, "/InstanceTypes/InstanceType"));
    let types: Vec<MachineType> =
        found.filter_map(machine).filter(|one| config.instance_types.contains(&one.name)).collect();
    let is_unknown = |name: &&String| types.iter().all(|one| one.name != **name);
    let unknown: Vec<&str> = config.instance_types.iter().filter(is_unknown).map(String::as_str).collect();
    if !unknown.is_empty() {
        return Err(Error::invalid(format!(
            "{what}: Alibaba Cloud does not have {}; correct provider.alibabacloud.instance-type or instance-types",
            unknown.join(", ")
        )));
    }
    Ok(types)
}

fn machine(body: &Value) -> Option<MachineType> {
    let name = read::text(body, "/InstanceTypeId")?;
    let number = |pointer| read::number(body, pointer).and_then(|number| u32::try_from(number).ok());
    Some(MachineType {
        name: name.to_owned(),
        vcpus: number("/CpuCoreCount")?,
        memory_mib: mebibytes(body.pointer("/MemorySize")?.as_f64()?)?,
        gpus: number("/GPUAmount").unwrap_or(0),
        gpu_model: read::text(body, "/GPUSpec").map(str::to_owned),
        archs: vec![read::text(body, "/CpuArchitecture").and_then(architecture).unwrap_or(Arch::X86_64)],
        confidential: technologies(name),
        // The system disk is one of them.
        max_disks: number("/DiskQuantity").map(|most| most.saturating_sub(1)),
        max_nics: number("/EniQuantity"),
    })
}

/// Returns a size in MiB. The API has it in GiB, with a fraction for the smallest types.
fn mebibytes(gibibytes: f64) -> Option<u64> {
    let whole = (gibibytes * 1024.0).floor();
    // As a text: it is a whole number.
    (whole >= 0.0).then(|| format!("{whole:.0}").parse().ok()).flatten()
}

/// Returns the technologies of a type by its family, because the API does not name them ("Build a TDX confidential
/// computing environment").
fn technologies(name: &str) -> Vec<Confidential> {
    match name.split('.').nth(1) {
        Some("g8i" | "c8i" | "r8i") => vec![Confidential::Tdx],
        _ => Vec::new(),
    }
}

/// Returns the zones that sell each allowed type.
async fn sold(ecs: &Ecs, config: &AlibabaCloudConfig) -> Result<HashMap<String, HashSet<String>>, Error> {
    let what = "look at the zones of the instance types";
    let asked = Parameters::default()
        .with("DestinationResource", "InstanceType")
        .with("InstanceChargeType", "PostPaid")
        .with("IoOptimized", "optimized");
    let body = ecs.ask(ApiCall::new("DescribeAvailableResource", OWNER, what), asked).await?;
    let mut sold: HashMap<String, HashSet<String>> = HashMap::new();
    for zone in read::list(&body, "/AvailableZones/AvailableZone") {
        let Some(name) = read::text(zone, "/ZoneId") else { continue };
        let resources = read::list(zone, "/AvailableResources/AvailableResource").iter();
        for one in resources.flat_map(|one| read::list(one, "/SupportedResources/SupportedResource")) {
            // A type without stock for now may have some later; the create finds out.
            let is_sold = read::text(one, "/StatusCategory") != Some("ClosedWithoutStock");
            let machine = read::text(one, "/Value")
                .filter(|machine| config.instance_types.iter().any(|t| t == machine));
            if let Some(machine) = machine.filter(|_| is_sold) {
                sold.entry(machine.to_owned()).or_default().insert(name.to_owned());
            }
        }
    }
    Ok(sold)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_instance_type_is_read_as_the_api_shows_it() {
        let seen =
            machine(&json!({"InstanceTypeId": "ecs.g8i.xlarge", "CpuCoreCount": 4, "MemorySize": 16.0,
            "CpuArchitecture": "X86", "EniQuantity": 4, "DiskQuantity": 17, "GPUAmount": 0, "GPUSpec": ""}));
        let seen = seen.unwrap();
        assert_eq!(
            (seen.vcpus, seen.memory_mib, seen.max_disks, seen.max_nics),
            (4, 16384, Some(16), Some(4))
        );
        assert_eq!((seen.confidential, seen.gpu_model), (vec![Confidential::Tdx], None));
        let small =
            machine(&json!({"InstanceTypeId": "ecs.t6-c1m1.small", "CpuCoreCount": 1, "MemorySize": 0.5,
            "CpuArchitecture": "ARM", "GPUAmount": 1, "GPUSpec": "NVIDIA T4"}));
        let small = small.unwrap();
        assert_eq!((small.memory_mib, small.gpus, &small.archs[..]), (512, 1, &[Arch::Aarch64][..]));
        assert!(small.confidential.is_empty() && small.max_disks.is_none());
        for odd in [json!("x"), json!({"InstanceTypeId": "x", "CpuCoreCount": 1, "MemorySize": -1})] {
            assert_eq!(machine(&odd), None, "{odd}");
        }
    }

    #[test]
    fn vswitches_of_two_vpcs_are_refused() {
        let vswitch =
            |id: &str, vpc: &str| VSwitch { id: id.into(), zone: "z".into(), vpc: vpc.into(), free: 9 };
        one_vpc(&[], &[vswitch("c", "v2")]).unwrap();
        one_vpc(&[vswitch("a", "v1")], &[vswitch("b", "v1")]).unwrap();
        let error = one_vpc(&[vswitch("a", "v1")], &[vswitch("b", "v2")]).unwrap_err();
        assert!(error.to_string().contains("a is in v1 and b in v2"), "{error}");
    }
}
