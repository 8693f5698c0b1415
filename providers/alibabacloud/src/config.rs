//! Defines and reads the settings of the provider, `provider.alibabacloud.*`. Reads configuration, touches nothing else.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::{Reader, Secret};
use peerpod_provider_api::{Arch, Market};
use peerpod_provider_cloud::Alphabet;
use peerpod_provider_cloud::settings::{self, Price, TypeForm};

/// Tags that ECS accepts. It refuses `http://` and `https://` anywhere in a tag, so `:` is left out.
pub const ALPHABET: Alphabet = Alphabet {
    cloud: "Alibaba Cloud",
    max_marks: 20,
    max_name: 128,
    max_value: 128,
    name: is_of_a_tag,
    value: is_of_a_tag,
    escapes: false,
    reserved: &["aliyun", "acs:"],
    reserves_values: false,
    shown: None,
};

fn is_of_a_tag(character: char) -> bool {
    character.is_alphanumeric() || " +-=._/@".contains(character)
}

/// Names of instance types. The default can be confidential.
const TYPE: TypeForm = TypeForm { default: "ecs.g8i.xlarge", is_type };

fn is_type(name: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part.bytes().all(|b| is_lower(b) || b == b'-');
    let mut parts = name.split('.');
    parts.next() == Some("ecs") && parts.clone().count() >= 2 && parts.all(plain)
}

fn is_lower(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

/// Whether a text is the id of an object of this kind, like `vsw-` or `i-`.
pub(crate) fn is_id(text: &str, prefix: &str) -> bool {
    let rest = text.strip_prefix(prefix).unwrap_or_default();
    (8..=64).contains(&rest.len()) && rest.bytes().all(is_lower)
}

/// Whether a text is the id of an image. Public images have names as ids.
pub(crate) fn is_image(text: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    (2..=128).contains(&text.len()) && text.bytes().all(is_plain)
}

/// The metadata service.
const METADATA: &str = "http://100.100.100.200";
/// Interval of checks whether the cloud takes spot VMs back, while there are any. It gives five minutes.
const SPOT_WATCH: Duration = Duration::from_secs(30);
/// Largest number of VMs that one call makes. They share a ticket. 100 is the limit of `RunInstances`.
const BATCH: u32 = 100;
/// Largest system disk, in GiB.
const MAX_ROOT_GIB: u32 = 2048;
/// Categories of system disks.
const CATEGORIES: [&str; 5] =
    ["cloud_essd", "cloud_auto", "cloud_essd_entry", "cloud_ssd", "cloud_efficiency"];

/// Settings of the provider.
#[derive(Debug, Clone)]
pub struct AlibabaCloudConfig {
    /// Whether VMs are created, not only listed and deleted.
    pub creates: bool,
    /// Region of the VMs.
    pub region: String,
    /// URL of the ECS API; `None`: the region's public one.
    pub endpoint: Option<String>,
    /// Credentials.
    pub credentials: AlibabaCloudCredentials,
    /// URL of the metadata service, which has the keys of the node's RAM role.
    pub metadata: String,
    /// Image of the VMs; `None` only where nothing is created.
    pub image: Option<String>,
    /// Types that pods may get; never empty, always contains [`AlibabaCloudConfig::instance_type`].
    pub instance_types: Vec<String>,
    /// Type for pods that request none.
    pub instance_type: String,
    /// Architecture of the pods.
    pub arch: Arch,
    /// vSwitches of the VMs, one or more for each zone; empty only where nothing is created.
    pub vswitch_ids: Vec<String>,
    /// vSwitches of the second NIC of pods that request one; one for each zone.
    pub second_vswitch_ids: Vec<String>,
    /// Security groups of the VMs; empty only where nothing is created.
    pub security_group_ids: Vec<String>,
    /// SSH key pair, for debugging.
    pub key_name: Option<String>,
    /// Whether VMs get a public address. The node then uses this address.
    pub use_public_ip: bool,
    /// Whether VMs are confidential by TDX.
    pub confidential: bool,
    /// Purchase options of the VMs. With both, on demand is the fallback where there is no spot capacity.
    pub markets: Vec<Market>,
    /// Prices of types, as set by the administrator.
    pub prices: Vec<Price>,
    /// Interval of the checks whether the cloud takes spot VMs back; zero: no checks.
    pub spot_watch: Duration,
    /// The system disk.
    pub root: RootDisk,
    /// Tags of the administrator on every VM, its system disk and primary NIC.
    pub tags: BTreeMap<String, String>,
    /// Maximum number of VMs that one call makes; 0: one call and one ticket per VM.
    pub batch: u32,
    /// Longest wait for one answer of the API.
    pub call_timeout: Duration,
}

/// Credentials for Alibaba Cloud.
#[derive(Debug, Clone)]
pub enum AlibabaCloudCredentials {
    /// An access key.
    Key {
        /// Id of the key.
        id: Secret,
        /// Secret of the key.
        secret: Secret,
        /// Security token of a temporary key.
        token: Option<Secret>,
    },
    /// A role that a Kubernetes service account may assume (RRSA), otherwise the RAM role of the node's instance.
    Role {
        /// ARN of the role; `None`: `ALIBABA_CLOUD_ROLE_ARN`.
        role: Option<String>,
        /// ARN of the OIDC provider; `None`: `ALIBABA_CLOUD_OIDC_PROVIDER_ARN`.
        provider: Option<String>,
        /// File with the service account's token; `None`: `ALIBABA_CLOUD_OIDC_TOKEN_FILE`.
        file: Option<PathBuf>,
    },
}

/// System disk; deleted with its VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootDisk {
    /// Minimum size in GiB; an image may need more.
    pub size_gib: u32,
    /// Category of the disk.
    pub category: String,
}

