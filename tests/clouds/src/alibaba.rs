//! Alibaba Cloud's Elastic Compute Service (API `2014-05-26`), as far as a provider of pod VMs needs it, the vSwitches of
//! VPC, and the services that issue temporary keys. One account with one region of three zones.
//!
//! Sources: the API references, the models of the vendor's Python client 7.11.8, and "V3 request structure and signature".

mod account;
mod check;
mod disks;
mod facts;
mod instances;
mod rights;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};

pub use account::{KEY_ID, KEY_SECRET, OIDC_PROVIDER, ROLE, SUBJECT};
pub use disks::Disk;
pub use instances::{Instance, State};

use crate::fake::{Answer, Fake, Refused, Request, World, refused};
use crate::rates::Rate;
use crate::store::Store;

/// Region of all resources.
pub const REGION: &str = "cn-beijing";
/// Its zones.
pub const ZONES: [&str; 3] = ["cn-beijing-h", "cn-beijing-i", "cn-beijing-k"];
/// The account's images: for x86, for ARM, and one that starts by BIOS.
pub const IMAGES: [&str; 3] = ["m-2zeimagex86000000000", "m-2zeimagearm000000000", "m-2zeimagebios00000000"];
/// vSwitches, one for each zone.
pub const VSWITCHES: [&str; 3] =
    ["vsw-2zevswitchh0000000000", "vsw-2zevswitchi0000000000", "vsw-2zevswitchk0000000000"];
/// vSwitch of another VPC, in the first zone.
pub const OTHER_VSWITCH: &str = "vsw-2zevswitchx0000000000";
/// Security group of the VPC.
pub const GROUP: &str = "sg-2zegroup00000000000";
/// SSH key pair of the account.
pub const KEY_PAIR: &str = "me";

/// Parameters of a call, from query and form.
type Parameters = BTreeMap<String, String>;

/// Alibaba Cloud with one account.
#[derive(Debug)]
pub struct Alibaba {
    /// Instances, by their ids.
    pub instances: Store<Instance>,
    /// Disks, by their ids.
    pub disks: Store<Disk>,
    /// Parameters and instances of each client token.
    tokens: BTreeMap<String, (Parameters, Vec<String>)>,
    /// Numbers of the signatures so far.
    nonces: BTreeSet<String>,
    /// Most resources of one page, whatever the caller asks for.
    pub page: usize,
    /// Most instances that a list by tags shows.
    pub most_by_tags: usize,
    /// Time from the acceptance of a delete until the instance is gone.
    pub delete_time: Duration,
    /// Time for which a new instance is not shown.
    pub hidden: Duration,
    /// Time from the acceptance of an attachment until it is there.
    pub attach_time: Duration,
    /// Free addresses of each vSwitch.
    pub free: u32,
    /// vCPUs left of the account's quota for each type; `None`: endless.
    pub quota: Option<u32>,
    /// Number of the next object.
    next: u32,
}

impl Default for Alibaba {
    fn default() -> Alibaba {
        Alibaba {
            instances: Store::default(),
            disks: Store::default(),
            tokens: BTreeMap::new(),
            nonces: BTreeSet::new(),
            page: 100,
            most_by_tags: 1_000,
            delete_time: Duration::ZERO,
            hidden: Duration::ZERO,
            attach_time: Duration::ZERO,
            free: 250,
            quota: None,
            next: 0,
        }
    }
}

impl Alibaba {
    /// Forgets which client tokens came before.
    pub fn forget_tokens(&mut self) {
        self.tokens.clear();
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
        match action {
            "metadata.token" | "metadata.roles" | "metadata.role" => {
                return account::metadata(request, action, world);
            }
            "AssumeRoleWithOIDC" => return account::assume(request, world),
            _ => {}
        }
        if !world.is_witness {
            self.check_signature(request, world)?;
        }
        let parameters = parameters(request);
        check::known(action, &parameters)?;
        match action {
            "RunInstances" => self.run(&parameters, world),
            "DescribeInstances" => self.describe_instances(&parameters, world),
            "DeleteInstances" => self.delete(&parameters, world),
            "ListTagResources" => self.list_tags(&parameters, world),
            "GetInstanceConsoleOutput" => self.console(&parameters),
            "DescribeDisks" => self.describe_disks(&parameters, world),
            "AttachDisk" => self.attach(&parameters, world),
            "DetachDisk" => self.detach(&parameters),
            _ => self.facts(action, &parameters),
        }
    }

