//! Many nodes claim machines of one pool at once. No machine is given to two pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, InstanceId, Provider};
use peerpod_provider_byom::ByomProvider;
use peerpod_tests::report;
use tokio::time::{sleep, timeout};

use super::common::{PATIENCE, Site, key, owner, placed, request};

const NODES: u32 = 16;
const PODS: u32 = 200;
const MACHINES: u8 = 240;
/// Pause of a pod that finds no free machine.
const AGAIN: Duration = Duration::from_millis(100);

/// Creates the VM of a pod as a node does: after a lack of capacity it asks for another place, with another key.
async fn create(provider: &ByomProvider, pod: &str) -> (IdempotencyKey, InstanceId) {
    let wish = request(pod);
    for attempt in 0.. {
        let key = key(pod, attempt);
        match attempt_of(provider, &wish, &key).await {
            Ok(made) => return (key, made),
            Err(Error::Capacity { .. }) => sleep(AGAIN).await,
            Err(error) => panic!("{pod}: {error}"),
        }
    }
    unreachable!()
}

async fn attempt_of(
    provider: &ByomProvider,
    wish: &CreateRequest,
    key: &IdempotencyKey,
) -> Result<InstanceId, Error> {
    let placed = placed(provider, wish).await?;
    loop {
        match provider.create(&placed, key).await {
            Err(Error::Transient { .. }) => sleep(AGAIN).await,
            answer => return answer.map(|made| made.id),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_claims_by_sixteen_nodes_at_once_double_none() {
    let site = Site::start_together(MACHINES);
    let nodes: Vec<Arc<ByomProvider>> =
        (0..NODES).map(|number| site.provider_of(owner(&format!("node-{number}")), &[])).collect();
    let pods = (0..PODS).map(|number| {
        let provider = nodes[(number % NODES) as usize].clone();
        tokio::spawn(async move {
            let pod = format!("pod-{number}");
            let (key, made) = create(&provider, &pod).await;
            (key, made, request(&pod).user_data)
        })
    });
    let mut made = BTreeMap::new();
    for pod in pods.collect::<Vec<_>>() {
        let (key, id, user_data) = timeout(PATIENCE * 2, pod).await.unwrap().unwrap();
        assert_eq!(made.insert(id.to_string(), (key.to_string(), user_data)), None, "{id} was given twice");
    }
    site.until("all pods have user-data", || site.delivered().len() >= PODS as usize);
    let delivered = site.delivered();
    let boots: BTreeSet<&str> = delivered.iter().map(|(vm, ..)| vm.as_str()).collect();
    let doubles = site.doubles() + delivered.len() - boots.len();
    report("byom_double_claims", doubles as f64);
    assert_eq!((doubles, delivered.len()), (0, PODS as usize));
    for (vm, key, user_data) in delivered {
        assert_eq!(made[&vm], (key, user_data), "{vm} has the pod that it was given to");
    }
}

/// The same create from two processes, as after a restart of the node while its predecessor still runs.
#[tokio::test(flavor = "multi_thread")]
async fn one_key_claims_one_machine_also_from_two_processes() {
    let site = Site::start(4);
    let nodes = [site.provider(&[]), site.provider(&[])];
    for round in 0..10 {
        let wish = placed(&*nodes[0], &request(&format!("pod-{round}"))).await.unwrap();
        let key = key("two", round);
        let creates = nodes.each_ref().map(|node| node.create(&wish, &key));
        let made = futures_util::future::join_all(creates).await;
        let ids: BTreeSet<String> = made.into_iter().map(|made| made.unwrap().id.to_string()).collect();
        assert_eq!(ids.iter().cloned().collect::<Vec<_>>(), site.claimed());
        let id = InstanceId::new(ids.first().unwrap().as_str()).unwrap();
        nodes[1].delete(&id).await.unwrap();
        site.until("its machine is free", || site.claimed().is_empty());
        site.until("all machines run", || (0..4).all(|number| site.machine(number).is_published()));
    }
    assert_eq!((site.doubles(), site.delivered().len()), (0, 10));
}
