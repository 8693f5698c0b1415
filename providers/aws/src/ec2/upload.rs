//! Uploads a built disk image as an AMI, and deletes old ones. May call EC2 and the EBS direct APIs.
//!
//! AMI and snapshot have the tag `peerpod.image` with the digest of the disk. An AMI with this tag is complete, because
//! it is registered after its snapshot. An upload that was interrupted leaves a pending snapshot with the tag; the next
//! upload of the image continues it.

mod prune;
mod snapshot;

use std::time::Duration;

use aws_sdk_ec2::types::{
    ArchitectureValues, BlockDeviceMapping, BootModeValues, EbsBlockDevice, Filter, Image, ImageState,
    ResourceType, SnapshotState, TagSpecification, TpmSupportValues, VolumeType,
};
use peerpod_provider_api::Error;
use peerpod_provider_cloud::image::{BuiltDisk, ImageSettings, Say, Upload};
use peerpod_provider_cloud::{Scheduler, Wait, until};
use tokio::time::Instant;

use crate::config::AwsConfig;
use crate::ec2::client::{self, Ec2};
use crate::ec2::shape::to_tags;

/// File of a built image that is uploaded.
const DISK: &str = "peerpod.raw";
/// Tag with the disk's SHA-256.
pub(crate) const TAG: &str = "peerpod.image";
/// Digits of the digest in an AMI's name.
const DIGITS: usize = 16;
/// Device of the root disk.
const ROOT: &str = "/dev/xvda";
/// Longest time until an AMI is available.
const AVAILABLE: Duration = Duration::from_secs(600);
/// Pauses between looks at a new AMI or snapshot.
const LOOKS: Wait = Wait::new(Duration::from_secs(1), Duration::from_secs(5));
/// Owner of these calls, for the scheduler.
const OWNER: &str = "upload";

/// Uploads the disk image in `upload.folder` to the region of the settings, unless the account has its AMI there, and
/// then deletes old images as `upload.keep` permits. Returns the settings that select the image.
///
/// # Errors
/// There is no complete image in the folder, or AWS refuses.
pub async fn upload(config: AwsConfig, upload: Upload) -> Result<ImageSettings, Error> {
    let disk = BuiltDisk::open(&upload.folder, DISK).await?;
    let ec2 = Ec2::connect(&config, Scheduler::new(client::table())).await?;
    let region = ec2.region.clone();
    let ebs = client::ebs(&config).await;
    let job = Job { ec2, ebs, disk, tpm: upload.tpm, say: upload.say };
    let attempt = format!("upload of {} to {region}", job.disk.path.display());
    let work = async {
        let image = job.image().await?;
        job.name_unfinished().await?;
        if let Some(keep) = upload.keep {
            job.prune(&image, keep.get()).await?;
        }
        Ok(image)
    };
    let image = work.await.map_err(|error: Error| error.during(&attempt))?;
    Ok([("image-id", image), ("region", region)].into())
}

/// Upload of one disk.
struct Job {
    ec2: Ec2,
    ebs: aws_sdk_ebs::Client,
    disk: BuiltDisk,
    tpm: bool,
    say: Say,
}

impl Job {
    /// Returns the id of the AMI; makes the AMI if the account has none of this disk.
    async fn image(&self) -> Result<String, Error> {
        let image = match self.find().await? {
            Some(image) => {
                let id = image.image_id.unwrap_or_default();
                (self.say)(&format!("AMI {id} has this image already; nothing is uploaded"));
                id
            }
            None => {
                let snapshot = self.snapshot().await?;
                self.register(&snapshot).await?
            }
        };
        self.is_available(&image).await?;
        Ok(image)
    }

    /// Name of the AMI, which is unique in account and region.
    fn name(&self) -> String {
        format!("peerpod-{}{}", self.disk.short(DIGITS), if self.tpm { "-tpm" } else { "" })
    }

    /// Returns the AMI of this disk.
    async fn find(&self) -> Result<Option<Image>, Error> {
        let filters = vec![filter(&format!("tag:{TAG}"), &self.disk.sha256), filter("name", &self.name())];
        Ok(self.images(filters, "find the AMI").await?.pop())
    }

    /// Returns the account's own AMIs with these properties.
    async fn images(&self, filters: Vec<Filter>, what: &str) -> Result<Vec<Image>, Error> {
        let ask = self.ec2.client.describe_images().owners("self").set_filters(Some(filters));
        let found = self.ec2.call("DescribeImages", OWNER, what, until(), || ask.clone().send()).await?;
        Ok(found.images.unwrap_or_default())
    }

