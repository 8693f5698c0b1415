//! Builds the bodies of the calls that make VMs: `instances.insert` for one, `instances.bulkInsert` for several. Pure.
//!
//! Both have the same properties of a VM, but name some of them in other ways: `bulkInsert` takes bare names of machine
//! types and disk types, as an instance template does, and has resource-manager tags beside the others.

use peerpod_provider_api::{Confidential, CreateRequest, Error, IdempotencyKey, Market, Owner};
use peerpod_provider_cloud::{Offering, names};
use serde_json::{Map, Value, json};

use crate::config::{GcpConfig, GcpNic};
use crate::facts::GcpImageFacts;
use crate::links::PersistentDisk;
use crate::marks;

/// Disk of the pod, with the device name by which the guest finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataDisk {
    pub disk: PersistentDisk,
    pub read_only: bool,
}

impl DataDisk {
    /// Returns the device name: the same for each form of a volume's name.
    pub(crate) fn device_name(disk: &PersistentDisk) -> String {
        format!("pp-{}{}", names::short(&[&disk.path()]), names::short(&[&disk.path(), ""]))
    }

    /// Returns the disk as an insert and an attach take it. It stays when its VM is deleted. Confidential VMs have no
    /// SCSI controller (`is_nvme`); for others, Google chooses.
    pub(crate) fn attached(&self, is_nvme: bool) -> Value {
        let mut body = json!({
            "source": self.disk.path(),
            "deviceName": DataDisk::device_name(&self.disk),
            "mode": if self.read_only { "READ_ONLY" } else { "READ_WRITE" },
            "type": "PERSISTENT",
            "autoDelete": false,
        });
        if is_nvme {
            body["interface"] = "NVME".into();
        }
        body
    }
}

/// VM that is about to be made.
pub(crate) struct GcpVmSpec<'s> {
    pub config: &'s GcpConfig,
    pub owner: &'s Owner,
    pub request: &'s CreateRequest,
    pub key: &'s IdempotencyKey,
    pub offering: &'s Offering,
    pub image: &'s GcpImageFacts,
    /// Whether the machine type has GPUs; such a VM cannot move to another host.
    pub has_gpus: bool,
    pub disks: &'s [DataDisk],
}

impl GcpVmSpec<'_> {
    /// Returns the body of an insert of one VM.
    pub(crate) fn insert(&self, name: &str) -> Result<Value, Error> {
        let zone = &self.offering.zone;
        let kind = format!("zones/{zone}/diskTypes/{}", self.config.root.kind);
        let mut body = self.properties(&kind)?;
        body.insert("name".to_owned(), name.into());
        body.insert(
            "machineType".to_owned(),
            format!("zones/{zone}/machineTypes/{}", self.offering.machine).into(),
        );
        if !self.config.resource_manager_tags.is_empty() {
            let tags = json!({"resourceManagerTags": self.config.resource_manager_tags});
            body.insert("params".to_owned(), tags);
        }
        Ok(body.into())
    }

    /// Returns the body of a bulk insert of VMs with these names. Fewer VMs are an answer, not a failure.
    pub(crate) fn bulk_insert(&self, names: &[String]) -> Result<Value, Error> {
        let mut properties = self.properties(&self.config.root.kind)?;
        properties.insert("machineType".to_owned(), self.offering.machine.as_str().into());
        if !self.config.resource_manager_tags.is_empty() {
            properties.insert("resourceManagerTags".to_owned(), json!(self.config.resource_manager_tags));
        }
        let each: Map<String, Value> = names.iter().map(|name| (name.clone(), json!({}))).collect();
        Ok(json!({
            // 64-bit numbers are strings in this API.
            "count": names.len().to_string(),
            "minCount": "1",
            "perInstanceProperties": each,
            "instanceProperties": properties,
        }))
    }

    /// Returns the properties that both calls name alike.
    fn properties(&self, disk_type: &str) -> Result<Map<String, Value>, Error> {
        let config = self.config;
        let mut body = Map::new();
        let mut put = |key: &str, value: Value| drop(body.insert(key.to_owned(), value));
        put("description", marks::description(self.request, self.key, self.owner)?.into());
        put("labels", json!(self.labels()));
        put("disks", self.disks(disk_type));
        put("networkInterfaces", self.nics());
        put("metadata", self.metadata());
        put("scheduling", self.scheduling());
        put(
            "shieldedInstanceConfig",
            json!({
                "enableVtpm": true,
                "enableIntegrityMonitoring": true,
                "enableSecureBoot": config.secure_boot,
            }),
        );
        // Without an account the metadata service has no token that a pod could take.
        let accounts = config.service_account.iter();
        let scopes = ["https://www.googleapis.com/auth/cloud-platform"];
        put("serviceAccounts", accounts.map(|email| json!({"email": email, "scopes": scopes})).collect());
        if !config.network_tags.is_empty() {
            put("tags", json!({"items": config.network_tags}));
        }
        if let Some(technology) = self.confidential() {
            put("confidentialInstanceConfig", json!({"confidentialInstanceType": word(technology)}));
            // The older processors of this family have no SEV-SNP.
            if technology == Confidential::SevSnp && self.offering.machine.starts_with("n2d-") {
                put("minCpuPlatform", "AMD Milan".into());
            }
        }
        Ok(body)
    }

    fn labels(&self) -> std::collections::BTreeMap<String, String> {
        marks::labels(self.request, self.key, self.owner, &self.config.tags)
    }

    fn confidential(&self) -> Option<Confidential> {
        self.request.confidential.or(self.config.confidential)
    }

    fn disks(&self, disk_type: &str) -> Value {
        let mut root = json!({
            "sourceImage": self.image.path,
            "diskType": disk_type,
            "labels": self.labels(),
        });
        let size = self.config.root.size_gib;
        if size > 0 {
            root["diskSizeGb"] = size.max(self.image.disk_gib).to_string().into();
        }
        let mut boot = json!({
            "boot": true,
            "autoDelete": true,
            "type": "PERSISTENT",
            "mode": "READ_WRITE",
            "initializeParams": root,
        });
        let is_nvme = self.confidential().is_some();
        if is_nvme {
            boot["interface"] = "NVME".into();
        }
        [boot].into_iter().chain(self.disks.iter().map(|disk| disk.attached(is_nvme))).collect()
    }

    fn nics(&self) -> Value {
        let public = self.config.use_public_ip || self.request.public_ip;
        let second = self.config.second_nic.as_ref().filter(|_| self.request.second_nic);
        let nic = |one: &GcpNic, is_public: bool| nic(one, self.image.can("GVNIC"), is_public);
        let first = nic(&self.config.nic, public);
        [first].into_iter().chain(second.map(|second| nic(second, false))).collect()
    }

    fn metadata(&self) -> Value {
        let item = |key: &str, value: &str| json!({"key": key, "value": value});
        json!({"items": [
            item("user-data", &self.request.user_data),
            // The project may have SSH keys and an interactive console for all of its VMs; ours accept neither.
            item("block-project-ssh-keys", "TRUE"),
            item("serial-port-enable", "FALSE"),
        ]})
    }

    fn scheduling(&self) -> Value {
        let is_spot = self.offering.market == Market::Spot;
        let stays = is_spot || self.has_gpus || self.confidential().is_some();
        let mut scheduling = json!({
            // A VM is for one run of a pod, whose ticket is used up.
            "automaticRestart": false,
            "provisioningModel": if is_spot { "SPOT" } else { "STANDARD" },
        });
        // Otherwise the machine type decides.
        if stays {
            scheduling["onHostMaintenance"] = "TERMINATE".into();
        }
        if is_spot {
            scheduling["instanceTerminationAction"] = "DELETE".into();
        }
        scheduling
    }
}

