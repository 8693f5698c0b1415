//! Defines and reads the settings of the provider, `provider.gcp.*`. Reads configuration, touches nothing else.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::{Reader, Secret};
use peerpod_provider_api::{Arch, Confidential, Market};
use peerpod_provider_cloud::Alphabet;
use peerpod_provider_cloud::settings::{self, Price, TypeForm};

use crate::links::{self, GcpImage};

/// Labels that Compute Engine accepts. Other alphabets are possible there, but not in all of its filters.
pub const ALPHABET: Alphabet = Alphabet {
    cloud: "Google Cloud",
    max_marks: 64,
    max_name: 63,
    max_value: 63,
    name: is_of_a_label,
    value: is_of_a_label,
    escapes: false,
    reserved: &["goog", "peerpod-"],
    reserves_values: false,
    shown: None,
};

/// Whether a label may contain the character.
pub(crate) fn is_of_a_label(character: char) -> bool {
    character.is_ascii_lowercase() || character.is_ascii_digit() || "_-".contains(character)
}

/// Names of machine types. The default can be confidential.
const TYPE: TypeForm = TypeForm { default: "n2d-standard-2", is_type };

fn is_type(name: &str) -> bool {
    links::is_name(name) && name.contains('-')
}

/// The metadata service. An address, because a pod's DNS may lack the name.
const METADATA: &str = "http://169.254.169.254";
/// Largest number of VMs that one call makes. They share a ticket. The limit of `bulkInsert` is 5000.
const BATCH: u32 = 500;
/// Largest boot disk, in GiB.
const MAX_ROOT_GIB: u32 = 65_536;
/// Most network tags of a VM.
const MAX_NETWORK_TAGS: usize = 64;

/// Settings of the provider.
#[derive(Debug, Clone)]
pub struct GcpConfig {
    /// Whether VMs are created, not only listed and deleted.
    pub creates: bool,
    /// Project of the VMs.
    pub project: String,
    /// Zones of the VMs, all in one region; empty only where nothing is created.
    pub zones: Vec<String>,
    /// URL of the Compute Engine API; `None`: the public one.
    pub endpoint: Option<String>,
    /// Credentials.
    pub credentials: GcpCredentials,
    /// URL of the metadata service, which has the token of the node's or the pod's own identity.
    pub metadata: String,
    /// Image of the VMs; `None` only where nothing is created.
    pub image: Option<GcpImage>,
    /// Types that pods may get; never empty, always contains [`GcpConfig::instance_type`].
    pub instance_types: Vec<String>,
    /// Type for pods that request none.
    pub instance_type: String,
    /// Architecture of the pods.
    pub arch: Arch,
    /// Network of the VMs.
    pub nic: GcpNic,
    /// Network of the second NIC of pods that request one.
    pub second_nic: Option<GcpNic>,
    /// Network tags, which firewall rules name.
    pub network_tags: Vec<String>,
    /// Whether VMs get a public address. The node then uses this address.
    pub use_public_ip: bool,
    /// Technology that keeps a VM's memory from its host; `None`: plain VMs.
    pub confidential: Option<Confidential>,
    /// Whether VMs start signed code only.
    pub secure_boot: bool,
    /// Service account (e-mail address) of pod VMs, which grants pods access to Google Cloud. Normally none.
    pub service_account: Option<String>,
    /// Purchase options of the VMs. With both, on demand is the fallback where there is no spot capacity.
    pub markets: Vec<Market>,
    /// Prices of types, as set by the administrator.
    pub prices: Vec<Price>,
    /// The boot disk.
    pub root: RootDisk,
    /// Labels that the administrator sets on every VM and its boot disk.
    pub tags: BTreeMap<String, String>,
    /// Resource-manager tags on every VM: keys and values as the API names them.
    pub resource_manager_tags: BTreeMap<String, String>,
    /// Maximum number of VMs that one call makes; 0: one call and one ticket per VM.
    pub batch: u32,
    /// Longest wait for one answer of the API.
    pub call_timeout: Duration,
}

/// Credentials for Google Cloud.
#[derive(Debug, Clone)]
pub enum GcpCredentials {
    /// JSON of a service-account key, or of workload identity federation.
    Json(Secret),
    /// File with such JSON; read again at each renewal.
    File(PathBuf),
    /// `GOOGLE_APPLICATION_CREDENTIALS` if it is set, otherwise the metadata service of the node or of GKE.
    Default,
}

/// Network of a NIC, by paths below the API's version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcpNic {
    /// Network; `None`: that of the subnetwork.
    pub network: Option<String>,
    /// Subnetwork; `None`: that of the region, in a network that makes its own.
    pub subnetwork: Option<String>,
}

/// Boot disk; deleted with its VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootDisk {
    /// Minimum size in GiB; an image may need more. 0: the size of the image.
    pub size_gib: u32,
    /// Type of the disk.
    pub kind: String,
}

