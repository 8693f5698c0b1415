//! Azure Resource Manager, as far as a provider of pod VMs needs it, and the services that issue its tokens. One
//! subscription with one resource group in one region with three zones.
//!
//! Sources: the API's descriptions in `armcompute` and `armnetwork`, and Azure's published limits and error codes.

mod check;
mod disks;
mod facts;
mod nics;
mod operations;
mod rights;
mod route;
mod sizes;
mod token;
mod view;
mod vms;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

pub use disks::Disk;
pub use nics::Nic;
pub use nics::PublicIp;
pub use operations::Operation;
pub use sizes::Size;
pub use vms::State;
pub use vms::Vm;

use crate::fake::{Answer, Fake, Refused, Request, World};
use crate::rates::Rate;
use crate::store::Store;
use route::Route;

/// Subscription of all resources.
pub const SUBSCRIPTION: &str = "11111111-2222-3333-4444-555555555555";
/// Tenant that issues tokens.
pub const TENANT: &str = "99999999-8888-7777-6666-555555555555";
/// Client with a secret, and with a federated credential.
pub const CLIENT: &str = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee";
/// Its secret.
pub const SECRET: &str = "not a secret";
/// Token of a workload's identity, which the federated credential accepts.
pub const ASSERTION: &str = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJub2RlIn0.";
/// Resource group of all resources.
pub const GROUP: &str = "pods";
/// Region of all resources.
pub const REGION: &str = "westeurope";

/// Azure with one resource group.
#[derive(Debug)]
pub struct Azure {
    /// Virtual machines, by their names in lower case.
    pub vms: Store<Vm>,
    /// Network interfaces, by their names in lower case.
    pub nics: Store<Nic>,
    /// Public addresses, by their names in lower case.
    pub public_ips: Store<PublicIp>,
    /// Managed disks, by their names in lower case.
    pub disks: Store<Disk>,
    /// Operations, by their ids.
    pub operations: BTreeMap<String, Operation>,
    /// Sizes that the region sells.
    pub sizes: Vec<Size>,
    /// Most resources of one page of a list.
    pub page: usize,
    /// Time from the acceptance of a delete until the VM is gone.
    pub delete_time: Duration,
    /// Whether deleted VMs leave their network interfaces, as after a failure in between.
    pub keeps_nics: bool,
    /// Time for which such an interface cannot be deleted, because Azure keeps it for its VM. Azure's own is 180 s.
    pub nic_reserve: Duration,
    /// Whether deleted VMs leave their OS disks.
    pub keeps_disks: bool,
    /// Whether a shortage of capacity is in the answer to the create, not in its operation.
    pub refuses_at_once: bool,
    /// Cores left of the region's quota; `None`: endless.
    pub quota: Option<u32>,
    /// Number of the next address, VM or operation.
    next: u32,
}

impl Default for Azure {
    fn default() -> Azure {
        Azure {
            vms: Store::default(),
            nics: Store::default(),
            public_ips: Store::default(),
            disks: Store::default(),
            operations: BTreeMap::new(),
            sizes: sizes::all(),
            page: 100,
            delete_time: Duration::ZERO,
            keeps_nics: false,
            nic_reserve: Duration::ZERO,
            keeps_disks: false,
            refuses_at_once: false,
            quota: None,
            next: 0,
        }
    }
}

impl Azure {
    /// Returns the id of a resource of the group: `id("Microsoft.Compute/disks", "data")`.
    pub fn id(kind: &str, name: &str) -> String {
        format!("/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{kind}/{name}")
    }

    /// Returns the id of the subnet `default` of the network `pods`; also `second` exists.
    pub fn subnet(name: &str) -> String {
        Azure::id("Microsoft.Network/virtualNetworks", &format!("pods/subnets/{name}"))
    }

    /// Returns the id of the network security group `pods`.
    pub fn security_group() -> String {
        Azure::id("Microsoft.Network/networkSecurityGroups", "pods")
    }

