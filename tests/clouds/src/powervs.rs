//! IBM Power Virtual Server, as far as a provider of pod VMs needs it, with IBM's IAM. One workspace in one zone.
//!
//! Sources: the models and operations of IBM's Go client (`power-go-client`). IBM publishes no rates; those here are
//! guesses, and so are the texts of faults. Names are not unique, and no call is idempotent.

mod check;
mod facts;
mod instances;

use std::time::Duration;

use serde_json::json;

pub use instances::Instance;
pub use instances::State;

use crate::fake::{Answer, Fake, Refused, Request, World, refused};
use crate::iam;
use crate::rates::Rate;
use crate::store::Store;

/// Zone of the workspace.
pub const ZONE: &str = "dal12";
/// Workspace of all VMs.
pub const WORKSPACE: &str = "0b1c2d3e-1111-2222-3333-444455556666";
/// Image of the VMs.
pub const IMAGE: &str = "aaaaaaaa-0000-4000-8000-000000000001";
/// Network with fixed addresses.
pub const NETWORK: &str = "bbbbbbbb-0000-4000-8000-000000000001";
/// Second network with fixed addresses.
pub const SECOND: &str = "bbbbbbbb-0000-4000-8000-000000000002";
/// Network with addresses by DHCP.
pub const DHCP: &str = "bbbbbbbb-0000-4000-8000-000000000003";
/// Network with public addresses.
pub const PUBLIC: &str = "bbbbbbbb-0000-4000-8000-000000000004";

/// PowerVS with one workspace.
#[derive(Debug, Default)]
pub struct PowerVs {
    /// VMs, by their ids.
    pub instances: Store<Instance>,
    /// Time from the acceptance of a delete until the VM is gone.
    pub delete_time: Duration,
    /// Whether a delete of a VM that is being built is refused.
    pub refuses_early_deletes: bool,
    /// Processors left of the workspace's limit; `None`: endless.
    pub quota: Option<f64>,
    /// Number of the next VM.
    next: u32,
}

impl PowerVs {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn dispatch(
        &mut self,
        request: &Request,
        action: &str,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        if action == "token" {
            return Ok(iam::token(request, world));
        }
        check::workspace(request)?;
        let id = request.parts().last().cloned().unwrap_or_default();
        match action {
            "pvminstances.post" => self.create(request, world),
            "pvminstances.getall" => Ok(self.list(world)),
            "pvminstances.get" => self.get(&id),
            "pvminstances.delete" => self.delete(&id, world),
            "dhcp.get" if id == facts::SERVER => Ok(self.leases()),
            _ => facts::answer(action, &id),
        }
    }
}

/// Returns the name of the call: a part of that in IBM's client.
fn action(request: &Request) -> &'static str {
    let parts = request.parts();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let rest = match &parts[..] {
        ["identity", "token"] => return "token",
        ["pcloud", "v1", "cloud-instances", _, rest @ ..] => rest,
        _ => return "unknown",
    };
    match (request.method.as_str(), rest) {
        ("POST", ["pvm-instances"]) => "pvminstances.post",
        ("GET", ["pvm-instances"]) => "pvminstances.getall",
        ("GET", ["pvm-instances", _]) => "pvminstances.get",
        ("DELETE", ["pvm-instances", _]) => "pvminstances.delete",
        ("GET", ["images", _]) => "images.get",
        ("GET", ["networks", _]) => "networks.get",
        ("GET", ["system-pools"]) => "systempools.get",
        ("GET", ["services", "dhcp"]) => "dhcp.getall",
        ("GET", ["services", "dhcp", _]) => "dhcp.get",
        _ => "unknown",
    }
}

fn not_found<T>(what: &str, id: &str) -> Result<T, Box<Refused>> {
    refused(404, "not found", format!("{what} {id} does not exist"))
}

impl Fake for PowerVs {
    fn action(&self, request: &Request) -> String {
        action(request).to_owned()
    }

    fn is_later_page(&self, _request: &Request) -> bool {
        false
    }

    fn rights(&self, _request: &Request, action: &str) -> Vec<String> {
        // PowerVS has a role for reads and one for changes of a workspace.
        let is_change = action.ends_with(".post") || action.ends_with(".delete");
        match action {
            "token" => Vec::new(),
            _ => vec![if is_change { "Manager" } else { "Reader" }.to_owned()],
        }
    }

    fn is_open(&self, action: &str) -> bool {
        action == "token"
    }

    fn rates(&self, _request: &Request, action: &str) -> Vec<(String, Rate)> {
        match action {
            "token" => Vec::new(),
            _ => vec![("calls".to_owned(), Rate::Bucket { per_minute: 600.0, burst: 200.0 })],
        }
    }

    fn tick(&mut self, now: Duration) {
        self.tick_instances(now);
    }

    fn answer(&mut self, request: &Request, action: &str, world: &mut World<'_>) -> Answer {
        let answer = self.dispatch(request, action, world);
        answer.unwrap_or_else(|one| self.refusal(one.status, &one.code, &one.message))
    }

    fn refusal(&self, status: u16, code: &str, message: &str) -> Answer {
        Answer::json(
            status,
            &json!({"code": status, "error": code, "description": message, "message": message}),
        )
    }

    fn denied(&self, right: &str) -> Answer {
        self.refusal(403, "forbidden", &format!("The role {right} is required"))
    }

    fn unauthorized(&self) -> Answer {
        self.refusal(401, "unauthorized", "The token is expired or invalid")
    }

    fn throttled(&self, _counter: &str, wait: Duration) -> Answer {
        let wait = wait.as_secs().max(1).to_string();
        self.refusal(429, "too many requests", "Too many requests").header("retry-after", wait)
    }
}
