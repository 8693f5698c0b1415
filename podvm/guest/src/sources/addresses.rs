//! Reports the VM's addresses to a provider whose cloud does not know them: as variables of VMware.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde::Deserialize;

use super::{CloudSource, guestinfo, is_variable};
use crate::dial;

/// Pause between two looks at the addresses, until one is reported and afterwards.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));
/// Address that the default route leads to. It is for documentation, and nothing is sent there.
const ANYWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

/// Variables for the addresses.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Addresses {
    pub(super) ipv4: String,
    pub(super) ipv6: String,
}

impl Addresses {
    pub(super) fn are_variables(&self) -> bool {
        is_variable(&self.ipv4) && is_variable(&self.ipv6)
    }
}

/// Reports the addresses by which the VM reaches its node, now and after each change. Ends at once where no cloud of the
/// VM wants them.
pub(crate) async fn report(sources: Vec<CloudSource>, nodes: Vec<SocketAddr>) {
    let Some(variables) = sources.iter().find_map(CloudSource::addresses) else { return };
    let (mut reported, mut said) = ([None, None], String::new());
    loop {
        let found = found(&nodes);
        if found != reported && found != [None, None] {
            let variables = variables.clone();
            let done = tokio::task::spawn_blocking(move || set(&variables, found)).await;
            match done.unwrap_or_else(|error| Err(error.to_string())) {
                Ok(()) => reported = found,
                Err(error) if error != said => {
                    tracing::warn!(error, "cannot report the VM's addresses: its node waits for them");
                    said = error;
                }
                Err(_) => {}
            }
        }
        tokio::time::sleep(if reported == [None, None] { PAUSES.0 } else { PAUSES.1 }).await;
    }
}

/// Returns the VM's IPv4 and IPv6 address.
fn found(nodes: &[SocketAddr]) -> [Option<IpAddr>; 2] {
    let sources = || nodes.iter().chain([&ANYWHERE]).filter_map(|node| dial::usable_source(*node));
    [sources().find(IpAddr::is_ipv4), sources().find(IpAddr::is_ipv6)]
}

fn set(variables: &Addresses, found: [Option<IpAddr>; 2]) -> Result<(), String> {
    let mut hypervisor = guestinfo::dial()?;
    for (name, address) in [&variables.ipv4, &variables.ipv6].into_iter().zip(found) {
        if let Some(address) = address {
            guestinfo::set(&mut hypervisor, name, &address.to_string())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_that_of_the_route_to_the_node() {
        let node: SocketAddr = "127.0.0.1:15151".parse().unwrap();
        assert_eq!(found(&[node])[0], Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    }
}
