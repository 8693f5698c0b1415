//! Parses and prints Kubernetes' quantities: `2`, `500m`, `4Gi`, `1.5e3`. Exact to a billionth and to twenty digits,
//! and rounded up below that, as Kubernetes does.

use std::fmt;
use std::str::FromStr;

/// One, in billionths.
const NANO: i128 = 1_000_000_000;
/// Largest quantity. As in Kubernetes it is 2⁶³−1, so a sum of two cannot overflow.
const MOST: i128 = (i64::MAX as i128) * NANO;
/// Longest text; longer ones are refused before any arithmetic.
const MOST_CHARACTERS: usize = 64;
/// Number of exact digits; further ones are rounded up.
const EXACT_DIGITS: usize = 20;

/// Non-negative amount in billionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Quantity(i128);

impl Quantity {
    pub(super) const ZERO: Quantity = Quantity(0);

    /// Returns the sum, limited to the largest quantity.
    #[must_use]
    pub(super) fn plus(self, other: Quantity) -> Quantity {
        Quantity((self.0 + other.0).min(MOST))
    }

    /// Returns the amount in whole units of `size`, rounded up: `ceil(1)` gives whole cores, `ceil(1 << 20)` MiB.
    pub(super) fn ceil(self, size: i64) -> i64 {
        let unit = i128::from(size.max(1)) * NANO;
        // Fits: it is at most 2⁶³−1, with a unit of one.
        i64::try_from((self.0 + unit - 1) / unit).unwrap_or(i64::MAX)
    }
}

impl FromStr for Quantity {
    type Err = String;

    fn from_str(text: &str) -> Result<Quantity, String> {
        let bad = |why| {
            let shown: String = text.chars().take(MOST_CHARACTERS).collect();
            format!("{shown:?} is no quantity of a resource: {why}")
        };
        if text.len() > MOST_CHARACTERS {
            return Err(bad("too long"));
        }
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
            return Err(bad("write it like 2, 500m, 1.5 or 4Gi"));
        }
        let scale = scale(suffix)
            .ok_or_else(|| bad("the suffix is none of n u m k M G T P E Ki Mi Gi Ti Pi Ei or an exponent"))?;
        let value = billionths(whole, fraction, scale);
        if negative && value > 0 {
            return Err(bad("negative"));
        }
        Ok(Quantity(value))
    }
}

/// Returns the power of ten of a suffix, and a further factor.
fn scale(suffix: &str) -> Option<(i32, i128)> {
    Some(match suffix {
        "n" => (-9, 1),
        "u" => (-6, 1),
        "m" => (-3, 1),
        "" => (0, 1),
        "k" => (3, 1),
        "M" => (6, 1),
        "G" => (9, 1),
        "T" => (12, 1),
        "P" => (15, 1),
        "E" => (18, 1),
        "Ki" => (0, 1 << 10),
        "Mi" => (0, 1 << 20),
        "Gi" => (0, 1 << 30),
        "Ti" => (0, 1 << 40),
        "Pi" => (0, 1 << 50),
        "Ei" => (0, 1 << 60),
        exponent => {
            let digits = exponent.strip_prefix(['e', 'E'])?;
            // Outside this range every number is rounded up to a billionth or is the largest quantity.
            (digits.parse::<i32>().ok()?.clamp(-100, 100), 1)
        }
    })
}

/// Returns the digits with this scale in billionths, rounded up and limited to the largest quantity.
fn billionths(whole: &str, fraction: &str, (power, factor): (i32, i128)) -> i128 {
    let digits = whole.bytes().chain(fraction.bytes()).skip_while(|digit| *digit == b'0');
    let digits: Vec<i128> = digits.map(|digit| i128::from(digit - b'0')).collect();
    let (kept, cut) = digits.split_at(digits.len().min(EXACT_DIGITS));
    if kept.is_empty() {
        return 0;
    }
    let up = i128::from(cut.iter().any(|digit| *digit != 0));
    let number = kept.iter().fold(0, |number, digit| number * 10 + digit) + up;
    // Both lengths are small: the text has at most 64 characters.
    let places = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let power = power + 9 + places(cut.len()) - places(fraction.len());
    let number = number * factor; // below 10²⁰ × 2⁶⁰
    match (10_i128.checked_pow(power.unsigned_abs()), power < 0) {
        (Some(ten), true) => ((number + (ten - 1).min(i128::MAX - number)) / ten).min(MOST),
        (None, true) => 1,
        (ten, false) => ten.and_then(|ten| ten.checked_mul(number)).unwrap_or(MOST).min(MOST),
    }
}

impl fmt::Display for Quantity {
    /// Writes the shortest exact decimal form of Kubernetes: whole, or with `m`, `u` or `n`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, suffix) in [(NANO, ""), (1_000_000, "m"), (1_000, "u")] {
            if self.0 % unit == 0 {
                return write!(f, "{}{suffix}", self.0 / unit);
            }
        }
        write!(f, "{}n", self.0)
    }
}

#[cfg(test)]
mod tests;
