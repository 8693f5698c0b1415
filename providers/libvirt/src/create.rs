//! Makes VMs. The order of the steps makes an interruption safe. First the domain is defined, with marks that name its
//! owner and key, and with paths of files that do not exist yet. Then its files are made, with names that follow from
//! the domain's name, and its address is reserved. Then it is started, and marked as started. A crash leaves only parts
//! of a domain that `list_owned` shows and `delete` removes.

use peerpod_provider_api::{
    Capabilities, Chosen, Confidential, CreateRequest, Created, DiskIdentity, DiskRequest, Error,
    IdempotencyKey, InstanceId, Retry,
};

use crate::config::{Boot, Firmware, LibvirtConfig, LibvirtImage, UserData};
use crate::disks::{self, DiskSource};
use crate::marks::{Marks, PREFIX, URI, VmNames, uuid_text};
use crate::rpc::calls::{Domain, Named, Volume};
use crate::rpc::{LibvirtConnection, RpcError};
use crate::store::{Use, is_there};
use crate::xml::{self, DomainDisk, Machine, Start, child};
use crate::{Shared, seed};

/// Suffixes of a VM's files, after the domain's name.
pub(crate) const ROOT: &str = ".root.qcow2";
pub(crate) const USER_DATA: &str = ".user-data";
pub(crate) const SEED: &str = ".seed.img";
pub(crate) const CONSOLE: &str = ".console";
/// All suffixes.
pub(crate) const FILES: [&str; 4] = [ROOT, USER_DATA, SEED, CONSOLE];
const ROOT_SERIAL: &str = "peerpod-root";
/// Serial of the empty disk beside a kernel. The kernel command line names it to the guest, which keeps container
/// images on the disk.
const SCRATCH_SERIAL: &str = "peerpod-scratch";
const SEED_SERIAL: &str = "peerpod-seed";

/// Facts that the definition of a domain needs.
struct Plan {
    pool: Named,
    folder: String,
    start: Start,
    /// Path, format, and size in bytes of the disk image.
    base: Option<(String, &'static str, u64)>,
    disks: Vec<DomainDisk>,
}

impl Shared {
    pub(crate) async fn create(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
    ) -> Result<Created, Error> {
        let identity = crate::marks::identity(&self.owner, key);
        let created = self.create_as(&identity, request, key).await;
        created.map_err(|error| error.during(format_args!("create of {} ({})", request.name, identity.name)))
    }

    async fn create_as(
        &self,
        identity: &VmNames,
        request: &CreateRequest,
        key: &IdempotencyKey,
    ) -> Result<Created, Error> {
        let _turn = self.turns.lock(&identity.uuid).await;
        let libvirt = self.link.get().await?;
        let creation = Creation { shared: self, libvirt: &libvirt, identity, request, key };
        if let Some(domain) = libvirt.domain(&identity.uuid).await? {
            let marks = creation.marks_of(&domain).await?;
            let state = libvirt.state(&domain).await?;
            if state.is_on() || marks.started || !state.never_ran() {
                self.running(&domain);
                return Ok(made(&domain, request));
            }
        }
        let made = creation.make().await;
        if let Err(error) = &made
            && error.retry() == Retry::Never
        {
            // The request can never succeed, so all its parts are removed. Parts that cannot be removed now stay
            // listed.
            drop(self.remove(&libvirt, &identity.uuid).await);
        }
        made
    }

    /// Returns whether VMs run; libvirt's test driver only records them.
    pub(crate) fn is_real(&self) -> bool {
        !self.link.driver().starts_with("test:")
    }

    fn size(&self, request: &CreateRequest) -> (u32, u64) {
        let or = |value: u64, default: u64| if value == 0 { default } else { value };
        let vcpus = or(request.size.vcpus.into(), self.config.vcpus.into());
        (
            u32::try_from(vcpus).unwrap_or(u32::MAX),
            or(request.size.memory_mib, self.config.memory_mib).max(64),
        )
    }

