//! Fuzzes user-data, which any writer of it controls. It is refused with a reason, or it survives writing and reading.

use peerpod_link::birth::BirthData;

pub(crate) fn run(input: &[u8]) {
    if let Ok(birth) = BirthData::parse(input) {
        let again = BirthData::parse(birth.to_json().as_bytes()).expect("what we write we read");
        assert_eq!(again.to_json(), birth.to_json());
    }
}