    /// Returns the id of version 1.0.0 of a gallery image: `peerpod` (specialized), `peerpod-arm` (the same for arm64),
    /// `generalized`, `plain` (specialized, not for confidential VMs).
    pub fn image(name: &str) -> String {
        Azure::id("Microsoft.Compute/galleries", &format!("pods/images/{name}/versions/1.0.0"))
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn dispatch(
        &mut self,
        request: &Request,
        route: &Route,
        action: &str,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        if !self.is_open(action) {
            route.check(request)?;
        }
        match action {
            "Token" => token::client_credentials(request, world),
            "ManagedIdentity" => token::managed_identity(request, world),
            "VirtualMachines_CreateOrUpdate" => self.put_vm(request, route, world),
            "VirtualMachines_Get" => self.get_vm(request, route),
            "VirtualMachines_InstanceView" => self.instance_view(route),
            "VirtualMachines_List" | "VirtualMachines_ListAll" => self.list_vms(request, world),
            "VirtualMachines_Delete" => self.delete_vm(route, world),
            "VirtualMachines_Update" => self.update_vm(request, route),
            "VirtualMachines_AttachDetachDataDisks" => self.attach_detach(request, route, world),
            "VirtualMachines_RetrieveBootDiagnosticsData" => self.console_urls(route, world),
            "Console" => self.console(request),
            "NetworkInterfaces_CreateOrUpdate" => self.put_nic(request, route, world),
            "NetworkInterfaces_Get" => self.get_nic(route),
            "NetworkInterfaces_List" => self.list_nics(request, world),
            "NetworkInterfaces_Delete" => self.delete_nic(route, world),
            "NetworkInterfaces_UpdateTags" => self.tag_nic(request, route),
            "PublicIPAddresses_Get" => self.get_public(route),
            "PublicIPAddresses_List" => self.list_publics(request, world),
            "PublicIPAddresses_Delete" => self.delete_public(route, world),
            "Disks_CreateOrUpdate" => self.put_disk(request, route, world),
            "Disks_Get" => self.get_disk(route),
            "Disks_ListByResourceGroup" => self.list_disks(request, world),
            "Disks_Delete" => self.delete_disk(route, world),
            "Operations_Get" => self.operation(request, route, world),
            "ResourceSkus_List" => self.skus(request),
            "Usage_List" => self.usages(),
            _ => facts::answer(action, route),
        }
    }
}

impl Fake for Azure {
    fn action(&self, request: &Request) -> String {
        Route::of(request).action(&request.method).to_owned()
    }

    fn is_later_page(&self, request: &Request) -> bool {
        !request.query("$skiptoken").is_empty()
    }

    fn rights(&self, request: &Request, action: &str) -> Vec<String> {
        rights::of(request, action)
    }

    fn is_open(&self, action: &str) -> bool {
        matches!(action, "Token" | "ManagedIdentity" | "Console")
    }

    fn rates(&self, request: &Request, action: &str) -> Vec<(String, Rate)> {
        rights::rates(request, action)
    }

    fn tick(&mut self, now: Duration) {
        self.tick_vms(now);
    }

    fn answer(&mut self, request: &Request, action: &str, world: &mut World<'_>) -> Answer {
        if request.lacks_length() {
            // The web server in front of Azure answers, so the body is not in Azure's form.
            return Answer::text(
                411,
                "HTTP Error 411. The request must be chunked or have a content length.",
            );
        }
        let route = Route::of(request);
        let answer = self.dispatch(request, &route, action, world);
        let mut answer = answer.unwrap_or_else(|one| self.refusal(one.status, &one.code, &one.message));
        if !world.left.is_empty() {
            let left: Vec<String> =
                world.left.iter().map(|(counter, left)| format!("{counter};{left}")).collect();
            answer = answer.header("x-ms-ratelimit-remaining-resource", left.join(","));
        }
        answer.header("x-ms-request-id", "00000000-0000-0000-0000-000000000000")
    }

    fn refusal(&self, status: u16, code: &str, message: &str) -> Answer {
        Answer::json(status, &json!({"error": {"code": code, "message": message}}))
    }

    fn denied(&self, right: &str) -> Answer {
        let message = format!(
            "The client '{CLIENT}' with object id '{CLIENT}' does not have authorization to perform action '{right}' over \
             scope '/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}' or the scope is invalid. If access was recently \
             granted, please refresh your credentials."
        );
        self.refusal(403, "AuthorizationFailed", &message)
    }

    fn unauthorized(&self) -> Answer {
        let message = "The access token expiry UTC time is earlier than current UTC time.";
        self.refusal(401, "ExpiredAuthenticationToken", message)
            .header("www-authenticate", "Bearer error=\"invalid_token\"")
    }

    fn throttled(&self, counter: &str, wait: Duration) -> Answer {
        // A quota and a wrong state have this code, too; the status distinguishes them.
        let message = "The server rejected the request because too many requests have been received for this subscription.";
        let details = json!([{"code": "TooManyRequests", "target": counter, "message":
            format!("{{\"operationGroup\":\"{counter}\",\"allowedRequestCount\":12}}")}]);
        let body = json!({"error": {"code": "OperationNotAllowed", "message": message, "details": details}});
        Answer::json(429, &body).header("retry-after", wait.as_secs().max(1).to_string())
    }
}
