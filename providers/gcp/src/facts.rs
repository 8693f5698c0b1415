//! Loads the facts about the project that a create needs: image, machine types, network. They are loaded at first use
//! and cached; a delete needs none of them. May call `get` and `list` of images, machineTypes, networks and subnetworks.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use peerpod_provider_api::{Arch, Confidential, Error};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::{ApiCall, Catalogue, Location, MachineType, Prices};
use peerpod_provider_rest::read;
use serde_json::Value;

use crate::client::Compute;
use crate::config::{GcpConfig, GcpNic};
use crate::links::{self, GcpImage};

/// Time for which facts are used. Types hardly ever change; a newer image of a family may have been published.
pub(crate) const FRESH: Duration = Duration::from_secs(12 * 3600);
/// Owner of these calls, for the scheduler.
const OWNER: &str = "facts";
/// Most disks of a confidential VM ("Confidential VM supported configurations").
const MAX_CONFIDENTIAL_DISKS: u32 = 40;
/// Most NICs of a VM.
const MAX_NICS: u32 = 8;

/// Facts about the project.
#[derive(Debug)]
pub(crate) struct GcpFacts {
    pub image: GcpImageFacts,
    pub catalogue: Catalogue,
    /// Networks of the VMs, for people.
    pub networks: Vec<String>,
}

/// An image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GcpImageFacts {
    /// Path of the image itself, also where a family was asked for.
    pub path: String,
    pub disk_gib: u32,
    /// `None`: the image does not name its architecture.
    pub arch: Option<Arch>,
    /// What its system can do, like `GVNIC` and `SEV_SNP_CAPABLE`.
    pub features: Vec<String>,
}

impl GcpImageFacts {
    /// Whether the image's system has this feature.
    pub(crate) fn can(&self, feature: &str) -> bool {
        self.features.iter().any(|one| one == feature)
    }
}

impl GcpFacts {
    /// Loads all facts, independent ones at the same time. An error has all refusals: every missing right and every
    /// wrong setting.
    pub(crate) async fn load(compute: &Compute, config: &GcpConfig) -> Result<GcpFacts, Error> {
        let nics: Vec<&GcpNic> = [&config.nic].into_iter().chain(&config.second_nic).collect();
        let (image, types, networks) = tokio::join!(
            configured_image(compute, config),
            types(compute, config),
            join_all(nics.into_iter().map(|nic| network(compute, config, nic)))
        );
        let networks: Result<Vec<String>, Error> = match networks.iter().any(Result::is_err) {
            false => Ok(networks.into_iter().flatten().collect()),
            true => Err(together(networks.into_iter().filter_map(Result::err).collect())),
        };
        let errors = [image.as_ref().err(), types.as_ref().err(), networks.as_ref().err()];
        let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
        if !errors.is_empty() {
            return Err(together(errors));
        }
        let (types, sold) = types?;
        let places = config.zones.iter().map(|zone| Location { zone: zone.clone(), subnet: None });
        let mut prices = Prices::default();
        for one in &config.prices {
            prices.set(&one.machine, None, one.market, one.millionths);
        }
        let catalogue = Catalogue { types, places: places.collect(), sold: Some(sold), prices };
        Ok(GcpFacts { image: image?, catalogue, networks: networks? })
    }
}

async fn configured_image(compute: &Compute, config: &GcpConfig) -> Result<GcpImageFacts, Error> {
    let image = config.image.as_ref();
    let image = image.ok_or_else(|| Error::invalid("there is no image; set provider.gcp.image"))?;
    let facts = image_facts(compute, image, "look at the image").await?;
    check_arch(
        &facts,
        config.arch,
        "look at the image",
        "set provider.gcp.image to one for these, or provider.gcp.arch",
    )?;
    Ok(facts)
}

/// Refuses an image of another architecture than that of the pods.
pub(crate) fn check_arch(image: &GcpImageFacts, arch: Arch, what: &str, remedy: &str) -> Result<(), Error> {
    match image.arch.filter(|of_image| *of_image != arch) {
        Some(other) => Err(Error::invalid(format!(
            "{what}: {} is for {other}, the pods are for {arch}; {remedy}",
            image.path
        ))),
        None => Ok(()),
    }
}

