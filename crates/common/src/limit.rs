//! Limits that hold off a peer: open connections and a rate.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

/// Limits of open connections, in total and from one address. Clones share the counts.
#[derive(Clone, Debug)]
pub struct ConnectionLimit {
    total: usize,
    per_address: usize,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    total: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// One counted connection; dropping it ends the count.
#[derive(Debug)]
pub struct Counted {
    open: Arc<Mutex<Open>>,
    address: IpAddr,
}

impl ConnectionLimit {
    /// Makes limits without open connections.
    pub fn new(total: usize, per_address: usize) -> ConnectionLimit {
        ConnectionLimit { total, per_address, open: Arc::default() }
    }

    /// Counts a connection; `None` if a limit is reached. An IPv4 peer of a dual-stack socket counts as the same peer.
    pub fn enter(&self, address: IpAddr) -> Option<Counted> {
        let address = address.to_canonical();
        let mut open = self.open.lock();
        let here = open.by_address.get(&address).copied().unwrap_or(0);
        if open.total >= self.total || here >= self.per_address {
            return None;
        }
        open.total += 1;
        open.by_address.insert(address, here + 1);
        Some(Counted { open: self.open.clone(), address })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut open = self.open.lock();
        open.total -= 1;
        if let Some(here) = open.by_address.get_mut(&self.address) {
            *here -= 1;
            if *here == 0 {
                open.by_address.remove(&self.address);
            }
        }
    }
}

/// Token bucket: a burst, then a rate.
#[derive(Clone, Copy, Debug)]
pub struct RateLimit {
    burst: f64,
    per_second: f64,
    left: f64,
    at: Instant,
}

impl RateLimit {
    /// Makes a full bucket.
    pub fn new(burst: f64, per_second: f64, now: Instant) -> RateLimit {
        RateLimit { burst, per_second, left: burst, at: now }
    }

    /// Takes a token; false if none is left.
    pub fn take(&mut self, now: Instant) -> bool {
        self.take_many(1.0, now)
    }

    /// Takes this many tokens; false if fewer are left, and then takes none.
    pub fn take_many(&mut self, tokens: f64, now: Instant) -> bool {
        self.left = self.filled(now);
        self.at = now;
        let allowed = self.left >= tokens;
        if allowed {
            self.left -= tokens;
        }
        allowed
    }

    /// Whether the bucket is as a new one.
    pub fn is_full(&self, now: Instant) -> bool {
        self.filled(now) >= self.burst
    }

    fn filled(&self, now: Instant) -> f64 {
        let earned = now.saturating_duration_since(self.at).as_secs_f64() * self.per_second;
        (self.left + earned).min(self.burst)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn connections_are_limited_in_total_and_per_address() {
        let limit = ConnectionLimit::new(5, 2);
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let enter = |text: &str| limit.enter(address(text));
        let mut held = vec![enter("10.0.0.7").unwrap(), enter("10.0.0.7").unwrap()];
        assert!(enter("10.0.0.7").is_none());
        assert!(enter("::ffff:10.0.0.7").is_none(), "the same peer");
        held.extend([enter("fd00::7").unwrap(), enter("fd00::8").unwrap(), enter("fd00::9").unwrap()]);
        assert!(enter("fd00::10").is_none(), "the total");
        held.remove(0);
        held.push(enter("10.0.0.7").unwrap());
        assert!(enter("10.0.0.7").is_none());
        drop(held);
        let open = limit.open.lock();
        assert!(open.total == 0 && open.by_address.is_empty(), "nothing is kept of those that have gone");
    }

    #[test]
    fn a_rate_limit_has_a_burst_and_then_its_rate() {
        let began = Instant::now();
        let mut limit = RateLimit::new(5.0, 2.0, began);
        let mut taken = |after| (0..100).filter(|_| limit.take(began + Duration::from_secs(after))).count();
        assert_eq!([taken(0), taken(1), taken(2), taken(100)], [5, 2, 2, 5]);
        let later = began + Duration::from_secs(200);
        assert!(limit.is_full(later) && !limit.take_many(5.5, later) && limit.take_many(4.5, later));
        assert!(!limit.take(later) && !limit.is_full(later));
    }
}
