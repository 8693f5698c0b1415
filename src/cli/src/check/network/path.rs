//! Probes the path to other nodes with full packets. A path that drops these without a report lets small requests pass,
//! and stops every transfer.
//!
//! A relay speaks TLS, and answers a record only when all of it has arrived. So a record without a meaning, larger than
//! any packet, is a probe: an alert or the end of the connection proves that full packets pass. A small record before it
//! shows that the relay answers at all.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::CONNECT;
use crate::item::{Outcome, failed, skipped};

/// Sizes of the records, in bytes: less than a packet, and more than a packet of any usual MTU.
const SIZES: [u16; 2] = [64, 12_000];
/// Head of a TLS record of the type handshake, without its length.
const HEAD: [u8; 3] = [22, 3, 1];

/// Probes the paths to these relays. `uplink`: the device of the default route, and its MTU.
pub(super) fn check(relays: &[SocketAddr], uplink: Option<(String, u32)>) -> Outcome {
    let [small, large] = SIZES;
    let answering: Vec<&SocketAddr> = relays.iter().filter(|relay| answers(relay, small).is_ok()).collect();
    if answering.is_empty() {
        return skipped("no relay of another node answers here");
    }
    let lost: Vec<String> = answering
        .iter()
        .filter_map(|relay| answers(relay, large).err().map(|why| format!("{relay} ({why})")))
        .collect();
    if lost.is_empty() {
        return Ok(format!("full packets reach the relays of {} other nodes", answering.len()));
    }
    let device = uplink.map_or("the uplink".to_owned(), |(device, mtu)| format!("{device} (now {mtu})"));
    failed(
        format!("small packets pass, and full ones do not: {}", lost.join(", ")),
        format!(
            "let ICMP type 3 code 4 (ICMPv6 type 2) pass on the path, or lower the MTU of {device} to the path's"
        ),
    )
}

/// Sends a record of this size, and waits until the other end answers or closes.
fn answers(relay: &SocketAddr, size: u16) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(relay, CONNECT)?;
    stream.set_read_timeout(Some(CONNECT))?;
    stream.set_write_timeout(Some(CONNECT))?;
    let mut record = HEAD.to_vec();
    record.extend_from_slice(&size.to_be_bytes());
    record.resize(record.len() + usize::from(size), 0);
    stream.write_all(&record)?;
    match stream.read(&mut [0; 64]) {
        Ok(_) => Ok(()),
        // The relay closed while it still received.
        Err(why) if why.kind() == ErrorKind::ConnectionReset => Ok(()),
        Err(why) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&why.kind()) => {
            Err(io::Error::new(ErrorKind::TimedOut, format!("no answer within {CONNECT:?}")))
        }
        Err(why) => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::item::{Area, Verdict};

    /// Answers a record of at most this many bytes once it is whole, and is silent otherwise.
    fn relay(most: usize) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let mut silent = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut head = [0; 5];
                stream.read_exact(&mut head).unwrap();
                assert_eq!(head[..3], HEAD);
                let length = usize::from(u16::from_be_bytes([head[3], head[4]]));
                if length > most {
                    silent.push(stream);
                    continue;
                }
                stream.read_exact(&mut vec![0; length]).unwrap();
                stream.write_all(&[21, 3, 3, 0, 2, 2, 50]).unwrap();
            }
        });
        address
    }

    #[test]
    fn a_path_that_drops_full_packets_is_named() {
        let (good, bad) = (relay(20_000), relay(1000));
        let judge = |relays: &[SocketAddr]| {
            Area::Network.item("path-mtu", check(relays, Some(("eth0".to_owned(), 9001))))
        };
        assert_eq!(judge(&[good]).verdict, Verdict::Ok);
        let item = judge(&[good, bad]);
        assert_eq!(item.verdict, Verdict::Failed);
        assert!(item.cause.contains(&bad.to_string()) && !item.cause.contains(&good.to_string()), "{item:?}");
        assert!(item.remedy.contains("eth0 (now 9001)"), "{item:?}");
        assert_eq!(judge(&[]).verdict, Verdict::Skipped);
    }
}
