use super::*;

type Wishes = Queue<&'static str, u32, u32>;

fn now() -> Instant {
    Instant::now()
}

#[tokio::test(start_paused = true)]
async fn only_the_last_wish_counts_and_each_is_worked_on_by_one() {
    let mut queue = Wishes::new();
    queue.put("a", 1);
    queue.put("a", 2);
    queue.put("b", 1);
    assert_eq!(queue.next(now()), Some(("a", 2, 0)));
    queue.put("a", 3);
    assert_eq!(queue.next(now()), Some(("b", 1, 0)));
    assert_eq!((queue.next(now()), queue.backlog()), (None, 2));
    queue.done(&"a", 7, Done::Held, now());
    assert_eq!(queue.next(now()), Some(("a", 3, 7)), "another wish came meanwhile");
    queue.done(&"a", 8, Done::Over, now());
    queue.done(&"b", 1, Done::Held, now());
    assert_eq!((queue.len(), queue.backlog()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn failures_pause_longer_each_time_up_to_a_bound() {
    let mut queue = Wishes::new();
    queue.put("a", 1);
    let mut pauses = Vec::new();
    for count in 1..=12 {
        let due = queue.due().unwrap_or_else(now);
        let turn = queue.next(due).unwrap();
        assert_eq!(queue.done(&turn.0, 0, Done::Failed, due), count);
        pauses.push(queue.due().unwrap() - due);
        queue.put("a", count);
        assert_eq!(queue.next(due), None, "a new wish does not hurry one that fails");
    }
    assert_eq!(pauses[..3], [FIRST_PAUSE, FIRST_PAUSE * 2, FIRST_PAUSE * 4]);
    assert!(pauses.is_sorted() && pauses.last() == Some(&LONGEST_PAUSE));
    assert_eq!(queue.backlog(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_look_for_luck_is_no_backlog_and_waits_for_no_wish() {
    let mut queue = Wishes::new();
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
