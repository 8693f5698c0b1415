//! Promises of `delete` and `list_owned`.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{hold, not_here};
use crate::Error;
use crate::conformance::trial::{said, until};
use crate::conformance::{Checked, Trial};

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
        let key = trial.key();
        drop(trial.cut_create(&request, &key, after).await);
        // As after a crash of the node: delete every listed VM. A create may still be in flight, so the list is read
        // again until it stays empty for a while.
        let mut last = Instant::now();
        while last.elapsed() < trial.quiet() {
            for one in trial.listed(&key).await? {
                said("delete", provider.delete(&one.id).await)?;
                last = Instant::now();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    until(|| async { Ok(trial.machines_are(0).await.is_ok()) }).await
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
    let Some(stranger) = trial.harness.stranger() else {
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
    said("another owner's delete", stranger.delete(&theirs.id).await)?;
    until(|| async {
        let left = said("another owner's list", stranger.list_owned().await)?;
        Ok(left.iter().all(|one| one.id != theirs.id))
    })
    .await?;
    checked
}
