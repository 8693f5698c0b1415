//! Loads the facts that a create needs: profiles, subnets, images, dedicated hosts. They are loaded at first use and
//! cached; a delete needs none of them. May call `list_instance_profiles`, `get_subnet`, `get_image`,
//! `get_dedicated_host` and `get_dedicated_host_group`.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::future::join_all;
use peerpod_provider_api::{Arch, Confidential, Error, Market};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::{ApiCall, Catalogue, Location, MachineType, Prices};
use peerpod_provider_rest::read;
use serde_json::Value;

use crate::client::Vpc;
use crate::config::IbmCloudConfig;
use crate::ids::IbmCloudPlace;

/// Time for which facts are used. Profiles and subnets hardly ever change.
pub(crate) const FRESH: Duration = Duration::from_secs(12 * 3600);
/// Owner of these calls, for the scheduler.
const OWNER: &str = "facts";
/// Most data volumes of an instance ("Attaching a block storage volume").
const MAX_DISKS: u32 = 12;

/// Facts about the region.
#[derive(Debug)]
pub(crate) struct IbmCloudFacts {
    pub catalogue: Catalogue,
    /// Images by architecture; the first of several counts.
    pub images: Vec<(Arch, String)>,
    /// Subnets of second NICs, by zone.
    pub second_subnets: HashMap<String, String>,
    /// Profiles that IBM does not sell on the spot market.
    pub no_spot: Vec<String>,
}

/// Profile as the list describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Profile {
    machine: MachineType,
    is_spot: bool,
    /// Zones that sell it; empty: the answer does not tell.
    zones: HashSet<String>,
}

/// Something in a zone: a subnet, or a host or group.
type InZone = (String, String);

impl IbmCloudFacts {
    /// Loads all facts, independent ones at the same time. An error has all refusals.
    pub(crate) async fn load(vpc: &Vpc, config: &IbmCloudConfig) -> Result<IbmCloudFacts, Error> {
        let (profiles, subnets, second, hosts, groups, images) = tokio::join!(
            profiles(vpc, config),
            subnets(vpc, config, &config.subnets, "subnet-ids"),
            subnets(vpc, config, &config.second_subnets, "second-subnet-ids"),
            targets(vpc, ["dedicated_hosts"].as_slice(), &config.hosts),
            targets(vpc, ["dedicated_host", "groups"].as_slice(), &config.host_groups),
            images(vpc, config),
        );
        let errors = [
            profiles.as_ref().err(),
            subnets.as_ref().err(),
            second.as_ref().err(),
            hosts.as_ref().err(),
            groups.as_ref().err(),
            images.as_ref().err(),
        ];
        let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
        if !errors.is_empty() {
            return Err(together(errors));
        }
        let places = places(config, &subnets?, &hosts?, &groups?)?;
        IbmCloudFacts::of(
            profiles?,
            places,
            images?,
            second?.into_iter().map(|(id, zone)| (zone, id)).collect(),
            config,
        )
    }

    fn of(
        profiles: Vec<Profile>,
        places: Vec<Location>,
        images: Vec<(Arch, String)>,
        second_subnets: HashMap<String, String>,
        config: &IbmCloudConfig,
    ) -> Result<IbmCloudFacts, Error> {
        let what = "look at the profiles";
        let is_known = |name: &&String| profiles.iter().any(|one| one.machine.name == **name);
        let unknown: Vec<_> = config.instance_types.iter().filter(|name| !is_known(name)).cloned().collect();
        if !unknown.is_empty() {
            return Err(Error::invalid(format!(
                "{what}: {} does not have {}; correct provider.ibmcloud.instance-type and instance-types",
                config.region(),
                unknown.join(", ")
            )));
        }
        let old: Vec<&str> =
            profiles.iter().filter(|one| has_no_uefi(one)).map(|one| &*one.machine.name).collect();
        if !old.is_empty() {
            return Err(Error::invalid(format!(
                "{what}: {} is of the second generation, which has no UEFI and does not start the pod VM's image; set \
                 provider.ibmcloud.instance-type and instance-types to those of the third one, like bx3d-2x10",
                old.join(", ")
            )));
        }
        let mut prices = Prices::default();
        for price in &config.prices {
            prices.set(&price.machine, None, price.market, price.millionths);
        }
        let sold = |one: &Profile| {
            let everywhere = || config.zones.iter().cloned().collect();
            let zones = if one.zones.is_empty() { everywhere() } else { one.zones.clone() };
            (one.machine.name.clone(), zones)
        };
        Ok(IbmCloudFacts {
            images,
            second_subnets,
            no_spot: profiles.iter().filter(|one| !one.is_spot).map(|one| one.machine.name.clone()).collect(),
            catalogue: Catalogue {
                sold: Some(profiles.iter().map(sold).collect()),
                types: profiles.into_iter().map(|one| one.machine).collect(),
                places,
                prices,
            },
        })
    }

