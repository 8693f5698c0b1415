//! IBM Cloud's VPC API, as far as a provider of pod VMs needs it, with its IAM and Global Tagging. One VPC in one region
//! with three zones.
//!
//! Sources: the models and operations of IBM's SDK (`ibm-vpc`), and the VPC API's documented errors. IBM publishes no
//! rates; those here are guesses.

mod check;
mod facts;
mod instances;
mod profiles;
mod route;
mod view;
mod volumes;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

pub use instances::Instance;
pub use instances::State;
pub use profiles::Profile;
pub use volumes::Volume;

use crate::fake::{Answer, Fake, Refused, Request, World, refused};
use crate::iam;
use crate::rates::Rate;
use crate::store::Store;

/// Region of all resources.
pub const REGION: &str = "us-south";
/// Zones of the region.
pub const ZONES: [&str; 3] = ["us-south-1", "us-south-2", "us-south-3"];
/// VPC of all instances.
pub const VPC: &str = "r006-11111111-2222-3333-4444-555555555555";
/// Resource group of all resources.
pub const RESOURCE_GROUP: &str = "fee82deba12e4c0fb69c3b09d1f12345";
/// Security group of the VPC.
pub const SECURITY_GROUP: &str = "r006-99999999-2222-3333-4444-555555555555";
/// SSH key.
pub const KEY: &str = "r006-88888888-2222-3333-4444-555555555555";

/// The VPC API with one VPC.
#[derive(Debug)]
pub struct IbmCloud {
    /// Instances, by their ids.
    pub instances: Store<Instance>,
    /// Volumes, by their ids.
    pub volumes: Store<Volume>,
    /// Profiles that the region sells.
    pub profiles: Vec<Profile>,
    /// Tags that Global Tagging gave, by resource.
    pub tags: BTreeMap<String, Vec<String>>,
    /// Most resources of one page of a list; a request may ask for fewer.
    pub page: usize,
    /// Time from the acceptance of a delete until the instance is gone.
    pub delete_time: Duration,
    /// Time from the acceptance of an attachment until the instance has the device.
    pub attach_time: Duration,
    /// Whether deleted instances leave their boot volumes, as after a failure in between.
    pub keeps_volumes: bool,
    /// Whether an instance that IBM cannot start is shown as stopped, not as failed.
    pub stops_refused: bool,
    /// Whether a delete of an instance that is being made is refused.
    pub refuses_early_deletes: bool,
    /// Virtual CPUs left of the region's quota; `None`: endless.
    pub quota: Option<u32>,
    /// Number of the next address or resource.
    next: u32,
}

impl Default for IbmCloud {
    fn default() -> IbmCloud {
        IbmCloud {
            instances: Store::default(),
            volumes: Store::default(),
            profiles: profiles::all(),
            tags: BTreeMap::new(),
            page: 100,
            delete_time: Duration::ZERO,
            attach_time: Duration::ZERO,
            keeps_volumes: false,
            stops_refused: false,
            refuses_early_deletes: false,
            quota: None,
            next: 0,
        }
    }
}

impl IbmCloud {
    /// Returns the id of a subnet of a zone: `pods` or `second`.
    pub fn subnet(zone: &str, name: &str) -> String {
        let part = if name == "pods" { "aaaa" } else { "bbbb" };
        format!("07{}7-00000000-0000-4000-{part}-00000000000{}", zone_number(zone), zone_number(zone))
    }

    /// Returns the id of an image: `peerpod` for amd64, `peerpod-z` for s390x, `ipxe` with another format of user-data,
    /// `pending`, which is not imported yet.
    pub fn image(name: &str) -> String {
        format!("r006-image-{name}")
    }

