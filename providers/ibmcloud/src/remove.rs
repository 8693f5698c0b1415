//! Deletes VMs, and the boot volumes that a failure left without their VM. IBM deletes a boot volume with its VM. May call
//! `delete_instance`, `list_volumes`, `get_volume` and `delete_volume`.
//!
//! Nothing is deleted that a fresh read has not shown to carry the owner's mark: a VM by its name, a volume by its tags.

use peerpod_provider_api::{Error, Owner};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::{ApiCall, Strays, until};
use peerpod_provider_rest::Method;
use tokio::time::Instant;

use crate::client::Vpc;
use crate::vms::{self, BootVolume};

/// Stray volumes that one search returns at most; the next search finds the others.
const MOST_STRAY: usize = 1000;

/// Requests the deletion of a VM. A VM that is gone is as good.
pub(crate) async fn vm(vpc: &Vpc, id: &str, what: &str, until: Instant) -> Result<(), Error> {
    let request = vpc.request(Method::DELETE, ["instances", id]);
    gone(
        vpc.call(ApiCall::new("delete_instance", id, what).until(until), &request)
            .await
            .map(drop)
            .map_err(Into::into),
    )
}

fn gone(answer: Result<(), Error>) -> Result<(), Error> {
    match answer {
        Err(Error::NotFound { .. }) => Ok(()),
        other => other,
    }
}

/// Searches, and deletes the boot volumes that had no VM at the last search, either. Returns their number.
pub(crate) async fn clean(strays: &Strays, vpc: &Vpc, owner: &Owner) -> Result<usize, Error> {
    let volumes = vms::boot_volumes(vpc, owner, "look for boot volumes without a VM", until()).await?;
    let free = volumes.into_iter().filter(|volume| volume.is_free).map(|volume| volume.id);
    let (mut deleted, mut errors) = (0, Vec::new());
    for id in strays.again(free.take(MOST_STRAY).collect()) {
        // The failure of one does not keep the others.
        match volume(vpc, owner, &id).await {
            Ok(is_gone) => deleted += usize::from(is_gone),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(deleted) } else { Err(together(errors)) }
}

/// Deletes a boot volume that has no VM; `false`: it is in use after all, or has another owner.
async fn volume(vpc: &Vpc, owner: &Owner, id: &str) -> Result<bool, Error> {
    let what = format!("delete of the unused boot volume {id}");
    let found = vpc.find(ApiCall::new("get_volume", "stray", &what), &vpc.get(["volumes", id])).await?;
    let Some(found) = found.as_ref().and_then(BootVolume::of) else { return Ok(true) };
    if !found.is_free || !found.marks.are_of(owner) {
        return Ok(false);
    }
    let request = vpc.request(Method::DELETE, ["volumes", id]);
    let deleted = vpc.call(ApiCall::new("delete_volume", "stray", &what), &request).await;
    gone(deleted.map(drop).map_err(Into::into)).map(|()| true)
}
