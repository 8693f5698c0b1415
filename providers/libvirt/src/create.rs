//! Makes VMs. The order of the steps makes an interruption safe. First the domain is defined, with marks that name its
//! owner and key, and with paths of files that do not exist yet. Then its files are made, with names that follow from
//! the domain's name, and its address is reserved. Then it is started, and marked as started. A crash leaves only parts
//! of a domain that `list_owned` shows and `delete` removes.

use peerpod_provider_api::{
    Capabilities, Confidential, CreateRequest, Created, DiskIdentity, DiskRequest, Error, IdempotencyKey,
    InstanceId,
};

use crate::config::{Boot, Firmware, Image, LibvirtConfig, UserData};
use crate::disks::{self, DiskSource};
use crate::marks::{Marks, PREFIX, URI, VmNames, uuid_text};
use crate::refusal::refuse;
use crate::rpc::calls::{Domain, Named};
use crate::rpc::{Connection, RpcError};
use crate::store::{Use, is_there};
use crate::xml::{self, Disk, Machine, Start};
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
    /// Folder of the pool.
    folder: String,
    kernel: Option<(String, Option<String>, String)>,
    /// Path, format, and size in bytes of the disk image.
    base: Option<(String, &'static str, u64)>,
    disks: Vec<Disk>,
}

impl Shared {
    pub(crate) async fn create(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
    ) -> Result<Created, Error> {
        let identity = self.owner.identity(key);
        let attempt = format!("create of {} ({})", request.name, identity.name);
        let fail = |error: RpcError| refuse(&attempt, error);
        let _turn = self.turns.lock(&identity.uuid).await;
        let libvirt = self.link.get().await.map_err(fail)?;
        let creation = Creation {
            shared: self,
            libvirt: &libvirt,
            identity: &identity,
            request,
            key,
            attempt: &attempt,
        };
        let known = libvirt.domain(&identity.uuid).await.map_err(fail)?;
        if let Some(domain) = &known {
            creation.is_same(domain).await?;
            let (marks, state) =
                tokio::try_join!(self.marks(&libvirt, domain), libvirt.state(domain)).map_err(fail)?;
            let begun = marks.is_some_and(|marks| marks.started);
            if state.is_on() || begun || !(state.is_fresh() || state.reason == 6) {
                self.running(domain);
                return Ok(made(domain, request));
            }
        }
        let made = creation.make().await;
        if let Err(error) = &made
            && error.retry() == peerpod_provider_api::Retry::Never
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
        let or = |wish: u64, default: u64| if wish == 0 { default } else { wish };
        let vcpus = or(request.size.vcpus.into(), self.config.vcpus.into());
        (
            u32::try_from(vcpus).unwrap_or(u32::MAX),
            or(request.size.memory_mib, self.config.memory_mib).max(64),
        )
    }

    /// Describes a disk of the pod for libvirt; the caller still chooses its target.
    pub(crate) async fn disk(
        &self,
        libvirt: &Connection,
        request: &DiskRequest,
        attempt: &str,
    ) -> Result<Disk, Error> {
        let DiskRequest { volume, read_only, zone: _ } = request;
        let source = disks::parse(volume, &self.config);
        let source = source.map_err(|why| Error::invalid(format!("{attempt}: disk {volume}: {why}")))?;
        let mut format = "raw";
        if let DiskSource::Volume { pool, name } = &source {
            let fail = |error: RpcError| refuse(&format!("{attempt}: disk {volume}"), error);
            let pool = libvirt.pool(pool).await.map_err(fail)?;
            let found = libvirt.find_volume(&pool, name).await.map_err(fail)?;
            let found = found.ok_or_else(|| {
                Error::not_found(format!(
                    "{attempt}: there is no disk {name} in pool {}; was it deleted?",
                    pool.name
                ))
            })?;
            let read = format_of(&libvirt.volume_xml(&found).await.map_err(fail)?);
            format = read.ok_or_else(|| {
                Error::invalid(format!("{attempt}: disk {volume} is neither qcow2 nor raw"))
            })?;
        }
        Ok(Disk {
            source,
            format,
            serial: disks::serial(volume),
            target: String::new(),
            read_only: *read_only,
        })
    }
}

