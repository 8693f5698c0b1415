//! Defines the calls that the provider makes, each with its arguments and its answer. The numbers are libvirt's.

use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::sleep;

use super::message::STREAM_PIECE;
use super::xdr::{Garbled, Reader, Uuid, Writer};
use super::{Connection, RpcError};

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
const CONNECT_GET_TYPE: i32 = 3;
const NODE_GET_INFO: i32 = 6;
const DOMAIN_CREATE_XML: i32 = 10;
const DOMAIN_DEFINE_XML: i32 = 11;
const DOMAIN_DESTROY: i32 = 12;
const DOMAIN_GET_XML_DESC: i32 = 14;
const DOMAIN_LOOKUP_BY_UUID: i32 = 24;
const DOMAIN_UNDEFINE: i32 = 35;
const NETWORK_LOOKUP_BY_NAME: i32 = 46;
const NETWORK_GET_XML_DESC: i32 = 43;
const SUPPORTS_FEATURE: i32 = 60;
const AUTH_LIST: i32 = 66;
const AUTH_POLKIT: i32 = 70;
const POOL_REFRESH: i32 = 83;
const POOL_LOOKUP_BY_NAME: i32 = 84;
const POOL_GET_INFO: i32 = 87;
const POOL_GET_XML_DESC: i32 = 88;
const VOL_CREATE_XML: i32 = 93;
const VOL_DELETE: i32 = 94;
const VOL_LOOKUP_BY_NAME: i32 = 95;
const VOL_GET_INFO: i32 = 98;
const VOL_GET_XML_DESC: i32 = 99;
const VOL_GET_PATH: i32 = 100;
const NETWORK_IS_ACTIVE: i32 = 152;
const GET_LIB_VERSION: i32 = 157;
const ATTACH_DEVICE: i32 = 160;
const DETACH_DEVICE: i32 = 161;
const DOMAIN_GET_BLOCK_INFO: i32 = 194;
const DOMAIN_CREATE: i32 = 196;
const VOL_UPLOAD: i32 = 208;
const VOL_DOWNLOAD: i32 = 209;
const DOMAIN_GET_STATE: i32 = 212;
const DOMAIN_UNDEFINE_FLAGS: i32 = 231;
const DOMAIN_BLOCK_RESIZE: i32 = 251;
const DOMAIN_SET_METADATA: i32 = 264;
const DOMAIN_GET_METADATA: i32 = 265;
const LIST_ALL_DOMAINS: i32 = 273;
const POOL_LIST_ALL_VOLUMES: i32 = 282;
const NETWORK_UPDATE: i32 = 291;
const EVENT_REGISTER: i32 = 316;
const NETWORK_GET_DHCP_LEASES: i32 = 341;
const GET_DOMAIN_CAPABILITIES: i32 = 342;
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
/// `VIR_NETWORK_SECTION_IP_DHCP_HOST`.
const DHCP_HOST: u32 = 4;
/// `VIR_DRV_FEATURE_NETWORK_UPDATE_HAS_CORRECT_ORDER`: without it (before libvirt 7.2) command and section are swapped.
const RIGHT_ORDER: i32 = 16;
/// `VIR_DOMAIN_START_AUTODESTROY`: the domain ends with the connection.
const AUTODESTROY: u32 = 2;

/// A domain, as messages name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its id while it runs; -1 otherwise.
    pub id: i32,
}

impl Domain {
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Domain, Garbled> {
        Ok(Domain { name: reader.text()?, uuid: reader.uuid()?, id: reader.i32()? })
    }

    fn write(&self, writer: Writer) -> Writer {
        writer.text(&self.name).uuid(&self.uuid).i32(self.id)
    }
}

/// A pool or a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// Its name.
    pub name: String,
    uuid: Uuid,
}

impl Named {
    fn read(reader: &mut Reader<'_>) -> Result<Named, Garbled> {
        Ok(Named { name: reader.text()?, uuid: reader.uuid()? })
    }

