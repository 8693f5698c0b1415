//! Creates many pods at once on a cloud that counts calls as EC2 does. The provider consists of this crate's parts,
//! behind the decorator, with the clock stopped.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use peerpod_provider_api::{
    Capabilities, Chosen, CreateRequest, Created, DecoratorConfig, Error, IdempotencyKey, InstanceId, Owned,
    Preflight, Provider, Retry, deadline, decorate,
};
use peerpod_provider_cloud::batch::Answers;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::{ApiCall, Batcher, Scheduler, Window};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

/// Cloud with buckets that throttle, and VMs that get their address after a while.
struct Cloud {
    buckets: HashMap<&'static str, (f64, Instant, f64, f64)>,
    vms: BTreeMap<InstanceId, Instant>,
    by_key: HashMap<String, InstanceId>,
    calls: u32,
    throttled: u32,
}

/// Duration of one call, and time until a VM has its address.
const TAKES: Duration = Duration::from_millis(80);
const ADDRESS_AFTER: Duration = Duration::from_secs(4);

impl Cloud {
    fn count(&mut self, bucket: &'static str) -> Result<(), Error> {
        self.calls += 1;
        let now = Instant::now();
        let (level, at, rate, burst) = self.buckets.get_mut(bucket).unwrap();
        *level = (*level + *rate * (now - *at).as_secs_f64()).min(*burst);
        *at = now;
        if *level < 1.0 {
            self.throttled += 1;
            return Err(Error::Throttled { after: None, text: "RequestLimitExceeded".into() });
        }
        *level -= 1.0;
        Ok(())
    }
}

type Shared = Arc<Mutex<Cloud>>;

struct Small {
    cloud: Shared,
    scheduler: Scheduler,
    addresses: Batcher<InstanceId, Option<IpAddr>>,
    deletes: Batcher<InstanceId, ()>,
}

async fn api<T>(
    scheduler: &Scheduler,
    cloud: &Shared,
    call: ApiCall<'_>,
    bucket: &'static str,
    act: impl Fn(&mut Cloud) -> T,
) -> Result<T, Error> {
    scheduler
        .run(call, || async {
            tokio::time::sleep(TAKES).await;
            let mut cloud = cloud.lock().unwrap();
            cloud.count(bucket)?;
            Ok(act(&mut cloud))
        })
        .await
}

fn small(create: (f64, u32)) -> (Shared, Arc<Small>) {
    let now = Instant::now();
    let bucket = |rate: f64, burst: u32| (f64::from(burst), now, rate, f64::from(burst));
    let cloud = Arc::new(Mutex::new(Cloud {
        buckets: HashMap::from([
            ("create", bucket(create.0, create.1)),
            ("terminate", bucket(5.0, 100)),
            ("describe", bucket(20.0, 100)),
        ]),
        vms: BTreeMap::new(),
        by_key: HashMap::new(),
        calls: 0,
        throttled: 0,
    }));
    let table = Table::new(BucketLimits::new(5.0, 50))
        .with("create", &["Create"], BucketLimits::new(create.0, create.1))
        .with("terminate", &["Terminate"], BucketLimits::new(5.0, 100))
        .with("describe", &["Describe*"], BucketLimits::new(20.0, 100));
    let scheduler = Scheduler::new(table);
    let (asks, asked) = (scheduler.clone(), Arc::clone(&cloud));
    let addresses = Batcher::new(Window::LIST, move |ids: Vec<InstanceId>, deadline| {
        let (scheduler, cloud) = (asks.clone(), Arc::clone(&asked));
        async move {
            let call = ApiCall { action: "Describe", owner: "describe", what: "addresses", deadline };
            let inspect = |cloud: &mut Cloud| -> Vec<Result<Option<IpAddr>, Error>> {
                let address = |id: &InstanceId| match cloud.vms.get(id) {
                    Some(made) if made.elapsed() >= ADDRESS_AFTER => Ok(Some(Ipv4Addr::LOCALHOST.into())),
                    Some(_) => Ok(None),
                    None => Err(Error::not_found("no such VM")),
                };
                ids.iter().map(address).collect()
            };
            api(&scheduler, &cloud, call, "describe", inspect).await
        }
    });
    let (asks, asked) = (scheduler.clone(), Arc::clone(&cloud));
    let deletes = Batcher::new(Window::LIST, move |ids: Vec<InstanceId>, deadline| {
        let (scheduler, cloud) = (asks.clone(), Arc::clone(&asked));
        async move {
            let call = ApiCall { action: "Terminate", owner: "terminate", what: "delete", deadline };
            let done: Answers<()> = api(&scheduler, &cloud, call, "terminate", |cloud| {
                ids.iter()
                    .map(|id| {
                        cloud.vms.remove(id);
                        Ok(())
                    })
                    .collect()
            })
            .await;
            done
        }
    });
    let small = Small { cloud: Arc::clone(&cloud), scheduler, addresses, deletes };
    (cloud, Arc::new(small))
}

