//! Serves EC2's API between the provider and moto. The proxy adds EC2's behaviour and refusals that moto lacks, injects
//! faults, and records every call.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Request, Response};
use peerpod_test_clouds::{Fault, Faults, Rates, listen, pairs};
use tokio::task::JoinHandle;

use crate::ebs::Snapshots;
use crate::form::Params;
use crate::moto::Moto;
use crate::{ebs, quotas, rules, xml};

/// Largest accepted request; EC2's own limit for queries is far below.
const MAX_BODY: usize = 4 << 20;
/// Region of all resources.
pub const REGION: &str = "eu-central-1";

/// A recorded call and the status of its answer.
#[derive(Clone, Debug)]
pub struct Call {
    /// Time of its arrival.
    pub at: Instant,
    /// Action.
    pub action: String,
    /// All parameters but the user-data.
    pub params: Params,
    /// Status of the answer; 0 without an answer.
    pub status: u16,
}

/// One EC2 for one test: an account in moto, and its faults. It ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    witness: SocketAddr,
    pub(crate) shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) moto: &'static Moto,
    pub(crate) account: String,
    pub(crate) faults: Mutex<Faults>,
    rates: Mutex<Rates>,
    is_expired: AtomicBool,
    /// Most VMs in a page of DescribeInstances; 0: as many as the call wants.
    page: AtomicUsize,
    started: Instant,
    pub(crate) calls: Mutex<Vec<Call>>,
    tokens: Mutex<HashMap<(String, String), Token>>,
    /// One attachment at a time.
    attaching: tokio::sync::Mutex<()>,
    /// Time of each VM's creation.
    pub(crate) made: Mutex<HashMap<String, Instant>>,
    /// Calls that took effect and are not answered yet.
    pub(crate) late: AtomicUsize,
    /// Interrupted spot VMs, with the status code of their requests.
    pub(crate) interrupted: Mutex<BTreeMap<String, String>>,
    /// Snapshots that the EBS direct APIs write.
    pub(crate) snapshots: Mutex<Snapshots>,
    /// Spot prices: type, zone, price.
    pub(crate) prices: Mutex<Vec<[String; 3]>>,
    /// moto's answers about types, images and subnets, which do not change.
    pub(crate) known: Mutex<BTreeMap<String, String>>,
}

/// Parameters and answer of a client token's first use.
type Token = Arc<tokio::sync::Mutex<Option<(Params, Answer)>>>;

/// Status and XML of an answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) xml: String,
}

impl Answer {
    pub(crate) fn refusal(status: u16, code: &str, message: &str) -> Answer {
        let message = xml::escape(message);
        let xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Response><Errors><Error><Code>{code}</Code>\
             <Message>{message}</Message></Error></Errors><RequestID>00000000-0000-0000-0000-000000000000</RequestID></Response>"
        );
        Answer { status, xml }
    }
}

impl Proxy {
    /// Starts a fresh account, with a default network in three zones and without faults. Needs a runtime.
    ///
    /// # Errors
    /// When moto does not start or no port is free.
    pub async fn start() -> anyhow::Result<Proxy> {
        Proxy::start_on(std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?).await
    }

    /// Starts it on this listener, which may have been bound in another network namespace.
    ///
    /// # Errors
    /// As [`Proxy::start`].
    pub async fn start_on(listener: std::net::TcpListener) -> anyhow::Result<Proxy> {
        static ACCOUNTS: AtomicU64 = AtomicU64::new(100_000_000_000);
        let moto = tokio::task::spawn_blocking(Moto::shared).await??;
        let shared = Arc::new(Shared {
            moto,
            account: ACCOUNTS.fetch_add(1, Ordering::Relaxed).to_string(),
            faults: Mutex::default(),
            rates: Mutex::default(),
            is_expired: AtomicBool::new(false),
            page: AtomicUsize::new(0),
            started: Instant::now(),
            calls: Mutex::default(),
            tokens: Mutex::default(),
            attaching: tokio::sync::Mutex::default(),
            made: Mutex::default(),
            late: AtomicUsize::new(0),
            interrupted: Mutex::default(),
            snapshots: Mutex::default(),
            prices: Mutex::default(),
            known: Mutex::default(),
        });
        let straight = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let serve = |listener, faulty| {
            let shared = shared.clone();
            listen(listener, move |request| answer(shared.clone(), request, faulty))
        };
        let (address, faulty) = serve(listener, true)?;
        let (witness, straight) = serve(straight, false)?;
        Ok(Proxy { address, witness, shared, tasks: vec![faulty, straight] })
    }

    /// Returns the provider's endpoint.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns a witness's endpoint of the same account, without faults and without records.
    pub fn witness_endpoint(&self) -> String {
        format!("http://{}", self.witness)
    }

