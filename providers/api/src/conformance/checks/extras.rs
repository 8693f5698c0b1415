//! Promises about the provider's description of itself and about the optional parts of the trait.

use std::sync::Arc;

use super::{hold, not_here};
use crate::conformance::trial::{patiently, said};
use crate::conformance::{Checked, Stop, Trial};
use crate::{DiskRequest, Error, Provider, Volumes};

pub(crate) async fn the_provider_says_what_it_can_do(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let can = provider.capabilities();
    hold!(can == provider.capabilities(), "capabilities change");
    hold!(can.max_user_data >= 2048, "user-data needs up to 2 KiB, {} is too little", can.max_user_data);
    for (what, said, there) in [
        ("volumes", can.volumes, provider.extensions().volumes.is_some()),
        ("batches", can.max_batch > 0, provider.extensions().batch.is_some()),
        ("a console", can.console, provider.extensions().console.is_some()),
        ("events", can.events, provider.events().is_some()),
    ] {
        hold!(said == there, "its capabilities report {said} for {what}, and it is {there}");
    }
    let name = provider.name();
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
    hold!(!name.is_empty() && name.bytes().all(fits), "its name {name:?} is not of lower-case letters");
    Ok(())
}

pub(crate) async fn preflight_finds_everything_and_makes_nothing(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let before = said("list_owned", provider.list_owned().await)?.len();
    for _ in 0..2 {
        said("preflight", provider.preflight().await)?;
    }
    let after = said("list_owned", provider.list_owned().await)?.len();
    hold!(after <= before, "{before} VMs before, {after} after it");
    trial.machines_are(0).await
}

/// Returns the disk that can be attached here, and the interface that attaches it.
fn disk<'p>(trial: &Trial, provider: &'p dyn Provider) -> Result<(&'p dyn Volumes, DiskRequest), Stop> {
    let Some(volumes) = provider.extensions().volumes else {
        return not_here("this provider has no volumes");
    };
    match trial.harness.volume() {
        Some(disk) => Ok((volumes, disk)),
        None => not_here("no disk was given to try it with"),
    }
}

/// Checks that a repeated attach returns the same identity, and that a second VM cannot attach the disk. A disk in the
/// request gets the identity that an attach of it returns.
pub(crate) async fn an_attached_disk_keeps_its_identity(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let (volumes, disk) = disk(&trial, &*provider)?;
    let (made, _) = trial.one().await?;
    said("addresses", provider.addresses(&made.id).await)?;
    let first = said("attach", volumes.attach(&made.id, &disk).await)?;
    let again = said("attach again", volumes.attach(&made.id, &disk).await)?;
    hold!(first == again, "attached it is {first:?}, attached again {again:?}");
    let (other, _) = trial.one().await?;
    said("addresses", provider.addresses(&other.id).await)?;
    if !disk.read_only {
        let stolen = volumes.attach(&other.id, &disk).await;
        hold!(stolen.is_err(), "it is attached to two VMs: {stolen:?}");
    }
    said("detach", volumes.detach(&made.id, &disk.volume).await)?;
    until_attached(volumes, &other.id, &disk).await?;
    said("detach", volumes.detach(&other.id, &disk.volume).await)?;

    let mut request = trial.harness.request();
    request.disks.push(disk.clone());
    let with = trial.create(&request, &trial.key()).await?;
    said("addresses", provider.addresses(&with.id).await)?;
    let found = until_attached(volumes, &with.id, &disk).await?;
    if let Some((_, told)) = with.disks.iter().find(|(volume, _)| *volume == disk.volume) {
        hold!(*told == found, "create returned {told:?}, attach {found:?}");
    }
    hold!(
        with.disks.iter().all(|(volume, _)| *volume == disk.volume),
        "other disks came along: {:?}",
        with.disks
    );
    said("detach", volumes.detach(&with.id, &disk.volume).await)
}

/// Repeats an attach. A provider may accept a detach before the disk is free, so the disk may be busy for a while.
pub(super) async fn until_attached(
    volumes: &dyn Volumes,
    id: &crate::InstanceId,
    disk: &DiskRequest,
) -> Result<crate::DiskIdentity, Stop> {
    patiently("attach", || volumes.attach(id, disk)).await
}

/// Checks that a detach returns `Ok` for a disk that is not attached, a VM that is gone and a VM that never existed. An
/// attach to a VM that never existed fails.
pub(crate) async fn a_detach_of_nothing_is_fine(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let (volumes, disk) = disk(&trial, &*provider)?;
    let unknown = trial.unknown_id().await?;
    said("detach from nothing", volumes.detach(&unknown, &disk.volume).await)?;
    let nowhere = volumes.attach(&unknown, &disk).await;
    hold!(matches!(nowhere, Err(Error::NotFound { .. })), "attached to nothing: {nowhere:?}");
    let (made, key) = trial.one().await?;
    said("addresses", provider.addresses(&made.id).await)?;
    said("detach of what is not attached", volumes.detach(&made.id, &disk.volume).await)?;
    said("attach", volumes.attach(&made.id, &disk).await)?;
    said("delete", provider.delete(&made.id).await)?;
    trial.gone(&key).await?;
    said("detach from a VM that is gone", volumes.detach(&made.id, &disk.volume).await)
}

/// Checks that the console of a running VM can be read within the limit, and that a VM that never existed has none.
pub(crate) async fn the_console_is_there_if_it_is_promised(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let Some(console) = provider.extensions().console else {
        return not_here("this provider has no console");
    };
    let nothing = console.tail(&trial.unknown_id().await?, 100).await;
    hold!(matches!(nothing, Err(Error::NotFound { .. })), "the console of nothing: {nothing:?}");
    let (made, _) = trial.one().await?;
    let tail = said("console", console.tail(&made.id, 100).await)?;
    hold!(tail.len() <= 100, "{} bytes where at most 100 were asked for", tail.len());
    Ok(())
}
