//! Attaches disks to a running VM under their serial, and detaches them before another VM may have them.

use std::time::Duration;

use async_trait::async_trait;
use peerpod_provider_api::{DiskIdentity, DiskRequest, Error, InstanceId, Volumes, unless_gone};
use tokio::sync::broadcast;
use tokio::time::{Instant, timeout};

use crate::disks::DiskSource;
use crate::rpc::calls::Domain;
use crate::rpc::{DomainEvent, LibvirtConnection, RpcError, code};
use crate::xml::{DomainDisk, child};
use crate::{LibvirtProvider, Shared, disks};

/// Longest time for a guest to release a disk.
const GIVE_BACK: Duration = Duration::from_secs(30);
/// Interval of the checks beside the event. Each check repeats the request, because a guest that is booting ignores it.
const LOOK: Duration = Duration::from_secs(2);

#[async_trait]
impl Volumes for LibvirtProvider {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        let attached = self.shared.attach(id, disk).await;
        attached.map_err(|error| error.during(format_args!("attach of disk {} to VM {id}", disk.volume)))
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        unless_gone(self.shared.detach(id, volume).await)
            .map_err(|error| error.during(format_args!("detach of disk {volume} from VM {id}")))
    }

    async fn grown(&self, id: &InstanceId, disk: &DiskRequest, bytes: u64) -> Result<(), Error> {
        unless_gone(self.shared.grown(id, disk, bytes).await)
            .map_err(|error| error.during(format_args!("growth of disk {} of VM {id}", disk.volume)))
    }
}

impl Shared {
    async fn attach(&self, id: &InstanceId, request: &DiskRequest) -> Result<DiskIdentity, Error> {
        let libvirt = self.link.get().await?;
        let domain = self.find(&libvirt, id).await?;
        let _turn = self.turns.lock(&domain.uuid).await;
        let identity = DiskIdentity::Serial(disks::serial(&request.volume));
        let mut disk = self.disk(&libvirt, request).await?;
        let there = Disks::of(&libvirt, &domain).await?;
        if there.target_of(&disk.serial).is_some() {
            return Ok(identity);
        }
        let full = || Error::Quota { text: "it has as many disks as a VM can have".to_owned() };
        disk.target = there.free().ok_or_else(full)?;
        libvirt.attach(&domain, &disk.xml(false)).await?;
        Ok(identity)
    }

    /// Tells QEMU the new size of a disk, because QEMU reads the size only once. The size is never less than the VM
    /// sees, or than a raw file has: the file would be cut.
    async fn grown(&self, id: &InstanceId, request: &DiskRequest, bytes: u64) -> Result<(), Error> {
        let libvirt = self.link.get().await?;
        let domain = self.find(&libvirt, id).await?;
        let _turn = self.turns.lock(&domain.uuid).await;
        let disk = self.disk(&libvirt, request).await?;
        let there = Disks::of(&libvirt, &domain).await?;
        let Some(target) = there.target_of(&disk.serial) else { return Ok(()) };
        let size = self.size_of(&libvirt, &disk, bytes).await?;
        let (_, seen, kept_in) = match libvirt.disk_sizes(&domain, target).await {
            // A driver without disk sizes runs no guest that could see them.
            Err(error) if error.code() == Some(code::NO_SUPPORT) => return Ok(()),
            sizes => sizes?,
        };
        let is_raw =
            disk.format == "raw" && matches!(disk.source, DiskSource::File(_) | DiskSource::Volume { .. });
        let size = if is_raw { size.max(kept_in) } else { size };
        if size <= seen {
            return Ok(());
        }
        libvirt.resize_disk(&domain, target, size).await.map_err(Error::from)
    }

    /// Returns the current size of a disk where it can be determined, else the requested one. A raw file is as large as
    /// it is long, and its owner makes it larger. Only QEMU makes a qcow2 file in use larger. The server of a network
    /// disk knows its size, and QEMU asks the server.
    async fn size_of(
        &self,
        libvirt: &LibvirtConnection,
        disk: &DomainDisk,
        bytes: u64,
    ) -> Result<u64, RpcError> {
        match &disk.source {
            DiskSource::Volume { pool, name } if disk.format == "raw" => {
                let pool = libvirt.pool(pool).await?;
                match libvirt.volume(&pool, name).await? {
                    Some(volume) => Ok(libvirt.volume_sizes(&volume).await?.1),
                    None => Ok(bytes),
                }
            }
            // libvirtd is reached by a socket, so this is its host, unless this process is in a container without its
            // folders.
            DiskSource::File(path) => {
                let found = tokio::fs::metadata(path).await;
                Ok(found.ok().filter(std::fs::Metadata::is_file).map_or(bytes, |found| found.len()))
            }
            _ => Ok(bytes),
        }
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        let libvirt = self.link.get().await?;
        let domain = self.find(&libvirt, id).await?;
        let _turn = self.turns.lock(&domain.uuid).await;
        let serial = disks::serial(volume);
        let mut events = libvirt.events();
        let deadline = Instant::now() + GIVE_BACK;
        loop {
            let there = Disks::of(&libvirt, &domain).await?;
            let Some(found) = there.0.iter().find(|disk| disk.serial == serial) else { return Ok(()) };
            if libvirt.state(&domain).await?.is_off() {
                // An ended VM has no disks; its definition is deleted with it.
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Error::transient(format!(
                    "the guest has not given it back for {} s; is it mounted there?",
                    GIVE_BACK.as_secs()
                )));
            }
            match libvirt.detach(&domain, &found.xml).await {
                // The detach was requested before, and is in progress.
                Err(error)
                    if matches!(
                        error.code(),
                        Some(code::OPERATION_FAILED | code::INTERNAL_ERROR | code::OPERATION_INVALID)
                    ) => {}
                Err(error) if matches!(error.code(), Some(code::DEVICE_MISSING | code::INVALID_ARG)) => {
                    return Ok(());
                }
                other => other?,
            }
            // After any event, the next check shows the state.
            drop(timeout(LOOK, removed(&mut events, &domain, &found.alias)).await);
        }
    }
}

