//! Promises of `place`, and of a provider object that never makes a VM.

use std::sync::Arc;

use super::{hold, not_here};
use crate::conformance::trial::said;
use crate::conformance::{Checked, ProviderRole, Trial};
use crate::{CreateRequest, Error, Placement};

/// Checks that choosing a placement makes no VM. A create repeated with its recorded placement must find its VM, even
/// after another choice. A foreign placement, and a request that no offering fits, are refused.
pub(crate) async fn a_recorded_place_is_kept(trial: Arc<Trial>) -> Checked {
    let (provider, request) = (trial.provider(), trial.harness.request());
    let Some(place) = said("place", provider.place(&request).await)? else {
        return not_here("this provider has no choice of places");
    };
    trial.machines_are(0).await?;
    let placed = CreateRequest { placement: Some(place), ..request.clone() };
    let key = trial.key();
    let first = trial.create(&placed, &key).await?;
    let another = said("place", provider.place(&request).await)?;
    hold!(another.is_some(), "a second request has no place, where there was a choice a moment ago");
    let second = trial.create(&placed, &key).await?;
    hold!(first.id == second.id, "repeated with its place it gave {} instead of {}", second.id, first.id);
    let strange = CreateRequest { placement: Some(strange()), ..request.clone() };
    match trial.create_once(&strange, &trial.key()).await {
        Err(Error::Invalid { .. }) => {}
        answer => hold!(false, "a place that it never chose was answered with {answer:?}"),
    }
    let mut huge = request;
    huge.size.vcpus = 1_000_000;
    match provider.place(&huge).await {
        Err(Error::Invalid { .. } | Error::Capacity { .. }) => {}
        answer => hold!(false, "a million CPUs were given a place: {answer:?}"),
    }
    trial.machines_are(1).await
}

fn strange() -> Placement {
    Placement::new("a place of another provider").expect("it is short")
}

/// Checks that a provider object that never had a preflight lists VMs made by others, returns their addresses and
/// deletes them. The cluster's controller uses such an object.
pub(crate) async fn who_only_collects_lists_and_deletes(trial: Arc<Trial>) -> Checked {
    let Some(collector) = trial.harness.other(ProviderRole::Collector) else {
        return not_here("there cannot be two of this provider at once here");
    };
    let (made, key) = trial.one().await?;
    said("addresses", trial.provider().addresses(&made.id).await)?;
    let listed = said("its list_owned", collector.list_owned().await)?;
    let ours = listed.iter().filter(|one| one.key.as_ref() == Some(&key)).count();
    hold!(ours == 1, "it lists {ours} VMs with the key of the one there is");
    let addresses = said("its addresses", collector.addresses(&made.id).await)?;
    hold!(!addresses.is_empty(), "it knows no address of {}", made.id);
    said("its delete", collector.delete(&made.id).await)?;
    trial.gone(&key).await?;
    said("its second delete", collector.delete(&made.id).await)?;
    Ok(())
}
