//! Promises of `create`.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{hold, not_here};
use crate::conformance::trial::{repeated, said, until};
use crate::conformance::{Checked, ProviderRole, Stop, Trial};
use crate::{CreateRequest, Error, OwnedState};

pub(crate) async fn a_repeated_create_finds_the_same_vm(trial: Arc<Trial>) -> Checked {
    let (provider, request, key) = (trial.provider(), trial.harness.request(), trial.key());
    let first = trial.create(&request, &key).await?;
    let second = trial.create(&request, &key).await?;
    hold!(first.id == second.id, "two creates with one key gave {} and {}", first.id, second.id);
    let addresses = said("addresses", provider.addresses(&first.id).await)?;
    hold!(!addresses.is_empty(), "a VM without an address");
    let third = trial.create(&request, &key).await?;
    hold!(first.id == third.id, "a create when it ran gave {} instead of {}", third.id, first.id);
    let listed = trial.listed(&key).await?.len();
    hold!(listed == 1, "{listed} VMs are listed with its key");
    trial.machines_are(1).await
}

pub(crate) async fn creates_with_one_key_at_once_make_one_vm(trial: Arc<Trial>) -> Checked {
    let key = trial.key();
    let creates: Vec<_> = (0..8)
        .map(|_| {
            let (trial, key) = (Arc::clone(&trial), key.clone());
            tokio::spawn(async move { trial.create(&trial.harness.request(), &key).await })
        })
        .collect();
    let mut ids = HashSet::new();
    for create in creates {
        ids.insert(joined(create.await)??.id);
    }
    hold!(ids.len() == 1, "one key made {} VMs", ids.len());
    let listed = trial.listed(&key).await?.len();
    hold!(listed == 1, "{listed} VMs are listed with one key");
    trial.machines_are(1).await
}

fn joined<T>(answer: Result<T, tokio::task::JoinError>) -> Result<T, Stop> {
    answer.map_err(|error| Stop::Broken(format!("a call ended without an answer: {error}")))
}

/// Checks that the same key with another request is refused, and that the first VM is unchanged.
pub(crate) async fn a_key_with_another_request_is_refused(trial: Arc<Trial>) -> Checked {
    let (request, key) = (trial.harness.request(), trial.key());
    let first = trial.create(&request, &key).await?;
    let mut other = request.clone();
    other.user_data.push(' ');
    match trial.create_once(&other, &key).await {
        Err(Error::KeyReused { .. }) => {}
        answer => hold!(false, "it was answered with {answer:?}"),
    }
    let again = trial.create(&request, &key).await?;
    hold!(again.id == first.id, "the first request now gives {} instead of {}", again.id, first.id);
    trial.machines_are(1).await
}

pub(crate) async fn a_create_dropped_at_any_time_and_repeated_makes_one_vm(trial: Arc<Trial>) -> Checked {
    let (provider, request) = (trial.provider(), trial.harness.request());
    for (number, after) in trial.moments().await?.into_iter().enumerate() {
        let key = trial.key();
        let first = trial.cut_create(&request, &key, after).await;
        let second = trial.create(&request, &key).await?;
        if let Some(Ok(first)) = first {
            hold!(first.id == second.id, "answered with {} and, repeated, with {}", first.id, second.id);
        }
        said("addresses", provider.addresses(&second.id).await)?;
        let listed = trial.listed(&key).await?.len();
        hold!(listed == 1, "{listed} VMs with one key, whose first create was dropped after {after:?}");
        let machines = trial.machines_are(number + 1).await;
        hold!(machines.is_ok(), "after a create was dropped after {after:?}: {machines:?}");
    }
    Ok(())
}

