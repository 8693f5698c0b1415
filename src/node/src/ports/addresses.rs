//! Determines the addresses at which VMs find this node's relay; a new VM's user-data fixes them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::config::GuestAddress;
use crate::tunnel::external::own_addresses;

/// Time after the node's start for which VM requests wait for the provider's addresses. User-data cannot be changed,
/// and this host's list might be cut before the one address that works.
const SETTLES: Duration = Duration::from_secs(45);

/// Number of addresses in user-data, which is small; more do not make the node easier to find.
const MOST: usize = 8;
/// Number of addresses for a running guest, which can try more.
const MOST_ENDPOINTS: usize = 16;

/// Addresses at which guests reach the relay: the configured ones; else the provider's, which knows the network of its
/// VMs; else the address of `relay.listen`, or all of this host's addresses.
#[derive(Clone, Debug)]
pub(crate) struct GuestAddresses {
    configured: Vec<GuestAddress>,
    listen: SocketAddr,
    /// Addresses from the provider's preflight; `None`: it has not answered yet.
    provider: Arc<watch::Sender<Option<Vec<IpAddr>>>>,
    patience: Instant,
}

impl GuestAddresses {
    pub(crate) fn new(configured: Vec<GuestAddress>, listen: SocketAddr) -> GuestAddresses {
        let provider = Arc::new(watch::Sender::new(None));
        GuestAddresses { configured, listen, provider, patience: Instant::now() + SETTLES }
    }

    /// Sets the addresses that the provider's preflight found.
    pub(crate) fn provider_says(&self, addresses: Vec<IpAddr>) {
        self.provider.send_replace(Some(addresses));
    }

    /// Records that the provider has no addresses now, so that no caller waits for it.
    pub(crate) fn provider_fails(&self) {
        self.provider.send_if_modified(|said| said.is_none() && said.insert(Vec::new()).is_empty());
    }

    /// Waits until the provider has answered, up to a limit. Returns at once where addresses are configured.
    pub(crate) async fn settled(&self) {
        if self.configured.is_empty() {
            let mut said = self.provider.subscribe();
            drop(timeout_at(self.patience, said.wait_for(Option::is_some)).await);
        }
    }

