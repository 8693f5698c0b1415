//! VMs: their creation, states and deletion.

use std::time::Duration;

use serde_json::{Value, json};

use super::{DHCP, PUBLIC, PowerVs, check, facts, not_found};
use crate::body::{at, list, text};
use crate::clock::stamp;
use crate::fake::{Answer, Refused, Request, World, refused};

/// State of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// PowerVS builds it.
    Build,
    /// It runs.
    Active,
    /// It powered itself off.
    Shutoff,
    /// PowerVS could not make it.
    Error,
}

/// Virtual machine.
#[derive(Debug, Clone)]
pub struct Instance {
    /// Name, which others may have, too.
    pub name: String,
    /// Body, as it was sent, without its user-data.
    pub body: Value,
    /// User-data, in base64.
    pub user_data: String,
    /// Time of its creation.
    pub made: Duration,
    /// State.
    pub state: State,
    /// Text of its fault, which takes effect at the end of its build.
    pub fault: Option<String>,
    /// Time of the end of its build.
    built: Duration,
    /// Time of its end, once it is being deleted.
    ends: Option<Duration>,
    number: u32,
}

impl Instance {
    fn processors(&self) -> f64 {
        at(&self.body, "/processors").as_f64().unwrap_or(0.0)
    }

    fn mac(&self, place: usize) -> String {
        format!("FA:16:3E:{place:02X}:{:02X}:{:02X}", self.number >> 8, self.number & 255)
    }

    fn address(&self, place: usize) -> String {
        format!("192.{}.{}.{}", 168 + place, self.number >> 8, self.number & 255)
    }
}

impl PowerVs {
    /// Moves all VMs to this time.
    pub(super) fn tick_instances(&mut self, now: Duration) {
        let mut gone = Vec::new();
        for (id, one) in self.instances.all_mut() {
            if one.ends.is_some_and(|end| end <= now) {
                gone.push(id.to_owned());
            }
            if one.state == State::Build && one.built <= now {
                one.state = if one.fault.is_some() { State::Error } else { State::Active };
            }
        }
        self.instances.remove_all(&gone, now);
    }

    pub(super) fn create(
        &mut self,
        request: &Request,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let mut body = request.json();
        check::instance(&body)?;
        let used: f64 = self.instances.all().map(|(_, one)| one.processors()).sum();
        let wanted = at(&body, "/processors").as_f64().unwrap_or(0.0);
        if self.quota.is_some_and(|quota| used + wanted > quota) {
            return refused(403, "forbidden", "The processors exceed the quota of the workspace");
        }
        let fault = match world.take_stock([text(&body, "/sysType"), super::ZONE, "on-demand"]) {
            true => world.late.take().map(|(_, message)| message),
            false => Some("No valid host was found. There are not enough hosts available.".to_owned()),
        };
        let user_data = text(&body, "/userData").to_owned();
        body.as_object_mut().into_iter().for_each(|body| drop(body.remove("userData")));
        let number = self.number();
        // Ids are random: their order is not that of the creates.
        let id = format!("{:08x}-0000-4000-8000-{number:012}", number.wrapping_mul(2_654_435_761));
        let (decision, boot) = world.times();
        let instance = Instance {
            name: text(&body, "/serverName").to_owned(),
            body,
            user_data,
            made: world.now,
            state: State::Build,
            fault,
            built: world.now + decision + boot,
            ends: None,
            number,
        };
        self.instances.add(&id, instance, world.now);
        let made = self.instances.get(&id).map(|one| view(&id, one, true));
        Ok(Answer::json(202, &json!([made])))
    }

    pub(super) fn list(&self, world: &World<'_>) -> Answer {
        let all: Vec<Value> =
            self.instances.listed(world.now, world.lag).map(|(id, one)| view(id, one, false)).collect();
        Answer::json(200, &json!({"pvmInstances": all}))
    }

