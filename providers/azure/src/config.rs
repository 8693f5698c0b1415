//! Defines and reads the settings of the Azure provider, `provider.azure.*`. Reads configuration, touches nothing else.

use std::collections::BTreeMap;
use std::time::Duration;

use peerpod_base::config::{Reader, Secret};
use peerpod_provider_api::{Arch, Market};
use peerpod_provider_cloud::Alphabet;
use peerpod_provider_cloud::settings::{self, Price, TypeForm};

use crate::ids::{ResourceId, is_segment};
use crate::image::ImageId;

/// Tags that Azure accepts (Azure Resource Manager, "Tag usage and recommendations").
pub const ALPHABET: Alphabet = Alphabet {
    cloud: "Azure",
    max_marks: 50,
    max_name: 512,
    max_value: 256,
    name: |c| !c.is_control() && !"<>%&\\?/".contains(c),
    value: |c| !c.is_control(),
    escapes: false,
    reserved: &["microsoft", "azure", "windows"],
    reserves_values: false,
    shown: None,
};

/// Names of sizes, like `Standard_DC2as_v5`.
const TYPE: TypeForm = TypeForm { default: "Standard_DC2as_v5", is_type };

fn is_type(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    name.len() <= 64
        && name.chars().all(plain)
        && name.split_once('_').is_some_and(|(tier, size)| {
            !tier.is_empty() && size.starts_with(|c: char| c.is_ascii_uppercase())
        })
}

/// Largest OS disk, in GiB.
const MAX_ROOT_GIB: u32 = 4095;
/// Address of the metadata service.
const METADATA: &str = "http://169.254.169.254";
const SUBNET: &str = "microsoft.network/virtualnetworks/subnets";
const GROUP: &str = "microsoft.network/networksecuritygroups";

/// Settings of the Azure provider.
#[derive(Debug, Clone)]
pub struct AzureConfig {
    /// Whether VMs are created, not only listed and deleted.
    pub creates: bool,
    /// Which of Azure's clouds.
    pub cloud: Cloud,
    /// URL of Azure Resource Manager; `None`: the cloud's.
    pub endpoint: Option<String>,
    /// URL of Entra ID; `None`: that of the environment (`AZURE_AUTHORITY_HOST`), or the cloud's.
    pub authority_host: Option<String>,
    /// URL of the metadata service.
    pub metadata: String,
    /// Credentials for Azure.
    pub credentials: AzureCredentials,
    /// Subscription of the VMs.
    pub subscription: String,
    /// Resource group of the VMs.
    pub group: String,
    /// Region of the VMs, like `westeurope`.
    pub region: String,
    /// Zones of the VMs, like `1`; empty: VMs in no zone.
    pub zones: Vec<String>,
    /// Types that pods may get; never empty, always contains [`AzureConfig::instance_type`].
    pub instance_types: Vec<String>,
    /// Type for pods that request none.
    pub instance_type: String,
    /// Architecture of the pods.
    pub arch: Arch,
    /// Image of the VMs; `None`: a process that does not create.
    pub image: Option<ImageId>,
    /// Id of the subnet of the VMs.
    pub subnet: String,
    /// Id of the network security group of the VMs; `None`: that of the subnet.
    pub security_group: Option<String>,
    /// Id of the subnet of the second NIC of pods that request one.
    pub second_subnet: Option<String>,
    /// Whether VMs get a public address. The node then uses this address.
    pub use_public_ip: bool,
    /// Whether VMs are confidential; the type decides the technology.
    pub confidential: bool,
    /// Whether VMs start signed code only.
    pub secure_boot: bool,
    /// Purchase options of the VMs. With both, on demand is the fallback where there is no spot capacity.
    pub markets: Vec<Market>,
    /// Prices of types, as set by the administrator.
    pub prices: Vec<Price>,
    /// Minimum size of the OS disk in GiB; 0: the size of the image.
    pub root_gib: u32,
    /// SSH key of VMs from a generalized image; `None`: one without a private half.
    pub ssh_key: Option<String>,
    /// Tags of the administrator on every VM and its disk.
    pub tags: BTreeMap<String, String>,
    /// Longest wait for one answer of the API.
    pub call_timeout: Duration,
}

/// One of Azure's clouds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    /// The public cloud.
    Public,
    /// Azure Government of the United States.
    UsGovernment,
    /// Azure of 21Vianet in China.
    China,
}

