//! Defines and reads the settings of the AWS provider, `provider.aws.*`. Reads configuration, touches nothing else.

use std::collections::BTreeMap;
use std::time::Duration;

use peerpod_base::config::{Reader, Secret};
use peerpod_provider_api::Market;
use peerpod_provider_cloud::Alphabet;
use peerpod_provider_cloud::settings::{self, Price, TypeForm};

/// Tags that EC2 accepts. All its services accept letters, digits, spaces and `+-=._:/@`; labels of pods may contain any
/// character.
pub const ALPHABET: Alphabet = Alphabet {
    cloud: "AWS",
    max_marks: 50,
    max_name: 128,
    max_value: 256,
    name: is_of_a_tag,
    value: is_of_a_tag,
    escapes: false,
    reserved: &["aws:"],
    reserves_values: true,
    shown: Some("Name"),
};

fn is_of_a_tag(character: char) -> bool {
    character.is_alphanumeric() || " +-=._:/@".contains(character)
}

/// Names of instance types, like `m6a.large`.
const TYPE: TypeForm = TypeForm { default: "m6a.large", is_type };

fn is_type(name: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    name.split_once('.').is_some_and(|(family, size)| plain(family) && plain(size))
}

/// Interval of checks whether EC2 takes spot VMs back, while there are any. EC2 gives two minutes.
const SPOT_WATCH: Duration = Duration::from_secs(20);
/// Longest look-up of the account's quota. Many VPCs have no route to Service Quotas, and the node waits 5 s for the first
/// preflight.
const QUOTA_WAIT: Duration = Duration::from_secs(3);
/// Largest number of VMs that one call makes. They share a ticket. EC2's limit for a fleet is 1000.
const BATCH: u32 = 500;

/// Largest EBS volume, in GiB.
const MAX_ROOT_GIB: u32 = 65_536;

/// Settings of the AWS provider.
#[derive(Debug, Clone)]
pub struct AwsConfig {
    /// Whether VMs are created, not only listed and deleted.
    pub creates: bool,
    /// Whether the preflight makes no launch template.
    pub dry: bool,
    /// Region; `None`: the region that the SDK's chain finds (environment, profile, the node's metadata).
    pub region: Option<String>,
    /// URL of the EC2 API; `None`: the SDK's default.
    pub endpoint: Option<String>,
    /// Credentials for AWS.
    pub credentials: AwsCredentials,
    /// Types that pods may get; never empty, always contains [`AwsConfig::instance_type`].
    pub instance_types: Vec<String>,
    /// Type for pods that request none.
    pub instance_type: String,
    /// Architecture of the pods, in EC2's terms: `x86_64` or `arm64`.
    pub arch: String,
    /// Image of the VMs.
    pub image: AwsImage,
    /// Subnets of the VMs; empty: the node's own subnet.
    pub subnet_ids: Vec<String>,
    /// Security groups of the VMs; empty: the node's own security groups.
    pub security_group_ids: Vec<String>,
    /// SSH key pair, for debugging.
    pub key_name: Option<String>,
    /// Instance profile (name or ARN) of pod VMs, which grants pods access to AWS. Normally none.
    pub instance_profile: Option<String>,
    /// Subnets of the second NIC of pods that request one; one per zone.
    pub second_subnet_ids: Vec<String>,
    /// Whether VMs get a public address. The node then uses this address.
    pub use_public_ip: bool,
    /// Whether VMs are confidential by SEV-SNP.
    pub confidential: bool,
    /// Launch template of the administrator, by name or id, used instead of a generated one.
    pub launch_template: Option<String>,
    /// Purchase options of the VMs. With both, on demand is the fallback where there is no spot capacity.
    pub markets: Vec<Market>,
    /// Prices of types, as set by the administrator.
    pub prices: Vec<Price>,
    /// Interval of the checks whether EC2 takes spot VMs back; zero: no checks.
    pub spot_watch: Duration,
    /// Longest look-up of the account's quota.
    pub quota_wait: Duration,
    /// EC2 call that makes VMs.
    pub launch: AwsLaunchCall,
    /// Tenancy of the VMs: hosts shared with no other account (`dedicated`), or dedicated hosts (`host`).
    pub tenancy: Option<String>,
    /// The root disk.
    pub root: RootDisk,
    /// Tags of the administrator on every VM, its disks and interfaces.
    pub tags: BTreeMap<String, String>,
    /// Maximum number of VMs that one call makes; 0: one call and one ticket per VM.
    pub batch: u32,
    /// Longest wait for one answer of the API.
    pub call_timeout: Duration,
}

