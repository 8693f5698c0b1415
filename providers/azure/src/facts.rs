//! Loads the facts that a create needs: the sizes of virtual machines that the region sells to the subscription, and the
//! image. They are loaded at first use and cached; a delete needs none of them. May call Azure.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{Arch, Confidential, Error, Market};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::{ApiCall, Catalogue, Location, MachineType, Prices};
use peerpod_provider_rest::read;
use serde_json::Value;

use crate::client::{Arm, SKUS};
use crate::config::AzureConfig;
use crate::image::AzureImageFacts;

/// Time for which facts are used. Sizes and restrictions hardly ever change.
pub(crate) const FRESH: Duration = Duration::from_secs(12 * 3600);
/// Owner of these calls, for the scheduler.
const OWNER: &str = "facts";

/// Facts about the subscription.
#[derive(Debug)]
pub(crate) struct AzureFacts {
    /// The configured image.
    pub image: Arc<AzureImageFacts>,
    pub catalogue: Catalogue,
    /// Types that Azure does not sell on the spot market.
    pub no_spot: Vec<String>,
    /// Quota families of the types.
    pub families: HashMap<String, String>,
}

/// Type as the list of SKUs describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sku {
    machine: MachineType,
    family: String,
    is_spot: bool,
    /// Zones in which the subscription may have it; `None`: not even outside of zones.
    zones: Option<HashSet<String>>,
}

impl AzureFacts {
    /// Loads all facts, independent ones at the same time. An error has all refusals.
    pub(crate) async fn load(arm: &Arm, config: &AzureConfig) -> Result<AzureFacts, Error> {
        let (skus, image) = tokio::join!(skus(arm, config), image(arm, config));
        let errors: Vec<Error> =
            [skus.as_ref().err(), image.as_ref().err()].into_iter().flatten().cloned().collect();
        if !errors.is_empty() {
            return Err(together(errors));
        }
        AzureFacts::of(skus?, Arc::new(image?), config)
    }

    fn of(
        mut skus: Vec<Sku>,
        image: Arc<AzureImageFacts>,
        config: &AzureConfig,
    ) -> Result<AzureFacts, Error> {
        let what = "look at the VM sizes";
        let is_known = |name: &&String| skus.iter().any(|sku| sku.machine.name == **name);
        let unknown: Vec<_> = config.instance_types.iter().filter(|name| !is_known(name)).cloned().collect();
        if !unknown.is_empty() {
            return Err(Error::invalid(format!(
                "{what}: {} does not have {}; correct provider.azure.instance-type and instance-types",
                config.region,
                unknown.join(", ")
            )));
        }
        if config.confidential {
            skus.retain(|sku| !sku.machine.confidential.is_empty());
            if !skus.iter().any(|sku| sku.machine.name == config.instance_type) {
                return Err(Error::invalid(format!(
                    "{what}: {} cannot be confidential; set provider.azure.instance-type to a type that can, like \
                     Standard_DC2as_v5, or disable-cvm to true",
                    config.instance_type
                )));
            }
        }
        let places = match &config.zones[..] {
            [] => vec![config.region.clone()],
            zones => zones.to_vec(),
        };
        let mut prices = Prices::default();
        for price in &config.prices {
            prices.set(&price.machine, None, price.market, price.millionths);
        }
        let sold = |sku: &Sku| {
            let mut zones = sku.zones.clone()?;
            zones.insert(config.region.clone());
            Some((sku.machine.name.clone(), zones))
        };
        let no_spot = skus.iter().filter(|sku| !sku.is_spot).map(|sku| sku.machine.name.clone());
        Ok(AzureFacts {
            image,
            no_spot: no_spot.collect(),
            families: skus.iter().map(|sku| (sku.machine.name.clone(), sku.family.clone())).collect(),
            catalogue: Catalogue {
                sold: Some(skus.iter().filter_map(sold).collect()),
                places: places.into_iter().map(|zone| Location { zone, subnet: None }).collect(),
                types: skus.into_iter().map(|sku| sku.machine).collect(),
                prices,
            },
        })
    }

    /// Returns the places and markets of types that Azure does not sell there.
    pub(crate) fn no_spot_places(&self) -> impl Iterator<Item = (Market, String, String)> {
        self.no_spot.iter().flat_map(|machine| {
            let places = self.catalogue.places.iter();
            places.map(|place| (Market::Spot, machine.clone(), place.zone.clone()))
        })
    }
}