/// Looks at an image, or at the newest of a family. Fails if there is none.
pub(crate) async fn image_facts(
    compute: &Compute,
    image: &GcpImage,
    what: &str,
) -> Result<GcpImageFacts, Error> {
    let what = format!("{what} {}", image.name);
    let action = if image.is_family { "images.getFromFamily" } else { "images.get" };
    let body = compute.get(ApiCall::new(action, OWNER, &what), &image.path(), &[]).await?;
    let name = read::text(&body, "/name").filter(|name| links::is_name(name));
    let name =
        name.ok_or_else(|| Error::transient(format!("{what}: the answer is no image; it is tried again")))?;
    match read::text(&body, "/status") {
        Some("READY") | None => {}
        Some(other) => {
            return Err(Error::invalid(format!(
                "{what}: it is {other}, not READY; wait until it is, or make it again"
            )));
        }
    }
    Ok(GcpImageFacts {
        path: GcpImage { project: image.project.clone(), is_family: false, name: name.to_owned() }.path(),
        disk_gib: read::number(&body, "/diskSizeGb").and_then(|size| u32::try_from(size).ok()).unwrap_or(0),
        arch: read::text(&body, "/architecture").and_then(arch),
        features: read::list(&body, "/guestOsFeatures")
            .iter()
            .filter_map(|feature| read::text(feature, "/type"))
            .map(str::to_owned)
            .collect(),
    })
}

fn arch(word: &str) -> Option<Arch> {
    match word {
        "X86_64" => Some(Arch::X86_64),
        "ARM64" => Some(Arch::Aarch64),
        _ => None,
    }
}

/// Checks that a NIC's network exists, and that it needs no further setting. Returns it for people.
async fn network(compute: &Compute, config: &GcpConfig, nic: &GcpNic) -> Result<String, Error> {
    if let Some(subnetwork) = &nic.subnetwork {
        let what = format!("look at the subnetwork {}", links::last(subnetwork));
        let body = compute.get(ApiCall::new("subnetworks.get", OWNER, &what), subnetwork, &[]).await?;
        let own = read::text(&body, "/network").unwrap_or_default();
        if let Some(other) =
            nic.network.as_ref().filter(|network| !own.is_empty() && !own.ends_with(*network))
        {
            return Err(Error::invalid(format!(
                "{what}: it is in the network {}, not in {}; correct provider.gcp.network or subnetwork",
                links::last(own),
                links::last(other)
            )));
        }
        let range = read::text(&body, "/ipCidrRange").unwrap_or("no range");
        return Ok(format!("subnetwork {} ({range})", links::last(subnetwork)));
    }
    let path = nic.network.as_deref().unwrap_or_default();
    let what = format!("look at the network {}", links::last(path));
    let body = compute.get(ApiCall::new("networks.get", OWNER, &what), path, &[]).await?;
    if read::flag(&body, "/autoCreateSubnetworks") == Some(false) {
        let region = config.region().unwrap_or("the region");
        return Err(Error::invalid(format!(
            "{what}: it does not make its own subnetworks; set provider.gcp.subnetwork to one in {region}"
        )));
    }
    Ok(format!("network {}", links::last(path)))
}

type Types = (Vec<MachineType>, HashMap<String, HashSet<String>>);

/// Returns the allowed machine types, and the zones that have each.
async fn types(compute: &Compute, config: &GcpConfig) -> Result<Types, Error> {
    let each = try_join_all(config.zones.iter().map(|zone| types_in(compute, config, zone))).await?;
    let (mut types, mut sold): (Vec<MachineType>, HashMap<String, HashSet<String>>) = Default::default();
    for (zone, found) in config.zones.iter().zip(each) {
        for machine in found {
            sold.entry(machine.name.clone()).or_default().insert(zone.clone());
            if !types.iter().any(|known| known.name == machine.name) {
                types.push(machine);
            }
        }
    }
    let unknown: Vec<&str> =
        config.instance_types.iter().map(String::as_str).filter(|name| !sold.contains_key(*name)).collect();
    if !unknown.is_empty() {
        return Err(Error::invalid(format!(
            "look at the machine types: {} do not have {}; correct provider.gcp.instance-type, instance-types or zones",
            config.zones.join(", "),
            unknown.join(", ")
        )));
    }
    Ok((types, sold))
}