impl AlibabaCloudConfig {
    /// Reads `provider.alibabacloud.*`. The reader collects the mistakes. A process that does not create (the cluster's
    /// controller) needs a region and credentials, but no image and no network.
    pub fn read(reader: &mut Reader, creates: bool) -> AlibabaCloudConfig {
        reader.section("provider.alibabacloud", |section| {
            let (instance_type, instance_types) = settings::types(section, TYPE);
            AlibabaCloudConfig {
                creates,
                region: region(section),
                endpoint: settings::endpoint(
                    section,
                    "URL of the ECS API, for an endpoint in the VPC; default: the region's public one",
                    "https://ecs-vpc.cn-beijing.aliyuncs.com",
                ),
                credentials: credentials(section),
                metadata: section.constant("metadata", "METADATA", METADATA.to_owned()),
                image: image(section, creates),
                arch: arch(section),
                vswitch_ids: ids(
                    section,
                    ("vswitch-ids", "vsw-"),
                    "vSwitches of the VMs, in one or more zones, the preferred first",
                    creates,
                ),
                second_vswitch_ids: ids(
                    section,
                    ("second-vswitch-ids", "vsw-"),
                    "vSwitches of a pod's second NIC, one per zone; without them no pod gets one",
                    false,
                ),
                security_group_ids: ids(
                    section,
                    ("security-group-ids", "sg-"),
                    "security groups of the VMs, in the VPC of the vSwitches",
                    creates,
                ),
                key_name: section.optional("key-name", "SSH key pair of the VMs; default: none"),
                use_public_ip: settings::use_public_ip(section),
                confidential: settings::confidential(section, "TDX"),
                markets: settings::market(section),
                prices: settings::prices(section, &instance_types, TYPE, "the smallest type first"),
                spot_watch: section.constant("spot-watch", "SPOT_WATCH", SPOT_WATCH),
                root: RootDisk::read(section),
                tags: settings::tags(section, "tags on VMs, system disks and NICs, as key=value", &ALPHABET),
                batch: section.constant("batch", "BATCH", BATCH),
                call_timeout: settings::call_timeout(section),
                instance_types,
                instance_type,
            }
        })
    }

