//! Watches the node's own network (addresses, devices and routes) once for all sandboxes, and keeps the node's
//! endpoints for guests up to date.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use peerpod_podnet::events::Events;
use peerpod_podnet::netns::Netns;
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;
use tracing::warn;

use super::{GuestAddresses, on_thread};
use crate::sandbox::ports::{NetworkError, NodeEndpoints};
use crate::tunnel::Tunnel;

/// Debounce of changes: on a busy node every starting pod changes devices and routes. One inspection is cheap, but each
/// sandbox makes one.
const QUIET: Duration = Duration::from_millis(300);
const AT_MOST: Duration = Duration::from_secs(3);
/// Pause after a change before the next one is signalled.
const PAUSE: Duration = Duration::from_secs(1);
/// Number of sandboxes that inspect at a time; an inspection takes some microseconds.
const TURNS: usize = 2;
/// Pause before the next attempt when the node's network cannot be watched.
const RETRY: Duration = Duration::from_secs(10);

/// Watcher of the node's network. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Surroundings {
    underlay: watch::Receiver<u64>,
    node_endpoints: watch::Receiver<NodeEndpoints>,
    turns: Arc<Semaphore>,
}

impl Surroundings {
    /// Watches the network namespace of the calling thread for as long as a receiver exists. `listening` is the address
    /// on which the relay reports that it listens. The watcher updates the node's own addresses in `tunnel`.
    pub(crate) fn new(
        addresses: GuestAddresses,
        listening: watch::Receiver<Option<SocketAddr>>,
        tunnel: Tunnel,
    ) -> Surroundings {
        let (news, underlay) = watch::channel(0);
        let (endpoints_sender, node_endpoints) = watch::channel(None);
        let host = Netns::current();
        tokio::spawn(async move {
            let Ok(host) = host.map_err(|error| warn!(%error, "cannot watch the node's network namespace"))
            else {
                return;
            };
            tokio::select! {
                () = watch_underlay(&host, &tunnel, &news) => {}
                () = news.closed() => {}
            }
        });
        tokio::spawn(publish_endpoints(addresses, listening, underlay.clone(), endpoints_sender));
        Surroundings { underlay, node_endpoints, turns: Arc::new(Semaphore::new(TURNS)) }
    }

    /// Receiver that ticks when something changed.
    pub(crate) fn underlay(&self) -> watch::Receiver<u64> {
        self.underlay.clone()
    }

    /// Semaphore to hold during an inspection: all sandboxes get the same change at once, and a thousand inspections at
    /// a time would be a thousand threads.
    pub(super) fn turns(&self) -> Arc<Semaphore> {
        self.turns.clone()
    }

    /// Receiver of the endpoints at which guests find the node.
    pub(super) fn node_endpoints(&self) -> watch::Receiver<NodeEndpoints> {
        self.node_endpoints.clone()
    }
}

async fn watch_underlay(host: &Netns, tunnel: &Tunnel, news: &watch::Sender<u64>) {
    loop {
        match Events::of_underlay(host) {
            Ok(mut events) => {
                // Changes from before the watch began.
                if read_own_addresses(tunnel).await {
                    news.send_modify(|count| *count += 1);
                }
                while events.settled(QUIET, AT_MOST).await.is_ok() {
                    // Before the signal, so that its receivers find the new addresses.
                    read_own_addresses(tunnel).await;
                    news.send_modify(|count| *count += 1);
                    sleep(PAUSE).await;
                }
            }
            Err(error) => warn!(%error, "cannot watch the node's network; trying again"),
        }
        sleep(RETRY).await;
        news.send_modify(|count| *count += 1); // for changes that were missed meanwhile
    }
}

async fn read_own_addresses(tunnel: &Tunnel) -> bool {
    let tunnel = tunnel.clone();
    let read = on_thread(move || tunnel.read_own_addresses().map_err(NetworkError::from)).await;
    read.and_then(|read| read).unwrap_or_else(|error| {
        warn!(%error, "cannot read the node's own addresses; guests keep the previous ones");
        false
    })
}

async fn publish_endpoints(
    addresses: GuestAddresses,
    mut listening: watch::Receiver<Option<SocketAddr>>,
    mut underlay: watch::Receiver<u64>,
    node_endpoints: watch::Sender<NodeEndpoints>,
) {
    loop {
        let bound = *listening.borrow_and_update();
        underlay.borrow_and_update();
        if let Some(bound) = bound {
            let now = Some(Arc::new(addresses.node_endpoints(bound)));
            node_endpoints.send_if_modified(|node_endpoints| {
                let changed = *node_endpoints != now;
                *node_endpoints = now;
                changed
            });
        }
        tokio::select! {
            Ok(()) = listening.changed() => {}
            Ok(()) = underlay.changed() => {}
            () = node_endpoints.closed() => return,
            else => return,
        }
    }
}
