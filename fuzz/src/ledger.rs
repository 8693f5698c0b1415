//! Fuzzes a ledger record that the disk corrupted. It is no record, or it survives writing and reading.

use peerpod_node::ledger::Record;

pub(crate) fn run(input: &[u8]) {
    if let Ok(record) = serde_json::from_slice::<Record>(input) {
        let written = serde_json::to_vec(&record).expect("a record serialises");
        let again: Record = serde_json::from_slice(&written).expect("what we write we read");
        assert_eq!(serde_json::to_vec(&again).expect("a record serialises"), written);
    }
}