fn until() -> Instant {
    deadline().unwrap_or_else(|| Instant::now() + Duration::from_secs(60))
}

#[async_trait]
impl Provider for Small {
    fn name(&self) -> &'static str {
        "small"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::minimal(16 << 10)
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        Ok(Preflight::default())
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        let call = ApiCall { action: "Create", owner: key.as_str(), what: &request.name, deadline: until() };
        let id = api(&self.scheduler, &self.cloud, call, "create", |cloud| {
            if let Some(id) = cloud.by_key.get(key.as_str()) {
                return id.clone();
            }
            let id = InstanceId::new(format!("i-{}", cloud.by_key.len())).unwrap();
            cloud.by_key.insert(key.as_str().to_owned(), id.clone());
            cloud.vms.insert(id.clone(), Instant::now());
            id
        });
        Ok(Created { id: id.await?, addresses: vec![], chosen: Chosen::default(), disks: vec![] })
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let mut pause = ADDRESS_AFTER;
        loop {
            tokio::time::sleep(pause).await;
            if let Some(found) = self.addresses.ask(id.clone(), until(), "addresses").await? {
                return Ok(vec![found]);
            }
            pause = Duration::from_secs(1);
        }
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        self.deletes.ask(id.clone(), until(), "delete").await
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        Ok(vec![])
    }
}

/// Creates a VM as a sandbox does: a delay is followed by a retry.
async fn patiently(provider: &dyn Provider, number: u32) -> Result<InstanceId, Error> {
    let request = CreateRequest { name: format!("pod-{number}"), ..CreateRequest::default() };
    let key = IdempotencyKey::derive("c", "s", number);
    loop {
        match provider.create(&request, &key).await {
            Ok(made) => return Ok(made.id),
            Err(error) => match error.retry() {
                Retry::After(pause) => tokio::time::sleep(pause).await,
                _ => return Err(error),
            },
        }
    }
}

/// Creates this many pods at once, waits for their addresses and deletes them. Returns the failures, the calls per pod,
/// and the total time of the creates relative to the time that the bucket permits.
async fn burst(pods: u32, create: (f64, u32)) -> (usize, f64, f64) {
    let (cloud, small) = small(create);
    let provider = decorate(small, DecoratorConfig::default(), &mut Registry::default());
    let start = Instant::now();
    let made = join_all((0..pods).map(|number| patiently(&*provider, number))).await;
    let took = start.elapsed().as_secs_f64();
    let ids: Vec<InstanceId> = made.iter().filter_map(|made| made.clone().ok()).collect();
    let addresses = join_all(ids.iter().map(|id| provider.addresses(id))).await;
    let deleted = join_all(ids.iter().map(|id| provider.delete(id))).await;
    let failures = made.iter().filter(|made| made.is_err()).count()
        + addresses.iter().filter(|one| one.is_err()).count()
        + deleted.iter().filter(|one| one.is_err()).count();
    let permits = f64::from(pods.saturating_sub(create.1)) / create.0 + TAKES.as_secs_f64();
    let cloud = cloud.lock().unwrap();
    assert!(cloud.vms.is_empty());
    let per_pod = f64::from(cloud.calls) / f64::from(pods);
    println!(
        "{pods} pods, {}/s burst {}: {failures} failed, {per_pod:.2} calls per pod, {} throttled, {took:.1} s of \
         {permits:.1} s",
        create.0, create.1, cloud.throttled
    );
    (failures, per_pod, took / permits)
}

#[tokio::test(start_paused = true)]
async fn bursts_of_pods_wait_for_the_bucket_and_do_not_fail() {
    for (pods, create) in [(50, (5.0, 50)), (50, (2.0, 5)), (500, (5.0, 50)), (500, (2.0, 5))] {
        let (failures, calls, makespan) = burst(pods, create).await;
        assert_eq!(failures, 0);
        assert!(calls <= 1.2, "{calls} calls per pod");
        // A turn that comes too late for its answer wastes a token.
        assert!(makespan <= 1.05, "{makespan} of the time that the bucket permits");
    }
}
