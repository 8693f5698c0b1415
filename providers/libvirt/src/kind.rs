//! Determines which kind of domain can be started here. The kernel ([`kvm`]) and libvirtd are asked first, because
//! their refusals are quick. Otherwise it is tried: trial VMs count and end by themselves ([`probe`]), or with the
//! provider's connection.

use std::path::Path;
use std::time::Duration;

use peerpod_provider_api::Error;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};

use crate::Shared;
use crate::config::Acceleration;
use crate::kvm;
use crate::probe;
use crate::rpc::calls::{Domain, Volume};
use crate::rpc::{LibvirtConnection, RpcError, unless_absent};
use crate::xml;

const ATTEMPT: &str = "find out whether KVM works";
const REMEDY: &str = "enable virtualisation in the host's firmware, or nested virtualisation where the host is a VM, load \
                      kvm_intel or kvm_amd, and give QEMU's user the right to /dev/kvm (group kvm)";
/// Time in which kernel and libvirtd say whether there is KVM. A libvirtd without a right to it may need minutes for a
/// trial.
const ASK: Duration = Duration::from_secs(5);
/// Name of trial VMs after the owner's prefix, and suffix of their disk.
const TRIAL: &str = "probe-";
const DISK: &str = ".img";
/// Pause between two checks.
const LOOK: Duration = Duration::from_millis(50);
/// With KVM, firmware and counting take a fraction of a second. When they take longer than this, an emulated VM shows
/// whether the host is slow.
const COMPARE: Duration = Duration::from_secs(1);
/// Minimum time before KVM counts as broken.
const LEAST: Duration = Duration::from_secs(10);
/// KVM that is so many times slower than emulation never finishes.
const SLOWER: u32 = 3;
/// Longest wait for a trial, because creates wait for it.
const PROOF: Duration = Duration::from_secs(30);
/// Time after which a trial is over, or counts as failed.
const YOUNG: Duration = Duration::from_secs(60);
/// Time until the next trial on a host that was too slow for a result.
const DOUBT: Duration = Duration::from_secs(300);
/// The same if no VM can be made meanwhile.
const DOUBT_WITHOUT: Duration = Duration::from_secs(60);

/// Fault of KVM, and the time until the next trial; `None`: it is certain.
type Fault = (String, Option<Duration>);

/// Result of a trial, and the end of its validity; `None`: valid for good.
pub(crate) struct KnownKind {
    found: Result<&'static str, Error>,
    /// Warning about the fault of KVM with its remedy, while VMs are emulated because of it.
    pub(crate) warning: Option<String>,
    until: Option<Instant>,
}

impl KnownKind {
    fn new(wanted: Acceleration, fault: Option<Fault>, now: Instant) -> KnownKind {
        let Some((why, doubt)) = fault else {
            let kind = if wanted == Acceleration::Emulated { "qemu" } else { "kvm" };
            return KnownKind { found: Ok(kind), warning: None, until: None };
        };
        if wanted == Acceleration::Kvm {
            let text = format!("no VM can be started with KVM: {why}; {REMEDY}");
            let error = if doubt.is_some() { Error::transient(text) } else { Error::invalid(text) };
            let until = doubt.map(|doubt| now + doubt.min(DOUBT_WITHOUT));
            return KnownKind { found: Err(error), warning: None, until };
        }
        let (cannot, until) = if doubt.is_some() {
            ("could not be tried", " until it is tried again")
        } else {
            ("does not work", "")
        };
        let warning = format!("KVM {cannot}, VMs are emulated{until}, many times slower: {why}; {REMEDY}");
        KnownKind { found: Ok("qemu"), warning: Some(warning), until: doubt.map(|doubt| now + doubt) }
    }

    fn at(&self, now: Instant) -> Option<Result<&'static str, Error>> {
        self.until.is_none_or(|until| now < until).then(|| self.found.clone())
    }
}

/// Conclusion about KVM from a trial VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    Runs,
    /// KVM executes no code, or far too slowly: an emulated VM ended long before.
    Never,
    /// The host may be slow.
    Unknown,
}

