//! Supplies the relay with the encrypted tunnel's descriptors: at the start, when it is another process, and when it
//! says that it no longer carries packets. Touches `relay-fds.sock` only; what is handed in is the tunnel's matter.

use std::{net::SocketAddr, time::Duration};

use tokio::{task::spawn_blocking, time::timeout};
use tracing::{info, warn};

use crate::{
    effects::GuestAddresses,
    relay_client::RelayClient,
    tunnel::{Carrier, HandIn},
};

/// How often the relay is asked whether all is well.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// After something that did not work.
const AGAIN: Duration = Duration::from_millis(500);

/// Runs for ever.
pub(crate) async fn run(relay: RelayClient, carrier: Carrier, addresses: GuestAddresses) -> &'static str {
    let mut epoch = relay.epoch();
    let mut said = String::new();
    loop {
        let met = *epoch.borrow_and_update() > 0;
        let mut pause = LOOK_EVERY;
        if met {
            let found = addresses.now(relay.listen()).unwrap_or_default();
            carrier.found_at(found.iter().map(SocketAddr::ip).collect());
            match supply(&relay, &carrier).await {
                Ok(()) => said.clear(),
                Err(why) => {
                    pause = AGAIN;
                    if why != said {
                        warn!(why, "the relay does not carry the encrypted tunnel; trying again");
                        said = why;
                    }
                }
            }
        }
        // Another relay, or time.
        drop(timeout(pause, epoch.changed()).await);
    }
}

async fn supply(relay: &RelayClient, carrier: &Carrier) -> Result<(), String> {
    let held = relay.held(carrier.kind(), None).await.map_err(|error| error.to_string())?;
    let wanted = {
        let carrier = carrier.clone();
        spawn_blocking(move || carrier.wanted(held.as_ref())).await.map_err(|error| error.to_string())?
    };
    let Some(HandIn { detail, descriptors }) = wanted.map_err(|error| error.to_string())? else {
        return Ok(());
    };
    let taken = relay.hand_in(carrier.kind(), None, detail.0, descriptors).await;
    carrier.taken(&taken.map_err(|error| error.to_string())?);
    info!("the relay carries the encrypted tunnel");
    Ok(())
}
