//! Maps keyed by stream number. Each message needs several look-ups, and SipHash would dominate their cost.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Map keyed by stream number.
///
/// The peer that chooses the numbers can make them collide, so this type suits maps with a small bound.
pub type IdMap<V> = HashMap<u32, V, BuildHasherDefault<IdHasher>>;

/// Hasher that spreads a number over all bits with one multiplication.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write_u32(&mut self, id: u32) {
        // 2^64 divided by the golden ratio: neighbouring numbers land far apart.
        self.0 = (u64::from(id) ^ self.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn neighbouring_numbers_differ_in_the_bits_that_a_map_uses() {
        let hash = |id: u32| {
            let mut hasher = IdHasher::default();
            hasher.write_u32(id);
            hasher.finish()
        };
        // A table of 1024 buckets uses the low bits as index and the highest seven bits to tell neighbours apart.
        let low: HashSet<u64> = (0..512).map(|n| hash(2 * n + 1) & 1023).collect();
        assert_eq!(low.len(), 512);
        let high: HashSet<u64> = (0..128).map(|n| hash(2 * n + 1) >> 57).collect();
        assert!(high.len() > 80, "{} of 128", high.len());
    }

    #[test]
    fn only_inserted_numbers_are_found() {
        let mut map = IdMap::default();
        for id in (1..2000).step_by(2) {
            assert_eq!(map.insert(id, id + 7), None);
        }
        assert!((1..2000).step_by(2).all(|id| map.get(&id) == Some(&(id + 7))));
        assert!((0..2000).step_by(2).all(|id| !map.contains_key(&id)));
    }
}
