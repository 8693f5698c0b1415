//! Defines the calls that the provider makes, each with its arguments and its answer. The numbers are libvirt's.

use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::sleep;

use super::message::STREAM_PIECE;
use super::xdr::{self, Garbled, List, Put, Reader, Take, Uuid, structure};
use super::{LibvirtConnection, RpcError, code, unless_absent};

/// Longest list of domains, volumes and the like in an answer (libvirt's own limit).
const LIST: usize = 16384;
/// Longest list of a domain's interfaces, and of an interface's addresses.
const INTERFACES: usize = 2048;
/// Longest list of a network's leases.
const LEASES: usize = 65536;
const AUTH_TYPES: usize = 20;

/// Longest wait for other work on a pool.
const BUSY_POOL: Duration = Duration::from_secs(10);

const CONNECT_OPEN: i32 = 1;
const NODE_GET_INFO: i32 = 6;
const DOMAIN_LOOKUP_BY_UUID: i32 = 24;
const DOMAIN_UNDEFINE: i32 = 35;
const SUPPORTS_FEATURE: i32 = 60;
const AUTH_LIST: i32 = 66;
const AUTH_POLKIT: i32 = 70;
const POOL_REFRESH: i32 = 83;
const VOL_DELETE: i32 = 94;
const VOL_LOOKUP_BY_NAME: i32 = 95;
const VOL_UPLOAD: i32 = 208;
const VOL_DOWNLOAD: i32 = 209;
const DOMAIN_UNDEFINE_FLAGS: i32 = 231;
const DOMAIN_GET_METADATA: i32 = 265;
const NETWORK_UPDATE: i32 = 291;
const EVENT_REGISTER: i32 = 316;
const NETWORK_GET_DHCP_LEASES: i32 = 341;
const INTERFACE_ADDRESSES: i32 = 353;

pub(super) const EVENT_LIFECYCLE: i32 = 318;
pub(super) const EVENT_DEVICE_REMOVED: i32 = 333;
pub(super) const EVENT_DEVICE_KEPT: i32 = 367;
/// Ids for the registration of these events (`virDomainEventID`).
const EVENT_IDS: [i32; 3] = [0, 15, 22];

/// `VIR_DOMAIN_UNDEFINE_*`: saved state, snapshots and checkpoints, nvram, TPM.
const UNDEFINE_ALL: u32 = 1 | 2 | 4 | 16;
/// `VIR_DOMAIN_METADATA_ELEMENT`.
const METADATA_ELEMENT: i32 = 2;
/// `VIR_DOMAIN_AFFECT_CONFIG`.
const CONFIG: u32 = 2;
/// `VIR_DOMAIN_BLOCK_RESIZE_BYTES`: without it the size is in KiB.
const BYTES: u32 = 1;
/// `VIR_DOMAIN_AFFECT_LIVE`, `VIR_NETWORK_UPDATE_AFFECT_LIVE`.
const LIVE: u32 = 1;
/// `VIR_CONNECT_LIST_STORAGE_POOLS_ACTIVE`.
const ACTIVE_POOLS: u32 = 2;
/// `VIR_NETWORK_SECTION_IP_DHCP_HOST`.
const DHCP_HOST: u32 = 4;
/// `VIR_DRV_FEATURE_NETWORK_UPDATE_HAS_CORRECT_ORDER`: without it (before libvirt 7.2) command and section are swapped.
const RIGHT_ORDER: i32 = 16;
/// `VIR_DOMAIN_START_AUTODESTROY`: the domain ends with the connection.
const AUTODESTROY: u32 = 2;

structure! {
    /// A domain, as messages name it.
    Domain {
        name: String,
        uuid: Uuid,
        /// Its id while it runs; -1 otherwise.
        id: i32,
    }
}

structure! {
    /// A pool or a network.
    Named { name: String, uuid: Uuid }
}

structure! {
    Volume {
        pool: String,
        name: String,
        key: String,
    }
}

