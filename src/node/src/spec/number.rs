//! Parses numbers as the two shims print them. `""` and `"0"` both mean that nothing was asked for.

/// Parses a whole number up to `max`; 0: not asked for.
pub(super) fn whole(text: &str, max: u64) -> Result<u64, String> {
    if text.is_empty() {
        return Ok(0);
    }
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err("not a whole number; write digits only, without a unit".to_owned());
    }
    text.parse().ok().filter(|n| *n <= max).ok_or_else(|| too_large(max))
}

/// Parses a decimal number up to `max`, rounded up; 0: not asked for.
///
/// The Rust shim adds CPU limits as 32-bit floats, so `2.0000002` stands for 2. The unit is a thousandth, as in
/// Kubernetes, and a rest of less than half a thousandth is noise. Anything above zero is at least one.
pub(super) fn rounded_up(text: &str, max: u64) -> Result<u32, String> {
    if text.is_empty() {
        return Ok(0);
    }
    let (whole_part, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole_part) || !digits(fraction) {
        return Err("not a number; write it like 2 or 1.5".to_owned());
    }
    let whole_part: u64 = whole_part.parse().map_err(|_| too_large(max))?;
    let thousandths = fraction.bytes().chain(*b"0000").take(4).fold(0, |n, b| n * 10 + u64::from(b - b'0'));
    let above_zero = fraction.bytes().any(|b| b != b'0');
    let rounded = match (whole_part, thousandths) {
        (0, _) => u64::from(above_zero),
        // In tenths of thousandths: 5 is half a thousandth.
        (n, 0..5) => n,
        (n, _) => n.saturating_add(1),
    };
    u32::try_from(rounded).ok().filter(|n| u64::from(*n) <= max).ok_or_else(|| too_large(max))
}

fn too_large(max: u64) -> String {
    format!("larger than in any VM; write at most {max}")
}
