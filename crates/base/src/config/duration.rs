//! Parses and formats durations: `250ms`, `5s`, `2m`, `1h30m`. A number without a unit is refused: it is ambiguous.

use std::time::Duration;

use super::value::Bad;

/// Units from long to short, in milliseconds.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Longest duration, ten years; more is a typo, and sums with a clock must not overflow.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Parses a duration: whole numbers with units `d h m s ms`, in any order. `0` alone is allowed.
pub fn parse_duration(text: &str) -> Result<Duration, Bad> {
    let text = text.trim();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    if text.is_empty() {
        return Err(Bad::new("not a duration", "write it like 250ms, 5s, 2m or 1h30m"));
    }
    if text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Bad::new("a duration without a unit", &format!("write {text}s, {text}m or {text}ms")));
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let (part, after) = one_part(rest)?;
        rest = after;
        total = total.checked_add(part).ok_or_else(too_long)?;
    }
    if total > LONGEST { Err(too_long()) } else { Ok(total) }
}

fn too_long() -> Bad {
    Bad::new("longer than ten years", "write a shorter one, like 15m")
}

/// Parses a number with its unit, and returns the rest.
fn one_part(text: &str) -> Result<(Duration, &str), Bad> {
    let malformed = || Bad::new("not a duration", "write it like 250ms, 5s, 2m or 1h30m");
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let letters = text[digits..].bytes().take_while(u8::is_ascii_alphabetic).count();
    let (number, rest) = text.split_at(digits);
    let (unit, rest) = rest.split_at(letters);
    let number: u64 = number.parse().map_err(|_| malformed())?;
    let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(malformed)?;
    let millis = number.checked_mul(*millis).ok_or_else(too_long)?;
    Ok((Duration::from_millis(millis), rest))
}

/// Returns the shortest text that [`parse_duration`] reads as the same duration (whole milliseconds).
pub fn format_duration(duration: Duration) -> String {
    let mut millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    if millis == 0 {
        return "0s".to_owned();
    }
    let mut out = String::new();
    for (name, unit) in UNITS {
        let count = millis / unit;
        if count > 0 {
            out.push_str(&format!("{count}{name}"));
            millis %= unit;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_read_with_their_units() {
        for (text, millis) in [
            ("250ms", 250),
            ("5s", 5_000),
            ("2m", 120_000),
            ("1h30m", 5_400_000),
            ("0", 0),
            ("1d", 86_400_000),
        ] {
            assert_eq!(
                parse_duration(text).map_err(|b| b.to_string()),
                Ok(Duration::from_millis(millis)),
                "{text}"
            );
        }
    }

    #[test]
    fn an_invalid_duration_is_refused_with_advice() {
        for text in
            ["5", "", "abc", "10abc", "-5s", "1.5s", "5 s", "s", "99999999999999999999s", "99999d", "5ſ"]
        {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert_eq!(
            parse_duration("5").map_err(|bad| bad.to_string()),
            Err("a duration without a unit; write 5s, 5m or 5ms".to_owned())
        );
    }

    proptest! {
        #[test]
        fn a_printed_duration_reads_back_the_same(millis in 0u64..300_000_000_000) {
            let duration = Duration::from_millis(millis);
            prop_assert_eq!(parse_duration(&format_duration(duration)).ok(), Some(duration));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,40}") {
            prop_assert!(parse_duration(&text).map_or(true, |duration| duration <= LONGEST));
        }
    }
}
