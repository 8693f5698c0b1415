//! Fuzzes user-data, which any writer of it controls. It is refused with a reason, or it survives writing and reading.

use peerpod_link::user_data::UserData;

pub(crate) fn run(input: &[u8]) {
    if let Ok(user_data) = UserData::parse(input) {
        let again = UserData::parse(user_data.to_json().as_bytes()).expect("what we write we read");
        assert_eq!(again.to_json(), user_data.to_json());
    }
}
