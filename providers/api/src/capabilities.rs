//! Capabilities of a provider, and the check that refuses a request that exceeds them. Pure.

use std::num::NonZeroU32;

use crate::{Arch, Confidential, CreateRequest, DiskRequest, Error, Market, Size};

/// Abilities of a provider beyond making a VM from the configured image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Most bytes of raw user-data, before any encoding.
    pub max_user_data: usize,
    /// Whether a request may name an image other than the configured one.
    pub images: bool,
    /// Whether a request may name an instance type.
    pub instance_types: bool,
    /// Whether the provider makes VMs with GPUs.
    pub gpus: bool,
    /// Architectures that a request may name. Empty: the provider has one, and a request must not name it.
    pub archs: Vec<Arch>,
    /// Confidential-computing technologies that a request may name.
    pub confidential: Vec<Confidential>,
    /// Whether the provider makes spot VMs. (Every provider makes on-demand VMs.)
    pub spot: bool,
    /// Whether a request may choose zones. Without this, the provider cannot respect the zone of a disk either.
    pub zones: bool,
    /// Whether a VM can get a public IP address.
    pub public_ip: bool,
    /// Whether the provider attaches disks, in the request and through [`crate::Volumes`].
    pub volumes: bool,
    /// Whether a VM can get a second NIC.
    pub second_nic: bool,
    /// Most VMs that one call of [`crate::Batch`] makes; 0 without batches.
    pub max_batch: u32,
    /// Memory in MiB that the guest of the configured image needs in addition to its pod; 0: unknown. The caller adds
    /// it to [`Size::memory_mib`] before the request.
    pub guest_memory_mib: u64,
    /// Whether [`crate::Extensions::console`] is present.
    pub console: bool,
    /// Whether [`crate::Provider::events`] is present.
    pub events: bool,
}

impl Capabilities {
    /// Returns capabilities that cover only user-data of at most this many bytes: the start for a new provider.
    pub const fn minimal(max_user_data: usize) -> Capabilities {
        Capabilities {
            max_user_data,
            images: false,
            instance_types: false,
            gpus: false,
            archs: Vec::new(),
            confidential: Vec::new(),
            spot: false,
            zones: false,
            public_ip: false,
            volumes: false,
            second_nic: false,
            max_batch: 0,
            guest_memory_mib: 0,
            console: false,
            events: false,
        }
    }

    /// Refuses a request that exceeds these capabilities or contradicts itself. The decorator calls it before each
    /// create. A provider that may be used without the decorator calls it first in `create`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the field's name; [`Error::Invalid`] for user-data that is too long and for disks
    /// that cannot be attached to one VM.
    pub fn check(&self, request: &CreateRequest, provider: &str) -> Result<(), Error> {
        // Destructured without `..`: a new field does not compile until this check handles it.
        let CreateRequest {
            name,
            user_data,
            size: Size { vcpus: _, memory_mib: _, gpus, gpu_model },
            instance_type,
            image,
            disks,
            second_nic,
            labels: _,
            arch,
            confidential,
            market,
            zones,
            public_ip,
            // The provider's own text, which only the provider can check.
            placement: _,
        } = request;
        let asked = [
            (image.is_some() && !self.images, "image", "its own image"),
            (instance_type.is_some() && !self.instance_types, "instance_type", "an instance type by name"),
            (*gpus > 0 && !self.gpus, "size.gpus", "GPUs"),
            (gpu_model.is_some() && !self.gpus, "size.gpu_model", "a GPU model"),
            (!disks.is_empty() && !self.volumes, "disks", "disks"),
            (*market == Some(Market::Spot) && !self.spot, "market", "a spot VM"),
            (!zones.is_empty() && !self.zones, "zones", "a choice of zones"),
            (*second_nic && !self.second_nic, "second_nic", "a second NIC"),
            (*public_ip && !self.public_ip, "public_ip", "a public address"),
        ];
        for (refused, field, what) in asked {
            if refused {
                return Err(unsupported(name, provider, field, what, ""));
            }
        }
        if let Some(arch) = arch.filter(|arch| !self.archs.contains(arch)) {
            return Err(unsupported(name, provider, "arch", arch.word(), &listed(&self.archs)));
        }
        if let Some(tee) = confidential.filter(|tee| !self.confidential.contains(tee)) {
            let (what, have) = (format!("a confidential VM by {tee}"), listed(&self.confidential));
            return Err(unsupported(name, provider, "confidential", &what, &have));
        }
        if user_data.len() > self.max_user_data {
            return Err(Error::invalid(format!(
                "create of {name}: user-data of {} bytes is more than the {} that provider {provider} takes",
                user_data.len(),
                self.max_user_data
            )));
        }
        disks_fit_together(name, disks, zones)
    }