impl Proof {
    fn describe(self) -> &'static str {
        match self {
            Proof::Runs => "it works",
            Proof::Never => "a VM starts with it, and executes nothing, or far slower than emulation",
            Proof::Unknown => "a VM starts with it, and did not finish; is the host overloaded?",
        }
    }

    /// Judges a VM that has not ended after `waited`. `emulated` is the time that an emulated VM took. `None`: the wait
    /// goes on.
    fn of_one_that_runs(waited: Duration, emulated: Option<Duration>) -> Option<Proof> {
        match emulated {
            Some(took) if waited >= LEAST && waited >= took * SLOWER => Some(Proof::Never),
            _ if waited >= PROOF => Some(Proof::Unknown),
            _ => None,
        }
    }
}

impl Shared {
    /// Returns the kind of domain that can be started here, found by starting one.
    pub(crate) async fn kind(&self, libvirt: &LibvirtConnection) -> Result<&'static str, Error> {
        if !self.is_real() {
            return Ok("test");
        }
        let mut known = self.kind.lock().await;
        if let Some(found) = known.as_ref().and_then(|known| known.at(Instant::now())) {
            return found;
        }
        let wanted = self.config.acceleration;
        let fault = match wanted {
            Acceleration::Emulated => None,
            Acceleration::Auto | Acceleration::Kvm => self.fault(libvirt).await?,
        };
        let new = KnownKind::new(wanted, fault, Instant::now());
        let (found, warning) = (new.found.clone(), new.warning.clone());
        // The preflight returns the first one.
        let changed = known.replace(new).is_some_and(|old| old.warning != warning);
        match warning.filter(|_| changed) {
            Some(warning) => tracing::warn!("{warning}"),
            None if changed => tracing::info!("KVM works now, new VMs use it"),
            None => {}
        }
        found
    }

    /// Returns the fault of KVM; `None`: it works, or, with [`LibvirtConfig::dry`], neither kernel nor libvirtd refuses it.
    ///
    /// [`LibvirtConfig::dry`]: crate::LibvirtConfig::dry
    async fn fault(&self, libvirt: &LibvirtConnection) -> Result<Option<Fault>, Error> {
        if let Some(fault) = self.refused(libvirt).await {
            return Ok(Some(fault));
        }
        if self.config.dry {
            return Ok(None);
        }
        Ok(match self.runs(libvirt).await? {
            Ok(Proof::Runs) => None,
            Ok(proof) => Some((proof.describe().to_owned(), (proof == Proof::Unknown).then_some(DOUBT))),
            Err(error @ RpcError::Late(_)) => Some((error.to_string(), Some(DOUBT_WITHOUT))),
            Err(error) if error.code().is_none() => return Err(Error::from(error).during(ATTEMPT)),
            // A host that is short of a resource at the moment is no proof, either.
            Err(error) => {
                let text = error.to_string();
                let is_sure = Error::from(error).class() == "invalid";
                Some((text, (!is_sure).then_some(DOUBT)))
            }
        })
    }

    /// Asks the kernel, where libvirtd is on this host, and then libvirtd. `None`: neither refuses KVM, so a trial
    /// decides.
    async fn refused(&self, libvirt: &LibvirtConnection) -> Option<Fault> {
        let mut makes_vms = false;
        if self.config.address.is_own {
            let asked = spawn_blocking(|| kvm::ask(Path::new(kvm::DEVICE)));
            match timeout(ASK, asked).await {
                Ok(Ok(Some(Err(error)))) => {
                    return Some((format!("{} makes no VM: {error}", kvm::DEVICE), None));
                }
                Ok(Ok(Some(Ok(())))) => makes_vms = true,
                _ => {}
            }
        }
        match timeout(ASK, libvirt.domain_capabilities(&self.config.machine, "kvm")).await {
            Ok(Err(error)) if is_without_kvm(&error) => Some((error.to_string(), None)),
            // Where the kernel makes VMs, libvirtd may just be busy.
            Err(_) | Ok(Err(RpcError::Late(_))) if !makes_vms => {
                Some((RpcError::Late(ASK).to_string(), Some(DOUBT_WITHOUT)))
            }
            // A trial returns any other error with its remedy.
            _ => None,
        }
    }

    /// Returns whether guest code runs in a domain with KVM. A successful start is no proof: on some hosts KVM makes
    /// VMs and never executes an instruction. The inner error is libvirt's refusal of such a domain. Without a disk to boot,
    /// the trial has no result and this fails.
    async fn runs(&self, libvirt: &LibvirtConnection) -> Result<Result<Proof, RpcError>, Error> {
        let name = self.trial();
        let (volume, sector) = self.sector(libvirt, &name).await.map_err(|error| {
            let make = format!("make a disk in pool {}", self.config.pool);
            Error::from(error).during(make).during(ATTEMPT)
        })?;
        let outcome = self.try_kvm(libvirt, &name, &sector).await;
        discard(libvirt, &volume).await;
        match outcome {
            // A disk that QEMU cannot open proves nothing about KVM, either.
            Err(error) if is_of(&error, &sector) => Err(Error::from(error).during(ATTEMPT)),
            other => Ok(other),
        }
    }

    /// Returns a name that no other process of this owner has.
    pub(crate) fn trial(&self) -> String {
        let nonce = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        format!("{}{TRIAL}{}-{nonce:x}", crate::marks::prefix(&self.owner), std::process::id())
    }

    /// Makes the disk that a trial VM boots; returns it with its path on the host.
    async fn sector(&self, libvirt: &LibvirtConnection, name: &str) -> Result<(Volume, String), RpcError> {
        let pool = libvirt.pool(&self.config.pool).await?;
        let xml = xml::volume(&format!("{name}{DISK}"), "raw", probe::DISK, None);
        let volume = libvirt.create_volume(&pool, &xml).await?;
        let filled = libvirt.upload(&volume, probe::BYTES as u64, probe::sector().as_slice()).await;
        let path = match filled {
            Ok(()) => libvirt.volume_path(&volume).await,
            Err(error) => Err(error),
        };
        if path.is_err() {
            discard(libvirt, &volume).await;
        }
        Ok((volume, path?))
    }

    async fn try_kvm(
        &self,
        libvirt: &LibvirtConnection,
        name: &str,
        sector: &str,
    ) -> Result<Proof, RpcError> {
        let domain = self.probe(libvirt, name, "kvm", sector).await?;
        let mut emulated = None;
        let outcome = self.watch(libvirt, &domain, sector, &mut emulated).await;
        for domain in [Some(&domain), emulated.as_ref()].into_iter().flatten() {
            match libvirt.destroy(domain).await {
                // The VM ends with the provider's connection at the latest.
                Err(error) if !error.is_absent() => {
                    tracing::warn!(domain = domain.name, "cannot end the VM that tried KVM: {error}");
                }
                _ => {}
            }
        }
        outcome
    }

    /// Waits for the end of a VM with KVM. When that takes long, starts an `emulated` VM to compare it with.
    async fn watch(
        &self,
        libvirt: &LibvirtConnection,
        domain: &Domain,
        sector: &str,
        emulated: &mut Option<Domain>,
    ) -> Result<Proof, RpcError> {
        let (since, mut compared, mut took) = (Instant::now(), None, None);
        loop {
            if has_ended(libvirt, domain).await? {
                return Ok(Proof::Runs);
            }
            if compared.is_none() && since.elapsed() >= COMPARE {
                compared = Some(Instant::now());
                // Without an emulated VM only the time decides.
                *emulated = self.probe(libvirt, &self.trial(), "qemu", sector).await.ok();
            }
            if let (None, Some(began), Some(other)) = (took, compared, emulated.as_ref())
                // An error means only that there is no comparison.
                && has_ended(libvirt, other).await.unwrap_or(false)
            {
                took = Some(began.elapsed());
            }
            if let Some(proof) = Proof::of_one_that_runs(since.elapsed(), took) {
                return Ok(proof);
            }
            sleep(LOOK).await;
        }
    }

    async fn probe(
        &self,
        libvirt: &LibvirtConnection,
        name: &str,
        kind: &str,
        sector: &str,
    ) -> Result<Domain, RpcError> {
        libvirt.run_once(&xml::probe(name, kind, &self.config.machine, sector)).await
    }
}