    fn write(&self, writer: Writer) -> Writer {
        writer.text(&self.name).uuid(&self.uuid)
    }
}

/// A storage volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Name of its pool.
    pub pool: String,
    /// Its name in the pool.
    pub name: String,
    key: String,
}

impl Volume {
    fn read(reader: &mut Reader<'_>) -> Result<Volume, Garbled> {
        Ok(Volume { pool: reader.text()?, name: reader.text()?, key: reader.text()? })
    }

    fn write(&self, writer: Writer) -> Writer {
        writer.text(&self.pool).text(&self.name).text(&self.key)
    }
}

/// Size of a pool or volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Capacity in bytes.
    pub capacity: u64,
    /// Allocated bytes.
    pub allocation: u64,
    /// Free bytes of a pool.
    pub available: u64,
}

/// Host of libvirtd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its architecture (`x86_64`).
    pub arch: String,
    /// Its memory in KiB.
    pub memory_kib: u64,
    /// Number of its CPUs.
    pub cpus: i32,
}

/// State of a domain (`virDomainState`), with its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainState {
    /// `virDomainState`.
    pub state: i32,
    /// Reason; its meaning depends on the state.
    pub reason: i32,
}

impl DomainState {
    /// Returns whether the domain is powered off, crashed, or was never started.
    pub fn is_off(self) -> bool {
        self.state == 5 || self.state == 6
    }

    /// Returns whether the domain has never run since libvirtd knows it.
    pub fn is_fresh(self) -> bool {
        self.state == 5 && self.reason == 0
    }

    /// Describes the state.
    pub fn describe(self) -> &'static str {
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
    pub fn is_on(self) -> bool {
        !self.is_off()
    }
}

/// Address of a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicAddress {
    /// MAC address of the NIC.
    pub mac: Option<String>,
    /// Address as text.
    pub address: String,
}

/// A change of a network's DHCP host entries (`virNetworkUpdateCommand`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostChange {
    /// Removes the entry that matches in all given attributes.
    Delete = 2,
    /// Adds an entry. libvirtd refuses one with the MAC, name or address of another entry.
    Add = 3,
}

/// Source of a domain's addresses (`virDomainInterfaceAddressesSource`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressSource {
    /// The leases of libvirt's own DHCP server.
    Lease = 0,
    /// The host's neighbour table.
    Arp = 2,
}

impl Connection {
    /// Authenticates, and opens the hypervisor with this URI.
    pub async fn hello(&self, uri: &str) -> Result<(), RpcError> {
        let answer = self.call(AUTH_LIST, &[]).await?;
        let mut reader = Reader::new(&answer);
        let types = reader.list(AUTH_TYPES, Reader::i32)?;
        match types.first() {
            None | Some(0) => {}
            Some(2) => drop(self.call(AUTH_POLKIT, &[]).await?),
            Some(other) => {
                let text = format!(
                    "libvirtd asks for a password (authentication {other}), and we have none: use a socket \
                     with auth_unix_rw = \"none\" or \"polkit\" in libvirtd.conf, and permissions on it"
                );
                return Err(RpcError::Refused(text));
            }
        }
        let open = Writer::new().optional_text(Some(uri)).u32(0).done();
        self.call(CONNECT_OPEN, &open).await.map(drop)
    }

    /// Registers for the events of domains.
    pub async fn listen(&self) -> Result<(), RpcError> {
        for id in EVENT_IDS {
            let asked = self.call(EVENT_REGISTER, &Writer::new().i32(id).u32(0).done()).await;
            match asked {
                // A driver may not have the events of devices.
                Err(RpcError::Failed(_)) if id != 0 => {}
                other => drop(other?),
            }
        }
        Ok(())
    }

    /// Returns the driver's name: `QEMU`, `TEST`.
    pub async fn driver(&self) -> Result<String, RpcError> {
        let answer = self.call(CONNECT_GET_TYPE, &[]).await?;
        Ok(Reader::new(&answer).text()?)
    }

