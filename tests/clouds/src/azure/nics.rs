//! Network interfaces, made with a VM or by a call of their own.

use std::time::Duration;

use serde_json::{Value, json};

use super::Azure;
use super::check;
use super::route::Route;
use crate::body::{at, list, text};
use crate::fake::{Answer, Refused, Request, World, refused};

/// Network interface.
#[derive(Debug, Clone)]
pub struct Nic {
    /// Name, as it was written.
    pub name: String,
    /// Body, as it was sent, or as the VM's body had it.
    pub body: Value,
    /// Key of the VM that has it.
    pub vm: Option<String>,
    /// Private address.
    pub address: String,
    /// Whether it goes with its VM.
    pub goes: bool,
    /// Key of its public address.
    pub public: Option<String>,
    /// End of the time for which its last VM reserves it.
    pub(super) reserved: Duration,
}

/// Public address.
#[derive(Debug, Clone)]
pub struct PublicIp {
    /// Name, as it was written.
    pub name: String,
    /// Address.
    pub address: String,
    /// Key of the interface that has it.
    pub nic: Option<String>,
    /// Whether it goes with its interface's VM.
    pub goes: bool,
}

impl Azure {
    /// Adds a network interface that no VM has, as a create that was interrupted leaves it. Returns its id.
    pub fn add_nic(&mut self, name: &str, tags: &Value, now: Duration) -> String {
        let properties = json!({"primary": true, "subnet": {"id": Azure::subnet("default")}});
        let configuration = json!({"name": "first", "properties": properties});
        let body = json!({"location": super::REGION, "tags": tags, "properties": {"ipConfigurations": [configuration]}});
        self.new_nic(name, &body, None, now);
        Azure::id("Microsoft.Network/networkInterfaces", name)
    }

    /// Stores a new network interface with an address of its own.
    pub(super) fn new_nic(&mut self, name: &str, body: &Value, vm: Option<&str>, now: Duration) {
        let number = self.number();
        let key = name.to_ascii_lowercase();
        let wanted = list(body, "/properties/ipConfigurations").iter();
        let mut wanted = wanted.map(|one| at(one, "/properties/publicIPAddressConfiguration"));
        let public = wanted.find(|one| one.is_object()).map(|wanted| PublicIp {
            name: text(wanted, "/name").to_owned(),
            address: format!("203.0.113.{}", number & 255),
            nic: Some(key.clone()),
            goes: text(wanted, "/properties/deleteOption") == "Delete",
        });
        let public_key = public.as_ref().map(|one| one.name.to_ascii_lowercase());
        public.into_iter().for_each(|one| self.public_ips.add(&one.name.to_ascii_lowercase(), one, now));
        let nic = Nic {
            name: name.to_owned(),
            body: body.clone(),
            vm: vm.map(str::to_owned),
            address: format!("10.{}.{}.{}", number >> 16, (number >> 8) & 255, number & 255),
            goes: text(body, "/properties/deleteOption") == "Delete",
            public: public_key,
            reserved: Duration::ZERO,
        };
        self.nics.add(&key, nic, now);
    }

    fn nic_view(&self, nic: &Nic) -> Value {
        let id = Azure::id("Microsoft.Network/networkInterfaces", &nic.name);
        let configurations: Vec<Value> = list(&nic.body, "/properties/ipConfigurations")
            .iter()
            .enumerate()
            .map(|(place, one)| {
                let name = text(one, "/name");
                let mut properties = json!({"provisioningState": "Succeeded", "privateIPAddress": nic.address,
                    "privateIPAllocationMethod": "Dynamic", "privateIPAddressVersion": "IPv4",
                    "primary": place == 0, "subnet": at(one, "/properties/subnet")});
                let public = text(one, "/properties/publicIPAddressConfiguration/name");
                if !public.is_empty() {
                    properties["publicIPAddress"] =
                        json!({"id": Azure::id("Microsoft.Network/publicIPAddresses", public)});
                }
                json!({"name": name, "id": format!("{id}/ipConfigurations/{name}"), "properties": properties})
            })
            .collect();
        let mut view = json!({"name": nic.name, "id": id, "location": super::REGION, "etag": "W/\"1\"",
            "type": "Microsoft.Network/networkInterfaces",
            "properties": {"provisioningState": "Succeeded", "ipConfigurations": configurations, "nicType": "Standard"}});
        for field in ["enableAcceleratedNetworking", "networkSecurityGroup"] {
            let value = at(&nic.body, &format!("/properties/{field}"));
            if !value.is_null() {
                view["properties"][field] = value.clone();
            }
        }
        if nic.body.get("tags").is_some_and(Value::is_object) {
            view["tags"] = at(&nic.body, "/tags").clone();
        }
        if let Some(vm) = &nic.vm {
            // The network provider writes the group in capitals.
            let vm = self.vms.get(vm).map_or(vm.as_str(), |vm| &vm.name);
            view["properties"]["virtualMachine"] = json!({"id": Azure::id("Microsoft.Compute/virtualMachines", vm)
                .replace("/resourceGroups/pods/", "/resourceGroups/PODS/")});
            view["properties"]["primary"] = json!(true);
        }
        view
    }