/// Credentials for AWS.
#[derive(Debug, Clone)]
pub enum AwsCredentials {
    /// The SDK's chain: environment, profile, web identity (IRSA), pod identity, the node's instance profile.
    Chain,
    /// An access key.
    Key {
        /// Id of the key.
        id: Secret,
        /// Secret of the key.
        secret: Secret,
        /// Session token of a temporary key.
        token: Option<Secret>,
    },
}

/// Image that VMs boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AwsImage {
    /// AMI with this id.
    Id(String),
    /// Newest AMI with a name that matches a pattern with `*`, from one of these owners.
    Named {
        /// Pattern of the name.
        name: String,
        /// Account ids, `self`, `amazon` or `aws-marketplace`.
        owners: Vec<String>,
    },
    /// Image of the administrator's launch template.
    OfTemplate,
}

/// EC2 call that makes VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AwsLaunchCall {
    /// `CreateFleet` of type instant. EC2 tries all types and subnets itself, and the call's token bucket is ten times
    /// as large as that of `RunInstances`.
    Fleet,
    /// `RunInstances`, for one offering after the other. Supports launches that a fleet cannot do (dedicated hosts).
    Run,
}

/// Root disk; deleted with its VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootDisk {
    /// Minimum size in GiB; an image may need more. 0: the size of the image.
    pub size_gib: u32,
    /// Whether the disk is encrypted even if the account's default is not to encrypt.
    pub encrypted: bool,
    /// KMS key; `None`: the account's key for EBS.
    pub kms_key_id: Option<String>,
}

impl AwsConfig {
    /// Reads `provider.aws.*`. The reader collects the mistakes. A process that does not create (the cluster's
    /// controller) needs credentials and a region, but no image.
    pub fn read(reader: &mut Reader, creates: bool) -> AwsConfig {
        reader.section("provider.aws", |section| {
            let (instance_type, instance_types) = settings::types(section, TYPE);
            let help = "name or id of your own launch template; without it Peerpod makes one";
            let launch_template: Option<String> = section.optional("launch-template", help);
            let (tenancy, launch) = launch(section, launch_template.is_some());
            let batch = section.constant("batch", "BATCH", BATCH);
            AwsConfig {
                creates,
                dry: false,
                region: section.optional(
                    "region",
                    "region of the VMs; default: the region of the environment, the profile or the node",
                ),
                endpoint: settings::endpoint(
                    section,
                    "URL of the EC2 API, for a private endpoint; default: the region's endpoint",
                    "https://vpce-0123.ec2.eu-central-1.vpce.amazonaws.com",
                ),
                credentials: credentials(section),
                arch: arch(section),
                image: image(section, launch_template.is_some() || !creates),
                subnet_ids: ids(
                    section,
                    "subnet-ids",
                    "subnet-",
                    "subnets of the VMs, the preferred first; default: the node's subnet",
                ),
                security_group_ids: security_groups(section),
                second_subnet_ids: ids(
                    section,
                    "second-subnet-ids",
                    "subnet-",
                    "subnets of a pod's second NIC, one per zone; without them no pod gets one",
                ),
                use_public_ip: settings::use_public_ip(section),
                key_name: section.optional("key-name", "SSH key pair of the VMs; default: none"),
                instance_profile: section.optional(
                    "instance-profile",
                    "instance profile (name or ARN) that pods may use; default: none",
                ),
                confidential: settings::confidential(section, "SEV-SNP"),
                markets: settings::market(section),
                prices: settings::prices(
                    section,
                    &instance_types,
                    TYPE,
                    "EC2's list price, and the present spot prices",
                ),
                root: RootDisk::read(section),
                tags: settings::tags(
                    section,
                    "tags on VMs, their disks and interfaces, as key=value",
                    &ALPHABET,
                ),
                spot_watch: section.constant("spot-watch", "SPOT_WATCH", SPOT_WATCH),
                quota_wait: section.constant("quota-wait", "QUOTA_WAIT", QUOTA_WAIT),
                batch: if launch == AwsLaunchCall::Fleet { batch } else { 0 },
                call_timeout: settings::call_timeout(section),
                instance_types,
                instance_type,
                launch_template,
                launch,
                tenancy,
            }
        })
    }
}

