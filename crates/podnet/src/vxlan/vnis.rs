//! Draws the VNIs that tunnels may use, in the order of the attempts. Only the kernel knows whether one is free.

use std::io;

use crate::Error;

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
    pub(super) fn draw(self) -> Result<impl Iterator<Item = u32>, Error> {
        let random: Result<Vec<u32>, _> = (0..=RANDOM).map(|_| getrandom::u32()).collect();
        let mut random =
            random.map_err(|e| Error::kernel("draw a random VNI")(io::Error::other(e).into()))?;
        let (length, start) = (self.len(), random.pop().unwrap_or_default());
        // The bias is below one in 250, which has no consequence here.
        let walk = (0..length.min(WALK)).map(move |step| start % length + step);
        Ok(random.into_iter().chain(walk).map(move |offset| self.min + offset % length))
    }

    pub(super) fn exhausted(self, port: u16) -> Error {
        let Vnis { min, max } = self;
        let what = if self.len() <= WALK { "all" } else { "thousands of them" };
        Error::NoVni(port, format!("{what} of {min} to {max}"))
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
        let tried: Vec<u32> = vnis.draw().unwrap().collect();
        assert!(tried.iter().all(|vni| vnis.contains(*vni)));
        assert_eq!(tried.iter().collect::<HashSet<_>>().len(), 100);
        let text = vnis.exhausted(4789).to_string();
        assert!(text.contains("1000") && text.contains("1099") && text.contains("tunnel.vnis"), "{text}");
        let count = Vnis::default().draw().unwrap().count();
        assert_eq!(count, (RANDOM + WALK) as usize);
    }
}
