//! Inspects VMs and the host: list, state, addresses, console, and the preflight checks for creates.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use futures_util::future::try_join_all;
use peerpod_provider_api::{Error, InstanceId, Owned, OwnedState, Preflight};
use tokio::time::{Instant, sleep};

use crate::Shared;
use crate::config::{Boot, LibvirtImage, Plug};
use crate::create::{CONSOLE, id_of};
use crate::marks::{Marks, URI, uuid_of};
use crate::reserve::Dhcp;
use crate::rpc::calls::{AddressSource, Domain, NicAddress};
use crate::rpc::{LibvirtConnection, RpcError, unless_absent};
use crate::store::Use;

/// Pauses between two lookups of an address grow from `FIRST_PAUSE` to `LONGEST_PAUSE`, as a share of the time waited
/// so far. The pauses thus prolong a start by at most this share.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_SHARE: u32 = 16;
/// Longest wait for a VM's IPv4 address after its IPv6 address, in a network that hands out both. Before dnsmasq offers
/// an address that is not reserved, it checks for 3 s that the address is unused. The VM is known by its IPv4 address,
/// even if the other one came first, because the tunnel then takes less of each packet.
const OTHER_FAMILY: Duration = Duration::from_secs(5);

impl Shared {
    /// Returns the marks on a domain; `None`: not a domain of this provider.
    pub(crate) async fn marks(
        &self,
        libvirt: &LibvirtConnection,
        domain: &Domain,
    ) -> Result<Option<Marks>, RpcError> {
        Ok(libvirt.metadata(domain, URI).await?.as_deref().and_then(Marks::read))
    }

    pub(crate) async fn list(&self) -> Result<Vec<Owned>, RpcError> {
        let libvirt = self.link.get().await?;
        let prefix = crate::marks::prefix(&self.owner);
        let domains = libvirt.domains().await?.0;
        let ours = domains.iter().filter(|domain| domain.name.starts_with(&prefix));
        let looks = ours.map(|domain| self.inspect(&libvirt, domain));
        Ok(try_join_all(looks).await?.into_iter().flatten().collect())
    }

    /// Returns a VM's entry in the list; `None` if it is gone since, or has another owner.
    async fn inspect(&self, libvirt: &LibvirtConnection, domain: &Domain) -> Result<Option<Owned>, RpcError> {
        let seen = tokio::try_join!(self.marks(libvirt, domain), libvirt.state(domain));
        let Some((marks, state)) = unless_absent(seen)? else { return Ok(None) };
        let Some(marks) = marks.filter(|marks| marks.are_of(&self.owner)) else { return Ok(None) };
        let state = match (state.is_on(), marks.started || !state.never_ran()) {
            (true, _) => OwnedState::Running,
            (false, true) => OwnedState::Ended,
            (false, false) => OwnedState::Pending,
        };
        Ok(Some(Owned {
            id: id_of(domain),
            created: Some(marks.created()),
            node: Some(marks.node).filter(|node| !node.is_empty()),
            key: Some(marks.key),
            name: Some(marks.name),
            state,
            addresses: Vec::new(),
        }))
    }

    /// Returns an existing VM of this owner.
    pub(crate) async fn find(&self, libvirt: &LibvirtConnection, id: &InstanceId) -> Result<Domain, Error> {
        let absent = || Error::not_found("there is no such VM");
        let uuid = uuid_of(id).ok_or_else(absent)?;
        let domain = libvirt.domain(&uuid).await?.ok_or_else(absent)?;
        let marks = self.marks(libvirt, &domain).await?;
        if marks.is_some_and(|marks| marks.are_of(&self.owner)) { Ok(domain) } else { Err(absent()) }
    }

