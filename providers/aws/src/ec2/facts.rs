//! Loads the facts about the account that a create needs: network, image, types. They are loaded at first use and
//! cached; a delete needs none of them. May call EC2's Describe* and the node's metadata service.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use aws_sdk_ec2::types::{
    ArchitectureType, BootModeValues, Filter, ImageState, InstanceTypeInfo, LocationType,
    SupportedAdditionalProcessorFeature,
};
use peerpod_provider_api::{Arch, Confidential, Error};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::{Catalogue, Location, MachineType, until};
use tokio::time::Instant;

use crate::config::{AwsConfig, AwsImage};
use crate::ec2::client::{self, Ec2};
use crate::ec2::prices;
use crate::ec2::shape::AwsImageFacts;

/// Time for which facts are used. Types and zones hardly ever change; a newer image may have been published.
pub(crate) const FRESH: Duration = Duration::from_secs(12 * 3600);
/// Longest wait for the metadata service.
const METADATA: Duration = Duration::from_secs(5);
/// Owner of these calls, for the scheduler.
const OWNER: &str = "facts";

/// Facts about the account.
#[derive(Debug)]
pub(crate) struct AwsFacts {
    /// The configured image; `None` when the administrator's own launch template has one.
    pub image: Option<AwsImageFacts>,
    pub security_groups: Vec<String>,
    /// The subnets by id, with their zones and free addresses.
    pub subnets: Vec<Subnet>,
    /// Account that owns the network.
    pub account: String,
    pub catalogue: Catalogue,
    /// Error of the price lookup, if it failed. Only the order of offerings depends on prices.
    pub no_prices: Option<Error>,
}

/// A subnet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Subnet {
    pub id: String,
    pub zone: String,
    pub free: i32,
}

impl AwsFacts {
    /// Loads all facts, independent ones at the same time. An error has all refusals: every missing permission and every
    /// wrong setting.
    pub(crate) async fn load(ec2: &Ec2, config: &AwsConfig) -> Result<AwsFacts, Error> {
        let (network, image, types, sold, (prices, no_prices)) = tokio::join!(
            network(ec2, config),
            image(ec2, config),
            types(ec2, config),
            sold(ec2, config),
            prices::load(ec2, config)
        );
        // All errors in one, so that the administrator can fix everything at once.
        let errors =
            [network.as_ref().err(), image.as_ref().err(), types.as_ref().err(), sold.as_ref().err()];
        let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
        if !errors.is_empty() {
            return Err(together(errors));
        }
        let (network, image, types, sold) = (network?, image?, types?, sold?);
        let places = network
            .subnets
            .iter()
            .map(|subnet| Location { zone: subnet.zone.clone(), subnet: Some(subnet.id.clone()) });
        let catalogue = Catalogue { types, places: places.collect(), sold: Some(sold), prices };
        Ok(AwsFacts {
            image,
            security_groups: network.security_groups,
            subnets: network.subnets,
            account: network.account,
            catalogue,
            no_prices,
        })
    }
}

struct Network {
    subnets: Vec<Subnet>,
    security_groups: Vec<String>,
    account: String,
}

async fn network(ec2: &Ec2, config: &AwsConfig) -> Result<Network, Error> {
    let mut ids = config.subnet_ids.clone();
    let mut security_groups = config.security_group_ids.clone();
    let groups_matter = config.launch_template.is_none();
    if ids.is_empty() || (security_groups.is_empty() && groups_matter) {
        let own = own_network().await?;
        if ids.is_empty() {
            ids = vec![own.0];
        }
        if security_groups.is_empty() && groups_matter {
            security_groups = own.1;
        }
    }
    let (subnets, account) = subnets(ec2, &ids).await?;
    Ok(Network { subnets, security_groups, account })
}

/// Returns these subnets and the account that owns them. Fails if one of them does not exist.
pub(crate) async fn subnets(ec2: &Ec2, ids: &[String]) -> Result<(Vec<Subnet>, String), Error> {
    let what = "look at the subnets";
    let ask = ec2.client.describe_subnets().set_subnet_ids(Some(ids.to_vec()));
    let found = ec2.call("DescribeSubnets", OWNER, what, until(), || ask.clone().send()).await?;
    let mut account = String::new();
    let mut subnets = Vec::new();
    for subnet in found.subnets.unwrap_or_default() {
        account = subnet.owner_id.unwrap_or_default();
        if let (Some(id), Some(zone)) = (subnet.subnet_id, subnet.availability_zone) {
            subnets.push(Subnet { id, zone, free: subnet.available_ip_address_count.unwrap_or(0) });
        }
    }
    if subnets.len() < ids.len() {
        return Err(Error::invalid(format!(
            "{what}: EC2 knows {} of {} subnets ({}); correct provider.aws.subnet-ids",
            subnets.len(),
            ids.len(),
            ids.join(", ")
        )));
    }
    Ok((subnets, account))
}

