//! Counts the activity of one endpoint; other tasks may read the counters while it runs.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};

/// Counters of an endpoint since its creation, not read together atomically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Stream bytes read from local sockets and passed to the session.
    pub bytes_to_peer: u64,
    /// Stream bytes received from the peer.
    pub bytes_from_peer: u64,
    /// Sequenced records sent for the first time.
    pub records_to_peer: u64,
    /// Sequenced records received.
    pub records_from_peer: u64,
    /// Finished handshakes; reconnects are one fewer.
    pub links: u64,
    /// Sessions lost with their streams.
    pub sessions_lost: u64,
    /// Records sent again after a reconnect.
    pub replayed: u64,
    /// Open local connections.
    pub connections: usize,
    /// Dialled connections that are open or being opened.
    pub dialled: usize,
    /// Buffered bytes: unacknowledged, waiting for credit, or waiting for a local socket.
    pub buffered: usize,
    /// Whether a transport is up.
    pub up: bool,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) bytes_to_peer: AtomicU64,
    pub(super) bytes_from_peer: AtomicU64,
    pub(super) records_to_peer: AtomicU64,
    pub(super) records_from_peer: AtomicU64,
    pub(super) links: AtomicU64,
    pub(super) sessions_lost: AtomicU64,
    pub(super) replayed: AtomicU64,
    pub(super) connections: AtomicUsize,
    pub(super) dialled: AtomicUsize,
    pub(super) buffered: AtomicUsize,
    pub(super) up: AtomicUsize,
}

impl Counters {
    pub(super) fn read(&self) -> Stats {
        Stats {
            bytes_to_peer: self.bytes_to_peer.load(Relaxed),
            bytes_from_peer: self.bytes_from_peer.load(Relaxed),
            records_to_peer: self.records_to_peer.load(Relaxed),
            records_from_peer: self.records_from_peer.load(Relaxed),
            links: self.links.load(Relaxed),
            sessions_lost: self.sessions_lost.load(Relaxed),
            replayed: self.replayed.load(Relaxed),
            connections: self.connections.load(Relaxed),
            dialled: self.dialled.load(Relaxed),
            buffered: self.buffered.load(Relaxed),
            up: self.up.load(Relaxed) != 0,
        }
    }
}