    /// Describes a disk of the pod for libvirt; the caller still chooses its target.
    pub(crate) async fn disk(
        &self,
        libvirt: &LibvirtConnection,
        request: &DiskRequest,
    ) -> Result<DomainDisk, Error> {
        let DiskRequest { volume, read_only, zone: _ } = request;
        let about = |error: Error| error.during(format_args!("disk {volume}"));
        let source = disks::parse(volume, &self.config).map_err(|why| about(Error::invalid(why)))?;
        let mut format = "raw";
        if let DiskSource::Volume { pool, name } = &source {
            let found = async {
                let pool = libvirt.pool(pool).await?;
                find(libvirt, &pool, name).await?.ok_or_else(|| {
                    Error::not_found(format!(
                        "there is no disk {name} in pool {}; was it deleted?",
                        pool.name
                    ))
                })
            };
            (_, format) = found.await.map_err(about)?;
        }
        let serial = disks::serial(volume);
        Ok(DomainDisk { source, format, serial, target: String::new(), read_only: *read_only })
    }
}

/// Returns the volume with this name, and its format; `None`: there is none.
async fn find(
    libvirt: &LibvirtConnection,
    pool: &Named,
    name: &str,
) -> Result<Option<(Volume, &'static str)>, Error> {
    let Some(volume) = libvirt.find_volume(pool, name).await? else { return Ok(None) };
    match format_of(&libvirt.volume_xml(&volume).await?) {
        Some(format) => Ok(Some((volume, format))),
        None => Err(Error::invalid(format!("volume {name} of pool {} is neither qcow2 nor raw", pool.name))),
    }
}

/// One create, with all that its steps need.
#[derive(Clone, Copy)]
struct Creation<'a> {
    shared: &'a Shared,
    libvirt: &'a LibvirtConnection,
    identity: &'a VmNames,
    request: &'a CreateRequest,
    key: &'a IdempotencyKey,
}

