//! Reserves addresses for VMs. libvirt's DHCP server (dnsmasq) pings an address for 3 s before it offers it, unless the
//! address is reserved for the MAC of the request.
//!
//! * A reservation is a DHCP host entry of the running network. The network's configuration is not changed, so a
//!   restarted network has no reservations.
//! * The entry has the VM's name. It is made after the domain is defined and removed before the domain is undefined, so
//!   a crash leaves a reservation only beside a domain that is listed and deleted. [`Shared::sweep_reservations`]
//!   removes all others.
//! * libvirtd refuses an entry with the MAC, name or address of another entry, so two VMs never get one address, even
//!   from different processes. It signals dnsmasq before it answers, and dnsmasq reads signals before packets: the
//!   reservation is in force when the VM starts.
//! * No create fails for want of a reservation: DHCP takes 3 s longer then. The reason is logged once.

use std::collections::{BTreeMap, HashSet};
use std::net::Ipv4Addr;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use crate::Shared;
use crate::config::{LibvirtConfig, Plug};
use crate::marks::VmNames;
use crate::rpc::calls::{Domain, HostChange, Named, NicAddress};
use crate::rpc::{LibvirtConnection, RpcError, code};
use crate::xml::{child, escape};

/// Maximum number of addresses to try, when other processes take the chosen ones meanwhile.
const TRIES: usize = 16;

/// Reason why an address was not reserved.
#[derive(Debug, thiserror::Error)]
enum Unreserved {
    #[error(
        "all {0} addresses of its range are reserved or leased; make the range larger or its lease time shorter (virsh \
         net-edit)"
    )]
    Full(u64),
    #[error("others took {TRIES} addresses in a row; this is tried again with the next VM")]
    Contended,
    #[error(
        "{0}; let our user change the network, or set <dnsmasq:option value='no-ping'/> in it (virsh net-edit)"
    )]
    Refused(RpcError),
    /// libvirtd gave no usable answer, so the state of the network is unknown.
    #[error("{0}")]
    Away(RpcError),
}

impl From<RpcError> for Unreserved {
    fn from(error: RpcError) -> Unreserved {
        if error.code().is_some() { Unreserved::Refused(error) } else { Unreserved::Away(error) }
    }
}

/// Result of each network's last reservation, with the remedy for a failure.
#[derive(Debug, Default)]
pub(crate) struct Reservations(Mutex<BTreeMap<String, Result<(), String>>>);

impl Reservations {
    /// Returns the last result of a network; `None`: no reservation was tried yet.
    fn last(&self, network: &str) -> Option<Result<(), String>> {
        self.0.lock().get(network).cloned()
    }

    /// Stores the outcome; returns the text of a new failure.
    fn note(&self, network: &str, outcome: Result<(), Unreserved>) -> Option<String> {
        let outcome = match outcome {
            // The create's other calls report this error.
            Err(Unreserved::Away(_)) => return None,
            other => other.map_err(|why| {
                format!("network {network}: DHCP takes 3 s longer for each VM, as no address can be reserved: {why}")
            }),
        };
        let before = self.0.lock().insert(network.to_owned(), outcome.clone());
        outcome.err().filter(|wrong| before != Some(Err(wrong.clone())))
    }
}

impl Shared {
    /// Returns the networks in which VMs reserve addresses, each with the number of its NIC. Entries have the VM's name,
    /// so a second NIC in the network of the first one gets none.
    fn configured_networks(&self) -> impl Iterator<Item = (u8, &str)> {
        let LibvirtConfig { network, second_network, .. } = &self.config;
        let second = second_network.as_ref().filter(|second| *second != network);
        let plugs = [(0, Some(network)), (1, second)].into_iter();
        plugs.filter(|_| self.is_real()).filter_map(|(nic, plug)| match plug {
            Some(Plug::Network(name)) => Some((nic, name.as_str())),
            Some(Plug::Bridge(_)) | None => None,
        })
    }

    /// Reserves an address for each of the first `nics` NICs of a VM that is defined and not started.
    pub(crate) async fn reserve(&self, libvirt: &LibvirtConnection, identity: &VmNames, nics: u8) {
        for (nic, network) in self.configured_networks().filter(|(nic, _)| *nic < nics) {
            let outcome = self.try_reserve(libvirt, network, &identity.name, &identity.mac(nic)).await;
            if let Some(news) = self.reservations.note(network, outcome) {
                tracing::warn!("{news}");
            }
        }
    }