/// Returns whether libvirt has found that QEMU, as its user, cannot use KVM.
fn is_without_kvm(error: &RpcError) -> bool {
    let text = error.to_string();
    error.code().is_some()
        && ["KVM is not supported", "'kvm' is not supported"].iter().any(|part| text.contains(part))
}

fn is_of(error: &RpcError, disk: &str) -> bool {
    error.to_string().contains(disk)
}

/// Deletes a trial's disk. If that fails, the next start of the provider removes it.
async fn discard(libvirt: &LibvirtConnection, volume: &Volume) {
    if let Err(error) = libvirt.delete_volume(volume).await {
        tracing::warn!(name = volume.name, "cannot remove a disk that KVM was tried with: {error}");
    }
}

/// Returns whether a domain, of any node, was made to try KVM.
pub(crate) fn is_trial(domain: &Domain) -> bool {
    domain.name.contains(&format!("-{TRIAL}"))
}

/// Returns whether a file of this name belongs to a trial of this node that may not have its VM yet.
pub(crate) fn is_young_trial(name: &str, now: Duration) -> bool {
    let began = name.split_once(&format!("-{TRIAL}")).and_then(|(_, rest)| {
        let (_, nonce) = rest.strip_suffix(DISK)?.split_once('-')?;
        u64::from_str_radix(nonce, 16).ok().map(Duration::from_nanos)
    });
    began.is_some_and(|began| now.saturating_sub(began) < YOUNG)
}