    /// Refuses a call for several VMs that exceeds these capabilities, as [`Capabilities::check`] does for one VM.
    ///
    /// # Errors
    /// Same as [`Capabilities::check`]; [`Error::Invalid`] for more than [`Capabilities::max_batch`] VMs;
    /// [`Error::Unsupported`] for disks.
    pub fn check_batch(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        provider: &str,
    ) -> Result<(), Error> {
        let (name, most) = (&request.name, self.max_batch);
        if count.get() > most {
            return Err(Error::invalid(format!(
                "create of {count} VMs {name}: provider {provider} makes at most {most} by one call"
            )));
        }
        self.check(request, provider)?;
        if !request.disks.is_empty() {
            let text = format!("create of {count} VMs {name}: a disk belongs to one VM");
            return Err(Error::unsupported("disks", text));
        }
        Ok(())
    }
}

fn unsupported(name: &str, provider: &str, field: &str, what: &str, have: &str) -> Error {
    let text = format!(
        "create of {name}: {what} cannot be had from provider {provider}{have}; leave it out or use another provider"
    );
    Error::unsupported(field, text)
}

fn listed(have: &[impl ToString]) -> String {
    let words: Vec<_> = have.iter().map(ToString::to_string).collect();
    if words.is_empty() { String::new() } else { format!(", which has {}", words.join(", ")) }
}

/// Checks that no disk is named twice and that all disks are in one zone that the VM may use.
fn disks_fit_together(name: &str, disks: &[DiskRequest], zones: &[String]) -> Result<(), Error> {
    let mut first: Option<(&str, &str)> = None;
    for (index, DiskRequest { volume, read_only: _, zone }) in disks.iter().enumerate() {
        if disks[..index].iter().any(|other| other.volume == *volume) {
            return Err(Error::invalid(format!("create of {name}: disk {volume} is asked for twice")));
        }
        let Some(zone) = zone.as_deref() else { continue };
        if let Some((other, elsewhere)) = first.filter(|(_, elsewhere)| *elsewhere != zone) {
            return Err(Error::invalid(format!(
                "create of {name}: disk {other} is in zone {elsewhere} and disk {volume} in zone {zone}; \
                 no VM can have both, the pod's volumes must be in one zone"
            )));
        }
        if !zones.is_empty() && !zones.iter().any(|one| one == zone) {
            return Err(Error::invalid(format!(
                "create of {name}: disk {volume} is in zone {zone}, but the VM is wanted in {}; \
                 allow that zone or move the volume",
                zones.join(" or ")
            )));
        }
        first = first.or(Some((volume, zone)));
    }
    Ok(())
}

/// Change of a request.
pub(crate) type Change = fn(&mut CreateRequest);

