//! Shows an instance as the API's answers do.

use serde_json::{Value, json};

use super::instances::{Instance, State};
use super::{IbmCloud, REGION, facts};
use crate::body::{at, list, text};
use crate::clock::stamp;
use crate::fake::World;

impl IbmCloud {
    pub(super) fn instance_view(&self, id: &str, one: &Instance, world: &World<'_>) -> Value {
        let endpoint = world.endpoint;
        let href = format!("{endpoint}/v1/instances/{id}");
        let profile = self.profiles.iter().find(|profile| profile.name == text(&one.body, "/profile/name"));
        let (vcpus, memory, arch) = profile.map_or((0, 0, "amd64"), |one| (one.vcpus, one.memory, one.arch));
        let (status, lifecycle) = match one.state {
            State::Pending => ("pending", "pending"),
            State::Starting => ("starting", "stable"),
            State::Running => ("running", "stable"),
            State::Stopped => ("stopped", "stable"),
            State::Failed => ("failed", "failed"),
            State::Deleting => ("deleting", "deleting"),
        };
        let reasons: Vec<Value> = match (&one.refusal, one.state) {
            (Some((code, message)), State::Stopped | State::Failed) => {
                vec![json!({"code": code, "message": message})]
            }
            _ => Vec::new(),
        };
        let nics = [at(&one.body, "/primary_network_attachment")].into_iter();
        let nics: Vec<&Value> = nics.chain(list(&one.body, "/network_attachments")).collect();
        let nic = |place: usize, kind: &str| self.nic(&href, one, nics[place], place, kind, endpoint);
        let all = |kind: &str| (0..nics.len()).map(|place| nic(place, kind)).collect::<Vec<Value>>();
        let (boot, attachments) = self.attachments_of(id, one, &href, world);
        let name = text(&one.body, "/profile/name");
        let class = match text(&one.body, "/availability/class") {
            "" => "standard",
            class => class,
        };
        let image = text(&one.body, "/image/id");
        let mode = match text(&one.body, "/confidential_compute_mode") {
            "" => "disabled",
            mode => mode,
        };
        let policy = text(&one.body, "/availability_policy/preemption");
        json!({
            "id": id, "crn": one.crn(), "href": href, "name": one.name, "resource_type": "instance",
            "availability": {"class": class},
            "availability_policy": {"host_failure": "stop", "preemption": if policy.is_empty() { "stop" } else { policy }},
            "bandwidth": 4_000, "boot_volume_attachment": boot, "cluster_network_attachments": [],
            "confidential_compute_mode": mode, "created_at": stamp(one.made), "disks": [],
            "enable_secure_boot": at(&one.body, "/enable_secure_boot").as_bool().unwrap_or(false),
            "health_reasons": [], "health_state": if lifecycle == "stable" { "ok" } else { "inapplicable" },
            "image": {"id": image, "crn": facts::crn("image", image), "name": "peerpod", "resource_type": "image",
                "href": format!("{endpoint}/v1/images/{image}")},
            "lifecycle_reasons": [], "lifecycle_state": lifecycle, "memory": memory,
            "metadata_service": {"enabled": false, "protocol": "http", "response_hop_limit": 1},
            "network_attachments": all("attachment"), "network_interfaces": all("interface"),
            "primary_network_attachment": nic(0, "attachment"), "primary_network_interface": nic(0, "interface"),
            "profile": {"name": name, "href": format!("{endpoint}/v1/instance/profiles/{name}"),
                "resource_type": "instance_profile"},
            "reservation_affinity": {"policy": "disabled", "pool": []},
            "resource_group": facts::resource_group(), "software_attachments": [],
            "startable": one.state == State::Stopped, "status": status, "status_reasons": reasons,
            "threads_per_core": 2, "total_network_bandwidth": 3_000, "total_volume_bandwidth": 1_000,
            "vcpu": {"architecture": arch, "count": vcpus, "manufacturer": "intel", "percentage": 100},
            "volume_attachments": attachments, "volume_bandwidth_qos_mode": "pooled", "vpc": facts::vpc(endpoint),
            "zone": facts::zone(one.zone(), endpoint),
        })
    }

    /// Returns the attachment of the boot volume, and all. Before the decision the boot volume is not there.
    fn attachments_of(&self, id: &str, one: &Instance, href: &str, world: &World<'_>) -> (Value, Vec<Value>) {
        let of = self.volumes.all().filter(|(_, volume)| volume.instance.as_deref() == Some(id));
        let (boot, data): (Vec<_>, Vec<_>) = of.partition(|(_, volume)| volume.is_boot);
        let view = |(id, volume): (&str, &super::Volume)| self.attachment_reference(id, volume, world);
        let boot = boot.into_iter().next().map_or_else(
            || {
                let attachment = format!("{id}-boot");
                json!({"id": attachment, "name": text(&one.body, "/boot_volume_attachment/name"),
                    "href": format!("{href}/volume_attachments/{attachment}")})
            },
            view,
        );
        let all = [boot.clone()].into_iter().chain(data.into_iter().map(view)).collect();
        (boot, all)
    }

    fn nic(
        &self,
        href: &str,
        one: &Instance,
        nic: &Value,
        place: usize,
        kind: &str,
        endpoint: &str,
    ) -> Value {
        let subnet = text(nic, "/virtual_network_interface/subnet/id");
        // IBM chooses the address when it makes the interface.
        let address = match one.is_decided() {
            true => one.addresses.get(place).map_or("0.0.0.0", String::as_str),
            false => "0.0.0.0",
        };
        let id = format!("{}-nic-{place}", one.name.get(..12).unwrap_or("pp"));
        let ip = json!({"address": address, "id": format!("{id}-ip"), "name": "words", "resource_type": "subnet_reserved_ip",
            "href": format!("{endpoint}/v1/subnets/{subnet}/reserved_ips/{id}-ip")});
        let mut view = json!({"id": id, "name": text(nic, "/name"), "primary_ip": ip,
            "subnet": facts::subnet_reference(subnet, endpoint)});
        match kind {
            "attachment" => {
                view["href"] = json!(format!("{href}/network_attachments/{id}"));
                view["resource_type"] = json!("instance_network_attachment");
                view["virtual_network_interface"] = json!({"id": format!("{id}-vni"), "name": "words",
                    "crn": format!("crn:v1:bluemix:public:is:{REGION}:a/0::virtual-network-interface:{id}"),
                    "href": format!("{endpoint}/v1/virtual_network_interfaces/{id}-vni"),
                    "resource_type": "virtual_network_interface"});
            }
            _ => {
                view["href"] = json!(format!("{href}/network_interfaces/{id}"));
                view["resource_type"] = json!("network_interface");
            }
        }
        view
    }
}