    /// Returns the image for VMs of this type.
    pub(crate) fn image(&self, machine: &str) -> Option<&str> {
        let machine = self.catalogue.types.iter().find(|one| one.name == machine)?;
        let fits = |(arch, _): &&(Arch, String)| machine.archs.contains(arch);
        self.images.iter().find(fits).map(|(_, id)| id.as_str())
    }

    /// Returns the places of profiles that IBM does not sell on the spot market.
    pub(crate) fn no_spot_places(&self) -> impl Iterator<Item = (Market, String, String)> {
        self.no_spot.iter().flat_map(|machine| {
            let zones: HashSet<&String> = self.catalogue.places.iter().map(|place| &place.zone).collect();
            zones.into_iter().map(|zone| (Market::Spot, machine.clone(), zone.clone()))
        })
    }
}

/// Whether VMs of a profile start by BIOS only: those of x86 of the second generation. No field of the API has it.
fn has_no_uefi(profile: &Profile) -> bool {
    let family = profile.machine.name.split('-').next().unwrap_or_default();
    let generation = family.chars().find(char::is_ascii_digit);
    profile.machine.archs.contains(&Arch::X86_64) && generation == Some('2')
}

/// Returns the places of VMs: each subnet, with each dedicated host and group of its zone where there are such.
fn places(
    config: &IbmCloudConfig,
    subnets: &[InZone],
    hosts: &[InZone],
    groups: &[InZone],
) -> Result<Vec<Location>, Error> {
    let mut places = Vec::new();
    for (subnet, zone) in subnets {
        let mut add = |target| {
            places.push(Location { zone: zone.clone(), subnet: Some(IbmCloudPlace::text(subnet, target)) });
        };
        let targets = hosts.iter().map(|host| (host, false)).chain(groups.iter().map(|group| (group, true)));
        targets
            .filter(|((_, elsewhere), _)| elsewhere == zone)
            .for_each(|((id, _), is_group)| add(Some((id, is_group))));
        if !config.is_dedicated() {
            add(None);
        }
    }
    let lacking: Vec<&str> = config
        .zones
        .iter()
        .filter(|zone| !subnets.iter().any(|(_, of_subnet)| of_subnet == *zone))
        .map(String::as_str)
        .collect();
    if !lacking.is_empty() {
        return Err(Error::invalid(format!(
            "look at the subnets: none is in {}; add one to provider.ibmcloud.subnet-ids, or remove the zone from zones",
            lacking.join(", ")
        )));
    }
    if places.is_empty() {
        return Err(Error::invalid(format!(
            "look at the dedicated hosts: none is in {}; correct provider.ibmcloud.dedicated-host-ids and \
             dedicated-host-group-ids",
            config.zones.join(", ")
        )));
    }
    Ok(places)
}

async fn profiles(vpc: &Vpc, config: &IbmCloudConfig) -> Result<Vec<Profile>, Error> {
    let call = ApiCall::new("list_instance_profiles", OWNER, "look at the profiles");
    let request = vpc.get(["instance", "profiles"]);
    Ok(vpc.list(call, "profiles", request, |item| profile(item, config)).await?)
}

