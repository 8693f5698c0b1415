//! Builds the body of the PUT that makes a VM with its interfaces and its disk. Pure.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_provider_api::{CreateRequest, Error, Market, Owner};
use peerpod_provider_cloud::Offering;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};

use crate::client::NETWORK;
use crate::config::AzureConfig;
use crate::ids::part;
use crate::image::AzureImageFacts;

/// Type of the OS disk. Every size supports it.
const DISK_TYPE: &str = "StandardSSD_LRS";
/// User of VMs from a generalized image, which Azure demands.
const USER: &str = "peerpod";
/// Part of the first interface, of the second one, of the public address and of the OS disk.
const NICS: [&str; 2] = ["nic0", "nic1"];
const PUBLIC: &str = "ip0";
const OS_DISK: &str = "os";

/// Everything that a body follows from.
pub(crate) struct Body<'b> {
    pub config: &'b AzureConfig,
    pub owner: &'b Owner,
    /// Name of the VM.
    pub name: &'b str,
    pub request: &'b CreateRequest,
    pub offering: &'b Offering,
    pub image: &'b AzureImageFacts,
    pub tags: &'b BTreeMap<String, String>,
    /// SSH key, for a generalized image.
    pub ssh_key: &'b str,
}

impl Body<'_> {
    /// Returns the whole body.
    pub(crate) fn whole(&self) -> Value {
        let mut properties = json!({
            "hardwareProfile": {"vmSize": self.offering.machine},
            "userData": STANDARD.encode(&self.request.user_data),
            "storageProfile": self.storage(),
            "networkProfile": self.network(),
            // With Azure's own storage, so that no account is needed.
            "diagnosticsProfile": {"bootDiagnostics": {"enabled": true}},
        });
        if let Some(security) = self.security() {
            properties["securityProfile"] = security;
        }
        if !self.image.is_specialized {
            properties["osProfile"] = self.login();
        }
        if self.offering.market == Market::Spot {
            properties["priority"] = json!("Spot");
            properties["evictionPolicy"] = json!("Delete");
            // Up to the price on demand.
            properties["billingProfile"] = json!({"maxPrice": -1});
        }
        let mut body = json!({"location": self.config.region, "tags": self.tags, "properties": properties});
        // The region's name stands for "in no zone".
        if self.offering.zone != self.config.region {
            body["zones"] = json!([self.offering.zone]);
        }
        body
    }

    fn is_confidential(&self) -> bool {
        self.config.confidential || self.request.confidential.is_some()
    }

    fn storage(&self) -> Value {
        let mut managed = json!({"storageAccountType": DISK_TYPE});
        if self.is_confidential() {
            managed["securityProfile"] = json!({"securityEncryptionType": "VMGuestStateOnly"});
        }
        let mut os = json!({
            "name": part(self.owner, self.name, OS_DISK),
            "createOption": "FromImage",
            "deleteOption": "Delete",
            "managedDisk": managed,
        });
        if self.config.root_gib > 0 {
            os["diskSizeGB"] = json!(self.config.root_gib);
        }
        let disks = self.request.disks.iter().zip(0_u32..).map(|(disk, lun)| data_disk(&disk.volume, lun));
        json!({
            "imageReference": self.image.id.reference(),
            "osDisk": os,
            "dataDisks": disks.collect::<Vec<Value>>(),
        })
    }

    fn network(&self) -> Value {
        let second = self.config.second_subnet.as_ref().filter(|_| self.request.second_nic);
        let subnets = [Some(&self.config.subnet), second];
        let nics = NICS.iter().zip(subnets).enumerate();
        let nics = nics.filter_map(|(place, (name, subnet))| Some(self.nic(name, subnet?, place == 0)));
        json!({"networkApiVersion": NETWORK, "networkInterfaceConfigurations": nics.collect::<Vec<Value>>()})
    }

    fn nic(&self, name: &str, subnet: &str, is_primary: bool) -> Value {
        let mut ip = json!({"subnet": {"id": subnet}, "primary": true, "privateIPAddressVersion": "IPv4"});
        if is_primary && (self.config.use_public_ip || self.request.public_ip) {
            ip["publicIPAddressConfiguration"] = json!({
                "name": part(self.owner, self.name, PUBLIC),
                "sku": {"name": "Standard", "tier": "Regional"},
                "properties": {"deleteOption": "Delete", "publicIPAllocationMethod": "Static"},
            });
        }
        let mut properties = json!({
            "primary": is_primary,
            "deleteOption": "Delete",
            "ipConfigurations": [{"name": "first", "properties": ip}],
        });
        if let Some(group) = &self.config.security_group {
            properties["networkSecurityGroup"] = json!({"id": group});
        }
        json!({"name": part(self.owner, self.name, name), "properties": properties})
    }

    fn security(&self) -> Option<Value> {
        let kind = match (self.is_confidential(), self.config.secure_boot) {
            (true, _) => "ConfidentialVM",
            (false, true) => "TrustedLaunch",
            (false, false) => return None,
        };
        let uefi = json!({"vTpmEnabled": true, "secureBootEnabled": self.config.secure_boot});
        Some(json!({"securityType": kind, "uefiSettings": uefi}))
    }

    /// Azure demands a way to log in where passwords are off. Our image has no agent that would set it up.
    fn login(&self) -> Value {
        let key = json!({"path": format!("/home/{USER}/.ssh/authorized_keys"), "keyData": self.ssh_key});
        json!({
            "computerName": self.name,
            "adminUsername": USER,
            "allowExtensionOperations": false,
            "linuxConfiguration": {
                "disablePasswordAuthentication": true,
                "provisionVMAgent": false,
                "ssh": {"publicKeys": [key]},
            },
        })
    }
}