impl GcpConfig {
    /// Reads `provider.gcp.*`. The reader collects the mistakes. A process that does not create (the cluster's
    /// controller) needs a project and credentials, but no zone and no image.
    pub fn read(reader: &mut Reader, creates: bool) -> GcpConfig {
        reader.section("provider.gcp", |section| {
            let project = project(section);
            let zones = zones(section, creates);
            let region = zones.first().map(|zone| links::region_of(zone).to_owned()).unwrap_or_default();
            let (instance_type, instance_types) = settings::types(section, TYPE);
            GcpConfig {
                creates,
                endpoint: settings::endpoint(
                    section,
                    "URL of the Compute Engine API, for a private endpoint; default: the public one",
                    "https://compute-example.p.googleapis.com",
                ),
                credentials: credentials(section),
                metadata: section.constant("metadata", "METADATA", METADATA.to_owned()),
                image: image(section, &project, creates),
                arch: arch(section),
                nic: nic(section, &project, &region),
                second_nic: second_nic(section, &project, &region),
                network_tags: network_tags(section),
                use_public_ip: settings::use_public_ip(section),
                confidential: confidential(section),
                secure_boot: settings::secure_boot(section),
                service_account: service_account(section),
                markets: settings::market(section),
                prices: settings::prices(section, &instance_types, TYPE, "the smallest type first"),
                root: RootDisk::read(section),
                tags: tags(section),
                resource_manager_tags: resource_manager_tags(section, &project),
                batch: section.constant("batch", "BATCH", BATCH),
                call_timeout: settings::call_timeout(section),
                instance_types,
                instance_type,
                project,
                zones,
            }
        })
    }
}

impl GcpConfig {
    /// Returns the region of the zones; `None` without zones.
    pub(crate) fn region(&self) -> Option<&str> {
        self.zones.first().map(|zone| links::region_of(zone))
    }
}

fn project(section: &mut Reader) -> String {
    let project: String =
        section.required("project-id", "id of the project of the VMs, like my-project-1").unwrap_or_default();
    if !project.is_empty() && !links::is_project(&project) {
        section.mistake("project-id", "not the id of a project; write it like my-project-1, not its number");
    }
    project
}

fn zones(section: &mut Reader, creates: bool) -> Vec<String> {
    let help = "zones of the VMs, all in one region, like us-central1-a";
    let zones: Vec<String> = match creates {
        true => section.required("zones", help).unwrap_or_default(),
        false => section.get("zones", "", help),
    };
    if let Some(bad) = zones.iter().find(|zone| !links::is_zone(zone)) {
        section.mistake("zones", format!("{bad} is not a zone; write it like us-central1-a"));
    }
    let mut regions: Vec<&str> = zones.iter().map(|zone| links::region_of(zone)).collect();
    regions.dedup();
    if regions.len() > 1 {
        let why = format!(
            "in the regions {}; a node reaches VMs of its own region, keep one",
            regions.join(" and ")
        );
        section.mistake("zones", why);
    }
    zones
}

fn credentials(section: &mut Reader) -> GcpCredentials {
    let json: Option<Secret> = section.optional(
        "credentials",
        "JSON of a service-account key or of workload identity federation; default: the metadata service",
    );
    let file: Option<PathBuf> = section
        .optional("credentials-file", "file with such JSON; default: that of GOOGLE_APPLICATION_CREDENTIALS");
    match (json, file) {
        (Some(json), None) => GcpCredentials::Json(json),
        (None, Some(file)) => GcpCredentials::File(file),
        (Some(json), Some(_)) => {
            section.mistake("credentials-file", "given together with credentials; keep one of them");
            GcpCredentials::Json(json)
        }
        (None, None) => GcpCredentials::Default,
    }
}

