//! Watches the node's own network (addresses, devices and routes) once for all sandboxes, and keeps the node's
//! endpoints for guests up to date, those of the encrypted tunnel too.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use peerpod_common::blocking::blocking;
use peerpod_podnet::events::Events;
use peerpod_podnet::netns::Netns;
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;
use tracing::warn;

use super::GuestAddresses;
use crate::sandbox::ports::{NetworkError, NodeEndpoints};
use crate::tunnel::Tunnel;

/// Debounce of changes, which every starting pod makes: one inspection is cheap, but each sandbox makes one.
const QUIET: Duration = Duration::from_millis(300);
const AT_MOST: Duration = Duration::from_secs(3);
/// Pause after a change before the next one is signalled.
const PAUSE: Duration = Duration::from_secs(1);
/// Number of sandboxes that inspect at a time; an inspection takes some microseconds.
const TURNS: usize = 2;
/// Interval of checks of the addresses without a change signal: the provider may have reported others.
const ADDRESSES_EVERY: Duration = Duration::from_secs(10);
/// Pause before the next attempt when the node's network cannot be watched.
const RETRY: Duration = Duration::from_secs(10);

/// Watcher of the node's network. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Surroundings {
    /// Ticks when something changed.
    pub underlay: watch::Receiver<u64>,
    pub node_endpoints: watch::Receiver<NodeEndpoints>,
    /// Held during an inspection: a thousand sandboxes that get the same change would be a thousand threads.
    pub turns: Arc<Semaphore>,
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
        let publish = publish(addresses, tunnel.clone(), listening, underlay.clone(), endpoints_sender);
        tokio::spawn(publish);
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
        Surroundings { underlay, node_endpoints, turns: Arc::new(Semaphore::new(TURNS)) }
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
    let read = blocking(move || tunnel.read_own_addresses().map_err(NetworkError::from)).await;
    read.unwrap_or_else(|error| {
        warn!(%error, "cannot read the node's own addresses; guests keep the previous ones");
        false
    })
}

/// Publishes the addresses at once: a sandbox that follows the same change must not send its guest the old ones.
async fn publish(
    addresses: GuestAddresses,
    tunnel: Tunnel,
    mut listening: watch::Receiver<Option<SocketAddr>>,
    mut underlay: watch::Receiver<u64>,
    node_endpoints: watch::Sender<NodeEndpoints>,
) {
    loop {
        let bound = *listening.borrow_and_update();
        underlay.borrow_and_update();
        if let Some(wireguard) = tunnel.wireguard()
            && let Ok(found) = addresses.now(bound)
        {
            wireguard.found_at(found.iter().map(SocketAddr::ip).collect());
        }
        if let Some(bound) = bound {
            let now = Some(Arc::new(addresses.node_endpoints(bound)));
            node_endpoints.send_if_modified(|endpoints| std::mem::replace(endpoints, now) != *endpoints);
        }
        tokio::select! {
            Ok(()) = listening.changed() => {}
            Ok(()) = underlay.changed() => {}
            () = sleep(ADDRESSES_EVERY) => {}
            () = node_endpoints.closed() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use peerpod_podnet::netns;
    use peerpod_wireguard::NODE_INNER;
    use tokio::time::timeout;

    use super::*;
    use crate::tunnel::{Reserved, TunnelConfig, TunnelKind, WireguardConfig};

    #[tokio::test]
    async fn encrypted_tunnels_get_a_new_node_address_at_once() {
        let folder = std::env::temp_dir().join(format!("peerpod-carry-{}", std::process::id()));
        let config = TunnelConfig {
            kind: TunnelKind::Wireguard,
            wireguard: Some(WireguardConfig {
                port: 0,
                key_dir: folder.join("key"),
                netns: folder.join("wireguard.netns"),
                relay: folder.join("relay-fds.sock"),
            }),
            ..TunnelConfig::default()
        };
        let node = Netns::scratch().unwrap();
        let tunnel = node.run(|| Tunnel::open(config)).unwrap().unwrap();
        let of = |kind| tunnel.news(&Reserved { kind, v6: false, port: 4789, devices: vec![] });
        assert!(of(TunnelKind::Vxlan).is_none());
        let mut news = of(TunnelKind::Wireguard).unwrap();
        let addresses = GuestAddresses::new(vec![], "[::]:15151".parse().unwrap());
        addresses.provider_says(vec!["192.0.2.1".parse().unwrap()]);
        let (sender, underlay) = watch::channel(0);
        let (_listening, listens) = watch::channel(None);
        let (endpoints, _followed) = watch::channel(None);
        let finding = tokio::spawn(publish(addresses.clone(), tunnel.clone(), listens, underlay, endpoints));
        const SOON: Duration = Duration::from_secs(3);
        timeout(SOON, news.changed()).await.expect("the first address").unwrap();
        addresses.provider_says(vec!["192.0.2.2".parse().unwrap(), NODE_INNER.into()]);
        sender.send_modify(|count| *count += 1);
        timeout(SOON, news.changed()).await.expect("the other address, long before the next look").unwrap();
        // The same addresses in the kernel's other order are no change.
        addresses.provider_says(vec![NODE_INNER.into(), "192.0.2.2".parse().unwrap()]);
        sender.send_modify(|count| *count += 1);
        timeout(Duration::from_millis(200), news.changed()).await.unwrap_err();
        finding.abort();
        netns::delete_named(folder.join("wireguard.netns")).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
    }
}