async fn has_ended(libvirt: &LibvirtConnection, domain: &Domain) -> Result<bool, RpcError> {
    unless_absent(libvirt.state(domain).await).map(|state| state.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::message::LibvirtFailure;

    #[test]
    fn a_slow_host_is_no_proof_against_kvm() {
        let (seconds, of) = (Duration::from_secs, Proof::of_one_that_runs);
        // The host runs other VMs well.
        assert_eq!(of(seconds(9), Some(seconds(1))), None);
        assert_eq!(of(seconds(10), Some(seconds(1))), Some(Proof::Never));
        // The host hardly runs them, or there is no comparison.
        for emulated in [None, Some(seconds(11))] {
            assert_eq!(of(seconds(11), emulated), None, "{emulated:?}");
            assert_eq!(of(seconds(30), emulated), Some(Proof::Unknown), "{emulated:?}");
        }
    }

    #[test]
    fn the_disk_of_a_trial_under_way_is_spared() {
        let seconds = Duration::from_secs;
        let name = format!("peerpod-12ab-{TRIAL}77-{:x}{DISK}", seconds(100).as_nanos());
        assert!(is_young_trial(&name, seconds(101)));
        assert!(!is_young_trial(&name, seconds(161)));
        for other in ["peerpod-12ab-cd.root.qcow2", "peerpod-12ab-probe-1-1.img", "peerpod-12ab-probe-x.img"]
        {
            assert!(!is_young_trial(other, seconds(100)), "{other}");
        }
    }

    #[test]
    fn a_disk_that_cannot_be_had_is_no_proof_against_kvm() {
        let failed = |text: &str| RpcError::Failed(LibvirtFailure { code: 1, text: text.into() });
        let denied = failed("internal error: Could not open '/pool/p-probe-1-1.img': Permission denied");
        assert!(is_of(&denied, "/pool/p-probe-1-1.img"));
        assert!(!is_of(&failed("Could not access KVM kernel module"), "/pool/p-probe-1-1.img"));
        for (text, without) in [
            ("KVM is not supported by '/usr/bin/qemu-system-x86_64' on this host", true),
            ("the accel 'kvm' is not supported by '/usr/libexec/qemu-kvm' on this host", true),
            ("the machine 'x' is not supported by emulator '/usr/libexec/qemu-kvm'", false),
        ] {
            assert_eq!(is_without_kvm(&failed(text)), without, "{text}");
        }
    }

    #[test]
    fn an_uncertain_result_is_probed_again() {
        let now = Instant::now();
        let of = |wanted, why: Option<Fault>| KnownKind::new(wanted, why, now);
        assert_eq!(of(Acceleration::Kvm, None).at(now + DOUBT), Some(Ok("kvm")));
        assert_eq!(of(Acceleration::Emulated, None).at(now + DOUBT), Some(Ok("qemu")));
        let doubtful = of(Acceleration::Auto, Some(("busy".into(), Some(DOUBT))));
        assert_eq!((doubtful.at(now), doubtful.at(now + DOUBT)), (Some(Ok("qemu")), None));
        // A refusal is cached, too, so that creates do not wait for one trial after the other.
        let refused = of(Acceleration::Kvm, Some(("busy".into(), Some(DOUBT))));
        assert_eq!(refused.at(now).map(|found| found.unwrap_err().class()), Some("transient"));
        assert_eq!(refused.at(now + DOUBT_WITHOUT), None);
        let never = of(Acceleration::Kvm, Some(("it has none".into(), None)));
        assert_eq!(never.found.unwrap_err().class(), "invalid");
        let never = of(Acceleration::Auto, Some(("it has none".into(), None)));
        assert_eq!(never.at(now + DOUBT), Some(Ok("qemu")));
        let warning = never.warning.unwrap();
        assert!(warning.contains("it has none") && warning.contains("group kvm"), "{warning}");
    }
}