    /// Calls moto directly, as a witness.
    ///
    /// # Errors
    /// When there is no answer or a refusal.
    pub async fn ask(&self, action: &str, params: &[(&str, &str)]) -> anyhow::Result<String> {
        let params = params.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let Answer { status, xml } = self.shared.upstream(action, params).await?;
        ensure!(status == 200, "{action}: {status} {xml}");
        Ok(xml)
    }

    /// Calls like a client of [`Proxy::endpoint`], with faults. Returns status and answer.
    ///
    /// # Errors
    /// When the connection would break.
    pub async fn call(&self, action: &str, params: &[(&str, &str)]) -> anyhow::Result<(u16, String)> {
        let params = params.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let Answer { status, xml } = self.shared.faulty(action, params).await?;
        Ok((status, xml))
    }

    /// Enables buckets of EC2's size that fill `speed` times as fast.
    pub fn set_buckets(&self, speed: f64) {
        *lock(&self.shared.rates) = Rates::with_speed(speed);
    }

    /// Sets the number of VMs left of a type in a zone on a market (`spot` or `on-demand`); `*` is any.
    pub fn set_stock(&self, machine: &str, zone: &str, market: &str, left: u64) {
        let names = [machine, zone, market].map(str::to_owned);
        self.faults().stock.push((names, left));
    }

    /// Denies an action from now on.
    pub fn deny(&self, action: &str) {
        self.faults().denied.insert(action.to_owned());
    }

    /// Makes the credentials expired from now on.
    pub fn expire(&self) {
        self.shared.is_expired.store(true, Ordering::Relaxed);
    }

    /// Makes the next `times` calls of an action fail.
    pub fn fail(&self, action: &str, fault: Fault, times: u32) {
        self.faults().next.push((action.to_owned(), fault, times));
    }

    /// Sets the most VMs in a page of DescribeInstances.
    pub fn set_page(&self, vms: usize) {
        self.shared.page.store(vms, Ordering::Relaxed);
    }

    /// Hides new VMs and volumes for this time.
    pub fn set_lag(&self, lag: Duration) {
        self.faults().lag = lag;
    }

    /// Keeps VMs pending for this time.
    pub fn set_boot(&self, boot: Duration) {
        self.faults().boot = boot;
    }

    /// Returns the number of calls that took effect and are not answered yet ([`Fault::Late`]).
    pub fn late(&self) -> usize {
        self.shared.late.load(Ordering::Relaxed)
    }

    /// Sets the status of this spot VM's request: `marked-for-termination`, `instance-terminated-no-capacity`.
    pub fn interrupt(&self, vm: &str, code: &str) {
        lock(&self.shared.interrupted).insert(vm.to_owned(), code.to_owned());
    }

    /// Adds a type's spot price in a zone. After the first addition moto's prices are no longer returned.
    pub fn set_spot_price(&self, machine: &str, zone: &str, price: &str) {
        lock(&self.shared.prices).push([machine, zone, price].map(str::to_owned));
    }

    /// Removes all faults.
    pub fn heal(&self) {
        *self.faults() = Faults::default();
        *lock(&self.shared.rates) = Rates::default();
        self.shared.is_expired.store(false, Ordering::Relaxed);
    }

    /// Returns every call so far, in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.shared.calls).clone()
    }

    /// Returns the number of admitted calls of an action (throttled ones do not count); `None`: of all actions.
    pub fn count(&self, action: Option<&str>) -> usize {
        let calls = lock(&self.shared.calls);
        calls
            .iter()
            .filter(|call| action.is_none_or(|action| call.action == action) && call.status != 503)
            .count()
    }

    /// Forgets the calls so far.
    pub fn forget_calls(&self) {
        lock(&self.shared.calls).clear();
    }

    /// Returns the actions of all calls so far.
    pub fn actions(&self) -> BTreeSet<String> {
        lock(&self.shared.calls).iter().map(|call| call.action.clone()).collect()
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        lock(&self.shared.faults)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers a request.
async fn answer(
    shared: Arc<Shared>,
    request: Request<Incoming>,
    faulty: bool,
) -> anyhow::Result<Response<Full<Bytes>>> {
    let (head, body) = request.into_parts();
    let body = http_body_util::Limited::new(body, MAX_BODY).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("{error}"))?.to_bytes();
    if head.uri.path().starts_with(ebs::PATH) {
        // As below: the call is completed even if the client no longer waits.
        return tokio::spawn(ebs::answer(shared, head, body)).await?;
    }
    if quotas::is_for(&head) {
        return tokio::spawn(quotas::answer(shared, body)).await?;
    }
    let mut params = pairs(&String::from_utf8_lossy(&body));
    let action = params.remove("Action").unwrap_or_default();
    // The work runs in a task of its own: EC2 completes a call even if the client no longer waits.
    let work = async move {
        if faulty { shared.faulty(&action, params).await } else { shared.upstream(&action, params).await }
    };
    let Answer { status, xml } = tokio::spawn(work).await??;
    let answer = Response::builder().status(status).header("content-type", "text/xml;charset=UTF-8");
    Ok(answer.body(Full::new(xml.into()))?)
}

