//! Virtual machines: their creation, states and deletion.

use std::time::Duration;

use serde_json::{Value, json};

use super::check;
use super::nics;
use super::route::Route;
use super::view::{self, Shown};
use super::{Azure, Size};
use crate::body::{at, last, list, text};
use crate::fake::{Answer, Refused, Request, World, refused};

/// State of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Azure has not decided.
    Creating,
    /// Azure has a place for it, and it boots.
    Starting,
    /// It runs.
    Running,
    /// It powered itself off, and is billed.
    Stopped,
    /// It has no place, and is not billed.
    Deallocated,
    /// Azure refused it after acceptance. Its disk and interface are there.
    Failed,
    /// It is going.
    Deleting,
}

/// Virtual machine.
#[derive(Debug, Clone)]
pub struct Vm {
    /// Name, as it was written.
    pub name: String,
    /// Body, as it was sent, without its user-data.
    pub body: Value,
    /// User-data, in base64.
    pub user_data: String,
    /// Time of its creation.
    pub made: Duration,
    /// State.
    pub state: State,
    /// Code and text of the refusal after acceptance, which takes effect at the decision.
    pub refusal: Option<(String, String)>,
    /// Output of its serial console.
    pub console: String,
    /// Times of the decision, and of the end of its boot.
    times: (Duration, Duration),
    /// Time of its end, once it is being deleted.
    ends: Option<Duration>,
    number: u32,
    cores: u32,
}

impl Vm {
    /// Returns its size.
    pub fn size(&self) -> &str {
        text(&self.body, "/properties/hardwareProfile/vmSize")
    }

    /// Returns its zone; empty: none.
    pub fn zone(&self) -> &str {
        text(&self.body, "/zones/0")
    }

    /// Returns its unique id.
    pub(super) fn id(&self) -> String {
        format!("00000000-0000-4000-9000-{:012}", self.number)
    }

    pub(super) fn provisioning_state(&self) -> &'static str {
        match self.state {
            State::Creating | State::Starting => "Creating",
            State::Running | State::Stopped | State::Deallocated => "Succeeded",
            State::Failed => "Failed",
            State::Deleting => "Deleting",
        }
    }
}

impl Azure {
    /// Moves all VMs to this time.
    pub(super) fn tick_vms(&mut self, now: Duration) {
        let mut gone = Vec::new();
        for (key, vm) in self.vms.all_mut() {
            let (decided, boots) = vm.times;
            if vm.ends.is_some_and(|end| end <= now) {
                gone.push(key.to_owned());
            }
            if vm.state == State::Creating && decided <= now {
                vm.state = if vm.refusal.is_some() { State::Failed } else { State::Starting };
            }
            if vm.state == State::Starting && boots <= now {
                vm.state = State::Running;
            }
        }
        gone.iter().for_each(|key| self.end(key, now));
    }

    /// Removes a VM, and what goes with it.
    fn end(&mut self, key: &str, now: Duration) {
        self.vms.remove(key, now);
        let (keeps, keeps_disks, reserve) = (self.keeps_nics, self.keeps_disks, self.nic_reserve);
        let mut gone = Vec::new();
        let mut publics = Vec::new();
        for (name, nic) in self.nics.all_mut().filter(|(_, nic)| nic.vm.as_deref() == Some(key)) {
            nic.vm = None;
            if nic.goes && !keeps {
                gone.push(name.to_owned());
                publics.extend(nic.public.clone());
            } else {
                nic.reserved = now + reserve;
            }
        }
        for name in &publics {
            let goes = self.public_ips.get_mut(name).is_some_and(|one| {
                one.nic = None;
                one.goes
            });
            if goes {
                self.public_ips.remove(name, now);
            }
        }
        self.nics.remove_all(&gone, now);
        gone.clear();
        for (name, disk) in self.disks.all_mut().filter(|(_, disk)| disk.vm.as_deref() == Some(key)) {
            (disk.vm, disk.lun) = (None, None);
            gone.extend((disk.goes && !keeps_disks).then(|| name.to_owned()));
        }
        self.disks.remove_all(&gone, now);
    }

    /// Returns the number of cores in use.
    pub(super) fn cores(&self) -> u32 {
        self.vms.all().map(|(_, vm)| vm.cores).sum()
    }

