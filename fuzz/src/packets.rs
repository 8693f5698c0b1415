//! Packets that anybody may send: a client's SYN as the kernel logs it in a pod's namespace, a probe of the path on the
//! relay's UDP port.

use peerpod_link::net::probe::{Datagram, HEADER};
use peerpod_relay::fuzzed;

/// The headers of IPv6 and TCP with all options: nothing longer is ever sent.
const LONGEST: usize = 40 + 60;

pub(crate) fn run(input: &[u8]) {
    let mut syns = fuzzed::answers_to_logged(input);
    syns.extend(fuzzed::answers_to_syn(input));
    for (again, reset) in syns {
        assert!(again.len() <= LONGEST && reset.len() <= LONGEST);
        // What we send ourselves is read as the same, and a reset is no SYN: neither goes round in a circle.
        let (same, _) = fuzzed::answers_to_syn(&again).expect("a SYN is sent again as one");
        assert_eq!(same, again);
        assert!(fuzzed::answers_to_syn(&reset).is_none());
    }
    if let Some(datagram) = Datagram::read(input) {
        assert!(input.len() >= HEADER);
        let again = datagram.write(u16::try_from(input.len()).expect("it says its length in 16 bits"));
        assert_eq!(again.len(), input.len(), "an answer is never longer than its question");
        assert_eq!(Datagram::read(&again), Some(datagram));
    }
}