/// Returns the node's own subnet and security groups.
async fn own_network() -> Result<(String, Vec<String>), Error> {
    let ask = async {
        let provider =
            aws_config::provider_config::ProviderConfig::without_region().with_http_client(client::http());
        let metadata = aws_config::imds::Client::builder().configure(&provider).build();
        let mac = metadata.get("/latest/meta-data/mac").await?;
        let nic = format!("/latest/meta-data/network/interfaces/macs/{}", mac.as_ref().trim());
        let subnet = metadata.get(format!("{nic}/subnet-id")).await?;
        let groups = metadata.get(format!("{nic}/security-group-ids")).await?;
        let groups =
            groups.as_ref().lines().map(|group| group.trim().to_owned()).filter(|group| !group.is_empty());
        Ok::<_, aws_config::imds::client::error::ImdsError>((
            subnet.as_ref().trim().to_owned(),
            groups.collect(),
        ))
    };
    let why = match tokio::time::timeout(METADATA, ask).await {
        Ok(Ok(own)) => return Ok(own),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {METADATA:?}"),
    };
    Err(Error::invalid(format!(
        "find the node's own subnet and security groups in its metadata service: {why}; set provider.aws.subnet-ids and \
         provider.aws.security-group-ids, or let pods of the node reach the service (hop limit 2)"
    )))
}

async fn image(ec2: &Ec2, config: &AwsConfig) -> Result<Option<AwsImageFacts>, Error> {
    let image = match &config.image {
        AwsImage::OfTemplate => return Ok(None),
        AwsImage::Id(id) => {
            let image = by_id(ec2, id, "look at the image", until()).await?;
            if image.arch != config.arch {
                return Err(Error::invalid(format!(
                    "look at the image {id}: it is for {}, the pods are for {}; set provider.aws.image-id to one for \
                     these, or provider.aws.arch",
                    image.arch, config.arch
                )));
            }
            image
        }
        AwsImage::Named { name, owners } => newest(ec2, name, owners, &config.arch).await?,
    };
    if config.confidential {
        boots_with_sev_snp(&image)?;
    }
    Ok(Some(image))
}

fn boots_with_sev_snp(image: &AwsImageFacts) -> Result<(), Error> {
    if !image.boots_by_bios {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "look at the image {}: its boot mode is legacy-bios, and VMs with SEV-SNP boot by UEFI; upload the VM image with \
         boot mode uefi, or set provider.aws.disable-cvm to true",
        image.id
    )))
}

/// Returns one AMI. Fails if there is no such AMI.
pub(crate) async fn by_id(ec2: &Ec2, id: &str, what: &str, until: Instant) -> Result<AwsImageFacts, Error> {
    let what = format!("{what} {id}");
    let ask = ec2.client.describe_images().image_ids(id);
    let found = ec2.call("DescribeImages", id, &what, until, || ask.clone().send()).await?;
    let Some(image) = found.images.unwrap_or_default().into_iter().next() else {
        return Err(Error::invalid(format!(
            "{what}: there is no such AMI in {}; share or copy it to this account and region",
            ec2.region
        )));
    };
    available(image, &what)
}

/// Returns the facts of an AMI that VMs can be made of.
fn available(image: aws_sdk_ec2::types::Image, what: &str) -> Result<AwsImageFacts, Error> {
    match &image.state {
        Some(ImageState::Available) | None => {}
        Some(ImageState::Pending) => {
            return Err(Error::transient(format!("{what}: the AMI is still being made; wait")));
        }
        Some(state) => {
            let state = state.as_str();
            return Err(Error::invalid(format!("{what}: the AMI is {state}; upload the VM image again")));
        }
    }
    facts_of(image).ok_or_else(|| Error::transient(format!("{what}: the answer has no id")))
}

/// Returns the newest AMI for this architecture with a name that matches the pattern. Fails if there is none.
pub(crate) async fn newest(
    ec2: &Ec2,
    name: &str,
    owners: &[String],
    arch: &str,
) -> Result<AwsImageFacts, Error> {
    let what = format!("find the image {name}");
    let filter = |name: &str, value: &str| Filter::builder().name(name).values(value).build();
    let filters = vec![filter("name", name), filter("architecture", arch), filter("state", "available")];
    let ask = ec2.client.describe_images().set_owners(Some(owners.to_vec())).set_filters(Some(filters));
    let found = ec2.call("DescribeImages", OWNER, &what, until(), || ask.clone().send()).await?;
    // ISO 8601 in one time zone: text order is time order.
    let newest =
        found.images.unwrap_or_default().into_iter().max_by(|a, b| a.creation_date.cmp(&b.creation_date));
    newest.and_then(facts_of).ok_or_else(|| {
        Error::invalid(format!(
            "{what}: {} owned by {} has no AMI of that name for {arch}; correct provider.aws.image-name and image-owners",
            ec2.region,
            owners.join(", ")
        ))
    })
}

