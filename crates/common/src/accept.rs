//! Accepts connections for as long as a program runs.

use std::borrow::Cow;
use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::limit::RateLimit;

/// Interval of the log lines about failures, which may last for as long as the descriptors lack.
const LINE_EVERY: Duration = Duration::from_secs(60);
/// Pause after a failure. The likely cause is a lack of descriptors, which other connections need time to release.
const PAUSE: Duration = Duration::from_millis(100);

/// Accept loop of one socket.
#[derive(Debug)]
pub struct Acceptor {
    socket: Cow<'static, str>,
    /// End of the pause after the last failure.
    again: Option<Instant>,
    lines: RateLimit,
    /// Failures since the last log line.
    left_out: u64,
}

impl Acceptor {
    /// Makes the accept loop of the socket with the name `socket`, which the log shows.
    pub fn new(socket: impl Into<Cow<'static, str>>) -> Acceptor {
        let lines = RateLimit::new(1.0, 1.0 / LINE_EVERY.as_secs_f64(), Instant::now().into_std());
        Acceptor { socket: socket.into(), again: None, lines, left_out: 0 }
    }

    /// Returns the next connection that `accept` returns. After a failure it pauses and tries again; it
    /// logs one failure per minute. As cancel-safe as
    /// `accept`; a pause lasts to its end although the call is cancelled.
    pub async fn next<T, F>(&mut self, mut accept: impl FnMut() -> F) -> T
    where
        F: Future<Output = io::Result<T>>,
    {
        loop {
            if let Some(again) = self.again {
                sleep_until(again).await;
                self.again = None;
            }
            match accept().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    self.log(&error);
                    self.again = Some(Instant::now() + PAUSE);
                }
            }
        }
    }

    fn log(&mut self, error: &io::Error) {
        if self.lines.take(Instant::now().into_std()) {
            let left_out = std::mem::take(&mut self.left_out);
            tracing::warn!(socket = &*self.socket, %error, left_out, "connection not accepted");
        } else {
            self.left_out += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::ready;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::timeout;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Counts log lines.
    struct Lines(Arc<AtomicUsize>);

    impl Subscriber for Lines {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[tokio::test(start_paused = true)]
    async fn lasting_failures_are_logged_once_a_minute() {
        let lines = Arc::new(AtomicUsize::new(0));
        let _subscriber = tracing::subscriber::set_default(Lines(lines.clone()));
        let mut acceptor = Acceptor::new("test");
        let (tries, failing) = (Cell::new(0), io::ErrorKind::OutOfMemory);
        let accept = || {
            tries.set(tries.get() + 1);
            ready(Err::<(), _>(io::Error::from(failing)))
        };
        let minutes = timeout(LINE_EVERY * 3 - PAUSE, acceptor.next(accept)).await;
        assert!(minutes.is_err() && tries.get() > 1000, "{} tries", tries.get());
        assert_eq!(lines.load(Ordering::Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_call_does_not_shorten_the_pause() {
        let (began, tries) = (Instant::now(), Cell::new(0));
        let mut acceptor = Acceptor::new("test");
        let failing = || {
            tries.set(tries.get() + 1);
            ready(if began.elapsed() < PAUSE {
                Err(io::Error::from(io::ErrorKind::OutOfMemory))
            } else {
                Ok(())
            })
        };
        for _ in 0..20 {
            let cancelled = timeout(PAUSE / 100, acceptor.next(failing)).await;
            assert!(cancelled.is_err(), "accepted within the pause");
        }
        assert_eq!(tries.get(), 1);
        acceptor.next(failing).await;
        assert_eq!((tries.get(), began.elapsed()), (2, PAUSE));
    }
}
