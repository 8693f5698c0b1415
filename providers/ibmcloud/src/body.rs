//! Builds the body of the POST that makes a VM with its boot volume and its network interfaces. Pure.

use std::collections::BTreeMap;

use peerpod_provider_api::{Confidential, CreateRequest, IdempotencyKey, Market};
use peerpod_provider_cloud::Offering;
use peerpod_provider_rest::ibm;
use serde_json::{Value, json};

use crate::config::IbmCloudConfig;
use crate::ids::{self, IbmCloudPlace};

/// Profile of the boot volume. Every zone has it.
const VOLUME_PROFILE: &str = "general-purpose";

/// Everything that a body follows from.
pub(crate) struct Body<'b> {
    pub config: &'b IbmCloudConfig,
    /// Name of the VM.
    pub name: &'b str,
    pub request: &'b CreateRequest,
    pub key: &'b IdempotencyKey,
    pub offering: &'b Offering,
    pub place: &'b IbmCloudPlace,
    /// Subnet of the second NIC in the zone.
    pub second_subnet: Option<&'b str>,
    pub image: &'b str,
    pub tags: &'b BTreeMap<String, String>,
}

impl Body<'_> {
    /// Returns the whole body.
    pub(crate) fn whole(&self) -> Value {
        let config = self.config;
        let digest = ids::digest_name(&self.request.digest());
        let mut body = json!({
            "name": self.name,
            "zone": {"name": self.offering.zone},
            "profile": {"name": self.offering.machine},
            "image": {"id": self.image},
            "vpc": {"id": config.vpc},
            "keys": config.key.iter().map(|id| json!({"id": id})).collect::<Vec<Value>>(),
            "user_data": self.request.user_data,
            "primary_network_attachment": self.nic(&digest, &self.place.subnet),
            "boot_volume_attachment": self.boot(),
            // Without it no pod reads the VM's user-data over the network.
            "metadata_service": {"enabled": false},
            "availability_policy": {"host_failure": "stop"},
            "enable_secure_boot": config.secure_boot,
        });
        if let Some(group) = &config.resource_group {
            body["resource_group"] = json!({"id": group});
        }
        if let Some(subnet) = self.second_subnet.filter(|_| self.request.second_nic) {
            body["network_attachments"] = json!([self.nic("nic1", subnet)]);
        }
        let disk = |disk: &peerpod_provider_api::DiskRequest| json!({"volume": {"id": disk.volume}, "delete_volume_on_instance_delete": false});
        if !self.request.disks.is_empty() {
            body["volume_attachments"] = self.request.disks.iter().map(disk).collect();
        }
        if self.request.confidential.or(config.confidential) == Some(Confidential::Tdx) {
            body["confidential_compute_mode"] = json!("tdx");
        }
        if self.offering.market == Market::Spot {
            body["availability"] = json!({"class": "spot"});
            body["availability_policy"]["preemption"] = json!("delete");
        }
        if let Some(target) = &self.place.target {
            body["placement_target"] = json!({"id": target});
        }
        body
    }

    fn nic(&self, name: &str, subnet: &str) -> Value {
        let mut interface =
            json!({"subnet": {"id": subnet}, "auto_delete": true, "allow_ip_spoofing": false});
        if !self.config.security_groups.is_empty() {
            let groups = self.config.security_groups.iter().map(|id| json!({"id": id}));
            interface["security_groups"] = groups.collect();
        }
        json!({"name": name, "virtual_network_interface": interface})
    }

    fn boot(&self) -> Value {
        let mut volume = json!({"profile": {"name": VOLUME_PROFILE}, "user_tags": ibm::tags(self.tags)});
        if self.config.root_gib > 0 {
            volume["capacity"] = json!(self.config.root_gib);
        }
        let name = ids::key_name(self.key);
        json!({"name": name, "delete_volume_on_instance_delete": true, "volume": volume})
    }
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::DiskRequest;

    use super::*;
    use crate::config::tests::read as config;

    fn body(settings: &[(&str, &str)], request: &CreateRequest, market: Market, place: &str) -> Value {
        let offering =
            Offering { machine: "bx3dc-2x10".into(), zone: "us-south-1".into(), subnet: None, market };
        Body {
            config: &config(settings).unwrap(),
            name: "pp-a",
            request,
            key: &IdempotencyKey::derive("c", "s", 0),
            offering: &offering,
            place: &IbmCloudPlace::parse(place).unwrap(),
            second_subnet: Some("0717-second"),
            image: "r006-image",
            tags: &BTreeMap::from([("team".to_owned(), "blue".to_owned())]),
        }
        .whole()
    }

    #[test]
    fn the_plain_body_has_what_a_pod_needs_and_no_more() {
        let request = CreateRequest { user_data: "hello".into(), ..CreateRequest::default() };
        let body = body(&[("confidential", "none")], &request, Market::OnDemand, "0717-a");
        assert_eq!(body["user_data"], "hello");
        assert_eq!(body["metadata_service"], json!({"enabled": false}));
        assert_eq!(body["boot_volume_attachment"]["delete_volume_on_instance_delete"], true);
        assert_eq!(body["boot_volume_attachment"]["volume"]["user_tags"], json!(["team:blue"]));
        let interface = &body["primary_network_attachment"]["virtual_network_interface"];
        assert_eq!((&interface["subnet"]["id"], &interface["auto_delete"]), (&json!("0717-a"), &json!(true)));
        assert!(interface.get("security_groups").is_none());
        for absent in [
            "network_attachments",
            "volume_attachments",
            "confidential_compute_mode",
            "availability",
            "placement_target",
            "resource_group",
        ] {
            assert!(body.get(absent).is_none(), "{absent}");
        }
        assert!(body["boot_volume_attachment"]["volume"].get("capacity").is_none());
    }

    #[test]
    fn each_wish_has_its_field() {
        let request = CreateRequest {
            disks: vec![DiskRequest { volume: "r006-disk".into(), ..DiskRequest::default() }],
            second_nic: true,
            ..CreateRequest::default()
        };
        let settings = [
            ("security-group-ids", "r006-g"),
            ("resource-group-id", "abc"),
            ("root-volume-size", "40"),
            ("key-id", "r006-key"),
            ("secure-boot", "true"),
        ];
        let spot = body(&settings, &request, Market::Spot, "0717-a");
        assert_eq!(spot["availability"], json!({"class": "spot"}));
        assert_eq!(spot["availability_policy"], json!({"host_failure": "stop", "preemption": "delete"}));
        assert_eq!(spot["confidential_compute_mode"], "tdx");
        assert_eq!(spot["boot_volume_attachment"]["volume"]["capacity"], 40);
        assert_eq!(
            spot["volume_attachments"],
            json!([{"volume": {"id": "r006-disk"}, "delete_volume_on_instance_delete": false}])
        );
        let second = &spot["network_attachments"][0]["virtual_network_interface"];
        assert_eq!(second["subnet"]["id"], "0717-second");
        assert_eq!(second["security_groups"], json!([{"id": "r006-g"}]));
        assert_eq!(
            (&spot["keys"][0]["id"], &spot["resource_group"]["id"]),
            (&json!("r006-key"), &json!("abc"))
        );
        assert_eq!(spot["enable_secure_boot"], true);
        let dedicated = body(&[], &request, Market::OnDemand, "0717-a@host/0717-h");
        assert_eq!(dedicated["placement_target"], json!({"id": "0717-h"}));
    }
}
