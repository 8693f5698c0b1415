//! Builds the user-data of a VM: only public data and a ticket. Pure; the format is `peerpod_link::user_data`.

use std::net::SocketAddr;
use std::time::Duration;

use peerpod_link::user_data::{UserData, UserDataNode, UserDataTicket, VERSION};

use crate::trust::Ticket;

/// Returns the user-data of each of `claims` VMs that share a ticket.
///
/// `node_addresses` are the addresses of the relay. `ca` is the SHA-256 of the DER of each CA to pin. `listen` is the
/// port on which the VM waits to be dialled, if it does not dial. `lease` is the silence after which the VM powers off
/// (whole seconds, at least one).
///
/// The text has some 500 bytes and 30 more per address. It holds the ticket's secret: store it only where the ledger
/// is, and give it only to the cloud. The same arguments give the same text, byte for byte, as a retried create needs.
pub(crate) fn user_data(
    ticket: &Ticket,
    claims: u32,
    node_addresses: &[SocketAddr],
    listen: Option<u16>,
    ca: &[[u8; 32]],
    lease: Duration,
) -> String {
    let ticket = UserDataTicket { id: ticket.id.clone(), secret: ticket.secret().clone(), claims };
    let node = UserDataNode { addresses: node_addresses.to_vec(), ca_sha256: ca.to_vec(), listen };
    let lease_seconds = u32::try_from(lease.as_secs()).unwrap_or(u32::MAX).max(1);
    UserData { version: VERSION, ticket, node, lease_seconds }.to_json()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_decodes_the_user_data_and_it_is_small() {
        let ticket = Ticket::new(Duration::from_secs(60)).unwrap();
        let addresses: Vec<SocketAddr> =
            ["10.99.0.1:15151", "[fd99::1]:15151"].iter().map(|a| a.parse().unwrap()).collect();
        let text = user_data(&ticket, 3, &addresses, None, &[[1; 32], [2; 32]], Duration::from_secs(900));
        assert!(text.len() < 2048, "{} bytes", text.len());
        let read = UserData::parse(text.as_bytes()).unwrap();
        assert_eq!(read.ticket.id, ticket.id);
        assert!(ticket.matches(read.ticket.secret.expose()));
        assert_eq!((read.ticket.claims, read.lease_seconds), (3, 900));
        assert_eq!(read.node.addresses, addresses);
        assert_eq!(read.node.ca_sha256, [[1; 32], [2; 32]]);
        assert_eq!(
            text,
            user_data(&ticket, 3, &addresses, None, &[[1; 32], [2; 32]], Duration::from_secs(900))
        );
    }
}