    pub(super) fn put_vm(
        &mut self,
        request: &Request,
        route: &Route,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let mut body = request.json();
        let key = route.key();
        if self.vms.get(&key).is_some() {
            return self.put_again(request, route, &body, world);
        }
        let condition = request.header("if-none-match");
        if condition != "*" && !world.is_witness {
            // Azure would create the VM. The same call would change a VM of this name, so no provider may send it.
            return refused(
                400,
                "ConditionRequired",
                "A create without If-None-Match can change a VM that runs.",
            );
        }
        let size = check::vm(self, route.name(), &body)?;
        let refusal = self.scarce(&size, &body, world)?;
        self.take_parts(route.name(), &body, world.now)?;
        let user_data = text(&body, "/properties/userData").to_owned();
        if let Some(properties) = body.get_mut("properties").and_then(Value::as_object_mut) {
            properties.remove("userData");
        }
        let (decision, boot) = world.times();
        let decided = world.now + decision;
        let ends = if refusal.is_some() { decided } else { decided + boot };
        let vm = Vm {
            name: route.name().to_owned(),
            body,
            user_data,
            made: world.now,
            state: State::Creating,
            refusal: refusal.clone(),
            console: format!("{} boots\n", route.name()),
            times: (decided, decided + boot),
            ends: None,
            number: self.number(),
            cores: size.vcpus,
        };
        let view = {
            self.vms.add(&key, vm, world.now);
            self.vms.get(&key).map(|vm| self.vm_view(&key, vm, Shown::default()))
        };
        let answer = Answer::json(201, &view.unwrap_or_default());
        Ok(self.begin(answer, ends, refusal, None, world))
    }

    /// PUT of a name that exists.
    fn put_again(
        &mut self,
        request: &Request,
        route: &Route,
        body: &Value,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let Some(vm) = self.vms.get(&route.key()) else { return route.not_found() };
        if vm.state == State::Deleting {
            let message = format!(
                "Operation 'PUT' is not allowed on VM '{}' since the VM is marked for deletion. You can only retry the \
                 Delete operation (or wait for an ongoing one to complete).",
                vm.name
            );
            return refused(409, "OperationNotAllowed", message);
        }
        if request.header("if-none-match") == "*" {
            let message = "The condition specified using HTTP conditional header(s) is not met.";
            return refused(412, "PreconditionFailed", message);
        }
        for field in
            ["/properties/storageProfile", "/properties/networkProfile", "/properties/osProfile", "/zones"]
        {
            if at(body, field) != at(&vm.body, field) {
                let message = format!("Changing property '{}' is not allowed.", last(field));
                return refused(409, "PropertyChangeNotAllowed", message);
            }
        }
        // Without the header it is an update of the VM that runs.
        let changed = (text(body, "/properties/userData").to_owned(), at(body, "/tags").clone());
        if let Some(vm) = self.vms.get_mut(&route.key()) {
            (vm.user_data, vm.body["tags"]) = changed;
        }
        let answer = self.get_vm(request, route)?;
        Ok(self.begin(answer, world.now, None, None, world))
    }

    /// Takes quota and stock; returns the refusal that follows the acceptance.
    fn scarce(
        &mut self,
        size: &Size,
        body: &Value,
        world: &mut World<'_>,
    ) -> Result<Option<(String, String)>, Box<Refused>> {
        if let Some(left) = &mut self.quota {
            if *left < size.vcpus {
                let message = format!(
                    "Operation could not be completed as it results in exceeding approved Total Regional Cores quota. \
                     Additional details - Deployment Model: Resource Manager, Location: {}, Current Limit: 10, Current \
                     Usage: 10, Additional Required: {}, (Minimum) New Limit Required: 12. Submit a request for Quota \
                     increase at https://aka.ms/ProdportalCRP/#blade/Microsoft_Azure_Capacity/UsageAndQuota.ReactView.",
                    super::REGION,
                    size.vcpus
                );
                return refused(409, "OperationNotAllowed", message);
            }
            *left -= size.vcpus;
        }
        let spot = text(body, "/properties/priority") == "Spot";
        let zone = text(body, "/zones/0");
        let market = if spot { "spot" } else { "on-demand" };
        if world.take_stock([size.name, zone, market]) {
            return Ok(world.late.take());
        }
        if spot {
            return refused(409, "SkuNotAvailable", check::sold_out(size.name));
        }
        let code = if zone.is_empty() { "AllocationFailed" } else { "ZonalAllocationFailed" };
        let message = "Allocation failed. We do not have sufficient capacity for the requested VM size in this zone. Read \
            more about improving likelihood of allocation success at http://aka.ms/allocation-guidance";
        if self.refuses_at_once {
            return refused(409, code, message);
        }
        Ok(Some((code.to_owned(), message.to_owned())))
    }