    /// Returns the version of libvirt, as a number: 9 000 000 is 9.0.0.
    pub async fn version(&self) -> Result<u64, RpcError> {
        let answer = self.call(GET_LIB_VERSION, &[]).await?;
        Ok(Reader::new(&answer).u64()?)
    }

    /// Returns facts about the host.
    pub async fn node(&self) -> Result<Host, RpcError> {
        let answer = self.call(NODE_GET_INFO, &[]).await?;
        let mut reader = Reader::new(&answer);
        let mut arch = String::new();
        // `char[32]`, each character in a word of its own.
        for _ in 0..32 {
            let byte = u8::try_from(reader.u32()?).unwrap_or(0);
            if byte.is_ascii_graphic() {
                arch.push(char::from(byte));
            }
        }
        Ok(Host { arch, memory_kib: reader.u64()?, cpus: reader.i32()? })
    }

    /// Returns the hypervisor's capabilities for this machine type and kind of domain, as XML.
    pub async fn domain_capabilities(&self, machine: &str, kind: &str) -> Result<String, RpcError> {
        let call = Writer::new().optional_text(None).optional_text(None);
        let call = call.optional_text(Some(machine)).optional_text(Some(kind)).u32(0).done();
        self.text(GET_DOMAIN_CAPABILITIES, &call).await
    }

    async fn text(&self, procedure: i32, call: &[u8]) -> Result<String, RpcError> {
        let answer = self.call(procedure, call).await?;
        Ok(Reader::new(&answer).text()?)
    }

    async fn domain_of(&self, procedure: i32, call: &[u8]) -> Result<Domain, RpcError> {
        let answer = self.call(procedure, call).await?;
        Ok(Domain::read(&mut Reader::new(&answer))?)
    }