/// Reads a profile if it is one of the configured types.
fn profile(item: &Value, config: &IbmCloudConfig) -> Option<Profile> {
    let name =
        read::text(item, "/name").filter(|name| config.instance_types.iter().any(|one| one == name))?;
    let number = |pointer: &str| read::number(item, pointer).and_then(|number| u32::try_from(number).ok());
    let has = |pointer: &str, word: &str| {
        read::list(item, pointer).iter().any(|one| one.as_str().is_some_and(|one| one == word))
    };
    let nics = "/network_attachment_count";
    let archs = [(Arch::X86_64, "amd64"), (Arch::S390x, "s390x")];
    let archs = archs.into_iter().filter(|(_, word)| has("/os_architecture/values", word));
    Some(Profile {
        machine: MachineType {
            name: name.to_owned(),
            vcpus: number("/vcpu_count/value")?,
            memory_mib: read::number(item, "/memory/value")?.checked_mul(1024)?,
            gpus: number("/gpu_count/value").unwrap_or(0),
            gpu_model: read::text(item, "/gpu_model/values/0").map(str::to_owned),
            archs: archs.map(|(arch, _)| arch).collect(),
            confidential: match has("/confidential_compute_modes/values", "tdx") {
                true => vec![Confidential::Tdx],
                false => Vec::new(),
            },
            max_disks: Some(MAX_DISKS),
            max_nics: number(&format!("{nics}/max")).or_else(|| number(&format!("{nics}/value"))),
        },
        is_spot: has("/availability_class/values", "spot"),
        zones: read::list(item, "/zones")
            .iter()
            .filter_map(|zone| read::text(zone, "/name").map(str::to_owned))
            .collect(),
    })
}

/// Looks at these subnets. Returns the id and zone of each.
async fn subnets(
    vpc: &Vpc,
    config: &IbmCloudConfig,
    wanted: &[String],
    setting: &str,
) -> Result<Vec<InZone>, Error> {
    all(wanted.iter().map(async |id| {
        let what = format!("look at the subnet {id}");
        let found = vpc.find(ApiCall::new("get_subnet", OWNER, &what), &vpc.get(["subnets", id])).await?;
        let bad = |why: String| Error::invalid(format!("{what}: {why}; correct provider.ibmcloud.{setting}"));
        let found = found.ok_or_else(|| bad("there is no such subnet in the region".to_owned()))?;
        let zone = read::text(&found, "/zone/name").unwrap_or_default();
        if !config.zones.iter().any(|one| one == zone) {
            return Err(bad(format!("it is in {zone}, which is none of zones")));
        }
        match read::text(&found, "/vpc/id") {
            Some(vpc) if vpc != config.vpc => Err(bad(format!("it is in the VPC {vpc}, not in vpc-id"))),
            _ => Ok((id.clone(), zone.to_owned())),
        }
    }))
    .await
}

/// Looks at these dedicated hosts, or groups of them. Returns the id and zone of each.
async fn targets(vpc: &Vpc, kind: &[&str], wanted: &[String]) -> Result<Vec<InZone>, Error> {
    let is_group = kind.len() > 1;
    let (action, word, setting) = match is_group {
        false => ("get_dedicated_host", "dedicated host", "dedicated-host-ids"),
        true => ("get_dedicated_host_group", "group of dedicated hosts", "dedicated-host-group-ids"),
    };
    all(wanted.iter().map(async |id| {
        let what = format!("look at the {word} {id}");
        let request = vpc.get(kind.iter().copied().chain([id.as_str()]));
        let found = vpc.find(ApiCall::new(action, OWNER, &what), &request).await?;
        let zone = found.as_ref().and_then(|found| read::text(found, "/zone/name"));
        let zone = zone.ok_or_else(|| {
            Error::invalid(format!(
                "{what}: there is none in the region; correct provider.ibmcloud.{setting}"
            ))
        })?;
        Ok((id.clone(), zone.to_owned()))
    }))
    .await
}

/// Looks at the configured images, one of which must be for the pods' architecture.
async fn images(vpc: &Vpc, config: &IbmCloudConfig) -> Result<Vec<(Arch, String)>, Error> {
    let found = all(config.images.iter().map(async |id| image(vpc, id, "look at the image").await));
    let found = found.await?;
    if !found.iter().any(|(arch, _)| *arch == config.arch) {
        return Err(Error::invalid(format!(
            "look at the images: none is for {}; set provider.ibmcloud.image-ids to one for these pods, or \
             provider.ibmcloud.arch",
            config.arch
        )));
    }
    Ok(found)
}

/// Looks at an image that a VM can start from.
pub(crate) async fn image(vpc: &Vpc, id: &str, what: &str) -> Result<(Arch, String), Error> {
    let what = format!("{what} {id}");
    let found = vpc.find(ApiCall::new("get_image", OWNER, &what), &vpc.get(["images", id])).await?;
    let bad = |why: &str| Error::invalid(format!("{what}: {why}; set image-ids to an image of this region"));
    let found = found.ok_or_else(|| bad("there is no such image that the identity may use"))?;
    match read::text(&found, "/status").unwrap_or_default() {
        "available" | "deprecated" | "partially_available" => {}
        other => return Err(bad(&format!("it is {other}, so no VM starts from it"))),
    }
    if let Some(format) = read::text(&found, "/user_data_format").filter(|format| *format != "cloud_init") {
        return Err(bad(&format!("its user-data format is {format}, not cloud_init")));
    }
    match read::text(&found, "/operating_system/architecture") {
        Some("amd64") => Ok((Arch::X86_64, id.to_owned())),
        Some("s390x") => Ok((Arch::S390x, id.to_owned())),
        other => Err(bad(&format!("its architecture is {}", other.unwrap_or("not known")))),
    }
}