fn facts_of(image: aws_sdk_ec2::types::Image) -> Option<AwsImageFacts> {
    let mappings = image.block_device_mappings.unwrap_or_default();
    let root = mappings
        .iter()
        .find(|one| one.device_name == image.root_device_name)
        .and_then(|one| one.ebs.as_ref());
    Some(AwsImageFacts {
        id: image.image_id?,
        name: image.name.unwrap_or_default(),
        arch: image.architecture.map(|arch| arch.as_str().to_owned()).unwrap_or_default(),
        boots_by_bios: image.boot_mode == Some(BootModeValues::LegacyBios),
        root_gib: root.and_then(|ebs| ebs.volume_size).and_then(|size| u32::try_from(size).ok()).unwrap_or(0),
        root_device: image.root_device_name.filter(|_| root.is_some()),
    })
}

async fn types(ec2: &Ec2, config: &AwsConfig) -> Result<Vec<MachineType>, Error> {
    let wanted: Vec<_> = config.instance_types.iter().map(|name| name.as_str().into()).collect();
    let ask = ec2.client.describe_instance_types().set_instance_types(Some(wanted));
    let what = "look at the instance types";
    let found = ec2.call("DescribeInstanceTypes", OWNER, what, until(), || ask.clone().send()).await?;
    let types: Vec<MachineType> =
        found.instance_types.unwrap_or_default().into_iter().filter_map(machine).collect();
    let unknown: Vec<_> = config
        .instance_types
        .iter()
        .filter(|name| !types.iter().any(|one| one.name == **name))
        .cloned()
        .collect();
    if !unknown.is_empty() {
        return Err(Error::invalid(format!(
            "{what}: {} does not have {}; correct provider.aws.instance-type and instance-types",
            ec2.region,
            unknown.join(", ")
        )));
    }
    Ok(types)
}

fn machine(info: InstanceTypeInfo) -> Option<MachineType> {
    let number = |value: Option<i32>| value.and_then(|value| u32::try_from(value).ok());
    let processor =
        info.processor_info.unwrap_or_else(|| aws_sdk_ec2::types::ProcessorInfo::builder().build());
    let archs =
        processor.supported_architectures.unwrap_or_default().into_iter().filter_map(|arch| match arch {
            ArchitectureType::X8664 => Some(Arch::X86_64),
            ArchitectureType::Arm64 => Some(Arch::Aarch64),
            _ => None,
        });
    let features = processor.supported_features.unwrap_or_default();
    let snp = features.contains(&SupportedAdditionalProcessorFeature::AmdSevSnp);
    let gpus = info.gpu_info.and_then(|info| info.gpus).unwrap_or_default();
    Some(MachineType {
        name: info.instance_type?.as_str().to_owned(),
        vcpus: number(info.v_cpu_info.and_then(|info| info.default_v_cpus))?,
        memory_mib: info
            .memory_info
            .and_then(|info| info.size_in_mib)
            .and_then(|mib| u64::try_from(mib).ok())?,
        gpus: gpus.iter().filter_map(|gpu| number(gpu.count)).sum(),
        gpu_model: gpus.into_iter().find_map(|gpu| gpu.name),
        archs: archs.collect(),
        confidential: snp.then_some(Confidential::SevSnp).into_iter().collect(),
        // The root disk uses one attachment. Where NICs share the limit, the first NIC uses another one.
        max_disks: number(info.ebs_info.and_then(|info| info.maximum_ebs_attachments))
            .map(|most| most.saturating_sub(2)),
        max_nics: number(info.network_info.and_then(|info| info.maximum_network_interfaces)),
    })
}

async fn sold(ec2: &Ec2, config: &AwsConfig) -> Result<HashMap<String, HashSet<String>>, Error> {
    let types =
        Filter::builder().name("instance-type").set_values(Some(config.instance_types.clone())).build();
    let mut sold: HashMap<String, HashSet<String>> = HashMap::new();
    let mut next = None;
    loop {
        let ask = ec2
            .client
            .describe_instance_type_offerings()
            .location_type(LocationType::AvailabilityZone)
            .filters(types.clone())
            .set_next_token(next);
        let what = "look where the instance types are sold";
        let page =
            ec2.call("DescribeInstanceTypeOfferings", OWNER, what, until(), || ask.clone().send()).await?;
        for one in page.instance_type_offerings.unwrap_or_default() {
            if let (Some(machine), Some(zone)) = (one.instance_type, one.location) {
                sold.entry(machine.as_str().to_owned()).or_default().insert(zone);
            }
        }
        next = page.next_token.filter(|token| !token.is_empty());
        if next.is_none() {
            return Ok(sold);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_cannot_boot_is_refused() {
        let image = |state, mode| {
            let image = aws_sdk_ec2::types::Image::builder().image_id("ami-1").state(state).boot_mode(mode);
            available(image.build(), "look at the image ami-1")
        };
        let class = |state| image(state, BootModeValues::Uefi).err().map(|error| error.class());
        assert_eq!(class(ImageState::Available), None);
        assert_eq!(class(ImageState::Pending), Some("transient"));
        assert_eq!(class(ImageState::Failed), Some("invalid"));
        for (mode, boots) in [
            (BootModeValues::Uefi, true),
            (BootModeValues::UefiPreferred, true),
            (BootModeValues::LegacyBios, false),
        ] {
            let image = image(ImageState::Available, mode).unwrap();
            assert_eq!(boots_with_sev_snp(&image).is_ok(), boots, "{image:?}");
        }
    }
}
