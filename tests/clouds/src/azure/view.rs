//! Shows a VM as Azure's answers do.

use serde_json::{Value, json};

use super::vms::{State, Vm};
use super::{Azure, REGION};
use crate::body::{at, list, text};
use crate::clock::stamp;

/// Parts of a VM that only come when they are asked for.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Shown {
    pub(super) instance_view: bool,
    pub(super) user_data: bool,
    /// The group's name in capitals, as lists have it.
    pub(super) capitals: bool,
}

impl Azure {
    pub(super) fn vm_view(&self, key: &str, vm: &Vm, shown: Shown) -> Value {
        let mut properties = json!({});
        for field in [
            "hardwareProfile",
            "osProfile",
            "securityProfile",
            "diagnosticsProfile",
            "priority",
            "evictionPolicy",
            "billingProfile",
        ] {
            let value = at(&vm.body, &format!("/properties/{field}"));
            if !value.is_null() {
                properties[field] = value.clone();
            }
        }
        properties["vmId"] = json!(vm.id());
        properties["provisioningState"] = json!(vm.provisioning_state());
        properties["timeCreated"] = json!(stamp(vm.made));
        properties["storageProfile"] = self.storage_profile(key);
        properties["networkProfile"] = json!({"networkInterfaces": self.network_interfaces(key)});
        if shown.user_data {
            properties["userData"] = json!(vm.user_data);
        }
        if shown.instance_view {
            properties["instanceView"] = instance_view(vm);
        }
        let mut id = Azure::id("Microsoft.Compute/virtualMachines", &vm.name);
        if shown.capitals {
            id = id.replace("/resourceGroups/pods/", "/resourceGroups/PODS/");
        }
        let mut view = json!({"name": vm.name, "id": id, "type": "Microsoft.Compute/virtualMachines",
            "location": REGION, "etag": "\"1\"", "properties": properties});
        for field in ["tags", "zones"] {
            if let Some(value) = vm.body.get(field) {
                view[field] = value.clone();
            }
        }
        view
    }

    fn network_interfaces(&self, vm: &str) -> Vec<Value> {
        let of_vm = self.nics.all().filter(|(_, nic)| nic.vm.as_deref() == Some(vm));
        let entry = |nic: &super::Nic| {
            let id = Azure::id("Microsoft.Network/networkInterfaces", &nic.name);
            let primary = at(&nic.body, "/properties/primary").as_bool().unwrap_or(true);
            let option = if nic.goes { "Delete" } else { "Detach" };
            json!({"id": id, "properties": {"primary": primary, "deleteOption": option}})
        };
        of_vm.map(|(_, nic)| entry(nic)).collect()
    }

    /// Returns the disks of a VM, as they are now.
    pub(super) fn storage_profile(&self, key: &str) -> Value {
        let Some(vm) = self.vms.get(key) else { return Value::Null };
        let mut profile = at(&vm.body, "/properties/storageProfile").clone();
        profile["dataDisks"] = json!([]);
        for (_, disk) in self.disks.all().filter(|(_, disk)| disk.vm.as_deref() == Some(key)) {
            let id = Azure::id("Microsoft.Compute/disks", &disk.name);
            let Some(lun) = disk.lun else {
                profile["osDisk"]["name"] = json!(disk.name);
                profile["osDisk"]["osType"] = json!("Linux");
                profile["osDisk"]["managedDisk"]["id"] = json!(id);
                continue;
            };
            let asked = list(&vm.body, "/properties/storageProfile/dataDisks");
            let caching = asked.iter().find(|one| at(one, "/lun").as_u64() == Some(lun));
            let caching = caching.map_or("None", |one| text(one, "/caching"));
            let option = if disk.goes { "Delete" } else { "Detach" };
            let entry = json!({"lun": lun, "name": disk.name, "createOption": "Attach", "deleteOption": option,
                "caching": if caching.is_empty() { "None" } else { caching }, "diskSizeGB": disk.size,
                "toBeDetached": false, "managedDisk": {"id": id, "storageAccountType": "Premium_LRS"}});
            profile["dataDisks"].as_array_mut().into_iter().for_each(|all| all.push(entry.clone()));
        }
        profile
    }
}

/// Returns a VM's state.
pub(super) fn instance_view(vm: &Vm) -> Value {
    let status = |code: &str, level: &str, message: &str| {
        let mut one = json!({"code": code, "level": level, "displayStatus": code, "time": stamp(vm.made)});
        if !message.is_empty() {
            one["message"] = json!(message);
        }
        one
    };
    let info = |code: &str| status(code, "Info", "");
    let statuses = match vm.state {
        State::Creating => vec![info("ProvisioningState/creating")],
        State::Starting => vec![info("ProvisioningState/creating"), info("PowerState/starting")],
        State::Running => vec![info("ProvisioningState/succeeded"), info("PowerState/running")],
        State::Stopped => vec![info("ProvisioningState/succeeded"), info("PowerState/stopped")],
        State::Deallocated => vec![info("ProvisioningState/succeeded"), info("PowerState/deallocated")],
        State::Deleting => vec![info("ProvisioningState/deleting")],
        State::Failed => {
            let (code, message) = vm.refusal.clone().unwrap_or_default();
            vec![status(&format!("ProvisioningState/failed/{code}"), "Error", &message)]
        }
    };
    json!({"statuses": statuses})
}