impl Creation<'_> {
    fn config(&self) -> &LibvirtConfig {
        &self.shared.config
    }

    /// Returns the marks of an existing domain. Refuses a key that came with another request before, and a foreign domain
    /// with the VM's UUID.
    async fn marks_of(self, domain: &Domain) -> Result<Marks, Error> {
        let Creation { shared, libvirt, request, key, .. } = self;
        match shared.marks(libvirt, domain).await?.filter(|marks| marks.are_of(&shared.owner)) {
            Some(marks) if marks.key == *key && marks.digest == request.digest() => Ok(marks),
            Some(_) => Err(Error::key_reused("its key came with another request before")),
            None => Err(Error::invalid(format!(
                "domain {} has its UUID and is not ours; find the program that made it",
                domain.name
            ))),
        }
    }

    async fn make(self) -> Result<Created, Error> {
        let Creation { shared, libvirt, identity, request, key } = self;
        self.fits().await?;
        let kind = shared.kind(libvirt).await?;
        let confidential = request.confidential.or(self.config().confidential);
        if let Some(wanted) = confidential {
            self.can_be_confidential(wanted, kind).await?;
        }
        let plan = self.plan(kind).await?;
        let mut marks = Marks::new(&shared.owner, request, key);
        let domain = libvirt.define(&self.xml(&plan, &marks, kind, confidential)).await?;
        let nics = 1 + u8::from(request.second_nic);
        let (files, ()) = tokio::join!(self.files(&plan), shared.reserve(libvirt, identity, nics));
        files?;
        shared.starting(&domain);
        let domain = match libvirt.start_domain(&domain).await {
            Ok(domain) => domain,
            Err(error) => {
                // Another process may have started it.
                if !libvirt.state(&domain).await?.is_on() {
                    let (_, memory) = shared.size(request);
                    return Err(Error::from(error).during(format_args!("start it with {memory} MiB")));
                }
                domain
            }
        };
        marks.started = true;
        if let Err(error) = libvirt.set_metadata(&domain, &marks.plain_xml(), PREFIX, URI).await {
            // libvirtd itself knows this until it is restarted.
            tracing::warn!(domain = domain.name, "cannot mark the VM as started: {error}");
        }
        shared.running(&domain);
        Ok(made(&domain, request))
    }

    /// Refuses at once a VM that is larger than this host.
    async fn fits(self) -> Result<(), Error> {
        let (vcpus, memory) = self.shared.size(self.request);
        let have = self.libvirt.node().await?.memory_kib >> 10;
        if memory > have && self.shared.is_real() {
            let text = format!("it asks for {memory} MiB, and the host has {have} MiB; ask for a smaller VM");
            return Err(Error::capacity(format!("{memory} MiB of memory"), text));
        }
        if vcpus > 255 {
            return Err(Error::invalid(format!("{vcpus} CPUs are more than a VM can have (255)")));
        }
        Ok(())
    }

    /// Checks that the host supports the technology. libvirt's list must be trusted here, because a VM that is not
    /// confidential would start as well.
    async fn can_be_confidential(self, wanted: Confidential, kind: &str) -> Result<(), Error> {
        let capabilities = self.libvirt.domain_capabilities(&self.config().machine, kind).await?;
        if kind == "kvm" && offers(&capabilities, wanted) {
            return Ok(());
        }
        let why = match kind {
            "kvm" => {
                "its CPU, firmware, kernel, QEMU or libvirt lacks it (virsh domcapabilities shows \
                 launchSecurity)"
            }
            _ => "there is no KVM, and emulation keeps nothing from the host",
        };
        let text = format!("a confidential VM by {wanted} cannot be had from this host: {why}");
        Err(Error::unsupported("confidential", text))
    }

    async fn plan(self, kind: &str) -> Result<Plan, Error> {
        let Creation { shared, libvirt, request, .. } = self;
        let name = &self.config().pool;
        let pool = libvirt.pool(name).await?;
        let folder = folder_of(&libvirt.pool_xml(&pool).await?).ok_or_else(|| {
            Error::invalid(format!("pool {name} holds no files; set provider.libvirt.pool to a dir pool"))
        })?;
        let (mut start, mut base) = (Start::Nothing, None);
        let images = &shared.images;
        match (&self.config().boot, &request.image) {
            (_, Some(volume)) | (Boot::Disk { image: LibvirtImage::Volume(volume), .. }, None) => {
                base = Some(self.volume_base(&pool, volume).await?);
            }
            (Boot::Kernel { kernel, initrd, cmdline }, None) if shared.is_real() => {
                let (kernel, _) = images.place(libvirt, &pool, kernel, Use::Kernel).await?;
                let initrd = match initrd {
                    Some(file) => Some(images.place(libvirt, &pool, file, Use::Initrd).await?.0),
                    None => None,
                };
                start = Start::Kernel { kernel, initrd, cmdline: self.cmdline(cmdline, kind) };
            }
            (Boot::Disk { image: LibvirtImage::File(file), .. }, None) if shared.is_real() => {
                let (path, known) = images.place(libvirt, &pool, file, Use::Disk).await?;
                base = Some((path, known.format, known.disk_bytes));
            }
            (Boot::Nothing, None) => {
                return Err(Error::invalid("no image is configured; set provider.libvirt.kernel or image"));
            }
            _ => {}
        }
        if base.is_some() {
            start = Start::Disk(match &self.config().boot {
                Boot::Disk { firmware, .. } => firmware.clone(),
                _ => Firmware::Efi,
            });
        }
        let disks = self.disks(&folder, base.is_some()).await?;
        Ok(Plan { pool, folder, start, base, disks })
    }

    async fn volume_base(self, pool: &Named, name: &str) -> Result<(String, &'static str, u64), Error> {
        let (volume, format) = find(self.libvirt, pool, name).await?.ok_or_else(|| {
            Error::invalid(format!(
                "there is no image {name} in pool {}; upload it (peerpod image upload libvirt), or name another",
                pool.name
            ))
        })?;
        let (_, bytes, _) = self.libvirt.volume_sizes(&volume).await?;
        Ok((self.libvirt.volume_path(&volume).await?, format, bytes))
    }

    async fn disks(self, folder: &str, boots: bool) -> Result<Vec<DomainDisk>, Error> {
        let Creation { shared, libvirt, identity, request, .. } = self;
        let file = |name: &str| DiskSource::File(format!("{folder}/{}{name}", identity.name));
        let own = |source, format, serial: &str, read_only| DomainDisk {
            source,
            format,
            serial: serial.to_owned(),
            target: String::new(),
            read_only,
        };
        let mut disks = Vec::new();
        if boots || self.config().root_disk_gib > 0 {
            let serial = if boots { ROOT_SERIAL } else { SCRATCH_SERIAL };
            disks.push(own(file(ROOT), "qcow2", serial, false));
        }
        if self.config().user_data == UserData::NoCloud {
            disks.push(own(file(SEED), "raw", SEED_SERIAL, true));
        }
        for disk in &request.disks {
            disks.push(shared.disk(libvirt, disk).await?);
        }
        for (disk, letter) in disks.iter_mut().zip('a'..='z') {
            disk.target = format!("vd{letter}");
        }
        if disks.iter().any(|disk| disk.target.is_empty()) {
            return Err(Error::invalid(format!("{} disks are more than a VM can have", disks.len())));
        }
        Ok(disks)
    }

    fn xml(self, plan: &Plan, marks: &Marks, kind: &str, confidential: Option<Confidential>) -> String {
        let Creation { identity, request, shared: Shared { config, .. }, .. } = self;
        let (vcpus, memory_mib) = self.shared.size(request);
        let mut nics = vec![(identity.mac(0), &config.network)];
        if request.second_nic
            && let Some(second) = &config.second_network
        {
            nics.push((identity.mac(1), second));
        }
        let path = |name: &str| format!("{}/{}{name}", plan.folder, identity.name);
        let machine = Machine {
            identity,
            marks,
            kind,
            config,
            vcpus,
            memory_mib,
            start: &plan.start,
            fw_cfg: (config.user_data == UserData::FwCfg && kind != "test").then(|| path(USER_DATA)),
            console: path(CONSOLE),
            disks: &plan.disks,
            nics,
            confidential,
        };
        machine.xml()
    }

    fn cmdline(&self, configured: &str, kind: &str) -> String {
        let mut line = configured.to_owned();
        // The emulated timer is late under load, and the kernel would consider it broken.
        if kind == "qemu" && !line.contains("no_timer_check") {
            line += " no_timer_check";
        }
        if self.config().root_disk_gib > 0 {
            line = format!("{line} peerpod.scratch={SCRATCH_SERIAL}");
        }
        line
    }

    /// Makes the VM's own files. A file of an interrupted attempt is made anew.
    async fn files(self, plan: &Plan) -> Result<(), Error> {
        let Creation { identity, request, .. } = self;
        let least = self.config().root_disk_gib << 30;
        let base = plan.base.as_ref();
        let size = base.map_or(least, |(_, _, bytes)| least.max(*bytes));
        if base.is_some() || least > 0 {
            let base = base.map(|(path, format, _)| (path.as_str(), *format));
            self.file(&plan.pool, ROOT, "qcow2", size, base, &[]).await?;
        }
        let data = request.user_data.as_bytes();
        let (suffix, bytes) = match self.config().user_data {
            UserData::FwCfg => (USER_DATA, data.to_vec()),
            UserData::NoCloud => {
                let (id, name) = (uuid_text(&identity.uuid), &identity.name);
                let meta = format!("instance-id: {id}\nlocal-hostname: {name}\n");
                let image = seed::image(data, meta.as_bytes());
                (SEED, image.map_err(|why| Error::invalid(format!("make the seed disk: {why}")))?)
            }
        };
        self.file(&plan.pool, suffix, "raw", bytes.len() as u64, None, &bytes).await?;
        self.file(&plan.pool, CONSOLE, "raw", 0, None, &[]).await
    }

    /// Makes a file of this format and size, over a base image, and with these first bytes.
    async fn file(
        self,
        pool: &Named,
        suffix: &str,
        format: &str,
        size: u64,
        base: Option<(&str, &str)>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let Creation { shared, libvirt, .. } = self;
        let name = format!("{}{suffix}", self.identity.name);
        let make = async {
            let xml = xml::volume(&name, format, size, base);
            let volume = match libvirt.create_volume(pool, &xml).await {
                // File of an interrupted attempt. The VM has not run, so its content is worthless.
                Err(error) if is_there(&error) => {
                    if let Some(old) = libvirt.find_volume(pool, &name).await? {
                        libvirt.delete_volume(&old).await?;
                    }
                    libvirt.create_volume(pool, &xml).await?
                }
                made => made?,
            };
            if !bytes.is_empty() && shared.is_real() {
                libvirt.upload(&volume, bytes.len() as u64, bytes).await?;
            }
            Ok(())
        };
        let made: Result<(), RpcError> = make.await;
        made.map_err(|error| Error::from(error).during(format_args!("make {name} in pool {}", pool.name)))
    }
}

