//! Tests queues and buckets with the clock stopped.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::future::{join_all, poll_immediate};

use super::*;

const FAR: Duration = Duration::from_secs(3600);

fn scheduler(per_second: f64, burst: u32) -> Scheduler {
    Scheduler::new(Table::new(BucketLimits::new(per_second, burst)))
}

fn call<'c>(owner: &'c str, within: Duration) -> ApiCall<'c> {
    ApiCall { action: "RunInstances", owner, what: "create of pod", deadline: Instant::now() + within }
}

async fn ok() -> Result<(), Error> {
    Ok(())
}

/// Returns the seconds since `start` at which `count` concurrent calls of different owners were sent.
async fn times(scheduler: &Scheduler, count: u32) -> Vec<f64> {
    let start = Instant::now();
    let one = |number: u32| async move {
        scheduler.run(call(&number.to_string(), FAR), ok).await.unwrap();
        start.elapsed().as_secs_f64()
    };
    let mut times = join_all((0..count).map(one)).await;
    times.sort_by(f64::total_cmp);
    times
}

#[tokio::test(start_paused = true)]
async fn no_window_has_more_calls_than_the_bucket_allows() {
    let scheduler = scheduler(2.0, 5);
    let times = times(&scheduler, 50).await;
    for (first, from) in times.iter().enumerate() {
        for (last, to) in times.iter().enumerate().skip(first) {
            let went = (last - first + 1) as f64;
            assert!(went <= 5.0 + 2.0 * (to - from) + 1e-3, "{went} calls in {} s", to - from);
        }
    }
    // No fewer calls are sent either: 45 beyond the burst at two per second.
    assert!((22.4..22.7).contains(times.last().unwrap()), "{times:?}");
    assert!(*times.get(4).unwrap() < 0.001, "the burst goes at once: {times:?}");
}

#[tokio::test(start_paused = true)]
async fn a_bucket_that_rested_is_full_again_and_no_fuller() {
    let scheduler = scheduler(2.0, 5);
    times(&scheduler, 5).await;
    tokio::time::sleep(Duration::from_secs(1000)).await;
    let times = times(&scheduler, 7).await;
    assert!(*times.get(4).unwrap() < 0.001 && *times.get(5).unwrap() > 0.4, "{times:?}");
}

#[tokio::test(start_paused = true)]
async fn an_owner_with_many_calls_does_not_delay_one_with_few() {
    let scheduler = scheduler(1.0, 1);
    let order = Mutex::new(Vec::new());
    let one = |owner: &'static str| {
        let (scheduler, order) = (&scheduler, &order);
        async move {
            scheduler.run(call(owner, FAR), ok).await.unwrap();
            order.lock().unwrap().push(owner);
        }
    };
    let greedy = join_all((0..20).map(|_| one("greedy")));
    let modest = async {
        tokio::time::sleep(Duration::from_millis(1)).await; // after all of them
        tokio::join!(one("a"), one("b"), one("c"), one("a"));
    };
    tokio::join!(greedy, modest);
    let order = order.lock().unwrap();
    let place =
        |owner, nth: usize| order.iter().enumerate().filter(|(_, o)| **o == owner).nth(nth).unwrap().0;
    // One call took the first token. Then each round has one call per owner, the greedy one included.
    assert!(place("a", 0) <= 4 && place("b", 0) <= 4 && place("c", 0) <= 4, "{order:?}");
    assert!(place("a", 1) <= 6, "{order:?}");
}

