//! Deletes VMs: ends the VM, removes its files and its address, and last the domain, by which all of them are found.

use std::time::Duration;

use peerpod_provider_api::Error;
use tokio::sync::broadcast;
use tokio::time::{Instant, timeout};

use crate::Shared;
use crate::create::FILES;
use crate::kind::is_young_trial;
use crate::rpc::calls::{Domain, Named};
use crate::rpc::xdr::Uuid;
use crate::rpc::{DomainEvent, LibvirtConnection, RpcError, code, unless_absent};
use crate::volumes::Disks;

/// Number of older pieces that virtlogd keeps of a growing console.
const OLDER: usize = 3;
/// Interval of the checks whether a VM has shut down, beside libvirtd's events.
const LOOK: Duration = Duration::from_secs(2);

impl Shared {
    pub(crate) async fn delete(&self, uuid: &Uuid) -> Result<(), Error> {
        let _turn = self.turns.lock(uuid).await;
        let libvirt = self.link.get().await?;
        self.remove(&libvirt, uuid).await.map_err(Error::from)
    }

    /// Deletes a VM. The caller must hold the VM's turn.
    pub(crate) async fn remove(&self, libvirt: &LibvirtConnection, uuid: &Uuid) -> Result<(), RpcError> {
        let Some(domain) = libvirt.domain(uuid).await? else { return Ok(()) };
        let marks = unless_absent(self.marks(libvirt, &domain).await)?.flatten();
        if !marks.is_some_and(|marks| marks.are_of(&self.owner)) {
            // The VM is gone, or has another owner, so it does not exist for this provider.
            return Ok(());
        }
        self.leaving(&domain);
        self.shut_down(libvirt, &domain).await?;
        self.end(libvirt, &domain).await?;
        if let Some(pool) = self.pool(libvirt).await? {
            self.remove_files(libvirt, &pool, &domain.name).await?;
        }
        let gone = unless_absent(self.release(libvirt, &domain).await)?.is_none();
        if gone { Ok(()) } else { unless_absent(libvirt.undefine(&domain).await).map(drop) }
    }

    /// Presses the power button of a VM with a volume, and waits until the VM has ended, for a bounded time: its guest
    /// may have data that is not written back, and a link to the node is not needed for that.
    async fn shut_down(&self, libvirt: &LibvirtConnection, domain: &Domain) -> Result<(), RpcError> {
        let mut events = libvirt.events();
        let Some(state) = unless_absent(libvirt.state(domain).await)? else { return Ok(()) };
        let disks = unless_absent(Disks::of(libvirt, domain).await)?;
        if state.is_off() || !disks.is_some_and(|disks| disks.have_a_written_volume()) {
            return Ok(());
        }
        if let Err(error) = libvirt.shut_down(domain).await {
            tracing::warn!(vm = domain.name, %error, "cannot shut a VM with volumes down; its power is cut");
            return Ok(());
        }
        let deadline = Instant::now() + self.config.shutdown_timeout;
        while Instant::now() < deadline {
            // After any event of the VM, the next check shows the state.
            drop(timeout(LOOK.min(self.config.shutdown_timeout), changed(&mut events, domain)).await);
            if unless_absent(libvirt.state(domain).await)?.is_none_or(|state| state.is_off()) {
                return Ok(());
            }
            // A VM that still boots discards the button, and a VM that shuts down ignores it. The next check shows an end.
            drop(libvirt.shut_down(domain).await);
        }
        let waited = self.config.shutdown_timeout;
        tracing::warn!(vm = domain.name, ?waited, "a VM with volumes does not shut down; its power is cut");
        Ok(())
    }

    async fn end(&self, libvirt: &LibvirtConnection, domain: &Domain) -> Result<(), RpcError> {
        match libvirt.destroy(domain).await {
            // The domain does not run.
            Err(error) if error.is_absent() || error.code() == Some(code::OPERATION_INVALID) => Ok(()),
            Err(error) => match libvirt.state(domain).await {
                Ok(state) if state.is_off() => Ok(()),
                _ => Err(error),
            },
            Ok(()) => Ok(()),
        }
    }

    /// Returns the pool; `None`: the pool is gone, and the VM's files with it.
    async fn pool(&self, libvirt: &LibvirtConnection) -> Result<Option<Named>, RpcError> {
        match libvirt.pool(&self.config.pool).await {
            Ok(pool) => Ok(Some(pool)),
            Err(error) if error.code() == Some(code::NO_STORAGE_POOL) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn remove_files(
        &self,
        libvirt: &LibvirtConnection,
        pool: &Named,
        name: &str,
    ) -> Result<(), RpcError> {
        let older = (0..OLDER).map(|number| format!("{name}{}.{number}", crate::create::CONSOLE));
        let names = FILES.iter().map(|suffix| format!("{name}{suffix}")).chain(older);
        for name in names {
            if let Some(volume) = libvirt.volume(pool, &name).await? {
                libvirt.delete_volume(&volume).await?;
            }
        }
        Ok(())
    }

    /// Removes files of this owner that have no domain: the remains of a crash of libvirtd's host or virtlogd. Scans
    /// the whole pool, so it runs only at start. Spares young trials of KVM, which have a disk before their domain.
    pub(crate) async fn sweep(&self, libvirt: &LibvirtConnection) -> Result<usize, RpcError> {
        let Some(pool) = self.pool(libvirt).await? else { return Ok(0) };
        if self.owner.node_name.is_empty() {
            return Ok(0);
        }
        libvirt.refresh(&pool).await?;
        // The order matters: a file that is listed has a domain from before it was made until after it is gone.
        let volumes = libvirt.volumes(&pool).await?.0;
        let domains = libvirt.domains().await?.0;
        let prefix = crate::marks::prefix(&self.owner);
        let mut removed = 0;
        let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        for volume in volumes.iter().filter(|volume| volume.name.starts_with(&prefix)) {
            if is_young_trial(&volume.name, now) {
                continue;
            }
            let domain = volume.name.split('.').next().unwrap_or_default();
            if domains.iter().any(|one| one.name == domain) {
                continue;
            }
            libvirt.delete_volume(volume).await?;
            removed += 1;
        }
        Ok(removed)
    }
}

/// Waits for an event of the domain's life.
async fn changed(events: &mut broadcast::Receiver<DomainEvent>, domain: &Domain) {
    loop {
        match events.recv().await {
            Ok(DomainEvent::Lifecycle { domain: of, .. }) if of.uuid == domain.uuid => return,
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            _ => {}
        }
    }
}