    /// Returns the domain with this UUID; `None`: there is none.
    pub async fn domain(&self, uuid: &Uuid) -> Result<Option<Domain>, RpcError> {
        match self.domain_of(DOMAIN_LOOKUP_BY_UUID, &Writer::new().uuid(uuid).done()).await {
            Ok(domain) => Ok(Some(domain)),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns all domains.
    pub async fn domains(&self) -> Result<Vec<Domain>, RpcError> {
        let answer = self.call(LIST_ALL_DOMAINS, &Writer::new().i32(1).u32(0).done()).await?;
        Ok(Reader::new(&answer).list(LIST, Domain::read)?)
    }

    /// Defines a domain, without starting it.
    pub async fn define(&self, xml: &str) -> Result<Domain, RpcError> {
        self.domain_of(DOMAIN_DEFINE_XML, &Writer::new().text(xml).done()).await
    }

    /// Starts a domain that is removed when it ends, or when this connection closes.
    pub async fn run_once(&self, xml: &str) -> Result<Domain, RpcError> {
        self.domain_of(DOMAIN_CREATE_XML, &Writer::new().text(xml).u32(AUTODESTROY).done()).await
    }

    /// Starts a defined domain.
    pub async fn start_domain(&self, domain: &Domain) -> Result<Domain, RpcError> {
        self.domain_of(DOMAIN_CREATE, &domain.write(Writer::new()).u32(0).done()).await
    }

    /// Ends a domain at once.
    pub async fn destroy(&self, domain: &Domain) -> Result<(), RpcError> {
        self.call(DOMAIN_DESTROY, &domain.write(Writer::new()).done()).await.map(drop)
    }

    /// Removes a domain's definition, with all data that libvirt keeps for it.
    pub async fn undefine(&self, domain: &Domain) -> Result<(), RpcError> {
        let call = domain.write(Writer::new()).u32(UNDEFINE_ALL).done();
        match self.call(DOMAIN_UNDEFINE_FLAGS, &call).await {
            // A driver that does not know all of these flags keeps no such data.
            Err(error)
                if matches!(error.code(), Some(super::code::INVALID_ARG | super::code::NO_SUPPORT)) =>
            {
                self.call(DOMAIN_UNDEFINE, &domain.write(Writer::new()).done()).await.map(drop)
            }
            other => other.map(drop),
        }
    }

    /// Returns the state of a domain.
    pub async fn state(&self, domain: &Domain) -> Result<DomainState, RpcError> {
        let answer = self.call(DOMAIN_GET_STATE, &domain.write(Writer::new()).u32(0).done()).await?;
        let mut reader = Reader::new(&answer);
        Ok(DomainState { state: reader.i32()?, reason: reader.i32()? })
    }

    /// Returns the current description of the domain, as XML.
    pub async fn domain_xml(&self, domain: &Domain) -> Result<String, RpcError> {
        self.text(DOMAIN_GET_XML_DESC, &domain.write(Writer::new()).u32(0).done()).await
    }

    /// Returns the element with this URI from the domain's metadata; `None`: there is none.
    pub async fn metadata(&self, domain: &Domain, uri: &str) -> Result<Option<String>, RpcError> {
        let call =
            domain.write(Writer::new()).i32(METADATA_ELEMENT).optional_text(Some(uri)).u32(CONFIG).done();
        match self.text(DOMAIN_GET_METADATA, &call).await {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.code() == Some(super::code::NO_DOMAIN_METADATA) => Ok(None),
            // A transient domain has no configuration beside the running one; it is not a domain of this provider.
            Err(error) if error.code() == Some(super::code::OPERATION_INVALID) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes an element into the metadata of a domain's persistent configuration.
    pub async fn set_metadata(
        &self,
        domain: &Domain,
        xml: &str,
        key: &str,
        uri: &str,
    ) -> Result<(), RpcError> {
        let call = domain.write(Writer::new()).i32(METADATA_ELEMENT);
        let call = call.optional_text(Some(xml)).optional_text(Some(key)).optional_text(Some(uri));
        self.call(DOMAIN_SET_METADATA, &call.u32(CONFIG).done()).await.map(drop)
    }

    /// Attaches a device to a running domain.
    pub async fn attach(&self, domain: &Domain, xml: &str) -> Result<(), RpcError> {
        let call = domain.write(Writer::new()).text(xml).u32(LIVE).done();
        self.call(ATTACH_DEVICE, &call).await.map(drop)
    }

    /// Asks a running domain to release a device. An event reports the release.
    pub async fn detach(&self, domain: &Domain, xml: &str) -> Result<(), RpcError> {
        let call = domain.write(Writer::new()).text(xml).u32(LIVE).done();
        self.call(DETACH_DEVICE, &call).await.map(drop)
    }

    /// Returns two sizes of a running domain's disk, in bytes: as the guest sees it, and of its storage. `disk` is the
    /// disk's target.
    pub async fn disk_sizes(&self, domain: &Domain, disk: &str) -> Result<(u64, u64), RpcError> {
        let call = domain.write(Writer::new()).text(disk).u32(0).done();
        let answer = self.call(DOMAIN_GET_BLOCK_INFO, &call).await?;
        let mut reader = Reader::new(&answer);
        let _allocation = reader.u64()?;
        Ok((reader.u64()?, reader.u64()?))
    }

    /// Sets the size of a running domain's disk, in bytes. A file of another length is changed to this length.
    pub async fn resize_disk(&self, domain: &Domain, disk: &str, bytes: u64) -> Result<(), RpcError> {
        let call = domain.write(Writer::new()).text(disk).u64(bytes).u32(BYTES).done();
        self.call(DOMAIN_BLOCK_RESIZE, &call).await.map(drop)
    }

    /// Returns the domain's addresses that this source knows.
    pub async fn addresses(
        &self,
        domain: &Domain,
        source: AddressSource,
    ) -> Result<Vec<NicAddress>, RpcError> {
        let call = domain.write(Writer::new()).u32(source as u32).u32(0).done();
        let answer = self.call(INTERFACE_ADDRESSES, &call).await?;
        let interfaces = Reader::new(&answer).list(INTERFACES, |reader| {
            let _name = reader.text()?;
            let mac = reader.optional_text()?;
            let addresses = reader.list(INTERFACES, |reader| {
                let _family = reader.i32()?;
                let address = reader.text()?;
                let _prefix = reader.u32()?;
                Ok(address)
            })?;
            Ok((mac, addresses))
        })?;
        let each = |(mac, addresses): (Option<String>, Vec<String>)| {
            addresses.into_iter().map(move |address| NicAddress { mac: mac.clone(), address })
        };
        Ok(interfaces.into_iter().flat_map(each).collect())
    }

    /// Returns the network with this name.
    pub async fn network(&self, name: &str) -> Result<Named, RpcError> {
        let answer = self.call(NETWORK_LOOKUP_BY_NAME, &Writer::new().text(name).done()).await?;
        Ok(Named::read(&mut Reader::new(&answer))?)
    }

    /// Returns whether the network is started.
    pub async fn network_is_active(&self, network: &Named) -> Result<bool, RpcError> {
        let answer = self.call(NETWORK_IS_ACTIVE, &network.write(Writer::new()).done()).await?;
        Ok(Reader::new(&answer).i32()? == 1)
    }

    /// Returns the network's description, as XML.
    pub async fn network_xml(&self, network: &Named) -> Result<String, RpcError> {
        self.text(NETWORK_GET_XML_DESC, &network.write(Writer::new()).u32(0).done()).await
    }

    /// Returns the unexpired leases of the network's own DHCP server.
    pub async fn leases(&self, network: &Named) -> Result<Vec<NicAddress>, RpcError> {
        let call = network.write(Writer::new()).optional_text(None).i32(1).u32(0).done();
        let answer = self.call(NETWORK_GET_DHCP_LEASES, &call).await?;
        let leases = Reader::new(&answer).list(LEASES, |reader| {
            let (_interface, _expires, _family) = (reader.text()?, reader.u64()?, reader.i32()?);
            let (mac, _association) = (reader.optional_text()?, reader.optional_text()?);
            let (address, _prefix) = (reader.text()?, reader.u32()?);
            let (_hostname, _client) = (reader.optional_text()?, reader.optional_text()?);
            Ok(NicAddress { mac, address })
        })?;
        Ok(leases)
    }

    /// Changes a DHCP host entry of the running network, but not of its configuration. `parent` is the index of the
    /// network's `ip` element, from 0.
    pub async fn change_host(
        &self,
        network: &Named,
        change: HostChange,
        parent: i32,
        xml: &str,
    ) -> Result<(), RpcError> {
        let asked = self.call(SUPPORTS_FEATURE, &Writer::new().i32(RIGHT_ORDER).done()).await;
        let in_order = match asked {
            // An older libvirt does not know the feature.
            Err(RpcError::Failed(_)) => false,
            answer => Reader::new(&answer?).i32()? == 1,
        };
        let (command, section) = (change as u32, DHCP_HOST);
        let (first, second) = if in_order { (command, section) } else { (section, command) };
        let call = network.write(Writer::new()).u32(first).u32(second).i32(parent).text(xml).u32(LIVE).done();
        self.call(NETWORK_UPDATE, &call).await.map(drop)
    }

    /// Returns the pool with this name.
    pub async fn pool(&self, name: &str) -> Result<Named, RpcError> {
        let answer = self.call(POOL_LOOKUP_BY_NAME, &Writer::new().text(name).done()).await?;
        Ok(Named::read(&mut Reader::new(&answer))?)
    }

    /// Returns the pool's description, as XML.
    pub async fn pool_xml(&self, pool: &Named) -> Result<String, RpcError> {
        self.text(POOL_GET_XML_DESC, &pool.write(Writer::new()).u32(0).done()).await
    }

    /// Returns the pool's state (2 is running) and size.
    pub async fn pool_info(&self, pool: &Named) -> Result<(u32, Room), RpcError> {
        let answer = self.call(POOL_GET_INFO, &pool.write(Writer::new()).done()).await?;
        let mut reader = Reader::new(&answer);
        let state = reader.u32()?;
        let room = Room { capacity: reader.u64()?, allocation: reader.u64()?, available: reader.u64()? };
        Ok((state, room))
    }

    /// Makes libvirtd scan the pool's folder. The time grows with the pool. libvirtd refuses while a disk is made or
    /// removed there; the call is then repeated for at most `BUSY_POOL`.
    pub async fn refresh(&self, pool: &Named) -> Result<(), RpcError> {
        let since = Instant::now();
        loop {
            let done = self.call(POOL_REFRESH, &pool.write(Writer::new()).u32(0).done()).await;
            let busy = matches!(&done, Err(RpcError::Failed(why)) if why.text.contains("asynchronous jobs"));
            if !busy || since.elapsed() > BUSY_POOL {
                return done.map(drop);
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns all volumes of the pool.
    pub async fn volumes(&self, pool: &Named) -> Result<Vec<Volume>, RpcError> {
        let call = pool.write(Writer::new()).i32(1).u32(0).done();
        let answer = self.call(POOL_LIST_ALL_VOLUMES, &call).await?;
        Ok(Reader::new(&answer).list(LIST, Volume::read)?)
    }

    /// Makes a volume.
    pub async fn create_volume(&self, pool: &Named, xml: &str) -> Result<Volume, RpcError> {
        let answer = self.call(VOL_CREATE_XML, &pool.write(Writer::new()).text(xml).u32(0).done()).await?;
        Ok(Volume::read(&mut Reader::new(&answer))?)
    }

    /// Returns the volume with this name; `None`: the pool does not know it.
    pub async fn volume(&self, pool: &Named, name: &str) -> Result<Option<Volume>, RpcError> {
        match self.call(VOL_LOOKUP_BY_NAME, &pool.write(Writer::new()).text(name).done()).await {
            Ok(answer) => Ok(Some(Volume::read(&mut Reader::new(&answer))?)),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the volume with this name, as [`Connection::volume`]. Makes libvirtd scan the pool if it does not know the
    /// volume.
    pub async fn find_volume(&self, pool: &Named, name: &str) -> Result<Option<Volume>, RpcError> {
        if let Some(volume) = self.volume(pool, name).await? {
            return Ok(Some(volume));
        }
        self.refresh(pool).await?;
        self.volume(pool, name).await
    }

    /// Deletes a volume. Succeeds also if it does not exist.
    pub async fn delete_volume(&self, volume: &Volume) -> Result<(), RpcError> {
        match self.call(VOL_DELETE, &volume.write(Writer::new()).u32(0).done()).await {
            Err(error) if error.is_absent() => Ok(()),
            other => other.map(drop),
        }
    }

    /// Returns the current size of the volume.
    pub async fn volume_info(&self, volume: &Volume) -> Result<Room, RpcError> {
        let answer = self.call(VOL_GET_INFO, &volume.write(Writer::new()).done()).await?;
        let mut reader = Reader::new(&answer);
        let _kind = reader.i32()?;
        Ok(Room { capacity: reader.u64()?, allocation: reader.u64()?, available: 0 })
    }

    /// Returns the volume's description, as XML.
    pub async fn volume_xml(&self, volume: &Volume) -> Result<String, RpcError> {
        self.text(VOL_GET_XML_DESC, &volume.write(Writer::new()).u32(0).done()).await
    }

    /// Returns the volume's path on the host.
    pub async fn volume_path(&self, volume: &Volume) -> Result<String, RpcError> {
        self.text(VOL_GET_PATH, &volume.write(Writer::new()).done()).await
    }

    /// Writes the volume from its beginning.
    pub async fn upload(
        &self,
        volume: &Volume,
        length: u64,
        mut data: impl AsyncRead + Unpin,
    ) -> Result<(), RpcError> {
        let call = volume.write(Writer::new()).u64(0).u64(length).u32(0).done();
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
    pub async fn download(&self, volume: &Volume, offset: u64, length: usize) -> Result<Vec<u8>, RpcError> {
        let call = volume.write(Writer::new()).u64(offset).u64(length as u64).u32(0).done();
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
