//! Google's Compute Engine (API `v1`), as far as a provider of pod VMs needs it, and the services that issue its tokens.
//! One project with one region of three zones.
//!
//! Sources: the API's discovery document, and Google's published limits and error codes.

mod attach;
mod bulk;
mod check;
mod facts;
mod filter;
mod instances;
mod machines;
mod operations;
mod rights;
mod route;
mod token;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::{Answer, Fake, Refused, Request, World};
use crate::rates::Rate;
use crate::store::Store;
pub use attach::{Disk, Use};
pub use instances::{Instance, State};
pub use machines::Machine;
pub use operations::Operation;
use route::Route;
pub use token::{EMAIL, SUBJECT, external_account, service_account};

/// Project of all resources.
pub const PROJECT: &str = "pods-1234";
/// Region of all resources.
pub const REGION: &str = "europe-west4";
/// Its zones.
pub const ZONES: [&str; 3] = ["europe-west4-a", "europe-west4-b", "europe-west4-c"];
/// Beginning of all URLs of resources in answers, whatever the host of the call.
pub const BASE: &str = "https://www.googleapis.com/compute/v1/projects/pods-1234";

/// Reason in the details of a refusal, when too many creates are in progress.
const CONCURRENT: &str = "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED";

/// Compute Engine with one project.
#[derive(Debug)]
pub struct Gcp {
    /// Instances, by `<zone>/<name>`.
    pub instances: Store<Instance>,
    /// Disks, by `<zone or region>/<name>`.
    pub disks: Store<Disk>,
    /// Operations, by their names.
    pub operations: BTreeMap<String, Operation>,
    /// Operation of each `requestId`.
    requests: BTreeMap<String, String>,
    /// Machine types that the region sells.
    pub machines: Vec<Machine>,
    /// Zones that do not answer to lists over all zones.
    pub unreachable: BTreeSet<String>,
    /// Most resources of one page, whatever the caller asks for.
    pub page: usize,
    /// Time from the acceptance of a delete until the instance is gone.
    pub delete_time: Duration,
    /// Time for which a new instance is not found by its name.
    pub hidden: Duration,
    /// vCPUs left of the region's quota; `None`: endless.
    pub quota: Option<u32>,
    /// Most creates in progress; `None`: any number.
    pub most_operations: Option<usize>,
    /// Number of the next address, instance or operation.
    next: u32,
}

impl Default for Gcp {
    fn default() -> Gcp {
        Gcp {
            instances: Store::default(),
            disks: Store::default(),
            operations: BTreeMap::new(),
            requests: BTreeMap::new(),
            machines: machines::all(),
            unreachable: BTreeSet::new(),
            page: 500,
            delete_time: Duration::ZERO,
            hidden: Duration::ZERO,
            quota: None,
            most_operations: None,
            next: 0,
        }
    }
}

impl Gcp {
    /// Returns the path of an image: `peerpod`, `peerpod-arm`, `plain` (not for confidential VMs).
    pub fn image(name: &str) -> String {
        format!("projects/{PROJECT}/global/images/{name}")
    }

    /// Returns the path of a network: `pods`, `second`.
    pub fn network(name: &str) -> String {
        format!("projects/{PROJECT}/global/networks/{name}")
    }

    /// Returns the path of a network's subnetwork, which has the network's name.
    pub fn subnetwork(name: &str) -> String {
        format!("projects/{PROJECT}/regions/{REGION}/subnetworks/{name}")
    }

    /// Forgets which `requestId` came before, as Google does after some time.
    pub fn forget_requests(&mut self) {
        self.requests.clear();
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
        match action {
            "token.jwt" => return token::jwt(request, world),
            "token.metadata" => return token::metadata(request, world),
            "token.exchange" => return token::exchange(request, world),
            "token.impersonate" => return token::impersonate(request, world),
            _ => route.check()?,
        }
        if let Some(answer) = self.repeated(request, world)? {
            return Ok(answer);
        }
        match action {
            "compute.instances.insert" => self.insert(request, route, world),
            "compute.instances.bulkInsert" | "compute.regionInstances.bulkInsert" => {
                self.bulk_insert(request, route, world)
            }
            "compute.instances.get" => self.get_instance(route, world),
            "compute.instances.list" => self.list_instances(request, route, world),
            "compute.instances.aggregatedList" => self.aggregated_instances(request, world),
            "compute.instances.delete" => self.delete_instance(request, route, world),
            "compute.instances.attachDisk" => self.attach_disk(request, route, world),
            "compute.instances.detachDisk" => self.detach_disk(request, route, world),
            "compute.instances.getSerialPortOutput" => self.serial_port(request, route),
            "compute.disks.get" | "compute.regionDisks.get" => self.get_disk(route),
            "compute.disks.list" => self.list_disks(request, route, world),
            "compute.zoneOperations.get" | "compute.regionOperations.get" => self.get_operation(route, world),
            "compute.zoneOperations.wait" | "compute.regionOperations.wait" => {
                self.get_operation(route, world)
            }
            "compute.zoneOperations.list" | "compute.regionOperations.list" => {
                self.list_operations(request, route, world)
            }
            "compute.machineTypes.list" => self.list_machines(request, route, world),
            "compute.machineTypes.get" => self.get_machine(route),
            "compute.regions.get" => self.region(route),
            _ => facts::answer(action, route),
        }
    }

