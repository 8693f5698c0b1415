//! Watches the network around one running pod: its network namespace, the path to its VM, and the endpoints at which
//! its guest finds an encrypted tunnel. It only signals that something changed; the sandbox inspects the state.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use peerpod_common::blocking::blocking;
use peerpod_podnet::events::Events;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use super::{Surroundings, open};
use crate::ledger::NetnsRef;
use crate::sandbox::ports::{Changes, NetworkError};
use crate::tunnel::{Reserved, Tunnel};

/// Debounce of changes: a CNI writes routes one by one. `AT_MOST` bounds the delay.
const QUIET: Duration = Duration::from_millis(100);
const AT_MOST: Duration = Duration::from_secs(1);
/// Pause before the next attempt when a namespace cannot be watched.
const PAUSE: Duration = Duration::from_secs(10);

/// Inspections without a pause; then one in each [`EACH`], for a program that undoes every repair.
const AT_ONCE: u32 = 20;
const EACH: Duration = Duration::from_secs(3);
const BETWEEN_WARNINGS: Duration = Duration::from_secs(600);

#[derive(Default)]
struct RateLimit {
    /// Time up to which the inspections so far are charged, each with [`EACH`].
    paid: Option<Instant>,
    warned: Option<Instant>,
}

impl RateLimit {
    /// Charges one change. Returns the time for which further changes are not signalled: zero, growing to [`EACH`].
    fn charge(&mut self, now: Instant) -> Duration {
        let paid = self.paid.map_or(now, |paid| paid.max(now)) + EACH;
        self.paid = Some(paid);
        paid.saturating_duration_since(now + EACH * AT_ONCE)
    }

    fn may_warn(&mut self, now: Instant) -> bool {
        let due = self.warned.is_none_or(|warned| now >= warned + BETWEEN_WARNINGS);
        if due {
            self.warned = Some(now);
        }
        due
    }
}

/// Watches until the receiver is dropped.
pub(super) fn watch_netns(
    boot_id: String,
    netns: NetnsRef,
    tunnel: Tunnel,
    to: Option<(Reserved, IpAddr)>,
    surroundings: &Surroundings,
) -> watch::Receiver<Changes> {
    let (sender, receiver) = watch::channel(0);
    let (underlay, own) = (surroundings.underlay.clone(), tunnel.own_addresses());
    let netns_watcher =
        NetnsWatcher { boot_id, netns, tunnel, to, turns: surroundings.turns.clone(), sender };
    tokio::spawn(async move {
        tokio::select! {
            () = netns_watcher.sender.closed() => {}
            () = netns_watcher.watch_pod() => {}
            () = netns_watcher.watch_node(underlay, own) => {}
            () = netns_watcher.watch_tunnel() => {}
        }
    });
    receiver
}

struct NetnsWatcher {
    boot_id: String,
    netns: NetnsRef,
    tunnel: Tunnel,
    /// The tunnel, and the address of its VM.
    to: Option<(Reserved, IpAddr)>,
    turns: Arc<Semaphore>,
    sender: watch::Sender<Changes>,
}

impl NetnsWatcher {
    /// Ends when the namespace is gone; the reaper looks for such sandboxes.
    async fn watch_pod(&self) {
        let mut rate_limit = RateLimit::default(); // a new socket does not reset the limit
        loop {
            match self.events().await {
                Ok(mut events) => {
                    // Changes between the first inspection and now.
                    self.sender.send_modify(|changes| *changes += 1);
                    while events.settled(QUIET, AT_MOST).await.is_ok() {
                        self.sender.send_modify(|changes| *changes += 1);
                        self.calm(&mut rate_limit).await;
                    }
                }
                Err(error) if error.permanent => return,
                Err(error) => debug!(error = error.text, "cannot watch the pod's network; trying again"),
            }
            sleep(PAUSE).await;
            self.sender.send_modify(|changes| *changes += 1); // for changes that were missed meanwhile
        }
    }

    /// Waits while the rate limit is exceeded. Changes during the wait are signalled afterwards.
    async fn calm(&self, rate_limit: &mut RateLimit) {
        let now = Instant::now();
        let pause = rate_limit.charge(now);
        if pause.is_zero() {
            return;
        }
        if rate_limit.may_warn(now) {
            warn!(
                netns = %self.netns.path.display(),
                "the pod's network changes again and again; another program may undo the node's repairs (its \
                 tc filters, devices or routes there); from now on the node inspects it every {EACH:?}"
            );
        }
        sleep(pause).await;
    }

    /// Signals changes of the path to the VM, and of the node's `own` addresses if the tunnel must keep them.
    async fn watch_node(&self, mut underlay: watch::Receiver<u64>, mut own: Option<Arc<Vec<IpAddr>>>) {
        let mut path = self.find_path().await;
        while underlay.changed().await.is_ok() {
            let now = (self.find_path().await, self.tunnel.own_addresses());
            if (&now.0, &now.1) != (&path, &own) {
                (path, own) = now;
                self.sender.send_modify(|changes| *changes += 1);
            }
        }
        std::future::pending().await
    }

    /// Signals changes of the relay's endpoints, which guests of encrypted tunnels receive besides the path.
    async fn watch_tunnel(&self) {
        let news = self.to.as_ref().and_then(|(reserved, _)| self.tunnel.news(reserved));
        if let Some(mut news) = news {
            while news.changed().await.is_ok() {
                self.sender.send_modify(|changes| *changes += 1);
            }
        }
        std::future::pending().await
    }

    async fn events(&self) -> Result<Events, NetworkError> {
        let (boot_id, netns) = (self.boot_id.clone(), self.netns.clone());
        let netns = blocking(move || open(&boot_id, &netns)).await?;
        // Takes one thread for some 20 us; a blocking thread of the pool would cost as much.
        Ok(Events::of_pod(&netns)?)
    }

    /// Returns the node's address towards the VM and the largest inner packet; `None` where there is no path.
    async fn find_path(&self) -> Option<(IpAddr, u32)> {
        let (reserved, vm) = self.to.clone()?;
        let _turn = self.turns.acquire().await.ok()?;
        let tunnel = self.tunnel.clone();
        blocking(move || tunnel.path(&reserved, vm).map_err(NetworkError::from)).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_changes_are_rate_limited_until_a_quiet_period() {
        let (mut rate_limit, began) = (RateLimit::default(), Instant::now());
        let storm = |rate_limit: &mut RateLimit, from: Instant| {
            let (mut now, mut looks) = (from, 0);
            while now < from + Duration::from_secs(60) {
                looks += 1;
                now += QUIET + rate_limit.charge(now);
            }
            looks
        };
        let looks = storm(&mut rate_limit, began);
        assert!((AT_ONCE..=AT_ONCE + 21).contains(&looks), "{looks} in a minute");
        assert!(rate_limit.may_warn(began) && !rate_limit.may_warn(began + EACH));
        let later = began + Duration::from_secs(300);
        assert_eq!(rate_limit.charge(later), Duration::ZERO);
    }
}
