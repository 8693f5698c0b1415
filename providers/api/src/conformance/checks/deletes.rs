//! Promises of `delete` and `list_owned`.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::extras::until_attached;
use super::{hold, not_here};
use crate::conformance::trial::{said, until};
use crate::conformance::{Checked, ListPages, ProviderRole, Stop, Trial};
use crate::{Error, InstanceId, Owned, OwnedState, Provider};

pub(crate) async fn a_second_delete_is_fine(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let (made, key) = trial.one().await?;
    said("delete", provider.delete(&made.id).await)?;
    said("delete at once again", provider.delete(&made.id).await)?;
    trial.gone(&key).await?;
    said("delete of a VM that is gone", provider.delete(&made.id).await)?;
    trial.machines_are(0).await
}

pub(crate) async fn a_delete_of_something_unknown_is_fine(trial: Arc<Trial>) -> Checked {
    let id = trial.unknown_id().await?;
    said("delete", trial.provider().delete(&id).await)
}

/// Checks that a delete that is dropped and repeated leaves nothing, even if the VM was not finished.
pub(crate) async fn a_delete_dropped_at_any_time_and_repeated_leaves_nothing(trial: Arc<Trial>) -> Checked {
    let (provider, request) = (trial.provider(), trial.harness.request());
    let moments = trial.moments().await?;
    for after in &moments {
        let (made, key) = trial.one().await?;
        if let Ok(answer) = timeout(*after, provider.delete(&made.id)).await {
            said("delete", answer)?;
        }
        said("delete again", provider.delete(&made.id).await)?;
        trial.gone(&key).await?;
    }
    for after in moments {
        drop(trial.cut_create(&request, &trial.key(), after).await);
        delete_listed(&trial).await?;
    }
    // A create may still be in flight, so the list is read again until it stays empty for a while.
    let mut last = Instant::now();
    while last.elapsed() < trial.quiet() {
        if delete_listed(&trial).await? {
            last = Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    until(|| async { Ok(trial.machines_are(0).await.is_ok()) }).await
}

/// Deletes every listed VM of the trial, as after a crash of the node. Returns whether there was one.
async fn delete_listed(trial: &Trial) -> Result<bool, Stop> {
    let provider = trial.provider();
    let listed = trial.ours(said("list_owned", provider.list_owned().await)?);
    for one in &listed {
        said("delete", provider.delete(&one.id).await)?;
    }
    Ok(!listed.is_empty())
}

/// Checks that a caller that waits for the addresses of a deleted VM gets an error.
pub(crate) async fn a_deleted_vm_has_no_addresses(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let unknown = provider.addresses(&trial.unknown_id().await?).await;
    hold!(matches!(unknown, Err(Error::NotFound { .. })), "an unknown VM: {unknown:?}");
    let (made, key) = trial.one().await?;
    said("addresses", provider.addresses(&made.id).await)?;
    said("delete", provider.delete(&made.id).await)?;
    trial.gone(&key).await?;
    let gone = provider.addresses(&made.id).await;
    hold!(matches!(gone, Err(Error::NotFound { .. })), "a deleted VM: {gone:?}");
    Ok(())
}

pub(crate) async fn only_our_vms_are_listed(trial: Arc<Trial>) -> Checked {
    let Some(stranger) = trial.harness.other(ProviderRole::Stranger) else {
        let (made, key) = trial.one().await?;
        let listed = trial.listed(&key).await?;
        hold!(listed.iter().any(|one| one.id == made.id), "our own VM is not listed");
        return not_here("no other owner to compare with; our own VM is listed");
    };
    let (ours, our_key) = trial.one().await?;
    let their_key = trial.key();
    let theirs = said("another owner's create", stranger.create(&trial.harness.request(), &their_key).await)?;
    let checked = async {
        hold!(theirs.id != ours.id, "we and another owner have the same VM");
        let seen = said("list_owned", trial.provider().list_owned().await)?;
        hold!(seen.iter().all(|one| one.id != theirs.id), "we see another owner's VM");
        let mine = seen.iter().find(|one| one.id == ours.id);
        hold!(mine.is_some_and(|one| one.key.as_ref() == Some(&our_key)), "our VM is listed as {mine:?}");
        let seen = said("another owner's list", stranger.list_owned().await)?;
        hold!(seen.iter().any(|one| one.id == theirs.id), "another owner does not see its own VM");
        hold!(seen.iter().all(|one| one.id != ours.id), "another owner sees our VM");
        Ok(())
    }
    .await;
    end(&*stranger, &theirs.id).await?;
    checked
}

/// Deletes another owner's VM and waits until it is gone.
async fn end(stranger: &dyn Provider, id: &InstanceId) -> Checked {
    said("another owner's delete", stranger.delete(id).await)?;
    until(|| async {
        let left = said("another owner's list", stranger.list_owned().await)?;
        Ok(left.iter().all(|one| one.id != *id))
    })
    .await
}

/// Checks that a delete, a detach and an attach of ours leave a VM of another owner as it is.
pub(crate) async fn a_vm_of_another_owner_survives_our_calls(trial: Arc<Trial>) -> Checked {
    let Some(stranger) = trial.harness.other(ProviderRole::Stranger) else {
        return not_here("no other owner with a VM");
    };
    let key = trial.key();
    let theirs = said("another owner's create", stranger.create(&trial.harness.request(), &key).await)?;
    let checked = survives(&trial, &*stranger, &theirs.id).await;
    end(&*stranger, &theirs.id).await?;
    checked
}

async fn survives(trial: &Trial, stranger: &dyn Provider, id: &InstanceId) -> Checked {
    let provider = trial.provider();
    said("another owner's addresses", stranger.addresses(id).await)?;
    let both = provider.extensions().volumes.zip(stranger.extensions().volumes);
    if let Some(((ours, theirs), disk)) = both.zip(trial.harness.volume()) {
        let attached = ours.attach(id, &disk).await;
        hold!(matches!(attached, Err(Error::NotFound { .. })), "we attached to its VM: {attached:?}");
        // A VM of ours can have the disk, so that nothing else refuses it below.
        let (made, _) = trial.one().await?;
        said("addresses", provider.addresses(&made.id).await)?;
        until_attached(ours, &made.id, &disk).await?;
        said("detach", ours.detach(&made.id, &disk.volume).await)?;
        until_attached(theirs, id, &disk).await?;
        let attached = ours.attach(id, &disk).await;
        hold!(matches!(attached, Err(Error::NotFound { .. })), "we have its attachment: {attached:?}");
        said("detach from another owner's VM", ours.detach(id, &disk.volume).await)?;
        let stolen = ours.attach(&made.id, &disk).await;
        hold!(disk.read_only || stolen.is_err(), "we detached its disk");
    }
    said("delete of another owner's VM", provider.delete(id).await)?;
    let seen = said("another owner's list", stranger.list_owned().await)?;
    let state = seen.iter().find(|one| one.id == *id).map(|one| one.state);
    let lives = matches!(state, Some(OwnedState::Pending | OwnedState::Running));
    hold!(lives, "after our delete its VM is {state:?}");
    Ok(())
}

/// Checks that a list without its second page is an error, or whole because the provider asked again.
pub(crate) async fn a_list_with_an_unread_page_is_an_error(trial: Arc<Trial>) -> Checked {
    let Some(ListPages { size, lose_next }) = trial.harness.pages() else {
        return not_here("a list has one page here, or a page cannot be lost");
    };
    let mut made = Vec::new();
    for _ in 0..=size {
        made.push(trial.one().await?.0.id);
    }
    let missing = |listed: &[Owned]| made.iter().filter(|id| listed.iter().all(|one| one.id != **id)).count();
    until(|| async { Ok(missing(&said("list_owned", trial.provider().list_owned().await)?) == 0) }).await?;
    lose_next();
    if let Ok(listed) = trial.provider().list_owned().await {
        let missing = missing(&listed);
        hold!(missing == 0, "a list that lost a page is shorter by {missing} VMs");
    }
    until(|| async { Ok(trial.provider().list_owned().await.is_ok_and(|listed| missing(&listed) == 0)) })
        .await
}