    /// Returns one page of a list.
    fn page(&self, request: &Request, kind: &str, items: Vec<Value>) -> Result<Answer, Box<Refused>> {
        let (page, next) = self.cut(request, items)?;
        let mut body = json!({"kind": format!("compute#{kind}"), "id": format!("projects/{PROJECT}/{kind}"),
            "selfLink": format!("{BASE}/{kind}")});
        // An empty list has no member.
        if !page.is_empty() {
            body["items"] = json!(page);
        }
        if let Some(next) = next {
            body["nextPageToken"] = json!(next);
        }
        Ok(Answer::json(200, &body))
    }

    /// Returns the asked part of a list, and the token of the next one.
    fn cut(
        &self,
        request: &Request,
        items: Vec<Value>,
    ) -> Result<(Vec<Value>, Option<String>), Box<Refused>> {
        let items = filter::kept(request.query("filter"), items)?;
        let most = match request.query("maxResults") {
            "" => 500,
            number => match number.parse::<usize>() {
                Ok(number) if number <= 500 => number,
                _ => return check::invalid("maxResults", number),
            },
        };
        let from = request.query("pageToken");
        let from = match from.strip_prefix("page-").map(str::parse::<usize>) {
            Some(Ok(from)) => from,
            _ if from.is_empty() => 0,
            _ => return check::invalid("pageToken", from),
        };
        let all = items.len();
        let page: Vec<Value> = items.into_iter().skip(from).take(most.min(self.page)).collect();
        let next = from + page.len();
        Ok((page, (next < all).then(|| format!("page-{next}"))))
    }
}

impl Fake for Gcp {
    fn action(&self, request: &Request) -> String {
        Route::of(request).action(&request.method)
    }

    fn is_later_page(&self, request: &Request) -> bool {
        !request.query("pageToken").is_empty()
    }

    fn rights(&self, request: &Request, action: &str) -> Vec<String> {
        rights::of(request, action)
    }

    fn is_open(&self, action: &str) -> bool {
        matches!(action, "token.jwt" | "token.metadata" | "token.exchange")
    }

    fn rates(&self, _request: &Request, action: &str) -> Vec<(String, Rate)> {
        rights::rates(action)
    }

    fn tick(&mut self, now: Duration) {
        self.tick_instances(now);
    }

    fn answer(&mut self, request: &Request, action: &str, world: &mut World<'_>) -> Answer {
        let route = Route::of(request);
        let answer = self.dispatch(request, &route, action, world);
        answer.unwrap_or_else(|one| self.refusal(one.status, &one.code, &one.message))
    }

    fn refusal(&self, status: u16, code: &str, message: &str) -> Answer {
        let mut body = json!({"error": {"code": status, "message": message,
            "errors": [{"message": message, "domain": domain(code), "reason": code}]}});
        if message.contains(CONCURRENT) {
            // Every quota has this reason; the details distinguish them.
            body["error"]["details"] = json!([{"@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "reason": CONCURRENT, "domain": "compute.googleapis.com"}]);
        }
        Answer::json(status, &body)
    }

    fn denied(&self, right: &str) -> Answer {
        let message = format!(
            "Required '{right}' permission for 'projects/{PROJECT}/zones/{}/instances/pod'",
            ZONES[0]
        );
        self.refusal(403, "forbidden", &message)
    }

    fn unauthorized(&self) -> Answer {
        let message = "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or \
            other valid authentication credential.";
        let body = json!({"error": {"code": 401, "message": message, "status": "UNAUTHENTICATED",
            "errors": [{"message": "Invalid Credentials", "domain": "global", "reason": "authError",
                "location": "Authorization", "locationType": "header"}],
            "details": [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "domain": "googleapis.com",
                "reason": "ACCESS_TOKEN_EXPIRED"}]}});
        Answer::json(401, &body).header("www-authenticate", "Bearer realm=\"https://accounts.google.com/\"")
    }

    fn throttled(&self, counter: &str, _wait: Duration) -> Answer {
        let message = format!(
            "Quota exceeded for quota metric '{counter}' and limit '{counter} per minute' of service \
             'compute.googleapis.com' for consumer 'project_number:123456789012'."
        );
        let body = json!({"error": {"code": 403, "message": message, "status": "PERMISSION_DENIED",
            "errors": [{"message": message, "domain": "usageLimits", "reason": "rateLimitExceeded"}],
            "details": [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "domain": "googleapis.com",
                "reason": "RATE_LIMIT_EXCEEDED", "metadata": {"quota_limit": format!("{counter}PerMinutePerProject")}}]}});
        Answer::json(403, &body)
    }
}

/// Returns the domain of an error's reason.
fn domain(code: &str) -> &'static str {
    match code {
        "quotaExceeded" | "rateLimitExceeded" | "accessNotConfigured" => "usageLimits",
        _ => "global",
    }
}
