use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use futures_util::task::{ArcWake, noop_waker, waker};

use super::*;

fn next(ring: &Ring) -> Option<(Level, u32, String, String)> {
    match ring.poll_next(&mut Context::from_waker(&noop_waker())) {
        Poll::Pending => None,
        Poll::Ready(line) => {
            let line = Line::decode(&line).unwrap();
            Some((line.level, line.lost, line.target.to_owned(), line.text.to_owned()))
        }
    }
}

#[test]
fn the_oldest_lines_are_dropped_and_counted_and_memory_stays_bounded() {
    let ring = Ring::new(true);
    for n in 0..10_000 {
        ring.say(Level::Info, "peerpod_guest::link", &format!("line {n}"));
        assert!(ring.inner.lock().bytes <= MOST_BYTES);
    }
    let kept = MOST_BYTES / LEAST_COST;
    assert_eq!(ring.inner.lock().lines.len(), kept);
    let (_, lost, target, text) = next(&ring).unwrap();
    assert_eq!(
        (lost as usize, target.as_str(), text),
        (10_000 - kept, "peerpod_guest::link", format!("line {}", 10_000 - kept))
    );
    let (_, lost, ..) = next(&ring).unwrap();
    assert_eq!(lost, 0, "reported once");

    // Lines of the greatest length.
    for _ in 0..1000 {
        ring.say(Level::Info, "kata-agent", &"x".repeat(3 * MAX_TEXT));
        assert!(ring.inner.lock().bytes <= MOST_BYTES);
    }
    let (_, lost, _, text) = next(&ring).unwrap();
    assert!(lost > 1000 && text.len() == MAX_TEXT, "{lost}");
}

#[test]
fn a_ring_that_is_off_keeps_nothing() {
    let ring = Ring::new(false);
    ring.say(Level::Error, "peerpod_guest", "a secret of a confidential VM");
    assert_eq!(next(&ring), None);
}

#[test]
fn a_new_line_wakes_a_waiting_reader() {
    struct Count(AtomicUsize);
    impl ArcWake for Count {
        fn wake_by_ref(me: &Arc<Count>) {
            me.0.fetch_add(1, Relaxed);
        }
    }
    let (ring, woken) = (Ring::new(true), Arc::new(Count(AtomicUsize::new(0))));
    assert!(ring.poll_next(&mut Context::from_waker(&waker(woken.clone()))).is_pending());
    ring.say(Level::Info, "a", "b");
    ring.say(Level::Info, "a", "c");
    assert_eq!(woken.0.load(Relaxed), 1);
}

#[test]
fn an_event_makes_a_line_with_its_fields_and_events_of_the_link_make_none() {
    let ring = Ring::new(true);
    let subscriber = tracing_subscriber::registry().with(ToRing(ring.clone()));
    tracing::subscriber::with_default(subscriber, || {
        let error = std::io::Error::other("no such thing");
        tracing::warn!(%error, pid = 7, program = "/bin/x y", "cannot start {}", "it");
        tracing::debug!(target: "peerpod_link::endpoint::task", "link down");
        tracing::trace!(target: "rustls::client", "sending");
        tracing::info!(target: "tokio", "woken");
        tracing::warn!(target: "peerpod_link::endpoint::task::link", "the peer broke the protocol");
        tracing::info!(target: "tokio_own", "{}", "y".repeat(9000));
    });
    let (level, lost, target, text) = next(&ring).unwrap();
    assert_eq!((level, lost), (Level::Warn, 0));
    assert!(target.contains("log::tests"), "{target}");
    assert_eq!(text, "cannot start it error=no such thing pid=7 program=\"/bin/x y\"");
    assert_eq!(next(&ring).unwrap().3, "the peer broke the protocol");
    assert_eq!(next(&ring).unwrap().3.len(), MAX_TEXT);
    assert_eq!(next(&ring), None);
}
