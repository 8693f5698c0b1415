//! Runs the one of several attempts that has the shortest wait.
//!
//! The DHCP library makes a new client wait for a random time of up to 200 ms before its first request. RFC 2131 4.4.1
//! recommends it: machines switched on together should ask one after the other. On a fast machine that is the longest
//! part of the way to the node. The guest therefore makes several clients and continues with the first one that is
//! woken. The remaining wait is some 20 ms, which still differs between machines.

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, Wake, Waker},
};

use tokio::sync::Notify;

/// One attempt. It only waits until it is woken for the first time.
pub(super) type Attempt<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Starts the wait of each attempt, continues with the first one woken, and drops the others. `None`: there are none.
pub(super) async fn soonest<T>(mut attempts: Vec<Attempt<T>>) -> Option<T> {
    let woken = Arc::new(Woken::default());
    for (number, attempt) in attempts.iter_mut().enumerate() {
        let waker = Waker::from(Arc::new(Bell { number, woken: woken.clone() }));
        if let Poll::Ready(done) = attempt.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(done);
        }
    }
    if attempts.is_empty() {
        return None;
    }
    let first = loop {
        match woken.first.get() {
            Some(first) => break *first,
            None => woken.told.notified().await,
        }
    };
    let attempt = attempts.swap_remove(first);
    drop(attempts);
    Some(attempt.await)
}

#[derive(Default)]
struct Woken {
    first: OnceLock<usize>,
    told: Notify,
}

struct Bell {
    number: usize,
    woken: Arc<Woken>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        if self.woken.first.set(self.number).is_ok() {
            self.woken.told.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Mutex, time::Duration};

    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_the_attempt_with_the_shortest_wait_continues() {
        let went_on = Arc::new(Mutex::new(Vec::new()));
        let attempt = |wait: u64| -> Attempt<u64> {
            let went_on = went_on.clone();
            Box::pin(async move {
                sleep(Duration::from_millis(wait)).await;
                went_on.lock().unwrap().push(wait);
                sleep(Duration::from_secs(3)).await; // for an answer
                wait
            })
        };
        let began = Instant::now();
        let done = soonest([170, 40, 90, 199].map(attempt).into()).await;
        assert_eq!(done, Some(40));
        assert_eq!(*went_on.lock().unwrap(), [40]);
        assert!(began.elapsed() < Duration::from_millis(3100), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_ready_attempt_is_returned_and_an_empty_set_gives_none() {
        let attempts: Vec<Attempt<u8>> =
            vec![Box::pin(std::future::pending()), Box::pin(std::future::ready(7))];
        assert_eq!(soonest(attempts).await, Some(7));
        assert_eq!(soonest(Vec::<Attempt<u8>>::new()).await, None);
    }
}
