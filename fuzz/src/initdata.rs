//! Fuzzes initdata, which the pod's author controls. It is refused with a reason, or its file names stay below one
//! folder.

use peerpod_link::initdata::Initdata;

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(initdata) = Initdata::parse(text) else { return };
    assert!(initdata.is(&initdata.digest).is_ok());
    for name in initdata.files.keys() {
        assert!(!name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']), "{name:?}");
    }
}