async fn image(arm: &Arm, config: &AzureConfig) -> Result<AzureImageFacts, Error> {
    let Some(id) = &config.image else {
        return Err(Error::invalid("find the image: there is none; set provider.azure.image-id"));
    };
    let what = "look at the image";
    let image = AzureImageFacts::load(arm, id, ApiCall::new("Images_Get", OWNER, what)).await?;
    if image.arch != config.arch {
        return Err(Error::invalid(format!(
            "{what} {}: it is for {}, the pods are for {}; set provider.azure.image-id to one for these, or \
             provider.azure.arch",
            id.text(),
            image.arch,
            config.arch
        )));
    }
    if config.confidential && !image.is_confidential {
        return Err(Error::invalid(format!(
            "{what} {}: confidential VMs cannot start from it; publish it with the feature SecurityType = \
             ConfidentialVmSupported, or set provider.azure.disable-cvm to true",
            id.text()
        )));
    }
    Ok(image)
}

async fn skus(arm: &Arm, config: &AzureConfig) -> Result<Vec<Sku>, Error> {
    let path = format!("{}/providers/Microsoft.Compute/skus", arm.subscription());
    let filter = format!("location eq '{}'", config.region);
    let request = arm.get(&path, SKUS).query("$filter", &filter);
    let call = ApiCall::new("ResourceSkus_List", OWNER, "look at the VM sizes");
    Ok(arm.list(call, &request, |item| sku(item, config)).await?)
}

/// Reads a SKU if it is one of the configured types.
fn sku(item: &Value, config: &AzureConfig) -> Option<Sku> {
    read::text(item, "/resourceType").filter(|kind| kind.eq_ignore_ascii_case("virtualMachines"))?;
    let name = read::text(item, "/name")?;
    // The name of the settings, which the planner compares exactly.
    let name = config.instance_types.iter().find(|one| one.eq_ignore_ascii_case(name))?;
    let capability = |wanted: &str| {
        let all = read::list(item, "/capabilities");
        all.iter().find(|one| read::text(one, "/name") == Some(wanted))
    };
    let number = |wanted: &str| capability(wanted).and_then(|one| read::number(one, "/value"));
    let text =
        |wanted: &str| capability(wanted).and_then(|one| read::text(one, "/value")).unwrap_or_default();
    let small = |wanted: &str| number(wanted).and_then(|number| u32::try_from(number).ok());
    let confidential = match text("ConfidentialComputingType") {
        kind if kind.eq_ignore_ascii_case("SNP") => vec![Confidential::SevSnp],
        kind if kind.eq_ignore_ascii_case("TDX") => vec![Confidential::Tdx],
        _ => Vec::new(),
    };
    Some(Sku {
        machine: MachineType {
            name: name.clone(),
            vcpus: small("vCPUsAvailable").or_else(|| small("vCPUs"))?,
            memory_mib: memory_mib(text("MemoryGB"))?,
            gpus: small("GPUs").unwrap_or(0),
            gpu_model: gpu_model(name),
            archs: vec![match text("CpuArchitectureType").eq_ignore_ascii_case("Arm64") {
                true => Arch::Aarch64,
                false => Arch::X86_64,
            }],
            confidential,
            max_disks: small("MaxDataDiskCount"),
            max_nics: small("MaxNetworkInterfaces"),
        },
        family: read::text(item, "/family").unwrap_or_default().to_owned(),
        is_spot: capability("LowPriorityCapable").and_then(|one| read::flag(one, "/value")).unwrap_or(false),
        zones: zones(item, &config.region),
    })
}

/// Returns the zones of a SKU that the subscription may use; `None`: it may not use the SKU in the region.
fn zones(item: &Value, region: &str) -> Option<HashSet<String>> {
    let texts = |value: &Value, pointer: &str| -> Vec<String> {
        read::list(value, pointer).iter().filter_map(|one| one.as_str().map(str::to_owned)).collect()
    };
    let here = read::list(item, "/locationInfo").iter().find(|one| {
        read::text(one, "/location").is_some_and(|location| location.eq_ignore_ascii_case(region))
    })?;
    let mut zones: HashSet<String> = texts(here, "/zones").into_iter().collect();
    for restriction in read::list(item, "/restrictions") {
        match read::text(restriction, "/type") {
            Some("Zone") => {
                for zone in texts(restriction, "/restrictionInfo/zones") {
                    zones.remove(&zone);
                }
            }
            _ => return None,
        }
    }
    Some(zones)
}

/// Returns the memory of a text like `3.5`, in MiB.
fn memory_mib(gib: &str) -> Option<u64> {
    let mib = gib.parse::<f64>().ok()? * 1024.0;
    // A number out of this range is no size of a VM.
    (1.0..1e9).contains(&mib).then(|| mib.round() as u64)
}