impl Cloud {
    /// Returns the URL of Azure Resource Manager, which is also the audience of tokens.
    pub fn manager(self) -> &'static str {
        match self {
            Cloud::Public => "https://management.azure.com",
            Cloud::UsGovernment => "https://management.usgovcloudapi.net",
            Cloud::China => "https://management.chinacloudapi.cn",
        }
    }

    /// Returns the URL of Entra ID.
    pub fn authority(self) -> &'static str {
        match self {
            Cloud::Public => "https://login.microsoftonline.com",
            Cloud::UsGovernment => "https://login.microsoftonline.us",
            Cloud::China => "https://login.chinacloudapi.cn",
        }
    }

    /// Returns the suffixes of further hosts of Azure Resource Manager, those of regions.
    pub fn managers(self) -> &'static [&'static str] {
        match self {
            Cloud::Public => &[".management.azure.com"],
            Cloud::UsGovernment => &[".management.usgovcloudapi.net"],
            Cloud::China => &[".management.chinacloudapi.cn"],
        }
    }

    /// Returns the suffixes of the hosts of boot diagnostics.
    pub fn storage(self) -> &'static [&'static str] {
        match self {
            Cloud::Public => &[".blob.core.windows.net", ".blob.storage.azure.net"],
            Cloud::UsGovernment => &[".blob.core.usgovcloudapi.net", ".blob.storage.usgovcloudapi.net"],
            Cloud::China => &[".blob.core.chinacloudapi.cn", ".blob.storage.chinacloudapi.cn"],
        }
    }
}

/// Credentials for Azure.
#[derive(Debug, Clone)]
pub enum AzureCredentials {
    /// A client with a secret.
    Secret {
        /// Tenant of the client.
        tenant: String,
        /// Id of the client.
        client: String,
        /// Secret of the client.
        secret: Secret,
    },
    /// The federated token of the environment or the settings (workload identity), else the node's managed identity.
    Identity {
        /// Tenant of the client; `None`: that of the environment (`AZURE_TENANT_ID`).
        tenant: Option<String>,
        /// Id of the client; `None`: that of the environment (`AZURE_CLIENT_ID`), or the node's only identity.
        client: Option<String>,
        /// File of the token; `None`: that of the environment (`AZURE_FEDERATED_TOKEN_FILE`).
        file: Option<String>,
    },
}

impl AzureConfig {
    /// Reads `provider.azure.*`. The reader collects the mistakes. A process that does not create (the cluster's
    /// controller) needs credentials, subscription and resource group, but no image and no subnet.
    pub fn read(reader: &mut Reader, creates: bool) -> AzureConfig {
        reader.section("provider.azure", |section| {
            let (instance_type, instance_types) = settings::types(section, TYPE);
            let region = region(section, creates);
            AzureConfig {
                creates,
                cloud: cloud(section),
                endpoint: settings::endpoint(
                    section,
                    "URL of Azure Resource Manager, for a private link; default: the cloud's",
                    Cloud::Public.manager(),
                ),
                authority_host: authority_host(section),
                metadata: section.constant("metadata-endpoint", "METADATA", METADATA.to_owned()),
                credentials: credentials(section),
                subscription: name(section, "subscription-id", "subscription of the VMs"),
                group: name(
                    section,
                    "resource-group",
                    "resource group of the VMs; one for pods alone is best",
                ),
                zones: zones(section),
                arch: arch(section),
                image: image(section, creates),
                subnet: subnet(section, creates),
                security_group: resource(
                    section,
                    "security-group-id",
                    GROUP,
                    "id of the VMs' network security group; default: that of the subnet",
                ),
                second_subnet: resource(
                    section,
                    "second-subnet-id",
                    SUBNET,
                    "id of the subnet of a pod's second NIC; without it no pod gets one",
                ),
                use_public_ip: settings::use_public_ip(section),
                confidential: settings::confidential(section, "confidential (SEV-SNP or TDX, by type)"),
                secure_boot: settings::secure_boot(section),
                markets: settings::market(section),
                prices: settings::prices(section, &instance_types, TYPE, "the smallest type that fits"),
                root_gib: settings::root_volume_size(section, "0", MAX_ROOT_GIB),
                ssh_key: ssh_key(section),
                tags: settings::tags(section, "tags on VMs and their disks, as key=value", &ALPHABET),
                call_timeout: settings::call_timeout(section),
                region,
                instance_types,
                instance_type,
            }
        })
    }
}

fn cloud(section: &mut Reader) -> Cloud {
    let help = "which of Azure's clouds";
    match section.choice("cloud", "public", &["public", "usgovernment", "china"], help).as_str() {
        "usgovernment" => Cloud::UsGovernment,
        "china" => Cloud::China,
        _ => Cloud::Public,
    }
}

fn authority_host(section: &mut Reader) -> Option<String> {
    let help = "URL of Entra ID; default: AZURE_AUTHORITY_HOST, or the cloud's";
    let host: Option<String> = section.optional("authority-host", help);
    if host.as_ref().is_some_and(|url| !settings::is_secret_safe(url)) {
        section.mistake("authority-host", format!("not a URL; write it like {}", Cloud::Public.authority()));
    }
    host
}