    /// Returns the id of the dedicated host, or of the group, of a zone.
    pub fn dedicated(zone: &str, is_group: bool) -> String {
        let part = if is_group { "cccc" } else { "dddd" };
        format!("07{}7-00000000-0000-4000-{part}-000000000000", zone_number(zone))
    }

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
        if !self.is_open(action) && action != "attach_tag" {
            route::check(request)?;
        }
        let id = route::id(request);
        match action {
            "token" => Ok(iam::token(request, world)),
            "create_instance" => self.create(request, world),
            "list_instances" => self.list_instances(request, world),
            "get_instance" => self.get_instance(&id, world),
            "delete_instance" => self.delete_instance(&id, world),
            "create_instance_volume_attachment" => self.attach(request, &id, world),
            "list_instance_volume_attachments" => self.attachments(&id, world),
            "delete_instance_volume_attachment" => self.detach(&id, &route::last(request), world),
            "list_volumes" => self.list_volumes(request, world),
            "get_volume" => self.get_volume(&id, world),
            "delete_volume" => self.delete_volume(&id, world),
            "list_instance_profiles" => Ok(self.list_profiles(world)),
            "attach_tag" => self.attach_tag(request),
            _ => facts::answer(action, &route::last(request), world.endpoint),
        }
    }

    fn attach_tag(&mut self, request: &Request) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        let crn = crate::body::text(&body, "/resources/0/resource_id").to_owned();
        let names =
            crate::body::list(&body, "/tag_names").iter().filter_map(Value::as_str).map(str::to_owned);
        let is_known = self.instances.all().any(|(_, one)| one.crn() == crn);
        if is_known {
            self.tags.entry(crn.clone()).or_default().extend(names);
        }
        Ok(Answer::json(200, &json!({"results": [{"resource_id": crn, "is_error": !is_known}]})))
    }

    /// Returns one page of a list with this name.
    fn listed(&self, request: &Request, name: &str, items: &[Value], world: &World<'_>) -> Answer {
        let limit = request.query("limit").parse().unwrap_or(50_usize).clamp(1, 100).min(self.page);
        let from: usize = request.query("start").parse().unwrap_or(0);
        let page: Vec<&Value> = items.iter().skip(from).take(limit).collect();
        let path = &request.path;
        // IBM's links have neither version nor generation, and a call without them is refused.
        let link = |more: &str| json!({"href": format!("{}{path}?limit={limit}{more}", world.endpoint)});
        let mut body = json!({"first": link(""), "limit": limit, "total_count": items.len()});
        if from + page.len() < items.len() {
            body["next"] = link(&format!("&start={}", from + page.len()));
        }
        body[name] = json!(page);
        Answer::json(200, &body)
    }
}

/// Returns the number at the end of a zone's name.
fn zone_number(zone: &str) -> &str {
    zone.rsplit('-').next().unwrap_or_default()
}

fn not_found<T>(what: &str, id: &str) -> Result<T, Box<Refused>> {
    refused(404, "not_found", format!("{what} {id} not found"))
}

impl Fake for IbmCloud {
    fn action(&self, request: &Request) -> String {
        route::action(request).to_owned()
    }

    fn is_later_page(&self, request: &Request) -> bool {
        !request.query("start").is_empty()
    }

    fn rights(&self, request: &Request, action: &str) -> Vec<String> {
        route::rights(request, action)
    }

    fn is_open(&self, action: &str) -> bool {
        action == "token"
    }

    fn rates(&self, _request: &Request, action: &str) -> Vec<(String, Rate)> {
        match action {
            "token" => Vec::new(),
            "create_instance" => {
                vec![("creates".to_owned(), Rate::Bucket { per_minute: 600.0, burst: 100.0 })]
            }
            _ => vec![("calls".to_owned(), Rate::Bucket { per_minute: 1_200.0, burst: 200.0 })],
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
        let target = match code {
            "validation_unique_failed" => json!({"name": "name", "type": "field"}),
            _ => Value::Null,
        };
        let mut error = json!({"code": code, "message": message,
            "more_info": "https://cloud.ibm.com/docs/vpc?topic=vpc-rias-error-messages"});
        if target.is_object() {
            error["target"] = target;
        }
        Answer::json(status, &json!({"errors": [error], "trace": "00000000-0000-4000-8000-000000000000"}))
    }

    fn denied(&self, right: &str) -> Answer {
        self.refusal(403, "not_authorized", &format!("The request is not authorized: {right}"))
    }

    fn unauthorized(&self) -> Answer {
        self.refusal(
            401,
            "not_authenticated",
            "The token that was provided in the request is invalid or expired.",
        )
    }

    fn throttled(&self, _counter: &str, wait: Duration) -> Answer {
        let wait = wait.as_secs().max(1).to_string();
        self.refusal(429, "too_many_requests", "Too many requests").header("retry-after", wait)
    }
}