    pub(super) fn get(&self, id: &str) -> Result<Answer, Box<Refused>> {
        let Some(one) = self.instances.get(id) else { return not_found("pvm-instance", id) };
        Ok(Answer::json(200, &view(id, one, true)))
    }

    pub(super) fn delete(&mut self, id: &str, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let (time, early) = (self.delete_time, self.refuses_early_deletes);
        let Some(one) = self.instances.get_mut(id) else { return not_found("pvm-instance", id) };
        if early && one.state == State::Build {
            return refused(409, "conflict", "The pvm-instance is being built");
        }
        let end = *one.ends.get_or_insert(world.now + time);
        if end <= world.now {
            self.instances.remove(id, world.now);
        }
        Ok(Answer::json(200, &json!({})))
    }

    /// Returns the DHCP server with the leases of all VMs that run.
    pub(super) fn leases(&self) -> Answer {
        let running = self.instances.all().filter(|(_, one)| one.state == State::Active);
        let leases: Vec<Value> = running
            .filter(|(_, one)| text(&one.body, "/networks/0/networkID") == DHCP)
            .map(|(_, one)| json!({"instanceIP": one.address(2), "instanceMacAddress": one.mac(0).to_lowercase()}))
            .collect();
        let network = json!({"id": DHCP, "name": "dhcp"});
        Answer::json(
            200,
            &json!({"id": facts::SERVER, "network": network, "status": "ACTIVE", "leases": leases}),
        )
    }
}

/// Shows a VM as the answers do. A list has no tags.
fn view(id: &str, one: &Instance, is_whole: bool) -> Value {
    let status = match one.state {
        State::Build => "BUILD",
        State::Active => "ACTIVE",
        State::Shutoff => "SHUTOFF",
        State::Error => "ERROR",
    };
    let networks = list(&one.body, "/networks").iter().enumerate();
    let networks: Vec<Value> =
        networks.map(|(place, network)| nic(one, place, text(network, "/networkID"))).collect();
    let time = stamp(one.made).replace("+00:00", "Z");
    let mut view = json!({
        "pvmInstanceID": id, "serverName": one.name, "status": status, "creationDate": time, "updatedDate": time,
        "imageID": text(&one.body, "/imageID"), "diskSize": 4, "memory": at(&one.body, "/memory"),
        "processors": at(&one.body, "/processors"), "procType": text(&one.body, "/procType"),
        "sysType": text(&one.body, "/sysType"), "osType": "rhel", "storageType": "tier3", "networks": networks,
        "metadataService": {"enabled": false}, "pinPolicy": "none",
        "health": {"status": if status == "ACTIVE" { "OK" } else { "PENDING" }},
    });
    if one.ends.is_some() {
        view["taskState"] = json!("deleting");
    }
    if let Some(fault) = one.fault.as_ref().filter(|_| one.state == State::Error) {
        view["fault"] = json!({"code": 500, "created": time, "details": fault, "message": "Build failed"});
    }
    if is_whole {
        view["networkIDs"] =
            list(&one.body, "/networks").iter().map(|network| at(network, "/networkID").clone()).collect();
        view["volumeIDs"] = json!([]);
        view["userTags"] = at(&one.body, "/userTags").clone();
    } else {
        let path = format!("/pcloud/v1/cloud-instances/{}/pvm-instances/{id}", super::WORKSPACE);
        view["href"] = json!(path);
    }
    view
}

fn nic(one: &Instance, place: usize, network: &str) -> Value {
    let (name, ..) = facts::network(network).unwrap_or_default();
    let mut view =
        json!({"networkID": network, "networkName": name, "macAddress": one.mac(place), "type": "fixed"});
    if network == DHCP {
        view["type"] = json!("dynamic");
    } else if one.state != State::Build {
        view["ipAddress"] = json!(one.address(place));
        if network == PUBLIC {
            view["externalIP"] = json!(format!("203.0.113.{}", one.number & 255));
        }
    }
    view
}