fn credentials(section: &mut Reader) -> AzureCredentials {
    let tenant: Option<String> =
        section.optional("tenant-id", "tenant of the client; default: AZURE_TENANT_ID");
    let client: Option<String> =
        section.optional("client-id", "client, or managed identity; default: AZURE_CLIENT_ID");
    let secret: Option<Secret> = section.optional(
        "client-secret",
        "the client's secret; default: workload identity, or the node's managed identity",
    );
    let file: Option<String> = section.optional(
        "federated-token-file",
        "token of the workload identity; default: AZURE_FEDERATED_TOKEN_FILE",
    );
    for (key, value) in [("tenant-id", &tenant), ("client-id", &client)] {
        if value.as_ref().is_some_and(|value| !is_segment(value)) {
            section.mistake(key, "not an id; write it like 00000000-0000-0000-0000-000000000000");
        }
    }
    match (tenant, client, secret) {
        (Some(tenant), Some(client), Some(secret)) => AzureCredentials::Secret { tenant, client, secret },
        (tenant, client, secret) => {
            if secret.is_some() {
                section.mistake("client-secret", "tenant-id or client-id is missing; give all three or none");
            }
            AzureCredentials::Identity { tenant, client, file }
        }
    }
}

/// Reads a required name that becomes a part of paths.
fn name(section: &mut Reader, key: &'static str, help: &str) -> String {
    let name: String = section.required(key, help).unwrap_or_default();
    if !name.is_empty() && !is_segment(&name) {
        section.mistake(key, "has characters that no name in Azure has; correct it");
    }
    name
}

fn region(section: &mut Reader, creates: bool) -> String {
    let help = "region of the VMs, like westeurope";
    let region: Option<String> =
        if creates { section.required("region", help) } else { section.optional("region", help) };
    let region = region.unwrap_or_default();
    if !region.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit()) {
        section.mistake("region", "not the name of a region; write it like westeurope");
    }
    region
}

fn zones(section: &mut Reader) -> Vec<String> {
    let zones: Vec<String> =
        section.get("zones", "", "zones of the VMs, like 1,2,3; default: VMs are in no zone");
    if let Some(bad) = zones.iter().find(|zone| !zone.chars().all(|c| c.is_ascii_digit())) {
        section.mistake("zones", format!("{bad} is not a zone; write them like 1,2,3"));
    }
    zones
}

fn arch(section: &mut Reader) -> Arch {
    let help = "architecture of the pods; node: that of this node";
    match section.choice("arch", "node", &["node", "x86_64", "arm64"], help).as_str() {
        "arm64" => Arch::Aarch64,
        "node" if std::env::consts::ARCH == "aarch64" => Arch::Aarch64,
        _ => Arch::X86_64,
    }
}

fn image(section: &mut Reader, creates: bool) -> Option<ImageId> {
    let help = "the pod VM's image: the id of an image or of an image version in a gallery, or /CommunityGalleries/…";
    let text: Option<String> =
        if creates { section.required("image-id", help) } else { section.optional("image-id", help) };
    let text = text?;
    let id = ImageId::parse(&text);
    if id.is_none() {
        let why = "not the id of an image; write it like /subscriptions/…/providers/Microsoft.Compute/galleries/…/images/\
                   …/versions/1.0.0 or /CommunityGalleries/…/Images/…/Versions/1.0.0";
        section.mistake("image-id", why);
    }
    id
}

fn subnet(section: &mut Reader, creates: bool) -> String {
    let help = "id of the VMs' subnet";
    if creates && !section.is_set("subnet-id") {
        section.required::<String>("subnet-id", help);
        return String::new();
    }
    resource(section, "subnet-id", SUBNET, help).unwrap_or_default()
}

fn resource(section: &mut Reader, key: &'static str, kind: &str, help: &str) -> Option<String> {
    let text: Option<String> = section.optional(key, help);
    let text = text?;
    if ResourceId::of_kind(&text, kind).is_none() {
        let why = format!(
            "not the id of such a resource; write it like /subscriptions/…/resourceGroups/…/providers/{kind}/…"
        );
        section.mistake(key, why);
    }
    Some(text)
}

fn ssh_key(section: &mut Reader) -> Option<String> {
    let help = "SSH public key of VMs from a generalized image; default: a key without a private half";
    let key: Option<String> = section.optional("ssh-public-key", help);
    if key.as_ref().is_some_and(|key| !key.starts_with("ssh-rsa ") && !key.starts_with("ssh-ed25519 ")) {
        section.mistake("ssh-public-key", "not a key that Azure takes; write it like ssh-ed25519 AAAA…");
    }
    key
}