    pub(crate) async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let (since, mut enough) = (Instant::now(), None);
        loop {
            let libvirt = self.link.get().await?;
            let domain = self.find(&libvirt, id).await?;
            let (state, marks) = tokio::try_join!(libvirt.state(&domain), self.marks(&libvirt, &domain))?;
            let begun = marks.is_some_and(|marks| marks.started);
            if state.is_off() && (begun || !state.is_fresh()) {
                return Err(Error::not_found(format!("it has ended: {}", state.describe())));
            }
            if state.is_on() {
                let found = self.seen(&libvirt, &domain).await?;
                if !found.is_empty() {
                    let end = match enough {
                        Some(end) => end,
                        None if found[0].is_ipv6() && self.gives_ipv4(&libvirt).await => {
                            Instant::now() + OTHER_FAMILY
                        }
                        None => return Ok(found),
                    };
                    if found[0].is_ipv4() || Instant::now() >= end {
                        return Ok(found);
                    }
                    enough = Some(end);
                }
            }
            sleep((since.elapsed() / PAUSE_SHARE).clamp(FIRST_PAUSE, LONGEST_PAUSE)).await;
        }
    }

    /// Returns the addresses of the first NIC that are known so far, IPv4 first.
    async fn seen(&self, libvirt: &LibvirtConnection, domain: &Domain) -> Result<Vec<IpAddr>, RpcError> {
        let source = match &self.config.network {
            Plug::Network(_) => AddressSource::Lease,
            // The DHCP server is not libvirt's: only the host's neighbour table knows the addresses.
            Plug::Bridge(_) => AddressSource::Arp,
        };
        let found = match libvirt.addresses(domain, source).await {
            // The VM is ending, or its NIC does not exist yet; the next lookup shows it.
            Err(RpcError::Failed(_)) => return Ok(Vec::new()),
            other => other?,
        };
        let identity = crate::marks::VmNames { name: domain.name.clone(), uuid: domain.uuid };
        let mac = identity.mac(0);
        let of_first = |address: &NicAddress| {
            !self.is_real() || address.mac.as_deref().is_some_and(|other| other.eq_ignore_ascii_case(&mac))
        };
        let parsed = found.iter().filter(|one| of_first(one)).filter_map(|one| one.address.parse().ok());
        let mut addresses: Vec<IpAddr> = parsed.filter(is_useful).collect();
        addresses.sort_by_key(|address| (address.is_ipv6(), *address));
        addresses.dedup();
        Ok(addresses)
    }

    /// Returns whether VMs get IPv4 addresses from libvirt; `false` if this cannot be determined.
    async fn gives_ipv4(&self, libvirt: &LibvirtConnection) -> bool {
        let Plug::Network(name) = &self.config.network else { return false };
        let Ok(network) = libvirt.network(name).await else { return false };
        libvirt.network_xml(&network).await.is_ok_and(|xml| Dhcp::read(&xml).is_some())
    }

    pub(crate) async fn console(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        let libvirt = self.link.get().await?;
        let domain = self.find(&libvirt, id).await?;
        let pool = libvirt.pool(&self.config.pool).await?;
        let name = format!("{}{CONSOLE}", domain.name);
        let Some(volume) = libvirt.volume(&pool, &name).await? else { return Ok(Vec::new()) };
        let (_, written, _) = libvirt.volume_sizes(&volume).await?;
        let length = written.min(limit as u64);
        if length == 0 || !self.is_real() {
            return Ok(Vec::new());
        }
        // At most `limit`, which is a number of bytes in memory, so the cast is exact.
        Ok(libvirt.download(&volume, written - length, length as usize).await?)
    }

    pub(crate) async fn preflight(&self) -> Result<Preflight, Error> {
        let libvirt = self.link.get().await?;
        let (driver, version, host) = tokio::try_join!(libvirt.driver(), libvirt.version(), libvirt.node())?;
        let mut found = Preflight::default();
        let version = format!("{}.{}.{}", version / 1_000_000, version / 1000 % 1000, version % 1000);
        let (arch, cpus, memory) = (&host.arch, host.cpus, host.memory_kib >> 20);
        found.facts.push(format!("libvirt {version}, {driver}, on {arch} with {cpus} CPUs and {memory} GiB"));
        let pool = libvirt.pool(&self.config.pool).await?;
        let (state, size, _, free) = libvirt.pool_info(&pool).await?;
        if state != 2 {
            let name = &pool.name;
            let text = format!("storage pool {name} is not active; start it: virsh pool-start {name}");
            return Err(Error::invalid(text));
        }
        let used = size.saturating_sub(free) >> 30;
        found.facts.push(format!("quota storage pool {}: {used} of {} GiB in use", pool.name, size >> 30));
        if free < 2 << 30 {
            found.warnings.push(format!("storage pool {} has less than 2 GiB free", pool.name));
        }
        for plug in [Some(&self.config.network), self.config.second_network.as_ref()].into_iter().flatten() {
            let addresses = match plug {
                Plug::Bridge(name) => {
                    found.facts.push(format!("VMs on bridge {name}"));
                    Vec::new()
                }
                Plug::Network(name) => self.network(&libvirt, name, &mut found).await?,
            };
            if plug == &self.config.network {
                found.node_addresses = addresses;
            }
        }
        if self.config.creates {
            found.warnings.extend(self.slow_networks(&libvirt).await);
        }
        self.known_images(&mut found).await?;
        self.images.forget().await;
        let kind = self.kind(&libvirt).await?;
        let tried = if self.config.dry && kind == "kvm" { ", which no VM was started to try" } else { "" };
        found.facts.push(format!("VMs of kind {kind}{tried}"));
        found.warnings.extend(self.kind.lock().await.as_ref().and_then(|known| known.warning.clone()));
        match self.sweep(&libvirt).await? {
            0 => {}
            removed => found.facts.push(format!("removed {removed} files of VMs that are gone")),
        }
        match self.sweep_reservations(&libvirt).await? {
            0 => {}
            removed => found.facts.push(format!("removed {removed} DHCP host entries of VMs that are gone")),
        }
        Ok(found)
    }

    /// Checks a network; returns the addresses that this host has on it.
    async fn network(
        &self,
        libvirt: &LibvirtConnection,
        name: &str,
        found: &mut Preflight,
    ) -> Result<Vec<IpAddr>, Error> {
        let about = |error: RpcError| Error::from(error).during(format_args!("network {name}"));
        let network = libvirt.network(name).await.map_err(about)?;
        if libvirt.network_is_active(&network).await.map_err(about)? != 1 {
            let text = format!("network {name} is not active; start it: virsh net-start {name}");
            return Err(Error::invalid(text));
        }
        let addresses = own_addresses(&libvirt.network_xml(&network).await.map_err(about)?);
        let words: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        found.facts.push(match &words[..] {
            [] => format!("network {name}"),
            words => format!("network {name}, the host has {} there", words.join(" and ")),
        });
        Ok(addresses)
    }

    async fn known_images(&self, found: &mut Preflight) -> Result<(), Error> {
        let mut say = |what: &str, path: &std::path::Path, sha256: &str| {
            found.facts.push(format!("{what} {}, SHA-256 {}", path.display(), &sha256[..16]));
        };
        match &self.config.boot {
            Boot::Kernel { kernel, initrd, cmdline: _ } => {
                let known = self.images.know(kernel, Use::Kernel).await?;
                say("kernel", &kernel.path, &known.sha256);
                if let Some(initrd) = initrd {
                    let known = self.images.know(initrd, Use::Initrd).await?;
                    say("initrd", &initrd.path, &known.sha256);
                }
            }
            Boot::Disk { image: LibvirtImage::File(file), .. } => {
                let known = self.images.know(file, Use::Disk).await?;
                say("image", &file.path, &known.sha256);
            }
            Boot::Disk { image: LibvirtImage::Volume(_), .. } | Boot::Nothing => {}
        }
        Ok(())
    }
}

/// Returns whether a VM can be reached from its host by this address.
fn is_useful(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    }
}

/// Returns those addresses of a libvirt network that this host has; libvirtd may run on another host.
fn own_addresses(xml: &str) -> Vec<IpAddr> {
    let Ok(document) = roxmltree::Document::parse(xml) else { return Vec::new() };
    let ips = document.root_element().children().filter(|node| node.has_tag_name("ip"));
    let parsed = ips.filter_map(|node| node.attribute("address")?.parse::<IpAddr>().ok());
    parsed.filter(|address| UdpSocket::bind((*address, 0)).is_ok()).collect()
}
