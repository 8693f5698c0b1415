use super::*;

type Desired = Queue<&'static str, u32, u32>;

fn now() -> Instant {
    Instant::now()
}

#[tokio::test(start_paused = true)]
async fn only_the_last_update_counts_and_one_worker_has_each_key() {
    let mut queue = Desired::new();
    queue.put("a", 1);
    queue.put("a", 2);
    queue.put("b", 1);
    assert_eq!(queue.next(now()), Some(("a", 2, 0)));
    queue.put("a", 3);
    assert_eq!(queue.next(now()), Some(("b", 1, 0)));
    assert_eq!((queue.next(now()), queue.backlog()), (None, 2));
    queue.done(&"a", 7, Done::Held, now());
    assert_eq!(queue.next(now()), Some(("a", 3, 7)), "another update arrived meanwhile");
    queue.done(&"a", 8, Done::Over, now());
    queue.done(&"b", 1, Done::Held, now());
    assert_eq!((queue.len(), queue.backlog()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn failures_back_off_up_to_a_bound() {
    let mut queue = Desired::new();
    queue.put("a", 1);
    let mut pauses = Vec::new();
    for count in 1..=12 {
        let due = queue.due().unwrap_or_else(now);
        let turn = queue.next(due).unwrap();
        assert_eq!(queue.done(&turn.0, 0, Done::Failed, due), count);
        pauses.push(queue.due().unwrap() - due);
        queue.put("a", count);
        assert_eq!(queue.next(due), None, "a new update does not hurry a failing one");
    }
    assert_eq!(pauses[..3], [FIRST_PAUSE, FIRST_PAUSE * 2, FIRST_PAUSE * 4]);
    assert!(pauses.is_sorted() && pauses.last() == Some(&LONGEST_PAUSE));
    assert_eq!(queue.backlog(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_speculative_check_is_no_backlog_and_delays_no_update() {
    let mut queue = Desired::new();
    queue.put("a", 1);
    assert!(queue.next(now()).is_some());
    queue.done(&"a", 0, Done::Look(Duration::from_secs(30)), now());
    assert_eq!((queue.next(now()), queue.backlog()), (None, 0));
    queue.put("a", 2);
    assert_eq!((queue.next(now()), queue.due()), (Some(("a", 2, 0)), None));
    queue.done(&"a", 0, Done::Look(Duration::from_secs(30)), now());
    let due = queue.due().unwrap();
    assert_eq!(queue.next(due), Some(("a", 2, 0)));
    assert_eq!(queue.backlog(), 1);
    queue.done(&"a", 0, Done::Postponed, due);
    assert_eq!(queue.next(due), Some(("a", 2, 0)));
    queue.done(&"a", 0, Done::Over, due);
    assert_eq!((queue.len(), queue.backlog()), (0, 0));
}
