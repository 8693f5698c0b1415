//! Which VNIs tunnels may have, and in which order they are tried. Whether one is free only the kernel knows.

use crate::Error;
use crate::netlink;

const MAX: u32 = 0xff_ffff;
/// Random ones that are tried first; with 10 000 tunnels on a node one in 1 700 of all collides.
const RANDOM: u32 = 16;
/// Then a narrow range is gone through, at most so far (each costs some 30 µs).
const WALK: u32 = 4096;

/// A range of VNIs, ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vnis {
    min: u32,
    max: u32,
}

impl Default for Vnis {
    /// All there are.
    fn default() -> Vnis {
        Vnis { min: 1, max: MAX }
    }
}

impl Vnis {
    /// The range, where it is one: VNIs have 24 bits, and 0 is what devices without one say.
    pub fn new(min: u32, max: u32) -> Option<Vnis> {
        (1 <= min && min <= max && max <= MAX).then_some(Vnis { min, max })
    }

    /// Whether a VNI is in it.
    pub fn contains(&self, vni: u32) -> bool {
        (self.min..=self.max).contains(&vni)
    }

    fn len(&self) -> u32 {
        self.max - self.min + 1
    }

    /// VNIs to try one after the other: random ones, then (a part of) the range in its order from a random place.
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
    /// The next VNI to try; `None` when enough were.
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
            // The bias is below one in 250: it is of no consequence here.
            Ok(random) => Some(random % self.range.len()),
            Err(e) => {
                self.failed = Some(e);
                None
            }
        }
    }

    /// What to say when there was no next one.
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
    fn a_narrow_range_is_tried_whole_and_a_wide_one_not_for_ever() {
        let vnis = Vnis::new(1000, 1099).unwrap();
        let mut draw = vnis.draw();
        let mut tried = Vec::new();
        while let Some(vni) = draw.next() {
            tried.push(vni);
        }
        assert!(tried.iter().all(|vni| vnis.contains(*vni)));
        assert_eq!(tried.iter().collect::<HashSet<_>>().len(), 100);
        let text = draw.exhausted(4789).to_string();
        assert!(text.contains("1000") && text.contains("1099") && text.contains("tunnel.vni-max"), "{text}");
        let mut draw = Vnis::default().draw();
        let count = std::iter::from_fn(|| draw.next()).count();
        assert_eq!(count, (RANDOM + WALK) as usize);
    }
}
