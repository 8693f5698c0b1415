//! Supplies the relay with the encrypted tunnel's descriptors, and keeps the tunnel's endpoints for guests up to date.
//! The descriptors are passed at the start, to each new relay, and to a relay that reports that it no longer carries
//! packets. They are also passed after another program deletes something in the tunnel's private namespace, which this
//! module watches. Touches `relay-fds.sock` only; the tunnel module defines the descriptors.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use peerpod_podnet::events::Events;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::ports::GuestAddresses;
use crate::relay_client::RelayClient;
use crate::tunnel::{FdHandoff, WIREGUARD, Wireguard};

/// Interval of polls of the relay: the longest time that a failed data plane carries nothing.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pause after a failure.
const AGAIN: Duration = Duration::from_millis(500);
/// Debounce of changes in the private namespace, where pods come and go too. `AT_MOST` bounds the delay.
const QUIET: Duration = Duration::from_millis(50);
const AT_MOST: Duration = Duration::from_millis(500);
/// Interval of checks of the addresses without a change signal: the provider may have reported others.
const ADDRESSES_EVERY: Duration = Duration::from_secs(10);

/// Runs for ever. `underlay` ticks when the node's own network changed.
pub(crate) async fn run(
    relay: RelayClient,
    wireguard: Arc<Wireguard>,
    addresses: GuestAddresses,
    underlay: watch::Receiver<u64>,
) {
    tokio::select! {
        () = supply_always(&relay, &wireguard) => {}
        () = find_always(&wireguard, &addresses, relay.listening(), underlay) => {}
    }
}

async fn supply_always(relay: &RelayClient, wireguard: &Arc<Wireguard>) {
    let mut epoch = relay.epoch();
    let mut said = String::new();
    let mut inside: Option<Events> = None;
    loop {
        if inside.is_none() {
            // Without the watch, the next poll finds deletions.
            inside = Events::of_underlay(wireguard.inside()).ok();
        }
        let met = *epoch.borrow_and_update() > 0;
        let mut pause = LOOK_EVERY;
        if met {
            match supply(relay, wireguard).await {
                Ok(()) => said.clear(),
                Err(why) => {
                    pause = AGAIN;
                    if why != said {
                        warn!(why, "the relay does not run the encrypted tunnel; trying again");
                        said = why;
                    }
                }
            }
        }
        // Wakes for another relay, a change in the namespace, or the timer.
        tokio::select! {
            _ = epoch.changed() => {}
            deaf = changed(&mut inside) => {
                if deaf {
                    inside = None;
                }
            }
            () = sleep(pause) => {}
        }
    }
}

/// Waits for a change; returns whether the watch has failed.
async fn changed(events: &mut Option<Events>) -> bool {
    match events {
        Some(events) => events.settled(QUIET, AT_MOST).await.is_err(),
        None => std::future::pending().await,
    }
}

async fn supply(relay: &RelayClient, wireguard: &Arc<Wireguard>) -> Result<(), String> {
    let held = relay.held(WIREGUARD, None).await.map_err(|error| error.to_string())?;
    let wanted = {
        let wireguard = wireguard.clone();
        spawn_blocking(move || wireguard.wanted(held.as_ref())).await.map_err(|error| error.to_string())?
    };
    let Some(FdHandoff { detail, descriptors }) = wanted.map_err(|error| error.to_string())? else {
        return Ok(());
    };
    let taken = relay.hand_off(WIREGUARD, None, detail.0, descriptors).await;
    wireguard.taken(&taken.map_err(|error| error.to_string())?);
    info!("the relay runs the encrypted tunnel");
    Ok(())
}

/// Publishes the relay's addresses as soon as they change: a sandbox that follows the same change must not send its
/// guest the old addresses.
async fn find_always(
    wireguard: &Wireguard,
    addresses: &GuestAddresses,
    mut listening: watch::Receiver<Option<SocketAddr>>,
    mut underlay: watch::Receiver<u64>,
) {
    loop {
        let bound = *listening.borrow_and_update();
        underlay.borrow_and_update();
        if let Ok(found) = addresses.now(bound) {
            wireguard.found_at(found.iter().map(SocketAddr::ip).collect());
        }
        // A closed channel sends no more changes; the timer still runs.
        let news = async {
            tokio::select! {
                Ok(()) = listening.changed() => {}
                Ok(()) = underlay.changed() => {}
                else => std::future::pending().await,
            }
        };
        drop(timeout(ADDRESSES_EVERY, news).await);
    }
}

#[cfg(test)]
mod tests {
    use peerpod_wireguard::NODE_INNER;

    use super::*;
    use crate::tunnel::{Netns, Reserved, Tunnel, TunnelConfig, TunnelKind, WireguardConfig};

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
        let (wireguard, known) = (tunnel.wireguard().unwrap().clone(), addresses.clone());
        let (_listening, listens) = watch::channel(None);
        let finding = tokio::spawn(async move { find_always(&wireguard, &known, listens, underlay).await });
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
        tunnel.close().unwrap();
        std::fs::remove_dir_all(folder).unwrap();
    }
}