    pub(super) fn put_nic(
        &mut self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        check::nic_name(route.name())?;
        check::nic(&body)?;
        check::located(&body)?;
        check::tags(at(&body, "/tags"))?;
        let known = self.nics.get(&route.key()).is_some();
        if known && request.header("if-none-match") == "*" {
            return refused(412, "PreconditionFailed", "Precondition failed.");
        }
        if !known {
            self.new_nic(route.name(), &body, None, world.now);
        }
        let view = self.nics.get(&route.key()).map(|nic| self.nic_view(nic)).unwrap_or_default();
        Ok(Answer::json(if known { 200 } else { 201 }, &view))
    }

    pub(super) fn get_nic(&self, route: &Route) -> Result<Answer, Box<Refused>> {
        let Some(nic) = self.nics.get(&route.key()) else { return route.not_found() };
        Ok(Answer::json(200, &self.nic_view(nic)))
    }

    pub(super) fn list_nics(&self, request: &Request, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let nics: Vec<Value> =
            self.nics.listed(world.now, world.lag).map(|(_, nic)| self.nic_view(nic)).collect();
        Ok(self.page(request, &nics, world))
    }

    pub(super) fn tag_nic(&mut self, request: &Request, route: &Route) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        check::tags(at(&body, "/tags"))?;
        let Some(nic) = self.nics.get_mut(&route.key()) else { return route.not_found() };
        nic.body["tags"] = at(&body, "/tags").clone();
        self.get_nic(route)
    }

    pub(super) fn delete_nic(&mut self, route: &Route, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let Some(nic) = self.nics.get(&route.key()) else { return Ok(Answer::empty(204)) };
        if let Some(vm) = &nic.vm {
            let message = format!(
                "Network Interface {} is used by existing resource {vm}. In order to delete the network interface, it \
                 must be dissociated from the resource.",
                route.name()
            );
            return refused(400, "NicInUse", message);
        }
        if nic.reserved > world.now {
            return reserved(route.name());
        }
        if let Some(public) = nic.public.clone().and_then(|key| self.public_ips.get_mut(&key)) {
            public.nic = None;
        }
        self.nics.remove(&route.key(), world.now);
        Ok(self.begin(Answer::empty(202), world.now, None, None, world))
    }
}

/// Returns the refusal of an interface that Azure keeps for another VM.
pub(super) fn reserved<T>(name: &str) -> Result<T, Box<Refused>> {
    let message = format!(
        "Nic(s) in request is reserved for another Virtual Machine for 180 seconds. Please provide another nic(s) or retry \
         after 180 seconds. Reserved: {name}"
    );
    refused(400, "NicReservedForAnotherVm", message)
}

fn public_view(one: &PublicIp) -> Value {
    let id = Azure::id("Microsoft.Network/publicIPAddresses", &one.name);
    let mut view = json!({"name": one.name, "id": id, "location": super::REGION, "sku": {"name": "Standard"},
        "type": "Microsoft.Network/publicIPAddresses",
        "properties": {"provisioningState": "Succeeded", "ipAddress": one.address,
            "publicIPAllocationMethod": "Static", "publicIPAddressVersion": "IPv4"}});
    if let Some(nic) = &one.nic {
        let nic = Azure::id("Microsoft.Network/networkInterfaces", nic);
        view["properties"]["ipConfiguration"] = json!({"id": format!("{nic}/ipConfigurations/first")});
    }
    view
}

impl Azure {
    pub(super) fn get_public(&self, route: &Route) -> Result<Answer, Box<Refused>> {
        let Some(one) = self.public_ips.get(&route.key()) else { return route.not_found() };
        Ok(Answer::json(200, &public_view(one)))
    }

    pub(super) fn list_publics(&self, request: &Request, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let all: Vec<Value> =
            self.public_ips.listed(world.now, world.lag).map(|(_, one)| public_view(one)).collect();
        Ok(self.page(request, &all, world))
    }

    pub(super) fn delete_public(&mut self, route: &Route, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let Some(one) = self.public_ips.get(&route.key()) else { return Ok(Answer::empty(204)) };
        if one.nic.is_some() {
            let message =
                format!("Public IP address {} can not be deleted since it is still allocated.", one.name);
            return refused(400, "PublicIPAddressCannotBeDeleted", message);
        }
        self.public_ips.remove(&route.key(), world.now);
        Ok(self.begin(Answer::empty(202), world.now, None, None, world))
    }
}