impl Shared {
    /// Calls moto unchanged.
    pub(crate) async fn upstream(
        self: &Arc<Self>,
        action: &str,
        mut params: Params,
    ) -> anyhow::Result<Answer> {
        params.insert("Action".to_owned(), action.to_owned());
        params.entry("Version".to_owned()).or_insert_with(|| "2016-11-15".to_owned());
        let (moto, account) = (self.moto, self.account.clone());
        let asked = tokio::task::spawn_blocking(move || moto.ask(&account, REGION, &params)).await?;
        asked.map(|(status, xml)| Answer { status, xml }).with_context(|| format!("moto's {action}"))
    }

    pub(crate) async fn faulty(self: &Arc<Self>, action: &str, params: Params) -> anyhow::Result<Answer> {
        let index = {
            let mut calls = lock(&self.calls);
            let mut shown = params.clone();
            shown.retain(|key, _| !key.ends_with("UserData"));
            calls.push(Call { at: Instant::now(), action: action.to_owned(), params: shown, status: 0 });
            calls.len() - 1
        };
        let answered = self.decide(action, params).await;
        // `forget_calls` may have run in between.
        if let (Ok(answer), Some(call)) = (&answered, lock(&self.calls).get_mut(index)) {
            call.status = answer.status;
        }
        answered
    }

    async fn decide(self: &Arc<Self>, action: &str, params: Params) -> anyhow::Result<Answer> {
        let (fault, refused, lag, boot) = {
            let admitted =
                lock(&self.rates).take(action, rules::rate(action), self.started.elapsed()).is_ok();
            let mut faults = lock(&self.faults);
            let refused = if !admitted {
                Some(Answer::refusal(503, "RequestLimitExceeded", "Request limit exceeded."))
            } else if self.is_expired.load(Ordering::Relaxed) {
                Some(Answer::refusal(400, "RequestExpired", "Request has expired."))
            } else if faults.denied.contains(action) {
                let message = format!(
                    "You are not authorized to perform this operation. User: arn:aws:sts::{}:assumed-role/pods is not \
                     authorized to perform: ec2:{action} because no identity-based policy allows it. \
                     Encoded authorization failure message: {}",
                    self.account,
                    "x".repeat(900)
                );
                Some(Answer::refusal(403, "UnauthorizedOperation", &message))
            } else {
                None
            };
            let mut fault = None;
            if refused.is_none() {
                // As in the fakes of tests/clouds.
                let later = params.contains_key("NextToken").then(|| format!("{action} second page"));
                fault = later.and_then(|name| faults.next(&name)).or_else(|| faults.next(action));
            }
            (fault, refused, faults.lag, faults.boot)
        };
        if let Some(refused) = refused {
            return Ok(refused);
        }
        match &fault {
            Some(Fault::Refuse { status, code, message }) => {
                return Ok(Answer::refusal(*status, code, message));
            }
            Some(Fault::Reset) => anyhow::bail!("reset"),
            Some(Fault::LostAnswer | Fault::Late(_)) | None => {}
            Some(other) => anyhow::bail!("EC2 has no fault {other:?}"),
        }
        let answer = match action {
            // EC2 attaches a volume once, also when the caller repeats the call before the answer; moto may do it twice.
            "AttachVolume" => {
                let (shared, action) = (self.clone(), action.to_owned());
                tokio::spawn(async move {
                    let _turn = shared.attaching.lock().await;
                    shared.once(&action, params, lag, boot).await
                })
                .await??
            }
            _ => self.once(action, params, lag, boot).await?,
        };
        match fault {
            Some(Fault::LostAnswer) => anyhow::bail!("the answer is lost"),
            Some(Fault::Late(late)) => {
                self.late.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(late).await;
                self.late.fetch_sub(1, Ordering::Relaxed);
            }
            _ => {}
        }
        Ok(answer)
    }

