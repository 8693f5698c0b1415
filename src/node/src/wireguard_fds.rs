//! Supplies the relay with the encrypted tunnel's descriptors: at the start, to each new relay, to a relay that reports
//! that it no longer carries packets, and after another program deletes something in the tunnel's private namespace,
//! which this module watches. Touches `relay-fds.sock` only; the tunnel module defines the descriptors.

use std::sync::Arc;
use std::time::Duration;

use peerpod_podnet::events::Events;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::relay_client::RelayClient;
use crate::sandbox::ports::Relay;
use crate::tunnel::{FdHandoff, WIREGUARD, Wireguard};

/// Interval of polls of the relay: the longest time that a failed data plane carries nothing.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(500);
/// Debounce of changes in the private namespace, where pods come and go too. `AT_MOST` bounds the delay.
const QUIET: Duration = Duration::from_millis(50);
const AT_MOST: Duration = Duration::from_millis(500);

/// Runs for ever.
pub(crate) async fn run(relay: RelayClient, wireguard: Arc<Wireguard>) {
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
            match supply(&relay, &wireguard).await {
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
    let held = relay.held(WIREGUARD, None).await?;
    let asked = wireguard.clone();
    let wanted =
        spawn_blocking(move || asked.wanted(held.as_ref())).await.map_err(|error| error.to_string())?;
    let Some(FdHandoff { detail, descriptors }) = wanted.map_err(|error| error.to_string())? else {
        return Ok(());
    };
    wireguard.taken(&relay.hand_off(WIREGUARD, None, detail, descriptors).await?);
    info!("the relay runs the encrypted tunnel");
    Ok(())
}