#[cfg(test)]
pub(crate) mod tests {
    use peerpod_base::config::Sources;

    use super::*;

    const SUBNET_ID: &str =
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/pods";

    /// Reads these settings over the required ones.
    pub(crate) fn read(flags: &[(&str, &str)]) -> Result<AzureConfig, String> {
        read_with(flags, BTreeMap::new())
    }

    fn read_with(flags: &[(&str, &str)], env: BTreeMap<String, String>) -> Result<AzureConfig, String> {
        let required = [
            ("subscription-id", "s"),
            ("resource-group", "g"),
            ("region", "westeurope"),
            ("subnet-id", SUBNET_ID),
            ("image-id", "/CommunityGalleries/g/Images/i"),
            ("arch", "x86_64"),
        ];
        let required = required.iter().filter(|(key, _)| !flags.iter().any(|(other, _)| other == key));
        let flags =
            required.chain(flags).map(|(key, value)| (format!("provider.azure.{key}"), (*value).to_owned()));
        let sources = Sources { flags: flags.collect(), env, ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = AzureConfig::read(&mut reader, true);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn only_the_place_and_the_image_are_required_settings() {
        let config = read(&[]).unwrap();
        assert_eq!(config.instance_types, ["Standard_DC2as_v5"]);
        assert!(config.confidential, "plain VMs are a decision");
        assert_eq!((&config.markets[..], config.root_gib), (&[Market::OnDemand][..], 0));
        assert!(matches!(config.credentials, AzureCredentials::Identity { .. }));
        let mut reader = Reader::load(Sources::default(), &["provider"], &[]).unwrap();
        AzureConfig::read(&mut reader, true);
        let told = reader.finish().unwrap_err().to_string();
        for key in ["subscription-id", "resource-group", "region", "subnet-id", "image-id"] {
            assert!(told.contains(key), "{key} in {told}");
        }
    }

    #[test]
    fn a_collector_needs_no_image_and_no_subnet() {
        let flags = [("subscription-id", "s"), ("resource-group", "g")];
        let flags = flags.map(|(key, value)| (format!("provider.azure.{key}"), value.to_owned()));
        let sources = Sources { flags: flags.into(), ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = AzureConfig::read(&mut reader, false);
        reader.finish().unwrap();
        assert!(!config.creates && config.image.is_none());
    }

    #[test]
    fn all_mistakes_are_reported_at_once_with_a_remedy() {
        let told = read(&[
            ("cloud", "germany"),
            ("endpoint", "management"),
            ("authority-host", "http://login.microsoftonline.com"),
            ("subscription-id", "a/b"),
            ("region", "West Europe"),
            ("zones", "1,b"),
            ("instance-type", "large"),
            ("image-id", "peerpod"),
            ("subnet-id", "pods"),
            ("security-group-id", SUBNET_ID),
            ("market", "free"),
            ("tags", "a,microsoft.x=1,peerpod.node=y"),
            ("ssh-public-key", "ssh-dss AAAA"),
            ("client-id", "a b"),
            ("root-volume-size", "5000"),
            ("image-ids", "x"),
        ])
        .unwrap_err();
        for part in [
            "write one of public, usgovernment, china",
            "not a URL; write it like https://management.azure.com",
            "not a URL; write it like https://login.microsoftonline.com",
            "no name in Azure has",
            "write it like westeurope",
            "b is not a zone",
            "write it like Standard_DC2as_v5",
            "not the id of an image",
            "providers/microsoft.network/virtualnetworks/subnets",
            "providers/microsoft.network/networksecuritygroups",
            "write one of on-demand, spot, spot-first",
            "`a` is not key=value",
            "microsoft.x is taken",
            "peerpod.node is taken",
            "write it like ssh-ed25519",
            "not an id; write it like 00000000",
            "write at most 4095",
            "image-ids",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
    }

    #[test]
    fn half_a_client_is_refused_and_not_shown() {
        let read = |flags: &[(&str, &str)]| {
            // A secret is not taken from a flag.
            let env = [("PEERPOD_PROVIDER_AZURE_CLIENT_SECRET".to_owned(), "hush".to_owned())].into();
            read_with(flags, env)
        };
        let told = read(&[("client-id", "c")]).unwrap_err();
        assert!(told.contains("tenant-id or client-id is missing") && !told.contains("hush"), "{told}");
        let config = read(&[("client-id", "c"), ("tenant-id", "t")]).unwrap();
        assert!(matches!(&config.credentials, AzureCredentials::Secret { client, .. } if client == "c"));
        assert!(!format!("{config:?}").contains("hush"));
    }
}