    /// Returns the current addresses. `bound` is the address on which the relay reports that it listens.
    pub(crate) fn now(&self, bound: Option<SocketAddr>) -> Result<Vec<SocketAddr>, String> {
        let port = match (self.listen.port(), bound) {
            (0, Some(bound)) => bound.port(),
            (port, _) => port,
        };
        let found = if self.configured.is_empty() { self.found() } else { self.configured.clone() };
        let mut addresses: Vec<SocketAddr> = Vec::new();
        for address in found {
            let address = match address {
                GuestAddress::Whole(address) => address,
                GuestAddress::Host(_) if port == 0 => {
                    return Err("the relay's port is not known yet; start peerpod-relay".into());
                }
                GuestAddress::Host(ip) => SocketAddr::new(ip, port),
            };
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses.truncate(MOST);
        if addresses.is_empty() {
            return Err(
                "no address is known at which VMs can reach this node; set node.relay-addresses".into()
            );
        }
        Ok(addresses)
    }

    /// Returns the endpoints for a running guest: the same, and this host's addresses unless some are configured.
    pub(crate) fn node_endpoints(&self, bound: SocketAddr) -> Vec<String> {
        let mut node_endpoints = self.now(Some(bound)).unwrap_or_default();
        if self.configured.is_empty() && self.listen.ip().is_unspecified() {
            let mut own = own_addresses();
            own.sort_unstable(); // the kernel's order varies
            node_endpoints.extend(own.into_iter().map(|ip| SocketAddr::new(ip, bound.port())));
        }
        let mut said = Vec::with_capacity(node_endpoints.len().min(MOST_ENDPOINTS));
        for endpoint in node_endpoints {
            let endpoint = endpoint.to_string();
            if said.len() < MOST_ENDPOINTS && !said.contains(&endpoint) {
                said.push(endpoint);
            }
        }
        said
    }

    fn found(&self) -> Vec<GuestAddress> {
        let provider = self.provider.borrow().clone().unwrap_or_default();
        let ips = match (provider.is_empty(), self.listen.ip()) {
            (false, _) => provider,
            (true, ip) if !ip.is_unspecified() => vec![ip],
            (true, any) => own_addresses().into_iter().filter(|ip| any.is_ipv6() || ip.is_ipv4()).collect(),
        };
        ips.into_iter().map(GuestAddress::Host).collect()
    }

    /// Returns the addresses, or the error, as text for messages.
    pub(crate) fn to_text(&self, bound: Option<SocketAddr>) -> String {
        match self.now(bound) {
            Ok(addresses) => addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            Err(why) => why,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn configured_addresses_precede_the_providers_and_the_hosts() {
        let configured =
            vec![GuestAddress::Whole(listen("10.0.0.7:99")), GuestAddress::Host("fd00::7".parse().unwrap())];
        let addresses = GuestAddresses::new(configured, listen("[::]:15151"));
        addresses.provider_says(vec!["10.99.0.1".parse().unwrap()]);
        assert_eq!(addresses.now(None).unwrap(), [listen("10.0.0.7:99"), listen("[fd00::7]:15151")]);

        let addresses = GuestAddresses::new(vec![], listen("[::]:15151"));
        addresses.provider_says(vec!["10.99.0.1".parse().unwrap(), "fd99::1".parse().unwrap()]);
        assert_eq!(addresses.now(None).unwrap(), [listen("10.99.0.1:15151"), listen("[fd99::1]:15151")]);

        let addresses = GuestAddresses::new(vec![], listen("10.1.2.3:15151"));
        assert_eq!(addresses.now(None).unwrap(), [listen("10.1.2.3:15151")]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_provider_is_awaited_for_a_bounded_time() {
        let addresses = GuestAddresses::new(vec![], listen("[::]:15151"));
        let (late, start) = (addresses.clone(), Instant::now());
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(15)).await;
            late.provider_says(vec!["10.99.0.1".parse().unwrap()]);
        });
        addresses.settled().await;
        assert_eq!(addresses.now(None).unwrap(), [listen("10.99.0.1:15151")]);
        addresses.settled().await;
        assert!(start.elapsed() < Duration::from_secs(16), "known addresses are not awaited");

        // A provider without addresses has answered, and a provider that fails is not waited for.
        let failing = GuestAddresses::new(vec![], listen("10.1.2.3:15151"));
        failing.provider_fails();
        let since = Instant::now();
        failing.settled().await;
        assert_eq!(since.elapsed(), Duration::ZERO);
        addresses.provider_fails();
        assert_eq!(addresses.now(None).unwrap(), [listen("10.99.0.1:15151")], "its addresses stay");
        let start = Instant::now();
        let addresses = GuestAddresses::new(vec![], listen("10.1.2.3:15151"));
        addresses.provider_says(vec![]);
        addresses.settled().await;
        let configured = vec![GuestAddress::Whole(listen("10.0.0.7:99"))];
        GuestAddresses::new(configured, listen("[::]:15151")).settled().await;
        assert_eq!(start.elapsed(), Duration::ZERO);

        let silent = GuestAddresses::new(vec![], listen("10.1.2.3:15151"));
        silent.settled().await;
        silent.settled().await;
        assert!((45..47).contains(&start.elapsed().as_secs()), "once for all: {:?}", start.elapsed());
        assert_eq!(silent.now(None).unwrap(), [listen("10.1.2.3:15151")]);
    }

    #[test]
    fn port_zero_means_the_port_of_the_relay() {
        let addresses =
            GuestAddresses::new(vec![GuestAddress::Host("10.0.0.7".parse().unwrap())], listen("[::]:0"));
        assert!(addresses.now(None).unwrap_err().contains("peerpod-relay"));
        assert_eq!(addresses.now(Some(listen("[::]:4711"))).unwrap(), [listen("10.0.0.7:4711")]);
    }
}