impl AwsConfig {
    /// Returns whether the administrator has set a price for this market.
    pub fn has_prices(&self, market: Market) -> bool {
        self.prices.iter().any(|one| one.market == market)
    }
}

fn arch(section: &mut Reader) -> String {
    let this = if std::env::consts::ARCH == "aarch64" { "arm64" } else { "x86_64" };
    let help = "architecture of the pods; default: this node's architecture";
    section.choice("arch", this, &["x86_64", "arm64"], help)
}

/// Returns the tenancy and the call that suits it.
fn launch(section: &mut Reader, has_template: bool) -> (Option<String>, AwsLaunchCall) {
    let tenancy: Option<String> =
        section.optional("tenancy", "dedicated (your own hardware) or host (dedicated hosts)");
    if tenancy.as_ref().is_some_and(|tenancy| !["dedicated", "host"].contains(&tenancy.as_str())) {
        section.mistake("tenancy", "not known; write dedicated or host, or remove it");
    }
    let default = if tenancy.as_deref() == Some("host") { "run" } else { "fleet" };
    let launch = match section.derived("launch", "provider.aws.tenancy", default.to_owned()).as_str() {
        "run" => AwsLaunchCall::Run,
        _ => AwsLaunchCall::Fleet,
    };
    if launch == AwsLaunchCall::Run && has_template {
        section.mistake("launch-template", "needs a fleet, which cannot use dedicated hosts; remove it");
    }
    (tenancy, launch)
}

fn credentials(section: &mut Reader) -> AwsCredentials {
    let id: Option<Secret> = section.optional(
        "access-key-id",
        "access key; default: the SDK's chain (IRSA, pod identity, instance profile)",
    );
    let secret: Option<Secret> = section.optional("secret-key", "the access key's secret");
    let token: Option<Secret> = section.optional("session-token", "session token of a temporary access key");
    section.removed("profile", "set AWS_PROFILE in the environment");
    match (id, secret) {
        (Some(id), Some(secret)) => return AwsCredentials::Key { id, secret, token },
        (Some(_), None) => section.mistake("access-key-id", "secret-key is missing; give both or none"),
        (None, Some(_)) => section.mistake("secret-key", "access-key-id is missing; give both or none"),
        (None, None) if token.is_some() => {
            section
                .mistake("session-token", "access-key-id and secret-key are missing; give all three or none");
        }
        (None, None) => {}
    }
    AwsCredentials::Chain
}

fn image(section: &mut Reader, may_lack: bool) -> AwsImage {
    let id: Option<String> = section.optional("image-id", "the pod VM's AMI");
    let name: Option<String> =
        section.optional("image-name", "the newest AMI whose name fits, with *; instead of image-id");
    let owners: Vec<String> = section.get(
        "image-owners",
        "self",
        "allowed owners of the AMI that image-name finds: account ids, self, amazon",
    );
    match (id, name) {
        (Some(id), None) => {
            check_id(section, "image-id", "ami-", std::slice::from_ref(&id));
            AwsImage::Id(id)
        }
        (None, Some(name)) => {
            if owners.is_empty() {
                section.mistake(
                    "image-owners",
                    "empty; any account could publish an image of that name, name its owner",
                );
            }
            AwsImage::Named { name, owners }
        }
        (Some(_), Some(_)) => {
            section.mistake("image-name", "given together with image-id; keep one of them");
            AwsImage::Id(String::new())
        }
        (None, None) if may_lack => AwsImage::OfTemplate,
        (None, None) => {
            section.required::<String>(
                "image-id",
                "the pod VM's AMI, like ami-0123456789abcdef0; or give image-name",
            );
            AwsImage::Id(String::new())
        }
    }
}

