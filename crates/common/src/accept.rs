//! Accepts connections for as long as a program runs.

use std::borrow::Cow;
use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Pause after a failure. The likely cause is a lack of descriptors, which other connections need time to release.
const PAUSE: Duration = Duration::from_millis(100);

/// Accept loop of one socket.
#[derive(Debug)]
pub struct Acceptor {
    socket: Cow<'static, str>,
    /// End of the pause after the last failure.
    again: Option<Instant>,
}

impl Acceptor {
    /// Makes the accept loop of the socket with the name `socket`, which the log shows.
    pub fn new(socket: impl Into<Cow<'static, str>>) -> Acceptor {
        Acceptor { socket: socket.into(), again: None }
    }

    /// Returns the next connection that `accept` returns. Logs a failure, pauses, and tries again. As cancel-safe as
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
                    tracing::warn!(socket = &*self.socket, %error, "connection not accepted");
                    self.again = Some(Instant::now() + PAUSE);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::ready;

    use tokio::time::timeout;

    use super::*;

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
