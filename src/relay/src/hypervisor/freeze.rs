//! Freezes the hypervisor proxy in four steps: accept no connections, read no more, handle everything that was read,
//! write no more. After that each connection holds the rest of its data, and the queue holds the waiting calls.

use std::future::Future;
use std::io;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot};

use super::conn::Order;
use super::{Event, FrozenHypervisor, HypervisorProxy, HypervisorState, Pause};

/// Time limit of each step.
const STEP: Duration = Duration::from_secs(1);
/// Limit of events handled before the next step; a shim that sends without end is held by then.
const EVENTS: usize = 4096;

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the connections to hypervisor.sock did not pause in time")
}

impl HypervisorProxy {
    /// Freezes the proxy until `thaw` is used or its other end is dropped.
    pub(super) async fn freeze(
        &mut self,
        incoming: &mut mpsc::Receiver<Event>,
        shown: oneshot::Sender<FrozenHypervisor>,
        thaw: oneshot::Receiver<()>,
    ) {
        let frozen = self.hold(incoming).await;
        if shown.send(frozen).is_ok() {
            // Use and drop have the same meaning.
            drop(thaw.await);
        }
        drop(self.accepting.send(Pause::Go));
        for peer in self.peers.values() {
            // A connection that is gone has sent its `Closed` event, or will send it.
            drop(peer.orders.send(Order::Go));
        }
    }

    async fn hold(&mut self, incoming: &mut mpsc::Receiver<Event>) -> FrozenHypervisor {
        let (done, held) = oneshot::channel();
        drop(self.accepting.send(Pause::Hold(done)));
        self.meanwhile(incoming, held).await?.map_err(|_| late())?;
        self.take_all(incoming);

        let mut held = Vec::new();
        for peer in self.peers.values() {
            let (done, one) = oneshot::channel();
            drop(peer.orders.send(Order::Hold(done)));
            held.push(one);
        }
        // A connection that ends instead sends an event.
        drop(self.meanwhile(incoming, join_all(held)).await?);
        self.take_all(incoming);

        let mut asked = Vec::new();
        for (conn, peer) in &self.peers {
            let (done, shown) = oneshot::channel();
            drop(peer.orders.send(Order::Show(done)));
            asked.push(async { (*conn, shown.await) });
        }
        let all = tokio::time::timeout(STEP, join_all(asked)).await.map_err(|_| late())?;
        let mut state =
            HypervisorState { queue: self.queue.state(Instant::now()), ..HypervisorState::default() };
        let mut sockets = Vec::new();
        for (conn, shown) in all {
            // A connection that has ended meanwhile is left out.
            if let Ok(shown) = shown {
                let (conn_state, socket) = shown?;
                state.conns.push((conn, conn_state));
                sockets.push(socket);
            }
        }
        for (id, conn) in &self.creators {
            state.created.push((*conn, id.clone(), self.states.pod(id).to_string()));
        }
        Ok((state, sockets))
    }

    /// Waits for a future and handles events meanwhile, so that their senders do not block.
    async fn meanwhile<T>(
        &mut self,
        incoming: &mut mpsc::Receiver<Event>,
        what: impl Future<Output = T>,
    ) -> io::Result<T> {
        let until = tokio::time::sleep(STEP);
        tokio::pin!(what, until);
        loop {
            tokio::select! {
                biased;
                done = &mut what => return Ok(done),
                () = &mut until => return Err(late()),
                event = incoming.recv() => {
                    let Some(event) = event else { return Err(late()) };
                    self.take(event, Instant::now());
                    self.act();
                }
            }
        }
    }

    fn take_all(&mut self, incoming: &mut mpsc::Receiver<Event>) {
        for _ in 0..EVENTS {
            let Ok(event) = incoming.try_recv() else { return };
            self.take(event, Instant::now());
            self.act();
        }
    }
}
