//! Dials guests, in networks that do not let guests reach the node: short attempts at all addresses of a VM, at the
//! cadence at which guests dial elsewhere. `guests` treats an answering peer like a guest that dialled in; it must be
//! the guest of the dialled sandbox. The addresses are in the sandbox's record, so dialling continues without the node.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::guests::{self, GuestParts, Met};
use crate::id::SandboxId;
use crate::sandboxes::guest::Link;

/// Time limit of one attempt; further attempts start beside it.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Limit of attempts in flight at one address.
const OF_ONE: usize = 8;
/// Limit of attempts in flight for all sandboxes; further attempts wait in order.
const OF_ALL: usize = 512;
/// Time limit for the Hello of a guest that was met; after it, the guest is dialled again.
const HELLO: Duration = Duration::from_secs(5);
/// A VM that has not answered for this time is dialled less often.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest pause between attempts at a VM that was connected and is gone.
const SELDOM: Duration = Duration::from_secs(5);
/// Pause before the next attempt at an address where another sandbox's VM answered.
const OTHERS: Duration = Duration::from_secs(60);
pub(crate) const ADDRESSES: usize = 16;

#[derive(Debug)]
pub(crate) enum Order {
    /// Dial this sandbox's guest, at these addresses and no others.
    Dial(SandboxId, Vec<SocketAddr>),
    Stop(SandboxId),
}

/// Executes orders until their channel closes.
pub(crate) async fn run(mut orders: mpsc::UnboundedReceiver<Order>, parts: GuestParts) {
    let turns = Arc::new(Semaphore::new(OF_ALL));
    // Dropping a set ends its tasks.
    let mut dialling: HashMap<SandboxId, JoinSet<()>> = HashMap::new();
    while let Some(order) = orders.recv().await {
        match order {
            Order::Stop(id) => drop(dialling.remove(&id)),
            Order::Dial(id, addresses) => {
                let mut tasks = JoinSet::new();
                for address in addresses {
                    let dial = Dial { id: id.clone(), address, parts: parts.clone(), turns: turns.clone() };
                    tasks.spawn(dial.run());
                }
                dialling.insert(id, tasks);
            }
        }
    }
}

/// Dialler of one address of one sandbox.
struct Dial {
    id: SandboxId,
    address: SocketAddr,
    parts: GuestParts,
    turns: Arc<Semaphore>,
}

impl Dial {
    async fn run(self) {
        let mut pace = Pace::new(Instant::now());
        let mut said = "";
        loop {
            let Some(sandbox) = self.parts.sandboxes.get(&self.id) else {
                sleep(pace.next(Instant::now())).await;
                continue;
            };
            let mut link = sandbox.guest.watch();
            drop(sandbox);
            if link.borrow().up {
                // An error means that the sandbox is gone or was made anew; the next iteration sees that.
                drop(link.wait_for(|link| !link.up).await);
                pace = Pace { had_link: true, ..Pace::new(Instant::now()) };
            }
            let stream = tokio::select! {
                biased;
                _ = link.wait_for(|link| link.up) => continue,
                stream = self.connect(&mut pace) => stream,
            };
            // The guest may have been met at another address meanwhile.
            let Link { up: false, changes: before } = *link.borrow_and_update() else { continue };
            let met =
                guests::meet(stream, self.address, Some(&self.id), &AtomicBool::default(), &self.parts).await;
            let is_others = matches!(met, Err(guests::Refused::OtherSandbox(_)));
            match met {
                // The guest returns with its certificate, and must then be met at once.
                Ok(Met::Claimed) => said = "",
                Ok(Met::Attached) => {
                    said = "";
                    drop(timeout(HELLO, link.wait_for(|link| link.changes != before)).await);
                }
                // A guest that is met at two of its addresses answers at only one of them.
                Err(ref refused) if refused.is_strange() && refused.label() != said => {
                    said = refused.label();
                    let pod = self.parts.sandboxes.states.pod(&self.id);
                    tracing::warn!(sandbox = %self.id, pod = &*pod, address = %self.address, reason = said, error = %refused, "a program other than the VM's guest answers at its address");
                }
                Err(ref refused) => {
                    tracing::debug!(sandbox = %self.id, address = %self.address, error = %refused, "dial failed");
                }
            }
            // The address now belongs to another VM, which drops its link for each of these attempts.
            if is_others {
                sleep(OTHERS).await;
            }
            sleep(pace.next(Instant::now())).await;
        }
    }

    /// Connects; retries without end.
    async fn connect(&self, pace: &mut Pace) -> TcpStream {
        let mut attempts: JoinSet<io::Result<TcpStream>> = JoinSet::new();
        loop {
            if attempts.len() < OF_ONE
                && let Ok(turn) = self.turns.clone().acquire_owned().await
            {
                attempts.spawn(attempt(self.address, turn));
            }
            let beat = sleep(pace.next(Instant::now()));
            tokio::pin!(beat);
            loop {
                tokio::select! {
                    biased;
                    Some(done) = attempts.join_next() => {
                        if let Ok(Ok(stream)) = done {
                            return stream;
                        }
                    }
                    () = &mut beat => break,
                }
            }
        }
    }
}

async fn attempt(address: SocketAddr, _turn: OwnedSemaphorePermit) -> io::Result<TcpStream> {
    timeout(ATTEMPT, TcpStream::connect(address)).await?
}

/// Pause between attempts: 100 to 250 ms for a minute, as guests dial; then about one second. For a guest that was
/// connected and is gone, the pause then grows up to [`SELDOM`].
struct Pace {
    since: Instant,
    had_link: bool,
    slow: Duration,
}

impl Pace {
    fn new(now: Instant) -> Pace {
        Pace { since: now, had_link: false, slow: Duration::from_secs(1) }
    }

    fn next(&mut self, now: Instant) -> Duration {
        let random = u64::from(getrandom::u32().unwrap_or(0));
        if now.saturating_duration_since(self.since) < PATIENCE {
            return Duration::from_millis(100 + random % 151);
        }
        let pause = self.slow;
        if self.had_link {
            self.slow = (self.slow * 5 / 4).min(SELDOM);
        }
        // Up to a quarter less, so that many diallers do not run in step.
        pause - pause.mul_f64((random % 1000) as f64 / 4000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_dialled_often_at_first_then_once_a_second_and_seldom_when_it_had_been_there() {
        let began = Instant::now();
        for had_link in [false, true] {
            let mut pace = Pace { had_link, ..Pace::new(began) };
            for second in 0..60 {
                let pause = pace.next(began + Duration::from_secs(second)).as_millis();
                assert!((100..=250).contains(&pause), "{pause}");
            }
            for _ in 0..100 {
                let pause = pace.next(began + PATIENCE).as_millis();
                let most = if had_link { 5000 } else { 1000 };
                assert!((750..=most).contains(&pause), "{pause}");
            }
            let last = pace.next(began + PATIENCE).as_millis();
            assert_eq!(last >= 3750, had_link, "{last}");
        }
    }
}