/// Whether the text has the form of EC2's ids with this prefix.
pub(crate) fn is_id(text: &str, prefix: &str) -> bool {
    let hex = text.strip_prefix(prefix).unwrap_or_default();
    (8..=17).contains(&hex.len()) && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Reports a malformed id at start, before EC2 refuses a call.
fn check_id(section: &mut Reader, key: &str, prefix: &str, ids: &[String]) {
    if let Some(bad) = ids.iter().find(|id| !is_id(id, prefix)) {
        section.mistake(key, format!("{bad} is not an id; write it like {prefix}0123456789abcdef0"));
    }
}

fn ids(section: &mut Reader, key: &'static str, prefix: &str, help: &str) -> Vec<String> {
    let ids: Vec<String> = section.get(key, "", help);
    check_id(section, key, prefix, &ids);
    ids
}

fn security_groups(section: &mut Reader) -> Vec<String> {
    let help = "security groups of the VMs; default: the node's groups";
    let ids = ids(section, "security-group-ids", "sg-", help);
    if ids.len() > 16 {
        section.mistake("security-group-ids", "more than 16; an interface takes no more, remove some");
    }
    ids
}

impl RootDisk {
    fn read(section: &mut Reader) -> RootDisk {
        let size_gib = settings::root_volume_size(section, "30", MAX_ROOT_GIB);
        for key in ["root-volume-type", "root-volume-iops", "root-volume-throughput"] {
            section.removed(key, "the image gives the disk's type");
        }
        let encrypted: bool = section.get(
            "root-volume-encrypted",
            "false",
            "encrypt the root disk, independent of the account's default",
        );
        let kms_key_id: Option<String> = section.optional(
            "root-volume-kms-key-id",
            "KMS key of the root disk; default: the account's key for EBS",
        );
        if kms_key_id.is_some() && !encrypted {
            section.mistake(
                "root-volume-kms-key-id",
                "the disk is not encrypted; set root-volume-encrypted to true",
            );
        }
        RootDisk { size_gib, encrypted, kms_key_id }
    }
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::Sources;
    use peerpod_test_reference as reference;

    use super::*;

    fn read(flags: &[(&str, &str)]) -> Result<AwsConfig, String> {
        let flags = flags.iter().map(|(key, value)| (format!("provider.aws.{key}"), (*value).to_owned()));
        let sources = Sources { flags: flags.collect(), ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = AwsConfig::read(&mut reader, true);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn only_the_image_is_a_required_setting() {
        let config = read(&[("image-id", "ami-0123456789abcdef0")]).unwrap();
        assert_eq!(config.instance_types, ["m6a.large"]);
        assert!(config.confidential, "plain VMs are a decision");
        assert_eq!((&config.markets[..], config.launch), (&[Market::OnDemand][..], AwsLaunchCall::Fleet));
        assert_eq!(config.root.size_gib, 30);
        assert!(read(&[]).unwrap_err().contains("image-id"));
        let mut reader = Reader::load(Sources::default(), &["provider"], &[]).unwrap();
        AwsConfig::read(&mut reader, false);
        reader.finish().unwrap();
    }

    #[test]
    fn documented_settings_are_up_to_date() {
        let mut reader = Reader::load(Sources::default(), &["provider"], &[]).unwrap();
        AwsConfig::read(&mut reader, true);
        let mut settings = reader.asked();
        for setting in settings.iter_mut().filter(|setting| setting.key == "provider.aws.arch") {
            // The architecture of this machine.
            setting.default = None;
        }
        let text = reference::settings(&settings);
        reference::section("configuration.md", "aws", &text).unwrap();
    }

    #[test]
    fn all_mistakes_are_reported_at_once_with_a_remedy() {
        let told = read(&[
            ("endpoint", "ec2"),
            ("instance-type", "large"),
            ("image-name", "podvm-*"),
            ("image-id", "ami-12"),
            ("subnet-ids", "subnet-0123456789abcdef0,sub-1"),
            ("security-group-ids", "default"),
            ("market", "free"),
            ("tenancy", "mine"),
            ("root-volume-iops", "3000"),
            ("root-volume-kms-key-id", "k"),
            ("tags", "a,Name=x,peerpod.node=y"),
            ("image-ownes", "self"),
        ])
        .unwrap_err();
        for part in [
            "not a URL; write it like https://",
            "write it like m6a.large",
            "given together with image-id; keep one",
            "sub-1 is not an id",
            "default is not an id",
            "write one of on-demand, spot, spot-first",
            "write dedicated or host",
            "the image gives the disk's type",
            "set root-volume-encrypted to true",
            "`a` is not key=value",
            "Name is taken",
            "peerpod.node is taken",
            "image-ownes",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
    }

    #[test]
    fn half_an_access_key_is_refused() {
        let sources = Sources {
            env: [("PEERPOD_PROVIDER_AWS_SECRET_KEY".to_owned(), "hush".to_owned())].into(),
            flags: vec![("provider.aws.image-id".to_owned(), "ami-0123456789abcdef0".to_owned())],
            ..Sources::default()
        };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        AwsConfig::read(&mut reader, true);
        let told = reader.finish().unwrap_err().to_string();
        assert!(told.contains("access-key-id is missing") && !told.contains("hush"), "{told}");
    }
}
