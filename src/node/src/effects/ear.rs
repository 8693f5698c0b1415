//! Hears what changes around one running pod: in its network namespace, on the way to its VM, and where its guest finds
//! an encrypted tunnel. Says only that something did; the sandbox looks.

use std::{net::IpAddr, sync::Arc, time::Duration};

use peerpod_podnet::events::Events;
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep},
};
use tracing::{debug, warn};

use super::{Surroundings, open};
use crate::{
    ledger::NetnsRef,
    sandbox::{effects::NetworkError, follow::Heard},
    tunnel::{Reserved, Tunnel},
};

/// A CNI writes routes one by one: wait until it is done, but not for long.
const QUIET: Duration = Duration::from_millis(100);
const AT_MOST: Duration = Duration::from_secs(1);
/// Before the next try, when a namespace cannot be heard.
const PAUSE: Duration = Duration::from_secs(10);

/// So many looks may follow each other at once; then one in each [`EACH`]. Whoever changes the pod's network whenever it
/// was put right must not keep the node busy.
const AT_ONCE: u32 = 20;
const EACH: Duration = Duration::from_secs(3);
/// Between two warnings of one pod.
const SAID: Duration = Duration::from_secs(600);

/// How restless a pod's network is.
#[derive(Default)]
struct Unrest {
    /// Until when the looks so far are paid for, one by [`EACH`].
    paid: Option<Instant>,
    said: Option<Instant>,
}

impl Unrest {
    /// There is news: for how long nobody is told of more. Nothing, growing to [`EACH`].
    fn heard(&mut self, now: Instant) -> Duration {
        let paid = self.paid.map_or(now, |paid| paid.max(now)) + EACH;
        self.paid = Some(paid);
        paid.saturating_duration_since(now + EACH * AT_ONCE)
    }

    fn is_to_be_said(&mut self, now: Instant) -> bool {
        let due = self.said.is_none_or(|said| now >= said + SAID);
        if due {
            self.said = Some(now);
        }
        due
    }
}

/// Listens until the receiver is dropped.
pub(super) fn listen_to(
    boot_id: String,
    netns: NetnsRef,
    tunnel: Tunnel,
    way: Option<(Reserved, IpAddr)>,
    surroundings: &Surroundings,
) -> watch::Receiver<Heard> {
    let (sender, receiver) = watch::channel(0);
    let (underlay, own) = (surroundings.underlay(), tunnel.own_addresses());
    let ear = Ear { boot_id, netns, tunnel, way, turns: surroundings.turns(), sender };
    tokio::spawn(async move {
        tokio::select! {
            () = ear.sender.closed() => {}
            () = ear.hear_pod() => {}
            () = ear.hear_node(underlay, own) => {}
            () = ear.hear_tunnel() => {}
        }
    });
    receiver
}

struct Ear {
    boot_id: String,
    netns: NetnsRef,
    tunnel: Tunnel,
    /// The tunnel and the VM that it goes to.
    way: Option<(Reserved, IpAddr)>,
    turns: Arc<Semaphore>,
    sender: watch::Sender<Heard>,
}

impl Ear {
    /// Ends when the namespace is gone; the reaper looks for those.
    async fn hear_pod(&self) {
        let mut unrest = Unrest::default(); // a new socket forgives nothing
        loop {
            match self.events().await {
                Ok(mut events) => {
                    // What changed between the first look and now.
                    self.sender.send_modify(|heard| *heard += 1);
                    while events.settled(QUIET, AT_MOST).await.is_ok() {
                        self.sender.send_modify(|heard| *heard += 1);
                        self.calm(&mut unrest).await;
                    }
                }
                Err(error) if error.permanent => return,
                Err(error) => debug!(error = error.text, "cannot hear the pod's network; trying again"),
            }
            sleep(PAUSE).await;
            self.sender.send_modify(|heard| *heard += 1); // whatever happened meanwhile
        }
    }

    /// Waits where there was too much news. What happens meanwhile is heard afterwards.
    async fn calm(&self, unrest: &mut Unrest) {
        let now = Instant::now();
        let pause = unrest.heard(now);
        if pause.is_zero() {
            return;
        }
        if unrest.is_to_be_said(now) {
            warn!(
                netns = %self.netns.path.display(),
                "the pod's network changes again and again; another program may undo what is put right (its tc filters, \
                 devices or routes there); from now on it is looked at every {EACH:?}"
            );
        }
        sleep(pause).await;
    }

    /// Of all that changes on a node little concerns one sandbox: the way to its VM, and where its pod keeps to the
    /// tunnel the node's `own` addresses.
    async fn hear_node(&self, mut underlay: watch::Receiver<u64>, mut own: Option<Arc<Vec<IpAddr>>>) {
        let mut way = self.find_way().await;
        while underlay.changed().await.is_ok() {
            let now = (self.find_way().await, self.tunnel.own_addresses());
            if (&now.0, &now.1) != (&way, &own) {
                (way, own) = now;
                self.sender.send_modify(|heard| *heard += 1);
            }
        }
        std::future::pending().await
    }

    /// The relay's place, which guests of encrypted tunnels are told besides the way.
    async fn hear_tunnel(&self) {
        let news = self.way.as_ref().and_then(|(reserved, _)| self.tunnel.news(reserved));
        if let Some(mut news) = news {
            while news.changed().await.is_ok() {
                self.sender.send_modify(|heard| *heard += 1);
            }
        }
        std::future::pending().await
    }

    async fn events(&self) -> Result<Events, NetworkError> {
        let netns = open(&self.boot_id, &self.netns).await?;
        // One thread for some 20 us; a blocking thread of the pool would cost as much.
        Ok(Events::of_pod(&netns)?)
    }

    /// The node's address towards the VM and what fits there; `None` where there is no way.
    async fn find_way(&self) -> Option<(IpAddr, u32)> {
        let (reserved, vm) = self.way.as_ref()?;
        let _turn = self.turns.acquire().await.ok()?;
        self.tunnel.way(reserved, *vm).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_is_looked_at_seldom_and_forgiven_when_it_was_quiet() {
        let (mut unrest, began) = (Unrest::default(), Instant::now());
        let storm = |unrest: &mut Unrest, from: Instant| {
            let (mut now, mut looks) = (from, 0);
            while now < from + Duration::from_secs(60) {
                looks += 1;
                now += QUIET + unrest.heard(now);
            }
            looks
        };
        let looks = storm(&mut unrest, began);
        assert!((AT_ONCE..=AT_ONCE + 21).contains(&looks), "{looks} in a minute");
        assert!(unrest.is_to_be_said(began) && !unrest.is_to_be_said(began + EACH));
        let later = began + Duration::from_secs(300);
        assert_eq!(unrest.heard(later), Duration::ZERO);
    }
}