pub(crate) struct Host {
    /// Its architecture (`x86_64`).
    pub(crate) arch: String,
    pub(crate) memory_kib: u64,
    pub(crate) cpus: i32,
}

structure! {
    /// State of a domain, with its reason.
    DomainState {
        /// `virDomainState`.
        state: i32,
        /// Its meaning depends on the state.
        reason: i32,
    }
}

impl DomainState {
    /// Returns whether the domain is powered off, crashed, or was never started.
    pub(crate) fn is_off(&self) -> bool {
        self.state == 5 || self.state == 6
    }

    /// Returns whether the domain has never run since libvirtd knows it.
    pub(crate) fn is_fresh(&self) -> bool {
        self.state == 5 && self.reason == 0
    }

    /// Returns whether the domain has not run: it is fresh, or it failed to start.
    pub(crate) fn never_ran(&self) -> bool {
        self.is_fresh() || self.reason == 6
    }

    pub(crate) fn describe(&self) -> &'static str {
        match (self.state, self.reason) {
            (1, _) => "running",
            (3, _) => "paused",
            (5, 0) => "shut off",
            (5, 1) => "it was shut down or powered itself off",
            (5, 2) => "it was destroyed from outside",
            (5 | 6, 3) => "QEMU crashed or was killed",
            (5, 6) => "it failed to start",
            (5, 8) => "QEMU was gone when libvirtd came back",
            (6, _) => "its kernel crashed",
            (4, _) => "it is shutting down",
            _ => "in a state that we do not know",
        }
    }

    /// Returns whether the domain runs, or would go on running.
    pub(crate) fn is_on(&self) -> bool {
        !self.is_off()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NicAddress {
    pub(crate) mac: Option<String>,
    pub(crate) address: String,
}

/// A change of a network's DHCP host entries (`virNetworkUpdateCommand`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostChange {
    /// Removes the entry that matches in all given attributes.
    Delete = 2,
    /// Adds an entry. libvirtd refuses one with the MAC, name or address of another entry.
    Add = 3,
}

/// Source of a domain's addresses (`virDomainInterfaceAddressesSource`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressSource {
    /// The leases of libvirt's own DHCP server.
    Lease = 0,
    /// The host's neighbour table.
    Arp = 2,
}

/// Absent text.
const NONE: Option<&str> = None;

