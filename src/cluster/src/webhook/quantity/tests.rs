use proptest::prelude::*;

use super::*;

fn q(text: &str) -> Quantity {
    text.parse().unwrap()
}

#[test]
fn reads_every_suffix() {
    for (text, nanos) in [
        ("0", 0),
        ("1", NANO),
        ("+1", NANO),
        ("-0", 0),
        ("1.", NANO),
        (".5", NANO / 2),
        ("1n", 1),
        ("1u", 1_000),
        ("200m", NANO / 5),
        ("1k", 1_000 * NANO),
        ("2M", 2_000_000 * NANO),
        ("3G", 3_000_000_000 * NANO),
        ("4T", 4_000_000_000_000 * NANO),
        ("5P", 5_000_000_000_000_000 * NANO),
        ("6E", 6_000_000_000_000_000_000 * NANO),
        ("1Ki", 1024 * NANO),
        ("1Mi", (1 << 20) * NANO),
        ("4Gi", (4 << 30) * NANO),
        ("1Ti", (1 << 40) * NANO),
        ("1Pi", (1 << 50) * NANO),
        ("1Ei", (1 << 60) * NANO),
        ("1.5e3", 1500 * NANO),
        ("12E2", 1200 * NANO),
        ("5e-1", NANO / 2),
        ("0.1Ki", 1024 * NANO / 10),
    ] {
        assert_eq!(q(text).0, nanos, "{text}");
    }
}

#[test]
fn rounds_up_below_a_billionth() {
    for text in ["0.1n", "1e-40", "0.00000000000000000000000000000001", "1e-99999"] {
        let read = text.parse::<Quantity>();
        assert_eq!(read.map(|q| q.0), Ok(1), "{text}");
    }
    assert_eq!(q("1.0000000000000000000000000000001"), q("1.000000001"));
}

#[test]
fn stays_within_the_range() {
    for text in ["1e99", "9999999999999999999999999999999999999999", "9223372036854775807Ei", "8Ei"] {
        assert_eq!(q(text).0, MOST, "{text}");
    }
    assert_eq!(q("8E").plus(q("8E")).0, MOST);
    assert_eq!(q("8Ei").ceil(1), i64::MAX);
}

#[test]
fn invalid_quantities_are_refused() {
    for text in [
        "", "-", ".", "m", "1 ", " 1", "1.2.3", "1mm", "1K", "1ki", "1e", "1e1.5", "0x1", "-1", "-1m", "1٣",
        "١", "NaN", "1Gii",
    ] {
        assert!(text.parse::<Quantity>().is_err(), "{text}");
    }
    assert!("1".repeat(65).parse::<Quantity>().is_err());
}

#[test]
fn is_counted_in_whole_units_rounded_up() {
    assert_eq!([q("200m").ceil(1), q("1500m").ceil(1), q("3").ceil(1)], [1, 2, 3]);
    assert_eq!([q("4Gi").ceil(1 << 20), q("1").ceil(1 << 20), q("1025Ki").ceil(1 << 20)], [4096, 1, 2]);
}

proptest! {
    #[test]
    fn never_panics(text in "\\PC{0,80}") {
        drop(text.parse::<Quantity>());
    }

    #[test]
    fn never_panics_on_plausible_input(text in "[+-]?[0-9]{0,40}\\.?[0-9]{0,30}([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,12})?") {
        drop(text.parse::<Quantity>());
    }

    #[test]
    fn is_read_again_as_it_was_shown(nanos in 0..=MOST) {
        let shown = Quantity(nanos).to_string();
        // Twenty digits are exact; the range has 28.
        if shown.trim_end_matches(char::is_alphabetic).trim_end_matches('0').len() <= EXACT_DIGITS {
            prop_assert_eq!(q(&shown), Quantity(nanos));
        } else {
            prop_assert!(q(&shown) >= Quantity(nanos));
        }
    }

    #[test]
    fn milli_and_fraction_are_the_same(milli in 0_u32..1_000_000) {
        prop_assert_eq!(q(&format!("{milli}m")), q(&format!("{}.{:03}", milli / 1000, milli % 1000)));
    }

    #[test]
    fn order_is_that_of_the_numbers(a in 0_u64..1 << 50, b in 0_u64..1 << 50) {
        prop_assert_eq!(q(&format!("{a}Ki")).cmp(&q(&format!("{b}Ki"))), a.cmp(&b));
    }

    #[test]
    fn sums_do_not_depend_on_the_order(a in 0..=MOST, b in 0..=MOST, c in 0..=MOST) {
        let [a, b, c] = [a, b, c].map(Quantity);
        prop_assert_eq!(a.plus(b).plus(c), c.plus(b).plus(a));
    }
}