fn data_disk(volume: &str, lun: u32) -> Value {
    json!({"lun": lun, "createOption": "Attach", "deleteOption": "Detach", "caching": "None",
        "managedDisk": {"id": volume}})
}

/// Returns a new SSH public key whose private half is dropped.
pub(crate) fn unusable_key() -> Result<String, Error> {
    let failed = || Error::transient("make an SSH key: the system has no random numbers; it is tried again");
    let pair = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| failed())?;
    let pair = Ed25519KeyPair::from_pkcs8(pair.as_ref()).map_err(|_| failed())?;
    let mut blob = Vec::new();
    for field in [b"ssh-ed25519".as_slice(), pair.public_key().as_ref()] {
        blob.extend(u32::try_from(field.len()).unwrap_or_default().to_be_bytes());
        blob.extend(field);
    }
    Ok(format!("ssh-ed25519 {}", STANDARD.encode(blob)))
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::{Arch, Confidential, DiskRequest};

    use super::*;
    use crate::config::tests::read as config;
    use crate::image::ImageId;

    fn image(is_specialized: bool) -> AzureImageFacts {
        let id = ImageId::parse("/CommunityGalleries/g/Images/i").unwrap();
        AzureImageFacts { id, arch: Arch::X86_64, is_specialized, is_confidential: true }
    }

    fn body(
        settings: &[(&str, &str)],
        request: &CreateRequest,
        offering: &Offering,
        image: &AzureImageFacts,
    ) -> Value {
        let owner = Owner { cluster_id: "c".into(), node_name: "n".into(), installation: "i".into() };
        Body {
            config: &config(settings).unwrap(),
            owner: &owner,
            name: "pp-a",
            request,
            offering,
            image,
            tags: &BTreeMap::from([("team".to_owned(), "blue".to_owned())]),
            ssh_key: "ssh-ed25519 AAAA",
        }
        .whole()
    }

    fn offering(zone: &str, market: Market) -> Offering {
        Offering { machine: "Standard_DC2as_v5".into(), zone: zone.into(), subnet: None, market }
    }

    #[test]
    fn the_plain_body_has_what_a_pod_needs_and_no_more() {
        let request = CreateRequest { user_data: "hello".into(), ..CreateRequest::default() };
        let body = body(
            &[("disable-cvm", "true")],
            &request,
            &offering("westeurope", Market::OnDemand),
            &image(true),
        );
        assert_eq!((&body["location"], &body["tags"]["team"]), (&json!("westeurope"), &json!("blue")));
        assert!(body.get("zones").is_none());
        let properties = &body["properties"];
        assert_eq!(properties["userData"], "aGVsbG8=");
        assert_eq!(properties["hardwareProfile"]["vmSize"], "Standard_DC2as_v5");
        for absent in ["osProfile", "securityProfile", "priority", "evictionPolicy", "billingProfile"] {
            assert!(properties.get(absent).is_none(), "{absent}");
        }
        let os = &properties["storageProfile"]["osDisk"];
        assert!(os.get("diskSizeGB").is_none() && os["managedDisk"].get("securityProfile").is_none());
        assert_eq!(os["deleteOption"], "Delete");
        let nics = properties["networkProfile"]["networkInterfaceConfigurations"].as_array().unwrap();
        assert_eq!((nics.len(), &nics[0]["properties"]["deleteOption"]), (1, &json!("Delete")));
        assert!(
            nics[0]["properties"]["ipConfigurations"][0]["properties"]
                .get("publicIPAddressConfiguration")
                .is_none()
        );
    }

    #[test]
    fn each_wish_has_its_field() {
        let request = CreateRequest {
            disks: ["a", "b"]
                .map(|volume| DiskRequest { volume: volume.into(), ..DiskRequest::default() })
                .to_vec(),
            second_nic: true,
            public_ip: true,
            confidential: Some(Confidential::SevSnp),
            ..CreateRequest::default()
        };
        let subnet =
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/two";
        let group = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkSecurityGroups/nsg";
        let settings = [
            ("second-subnet-id", subnet),
            ("security-group-id", group),
            ("root-volume-size", "9"),
            ("secure-boot", "true"),
        ];
        let body = body(&settings, &request, &offering("2", Market::Spot), &image(false));
        assert_eq!(body["zones"], json!(["2"]));
        let properties = &body["properties"];
        assert_eq!(
            (&properties["priority"], &properties["evictionPolicy"]),
            (&json!("Spot"), &json!("Delete"))
        );
        assert_eq!(properties["billingProfile"], json!({"maxPrice": -1}));
        assert_eq!(properties["securityProfile"]["securityType"], "ConfidentialVM");
        assert_eq!(properties["securityProfile"]["uefiSettings"]["secureBootEnabled"], true);
        let storage = &properties["storageProfile"];
        assert_eq!(storage["osDisk"]["diskSizeGB"], 9);
        let encryption = &storage["osDisk"]["managedDisk"]["securityProfile"]["securityEncryptionType"];
        assert_eq!(encryption, "VMGuestStateOnly");
        assert_eq!(storage["dataDisks"][1]["lun"], 1);
        assert_eq!(storage["dataDisks"][1]["managedDisk"]["id"], "b");
        assert_eq!(storage["dataDisks"][1]["deleteOption"], "Detach");
        let nics = &properties["networkProfile"]["networkInterfaceConfigurations"];
        assert_eq!(
            (&nics[0]["properties"]["primary"], &nics[1]["properties"]["primary"]),
            (&json!(true), &json!(false))
        );
        assert_eq!(nics[1]["properties"]["ipConfigurations"][0]["properties"]["subnet"]["id"], subnet);
        assert_eq!(nics[1]["properties"]["networkSecurityGroup"]["id"], group);
        let public = |place: usize| {
            nics[place]["properties"]["ipConfigurations"][0]["properties"].get("publicIPAddressConfiguration")
        };
        assert!(
            public(0).is_some_and(|ip| ip["properties"]["deleteOption"] == "Delete") && public(1).is_none()
        );
        let login = &properties["osProfile"];
        assert_eq!(login["linuxConfiguration"]["provisionVMAgent"], false);
        assert_eq!(login["linuxConfiguration"]["ssh"]["publicKeys"][0]["keyData"], "ssh-ed25519 AAAA");
    }

    #[test]
    fn a_key_without_a_private_half_has_the_form_of_ssh() {
        let key = unusable_key().unwrap();
        let blob = STANDARD.decode(key.strip_prefix("ssh-ed25519 ").unwrap()).unwrap();
        assert_eq!((blob.len(), &blob[..4], &blob[4..15]), (51, &[0, 0, 0, 11][..], &b"ssh-ed25519"[..]));
        assert_ne!(key, unusable_key().unwrap());
    }
}
