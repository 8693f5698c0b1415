//! Defines and reads the settings of the IBM Cloud VPC provider, `provider.ibmcloud.*`. Reads configuration, touches
//! nothing else.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::{Reader, Secret};
use peerpod_provider_api::{Arch, Confidential, Market};
use peerpod_provider_cloud::settings::{self, Price, TypeForm};
use peerpod_provider_rest::ibm;

use crate::ids::is_id;

/// Names of profiles, like `bx3dc-2x10`. The default can be confidential.
const TYPE: TypeForm = TypeForm { default: "bx3dc-2x10", is_type };

fn is_type(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= 64
        && name.chars().all(fits)
        && name.split_once('-').is_some_and(|(family, size)| !family.is_empty() && !size.is_empty())
}

/// URL of the service that gives tags to resources.
const TAGGING: &str = "https://tags.global-search-tagging.cloud.ibm.com";
/// File of the token that a cluster projects into a pod.
const TOKEN_FILE: &str = "/var/run/secrets/tokens/vault-token";
/// Largest boot volume, in GB.
const MAX_ROOT_GIB: u32 = 250;

/// Settings of the provider.
#[derive(Debug, Clone)]
pub struct IbmCloudConfig {
    /// Whether VMs are created, not only listed and deleted.
    pub creates: bool,
    /// URL of the VPC API; `None`: the region's.
    pub endpoint: Option<String>,
    /// URL of IAM.
    pub iam: String,
    /// URL of the service that gives tags to resources.
    pub tagging: String,
    /// Credentials for IBM Cloud.
    pub credentials: IbmCloudCredentials,
    /// Zones of the VMs, all in one region; never empty.
    pub zones: Vec<String>,
    /// VPC of the VMs.
    pub vpc: String,
    /// Resource group of the VMs; `None`: the account's default.
    pub resource_group: Option<String>,
    /// Subnets of the VMs, at least one for each zone.
    pub subnets: Vec<String>,
    /// Subnets of the second NIC of pods that request one; empty: no pod gets one.
    pub second_subnets: Vec<String>,
    /// Security groups of the VMs; empty: the VPC's default.
    pub security_groups: Vec<String>,
    /// Images of the VMs, one for each architecture; empty: a process that does not create.
    pub images: Vec<String>,
    /// Architecture of the pods.
    pub arch: Arch,
    /// Profiles that pods may get; never empty, always contains [`IbmCloudConfig::instance_type`].
    pub instance_types: Vec<String>,
    /// Profile for pods that request none.
    pub instance_type: String,
    /// Technology that keeps VMs' memory from the host; `None`: VMs are not confidential.
    pub confidential: Option<Confidential>,
    /// Whether VMs start signed code only.
    pub secure_boot: bool,
    /// Purchase options of the VMs. With both, on demand is the fallback where there is no spot capacity.
    pub markets: Vec<Market>,
    /// Prices of profiles, as set by the administrator.
    pub prices: Vec<Price>,
    /// Minimum size of the boot volume in GB; 0: the size of the image.
    pub root_gib: u32,
    /// Id of the SSH key of the VMs.
    pub key: Option<String>,
    /// Dedicated hosts that may have VMs; with the groups empty: any host of IBM's.
    pub hosts: Vec<String>,
    /// Groups of dedicated hosts, the fallback of the hosts in their zone.
    pub host_groups: Vec<String>,
    /// Tags of the administrator on every VM and its boot volume.
    pub tags: BTreeMap<String, String>,
    /// Longest wait for one answer of the API.
    pub call_timeout: Duration,
}

/// Credentials for IBM Cloud.
#[derive(Debug, Clone)]
pub enum IbmCloudCredentials {
    /// API key of a user or of a service id.
    ApiKey(Secret),
    /// Trusted profile that accepts a token which the cluster projects.
    Profile {
        /// Id of the profile.
        id: String,
        /// File of the token.
        file: PathBuf,
    },
    /// None: each call fails with the remedy.
    Missing,
}