/// All features that a request may ask for and a provider may lack, for tests: the field, as [`Error::Unsupported`] names
/// it, and the change of a request that asks for it. A test compares the list with the fields of [`CreateRequest`].
pub(crate) const OPTIONAL: &[(&str, Change)] = &[
    ("image", |r| r.image = Some("some-image".into())),
    ("instance_type", |r| r.instance_type = Some("some.type".into())),
    ("size.gpus", |r| r.size.gpus = 1),
    ("size.gpu_model", |r| r.size.gpu_model = Some("some-gpu".into())),
    ("disks", |r| r.disks.push(DiskRequest { volume: "some-disk".into(), ..DiskRequest::default() })),
    ("arch", |r| r.arch = Some(Arch::S390x)),
    ("confidential", |r| r.confidential = Some(Confidential::Tdx)),
    ("market", |r| r.market = Some(Market::Spot)),
    ("zones", |r| r.zones.push("some-zone".into())),
    ("second_nic", |r| r.second_nic = true),
    ("public_ip", |r| r.public_ip = true),
];

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::Placement;

    /// Returns a request with every field filled. There is no `..`, so a new field must be filled here. It then belongs
    /// either in the table or in the list of fields that every provider honours.
    fn full() -> CreateRequest {
        CreateRequest {
            name: "pod".into(),
            user_data: "u".into(),
            size: Size { vcpus: 1, memory_mib: 1, gpus: 1, gpu_model: Some("g".into()) },
            instance_type: Some("t".into()),
            image: Some("i".into()),
            disks: vec![DiskRequest { volume: "v".into(), read_only: true, zone: Some("z".into()) }],
            second_nic: true,
            labels: BTreeMap::from([("k".into(), "v".into())]),
            arch: Some(Arch::Aarch64),
            confidential: Some(Confidential::Sev),
            market: Some(Market::Spot),
            zones: vec!["z".into()],
            public_ip: true,
            placement: Placement::new("p").ok(),
        }
    }

    fn everything() -> Capabilities {
        Capabilities {
            max_user_data: 16,
            images: true,
            instance_types: true,
            gpus: true,
            archs: Arch::ALL.to_vec(),
            confidential: Confidential::ALL.to_vec(),
            spot: true,
            zones: true,
            public_ip: true,
            volumes: true,
            second_nic: true,
            max_batch: 10,
            guest_memory_mib: 128,
            console: true,
            events: true,
        }
    }

    #[test]
    fn every_request_field_is_optional_or_supported_by_all() {
        let by_all = ["name", "user_data", "size", "size.vcpus", "size.memory_mib", "labels", "placement"];
        let known: BTreeSet<&str> = OPTIONAL.iter().map(|(field, _)| *field).chain(by_all).collect();
        let request = serde_json::to_value(full()).unwrap();
        let mut fields: BTreeSet<String> = request.as_object().unwrap().keys().cloned().collect();
        fields.extend(request["size"].as_object().unwrap().keys().map(|key| format!("size.{key}")));
        assert_eq!(fields.iter().map(String::as_str).collect::<BTreeSet<_>>(), known);
    }

    #[test]
    fn each_option_is_refused_without_its_capability() {
        let can = everything();
        can.check(&full(), "shelf").unwrap();
        for (wanted, ask) in OPTIONAL {
            let mut request = CreateRequest { name: "pod".into(), ..CreateRequest::default() };
            ask(&mut request);
            can.check(&request, "shelf").unwrap();
            let mut cannot = everything();
            match *wanted {
                "image" => cannot.images = false,
                "instance_type" => cannot.instance_types = false,
                "size.gpus" | "size.gpu_model" => cannot.gpus = false,
                "disks" => cannot.volumes = false,
                "arch" => cannot.archs = vec![Arch::X86_64],
                "confidential" => cannot.confidential = vec![Confidential::Sev],
                "market" => cannot.spot = false,
                "zones" => cannot.zones = false,
                "second_nic" => cannot.second_nic = false,
                "public_ip" => cannot.public_ip = false,
                other => panic!("{other}: name its capability here"),
            }
            match cannot.check(&request, "shelf") {
                Err(Error::Unsupported { field, text }) => {
                    assert_eq!(field, *wanted);
                    assert!(text.contains("create of pod") && text.contains("provider shelf"), "{text}");
                }
                answer => panic!("{wanted}: {answer:?}"),
            }
        }
    }

    #[test]
    fn every_provider_accepts_on_demand_and_an_empty_request() {
        let mut request = CreateRequest::default();
        Capabilities::minimal(0).check(&request, "shelf").unwrap();
        request.market = Some(Market::OnDemand);
        Capabilities::minimal(0).check(&request, "shelf").unwrap();
    }

    #[test]
    fn a_refusal_names_the_supported_values() {
        let can = Capabilities { archs: vec![Arch::X86_64, Arch::Aarch64], ..everything() };
        let request = CreateRequest { arch: Some(Arch::S390x), ..CreateRequest::default() };
        let text = can.check(&request, "shelf").unwrap_err().to_string();
        assert!(text.contains("s390x cannot be had") && text.contains("x86_64, aarch64"), "{text}");
    }

    #[test]
    fn disks_of_conflicting_zones_are_refused_before_the_call() {
        let disk = |volume: &str, zone: &str| DiskRequest {
            volume: volume.into(),
            read_only: false,
            zone: Some(zone.into()),
        };
        let request = |disks, zones: &[&str]| CreateRequest {
            disks,
            zones: zones.iter().map(|zone| (*zone).into()).collect(),
            ..CreateRequest::default()
        };
        let refused = |request: &CreateRequest| everything().check(request, "shelf").unwrap_err().to_string();
        let text = refused(&request(vec![disk("a", "1"), disk("b", "2")], &[]));
        assert!(text.contains("disk a is in zone 1") && text.contains("disk b in zone 2"), "{text}");
        let text = refused(&request(vec![disk("a", "1")], &["2", "3"]));
        assert!(text.contains("disk a is in zone 1") && text.contains("2 or 3"), "{text}");
        let text = refused(&request(vec![disk("a", "1"), disk("a", "1")], &[]));
        assert!(text.contains("disk a is asked for twice"), "{text}");
        everything().check(&request(vec![disk("a", "1"), disk("b", "1")], &["1", "2"]), "shelf").unwrap();
    }
}
