//! What changes around the node: its own addresses, links and routes. One ear for all sandboxes; it also keeps up to
//! date where guests find the node.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use peerpod_podnet::{events::Events, netns::Netns};
use tokio::{
    sync::{Semaphore, watch},
    time::sleep,
};
use tracing::warn;

use super::GuestAddresses;
use crate::{sandbox::follow::Homes, tunnel::Tunnel};

/// On a busy node every pod that starts changes links and routes. Looking is cheap, yet once for each sandbox.
const QUIET: Duration = Duration::from_millis(300);
const AT_MOST: Duration = Duration::from_secs(3);
/// Between two looks.
const PAUSE: Duration = Duration::from_secs(1);
/// Sandboxes that look at a time; a look takes some microseconds.
const TURNS: usize = 2;
/// Before the next try, when the node cannot be heard.
const RETRY: Duration = Duration::from_secs(10);

/// The news of the node. Clones hear the same.
#[derive(Clone, Debug)]
pub struct Surroundings {
    underlay: watch::Receiver<u64>,
    homes: watch::Receiver<Homes>,
    turns: Arc<Semaphore>,
}

impl Surroundings {
    /// Listens in the network namespace of the calling thread, for as long as somebody is interested. `listening`:
    /// where the relay says that it listens. `tunnel` is kept up to date about the node's own addresses.
    pub fn new(
        addresses: GuestAddresses,
        listening: watch::Receiver<Option<SocketAddr>>,
        tunnel: Tunnel,
    ) -> Surroundings {
        let (news, underlay) = watch::channel(0);
        let (homes_sender, homes) = watch::channel(None);
        let host = Netns::current();
        tokio::spawn(async move {
            let Ok(host) =
                host.map_err(|error| warn!(%error, "cannot listen in the node's network namespace"))
            else {
                return;
            };
            tokio::select! {
                () = hear(&host, &tunnel, &news) => {}
                () = news.closed() => {}
            }
        });
        tokio::spawn(keep_homes(addresses, listening, underlay.clone(), homes_sender));
        Surroundings { underlay, homes, turns: Arc::new(Semaphore::new(TURNS)) }
    }

    /// Ticks when something changed.
    pub(crate) fn underlay(&self) -> watch::Receiver<u64> {
        self.underlay.clone()
    }

    /// To be held while looking: all sandboxes hear the same news at once, and a thousand looks at a time would be a
    /// thousand threads.
    pub(super) fn turns(&self) -> Arc<Semaphore> {
        self.turns.clone()
    }

    /// Where guests find the node.
    pub(super) fn homes(&self) -> watch::Receiver<Homes> {
        self.homes.clone()
    }
}

async fn hear(host: &Netns, tunnel: &Tunnel, news: &watch::Sender<u64>) {
    loop {
        match Events::of_underlay(host) {
            Ok(mut events) => {
                // What changed before anybody listened.
                if look_at_own_addresses(tunnel).await {
                    news.send_modify(|count| *count += 1);
                }
                while events.settled(QUIET, AT_MOST).await.is_ok() {
                    // First, so that who hears of it finds them.
                    look_at_own_addresses(tunnel).await;
                    news.send_modify(|count| *count += 1);
                    sleep(PAUSE).await;
                }
            }
            Err(error) => warn!(%error, "cannot hear the node's network change; trying again"),
        }
        sleep(RETRY).await;
        news.send_modify(|count| *count += 1); // whatever happened meanwhile
    }
}

async fn look_at_own_addresses(tunnel: &Tunnel) -> bool {
    let looked = tunnel.look_at_own_addresses().await;
    looked.unwrap_or_else(|error| {
        warn!(%error, "cannot look at the node's own addresses; guests keep to the ones before");
        false
    })
}

async fn keep_homes(
    addresses: GuestAddresses,
    mut listening: watch::Receiver<Option<SocketAddr>>,
    mut underlay: watch::Receiver<u64>,
    homes: watch::Sender<Homes>,
) {
    loop {
        let bound = *listening.borrow_and_update();
        underlay.borrow_and_update();
        if let Some(bound) = bound {
            let now = Some(Arc::new(addresses.homes(bound)));
            homes.send_if_modified(|homes| {
                let changed = *homes != now;
                *homes = now;
                changed
            });
        }
        tokio::select! {
            Ok(()) = listening.changed() => {}
            Ok(()) = underlay.changed() => {}
            () = homes.closed() => return,
            else => return,
        }
    }
}