/// Returns the API's word for a technology.
pub(crate) fn word(technology: Confidential) -> &'static str {
    match technology {
        Confidential::Sev => "SEV",
        Confidential::Tdx => "TDX",
        // The capabilities name no other one.
        Confidential::SevSnp | Confidential::SecureExecution => "SEV_SNP",
    }
}

fn nic(nic: &GcpNic, is_gvnic: bool, is_public: bool) -> Value {
    let mut body = json!({"stackType": "IPV4_ONLY"});
    if is_gvnic {
        body["nicType"] = "GVNIC".into();
    }
    for (key, path) in [("network", &nic.network), ("subnetwork", &nic.subnetwork)] {
        if let Some(path) = path {
            body[key] = path.as_str().into();
        }
    }
    if is_public {
        body["accessConfigs"] = json!([{
            "type": "ONE_TO_ONE_NAT",
            "name": "External NAT",
            "networkTier": "STANDARD",
        }]);
    }
    body
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::Size;

    use super::*;
    use crate::config::tests::read;

    fn shaped<T>(
        settings: &[(&str, &str)],
        change: impl FnOnce(&mut CreateRequest),
        then: impl FnOnce(&GcpVmSpec<'_>) -> T,
    ) -> T {
        let least = [("project-id", "project-1"), ("zones", "us-central1-a"), ("image", "podvm-1")];
        let config = read(&[&least[..], settings].concat()).unwrap();
        let owner = Owner { cluster_id: "c".into(), node_name: "n".into(), installation: "i".into() };
        let mut request = CreateRequest {
            name: "web-0".into(),
            user_data: "{\"ticket\":\"t\"}\n".into(),
            size: Size::default(),
            ..CreateRequest::default()
        };
        change(&mut request);
        let offering = Offering {
            machine: "n2d-standard-2".into(),
            zone: "us-central1-a".into(),
            subnet: None,
            market: request.market.unwrap_or(Market::OnDemand),
        };
        let image = GcpImageFacts {
            path: "projects/project-1/global/images/podvm-1".into(),
            disk_gib: 20,
            arch: None,
            features: vec!["GVNIC".into()],
        };
        let disk = PersistentDisk::parse("zones/us-central1-a/disks/pvc-1", "project-1").unwrap();
        then(&GcpVmSpec {
            config: &config,
            owner: &owner,
            request: &request,
            key: &IdempotencyKey::derive("c", "s", 0),
            offering: &offering,
            image: &image,
            has_gpus: false,
            disks: &[DataDisk { disk, read_only: true }],
        })
    }

    #[test]
    fn a_vm_has_the_request_and_nothing_that_a_pod_could_take() {
        let body = shaped(&[], |_| {}, |shape| shape.insert("pp-1").unwrap());
        assert_eq!(body["machineType"], "zones/us-central1-a/machineTypes/n2d-standard-2");
        assert_eq!(
            body["metadata"]["items"][0],
            json!({"key": "user-data", "value": "{\"ticket\":\"t\"}\n"})
        );
        assert_eq!(body["serviceAccounts"], json!([]));
        assert_eq!(body["shieldedInstanceConfig"]["enableSecureBoot"], false);
        assert_eq!(body["confidentialInstanceConfig"]["confidentialInstanceType"], "SEV_SNP");
        assert_eq!(body["scheduling"]["onHostMaintenance"], "TERMINATE");
        assert_eq!(
            (&body["minCpuPlatform"], &body["networkInterfaces"][0]["nicType"]),
            (&json!("AMD Milan"), &json!("GVNIC"))
        );
        let boot = &body["disks"][0];
        assert_eq!(boot["initializeParams"]["diskSizeGb"], "20", "an image needs its size, as a string");
        assert_eq!(boot["initializeParams"]["diskType"], "zones/us-central1-a/diskTypes/pd-balanced");
        assert_eq!((&boot["autoDelete"], &boot["interface"]), (&json!(true), &json!("NVME")));
        let data = &body["disks"][1];
        assert_eq!((&data["autoDelete"], &data["mode"]), (&json!(false), &json!("READ_ONLY")));
        assert_eq!(data["interface"], "NVME", "a confidential VM has no SCSI controller");
        assert_eq!(body["networkInterfaces"].as_array().unwrap().len(), 1);
        assert!(body.get("params").is_none() && body.get("tags").is_none());
    }

    #[test]
    fn options_are_in_the_body() {
        let settings = [
            ("confidential", "none"),
            ("root-volume-size", "0"),
            ("subnetwork", "pods"),
            ("second-network", "storage"),
            ("network-tags", "pods"),
            ("secure-boot", "true"),
            ("resource-manager-tags", "env=prod"),
            ("service-account", "pods@project-1.iam.gserviceaccount.com"),
        ];
        let change = |request: &mut CreateRequest| {
            request.market = Some(Market::Spot);
            request.second_nic = true;
            request.public_ip = true;
        };
        let body = shaped(&settings, change, |shape| shape.insert("pp-1").unwrap());
        assert_eq!(body["scheduling"]["instanceTerminationAction"], "DELETE");
        assert_eq!(body["scheduling"]["provisioningModel"], "SPOT");
        assert!(body.get("confidentialInstanceConfig").is_none());
        assert!(body["disks"][0]["initializeParams"].get("diskSizeGb").is_none());
        let nics = body["networkInterfaces"].as_array().unwrap();
        assert_eq!(nics[0]["subnetwork"], "projects/project-1/regions/us-central1/subnetworks/pods");
        assert!(nics[0].get("accessConfigs").is_some() && nics[1].get("accessConfigs").is_none());
        assert_eq!(nics[1]["network"], "projects/project-1/global/networks/storage");
        assert_eq!(body["params"]["resourceManagerTags"], json!({"project-1/env": "prod"}));
        assert_eq!(body["tags"]["items"], json!(["pods"]));
        assert_eq!(body["shieldedInstanceConfig"]["enableSecureBoot"], true);
        assert_eq!(body["serviceAccounts"][0]["email"], "pods@project-1.iam.gserviceaccount.com");
    }

    #[test]
    fn a_bulk_insert_names_its_vms_and_bare_types() {
        let names = ["pp-1".to_owned(), "pp-2".to_owned()];
        let settings = [("resource-manager-tags", "env=prod")];
        let body = shaped(&settings, |_| {}, |shape| shape.bulk_insert(&names).unwrap());
        assert_eq!((&body["count"], &body["minCount"]), (&json!("2"), &json!("1")));
        assert_eq!(body["perInstanceProperties"], json!({"pp-1": {}, "pp-2": {}}));
        let properties = &body["instanceProperties"];
        assert_eq!(properties["machineType"], "n2d-standard-2");
        assert_eq!(properties["disks"][0]["initializeParams"]["diskType"], "pd-balanced");
        assert_eq!(properties["resourceManagerTags"], json!({"project-1/env": "prod"}));
        assert!(properties.get("name").is_none());
    }

    #[test]
    fn a_device_name_follows_from_the_disk_and_not_from_its_form() {
        let forms = ["projects/p-1/zones/z-1-a/disks/d", "zones/z-1-a/disks/d"];
        let names = forms.map(|text| DataDisk::device_name(&PersistentDisk::parse(text, "p-1").unwrap()));
        assert_eq!(names[0], names[1]);
        assert!(crate::links::is_name(&names[0]), "{}", names[0]);
        let other = DataDisk::device_name(&PersistentDisk::parse("zones/z-1-b/disks/d", "p-1").unwrap());
        assert_ne!(other, names[0]);
    }
}
