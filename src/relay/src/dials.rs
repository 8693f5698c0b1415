//! Dials guests, where the network does not let them reach the node: short attempts at all addresses of a VM, again and
//! again, as guests dial elsewhere. Whoever answers is met as one that dialled in (`guests`), and must be the guest of the
//! very sandbox that is dialled for. What is dialled is in the sandbox's record: it goes on without the node.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    guests::{self, Met, Parts},
    id::SandboxId,
    sandboxes::guest::Link,
};

/// An attempt is given up after this; others begin beside it.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Attempts at one address that are under way.
const OF_ONE: usize = 8;
/// Attempts under way for all sandboxes; more wait for their turn, in order.
const OF_ALL: usize = 512;
/// A guest that was met says Hello in this time, or is dialled again.
const HELLO: Duration = Duration::from_secs(5);
/// A VM that does not answer for so long is dialled less often.
const PATIENCE: Duration = Duration::from_secs(60);
/// And one that was connected and is gone, ever less often, down to this.
const SELDOM: Duration = Duration::from_secs(5);
/// Before another call to an address at which another sandbox's VM answered.
const OTHERS: Duration = Duration::from_secs(60);
/// Addresses of one VM.
pub(crate) const ADDRESSES: usize = 16;

/// What is to be dialled.
#[derive(Debug)]
pub(crate) enum Order {
    /// This sandbox's guest, at these addresses and no others.
    Dial(SandboxId, Vec<SocketAddr>),
    /// Not any more.
    Stop(SandboxId),
}

/// Carries out orders for ever.
pub(crate) async fn run(mut orders: mpsc::UnboundedReceiver<Order>, parts: Parts) {
    let turns = Arc::new(Semaphore::new(OF_ALL));
    // Dropped, a set ends its tasks.
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

/// One address of one sandbox.
struct Dial {
    id: SandboxId,
    address: SocketAddr,
    parts: Parts,
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
                // An error: its sandbox is gone or made anew, which the next look shows.
                drop(link.wait_for(|link| !link.up).await);
                pace = Pace { had_link: true, ..Pace::new(Instant::now()) };
            }
            let stream = tokio::select! {
                biased;
                _ = link.wait_for(|link| link.up) => continue,
                stream = self.connect(&mut pace) => stream,
            };
            // It may have been met at another address meanwhile.
            let Link { up: false, changes: before } = *link.borrow_and_update() else { continue };
            let met = guests::meet(stream, self.address, &self.id, &self.parts).await;
            let is_others = matches!(met, Err(guests::Refused::OtherSandbox(_)));
            match met {
                // It comes back with its certificate, which is to be met at once.
                Ok(Met::Claimed) => said = "",
                Ok(Met::Attached) => {
                    said = "";
                    drop(timeout(HELLO, changed(&mut link, before)).await);
                }
                // A guest that is met at two of its addresses answers at one of them.
                Err(ref refused) if refused.is_strange() && refused.label() != said => {
                    said = refused.label();
                    let pod = self.parts.sandboxes.pod(&self.id);
                    tracing::warn!(sandbox = %self.id, pod = &*pod, address = %self.address, reason = said, error = %refused, "who answers at the VM's address is not its guest");
                }
                Err(ref refused) => {
                    tracing::debug!(sandbox = %self.id, address = %self.address, error = %refused, "dialled in vain");
                }
            }
            // The address is another VM's by now. That one gives up its link for each of our calls.
            if is_others {
                sleep(OTHERS).await;
            }
            sleep(pace.next(Instant::now())).await;
        }
    }

    /// Connects; never gives up.
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

async fn changed(link: &mut watch::Receiver<Link>, before: u64) {
    drop(link.wait_for(|link| link.changes != before).await);
}

/// How often: as guests dial, 100 to 250 ms apart, for a minute; then about once a second, and for a guest that was
/// connected and is gone ever less.
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
        // Up to a quarter less, so that many do not dial in step.
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