impl IbmCloudConfig {
    /// Reads `provider.ibmcloud.*`. The reader collects the mistakes. A process that does not create (the cluster's
    /// controller) needs credentials, zones and VPC, but no image and no subnet.
    pub fn read(reader: &mut Reader, creates: bool) -> IbmCloudConfig {
        reader.section("provider.ibmcloud", |section| {
            let (instance_type, instance_types) = settings::types(section, TYPE);
            let second = "subnets of a pod's second NIC, one for each zone; without them no pod gets one";
            let config = IbmCloudConfig {
                creates,
                endpoint: settings::endpoint(
                    section,
                    "URL of the VPC API, for a private endpoint; default: the region's",
                    "https://us-south.private.iaas.cloud.ibm.com",
                ),
                iam: ibm::iam(section),
                tagging: section.constant("tagging-endpoint", "TAGGING", TAGGING.to_owned()),
                credentials: credentials(section),
                zones: zones(section),
                vpc: required_id(section, "vpc-id", "VPC of the VMs", true),
                resource_group: id(
                    section,
                    "resource-group-id",
                    "resource group of the VMs; default: the account's",
                ),
                subnets: required_ids(
                    section,
                    "subnet-ids",
                    "subnets of the VMs, at least one for each zone",
                    creates,
                ),
                second_subnets: ids(section, "second-subnet-ids", second),
                security_groups: ids(
                    section,
                    "security-group-ids",
                    "security groups of the VMs; default: the VPC's default one",
                ),
                images: required_ids(
                    section,
                    "image-ids",
                    "the pod VM's images, one for each architecture",
                    creates,
                ),
                arch: arch(section),
                confidential: confidential(section),
                secure_boot: settings::secure_boot(section),
                markets: settings::market(section),
                prices: settings::prices(section, &instance_types, TYPE, "the smallest type that fits"),
                root_gib: settings::root_volume_size(section, "0", MAX_ROOT_GIB),
                key: id(section, "key-id", "SSH key of the VMs, for an image that accepts it; default: none"),
                hosts: ids(section, "dedicated-host-ids", "dedicated hosts of the VMs; default: any host"),
                host_groups: ids(
                    section,
                    "dedicated-host-group-ids",
                    "groups of dedicated hosts, where no host of dedicated-host-ids has room",
                ),
                tags: settings::tags(section, "tags on VMs and their boot volumes, as key=value", &ibm::TAGS),
                call_timeout: settings::call_timeout(section),
                instance_types,
                instance_type,
            };
            if config.is_dedicated() && config.markets.contains(&Market::Spot) {
                section.mistake("market", "a dedicated host has no spot VMs; write on-demand");
            }
            config
        })
    }

    /// Returns the region of the zones.
    pub fn region(&self) -> &str {
        self.zones.first().and_then(|zone| region_of(zone)).unwrap_or_default()
    }

    /// Whether VMs run on dedicated hosts only.
    pub fn is_dedicated(&self) -> bool {
        !self.hosts.is_empty() || !self.host_groups.is_empty()
    }
}

/// Returns the region of a zone: `us-south` of `us-south-1`. `None`: the text is no zone.
pub(crate) fn region_of(zone: &str) -> Option<&str> {
    let (region, number) = zone.rsplit_once('-')?;
    let is_number = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
    let is_region = region.contains('-') && region.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    (is_number && is_region).then_some(region)
}

