//! Many pods at once behind EC2's token buckets, and a node that dies at random instants.
//!
//! With `PEERPOD_BENCH=<file>` the figures are added to that summary; with `PEERPOD_TEST_LONG` there are 500 pods with a
//! ticket each, too, which EC2's buckets make a matter of minutes.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use common::{Cloud, key, placed, request, until};
use peerpod_provider_api::{DecoratorConfig, IdempotencyKey, InstanceId, Provider, decorate};
use peerpod_test_ec2::ec2_bucket;
use peerpod_tests::{Dice, report};
use prometheus_client::registry::Registry;

fn is_long() -> bool {
    std::env::var_os("PEERPOD_TEST_LONG").is_some() || std::env::var_os("PEERPOD_BENCH").is_some()
}

/// What a burst cost.
struct Burst {
    calls_per_pod: f64,
    failures: usize,
    took: Duration,
}

/// Makes so many VMs, each by a call of its own, or `batch` of them by one; waits for their addresses; deletes them.
/// The provider is decorated as the node's is.
async fn burst(cloud: &Cloud, pods: u32, batch: u32) -> Burst {
    let provider = cloud.provider(&[]);
    let provider = decorate(provider, DecoratorConfig::default(), &mut Registry::default());
    provider.preflight().await.unwrap();
    cloud.proxy.forget_calls();
    cloud.proxy.set_buckets(1.0);
    let began = Instant::now();
    let mut made: Vec<InstanceId> = Vec::new();
    let mut failures = 0;
    let pods_of = |first: u32| (first..(first + batch.max(1)).min(pods)).len();
    let creates: Vec<_> = (0..pods)
        .step_by(batch.max(1) as usize)
        .map(|first| {
            let provider = provider.clone();
            let count = pods_of(first);
            tokio::spawn(async move {
                let wish = placed(&*provider, &request(&format!("pod-{first}"))).await?;
                let key = key("burst", first);
                let ids: Vec<InstanceId> = if batch == 0 {
                    vec![provider.create(&wish, &key).await?.id]
                } else {
                    let count = u32::try_from(count).unwrap().try_into().unwrap();
                    let many = provider.batch().unwrap().create_many(&wish, count, &key).await?;
                    many.made.into_iter().map(|one| one.id).collect()
                };
                let waits = ids.iter().map(|id| {
                    let (provider, id) = (provider.clone(), id.clone());
                    tokio::spawn(async move { provider.addresses(&id).await })
                });
                for wait in waits.collect::<Vec<_>>() {
                    assert!(!wait.await.unwrap()?.is_empty());
                }
                Ok::<_, peerpod_provider_api::Error>(ids)
            })
        })
        .collect();
    for create in creates {
        match create.await.unwrap() {
            Ok(ids) => made.extend(ids),
            Err(error) => {
                println!("failed: {error}");
                failures += 1;
            }
        }
    }
    let took = began.elapsed();
    assert_eq!(made.iter().collect::<HashSet<_>>().len(), pods as usize - failures);
    let deletes: Vec<_> = made
        .into_iter()
        .map(|id| {
            let provider = provider.clone();
            tokio::spawn(async move { provider.delete(&id).await })
        })
        .collect();
    for delete in deletes {
        delete.await.unwrap().unwrap();
    }
    until("all are gone", || async { cloud.machines().await.is_empty() }).await;
    let calls = cloud.proxy.calls();
    let throttled = calls.iter().filter(|call| call.status == 503).count();
    println!(
        "{pods} pods, batch {batch}: {} calls, {throttled} throttled, {took:?}, {failures} failed",
        calls.len()
    );
    Burst { calls_per_pod: calls.len() as f64 / f64::from(pods), failures, took }
}

/// What EC2's bucket permits for so many calls.
fn permitted(action: &str, calls: u32) -> Duration {
    let bucket = ec2_bucket(action);
    Duration::from_secs_f64(((f64::from(calls) - bucket.burst) / bucket.rate).max(0.0))
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_pods_at_once_with_a_ticket_each_take_one_call_each_and_none_fails() {
    let cloud = Cloud::start().await;
    let burst = burst(&cloud, 50, 0).await;
    report("aws_calls_per_pod_50_single", burst.calls_per_pod);
    assert_eq!(burst.failures, 0);
    assert!(burst.calls_per_pod <= 1.2, "{} calls per pod", burst.calls_per_pod);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_dies_at_a_hundred_random_instants_has_one_vm_per_key_afterwards() {
    let cloud = Cloud::start().await;
    cloud.proxy.set_lag(Duration::from_millis(300));
    let before = cloud.provider(&[]);
    before.preflight().await.unwrap();
    let after = cloud.provider(&[]);
    after.preflight().await.unwrap();
    let mut dice = Dice(0x5eed_1234_abcd_0001);
    let mut keys: Vec<IdempotencyKey> = Vec::new();
    for number in 0..100 {
        let wish = placed(&*before, &request(&format!("pod-{number}"))).await.unwrap();
        let key = key("crash", number);
        // A create takes some 60 ms here: before it is sent, while moto works, while the answer is on its way, after.
        let instant = Duration::from_micros(dice.roll(120_000));
        let answer = tokio::time::timeout(instant, before.create(&wish, &key)).await;
        let again = after.create(&wish, &key).await.unwrap();
        if let Ok(Ok(made)) = answer {
            assert_eq!(made.id, again.id);
        }
        keys.push(key);
    }
    cloud.proxy.heal();
    let machines = cloud.machines().await;
    let owned = after.list_owned().await.unwrap();
    for key in &keys {
        assert_eq!(owned.iter().filter(|vm| vm.key.as_ref() == Some(key)).count(), 1, "{key}");
    }
    report("aws_crash100_extra_vms", machines.len() as f64 - keys.len() as f64);
    assert_eq!(machines.len(), keys.len());
}