    /// Makes and takes the VM's disks and interfaces; all or none.
    fn take_parts(&mut self, name: &str, body: &Value, now: Duration) -> Result<(), Box<Refused>> {
        let key = name.to_ascii_lowercase();
        let profile = at(body, "/properties/storageProfile");
        let given = text(profile, "/osDisk/name");
        let os_disk = if given.is_empty() { format!("{name}_OsDisk_1") } else { given.to_owned() };
        if self.disks.get(&last(&os_disk)).is_some() {
            return refused(409, "ConflictingUserInput", format!("Disk {os_disk} already exists."));
        }
        let made = list(body, "/properties/networkProfile/networkInterfaceConfigurations");
        for one in made {
            let nic = text(one, "/name");
            if self.nics.get(&last(nic)).is_some() {
                return nics::reserved(nic);
            }
        }
        let taken = list(body, "/properties/networkProfile/networkInterfaces");
        for one in taken {
            let free = self.nics.get(&last(text(one, "/id"))).filter(|nic| nic.vm.is_none());
            if free.is_none() {
                return refused(400, "NicInUse", format!("{} is not free.", text(one, "/id")));
            }
        }
        let zone = text(body, "/zones/0").to_owned();
        let mut attached: Vec<String> = Vec::new();
        for disk in list(profile, "/dataDisks") {
            let (id, lun) = (text(disk, "/managedDisk/id"), at(disk, "/lun").as_u64().unwrap_or(0));
            if let Err(refusal) = self.attach(&key, &zone, id, lun) {
                let undo = |disk: &mut super::Disk| (disk.vm, disk.lun) = (None, None);
                attached.iter().for_each(|disk| self.disks.get_mut(disk).into_iter().for_each(undo));
                return Err(refusal);
            }
            let goes = text(disk, "/deleteOption") == "Delete";
            self.disks.get_mut(&last(id)).into_iter().for_each(|disk| disk.goes = goes);
            attached.push(last(id));
        }
        for one in taken {
            if let Some(nic) = self.nics.get_mut(&last(text(one, "/id"))) {
                nic.vm = Some(key.clone());
                nic.goes = text(one, "/properties/deleteOption") == "Delete";
            }
        }
        made.iter().for_each(|one| self.new_nic(text(one, "/name"), one, Some(&key), now));
        self.new_os_disk(&os_disk, body, &key, now);
        Ok(())
    }

    pub(super) fn get_vm(&self, request: &Request, route: &Route) -> Result<Answer, Box<Refused>> {
        let Some(vm) = self.vms.get(&route.key()) else { return route.not_found() };
        let expand = request.query("$expand");
        let shown = Shown {
            instance_view: expand.contains("instanceView"),
            user_data: expand.contains("userData"),
            capitals: false,
        };
        Ok(Answer::json(200, &self.vm_view(&route.key(), vm, shown)))
    }

    pub(super) fn instance_view(&self, route: &Route) -> Result<Answer, Box<Refused>> {
        let Some(vm) = self.vms.get(&route.key()) else { return route.not_found() };
        Ok(Answer::json(200, &view::instance_view(vm)))
    }

    pub(super) fn list_vms(&self, request: &Request, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        if !request.query("$expand").is_empty() && request.query("$filter").is_empty() {
            return refused(400, "BadRequest", "The $expand option needs a valid $filter.");
        }
        let shown = Shown {
            instance_view: request.query("statusOnly") == "true",
            capitals: true,
            ..Shown::default()
        };
        let listed = self.vms.listed(world.now, world.lag);
        let vms: Vec<Value> = listed.map(|(key, vm)| self.vm_view(key, vm, shown)).collect();
        Ok(self.page(request, &vms, world))
    }

    pub(super) fn update_vm(&mut self, request: &Request, route: &Route) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        check::tags(at(&body, "/tags"))?;
        let Some(vm) = self.vms.get_mut(&route.key()) else { return route.not_found() };
        vm.body["tags"] = at(&body, "/tags").clone();
        self.get_vm(request, route)
    }

    pub(super) fn delete_vm(&mut self, route: &Route, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let (now, time) = (world.now, self.delete_time);
        let Some(vm) = self.vms.get_mut(&route.key()) else { return Ok(Answer::empty(204)) };
        vm.state = State::Deleting;
        let ends = *vm.ends.get_or_insert(now + time);
        Ok(self.begin(Answer::empty(202), ends, None, None, world))
    }

    pub(super) fn console_urls(&self, route: &Route, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let Some(vm) = self.vms.get(&route.key()) else { return route.not_found() };
        if at(&vm.body, "/properties/diagnosticsProfile/bootDiagnostics/enabled").as_bool() != Some(true) {
            return refused(409, "BadRequest", "Boot diagnostics is not enabled for the VM.");
        }
        let url =
            format!("{}/console/{}?sv=2021-08-06&se=2100-01-01&sig=c2lnbmVk", world.endpoint, route.key());
        Ok(Answer::json(200, &json!({"serialConsoleLogBlobUri": url, "consoleScreenshotBlobUri": url})))
    }

    /// The storage that has the log. Its URL carries the right, so a token beside it is refused.
    pub(super) fn console(&self, request: &Request) -> Result<Answer, Box<Refused>> {
        if request.query("sig") != "c2lnbmVk" || !request.header("authorization").is_empty() {
            return refused(403, "AuthenticationFailed", "Server failed to authenticate the request.");
        }
        match self.vms.get(request.parts().get(1).map_or("", String::as_str)) {
            Some(vm) => Ok(Answer::text(200, vm.console.clone())),
            None => refused(404, "BlobNotFound", "The specified blob does not exist."),
        }
    }
}