fn credentials(section: &mut Reader) -> IbmCloudCredentials {
    let key: Option<Secret> = section
        .optional("api-key", "API key of a service id; default: the trusted profile of iam-profile-id");
    let profile: Option<String> = section.optional(
        "iam-profile-id",
        "trusted profile that accepts the cluster's token in compute-resource-token-file",
    );
    let file: PathBuf = section.get(
        "compute-resource-token-file",
        TOKEN_FILE,
        "token that the cluster projects for the trusted profile",
    );
    match (key, profile) {
        (Some(_), Some(_)) => {
            section.mistake("iam-profile-id", "there is an api-key, too; give one of them");
            IbmCloudCredentials::Missing
        }
        (Some(key), None) => IbmCloudCredentials::ApiKey(key),
        (None, Some(id)) => IbmCloudCredentials::Profile { id, file },
        (None, None) => IbmCloudCredentials::Missing,
    }
}

fn zones(section: &mut Reader) -> Vec<String> {
    let zones: Vec<String> =
        section.required("zones", "zones of the VMs, all in one region, like us-south-1").unwrap_or_default();
    if let Some(bad) = zones.iter().find(|zone| region_of(zone).is_none()) {
        section.mistake("zones", format!("{bad} is not a zone; write them like us-south-1,us-south-2"));
    } else if zones.iter().any(|zone| region_of(zone) != zones.first().and_then(|first| region_of(first))) {
        section.mistake("zones", "they are in several regions; a node uses one region");
    }
    zones
}

/// Reads an id; empty if it is absent.
fn required_id(section: &mut Reader, key: &'static str, help: &str, is_required: bool) -> String {
    let text: Option<String> =
        if is_required { section.required(key, help) } else { section.optional(key, help) };
    checked(section, key, text.into_iter().collect()).pop().unwrap_or_default()
}

fn id(section: &mut Reader, key: &'static str, help: &str) -> Option<String> {
    Some(required_id(section, key, help, false)).filter(|id| !id.is_empty())
}

fn required_ids(section: &mut Reader, key: &'static str, help: &str, is_required: bool) -> Vec<String> {
    if !is_required {
        return ids(section, key, help);
    }
    let texts: Vec<String> = section.required(key, help).unwrap_or_default();
    checked(section, key, texts)
}

fn ids(section: &mut Reader, key: &'static str, help: &str) -> Vec<String> {
    let texts: Vec<String> = section.get(key, "", help);
    checked(section, key, texts)
}

fn checked(section: &mut Reader, key: &'static str, texts: Vec<String>) -> Vec<String> {
    if let Some(bad) = texts.iter().find(|text| !is_id(text)) {
        let shown: String = bad.chars().take(40).collect();
        section.mistake(
            key,
            format!("`{shown}` is no id; write it like r006-1e09281b-f177-46fb-baf1-bc152b2e391a"),
        );
    }
    texts
}

fn arch(section: &mut Reader) -> Arch {
    let help = "architecture of the pods; node: that of this node";
    match section.choice("arch", "node", &["node", "x86_64", "s390x"], help).as_str() {
        "s390x" => Arch::S390x,
        "node" if std::env::consts::ARCH == "s390x" => Arch::S390x,
        _ => Arch::X86_64,
    }
}

