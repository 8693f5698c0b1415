//! Hears what changes around one running pod: in its network namespace, on the way to its VM, and where its guest finds
//! an encrypted tunnel. Says only that something did; the sandbox looks.

use std::{net::IpAddr, sync::Arc, time::Duration};

use peerpod_link::net::events::Events;
use tokio::{
    sync::{Semaphore, watch},
    time::sleep,
};
use tracing::debug;

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
        loop {
            match self.events().await {
                Ok(mut events) => {
                    while events.settled(QUIET, AT_MOST).await.is_ok() {
                        self.sender.send_modify(|heard| *heard += 1);
                    }
                }
                Err(error) if error.permanent => return,
                Err(error) => debug!(error = error.text, "cannot hear the pod's network; trying again"),
            }
            sleep(PAUSE).await;
            self.sender.send_modify(|heard| *heard += 1); // whatever happened meanwhile
        }
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