    /// Returns the faults of the networks' DHCP, with their remedies.
    pub(crate) async fn slow_networks(&self, libvirt: &LibvirtConnection) -> Vec<String> {
        let mut faults = Vec::new();
        for (_, network) in self.configured_networks() {
            faults.extend(self.dhcp_is_slow(libvirt, network).await);
        }
        faults
    }

    /// Returns the fault of this network's DHCP, with its remedy. Unless the last VM's reservation worked, tries a
    /// reservation and removes it at once.
    async fn dhcp_is_slow(&self, libvirt: &LibvirtConnection, network: &str) -> Option<String> {
        if self.reservations.last(network).is_some_and(|last| last.is_ok()) {
            return None;
        }
        let mut trial = VmNames { name: self.trial(), uuid: [0; 16] };
        trial.uuid.copy_from_slice(&Sha256::digest(&trial.name)[..16]);
        let outcome = self.try_reserve(libvirt, network, &trial.name, &trial.mac(0)).await;
        if outcome.is_ok()
            && let Err(error) = release_in(libvirt, network, &trial.name).await
        {
            tracing::warn!(
                network,
                trial.name,
                "cannot remove a DHCP host entry that was only tried: {error}"
            );
        }
        self.reservations.note(network, outcome);
        self.reservations.last(network).and_then(Result::err)
    }

    async fn try_reserve(
        &self,
        libvirt: &LibvirtConnection,
        network: &str,
        name: &str,
        mac: &str,
    ) -> Result<(), Unreserved> {
        for _ in 0..TRIES {
            let Some((network, dhcp)) = inspect(libvirt, network).await? else { return Ok(()) };
            // An existing entry for this MAC serves as well.
            if !dhcp.pings || dhcp.hosts.iter().any(|host| host.has_mac(mac)) {
                return Ok(());
            }
            let leases = libvirt.leases(&network).await?;
            let address = dhcp.choose(&leases, mac).ok_or(Unreserved::Full(dhcp.size()))?;
            let host =
                Host { mac: Some(mac.to_owned()), name: Some(name.to_owned()), address: Some(address) };
            match libvirt.change_host(&network, HostChange::Add, dhcp.parent, &host.xml()).await {
                // Another process was faster; the next lookup shows the address that it took.
                Err(error) if error.code() == Some(code::OPERATION_INVALID) && is_taken(&error) => {}
                other => return Ok(other?),
            }
        }
        Err(Unreserved::Contended)
    }