/// Returns the model of a GPU from the size's name, which is the only place that has it: `Standard_NC4as_T4_v3`.
fn gpu_model(name: &str) -> Option<String> {
    let mut parts = name.split('_').skip(2);
    let part = parts.next().filter(|part| part.starts_with(|c: char| c.is_ascii_uppercase()))?;
    name.starts_with("Standard_N").then(|| part.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::tests::read as config;
    use crate::image::ImageId;

    fn item(name: &str, confidential: &str, restrictions: &Value) -> Value {
        json!({"resourceType": "virtualMachines", "name": name, "family": "standardDCASv5Family",
            "locationInfo": [{"location": "WestEurope", "zones": ["1", "2", "3"]}],
            "capabilities": [{"name": "vCPUs", "value": "4"}, {"name": "vCPUsAvailable", "value": "2"},
                {"name": "MemoryGB", "value": "3.5"}, {"name": "MaxDataDiskCount", "value": "4"},
                {"name": "MaxNetworkInterfaces", "value": "2"}, {"name": "CpuArchitectureType", "value": "x64"},
                {"name": "LowPriorityCapable", "value": "False"},
                {"name": "ConfidentialComputingType", "value": confidential}],
            "restrictions": restrictions})
    }

    fn image() -> Arc<AzureImageFacts> {
        let id = ImageId::parse("/CommunityGalleries/g/Images/i").unwrap();
        Arc::new(AzureImageFacts { id, arch: Arch::X86_64, is_specialized: true, is_confidential: true })
    }

    #[test]
    fn a_sku_gives_a_type_in_the_settings_words() {
        let config = config(&[]).unwrap();
        let zone = json!([{"type": "Zone", "restrictionInfo": {"zones": ["2"]}}]);
        let found = sku(&item("standard_dc2AS_v5", "SNP", &zone), &config).unwrap();
        let machine = &found.machine;
        assert_eq!(
            (machine.name.as_str(), machine.vcpus, machine.memory_mib),
            ("Standard_DC2as_v5", 2, 3584)
        );
        assert_eq!(machine.confidential, [Confidential::SevSnp]);
        assert_eq!((machine.max_disks, machine.max_nics, found.is_spot), (Some(4), Some(2), false));
        assert_eq!(found.zones, Some(HashSet::from(["1".to_owned(), "3".to_owned()])));
        let all = json!([{"type": "Location"}]);
        assert_eq!(sku(&item("Standard_DC2as_v5", "", &all), &config).unwrap().zones, None);
        assert_eq!(sku(&item("Standard_Other", "SNP", &all), &config), None);
        assert_eq!(sku(&json!({"resourceType": "disks", "name": "Standard_DC2as_v5"}), &config), None);
        assert_eq!(sku(&json!({}), &config), None);
    }

    #[test]
    fn a_default_type_that_cannot_be_confidential_is_refused() {
        let types = [("instance-type", "Standard_D2s_v5"), ("instance-types", "Standard_DC2as_v5")];
        let all = config(&types).unwrap();
        let skus = |config: &AzureConfig| -> Vec<Sku> {
            let pair = [("Standard_D2s_v5", ""), ("Standard_DC2as_v5", "SNP")];
            pair.iter().filter_map(|(name, kind)| sku(&item(name, kind, &json!([])), config)).collect()
        };
        let error = AzureFacts::of(skus(&all), image(), &all).unwrap_err();
        assert!(error.to_string().contains("Standard_D2s_v5 cannot be confidential"), "{error}");
        let error = AzureFacts::of(Vec::new(), image(), &all).unwrap_err();
        assert!(error.to_string().contains("does not have Standard_D2s_v5, Standard_DC2as_v5"), "{error}");
        let plain = config(&[types[0], types[1], ("disable-cvm", "true"), ("zones", "1,2")]).unwrap();
        let facts = AzureFacts::of(skus(&plain), image(), &plain).unwrap();
        assert_eq!((facts.catalogue.types.len(), facts.catalogue.places.len()), (2, 2));
        assert!(facts.catalogue.is_sold("Standard_D2s_v5", "1"));
        assert_eq!(facts.no_spot_places().count(), 4);
    }

    #[test]
    fn a_gpu_has_its_model_from_the_name() {
        assert_eq!(gpu_model("Standard_NC4as_T4_v3").as_deref(), Some("T4"));
        assert_eq!(gpu_model("Standard_NC24ads_A100_v4").as_deref(), Some("A100"));
        assert_eq!((gpu_model("Standard_NC6s_v3"), gpu_model("Standard_DC2as_v5")), (None, None));
        assert_eq!((memory_mib("8"), memory_mib("3.5"), memory_mib("x")), (Some(8192), Some(3584), None));
        assert_eq!((memory_mib("-1"), memory_mib("NaN"), memory_mib("1e30")), (None, None, None));
    }
}