#[tokio::test(start_paused = true)]
async fn a_caller_without_a_turn_in_time_fails_at_once() {
    let scheduler = scheduler(2.0, 5);
    let start = Instant::now();
    let waiting = join_all((0..25).map(|n| {
        let scheduler = scheduler.clone();
        async move { scheduler.run(call(&n.to_string(), FAR), ok).await }
    }));
    tokio::pin!(waiting);
    assert!(poll_immediate(&mut waiting).await.is_none());
    // Five calls were sent and twenty wait, so the turn would come in 10.5 s.
    let error = scheduler.run(call("late", Duration::from_secs(10)), ok).await.unwrap_err();
    assert_eq!(start.elapsed(), Duration::ZERO);
    let text = error.to_string();
    for part in ["create of pod", "20 other calls wait for RunInstances", "10.5 s", "the caller waits 10.0 s"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(matches!(error, Error::Transient { .. }), "{error:?}");
    // A call with more time waits, and the refused call took no turn.
    let (late, others) = tokio::join!(scheduler.run(call("late", Duration::from_secs(12)), ok), waiting);
    late.unwrap();
    assert!(others.iter().all(Result::is_ok));
    assert!(start.elapsed() < Duration::from_millis(10_600), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_throttled_caller_fails_at_its_deadline() {
    let scheduler = scheduler(10.0, 1);
    let throttled = AtomicU32::new(0);
    let start = Instant::now();
    let answer = scheduler.run(call("pod", Duration::from_secs(5)), || {
        throttled.fetch_add(1, Ordering::Relaxed);
        async { Err::<(), _>(Error::Throttled { after: None, text: "RequestLimitExceeded".into() }) }
    });
    let error = answer.await.unwrap_err();
    assert!(matches!(error, Error::Transient { .. }), "{error:?}");
    assert!(error.to_string().contains("RunInstances"), "{error}");
    assert!(start.elapsed() <= Duration::from_secs(5));
    // Ten per second would be fifty calls.
    let calls = throttled.load(Ordering::Relaxed);
    assert!((3..=8).contains(&calls), "{calls} calls");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_caller_frees_its_place() {
    let scheduler = scheduler(1.0, 1);
    times(&scheduler, 1).await;
    let start = Instant::now();
    let mut dropped = join_all((0..30).map(|n| {
        let scheduler = scheduler.clone();
        async move { scheduler.run(call(&n.to_string(), FAR), ok).await }
    }));
    assert!(poll_immediate(&mut dropped).await.is_none());
    let stays = {
        let scheduler = scheduler.clone();
        tokio::spawn(async move { scheduler.run(call("stays", FAR), ok).await })
    };
    tokio::task::yield_now().await;
    drop(dropped);
    stays.await.unwrap().unwrap();
    assert!(start.elapsed() <= Duration::from_millis(1100), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_unused_turn_goes_to_the_next_caller() {
    // The turn is granted, and the call is dropped before it reads the grant. Neither token nor slot may be lost.
    let scheduler = Scheduler::new(Table::new(BucketLimits { at_once: 1, ..BucketLimits::new(1.0, 1) }));
    times(&scheduler, 1).await;
    let start = Instant::now();
    let mut leaves = Box::pin(scheduler.run(call("leaves", FAR), ok));
    assert!(poll_immediate(&mut leaves).await.is_none());
    let stays = {
        let scheduler = scheduler.clone();
        tokio::spawn(async move { scheduler.run(call("stays", FAR), ok).await })
    };
    tokio::time::sleep(Duration::from_millis(1500)).await; // the grant stays unread
    assert!(!stays.is_finished());
    drop(leaves);
    stays.await.unwrap().unwrap();
    assert!(start.elapsed() <= Duration::from_millis(1600), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn no_more_calls_are_under_way_than_allowed() {
    let scheduler =
        Scheduler::new(Table::new(BucketLimits { at_once: 3, ..BucketLimits::new(1e6, 1_000_000) }));
    let (now, most) = (AtomicU32::new(0), AtomicU32::new(0));
    let start = Instant::now();
    let one = |number: u32| {
        let (scheduler, now, most) = (&scheduler, &now, &most);
        async move {
            let ask = || async {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_secs(1)).await;
                now.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, Error>(())
            };
            scheduler.run(call(&number.to_string(), FAR), ask).await.unwrap();
        }
    };
    join_all((0..10).map(one)).await;
    assert_eq!(most.load(Ordering::SeqCst), 3);
    assert!((3.9..4.2).contains(&start.elapsed().as_secs_f64()), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_call_without_an_answer_ends_at_its_deadline() {
    let scheduler = scheduler(1.0, 5);
    let start = Instant::now();
    let answer =
        scheduler.run(call("pod", Duration::from_secs(3)), std::future::pending::<Result<(), Error>>);
    let error = answer.await.unwrap_err();
    assert!(matches!(error, Error::Transient { .. }), "{error:?}");
    assert!(error.to_string().contains("its effect is unknown"), "{error}");
    assert_eq!(start.elapsed(), Duration::from_secs(3));
}

/// Bucket of a cloud that other processes also use.
struct Cloud {
    level: f64,
    at: Instant,
    rate: f64,
    burst: f64,
    calls: u32,
    throttles: u32,
}

impl Cloud {
    fn new(rate: f64, burst: f64) -> Arc<Mutex<Cloud>> {
        Arc::new(Mutex::new(Cloud { level: burst, at: Instant::now(), rate, burst, calls: 0, throttles: 0 }))
    }

    fn ask(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        self.level = (self.level + self.rate * (now - self.at).as_secs_f64()).min(self.burst);
        self.at = now;
        self.calls += 1;
        if self.level < 1.0 {
            self.throttles += 1;
            return Err(Error::Throttled { after: None, text: "RequestLimitExceeded".into() });
        }
        self.level -= 1.0;
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_lower_real_limit_is_learned_and_all_calls_succeed() {
    // The table has 10 per second and 50 at once; the account has 2 and 5.
    let (scheduler, cloud) = (scheduler(10.0, 50), Cloud::new(2.0, 5.0));
    let start = Instant::now();
    let one = |number: u32| {
        let (scheduler, cloud) = (&scheduler, &cloud);
        async move {
            let ask = || async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                cloud.lock().unwrap().ask()
            };
            scheduler.run(call(&number.to_string(), FAR), ask).await
        }
    };
    let answers = join_all((0..200).map(one)).await;
    assert!(answers.iter().all(Result::is_ok));
    let (took, cloud) = (start.elapsed().as_secs_f64(), cloud.lock().unwrap());
    println!("200 calls at 2 a second: {took:.1} s (97.5 at best), {} throttled", cloud.throttles);
    assert!(took < 97.5 * 1.5, "{took} s");
    // 45 of the first burst, then a few at a time.
    assert!(cloud.throttles < 45 + 75, "{} throttled of {}", cloud.throttles, cloud.calls);
}

#[tokio::test(start_paused = true)]
async fn two_nodes_come_to_share_one_account() {
    let cloud = Cloud::new(4.0, 10.0);
    let nodes = [scheduler(4.0, 10), scheduler(4.0, 10)];
    let served: Vec<AtomicU32> = nodes.iter().map(|_| AtomicU32::new(0)).collect();
    let work = nodes.iter().zip(&served).map(|(node, served)| {
        let cloud = &cloud;
        join_all((0..2000u32).map(move |number| async move {
            let ask = || async {
                // Network delays vary. With a constant delay, a node that is slightly late would stay late.
                tokio::time::sleep(Duration::from_millis(u64::from(20 + number * 7 % 80))).await;
                cloud.lock().unwrap().ask()
            };
            node.run(call(&number.to_string(), FAR * 100), ask).await.unwrap();
            served.fetch_add(1, Ordering::Relaxed);
        }))
    });
    drop(tokio::time::timeout(Duration::from_secs(300), join_all(work)).await);
    let served: Vec<u32> = served.iter().map(|one| one.load(Ordering::Relaxed)).collect();
    println!("of 1,210 that the account gives in five minutes two nodes had {served:?}");
    assert!(served.iter().sum::<u32>() > 1000, "{served:?}");
    assert!(served.iter().all(|one| *one > 100), "{served:?}");
}

#[tokio::test(start_paused = true)]
async fn calls_throttled_together_lower_the_rate_once_and_it_recovers() {
    let mut source = tokens::TokenBucket::new(BucketLimits::new(8.0, 100));
    let sent = Instant::now();
    tokio::time::advance(Duration::from_millis(50)).await;
    for _ in 0..40 {
        source.throttled(sent, None, Instant::now());
    }
    assert_eq!(source.rate, 4.0);
    tokio::time::advance(Duration::from_secs(1)).await;
    source.throttled(Instant::now(), Some(Duration::from_secs(7)), Instant::now());
    assert_eq!(source.rate, 2.0);
    let now = Instant::now();
    let again = source.take(now).unwrap_err() - now;
    assert!(
        (7.0..=10.5).contains(&again.as_secs_f64()),
        "at least the pause that the cloud asks for: {again:?}"
    );
    tokio::time::advance(again).await;
    source.take(Instant::now()).unwrap();
    for _ in 0..20 {
        tokio::time::advance(Duration::from_secs(1)).await;
        for _ in 0..10 {
            source.answered(Instant::now());
        }
    }
    assert_eq!(source.rate, 8.0, "and no more than the seed");
}

#[tokio::test(start_paused = true)]
async fn buckets_do_not_wait_for_each_other_and_calls_are_counted() {
    let table = Table::new(BucketLimits::new(0.001, 1)).with(
        "describe",
        &["Describe*"],
        BucketLimits::new(20.0, 100),
    );
    let scheduler = Scheduler::new(table);
    let mut registry = Registry::default();
    scheduler.register(&mut registry);
    times(&scheduler, 1).await;
    let blocked = scheduler.run(call("pod", Duration::from_secs(1)), ok).await;
    assert!(blocked.is_err());
    let describe = ApiCall { action: "DescribeInstances", ..call("pod", Duration::from_secs(1)) };
    let start = Instant::now();
    scheduler.run(describe, ok).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in [
        r#"peerpod_cloud_calls_total{action="RunInstances"} 1"#,
        r#"peerpod_cloud_calls_total{action="DescribeInstances"} 1"#,
        r#"peerpod_cloud_calls_given_up_total{action="RunInstances"} 1"#,
        r#"peerpod_cloud_call_wait_seconds_count{action="DescribeInstances"} 1"#,
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn state_of_gone_owners_is_dropped() {
    let scheduler = scheduler(1000.0, 1);
    times(&scheduler, 500).await;
    assert_eq!(scheduler.queues.kept(), HashMap::from([("other", 0)]));
}

#[tokio::test(start_paused = true)]
async fn a_bucket_by_the_minute_is_filled_at_the_start_of_each() {
    let scheduler = Scheduler::new(Table::new(BucketLimits::per_minute(30)));
    let times = times(&scheduler, 75).await;
    let (first, second, third) = (times[29], times[30], times[60]);
    assert!(first < 0.001 && second <= 60.1 && times[59] < second + 0.1, "{times:?}");
    assert!((59.9..60.1).contains(&(third - second)) && times[74] < third + 0.1, "{times:?}");
}

#[tokio::test(start_paused = true)]
async fn a_throttle_by_the_minute_blocks_until_the_next_and_halves_its_calls() {
    let scheduler = Scheduler::new(Table::new(BucketLimits::per_minute(30)));
    let is_throttled = AtomicU32::new(1);
    let ask = || async {
        match is_throttled.swap(0, Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err(Error::Throttled { after: None, text: "rateLimitExceeded".into() }),
        }
    };
    let start = Instant::now();
    scheduler.run(call("first", FAR), ask).await.unwrap();
    let next = start.elapsed();
    assert!(next > Duration::from_millis(1) && next <= Duration::from_secs(61), "{next:?}");
    let times = times(&scheduler, 20).await;
    assert!(times[12] < 1.1 && times[16] > 58.0, "half of 30 a minute: {times:?}");
}

#[tokio::test(start_paused = true)]
async fn the_cloud_states_the_calls_that_are_left() {
    let scheduler = scheduler(1.0, 100);
    scheduler.left("RunInstances", 2);
    let times = times(&scheduler, 4).await;
    assert!(times[1] < 0.001 && (0.9..1.1).contains(&times[2]) && times[3] > 1.9, "{times:?}");
}

#[test]
fn the_rest_of_a_minute_is_never_zero() {
    let at = |millis| rest_of_minute(std::time::UNIX_EPOCH + Duration::from_millis(millis));
    assert_eq!(at(61_500), Duration::from_millis(58_500));
    assert_eq!((at(120_000), at(119_999)), (Duration::from_secs(60), Duration::from_millis(1)));
}