    /// Removes a VM's reservation. Must be called before the domain is undefined. libvirtd's refusals are logged, and left to
    /// [`Shared::sweep_reservations`].
    pub(crate) async fn release(&self, libvirt: &LibvirtConnection, domain: &Domain) -> Result<(), RpcError> {
        if !self.is_real() {
            return Ok(());
        }
        // The networks of the domain, because the settings may name another one by now.
        for network in networks(&libvirt.domain_xml(domain).await?) {
            match release_in(libvirt, &network, &domain.name).await {
                Err(RpcError::Failed(why)) => {
                    let (domain, why) = (&domain.name, why.text);
                    tracing::warn!(network, domain, "cannot remove the VM's DHCP host entry: {why}");
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Removes entries of this owner in the configured networks that have no domain; returns their number.
    pub(crate) async fn sweep_reservations(&self, libvirt: &LibvirtConnection) -> Result<usize, RpcError> {
        let mut removed = 0;
        for (_, network) in self.configured_networks() {
            let Some((network, dhcp)) = inspect(libvirt, network).await? else { continue };
            // The order matters: an entry that is listed has a domain from before it was made until after it is gone.
            let domains = libvirt.domains().await?.0;
            let prefix = crate::marks::prefix(&self.owner);
            for host in &dhcp.hosts {
                let Some(name) = host.name.as_ref().filter(|name| name.starts_with(&prefix)) else {
                    continue;
                };
                if !domains.iter().any(|domain| domain.name == *name) {
                    libvirt.change_host(&network, HostChange::Delete, dhcp.parent, &host.xml()).await?;
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }
}

/// Returns a network and its DHCP server; `None`: the network is gone, not started, or hands out no IPv4 addresses.
async fn inspect(libvirt: &LibvirtConnection, network: &str) -> Result<Option<(Named, Dhcp)>, RpcError> {
    let network = match libvirt.network(network).await {
        Err(error) if error.code() == Some(code::NO_NETWORK) => return Ok(None),
        other => other?,
    };
    // A network that is not started shows its configuration, which contains no reservations.
    if libvirt.network_is_active(&network).await? != 1 {
        return Ok(None);
    }
    Ok(Dhcp::read(&libvirt.network_xml(&network).await?).map(|dhcp| (network, dhcp)))
}

async fn release_in(libvirt: &LibvirtConnection, network: &str, name: &str) -> Result<(), RpcError> {
    let Some((network, dhcp)) = inspect(libvirt, network).await? else { return Ok(()) };
    let Some(host) = dhcp.hosts.iter().find(|host| host.name.as_deref() == Some(name)) else { return Ok(()) };
    let removed = libvirt.change_host(&network, HostChange::Delete, dhcp.parent, &host.xml()).await;
    match removed {
        Err(RpcError::Failed(why)) => {
            // Another process removed the entry, or the network has ended.
            let left = inspect(libvirt, &network.name).await?;
            let is_left = left.is_some_and(|(_, dhcp)| dhcp.hosts.contains(host));
            if is_left { Err(RpcError::Failed(why)) } else { Ok(()) }
        }
        other => other,
    }
}

fn is_taken(error: &RpcError) -> bool {
    error.to_string().contains("existing dhcp host entry")
}

/// DHCP server for IPv4 addresses of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dhcp {
    /// Index of the network's `ip` element.
    parent: i32,
    /// Address of the network itself.
    own: Option<Ipv4Addr>,
    ranges: Vec<(u32, u32)>,
    hosts: Vec<Host>,
    /// Whether an address is pinged before it is offered.
    pings: bool,
}

/// A host entry.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Host {
    mac: Option<String>,
    name: Option<String>,
    address: Option<Ipv4Addr>,
}

impl Host {
    fn has_mac(&self, mac: &str) -> bool {
        self.mac.as_ref().is_some_and(|own| own.eq_ignore_ascii_case(mac))
    }

    fn xml(&self) -> String {
        let address = self.address.map(|address| address.to_string());
        let given = [("mac", &self.mac), ("name", &self.name), ("ip", &address)];
        let given = given
            .iter()
            .filter_map(|(key, value)| value.as_ref().map(|value| format!(" {key}='{}'", escape(value))));
        format!("<host{}/>", given.collect::<String>())
    }
}

impl Dhcp {
    /// Parses a network's description; `None`: libvirt hands out no IPv4 addresses there.
    pub(crate) fn read(xml: &str) -> Option<Dhcp> {
        let document = roxmltree::Document::parse(xml).ok()?;
        let root = document.root_element();
        let is_v4 = |node: &roxmltree::Node<'_, '_>| matches!(node.attribute("family"), None | Some("ipv4"));
        let mut ips = (0..).zip(root.children().filter(|node| node.has_tag_name("ip")));
        let (parent, ip, dhcp) = ips.find_map(|(parent, ip)| {
            let dhcp = child(ip, "dhcp")?;
            is_v4(&ip).then_some((parent, ip, dhcp))
        })?;
        let of = |node: roxmltree::Node<'_, '_>, key: &str| node.attribute(key)?.parse::<Ipv4Addr>().ok();
        let ranges = dhcp.children().filter(|node| node.has_tag_name("range")).filter_map(|range| {
            let (first, last) = (of(range, "start")?.to_bits(), of(range, "end")?.to_bits());
            (first <= last).then_some((first, last))
        });
        let hosts = dhcp.children().filter(|node| node.has_tag_name("host")).map(|host| Host {
            mac: host.attribute("mac").map(str::to_owned),
            name: host.attribute("name").map(str::to_owned),
            address: of(host, "ip"),
        });
        let mut options = root.descendants().filter(|node| node.tag_name().name() == "option");
        let pings = !options.any(|option| option.attribute("value") == Some("no-ping"));
        Some(Dhcp { parent, own: of(ip, "address"), ranges: ranges.collect(), hosts: hosts.collect(), pings })
    }

    /// Returns the number of addresses in all ranges.
    fn size(&self) -> u64 {
        self.ranges.iter().map(|(first, last)| u64::from(last - first) + 1).sum()
    }

    /// Returns the address with this number, counted over all ranges.
    fn at(&self, number: u64) -> Option<Ipv4Addr> {
        let mut left = number;
        self.ranges.iter().find_map(|(first, last)| {
            let size = u64::from(last - first) + 1;
            if left < size {
                return u32::try_from(u64::from(*first) + left).ok().map(Ipv4Addr::from_bits);
            }
            left -= size;
            None
        })
    }

    /// Returns a free address: the NIC's own lease, or the first free one from a position in the range that the MAC
    /// determines. Processes that choose at the same moment thus seldom choose the same address. `None`: none is free.
    fn choose(&self, leases: &[NicAddress], mac: &str) -> Option<Ipv4Addr> {
        let own = |lease: &&NicAddress| lease.mac.as_ref().is_some_and(|own| own.eq_ignore_ascii_case(mac));
        let of = |lease: &NicAddress| lease.address.parse::<Ipv4Addr>().ok();
        let mut taken: HashSet<Ipv4Addr> = self.hosts.iter().filter_map(|host| host.address).collect();
        taken.extend(self.own);
        taken.extend(leases.iter().filter(|lease| !own(lease)).filter_map(of));
        let is_in_range = |address: &Ipv4Addr| {
            self.ranges.iter().any(|(first, last)| (*first..=*last).contains(&address.to_bits()))
        };
        let is_free = |address: &Ipv4Addr| !taken.contains(address);
        if let Some(known) =
            leases.iter().filter(own).filter_map(of).find(|known| is_in_range(known) && is_free(known))
        {
            return Some(known);
        }
        let (hash, size) = (Sha256::digest(mac.to_ascii_lowercase()), self.size());
        let from = hash.first_chunk().map(|bytes| u64::from_be_bytes(*bytes))?.checked_rem(size)?;
        // One of so many is free, or none is at all.
        let tries = size.min(taken.len() as u64 + 1);
        (0..tries).filter_map(|step| self.at((from + step) % size)).find(is_free)
    }
}

/// Returns the libvirt networks that a domain is attached to, from its description.
fn networks(xml: &str) -> Vec<String> {
    let Ok(document) = roxmltree::Document::parse(xml) else { return Vec::new() };
    let sources = document.descendants().filter(|node| {
        node.has_tag_name("source") && node.parent().is_some_and(|parent| parent.has_tag_name("interface"))
    });
    let mut names: Vec<String> =
        sources.filter_map(|source| source.attribute("network").map(str::to_owned)).collect();
    names.sort();
    names.dedup();
    names
}

pub(crate) fn read_anything(text: &str) {
    drop(networks(text));
    if let Some(dhcp) = Dhcp::read(text)
        && let Some(address) = dhcp.choose(&[], text)
    {
        assert!(dhcp.hosts.iter().all(|host| host.address != Some(address)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: &str = "52:00:00:00:00:01";

    fn network(range: &str, hosts: &str, options: &str) -> String {
        format!(
            "<network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'><name>pods</name>\
             <ip family='ipv6' address='fd97::1' prefix='64'><dhcp><range start='fd97::1' end='fd97::9'/></dhcp></ip>\
             <ip address='10.0.0.1' netmask='255.255.255.0'><dhcp>{range}{hosts}</dhcp></ip>\
             <dnsmasq:options>{options}</dnsmasq:options></network>"
        )
    }

    fn lease(mac: &str, address: &str) -> NicAddress {
        NicAddress { mac: Some(mac.into()), address: address.into() }
    }

    #[test]
    fn a_free_address_is_chosen_and_none_from_a_full_range() {
        let range = "<range start='10.0.0.1' end='10.0.0.3'/><range start='10.0.0.9' end='10.0.0.9'/>";
        let host = "<host mac='aa:00:00:00:00:01' ip='10.0.0.2'/>";
        let dhcp = Dhcp::read(&network(range, host, "")).unwrap();
        assert_eq!((dhcp.parent, dhcp.size(), dhcp.pings), (1, 4, true));
        let mut leases = vec![lease("aa:00:00:00:00:02", "10.0.0.9"), lease("aa:00:00:00:00:03", "fd97::2")];
        assert_eq!(dhcp.choose(&leases, MAC), Some([10, 0, 0, 3].into()));
        leases.push(lease("aa:00:00:00:00:04", "10.0.0.3"));
        assert_eq!(dhcp.choose(&leases, MAC), None);
        // Lease from an earlier life of the VM.
        leases[2] = lease(&MAC.to_uppercase(), "10.0.0.3");
        assert_eq!(dhcp.choose(&leases, MAC), Some([10, 0, 0, 3].into()));
    }

    #[test]
    fn a_failure_of_many_vms_is_logged_once() {
        let reservations = Reservations::default();
        let full = || Err(Unreserved::Full(13));
        let first = reservations.note("pods", full()).unwrap();
        assert!(first.contains("network pods") && first.contains("all 13 addresses"), "{first}");
        // Another network, and an answer that never came, change nothing.
        assert_eq!(reservations.note("other", Ok(())), None);
        assert_eq!(
            reservations.note("pods", Err(Unreserved::Away(RpcError::Lost("closed".to_owned())))),
            None
        );
        assert_eq!(reservations.note("pods", full()), None);
        assert_eq!(reservations.last("pods"), Some(Err(first.clone())));
        assert!(reservations.note("pods", Err(Unreserved::Contended)).is_some());
        assert_eq!(reservations.note("pods", full()), Some(first.clone()));
        assert_eq!(reservations.note("pods", Ok(())), None);
        assert_eq!(reservations.note("pods", full()), Some(first));
    }

    #[test]
    fn concurrent_vms_start_their_search_at_different_addresses() {
        let range = "<range start='10.0.0.1' end='10.255.255.254'/>";
        let dhcp = Dhcp::read(&network(range, "", "")).unwrap();
        let macs = (0..100).map(|number| format!("52:00:00:00:00:{number:02x}"));
        let chosen: HashSet<_> = macs.map(|mac| dhcp.choose(&[], &mac).unwrap()).collect();
        assert!(chosen.len() > 95, "{}", chosen.len());
    }

    #[test]
    fn networks_that_need_no_reservation_are_told_apart() {
        let range = "<range start='10.0.0.2' end='10.0.0.3'/>";
        let quick = "<dnsmasq:option value='no-ping'/>";
        assert!(!Dhcp::read(&network(range, "", quick)).unwrap().pings);
        let bare = "<network><ip address='10.0.0.1' netmask='255.255.255.0'/></network>";
        for without in [bare, "<network/>", "<network"] {
            assert_eq!(Dhcp::read(without), None, "{without}");
        }
        // DHCP for hosts with an entry only.
        assert_eq!(Dhcp::read(&network("", "", "")).unwrap().choose(&[], MAC), None);
        let backwards = "<range start='10.0.0.9' end='10.0.0.2'/>";
        assert_eq!(Dhcp::read(&network(backwards, "", "")).unwrap().size(), 0);
    }

    #[test]
    fn an_entry_is_written_as_it_was_read() {
        let host = "<host mac='52:00:00:00:00:01' name='peerpod-1' ip='10.0.0.2'/>";
        assert_eq!(Dhcp::read(&network("", host, "")).unwrap().hosts[0].xml(), host);
        let domain = "<domain><devices><interface type='network'><source network='pods'/></interface>\
                      <interface type='bridge'><source bridge='br0'/></interface><disk><source network='x'/></disk>\
                      </devices></domain>";
        assert_eq!(networks(domain), ["pods"]);
    }

    #[test]
    fn only_a_network_with_its_own_ipv4_dhcp_causes_a_wait() {
        let v4 = "<ip address='10.97.0.1' netmask='255.255.255.0'><dhcp><range start='10.97.0.2' end='10.97.0.9'/></dhcp></ip>";
        let v6 = "<ip family='ipv6' address='fd97::1' prefix='64'><dhcp><range start='fd97::2' end='fd97::9'/></dhcp></ip>";
        let bare = "<ip family='ipv4' address='10.97.0.1' prefix='24'/>";
        let network = |ips: &[&str]| format!("<network><name>pods</name>{}</network>", ips.concat());
        assert!(Dhcp::read(&network(&[v6, v4])).is_some());
        for without in [network(&[v6]), network(&[bare, v6]), network(&[]), "<network".to_owned()] {
            assert_eq!(Dhcp::read(&without), None, "{without}");
        }
    }
}
