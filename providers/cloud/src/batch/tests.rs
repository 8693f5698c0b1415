//! Tests batch windows with the clock stopped.

use futures_util::future::join_all;

use super::*;

const FAR: Duration = Duration::from_secs(60);

/// Calls to the cloud, in order.
type Log = Arc<Mutex<Vec<Vec<u32>>>>;

/// Returns a batcher that doubles numbers. 13 and 503 fail the whole call, 99 fails alone, and a call takes `takes`.
fn doubler(window: Window, takes: Duration) -> (Batcher<u32, u32>, Log) {
    let log = Log::default();
    let seen = Arc::clone(&log);
    let batcher = Batcher::new(window, move |items: Vec<u32>, _| {
        seen.lock().push(items.clone());
        async move {
            tokio::time::sleep(takes).await;
            if items.contains(&13) {
                return Err(Error::not_found("13 does not exist"));
            }
            if items.contains(&503) {
                return Err(Error::transient("the wire broke"));
            }
            let one = |item: u32| if item == 99 { Err(Error::invalid("not 99")) } else { Ok(item * 2) };
            Ok(items.into_iter().map(one).collect())
        }
    });
    (batcher, log)
}

async fn ask(batcher: &Batcher<u32, u32>, items: &[u32]) -> Vec<Result<u32, Error>> {
    join_all(items.iter().map(|item| batcher.ask(*item, Instant::now() + FAR, "test"))).await
}

fn calls(log: &Log) -> Vec<Vec<u32>> {
    log.lock().clone()
}

#[tokio::test(start_paused = true)]
async fn concurrent_callers_share_one_call_and_get_their_own_answers() {
    let (batcher, log) = doubler(Window::LIST, Duration::ZERO);
    let items: Vec<u32> = (100..150).collect();
    let start = Instant::now();
    let answers = ask(&batcher, &items).await;
    assert_eq!(answers, items.iter().map(|item| Ok(item * 2)).collect::<Vec<_>>());
    assert_eq!(calls(&log), [items]);
    assert_eq!(start.elapsed().as_millis(), 100, "the idle gap");
}

#[tokio::test(start_paused = true)]
async fn a_window_is_no_larger_than_a_call_may_be() {
    let (batcher, log) = doubler(Window { most: 2, ..Window::LIST }, Duration::ZERO);
    assert!(ask(&batcher, &[1, 2, 3, 4, 5]).await.iter().all(Result::is_ok));
    let mut calls = calls(&log);
    calls.sort();
    assert_eq!(calls, [vec![1, 2], vec![3, 4], vec![5]]);
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_callers_that_never_pauses_is_served_all_the_same() {
    let (batcher, log) = doubler(Window::LIST, Duration::ZERO);
    let start = Instant::now();
    let asks = (0..40u32).map(|item| {
        let batcher = batcher.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(u64::from(item) * 50)).await;
            let asked = Instant::now();
            batcher.ask(100 + item, Instant::now() + FAR, "test").await.unwrap();
            asked.elapsed()
        }
    });
    let waits = join_all(asks).await;
    assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(1)), "{waits:?}");
    assert_eq!(calls(&log).len(), 2, "two seconds, a second each; took {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn one_bad_item_fails_alone() {
    let (batcher, log) = doubler(Window::LIST, Duration::ZERO);
    let mut items: Vec<u32> = (1000..1499).collect();
    items.push(99);
    let answers = ask(&batcher, &items).await;
    assert_eq!(answers.iter().filter(|answer| answer.is_err()).count(), 1);
    assert_eq!(calls(&log).len(), 1);
    log.lock().clear();
    // One item that makes the cloud refuse the whole list.
    items[250] = 13;
    let answers = ask(&batcher, &items).await;
    let failed: Vec<_> = items.iter().zip(&answers).filter(|(_, answer)| answer.is_err()).collect();
    assert_eq!(failed.iter().map(|(item, _)| **item).collect::<Vec<_>>(), [13, 99]);
    let calls = calls(&log).len();
    assert!(calls <= 2 * 9 + 1, "{calls} calls");
}

#[tokio::test(start_paused = true)]
async fn a_common_error_reaches_all_and_is_not_retried_singly() {
    let (batcher, log) = doubler(Window::LIST, Duration::ZERO);
    let answers = ask(&batcher, &[1, 503, 2]).await;
    assert!(answers.iter().all(|answer| matches!(answer, Err(Error::Transient { .. }))), "{answers:?}");
    assert_eq!(calls(&log).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_caller_ends_no_other() {
    // While the window is open: the item is left out of the call.
    let (batcher, log) = doubler(Window::LIST, Duration::from_secs(1));
    let first = {
        let batcher = batcher.clone();
        tokio::spawn(async move { batcher.ask(1, Instant::now() + FAR, "test").await })
    };
    tokio::time::sleep(Duration::from_millis(10)).await;
    let others = {
        let batcher = batcher.clone();
        tokio::spawn(async move { ask(&batcher, &[2, 3]).await })
    };
    tokio::time::sleep(Duration::from_millis(10)).await;
    first.abort();
    assert_eq!(others.await.unwrap(), [Ok(4), Ok(6)]);
    assert_eq!(calls(&log), [vec![2, 3]]);

    // While the call is in flight: the call goes on.
    log.lock().clear();
    let first = {
        let batcher = batcher.clone();
        tokio::spawn(async move { batcher.ask(1, Instant::now() + FAR, "test").await })
    };
    let other = {
        let batcher = batcher.clone();
        tokio::spawn(async move { batcher.ask(2, Instant::now() + FAR, "test").await })
    };
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(calls(&log).len(), 1, "it is under way");
    first.abort();
    assert_eq!(other.await.unwrap(), Ok(4));
    assert_eq!(calls(&log).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn each_caller_waits_until_its_own_deadline() {
    let (batcher, _log) = doubler(Window::LIST, Duration::from_secs(5));
    let start = Instant::now();
    let hasty = batcher.ask(1, start + Duration::from_secs(1), "delete of i-1");
    let patient = batcher.ask(2, start + FAR, "delete of i-2");
    let (hasty, patient) =
        tokio::join!(async { (hasty.await, start.elapsed()) }, async { (patient.await, start.elapsed()) });
    assert!(hasty.0.unwrap_err().to_string().starts_with("delete of i-1: no answer"));
    assert_eq!(hasty.1, Duration::from_secs(1));
    assert_eq!(patient.0, Ok(4));
}

#[tokio::test(start_paused = true)]
async fn a_panicking_or_short_call_fails_all_waiting_callers() {
    let batcher: Batcher<u32, u32> = Batcher::new(Window::LIST, |items: Vec<u32>, _| async move {
        assert!(!items.contains(&1), "a bug");
        Ok(vec![Ok(0)])
    });
    let deadline = Instant::now() + FAR;
    let broke = batcher.ask(1, deadline, "one").await;
    assert!(broke.unwrap_err().to_string().starts_with("one: the call"), "it broke off");
    let (a, b) = tokio::join!(batcher.ask(2, deadline, "a"), batcher.ask(3, deadline, "b"));
    assert!(a.is_ok() && b.is_err());
    assert!(Instant::now() < deadline);
}