/// Builds the answer for a VM that already exists.
fn made(domain: &Domain, request: &CreateRequest) -> Created {
    let disk = |disk: &DiskRequest| (disk.volume.clone(), DiskIdentity::Serial(disks::serial(&disk.volume)));
    Created {
        id: id_of(domain),
        addresses: Vec::new(),
        chosen: Chosen { image: request.image.clone(), ..Chosen::default() },
        disks: request.disks.iter().map(disk).collect(),
    }
}

pub(crate) fn capabilities(max_user_data: usize, second_nic: bool, guest_memory_mib: u64) -> Capabilities {
    Capabilities {
        images: true,
        confidential: vec![Confidential::Sev, Confidential::SevSnp, Confidential::Tdx],
        volumes: true,
        second_nic,
        guest_memory_mib,
        console: true,
        events: true,
        ..Capabilities::minimal(max_user_data)
    }
}

pub(crate) fn id_of(domain: &Domain) -> InstanceId {
    // A UUID consists of hexadecimal digits and dashes.
    InstanceId::new(uuid_text(&domain.uuid)).expect("a UUID is printable")
}

pub(crate) fn read_anything(text: &str) {
    drop(folder_of(text));
    format_of(text);
    for wanted in Confidential::ALL {
        offers(text, *wanted);
    }
}

