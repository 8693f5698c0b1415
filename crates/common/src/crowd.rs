//! Limits connections that have proven nothing yet, in total and of one group of peers. The newest evicts the oldest: a
//! peer that only stalls cannot keep others out. A peer that has spoken keeps its place for a moment: many good peers
//! do not evict each other.

use std::collections::VecDeque;
use std::future::Future;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

/// Time from its start for which a connection keeps its place if its peer has spoken.
const KEPT: Duration = Duration::from_secs(1);

/// Returns the group of a peer that may choose its address: an IPv4 address, or the /64 of an IPv6 address.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

/// Open connections, each with the task that serves it. Dropping it ends the tasks.
#[derive(Debug)]
pub struct Crowd<T> {
    most: usize,
    open: JoinSet<T>,
    /// Oldest first.
    places: VecDeque<Place>,
}

#[derive(Debug)]
struct Place {
    group: IpAddr,
    since: Instant,
    spoke: Arc<AtomicBool>,
    serving: AbortHandle,
}

impl Place {
    fn is_kept(&self) -> bool {
        self.spoke.load(Relaxed) && self.since.elapsed() < KEPT
    }
}

impl<T: Send + 'static> Crowd<T> {
    /// Makes an empty crowd with a limit in total.
    pub fn new(most: usize) -> Crowd<T> {
        Crowd { most, open: JoinSet::new(), places: VecDeque::new() }
    }

    /// Adds a connection of a group with this limit. The future that serves it sets `spoke` when its peer has spoken.
    /// At a limit, closes the oldest connection of the group, or of all, that does not keep its place; without one it
    /// closes the new connection. Returns whether one was closed.
    pub fn add(
        &mut self,
        group: IpAddr,
        most_of_one: usize,
        spoke: Arc<AtomicBool>,
        serving: impl Future<Output = T> + Send + 'static,
    ) -> bool {
        let group_is_full = self.places.iter().filter(|place| place.group == group).count() >= most_of_one;
        let is_full = group_is_full || self.places.len() >= self.most;
        if is_full {
            let leaves = |place: &Place| (!group_is_full || place.group == group) && !place.is_kept();
            let oldest = self.places.iter().position(leaves);
            let Some(evicted) = oldest.and_then(|at| self.places.remove(at)) else { return true };
            evicted.serving.abort();
        }
        let serving = self.open.spawn(serving);
        self.places.push_back(Place { group, since: Instant::now(), spoke, serving });
        is_full
    }

    /// Waits until a task ends, and returns its result; `None`: it was evicted, or it panicked. Pending forever while
    /// there is none. Cancel safe.
    pub async fn leave(&mut self) -> Option<T> {
        let (id, result) = match self.open.join_next_with_id().await {
            Some(Ok((id, result))) => (id, Some(result)),
            Some(Err(error)) => (error.id(), None),
            None => return std::future::pending().await,
        };
        self.places.retain(|place| place.serving.id() != id);
        result
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tokio::time::advance;

    use super::*;

    const OURS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const LOUD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9));

    fn silent() -> Arc<AtomicBool> {
        Arc::default()
    }

    fn spoke() -> Arc<AtomicBool> {
        Arc::new(AtomicBool::new(true))
    }

    #[tokio::test]
    async fn connections_are_bounded_and_the_newest_evicts_silent_ones() {
        let mut crowd = Crowd::new(8);
        let evicted = (0..12).filter(|_| crowd.add(LOUD, 4, silent(), pending())).count();
        assert_eq!((evicted, crowd.places.len()), (8, 4), "of one group");
        let address = |n| IpAddr::from([10, 0, 1, n]);
        let evicted = (0..16).filter(|n| crowd.add(address(*n), 4, silent(), pending())).count();
        assert_eq!((evicted, crowd.places.len()), (12, 8));
        assert!(crowd.places.iter().all(|place| place.group != LOUD), "the oldest left");
        crowd.add(OURS, 4, silent(), ready(7));
        while crowd.leave().await != Some(7) {}
        assert_eq!(crowd.places.len(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_has_spoken_keeps_its_place_for_a_moment() {
        let mut crowd = Crowd::new(4);
        let groups = |crowd: &Crowd<()>| crowd.places.iter().map(|place| place.group).collect::<Vec<_>>();
        let ids = |crowd: &Crowd<()>| crowd.places.iter().map(|place| place.serving.id()).collect::<Vec<_>>();
        assert!((0..2).all(|_| !crowd.add(OURS, 2, spoke(), pending())));
        let first = ids(&crowd);
        assert!((0..9).all(|_| crowd.add(OURS, 2, spoke(), pending())), "the newest are closed");
        assert_eq!(ids(&crowd), first);
        assert!((0..2).all(|_| !crowd.add(LOUD, 4, silent(), pending())));
        let stranger = IpAddr::from([10, 0, 0, 5]);
        assert!((0..2).all(|_| crowd.add(stranger, 4, spoke(), pending())));
        assert_eq!(groups(&crowd), [OURS, OURS, stranger, stranger], "silent ones leave");
        assert!(crowd.add(LOUD, 4, silent(), pending()), "all keep their places");
        assert_eq!(groups(&crowd), [OURS, OURS, stranger, stranger]);
        advance(KEPT).await;
        assert!(crowd.add(LOUD, 4, silent(), pending()), "the oldest leaves");
        assert_eq!(groups(&crowd), [OURS, stranger, stranger, LOUD]);
    }

    #[test]
    fn an_ipv6_peer_has_one_group_for_all_addresses_of_its_network() {
        let group = |text: &str| network(text.parse().unwrap()).to_string();
        assert_eq!(group("fd00:1:2:3:4:5:6:7"), "fd00:1:2:3::");
        assert_eq!(group("10.0.0.7"), "10.0.0.7");
        assert_eq!(group("::ffff:10.0.0.7"), "10.0.0.7");
    }
}
