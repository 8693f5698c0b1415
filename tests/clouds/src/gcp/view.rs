//! Shows an instance as Google's answers do.

use serde_json::{Value, json};

use super::facts;
use super::instances::{Instance, State};
use super::{BASE, Gcp, REGION};
use crate::body::{at, list, text};
use crate::clock::stamp;

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Provisioning => "PROVISIONING",
            State::Staging => "STAGING",
            State::Running => "RUNNING",
            State::Stopping => "STOPPING",
            State::Terminated => "TERMINATED",
        }
    }
}

impl Gcp {
    pub(super) fn view(&self, one: &Instance) -> Value {
        let mut view = json!({
            "kind": "compute#instance", "id": format!("{}", 9_000_000_000_u64 + u64::from(one.number)),
            "name": one.name, "status": one.state.word(), "zone": format!("{BASE}/zones/{}", one.zone),
            "creationTimestamp": stamp(one.made), "fingerprint": "AAAA", "labelFingerprint": "AAAA",
            "selfLink": format!("{BASE}/zones/{}/instances/{}", one.zone, one.name),
            "networkInterfaces": interfaces(one), "disks": self.disks_of(one),
        });
        for field in [
            "machineType",
            "labels",
            "description",
            "metadata",
            "scheduling",
            "confidentialInstanceConfig",
            "shieldedInstanceConfig",
            "serviceAccounts",
            "guestAccelerators",
            "tags",
            "params",
        ] {
            // Tags of the resource manager are bound, and not shown.
            if let Some(value) = one.body.get(field).filter(|_| field != "params") {
                view[field] = value.clone();
            }
        }
        if let Some(metadata) = view.get_mut("metadata") {
            metadata["kind"] = json!("compute#metadata");
            metadata["fingerprint"] = json!("AAAA");
        }
        view
    }

    fn disks_of(&self, one: &Instance) -> Vec<Value> {
        let key = format!("{}/{}", one.zone, one.name);
        let attached = self.disks.all().flat_map(|(_, disk)| disk.users.iter().map(move |used| (disk, used)));
        let mut disks: Vec<Value> = attached
            .filter(|(_, used)| used.instance == key)
            .map(|(disk, used)| {
                let place = if disk.zone.is_empty() {
                    format!("regions/{REGION}")
                } else {
                    format!("zones/{}", disk.zone)
                };
                json!({"kind": "compute#attachedDisk", "type": "PERSISTENT", "interface": "SCSI",
                    "mode": if used.read_only { "READ_ONLY" } else { "READ_WRITE" },
                    "source": format!("{BASE}/{place}/disks/{}", disk.name), "deviceName": used.device,
                    "autoDelete": used.goes, "boot": disk.boots, "diskSizeGb": disk.size.to_string()})
            })
            .collect();
        disks.sort_by_key(|disk| disk["boot"] == json!(false));
        for (place, disk) in disks.iter_mut().enumerate() {
            disk["index"] = json!(place);
        }
        disks
    }
}

fn interfaces(one: &Instance) -> Vec<Value> {
    let mut views = Vec::new();
    for (place, interface) in list(&one.body, "/networkInterfaces").iter().enumerate() {
        let network = facts::network_of(interface).unwrap_or_default();
        // The networks have ranges of their own.
        let net = if network == "second" { 11 } else { 10 };
        let number = one.number;
        let address = format!("{net}.{}.{}.{}", number >> 16, (number >> 8) & 255, number & 255);
        let mut view = json!({"kind": "compute#networkInterface", "name": format!("nic{place}"),
            "network": format!("{BASE}/global/networks/{network}"), "networkIP": address, "stackType": "IPV4_ONLY",
            "subnetwork": format!("{BASE}/regions/{REGION}/subnetworks/{network}"), "fingerprint": "AAAA"});
        if !text(interface, "/nicType").is_empty() {
            view["nicType"] = at(interface, "/nicType").clone();
        }
        if !list(interface, "/accessConfigs").is_empty() {
            view["accessConfigs"] = json!([{"kind": "compute#accessConfig", "type": "ONE_TO_ONE_NAT",
                "name": "external-nat", "natIP": format!("203.0.113.{}", number & 255), "networkTier": "PREMIUM"}]);
        }
        views.push(view);
    }
    views
}