    /// Registers the AMI of a complete snapshot; returns its id.
    async fn register(&self, snapshot: &str) -> Result<String, Error> {
        let (name, architecture) = (self.name(), architecture(&self.disk.arch)?);
        let root = EbsBlockDevice::builder()
            .snapshot_id(snapshot)
            .volume_type(VolumeType::Gp3)
            .delete_on_termination(true)
            .build();
        let tags =
            to_tags(&[(TAG.to_owned(), self.disk.sha256.clone()), ("Name".to_owned(), name.clone())].into());
        let ask = self
            .ec2
            .client
            .register_image()
            .name(&name)
            .description("VM image of Peerpod")
            .architecture(architecture)
            .virtualization_type("hvm")
            .boot_mode(BootModeValues::Uefi)
            .ena_support(true)
            .set_tpm_support(self.tpm.then_some(TpmSupportValues::V20))
            .root_device_name(ROOT)
            .block_device_mappings(BlockDeviceMapping::builder().device_name(ROOT).ebs(root).build())
            .tag_specifications(
                TagSpecification::builder().resource_type(ResourceType::Image).set_tags(Some(tags)).build(),
            );
        let what = format!("register the AMI {name} of snapshot {snapshot}");
        let done = self.ec2.call("RegisterImage", OWNER, &what, until(), || ask.clone().send()).await;
        let id = match done {
            Ok(done) => done.image_id,
            // The answer to an earlier request was lost, or another process was faster.
            Err(failure) if failure.code() == "InvalidAMIName.Duplicate" => match self.find().await? {
                Some(image) => image.image_id,
                None => return Err(Error::from(failure)),
            },
            Err(failure) => return Err(failure.into()),
        };
        let id =
            id.ok_or_else(|| Error::transient(format!("{what}: EC2 returned no id; repeat the upload")))?;
        (self.say)(&format!("registered AMI {id} ({name})"));
        Ok(id)
    }

    /// Returns once VMs can start from the AMI.
    async fn is_available(&self, id: &str) -> Result<(), Error> {
        let what = format!("wait for AMI {id}");
        let look = async || {
            // EC2 does not show a new AMI at once.
            let Some(image) = self.images(vec![filter("image-id", id)], &what).await?.pop() else {
                return Ok(None);
            };
            match image.state {
                Some(ImageState::Available) => Ok(Some(())),
                Some(ImageState::Pending | ImageState::Transient) | None => Ok(None),
                Some(state) => Err(Error::invalid(format!(
                    "{what}: its state is {}; deregister it and repeat the upload",
                    state.as_str()
                ))),
            }
        };
        let done = LOOKS.until(Some(Instant::now() + AVAILABLE), look).await?;
        done.ok_or_else(|| {
            Error::transient(format!("{what}: not available within {AVAILABLE:?}; repeat the upload"))
        })
    }

    /// Names the unfinished snapshots of ours, which cost money until they are deleted.
    async fn name_unfinished(&self) -> Result<(), Error> {
        for snapshot in self.snapshots(vec![filter("tag-key", TAG)]).await? {
            let id = snapshot.snapshot_id.unwrap_or_default();
            let state = match snapshot.state {
                Some(SnapshotState::Pending) => "pending",
                Some(SnapshotState::Error) => "failed",
                _ => continue,
            };
            (self.say)(&format!(
                "snapshot {id} of another upload is {state}; if no process uploads it, delete it (aws ec2 \
                 delete-snapshot --snapshot-id {id})"
            ));
        }
        Ok(())
    }
}

/// Returns EC2's word for an architecture.
fn architecture(arch: &str) -> Result<ArchitectureValues, Error> {
    match arch {
        "x86_64" => Ok(ArchitectureValues::X8664),
        "aarch64" => Ok(ArchitectureValues::Arm64),
        other => {
            Err(Error::invalid(format!("register an AMI for {other}: EC2 has x86_64 and aarch64 alone")))
        }
    }
}

fn filter(name: &str, value: &str) -> Filter {
    Filter::builder().name(name).values(value).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ami_has_the_architecture_of_its_image() {
        assert_eq!(architecture("x86_64").unwrap(), ArchitectureValues::X8664);
        assert_eq!(architecture("aarch64").unwrap(), ArchitectureValues::Arm64);
        assert!(architecture("s390x").unwrap_err().to_string().contains("s390x"));
    }
}