/// Defines methods that make one call each: the procedure with its number, the answer, and the arguments as sent.
macro_rules! calls {
    ($(
        $(#[$about:meta])*
        $procedure:ident = $number:literal: $name:ident($($argument:ident: $kind:ty),*) -> $answer:ty = $sent:expr;
    )*) => {
        $(const $procedure: i32 = $number;)*

        impl LibvirtConnection {$(
            $(#[$about])*
            pub(crate) async fn $name(&self, $($argument: $kind),*) -> Result<$answer, RpcError> {
                self.ask($procedure, $sent).await
            }
        )*}
    };
}

calls! {
    /// Returns the driver's name: `QEMU`, `TEST`.
    CONNECT_GET_TYPE = 3: driver() -> String = ();
    /// Returns the version of libvirt, as a number: 9 000 000 is 9.0.0.
    GET_LIB_VERSION = 157: version() -> u64 = ();
    /// Returns the hypervisor's capabilities for this machine type and kind of domain, as XML.
    GET_DOMAIN_CAPABILITIES = 342: domain_capabilities(machine: &str, kind: &str) -> String =
        (NONE, NONE, Some(machine), Some(kind), 0);
    LIST_ALL_DOMAINS = 273: domains() -> List<Domain, LIST> = (1, 0);
    /// Defines a domain, without starting it.
    DOMAIN_DEFINE_XML = 11: define(xml: &str) -> Domain = xml;
    /// Starts a domain that is removed when it ends, or when this connection closes.
    DOMAIN_CREATE_XML = 10: run_once(xml: &str) -> Domain = (xml, AUTODESTROY);
    DOMAIN_CREATE = 196: start_domain(domain: &Domain) -> Domain = (domain, 0);
    /// Presses the domain's power button.
    DOMAIN_SHUTDOWN = 33: shut_down(domain: &Domain) -> () = domain;
    /// Ends the domain at once.
    DOMAIN_DESTROY = 12: destroy(domain: &Domain) -> () = domain;
    DOMAIN_GET_STATE = 212: state(domain: &Domain) -> DomainState = (domain, 0);
    /// Returns the current description of the domain, as XML.
    DOMAIN_GET_XML_DESC = 14: domain_xml(domain: &Domain) -> String = (domain, 0);
    /// Writes an element into the metadata of a domain's persistent configuration.
    DOMAIN_SET_METADATA = 264: set_metadata(domain: &Domain, xml: &str, key: &str, uri: &str) -> () =
        (domain, METADATA_ELEMENT, Some(xml), Some(key), Some(uri), CONFIG);
    /// Sets the size of a running domain's disk, in bytes. A file of another length is changed to this length.
    DOMAIN_BLOCK_RESIZE = 251: resize_disk(domain: &Domain, disk: &str, bytes: u64) -> () =
        (domain, disk, bytes, BYTES);
    /// Returns three sizes of a running domain's disk, in bytes: the allocated part, as the guest sees it, and of its
    /// storage. `disk` is the disk's target.
    DOMAIN_GET_BLOCK_INFO = 194: disk_sizes(domain: &Domain, disk: &str) -> (u64, u64, u64) = (domain, disk, 0);
    ATTACH_DEVICE = 160: attach(domain: &Domain, xml: &str) -> () = (domain, xml, LIVE);
    /// Asks a running domain to release a device. An event reports the release.
    DETACH_DEVICE = 161: detach(domain: &Domain, xml: &str) -> () = (domain, xml, LIVE);
    NETWORK_LOOKUP_BY_NAME = 46: network(name: &str) -> Named = name;
    NETWORK_GET_XML_DESC = 43: network_xml(network: &Named) -> String = (network, 0);
    /// Returns 1 for an active network.
    NETWORK_IS_ACTIVE = 152: network_is_active(network: &Named) -> i32 = network;
    /// Returns the active pools.
    LIST_ALL_POOLS = 281: pools() -> List<Named, LIST> = (1, ACTIVE_POOLS);
    POOL_LOOKUP_BY_NAME = 84: pool(name: &str) -> Named = name;
    POOL_GET_XML_DESC = 88: pool_xml(pool: &Named) -> String = (pool, 0);
    /// Returns the pool's state (2 is running), and its size, its allocated and its free bytes.
    POOL_GET_INFO = 87: pool_info(pool: &Named) -> (u32, u64, u64, u64) = pool;
    POOL_LIST_ALL_VOLUMES = 282: volumes(pool: &Named) -> List<Volume, LIST> = (pool, 1, 0);
    VOL_CREATE_XML = 93: create_volume(pool: &Named, xml: &str) -> Volume = (pool, xml, 0);
    VOL_GET_XML_DESC = 99: volume_xml(volume: &Volume) -> String = (volume, 0);
    /// Returns the volume's kind, its capacity, and the allocated part of it, in bytes.
    VOL_GET_INFO = 98: volume_sizes(volume: &Volume) -> (i32, u64, u64) = volume;
    /// Returns the volume's path on the host.
    VOL_GET_PATH = 100: volume_path(volume: &Volume) -> String = volume;
}

impl LibvirtConnection {
    /// Makes one call with these arguments, and reads its answer.
    async fn ask<A: Take>(&self, procedure: i32, arguments: impl Put) -> Result<A, RpcError> {
        Ok(xdr::read(&self.call(procedure, &xdr::write(&arguments)).await?)?)
    }

    /// Authenticates, and opens the hypervisor with this URI.
    pub(crate) async fn hello(&self, uri: &str) -> Result<(), RpcError> {
        let types: List<i32, AUTH_TYPES> = self.ask(AUTH_LIST, ()).await?;
        match types.0.first() {
            None | Some(0) => {}
            Some(2) => self.ask(AUTH_POLKIT, ()).await?,
            Some(other) => {
                let text = format!(
                    "libvirtd asks for a password (authentication {other}), and we have none: use a socket \
                     with auth_unix_rw = \"none\" or \"polkit\" in libvirtd.conf, and permissions on it"
                );
                return Err(RpcError::Refused(text));
            }
        }
        self.ask(CONNECT_OPEN, (Some(uri), 0)).await
    }

    /// Registers for the events of domains.
    pub(crate) async fn listen(&self) -> Result<(), RpcError> {
        for id in EVENT_IDS {
            match self.ask(EVENT_REGISTER, (id, 0)).await {
                // A driver may not have the events of devices.
                Err(RpcError::Failed(_)) if id != 0 => {}
                registered => registered?,
            }
        }
        Ok(())
    }

    pub(crate) async fn node(&self) -> Result<Host, RpcError> {
        // `char[32]`, each character in a word of its own.
        let (arch, memory_kib, cpus): ([u32; 32], u64, i32) = self.ask(NODE_GET_INFO, ()).await?;
        let arch = arch.iter().filter_map(|word| u8::try_from(*word).ok());
        let arch = arch.filter(u8::is_ascii_graphic).map(char::from).collect();
        Ok(Host { arch, memory_kib, cpus })
    }

    /// Returns the domain with this UUID; `None`: there is none.
    pub(crate) async fn domain(&self, uuid: &Uuid) -> Result<Option<Domain>, RpcError> {
        unless_absent(self.ask(DOMAIN_LOOKUP_BY_UUID, uuid).await)
    }

    /// Removes a domain's definition, with all data that libvirt keeps for it.
    pub(crate) async fn undefine(&self, domain: &Domain) -> Result<(), RpcError> {
        let undefined = self.ask(DOMAIN_UNDEFINE_FLAGS, (domain, UNDEFINE_ALL)).await;
        match undefined.as_ref().map_err(RpcError::code) {
            // A driver that does not know all of these flags keeps no such data.
            Err(Some(code::INVALID_ARG | code::NO_SUPPORT)) => self.ask(DOMAIN_UNDEFINE, domain).await,
            _ => undefined,
        }
    }

    /// Returns the element with this URI from the domain's metadata; `None`: there is none.
    pub(crate) async fn metadata(&self, domain: &Domain, uri: &str) -> Result<Option<String>, RpcError> {
        match self.ask(DOMAIN_GET_METADATA, (domain, METADATA_ELEMENT, Some(uri), CONFIG)).await {
            Err(error) if error.code() == Some(code::NO_DOMAIN_METADATA) => Ok(None),
            // A transient domain has no configuration beside the running one; it is not a domain of this provider.
            Err(error) if error.code() == Some(code::OPERATION_INVALID) => Ok(None),
            text => text.map(Some),
        }
    }

    /// Returns the domain's addresses that this source knows.
    pub(crate) async fn addresses(
        &self,
        domain: &Domain,
        source: AddressSource,
    ) -> Result<Vec<NicAddress>, RpcError> {
        type Addresses = List<(i32, String, u32), INTERFACES>;
        let nics: List<(String, Option<String>, Addresses), INTERFACES> =
            self.ask(INTERFACE_ADDRESSES, (domain, source as u32, 0)).await?;
        let addresses = nics.0.into_iter().flat_map(|(_, mac, addresses)| {
            let address = move |(_, address, _)| NicAddress { mac: mac.clone(), address };
            addresses.0.into_iter().map(address)
        });
        Ok(addresses.collect())
    }

    /// Returns the unexpired leases of the network's own DHCP server.
    pub(crate) async fn leases(&self, network: &Named) -> Result<Vec<NicAddress>, RpcError> {
        type Text = Option<String>;
        // Interface, end, family, MAC address, association, address, prefix, host name, client.
        type Lease = (String, u64, i32, Text, Text, String, u32, Text, Text);
        let leases: List<Lease, LEASES> = self.ask(NETWORK_GET_DHCP_LEASES, (network, NONE, 1, 0)).await?;
        let leases = leases.0.into_iter();
        Ok(leases.map(|(_, _, _, mac, _, address, ..)| NicAddress { mac, address }).collect())
    }

    /// Changes a DHCP host entry of the running network, but not of its configuration. `parent` is the index of the
    /// network's `ip` element, from 0.
    pub(crate) async fn change_host(
        &self,
        network: &Named,
        change: HostChange,
        parent: i32,
        xml: &str,
    ) -> Result<(), RpcError> {
        let in_order = match self.ask::<i32>(SUPPORTS_FEATURE, RIGHT_ORDER).await {
            // An older libvirt does not know the feature.
            Err(RpcError::Failed(_)) => false,
            answer => answer? == 1,
        };
        let (command, section) = (change as u32, DHCP_HOST);
        let (first, second) = if in_order { (command, section) } else { (section, command) };
        self.ask(NETWORK_UPDATE, (network, first, second, parent, xml, LIVE)).await
    }

    /// Makes libvirtd scan the pool's folder. The time grows with the pool. libvirtd refuses while a disk is made or
    /// removed there; the call is then repeated for at most `BUSY_POOL`.
    pub(crate) async fn refresh(&self, pool: &Named) -> Result<(), RpcError> {
        let since = Instant::now();
        loop {
            let done = self.ask(POOL_REFRESH, (pool, 0)).await;
            let busy = matches!(&done, Err(RpcError::Failed(why)) if why.text.contains("asynchronous jobs"));
            if !busy || since.elapsed() > BUSY_POOL {
                return done;
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the volume with this name; `None`: the pool does not know it.
    pub(crate) async fn volume(&self, pool: &Named, name: &str) -> Result<Option<Volume>, RpcError> {
        unless_absent(self.ask(VOL_LOOKUP_BY_NAME, (pool, name)).await)
    }

    /// Returns the volume with this name, as [`LibvirtConnection::volume`]. Makes libvirtd scan the pool if it does not
    /// know the volume.
    pub(crate) async fn find_volume(&self, pool: &Named, name: &str) -> Result<Option<Volume>, RpcError> {
        if let Some(volume) = self.volume(pool, name).await? {
            return Ok(Some(volume));
        }
        self.refresh(pool).await?;
        self.volume(pool, name).await
    }

    /// Deletes a volume. Succeeds also if it does not exist.
    pub(crate) async fn delete_volume(&self, volume: &Volume) -> Result<(), RpcError> {
        unless_absent(self.ask::<()>(VOL_DELETE, (volume, 0)).await).map(drop)
    }

    /// Writes the volume from its beginning.
    pub(crate) async fn upload(
        &self,
        volume: &Volume,
        length: u64,
        mut data: impl AsyncRead + Unpin,
    ) -> Result<(), RpcError> {
        let call = xdr::write(&(volume, 0u64, length, 0));
        let mut stream = self.open_stream(VOL_UPLOAD, &call, 0).await?;
        let mut piece = vec![0; STREAM_PIECE];
        loop {
            let read = data.read(&mut piece).await;
            let count = read.map_err(|error| RpcError::Lost(format!("read the file to upload: {error}")))?;
            match piece.get(..count) {
                None | Some([]) => return self.finish(&mut stream).await,
                Some(bytes) => self.send_piece(&mut stream, bytes).await?,
            }
        }
    }

    /// Reads a part of the volume; returns less where the volume ends.
    pub(crate) async fn download(
        &self,
        volume: &Volume,
        offset: u64,
        length: usize,
    ) -> Result<Vec<u8>, RpcError> {
        let call = xdr::write(&(volume, offset, length as u64, 0));
        let mut stream = self.open_stream(VOL_DOWNLOAD, &call, length).await?;
        let mut data = Vec::new();
        loop {
            let piece = self.next_piece(&mut stream).await?;
            if piece.is_empty() {
                self.finish(&mut stream).await?;
                return Ok(data);
            }
            data.extend(piece);
        }
    }
}