async fn types_in(compute: &Compute, config: &GcpConfig, zone: &str) -> Result<Vec<MachineType>, Error> {
    let what = format!("look at the machine types of {zone}");
    let names: Vec<String> =
        config.instance_types.iter().map(|name| format!("(name = \"{name}\")")).collect();
    let filter = names.join(" OR ");
    let path = format!("projects/{}/zones/{zone}/machineTypes", config.project);
    let mut types = Vec::new();
    let call = ApiCall::new("machineTypes.list", OWNER, &what);
    compute
        .pages(call, &path, &[("filter", &filter)], |page| {
            types.extend(read::list(page, "/items").iter().filter_map(machine));
            Ok(())
        })
        .await?;
    types.retain(|machine| config.instance_types.contains(&machine.name));
    Ok(types)
}

fn machine(body: &Value) -> Option<MachineType> {
    let name = read::text(body, "/name")?;
    let number = |pointer| read::number(body, pointer).and_then(|number| u32::try_from(number).ok());
    let vcpus = number("/guestCpus")?;
    let gpus = read::list(body, "/accelerators");
    let count = |gpu: &Value| read::number(gpu, "/guestAcceleratorCount").and_then(|n| u32::try_from(n).ok());
    let confidential = technologies(name);
    let most = number("/maximumPersistentDisks").map(|most| match confidential.is_empty() {
        true => most,
        false => most.min(MAX_CONFIDENTIAL_DISKS),
    });
    Some(MachineType {
        name: name.to_owned(),
        vcpus,
        memory_mib: read::number(body, "/memoryMb")?,
        gpus: gpus.iter().filter_map(count).fold(0, u32::saturating_add),
        gpu_model: gpus.iter().find_map(|gpu| read::text(gpu, "/guestAcceleratorType")).map(str::to_owned),
        // Types of earlier generations do not name theirs.
        archs: vec![read::text(body, "/architecture").and_then(arch).unwrap_or(Arch::X86_64)],
        confidential,
        // The boot disk is one of them.
        max_disks: most.map(|most| most.saturating_sub(1)),
        // One for each vCPU, at least two ("Multiple network interfaces").
        max_nics: Some(vcpus.clamp(2, MAX_NICS)),
    })
}

/// Returns the technologies of a machine type by its family, because the API does not name them ("Confidential VM
/// supported configurations").
fn technologies(name: &str) -> Vec<Confidential> {
    match links::family(name) {
        "n2d" => vec![Confidential::Sev, Confidential::SevSnp],
        "c2d" | "c3d" | "c4d" => vec![Confidential::Sev],
        "c3" if name.starts_with("c3-standard-") && !name.ends_with("-lssd") => vec![Confidential::Tdx],
        "a3" if name == "a3-highgpu-1g" => vec![Confidential::Tdx],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_machine_type_is_read_as_the_api_shows_it() {
        let seen = machine(&json!({"name": "n2d-standard-2", "guestCpus": 2, "memoryMb": 8192,
            "maximumPersistentDisks": 128, "architecture": "X86_64"}));
        let seen = seen.unwrap();
        assert_eq!(
            (seen.vcpus, seen.memory_mib, seen.max_disks, seen.max_nics),
            (2, 8192, Some(39), Some(2))
        );
        assert_eq!(seen.confidential, [Confidential::Sev, Confidential::SevSnp]);
        let gpu = machine(&json!({"name": "g2-standard-48", "guestCpus": 48, "memoryMb": 196_608,
            "accelerators": [{"guestAcceleratorType": "nvidia-l4", "guestAcceleratorCount": 4}]}));
        let gpu = gpu.unwrap();
        assert_eq!((gpu.gpus, gpu.gpu_model.as_deref(), gpu.max_nics), (4, Some("nvidia-l4"), Some(8)));
        assert!(gpu.confidential.is_empty() && gpu.max_disks.is_none());
        let arm = machine(
            &json!({"name": "c4a-standard-1", "guestCpus": 1, "memoryMb": 4096, "architecture": "ARM64"}),
        );
        assert_eq!(arm.unwrap().archs, [Arch::Aarch64]);
        assert_eq!(machine(&json!({"name": "x", "guestCpus": -1, "memoryMb": 1})), None);
        assert_eq!(machine(&json!("x")), None);
    }

    #[test]
    fn the_family_decides_on_the_technology() {
        for (name, expected) in [
            ("n2d-highmem-8", 2),
            ("c3d-standard-4", 1),
            ("c3-standard-4", 1),
            ("c3-standard-4-lssd", 0),
            ("c3-highmem-4", 0),
            ("e2-medium", 0),
            ("n2-standard-2", 0),
        ] {
            assert_eq!(technologies(name).len(), expected, "{name}");
        }
    }
}