/// Waits for an event of this device.
async fn removed(events: &mut broadcast::Receiver<DomainEvent>, domain: &Domain, device: &str) {
    loop {
        match events.recv().await {
            Ok(DomainEvent::Device { domain: of, alias }) if of.uuid == domain.uuid && alias == device => {
                return;
            }
            Err(broadcast::error::RecvError::Closed) => return,
            _ => {}
        }
    }
}

/// Disks that a domain has now.
pub(crate) struct Disks(Vec<Plugged>);

struct Plugged {
    serial: String,
    target: String,
    alias: String,
    is_read_only: bool,
    /// Element as libvirt writes it.
    xml: String,
}

impl Disks {
    pub(crate) async fn of(libvirt: &LibvirtConnection, domain: &Domain) -> Result<Disks, RpcError> {
        Ok(Disks::read(&libvirt.domain_xml(domain).await?))
    }

    fn read(xml: &str) -> Disks {
        let Ok(document) = roxmltree::Document::parse(xml) else { return Disks(Vec::new()) };
        let disks = document.descendants().filter(|node| {
            node.has_tag_name("disk") && node.parent().is_some_and(|parent| parent.has_tag_name("devices"))
        });
        let read = |disk: roxmltree::Node<'_, '_>| {
            let child = |name| child(disk, name);
            let serial = child("serial").and_then(|node| node.text()).unwrap_or_default().to_owned();
            let target =
                child("target").and_then(|node| node.attribute("dev")).unwrap_or_default().to_owned();
            let alias = child("alias").and_then(|node| node.attribute("name")).unwrap_or_default().to_owned();
            let xml = xml.get(disk.range()).unwrap_or_default().to_owned();
            Plugged { serial, target, alias, is_read_only: child("readonly").is_some(), xml }
        };
        Disks(disks.map(read).collect())
    }

    /// Whether the guest may write to a volume.
    pub(crate) fn have_a_written_volume(&self) -> bool {
        self.0.iter().any(|disk| !disk.is_read_only && disks::is_volume(&disk.serial))
    }

    fn target_of(&self, serial: &str) -> Option<&str> {
        self.0.iter().find(|disk| disk.serial == serial).map(|disk| disk.target.as_str())
    }

    fn free(&self) -> Option<String> {
        let names = ('a'..='z').map(|letter| format!("vd{letter}"));
        names.into_iter().find(|name| !self.0.iter().any(|disk| disk.target == *name))
    }
}

pub(crate) fn read_anything(text: &str) {
    let disks = Disks::read(text);
    assert!(disks.free().is_none_or(|free| disks.0.iter().all(|disk| disk.target != free)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domains_disks_are_read() {
        let xml = "<domain><devices><disk type='file'><source file='/x'/><target dev='vda' bus='virtio'/><serial>s1</serial>\
                   <alias name='virtio-disk0'/></disk><disk><target dev='vdc'/></disk></devices><disk/></domain>";
        let disks = Disks::read(xml);
        assert_eq!(disks.0.len(), 2);
        assert_eq!(disks.target_of("s1"), Some("vda"));
        assert_eq!(disks.free().as_deref(), Some("vdb"));
        assert!(disks.0[0].xml.starts_with("<disk type='file'>") && disks.0[0].xml.ends_with("</disk>"));
        assert_eq!(Disks::read("<").0.len(), 0);
        for (serial, rest, written) in [
            (disks::serial("v"), "", true),
            (disks::serial("v"), "<readonly/>", false),
            ("s1".to_owned(), "", false),
        ] {
            let xml =
                format!("<domain><devices><disk><serial>{serial}</serial>{rest}</disk></devices></domain>");
            assert_eq!(Disks::read(&xml).have_a_written_volume(), written, "{xml}");
        }
    }
}