/// Waits for all; an error has all failures.
async fn all<T, F>(each: impl Iterator<Item = F>) -> Result<Vec<T>, Error>
where
    F: Future<Output = Result<T, Error>>,
{
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    for one in join_all(each).await {
        match one {
            Ok(one) => found.push(one),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(found) } else { Err(together(errors)) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::tests::read as config;

    fn item(name: &str) -> Value {
        json!({"name": name, "vcpu_count": {"type": "fixed", "value": 2}, "memory": {"type": "fixed", "value": 10},
            "os_architecture": {"values": ["amd64"]}, "availability_class": {"values": ["standard"]},
            "confidential_compute_modes": {"values": ["disabled", "tdx"]}, "network_attachment_count": {"max": 5},
            "zones": [{"name": "us-south-1"}]})
    }

    fn facts(settings: &[(&str, &str)], names: &[&str]) -> Result<IbmCloudFacts, Error> {
        let config = config(settings).unwrap();
        let profiles = names.iter().filter_map(|name| profile(&item(name), &config)).collect();
        let place = Location { zone: "us-south-1".to_owned(), subnet: Some("0717-a".to_owned()) };
        IbmCloudFacts::of(
            profiles,
            vec![place],
            vec![(Arch::X86_64, "r006-i".to_owned())],
            HashMap::new(),
            &config,
        )
    }

    #[test]
    fn a_profile_gives_a_type() {
        let config = config(&[]).unwrap();
        let found = profile(&item("bx3dc-2x10"), &config).unwrap();
        let machine = &found.machine;
        assert_eq!((machine.vcpus, machine.memory_mib, machine.max_nics), (2, 10_240, Some(5)));
        assert_eq!((&machine.confidential[..], found.is_spot), (&[Confidential::Tdx][..], false));
        assert_eq!(found.zones, HashSet::from(["us-south-1".to_owned()]));
        assert_eq!(profile(&item("bx3d-4x20"), &config), None, "not configured");
        assert_eq!(profile(&json!({}), &config), None);
    }

    #[test]
    fn a_profile_without_uefi_is_refused_in_words() {
        let error = facts(&[("instance-type", "bx2-2x8")], &["bx2-2x8"]).unwrap_err();
        assert!(
            error.to_string().contains("bx2-2x8 is of the second generation, which has no UEFI"),
            "{error}"
        );
        let error = facts(&[], &[]).unwrap_err();
        assert!(error.to_string().contains("us-south does not have bx3dc-2x10"), "{error}");
        let facts = facts(&[], &["bx3dc-2x10"]).unwrap();
        assert_eq!((facts.image("bx3dc-2x10"), facts.image("other")), (Some("r006-i"), None));
        assert_eq!(facts.no_spot_places().count(), 1);
        assert!(!facts.catalogue.is_sold("bx3dc-2x10", "us-south-2"));
    }

    #[test]
    fn a_dedicated_host_is_a_place_before_its_group() {
        let dedicated = config(&[("dedicated-host-ids", "0717-h"), ("zones", "us-south-1")]).unwrap();
        let zone = |id: &str| (id.to_owned(), "us-south-1".to_owned());
        let found = places(&dedicated, &[zone("0717-a")], &[zone("0717-h")], &[zone("0717-g")]).unwrap();
        let texts: Vec<_> = found.iter().map(|place| place.subnet.clone().unwrap()).collect();
        assert_eq!(texts, ["0717-a@host/0717-h", "0717-a@hosts/0717-g"]);
        let none = places(&dedicated, &[zone("0717-a")], &[], &[]).unwrap_err();
        assert!(none.to_string().contains("dedicated-host-ids"), "{none}");
        let lacking = places(&config(&[]).unwrap(), &[zone("0717-a")], &[], &[]).unwrap_err();
        assert!(lacking.to_string().contains("none is in us-south-2"), "{lacking}");
    }
}