/// Returns the folder of a pool; `None`: it is not a pool of files.
fn folder_of(xml: &str) -> Option<String> {
    let document = roxmltree::Document::parse(xml).ok()?;
    let pool = document.root_element();
    if !matches!(pool.attribute("type"), Some("dir" | "fs" | "netfs")) {
        return None;
    }
    let path = pool
        .descendants()
        .find(|node| node.has_tag_name("path") && node.parent().is_some_and(|p| p.has_tag_name("target")))?;
    path.text().filter(|path| path.starts_with('/')).map(|path| path.trim_end_matches('/').to_owned())
}

/// Returns a volume's format, if QEMU may use it without probing.
pub(crate) fn format_of(xml: &str) -> Option<&'static str> {
    let document = roxmltree::Document::parse(xml).ok()?;
    let target = child(document.root_element(), "target")?;
    match child(target, "format").and_then(|node| node.attribute("type")) {
        Some("qcow2") => Some("qcow2"),
        // Format of a block device, or of a file without another format.
        Some("raw") | None => Some("raw"),
        Some(_) => None,
    }
}

/// Returns whether domain capabilities offer a technology.
fn offers(xml: &str, wanted: Confidential) -> bool {
    let Ok(document) = roxmltree::Document::parse(xml) else { return false };
    let Some(features) = child(document.root_element(), "features") else { return false };
    let supported = |name: &str| {
        features.children().any(|node| node.has_tag_name(name) && node.attribute("supported") == Some("yes"))
    };
    // From libvirt 10.5 on there is a list of kinds.
    let listed = |word: &str| {
        features
            .descendants()
            .filter(|node| node.has_tag_name("launchSecurity"))
            .flat_map(|node| node.descendants())
            .any(|node| node.has_tag_name("value") && node.text() == Some(word))
    };
    match wanted {
        Confidential::Sev => supported("sev"),
        Confidential::SevSnp => listed("sev-snp"),
        Confidential::Tdx => supported("tdx") || listed("tdx"),
        Confidential::SecureExecution => supported("s390-pv"),
    }
}