fn confidential(section: &mut Reader) -> Option<Confidential> {
    let help = "technology that keeps VMs' memory from the host: none or tdx; the type must have it";
    match section.choice("confidential", "tdx", &["none", "tdx"], help).as_str() {
        "none" => None,
        _ => Some(Confidential::Tdx),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use peerpod_base::config::Sources;

    use super::*;

    /// Reads these settings over the required ones.
    pub(crate) fn read(flags: &[(&str, &str)]) -> Result<IbmCloudConfig, String> {
        let required = [
            ("zones", "us-south-1,us-south-2"),
            ("vpc-id", "r006-vpc"),
            ("subnet-ids", "0717-a,0727-b"),
            ("image-ids", "r006-image"),
            ("arch", "x86_64"),
        ];
        let required = required.iter().filter(|(key, _)| !flags.iter().any(|(other, _)| other == key));
        let flags = required
            .chain(flags)
            .map(|(key, value)| (format!("provider.ibmcloud.{key}"), (*value).to_owned()));
        read_with(flags.collect(), BTreeMap::new())
    }

    fn read_with(
        flags: Vec<(String, String)>,
        env: BTreeMap<String, String>,
    ) -> Result<IbmCloudConfig, String> {
        let sources = Sources { flags, env, ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = IbmCloudConfig::read(&mut reader, true);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn only_the_place_and_the_image_are_required_settings() {
        let config = read(&[]).unwrap();
        assert_eq!((config.instance_types.join(","), config.region()), ("bx3dc-2x10".to_owned(), "us-south"));
        assert_eq!(config.confidential, Some(Confidential::Tdx), "plain VMs are a decision");
        assert!(matches!(config.credentials, IbmCloudCredentials::Missing) && !config.is_dedicated());
        let told = read_with(Vec::new(), BTreeMap::new()).unwrap_err();
        for key in ["zones", "vpc-id", "subnet-ids", "image-ids"] {
            assert!(told.contains(key), "{key} in {told}");
        }
    }

    #[test]
    fn a_collector_needs_no_image_and_no_subnet() {
        let flags = [("zones", "eu-de-1"), ("vpc-id", "r010-vpc")];
        let flags = flags.map(|(key, value)| (format!("provider.ibmcloud.{key}"), value.to_owned()));
        let sources = Sources { flags: flags.into(), ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = IbmCloudConfig::read(&mut reader, false);
        reader.finish().unwrap();
        assert!(!config.creates && config.images.is_empty());
    }

    #[test]
    fn all_mistakes_are_reported_at_once_with_a_remedy() {
        let told = read(&[
            ("zones", "us-south,us-south-1"),
            ("iam-endpoint", "http://iam.cloud.ibm.com"),
            ("endpoint", "iaas"),
            ("vpc-id", "My VPC"),
            ("subnet-ids", "0717-a,B"),
            ("instance-type", "large"),
            ("confidential", "sev"),
            ("dedicated-host-ids", "0717-h"),
            ("market", "spot-first"),
            ("root-volume-size", "251"),
            ("tags", "a,peerpod.node=y"),
            ("images", "x"),
        ])
        .unwrap_err();
        for part in [
            "us-south is not a zone",
            "write it like https://iam.cloud.ibm.com",
            "not a URL; write it like https://us-south.private",
            "`My VPC` is no id",
            "`B` is no id",
            "write it like bx3dc-2x10",
            "write one of none, tdx",
            "a dedicated host has no spot VMs",
            "write at most 250",
            "`a` is not key=value",
            "peerpod.node is taken",
            "images",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
        assert!(read(&[("zones", "us-south-1,eu-de-1")]).unwrap_err().contains("several regions"));
    }

    #[test]
    fn a_key_and_a_profile_are_refused_and_the_key_is_not_shown() {
        let env = [("PEERPOD_PROVIDER_IBMCLOUD_API_KEY".to_owned(), "hush".to_owned())];
        let flags = |profile: &[&str]| {
            let least = [("zones", "eu-de-1"), ("vpc-id", "v"), ("subnet-ids", "s"), ("image-ids", "i")];
            let profile = profile.iter().map(|id| ("iam-profile-id", *id));
            let all = least.into_iter().chain(profile);
            all.map(|(key, value)| (format!("provider.ibmcloud.{key}"), value.to_owned())).collect()
        };
        let told = read_with(flags(&["Profile-1"]), env.clone().into()).unwrap_err();
        assert!(told.contains("give one of them") && !told.contains("hush"), "{told}");
        let config = read_with(flags(&[]), env.into()).unwrap();
        assert!(
            matches!(config.credentials, IbmCloudCredentials::ApiKey(_))
                && !format!("{config:?}").contains("hush")
        );
        let config = read_with(flags(&["Profile-1"]), BTreeMap::new()).unwrap();
        assert!(matches!(config.credentials, IbmCloudCredentials::Profile { id, .. } if id == "Profile-1"));
    }
}
