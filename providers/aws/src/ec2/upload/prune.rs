//! Deletes old images of ours: AMIs of the account with our tag that no VM has, and their snapshots with the same tag.

use aws_sdk_ec2::types::Image;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::until;

use super::{Job, OWNER, TAG, filter};
use crate::ec2::vms;

impl Job {
    /// Deletes the images of ours that no VM uses, except `current` and the newest others up to `keep` in total.
    pub(super) async fn prune(&self, current: &str, keep: usize) -> Result<(), Error> {
        let mut images = self.images(vec![filter("tag-key", TAG)], "list the AMIs of ours").await?;
        // ISO 8601 in one time zone: text order is time order.
        images.sort_by(|a, b| b.creation_date.cmp(&a.creation_date));
        let others = images.into_iter().filter(|image| image.image_id.as_deref() != Some(current));
        for image in others.skip(keep.saturating_sub(1)) {
            let id = image.image_id.clone().unwrap_or_default();
            match self.user(&id).await? {
                Some(vm) => (self.say)(&format!("kept AMI {id}: VM {vm} uses it")),
                None => self.delete(&id, &image).await?,
            }
        }
        Ok(())
    }

    /// Returns a VM with this AMI.
    async fn user(&self, id: &str) -> Result<Option<String>, Error> {
        let filters = vec![filter("image-id", id), vms::not_gone()];
        let found = vms::list(&self.ec2, filters, &format!("find VMs of AMI {id}"), until()).await?;
        Ok(found.into_iter().next().map(|vm| vm.id))
    }

    /// Deregisters an AMI, and deletes its snapshots. EC2 keeps a snapshot that another AMI has.
    async fn delete(&self, id: &str, image: &Image) -> Result<(), Error> {
        let what = format!("deregister AMI {id}");
        let ask = self.ec2.client.deregister_image().image_id(id);
        self.ec2.call("DeregisterImage", OWNER, &what, until(), || ask.clone().send()).await?;
        (self.say)(&format!("deregistered AMI {id}"));
        let Some(digest) = digest(image) else { return Ok(()) };
        for snapshot in self.snapshots(vec![filter(&format!("tag:{TAG}"), digest)]).await? {
            let Some(snapshot) = snapshot.snapshot_id else { continue };
            let what = format!("delete snapshot {snapshot}");
            let ask = self.ec2.client.delete_snapshot().snapshot_id(&snapshot);
            match self.ec2.call("DeleteSnapshot", OWNER, &what, until(), || ask.clone().send()).await {
                Ok(_) => (self.say)(&format!("deleted snapshot {snapshot}")),
                Err(failure) if failure.code() == "InvalidSnapshot.InUse" => {
                    (self.say)(&format!("kept snapshot {snapshot}: another AMI has it"));
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(())
    }
}

/// Returns the digest in an AMI's tag.
fn digest(image: &Image) -> Option<&str> {
    image.tags().iter().find(|tag| tag.key() == Some(TAG))?.value()
}
