//! Fuzzes packets that any host may send: path MTU probes on the relay's UDP port.

use peerpod_link::path_mtu::{Datagram, HEADER};

pub(crate) fn run(input: &[u8]) {
    if let Some(datagram) = Datagram::read(input) {
        assert!(input.len() >= HEADER);
        let again = datagram.write(u16::try_from(input.len()).expect("it says its length in 16 bits"));
        assert_eq!(again.len(), input.len(), "an answer is never longer than its question");
        assert_eq!(Datagram::read(&again), Some(datagram));
    }
}