    /// Returns the URL of a service of the region, like `vpc` or `sts`: that of the ECS endpoint with another name.
    pub(crate) fn service(&self, name: &str) -> String {
        let Some(endpoint) = &self.endpoint else {
            return format!("https://{name}.{}.aliyuncs.com", self.region);
        };
        let endpoint = endpoint.trim_end_matches('/');
        let named = endpoint.strip_prefix("https://ecs").filter(|rest| rest.starts_with(['.', '-']));
        named.map_or_else(|| endpoint.to_owned(), |rest| format!("https://{name}{rest}"))
    }
}

fn region(section: &mut Reader) -> String {
    let region: String = section.required("region", "region of the VMs, like cn-beijing").unwrap_or_default();
    let is_region = region.contains('-') && region.bytes().all(|b| is_lower(b) || b == b'-');
    if !region.is_empty() && !is_region {
        section.mistake("region", "not the id of a region; write it like cn-beijing");
    }
    region
}

fn credentials(section: &mut Reader) -> AlibabaCloudCredentials {
    let id: Option<Secret> =
        section.optional("access-key-id", "id of an access key; default: RRSA, or the node's RAM role");
    let secret: Option<Secret> = section.optional("secret-key", "secret of the access key");
    let token: Option<Secret> =
        section.optional("security-token", "security token of a temporary access key");
    let role: Option<String> =
        section.optional("role-arn", "role to assume by RRSA; default: ALIBABA_CLOUD_ROLE_ARN");
    let provider: Option<String> = section
        .optional("oidc-provider-arn", "OIDC provider of RRSA; default: ALIBABA_CLOUD_OIDC_PROVIDER_ARN");
    let file: Option<PathBuf> =
        section.optional("oidc-token-file", "token of RRSA; default: ALIBABA_CLOUD_OIDC_TOKEN_FILE");
    match (id, secret) {
        (Some(id), Some(secret)) => AlibabaCloudCredentials::Key { id, secret, token },
        (None, None) => {
            if token.is_some() {
                section.mistake("security-token", "access-key-id and secret-key are missing; give all three");
            }
            AlibabaCloudCredentials::Role { role, provider, file }
        }
        (id, _) => {
            let (missing, given) = match id {
                Some(_) => ("secret-key", "access-key-id"),
                None => ("access-key-id", "secret-key"),
            };
            section.mistake(given, format!("{missing} is missing; give both or neither"));
            AlibabaCloudCredentials::Role { role, provider, file }
        }
    }
}

fn image(section: &mut Reader, creates: bool) -> Option<String> {
    let help = "the pod VM's image, like m-2ze0123456789abcdefg";
    let image: Option<String> = match creates {
        true => section.required("image-id", help),
        false => section.optional("image-id", help),
    };
    if image.as_ref().is_some_and(|image| !is_image(image)) {
        section.mistake("image-id", "not the id of an image; write it like m-2ze0123456789abcdefg");
    }
    image
}

fn arch(section: &mut Reader) -> Arch {
    let this = if std::env::consts::ARCH == "aarch64" { Arch::Aarch64 } else { Arch::X86_64 };
    let help = "architecture of the pods; node: that of this node";
    match section.choice("arch", "node", &["node", "x86_64", "arm64"], help).as_str() {
        "arm64" => Arch::Aarch64,
        "x86_64" => Arch::X86_64,
        _ => this,
    }
}

fn ids(
    section: &mut Reader,
    (key, prefix): (&'static str, &str),
    help: &str,
    is_required: bool,
) -> Vec<String> {
    let ids: Vec<String> = match is_required {
        true => section.required(key, help).unwrap_or_default(),
        false => section.get(key, "", help),
    };
    if let Some(bad) = ids.iter().find(|id| !is_id(id, prefix)) {
        section
            .mistake(key, format!("{bad} is no id of these; write them like {prefix}2ze0123456789abcdefg"));
    }
    ids
}

impl RootDisk {
    fn read(section: &mut Reader) -> RootDisk {
        let size_gib = settings::root_volume_size(section, "20", MAX_ROOT_GIB);
        let help = "category of the system disk; the instance types must have it";
        let category = section.choice("root-volume-type", "cloud_essd", &CATEGORIES, help);
        RootDisk { size_gib, category }
    }
}

#[cfg(test)]
pub(crate) mod tests;
