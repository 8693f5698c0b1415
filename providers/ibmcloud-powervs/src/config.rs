//! Defines and reads the settings of the PowerVS provider, `provider.ibmcloud-powervs.*`. Reads configuration, touches
//! nothing else.

use std::collections::BTreeMap;
use std::time::Duration;

use peerpod_base::config::{Reader, Secret};
use peerpod_provider_cloud::settings;
use peerpod_provider_rest::ibm;

use crate::size::{VmSize, is_system, quarters};

/// Time between two lists that both lack a VM which may have been made.
const SETTLE: Duration = Duration::from_secs(3);
/// First pause of each wait for a VM.
const PAUSE: Duration = Duration::from_millis(500);

/// Settings of the provider.
#[derive(Debug, Clone)]
pub struct PowerVsConfig {
    /// Whether VMs are created, not only listed and deleted.
    pub creates: bool,
    /// URL of the PowerVS API; `None`: the region's.
    pub endpoint: Option<String>,
    /// URL of IAM.
    pub iam: String,
    /// API key of a user or of a service id; `None`: each call fails with the remedy.
    pub key: Option<Secret>,
    /// Zone of the workspace, like `dal12`.
    pub zone: String,
    /// Id of the workspace.
    pub workspace: String,
    /// Id or name of the network of the VMs.
    pub network: String,
    /// Network of the second NIC of pods that request one.
    pub second_network: Option<String>,
    /// Id of the image of the VMs; `None`: a process that does not create.
    pub image: Option<String>,
    /// Size of VMs for pods that request none, and the system type of all.
    pub size: VmSize,
    /// Kind of processors: `shared`, `capped` or `dedicated`.
    pub processor_type: String,
    /// Name of the SSH key of the VMs.
    pub key_name: Option<String>,
    /// Whether the node uses the public address that the network gives.
    pub use_public_ip: bool,
    /// Tags of the administrator on every VM.
    pub tags: BTreeMap<String, String>,
    /// Time between two lists that both lack a VM which may have been made.
    pub settle: Duration,
    /// First pause of each wait for a VM.
    pub pause: Duration,
    /// Longest wait for one answer of the API.
    pub call_timeout: Duration,
}

impl PowerVsConfig {
    /// Reads `provider.ibmcloud-powervs.*`. The reader collects the mistakes. A process that does not create (the
    /// cluster's controller) needs key, zone and workspace, but no image and no network.
    pub fn read(reader: &mut Reader, creates: bool) -> PowerVsConfig {
        reader.section("provider.ibmcloud-powervs", |section| {
            let processor_type = processor_type(section);
            PowerVsConfig {
                creates,
                endpoint: settings::endpoint(
                    section,
                    "URL of the PowerVS API, for a private endpoint; default: the region's",
                    "https://private.dal.power-iaas.cloud.ibm.com",
                ),
                iam: ibm::iam(section),
                key: section.optional("api-key", "API key of a service id"),
                zone: zone(section),
                workspace: name(section, "workspace-id", "id of the workspace (its GUID)", true),
                network: name(section, "network-id", "network of the VMs", creates),
                second_network: Some(name(
                    section,
                    "second-network-id",
                    "network of a pod's second NIC; without it no pod gets one",
                    false,
                ))
                .filter(|network| !network.is_empty()),
                image: Some(name(section, "image-id", "the pod VM's image, for ppc64le", creates))
                    .filter(|image| !image.is_empty()),
                size: size(section, &processor_type),
                key_name: section.optional("key-name", "name of the VMs' SSH key; default: none"),
                use_public_ip: settings::use_public_ip(section),
                tags: settings::tags(section, "tags on VMs, as key=value", &ibm::TAGS),
                settle: section.constant("settle-time", "SETTLE", SETTLE),
                pause: section.constant("first-pause", "PAUSE", PAUSE),
                call_timeout: settings::call_timeout(section),
                processor_type,
            }
        })
    }

    /// Returns the region of the zone: `dal` of `dal12`, `us-east` of `us-east`.
    pub fn region(&self) -> &str {
        self.zone.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-')
    }
}

fn zone(section: &mut Reader) -> String {
    let zone: String =
        section.required("zone", "zone of the workspace, like dal12 or us-east").unwrap_or_default();
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let begins = |text: &str| text.starts_with(|c: char| c.is_ascii_lowercase());
    if !zone.is_empty() && (!begins(&zone) || !zone.chars().all(fits)) {
        section.mistake("zone", "not a zone of PowerVS; write it like dal12 or us-east");
    }
    zone
}

