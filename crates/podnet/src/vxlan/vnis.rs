//! Draws the VNIs that tunnels may use, in the order of the attempts. Only the kernel knows whether one is free.

use crate::Error;
use crate::netlink;

const MAX: u32 = 0xff_ffff;
/// Number of random VNIs that are tried first; with 10 000 tunnels on a node one in 1 700 collides.
const RANDOM: u32 = 16;
/// Number of VNIs of a narrow range that are then tried in order (each costs some 30 µs).
const WALK: u32 = 4096;

/// A range of VNIs, ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vnis {
    min: u32,
    max: u32,
}

impl Default for Vnis {
    /// Returns the range of all VNIs.
    fn default() -> Vnis {
        Vnis { min: 1, max: MAX }
    }
}

impl Vnis {
    /// Returns the range if it is valid: VNIs have 24 bits, and devices without a VNI report 0.
    pub fn new(min: u32, max: u32) -> Option<Vnis> {
        (1 <= min && min <= max && max <= MAX).then_some(Vnis { min, max })
    }

    /// Returns whether the range contains a VNI.
    pub fn contains(&self, vni: u32) -> bool {
        (self.min..=self.max).contains(&vni)
    }

    fn len(&self) -> u32 {
        self.max - self.min + 1
    }

    /// Returns VNIs to try one after the other: random ones, then (a part of) the range in order from a random place.
    pub(super) fn draw(self) -> Draw {
        Draw { range: self, drawn: 0, start: None, failed: None }
    }
}

pub(super) struct Draw {
    range: Vnis,
    drawn: u32,
    start: Option<u32>,
    failed: Option<getrandom::Error>,
}

impl Draw {
    /// Returns the next VNI to try; `None` after the last attempt.
    pub(super) fn next(&mut self) -> Option<u32> {
        let length = self.range.len();
        let offset = if self.drawn < RANDOM {
            self.random()?
        } else {
            let walked = self.drawn - RANDOM;
            if walked >= length.min(WALK) {
                return None;
            }
            let start = match self.start {
                Some(start) => start,
                None => {
                    let start = self.random()?;
                    self.start = Some(start);
                    start
                }
            };
            (start + walked) % length
        };
        self.drawn += 1;
        Some(self.range.min + offset)
    }

    fn random(&mut self) -> Option<u32> {
        match getrandom::u32() {
            // The bias is below one in 250, which has no consequence here.
            Ok(random) => Some(random % self.range.len()),
            Err(e) => {
                self.failed = Some(e);
                None
            }
        }
    }

    /// Returns the error for a draw without a next VNI.
    pub(super) fn exhausted(&self, port: u16) -> Error {
        if let Some(e) = self.failed {
            return Error::kernel("draw a random VNI")(netlink::Error::Socket(std::io::Error::other(e)));
        }
        let Vnis { min, max } = self.range;
        let what = if self.range.len() <= WALK { "all" } else { "thousands of them" };
        Error::NoVni { port, min, max, what }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_range_is_of_24_bits_without_zero() {
        for (min, max) in [(0, 5), (6, 5), (1, 1 << 24)] {
            assert_eq!(Vnis::new(min, max), None);
        }
        let vnis = Vnis::new(5, 7).unwrap();
        assert!(!vnis.contains(4) && vnis.contains(5) && vnis.contains(7) && !vnis.contains(8));
    }

    #[test]
    fn a_narrow_range_is_tried_completely_and_a_wide_one_in_part() {
        let vnis = Vnis::new(1000, 1099).unwrap();
        let mut draw = vnis.draw();
        let mut tried = Vec::new();
        while let Some(vni) = draw.next() {
            tried.push(vni);
        }
        assert!(tried.iter().all(|vni| vnis.contains(*vni)));
        assert_eq!(tried.iter().collect::<HashSet<_>>().len(), 100);
        let text = draw.exhausted(4789).to_string();
        assert!(text.contains("1000") && text.contains("1099") && text.contains("tunnel.vnis"), "{text}");
        let mut draw = Vnis::default().draw();
        let count = std::iter::from_fn(|| draw.next()).count();
        assert_eq!(count, (RANDOM + WALK) as usize);
    }
}