    /// Returns a page of a list, of `usual` items unless the caller asks for more, and the token of the next one.
    fn cut<T>(
        &self,
        parameters: &Parameters,
        items: Vec<T>,
        usual: usize,
    ) -> Result<(Vec<T>, String), Box<Refused>> {
        let most = match get(parameters, "MaxResults") {
            "" => usual,
            number => match number.parse::<usize>() {
                Ok(number) if number <= 100 => number.max(10),
                _ => return check::invalid("MaxResults", number),
            },
        };
        let from = match get(parameters, "NextToken") {
            "" => 0,
            token => match token.strip_prefix("page-").map(str::parse::<usize>) {
                Some(Ok(from)) => from,
                _ => return check::invalid("NextToken", token),
            },
        };
        let all = items.len();
        let page: Vec<T> = items.into_iter().skip(from).take(most.min(self.page)).collect();
        let next = from + page.len();
        Ok((page, if next < all { format!("page-{next}") } else { String::new() }))
    }
}

/// Returns the parameters of a call. A form and a query are as good.
fn parameters(request: &Request) -> Parameters {
    let mut all = request.query.clone();
    if request.header("content-type").starts_with("application/x-www-form-urlencoded") {
        all.extend(request.form());
    }
    all
}

fn get<'p>(parameters: &'p Parameters, name: &str) -> &'p str {
    parameters.get(name).map_or("", String::as_str)
}

/// Returns the values of a list: `InstanceId.1`, `InstanceId.2`.
fn list<'p>(parameters: &'p Parameters, name: &str) -> Vec<&'p str> {
    let value = |number: usize| parameters.get(&format!("{name}.{number}")).map(String::as_str);
    (1..).map_while(value).collect()
}

/// Returns the tags of a call.
fn tags(parameters: &Parameters) -> BTreeMap<String, String> {
    let tag = |number: usize| {
        let key = parameters.get(&format!("Tag.{number}.Key"))?;
        Some((key.clone(), get(parameters, &format!("Tag.{number}.Value")).to_owned()))
    };
    (1..).map_while(tag).collect()
}

/// Returns an answer with a request's id.
fn answer(mut body: Value) -> Result<Answer, Box<Refused>> {
    body["RequestId"] = json!("473469C7-AA6F-4DC5-B3DB-A3DC0DE3C83E");
    Ok(Answer::json(200, &body))
}

impl Fake for Alibaba {
    fn action(&self, request: &Request) -> String {
        let role = "/latest/meta-data/ram/security-credentials/";
        match request.path.as_str() {
            "/latest/api/token" => "metadata.token".to_owned(),
            path if path == role => "metadata.roles".to_owned(),
            path if path.starts_with(role) => "metadata.role".to_owned(),
            _ => match request.header("x-acs-action") {
                "" => request.query("Action").to_owned(),
                action => action.to_owned(),
            },
        }
    }

    fn is_later_page(&self, request: &Request) -> bool {
        !request.query("NextToken").is_empty()
    }

    fn rights(&self, _request: &Request, action: &str) -> Vec<String> {
        rights::of(action)
    }

    /// Signatures are checked in the answer.
    fn is_open(&self, _action: &str) -> bool {
        true
    }

    fn rates(&self, _request: &Request, action: &str) -> Vec<(String, Rate)> {
        rights::rates(action)
    }

    fn tick(&mut self, now: Duration) {
        self.tick_instances(now);
        self.tick_disks(now);
    }

    fn answer(&mut self, request: &Request, action: &str, world: &mut World<'_>) -> Answer {
        let answer = self.dispatch(request, action, world);
        answer.unwrap_or_else(|one| self.refusal(one.status, &one.code, &one.message))
    }

    fn refusal(&self, status: u16, code: &str, message: &str) -> Answer {
        let body = json!({"RequestId": "473469C7-AA6F-4DC5-B3DB-A3DC0DE3C83E", "HostId": "ecs.cn-beijing.aliyuncs.com",
            "Code": code, "Message": message, "Recommend": format!("https://api.aliyun.com/troubleshoot?q={code}")});
        Answer::json(status, &body)
    }

    fn denied(&self, right: &str) -> Answer {
        let message = format!(
            "User not authorized to operate on the specified resource, or this API doesn't support RAM. ({right})"
        );
        self.refusal(403, "Forbidden.RAM", &message)
    }

    fn unauthorized(&self) -> Answer {
        self.refusal(404, "InvalidAccessKeyId.NotFound", "Specified access key is not found.")
    }

    fn throttled(&self, _counter: &str, _wait: Duration) -> Answer {
        self.refusal(400, "Throttling.User", "Request was denied due to user flow control.")
    }
}

/// Refuses an object that is not there.
fn missing<T>(code: &str, what: &str) -> Result<T, Box<Refused>> {
    refused(404, code, format!("The specified {what} does not exist."))
}