/// Checks that a VM is listed, complete or not, after its create was dropped and never repeated.
pub(crate) async fn a_create_dropped_and_forgotten_is_listed(trial: Arc<Trial>) -> Checked {
    if trial.harness.machines().await.is_none() {
        return not_here("only the provider can count its VMs here");
    }
    let request = trial.harness.request();
    let mut keys = HashSet::new();
    for after in trial.moments().await? {
        let key = trial.key();
        drop(trial.cut_create(&request, &key, after).await);
        keys.insert(key);
    }
    // Compares for a while: a VM may appear shortly before or after it is listed.
    let mut agreed: Option<Instant> = None;
    while agreed.is_none_or(|since| since.elapsed() < trial.quiet()) {
        let owned = said("list_owned", trial.provider().list_owned().await)?;
        let listed =
            owned.iter().filter(|one| one.key.as_ref().is_some_and(|key| keys.contains(key))).count();
        let machines = trial.harness.machines().await.unwrap_or(0);
        // More VMs may be listed than exist, because some are only begun.
        agreed = (listed >= machines).then(|| agreed.unwrap_or_else(Instant::now));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

pub(crate) async fn another_process_finds_what_was_made(trial: Arc<Trial>) -> Checked {
    let Some(successor) = trial.harness.other(ProviderRole::Successor) else {
        return not_here("there cannot be two of this provider at once here");
    };
    let (made, key) = trial.one().await?;
    let listed = said("list_owned", successor.list_owned().await)?;
    hold!(
        listed.iter().any(|one| one.id == made.id && one.key.as_ref() == Some(&key)),
        "it lists {listed:?}"
    );
    let again = said("create", successor.create(&trial.harness.request(), &key).await)?;
    hold!(again.id == made.id, "its create with the same key gave {} instead of {}", again.id, made.id);
    said("delete", successor.delete(&made.id).await)?;
    trial.gone(&key).await
}

/// Checks that many concurrent creates each get a VM and an address of their own.
pub(crate) async fn many_creates_at_once_all_succeed(trial: Arc<Trial>) -> Checked {
    let crowd = trial.harness.limits().crowd;
    let creates: Vec<_> = (0..crowd)
        .map(|_| {
            let trial = Arc::clone(&trial);
            tokio::spawn(async move {
                let (made, key) = trial.one().await?;
                let addresses = said("addresses", trial.provider().addresses(&made.id).await)?;
                Ok::<_, Stop>((made.id, addresses, key))
            })
        })
        .collect();
    let (mut ids, mut addresses, mut keys) = (HashSet::new(), HashSet::new(), HashSet::new());
    for create in creates {
        let (id, its, key) = joined(create.await)??;
        hold!(ids.insert(id.clone()), "{id} was given twice");
        for address in its {
            hold!(addresses.insert(address), "address {address} was given twice");
        }
        keys.insert(key);
    }
    let owned = trial.ours(said("list_owned", trial.provider().list_owned().await)?);
    let listed: HashSet<_> = owned.iter().filter_map(|one| one.key.clone()).collect();
    hold!(listed == keys, "{} of {crowd} are listed", listed.intersection(&keys).count());
    trial.machines_are(crowd as usize).await?;
    let deletes: Vec<_> = ids
        .into_iter()
        .map(|id| {
            let provider = trial.provider();
            tokio::spawn(async move { provider.delete(&id).await })
        })
        .collect();
    for delete in deletes {
        said("delete", joined(delete.await)?)?;
    }
    Ok(())
}

/// Checks that a repeated batch returns the same VMs and that all of them are listed with the key.
pub(crate) async fn a_batch_is_as_many_vms_as_it_says(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let Some(batch) = provider.extensions().batch else { return not_here("this provider has no batches") };
    let most = provider.capabilities().max_batch;
    let count =
        NonZeroU32::new(most.min(3)).ok_or_else(|| Stop::Broken("a batch of at most 0".to_owned()))?;
    let (request, key) = (trial.harness.request(), trial.key());
    let first = said("create_many", batch.create_many(&request, count, &key).await)?;
    let again = said("create_many", batch.create_many(&request, count, &key).await)?;
    let ids = |many: &crate::CreatedMany| many.made.iter().map(|made| made.id.clone()).collect::<Vec<_>>();
    hold!(ids(&first) == ids(&again), "repeated it gave {:?} instead of {:?}", ids(&again), ids(&first));
    let short = first.made.len() < count.get() as usize;
    hold!(short == first.rest.is_some(), "{} of {count}, because of {:?}", first.made.len(), first.rest);
    let different: HashSet<_> = ids(&first).into_iter().collect();
    hold!(different.len() == first.made.len(), "one VM twice in {:?}", ids(&first));
    let listed: HashSet<_> = trial.listed(&key).await?.into_iter().map(|one| one.id).collect();
    hold!(listed == different, "with its key are listed {listed:?}, made were {different:?}");
    trial.machines_are(first.made.len()).await?;
    if let Some(over) = most.checked_add(1).and_then(NonZeroU32::new) {
        let answer = batch.create_many(&request, over, &trial.key()).await;
        hold!(matches!(answer, Err(Error::Invalid { .. })), "{over} of at most {most}: {answer:?}");
    }
    until(|| async { Ok(trial.listed(&key).await?.len() == different.len()) }).await
}

/// Returns a request with a recognisable mark in its user-data, for the other checks.
pub(super) fn marked(trial: &Trial) -> (CreateRequest, &'static str) {
    const MARK: &str = "a-ticket-that-nobody-may-see";
    (CreateRequest { user_data: format!("{{\"peerpod\":\"{MARK}\"}}"), ..trial.harness.request() }, MARK)
}

/// Checks a create that the cloud accepts and refuses afterwards: the caller gets [`Error::Capacity`], nothing stays, and
/// the next choice of a place is another one.
pub(crate) async fn a_late_refusal_leaves_nothing_but_what_is_being_deleted(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let Some(mut request) = trial.harness.late_refusal().await else {
        return not_here("this cloud decides in its answer, or a late refusal cannot be caused");
    };
    request.placement = said("place", provider.place(&request).await)?;
    let key = trial.key();
    match repeated(|| trial.create_once(&request, &key)).await {
        Err(Error::Capacity { .. }) => {}
        answer => hold!(false, "a create that the cloud refused later was answered with {answer:?}"),
    }
    let left = trial.listed(&key).await?;
    hold!(left.iter().all(|one| one.state == OwnedState::Deleting), "after the refusal there is {left:?}");
    trial.gone(&key).await?;
    let Some(place) = request.placement.take() else { return trial.machines_are(0).await };
    match provider.place(&request).await {
        Err(Error::Capacity { .. }) => {}
        answer => {
            let next = said("place after the refusal", answer)?;
            hold!(next != Some(place), "the refused place is chosen again");
        }
    }
    trial.machines_are(0).await
}

/// Checks a create whose VM is being deleted: it makes a VM that stays, or fails, or gives a VM without addresses.
pub(crate) async fn a_key_whose_vm_is_being_deleted_gives_no_dying_vm(trial: Arc<Trial>) -> Checked {
    let (provider, request, key) = (trial.provider(), trial.harness.request(), trial.key());
    let made = trial.create(&request, &key).await?;
    said("addresses", provider.addresses(&made.id).await)?;
    said("delete", provider.delete(&made.id).await)?;
    until(|| async { Ok(trial.listed(&key).await?.iter().all(|one| one.state == OwnedState::Deleting)) })
        .await?;
    let Ok(again) = repeated(|| trial.create_once(&request, &key)).await else {
        return trial.gone(&key).await;
    };
    match provider.addresses(&again.id).await {
        Err(Error::NotFound { .. }) => return trial.gone(&key).await,
        answer => said("addresses of the VM of a repeated create", answer)?,
    };
    until(|| async { Ok(trial.listed(&key).await?.iter().all(|one| one.state != OwnedState::Deleting)) })
        .await?;
    let listed = trial.listed(&key).await?;
    let lives = |state| matches!(state, OwnedState::Pending | OwnedState::Running);
    hold!(
        listed.len() == 1 && listed[0].id == again.id && lives(listed[0].state),
        "a create during the delete gave {}, and then there is {listed:?}",
        again.id
    );
    trial.machines_are(1).await
}
