//! Limits connections that have proven nothing yet, in total and of one group of peers. The newest evicts the oldest: a
//! peer that only stalls cannot keep others out.

use std::collections::VecDeque;
use std::future::Future;
use std::net::{IpAddr, Ipv6Addr};

use tokio::task::{AbortHandle, Id, JoinSet};

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
    most_of_one: usize,
    open: JoinSet<T>,
    /// Oldest first.
    places: VecDeque<(Id, IpAddr, AbortHandle)>,
}

impl<T: Send + 'static> Crowd<T> {
    /// Makes an empty crowd with limits in total and of one group.
    pub fn new(most: usize, most_of_one: usize) -> Crowd<T> {
        Crowd { most, most_of_one, open: JoinSet::new(), places: VecDeque::new() }
    }

    /// Adds a connection of a group. At a limit, evicts the oldest of its group, or of all, and returns true.
    pub fn add(&mut self, group: IpAddr, serving: impl Future<Output = T> + Send + 'static) -> bool {
        let of_it = |place: &&(Id, IpAddr, AbortHandle)| place.1 == group;
        let leaves = if self.places.iter().filter(of_it).count() >= self.most_of_one {
            self.places.iter().position(|place| place.1 == group)
        } else {
            (self.places.len() >= self.most).then_some(0)
        };
        let evicted = leaves.and_then(|at| self.places.remove(at));
        if let Some((.., serving)) = &evicted {
            serving.abort();
        }
        let serving = self.open.spawn(serving);
        self.places.push_back((serving.id(), group, serving));
        evicted.is_some()
    }

    /// Waits until a task ends, and returns its result; `None`: it was evicted, or it panicked. Pending forever while
    /// there is none. Cancel safe.
    pub async fn leave(&mut self) -> Option<T> {
        let (id, result) = match self.open.join_next_with_id().await {
            Some(Ok((id, result))) => (id, Some(result)),
            Some(Err(error)) => (error.id(), None),
            None => return std::future::pending().await,
        };
        self.places.retain(|(other, ..)| *other != id);
        result
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn connections_are_bounded_and_the_newest_is_always_accepted() {
        let mut crowd = Crowd::new(8, 4);
        let (loud, ours) = (IpAddr::from([10, 0, 0, 9]), IpAddr::from([10, 0, 0, 1]));
        let evicted = (0..12).filter(|_| crowd.add(loud, pending())).count();
        assert_eq!((evicted, crowd.places.len()), (8, 4), "of one group");
        let evicted = (0..16).filter(|n| crowd.add(IpAddr::from([10, 0, 1, *n]), pending())).count();
        assert_eq!((evicted, crowd.places.len()), (12, 8));
        assert!(crowd.places.iter().all(|(_, group, _)| *group != loud), "the oldest left");
        crowd.add(ours, ready(7));
        while crowd.leave().await != Some(7) {}
        assert_eq!(crowd.places.len(), 7);
    }

    #[test]
    fn an_ipv6_peer_has_one_group_for_all_addresses_of_its_network() {
        let group = |text: &str| network(text.parse().unwrap()).to_string();
        assert_eq!(group("fd00:1:2:3:4:5:6:7"), "fd00:1:2:3::");
        assert_eq!(group("10.0.0.7"), "10.0.0.7");
        assert_eq!(group("::ffff:10.0.0.7"), "10.0.0.7");
    }
}
