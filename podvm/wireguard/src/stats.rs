//! Counts the activity of the data plane in plain atomics, which the metrics code reads.

use std::sync::atomic::{AtomicU64, Ordering};

/// Reason for dropping a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Not a WireGuard message, or too short for one.
    Malformed,
    /// For a peer or session that does not exist (any more).
    Unknown,
    /// A handshake without proof: a wrong key, or a replay.
    Handshake,
    /// A packet with an invalid seal.
    Forged,
    /// A packet that was received before, or far too late.
    Replayed,
    /// A packet that the peer may not send: another pod's network, another address.
    NotAllowed,
    /// A fragment from a VM, which the node's kernel would have to keep for reassembly.
    Fragment,
    /// No peer has the inner destination address.
    NoPeer,
    /// The peer's address is unknown, because it has not begun yet.
    NoEndpoint,
    /// There is no session, and its queue is full or its handshake failed.
    NoSession,
    /// The kernel did not accept the packet.
    Socket,
}

impl Reason {
    /// All reasons, in the order of [`Counters::drops`], with the values of the metric's label.
    pub const ALL: [(Reason, &'static str); 11] = [
        (Reason::Malformed, "malformed"),
        (Reason::Unknown, "unknown"),
        (Reason::Handshake, "handshake"),
        (Reason::Forged, "forged"),
        (Reason::Replayed, "replayed"),
        (Reason::NotAllowed, "not_allowed"),
        (Reason::Fragment, "fragment"),
        (Reason::NoPeer, "no_peer"),
        (Reason::NoEndpoint, "no_endpoint"),
        (Reason::NoSession, "no_session"),
        (Reason::Socket, "socket"),
    ];
}

/// Counters of one engine, over all peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters<N> {
    /// Handshakes completed with peers.
    pub handshakes: N,
    /// Handshakes answered with a cookie, because there were too many at once.
    pub cookies: N,
    /// Bytes of inner packets sealed.
    pub bytes_sent: N,
    /// Bytes of inner packets that left the tunnel.
    pub bytes_received: N,
    /// Inner packets sealed.
    pub packets_sent: N,
    /// Inner packets that left the tunnel.
    pub packets_received: N,
    /// Number of times that a peer was found at another address.
    pub roams: N,
    /// Packets dropped, by reason, in the order of [`Reason::ALL`].
    pub drops: [N; Reason::ALL.len()],
}

/// Running counters.
pub type Stats = Counters<AtomicU64>;
/// Values of the counters at one moment.
pub type Snapshot = Counters<u64>;

pub(crate) fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

impl Stats {
    pub(crate) fn sent(&self, bytes: usize) {
        add(&self.bytes_sent, bytes);
        add(&self.packets_sent, 1);
    }

    pub(crate) fn received(&self, bytes: usize) {
        add(&self.bytes_received, bytes);
        add(&self.packets_received, 1);
    }

    pub(crate) fn drop(&self, why: Reason) {
        // A reason that ALL lacks must not stop the data path.
        if let Some(counter) = self.drops.get(why as usize) {
            add(counter, 1);
        }
    }

    /// Reads all counters.
    pub fn snapshot(&self) -> Snapshot {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Snapshot {
            handshakes: of(&self.handshakes),
            cookies: of(&self.cookies),
            bytes_sent: of(&self.bytes_sent),
            bytes_received: of(&self.bytes_received),
            packets_sent: of(&self.packets_sent),
            packets_received: of(&self.packets_received),
            roams: of(&self.roams),
            drops: self.drops.each_ref().map(of),
        }
    }
}

impl Snapshot {
    /// Returns the number of packets dropped for this reason.
    pub fn dropped(&self, why: Reason) -> u64 {
        self.drops[why as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_place_and_its_own_label() {
        let stats = Stats::default();
        let mut labels = std::collections::HashSet::new();
        for (n, (why, label)) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, n);
            assert!(labels.insert(label));
            stats.drop(why);
            assert_eq!(stats.snapshot().dropped(why), 1);
        }
    }
}