/// One create, with all that its steps need.
struct Creation<'a> {
    shared: &'a Shared,
    libvirt: &'a Connection,
    identity: &'a VmNames,
    request: &'a CreateRequest,
    key: &'a IdempotencyKey,
    /// Names the create in errors.
    attempt: &'a str,
}

impl Creation<'_> {
    fn fail(&self, error: RpcError) -> Error {
        refuse(self.attempt, error)
    }

    fn config(&self) -> &LibvirtConfig {
        &self.shared.config
    }

    /// Refuses a key that came with another request before, and a foreign domain with the VM's UUID.
    async fn is_same(&self, domain: &Domain) -> Result<(), Error> {
        let Creation { shared, libvirt, request, key, attempt, .. } = self;
        let marks = shared.marks(libvirt, domain).await.map_err(|error| self.fail(error))?;
        match marks.filter(|marks| shared.owner.owns(marks)) {
            Some(marks) if marks.key == **key && marks.digest == request.digest() => Ok(()),
            Some(_) => Err(Error::key_reused(format!("{attempt}: its key came with another request before"))),
            None => Err(Error::invalid(format!(
                "{attempt}: domain {} has its UUID and is not ours; find the program that made it",
                domain.name
            ))),
        }
    }

    async fn make(&self) -> Result<Created, Error> {
        let Creation { shared, libvirt, identity, request, key, attempt } = *self;
        let fail = |error| self.fail(error);
        self.fits().await?;
        let kind = shared.kind(libvirt).await?;
        let confidential = request.confidential.or(self.config().confidential);
        if let Some(wanted) = confidential {
            self.can_be_confidential(wanted, kind).await?;
        }
        let plan = self.plan().await?;
        let mut marks = Marks::new(&shared.owner, request, key);
        let xml = self.xml(&plan, &marks, kind, confidential);
        let domain = libvirt.define(&xml).await.map_err(fail)?;
        let (files, ()) = tokio::join!(self.files(&plan), shared.reserve(libvirt, identity));
        files?;
        shared.starting(&domain);
        let domain = match libvirt.start_domain(&domain).await {
            Ok(domain) => domain,
            Err(error) => {
                let now = libvirt.state(&domain).await.map_err(fail)?;
                // Another process has started it.
                if !now.is_on() {
                    let (_, memory) = shared.size(request);
                    return Err(refuse(&format!("{attempt}: start it with {memory} MiB"), error));
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
    async fn fits(&self) -> Result<(), Error> {
        let attempt = self.attempt;
        let host = self.libvirt.node().await.map_err(|error| self.fail(error))?;
        let (vcpus, memory) = self.shared.size(self.request);
        let have = host.memory_kib >> 10;
        if memory > have && self.shared.is_real() {
            let text = format!(
                "{attempt}: it asks for {memory} MiB, and the host has {have} MiB; ask for a smaller VM"
            );
            return Err(Error::capacity(format!("{memory} MiB of memory"), text));
        }
        if vcpus > 255 {
            return Err(Error::invalid(format!("{attempt}: {vcpus} CPUs are more than a VM can have (255)")));
        }
        Ok(())
    }

    /// Checks that the host supports the technology. libvirt's list must be trusted here, because a VM that is not
    /// confidential would start as well.
    async fn can_be_confidential(&self, wanted: Confidential, kind: &str) -> Result<(), Error> {
        let capabilities = self.libvirt.domain_capabilities(&self.config().machine, kind).await;
        let capabilities = capabilities.map_err(|error| self.fail(error))?;
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
        let text =
            format!("{}: a confidential VM by {wanted} cannot be had from this host: {why}", self.attempt);
        Err(Error::unsupported("confidential", text))
    }

    async fn plan(&self) -> Result<Plan, Error> {
        let Creation { shared, libvirt, request, attempt, .. } = *self;
        let fail = |error| self.fail(error);
        let pool = libvirt.pool(&self.config().pool).await.map_err(fail)?;
        let folder = folder_of(&libvirt.pool_xml(&pool).await.map_err(fail)?);
        let folder = folder.ok_or_else(|| {
            let name = &self.config().pool;
            Error::invalid(format!(
                "{attempt}: pool {name} holds no files; set provider.libvirt.pool to a dir pool"
            ))
        })?;
        let (mut kernel, mut base) = (None, None);
        let images = &shared.images;
        match (&self.config().boot, &request.image) {
            (_, Some(volume)) | (Boot::Disk { image: Image::Volume(volume), .. }, None) => {
                base = Some(self.volume_base(&pool, volume).await?);
            }
            (Boot::Kernel { kernel: file, initrd, cmdline }, None) if shared.is_real() => {
                let (path, _) = images.place(libvirt, &pool, file, Use::Kernel).await?;
                let initrd = match initrd {
                    Some(file) => Some(images.place(libvirt, &pool, file, Use::Initrd).await?.0),
                    None => None,
                };
                kernel = Some((path, initrd, cmdline.clone()));
            }
            (Boot::Disk { image: Image::File(file), .. }, None) if shared.is_real() => {
                let (path, known) = images.place(libvirt, &pool, file, Use::Disk).await?;
                base = Some((path, known.format, known.disk_bytes));
            }
            (Boot::Nothing, None) => {
                return Err(Error::invalid(format!(
                    "{attempt}: no image is configured; set provider.libvirt.kernel or image"
                )));
            }
            _ => {}
        }
        let disks = self.disks(&folder, base.is_some()).await?;
        Ok(Plan { pool, folder, kernel, base, disks })
    }

    async fn volume_base(&self, pool: &Named, name: &str) -> Result<(String, &'static str, u64), Error> {
        let Creation { libvirt, attempt, .. } = *self;
        let fail = |error| self.fail(error);
        let volume = libvirt.find_volume(pool, name).await.map_err(fail)?;
        let volume = volume.ok_or_else(|| {
            Error::invalid(format!(
                "{attempt}: there is no image {name} in pool {}; upload it (virsh vol-upload), or name another",
                pool.name
            ))
        })?;
        let format = format_of(&libvirt.volume_xml(&volume).await.map_err(fail)?);
        let format = format.ok_or_else(|| {
            Error::invalid(format!("{attempt}: volume {name} of pool {} is neither qcow2 nor raw", pool.name))
        })?;
        let bytes = libvirt.volume_info(&volume).await.map_err(fail)?.capacity;
        Ok((libvirt.volume_path(&volume).await.map_err(fail)?, format, bytes))
    }

    async fn disks(&self, folder: &str, boots: bool) -> Result<Vec<Disk>, Error> {
        let Creation { shared, libvirt, identity, request, attempt, .. } = *self;
        let file = |name: &str| DiskSource::File(format!("{folder}/{}{name}", identity.name));
        let own = |source, format, serial: &str, read_only| Disk {
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
            disks.push(shared.disk(libvirt, disk, attempt).await?);
        }
        for (disk, letter) in disks.iter_mut().zip('a'..='z') {
            disk.target = format!("vd{letter}");
        }
        match disks.iter().any(|disk| disk.target.is_empty()) {
            true => {
                Err(Error::invalid(format!("{attempt}: {} disks are more than a VM can have", disks.len())))
            }
            false => Ok(disks),
        }
    }

    fn xml(&self, plan: &Plan, marks: &Marks, kind: &str, confidential: Option<Confidential>) -> String {
        let Creation { identity, request, .. } = *self;
        let (vcpus, memory_mib) = self.shared.size(request);
        let mut nics = vec![(identity.mac(0), self.config().network.clone())];
        if request.second_nic
            && let Some(second) = &self.config().second_network
        {
            nics.push((identity.mac(1), second.clone()));
        }
        let cmdline = plan.kernel.as_ref().map(|(_, _, cmdline)| self.cmdline(cmdline, kind));
        let firmware = match &self.config().boot {
            Boot::Disk { firmware, .. } => firmware,
            _ => &Firmware::Efi,
        };
        let start = match (&plan.kernel, &plan.base) {
            (Some((kernel, initrd, _)), _) => Start::Kernel {
                kernel,
                initrd: initrd.as_deref(),
                cmdline: cmdline.as_deref().unwrap_or_default(),
            },
            (None, Some(_)) => Start::Disk { firmware },
            (None, None) => Start::Nothing,
        };
        let path = |name: &str| format!("{}/{}{name}", plan.folder, identity.name);
        let fw_cfg = (self.config().user_data == UserData::FwCfg && kind != "test").then(|| path(USER_DATA));
        let machine = Machine {
            name: &identity.name,
            uuid: &uuid_text(&identity.uuid),
            marks,
            kind,
            machine: &self.config().machine,
            vcpus,
            memory_mib,
            cpuset: self.config().cpuset.as_deref(),
            start,
            fw_cfg: fw_cfg.as_deref(),
            console: &path(CONSOLE),
            disks: &plan.disks,
            nics: &nics,
            hotplug_ports: self.config().hotplug_ports,
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
    async fn files(&self, plan: &Plan) -> Result<(), Error> {
        let Creation { identity, request, attempt, .. } = *self;
        let least = self.config().root_disk_gib << 30;
        if let Some((path, format, bytes)) = &plan.base {
            let base = Some((path.as_str(), *format));
            self.file(&plan.pool, ROOT, "qcow2", least.max(*bytes), base, &[]).await?;
        } else if least > 0 {
            self.file(&plan.pool, ROOT, "qcow2", least, None, &[]).await?;
        }
        let data = request.user_data.as_bytes();
        let (suffix, bytes) = match self.config().user_data {
            UserData::FwCfg => (USER_DATA, data.to_vec()),
            UserData::NoCloud => {
                let meta = format!(
                    "instance-id: {}\nlocal-hostname: {}\n",
                    uuid_text(&identity.uuid),
                    identity.name
                );
                let image = seed::image(data, meta.as_bytes());
                (SEED, image.map_err(|why| Error::invalid(format!("{attempt}: make the seed disk: {why}")))?)
            }
        };
        self.file(&plan.pool, suffix, "raw", bytes.len() as u64, None, &bytes).await?;
        self.file(&plan.pool, CONSOLE, "raw", 0, None, &[]).await
    }

    /// Makes a file of this format and size, over a base image, and with these first bytes.
    async fn file(
        &self,
        pool: &Named,
        suffix: &str,
        format: &str,
        size: u64,
        base: Option<(&str, &str)>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let libvirt = self.libvirt;
        let name = format!("{}{suffix}", self.identity.name);
        let attempt = format!("{}: make {name} in pool {}", self.attempt, pool.name);
        let fail = |error: RpcError| refuse(&attempt, error);
        let xml = xml::volume(&name, format, size, base);
        let volume = match libvirt.create_volume(pool, &xml).await {
            Ok(volume) => volume,
            // File of an interrupted attempt. The VM has not run, so its content is worthless.
            Err(error) if is_there(&error) => {
                if let Some(old) = libvirt.find_volume(pool, &name).await.map_err(fail)? {
                    libvirt.delete_volume(&old).await.map_err(fail)?;
                }
                libvirt.create_volume(pool, &xml).await.map_err(fail)?
            }
            Err(error) => return Err(fail(error)),
        };
        if bytes.is_empty() || !self.shared.is_real() {
            return Ok(());
        }
        libvirt.upload(&volume, bytes.len() as u64, bytes).await.map_err(fail)
    }
}

/// Builds the answer for a VM that already exists.
fn made(domain: &Domain, request: &CreateRequest) -> Created {
    let disk = |disk: &DiskRequest| (disk.volume.clone(), DiskIdentity::Serial(disks::serial(&disk.volume)));
    Created {
        id: id_of(domain),
        addresses: Vec::new(),
        instance_type: None,
        disks: request.disks.iter().map(disk).collect(),
    }
}

/// Returns the capabilities of the provider.
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

/// See [`crate::read_anything`].
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
fn format_of(xml: &str) -> Option<&'static str> {
    let document = roxmltree::Document::parse(xml).ok()?;
    let target = document.root_element().children().find(|node| node.has_tag_name("target"))?;
    match target.children().find(|node| node.has_tag_name("format")).and_then(|node| node.attribute("type")) {
        Some("qcow2") => Some("qcow2"),
        // Format of a block device, or of a file without another format.
        Some("raw") | None => Some("raw"),
        Some(_) => None,
    }
}

/// Returns whether domain capabilities offer a technology.
fn offers(xml: &str, wanted: Confidential) -> bool {
    let Ok(document) = roxmltree::Document::parse(xml) else { return false };
    let Some(features) = document.root_element().children().find(|node| node.has_tag_name("features")) else {
        return false;
    };
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
