//! How the door stands still: first nobody is let in, then nothing more is read, then what was read is acted upon, then
//! nothing more is written. What is left of each connection is then in its hands, and what waits in the queue's.

use std::{
    future::Future,
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot};

use super::{Door, DoorState, Event, FrozenDoor, Pause, conn::Order};

/// For each of the steps.
const STEP: Duration = Duration::from_secs(1);
/// Events that are looked at before the next step at most; a shim that talks without end is held by then.
const EVENTS: usize = 4096;

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the connections to hypervisor.sock did not stand still")
}

impl Door {
    /// Stands still until `thaw` is used or its other end dropped.
    pub(super) async fn freeze(
        &mut self,
        incoming: &mut mpsc::Receiver<Event>,
        shown: oneshot::Sender<FrozenDoor>,
        thaw: oneshot::Receiver<()>,
    ) {
        let frozen = self.hold(incoming).await;
        if shown.send(frozen).is_ok() {
            // Used or dropped is the same.
            drop(thaw.await);
        }
        drop(self.accepting.send(Pause::Go));
        for peer in self.peers.values() {
            // One that is gone has said so, or will.
            drop(peer.orders.send(Order::Go));
        }
    }

    async fn hold(&mut self, incoming: &mut mpsc::Receiver<Event>) -> io::Result<(DoorState, Vec<OwnedFd>)> {
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
        // Those that end instead say so by an event.
        drop(self.meanwhile(incoming, join_all(held)).await?);
        self.take_all(incoming);

        let mut asked = Vec::new();
        for (conn, peer) in &self.peers {
            let (done, shown) = oneshot::channel();
            drop(peer.orders.send(Order::Show(done)));
            asked.push(async { (*conn, shown.await) });
        }
        let all = tokio::time::timeout(STEP, join_all(asked)).await.map_err(|_| late())?;
        let mut state = DoorState { queue: self.queue.state(Instant::now()), ..DoorState::default() };
        let mut sockets = Vec::new();
        for (conn, shown) in all {
            // One that has ended meanwhile is left out.
            if let Ok(shown) = shown {
                let (conn_state, socket) = shown?;
                state.conns.push((conn, conn_state));
                sockets.push(socket);
            }
        }
        for (id, conn) in &self.creators {
            state.created.push((*conn, id.to_string(), self.states.pod(id).to_string()));
        }
        Ok((state, sockets))
    }

    /// Waits, and does not leave those waiting who have something to say.
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