/// Reads an id or name that becomes a part of paths and bodies.
fn name(section: &mut Reader, key: &'static str, help: &str, is_required: bool) -> String {
    let text: Option<String> =
        if is_required { section.required(key, help) } else { section.optional(key, help) };
    let text = text.unwrap_or_default();
    if !text.is_empty() && !is_name(&text) {
        section.mistake(key, "has characters that no id in PowerVS has; correct it");
    }
    text
}

/// Whether a text has the form of an id or name of PowerVS.
pub(crate) fn is_name(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=128).contains(&text.len()) && text.chars().all(fits) && !text.starts_with('.')
}

fn processor_type(section: &mut Reader) -> String {
    let help = "kind of processors; dedicated ones are whole cores";
    section.choice("processor-type", "shared", &["shared", "capped", "dedicated"], help)
}

fn size(section: &mut Reader, processor_type: &str) -> VmSize {
    let system: String = section.get("system-type", "s922", "system that has the VMs, like s922 or e1080");
    if !is_system(&system) {
        section.mistake("system-type", "not a system type; write it like s922");
    }
    let cores: String = section.get(
        "processors",
        "0.5",
        "processors of a VM in quarters of a core when the pod asks for none",
    );
    let found = quarters(&cores);
    match found {
        None => section.mistake("processors", "not a number of quarters; write it like 0.25 or 1.5"),
        Some(found) if processor_type == "dedicated" && found % 4 != 0 => {
            section.mistake("processors", "dedicated processors are whole; write it like 1");
        }
        Some(_) => {}
    }
    let memory: u32 = section.get("memory-gib", "2", "memory of a VM in GiB when the pod asks for none");
    if !(2..=65_536).contains(&memory) {
        section.mistake("memory-gib", "a VM has 2 to 65536; correct it");
    }
    VmSize { system, quarters: found.unwrap_or(2), memory }
}

#[cfg(test)]
pub(crate) mod tests {
    use peerpod_base::config::Sources;

    use super::*;

    /// Reads these settings over the required ones.
    pub(crate) fn read(flags: &[(&str, &str)]) -> Result<PowerVsConfig, String> {
        let required =
            [("zone", "dal12"), ("workspace-id", "w-1"), ("network-id", "net-1"), ("image-id", "image-1")];
        let required = required.iter().filter(|(key, _)| !flags.iter().any(|(other, _)| other == key));
        let flags = required
            .chain(flags)
            .map(|(key, value)| (format!("provider.ibmcloud-powervs.{key}"), (*value).to_owned()));
        let sources = Sources { flags: flags.collect(), ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = PowerVsConfig::read(&mut reader, true);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn the_defaults_are_those_of_a_small_vm() {
        let config = read(&[]).unwrap();
        assert_eq!(
            (config.size.to_string().as_str(), config.processor_type.as_str()),
            ("s922-0.5x2", "shared")
        );
        for (zone, region) in
            [("dal12", "dal"), ("us-east", "us-east"), ("eu-de-1", "eu-de"), ("wdc06", "wdc")]
        {
            assert_eq!(read(&[("zone", zone)]).unwrap().region(), region);
        }
        let mut reader = Reader::load(Sources::default(), &["provider"], &[]).unwrap();
        PowerVsConfig::read(&mut reader, true);
        let told = reader.finish().unwrap_err().to_string();
        for key in ["zone", "workspace-id", "network-id", "image-id"] {
            assert!(told.contains(key), "{key} in {told}");
        }
    }

    #[test]
    fn all_mistakes_are_reported_at_once_with_a_remedy() {
        let told = read(&[
            ("zone", "Dallas"),
            ("workspace-id", "a/b"),
            ("system-type", "S922"),
            ("processors", "0.3"),
            ("memory-gib", "1"),
            ("processor-type", "fast"),
            ("tags", "a,peerpod.node=y"),
            ("iam-endpoint", "http://iam.cloud.ibm.com"),
        ])
        .unwrap_err();
        for part in [
            "write it like dal12",
            "no id in PowerVS has",
            "write it like s922",
            "write it like 0.25",
            "2 to 65536",
            "write one of shared, capped, dedicated",
            "`a` is not key=value",
            "peerpod.node is taken",
            "write it like https://iam.cloud.ibm.com",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
        let told = read(&[("processor-type", "dedicated")]).unwrap_err();
        assert!(told.contains("dedicated processors are whole"), "{told}");
    }
}