    /// Keeps a client token's promise: the call runs once, a repetition gets the same answer, other parameters are
    /// refused.
    async fn once(
        self: &Arc<Self>,
        action: &str,
        params: Params,
        lag: Duration,
        boot: Duration,
    ) -> anyhow::Result<Answer> {
        if let Some(refused) = rules::refused(self, action, &params, lag, boot).await? {
            return Ok(refused);
        }
        let promised = ["RunInstances", "CreateFleet", "CreateLaunchTemplate", "CreateNetworkInterface"];
        let dry = params.get("DryRun").is_some_and(|dry| dry == "true");
        let token = params.get("ClientToken").filter(|_| promised.contains(&action) && !dry).cloned();
        let Some(token) = token else { return self.done(action, params, lag, boot).await };
        let slot = lock(&self.tokens).entry((action.to_owned(), token)).or_default().clone();
        let (shared, action) = (Arc::clone(self), action.to_owned());
        // EC2 executes a call to its end, also when its caller has gone.
        let call = tokio::spawn(async move {
            let mut slot = slot.lock().await;
            if let Some((before, answer)) = &*slot {
                if *before != params {
                    let message = "The client token you have provided was used with other parameters.";
                    return Ok(Answer::refusal(400, "IdempotentParameterMismatch", message));
                }
                return Ok(answer.clone());
            }
            let answer = shared.done(&action, params.clone(), lag, boot).await?;
            if answer.status == 200 {
                *slot = Some((params, answer.clone()));
            }
            Ok(answer)
        });
        call.await?
    }

    async fn done(
        self: &Arc<Self>,
        action: &str,
        mut params: Params,
        lag: Duration,
        boot: Duration,
    ) -> anyhow::Result<Answer> {
        let page = self.page.load(Ordering::Relaxed);
        if page > 0 && action == "DescribeInstances" && params.contains_key("MaxResults") {
            params.insert("MaxResults".to_owned(), page.to_string());
        }
        let registered = if action == "RegisterImage" { params.clone() } else { Params::new() };
        let mut answer = match action {
            "CreateFleet" => rules::fleet(self, params).await?,
            "RunInstances" => rules::run(self, params).await?,
            "DescribeSpotPriceHistory" if !lock(&self.prices).is_empty() => rules::spot_prices(self),
            "DescribeSpotInstanceRequests" => rules::spot_requests(self, &params),
            "GetServiceQuota" => quotas::quota(&params),
            _ => self.upstream(action, params).await?,
        };
        match action {
            "CreateFleet" | "RunInstances" if answer.status == 200 => {
                let now = Instant::now();
                let tag = if action == "CreateFleet" { "instanceIds" } else { "instancesSet" };
                let ids = xml::items(&answer.xml, tag).into_iter().flat_map(|place| {
                    let item = &answer.xml[place];
                    let id = xml::value(item, "instanceId").or_else(|| xml::value(item, "item"));
                    id.map(str::to_owned)
                });
                lock(&self.made).extend(ids.map(|id| (id, now)));
            }
            "DescribeInstances" if answer.status == 200 => answer.xml = self.as_seen(&answer.xml, lag, boot),
            "DescribeSnapshots" if answer.status == 200 => answer.xml = self.with_pending(&answer.xml),
            "RegisterImage" if answer.status == 200 => {
                let id = xml::value(&answer.xml, "imageId").unwrap_or_default();
                rules::tag_image(self, id, &registered).await?;
            }
            _ => {}
        }
        Ok(answer)
    }

    /// Returns VMs as EC2 shows them: with delay, pending at first, and with their processors.
    fn as_seen(&self, xml: &str, lag: Duration, boot: Duration) -> String {
        let made = lock(&self.made);
        let age = |item: &str| {
            let id = xml::value(item, "instanceId").unwrap_or_default();
            made.get(id).map_or(Duration::MAX, Instant::elapsed)
        };
        xml::map_items(xml, "instancesSet", |item| {
            if age(item) < lag {
                return None;
            }
            let vm = quotas::with_cpus(item);
            let running = "<code>16</code><name>running</name>";
            let turned = "<name>running</name><code>16</code>";
            if age(item) < boot {
                let pending = "<code>0</code><name>pending</name>";
                return Some(vm.replace(running, pending).replace(turned, pending));
            }
            Some(vm)
        })
    }

    /// Returns snapshots as EC2 shows them: pending until they are completed.
    fn with_pending(&self, xml: &str) -> String {
        let snapshots = lock(&self.snapshots);
        xml::map_items(xml, "snapshotSet", |item| {
            let id = xml::value(item, "snapshotId").unwrap_or_default();
            let is_pending = snapshots.is_pending(id);
            Some(if is_pending { item.replace(">completed<", ">pending<") } else { item.to_owned() })
        })
    }

    /// Returns whether EC2 would still hide this VM, or show it as pending.
    pub(crate) fn is_younger(&self, id: &str, than: Duration) -> bool {
        lock(&self.made).get(id).is_some_and(|at| at.elapsed() < than)
    }

    /// Takes VMs of an offering from the stock; returns how many there were.
    pub(crate) fn take_stock(&self, offering: [&str; 3], wanted: u64) -> u64 {
        lock(&self.faults).take_stock(offering, wanted)
    }
}