fn image(section: &mut Reader, project: &str, creates: bool) -> Option<GcpImage> {
    let help = "the pod VM's image: its name, family/NAME, or projects/PROJECT/global/images/NAME";
    let text: Option<String> = match creates {
        true => section.required("image", help),
        false => section.optional("image", help),
    };
    let text = text?;
    let image = GcpImage::parse(&text, project);
    if image.is_none() {
        section.mistake("image", "not an image; write it like projects/my-project-1/global/images/podvm-1");
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

fn nic(section: &mut Reader, project: &str, region: &str) -> GcpNic {
    let network: Option<String> = section
        .optional("network", "network of the VMs: its name or path; default: the subnetwork's, or `default`");
    let subnetwork: Option<String> = section.optional(
        "subnetwork",
        "subnetwork of the VMs: its name or path; required unless the network makes its own",
    );
    let network = network.or_else(|| subnetwork.is_none().then(|| "default".to_owned()));
    linked(section, project, region, ["network", "subnetwork"], [network, subnetwork])
}

fn second_nic(section: &mut Reader, project: &str, region: &str) -> Option<GcpNic> {
    let network: Option<String> =
        section.optional("second-network", "network of a pod's second NIC: its name or path; another one");
    let subnetwork: Option<String> = section.optional(
        "second-subnetwork",
        "subnetwork of a pod's second NIC, in another network; without both no pod gets one",
    );
    if network.is_none() && subnetwork.is_none() {
        return None;
    }
    Some(linked(section, project, region, ["second-network", "second-subnetwork"], [network, subnetwork]))
}

/// Returns the NIC of two settings, by their keys and values.
fn linked(
    section: &mut Reader,
    project: &str,
    region: &str,
    keys: [&str; 2],
    [network, subnetwork]: [Option<String>; 2],
) -> GcpNic {
    let network = network.map(|text| links::network(&text, project));
    if network == Some(None) {
        section.mistake(keys[0], "not a network; write its name, or projects/PROJECT/global/networks/NAME");
    }
    // Without a zone there is no region, and a name alone is no mistake.
    let region = if region.is_empty() { "unknown" } else { region };
    let subnetwork = subnetwork.map(|text| links::subnetwork(&text, project, region));
    if subnetwork == Some(None) {
        let why = "not a subnetwork; write its name, or projects/PROJECT/regions/REGION/subnetworks/NAME";
        section.mistake(keys[1], why);
    }
    GcpNic { network: network.flatten(), subnetwork: subnetwork.flatten() }
}

fn network_tags(section: &mut Reader) -> Vec<String> {
    let tags: Vec<String> =
        section.get("network-tags", "", "network tags of the VMs, which firewall rules name");
    if let Some(bad) = tags.iter().find(|tag| !links::is_name(tag)) {
        section.mistake(
            "network-tags",
            format!("{bad} is no network tag; use lower-case letters, digits and -"),
        );
    }
    if tags.len() > MAX_NETWORK_TAGS {
        section.mistake("network-tags", format!("more than {MAX_NETWORK_TAGS}; remove some"));
    }
    tags
}

fn confidential(section: &mut Reader) -> Option<Confidential> {
    let help =
        "technology that keeps VMs' memory from the host: none, sev, sev_snp or tdx; the type must have it";
    Confidential::from_word(&section.choice(
        "confidential",
        "sev_snp",
        &["none", "sev", "sev_snp", "tdx"],
        help,
    ))
}

fn service_account(section: &mut Reader) -> Option<String> {
    let account: Option<String> = section
        .optional("service-account", "service account (e-mail address) that pods may use; default: none");
    if account.as_ref().is_some_and(|account| !account.contains('@')) {
        section.mistake(
            "service-account",
            "not an e-mail address; write it like pods@my-project-1.iam.gserviceaccount.com",
        );
    }
    account
}

/// Reads the labels. Google Cloud accepts no capital letters, and the provider changes no label silently.
fn tags(section: &mut Reader) -> BTreeMap<String, String> {
    let tags = settings::tags(section, "labels on VMs and their boot disks, as key=value", &ALPHABET);
    for (key, value) in &tags {
        let is_label = key.starts_with(|first: char| first.is_ascii_lowercase())
            && key.chars().all(is_of_a_label)
            && value.chars().all(is_of_a_label);
        if !is_label {
            let why = format!("`{key}={value}` is no label; use lower-case letters, digits, _ and -");
            section.mistake("tags", why);
        }
    }
    tags
}

/// Reads the resource-manager tags. A key without an owner is one of the project.
fn resource_manager_tags(section: &mut Reader, project: &str) -> BTreeMap<String, String> {
    let help = "resource-manager tags on VMs, as key=value, tagKeys/ID=tagValues/ID or PROJECT/key=value";
    let pairs: Vec<String> = section.get("resource-manager-tags", "", help);
    let mut tags = BTreeMap::new();
    for pair in &pairs {
        match pair.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            Some((key, value)) if !key.is_empty() && !value.is_empty() => {
                let key = if key.contains('/') { key.to_owned() } else { format!("{project}/{key}") };
                tags.insert(key, value.to_owned());
            }
            _ => section.mistake("resource-manager-tags", format!("`{pair}` is not key=value; correct it")),
        }
    }
    tags
}

impl RootDisk {
    fn read(section: &mut Reader) -> RootDisk {
        let size_gib = settings::root_volume_size(section, "10", MAX_ROOT_GIB);
        let help = "type of the boot disk: pd-standard, pd-balanced, pd-ssd, hyperdisk-balanced";
        let kind: String = section.get("root-volume-type", "pd-balanced", help);
        if !links::is_name(&kind) {
            section.mistake("root-volume-type", "not a type of disk; write it like pd-balanced");
        }
        RootDisk { size_gib, kind }
    }
}

#[cfg(test)]
pub(crate) mod tests;
