//! Writes a disk into a snapshot by the EBS direct APIs: no bucket, no import task, no role for a service.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use aws_sdk_ebs::primitives::ByteStream;
use aws_sdk_ebs::types::{ChecksumAggregationMethod, ChecksumAlgorithm, Tag};
use aws_sdk_ec2::types::{Filter, Snapshot, SnapshotState};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::image::Progress;
use peerpod_provider_cloud::until;
use sha2::{Digest as _, Sha256};
use tokio::fs::File;
use tokio::io::AsyncReadExt as _;
use tokio::time::{Instant, sleep};

use super::{Job, LOOKS, OWNER, TAG, filter};
use crate::ec2::client;

/// Size of a snapshot's block in bytes.
const BLOCK: usize = 512 << 10;
/// Blocks in flight. EBS admits 1000 writes a second to one snapshot; a few hide the time of a round trip.
const AT_ONCE: usize = 16;
/// Size of an EBS volume is a multiple of this.
const GIB: u64 = 1 << 30;
/// Longest time until EBS knows a new snapshot.
const KNOWN: Duration = Duration::from_secs(120);
/// Longest time until a snapshot is complete.
const COMPLETE: Duration = Duration::from_secs(1800);
/// Digits of the digest in a client token, which has at most 64 characters.
const TOKEN_DIGITS: usize = 48;

/// Digests of the written blocks, by block number.
type Written = BTreeMap<i32, [u8; 32]>;

impl Job {
    /// Returns the id of a complete snapshot of the disk. Continues a pending one; makes one if there is none.
    pub(super) async fn snapshot(&self) -> Result<String, Error> {
        let found = self.snapshots(vec![filter(&format!("tag:{TAG}"), &self.disk.sha256)]).await?;
        let of = |state: SnapshotState| {
            let mut fitting = found.iter().filter(move |one| one.state.as_ref() == Some(&state));
            fitting.find_map(|one| one.snapshot_id.clone())
        };
        if let Some(id) = of(SnapshotState::Completed) {
            (self.say)(&format!("snapshot {id} has this image already"));
            return Ok(id);
        }
        let id = match of(SnapshotState::Pending) {
            Some(id) => {
                (self.say)(&format!("continuing snapshot {id}"));
                id
            }
            None => {
                let failed = found.iter().filter(|one| one.state == Some(SnapshotState::Error)).count();
                let id = self.start(failed).await?;
                (self.say)(&format!("uploading {} into snapshot {id}", self.disk.path.display()));
                id
            }
        };
        if let Err(error) = self.fill(&id).await {
            // A run before this one may have completed the snapshot, which then takes no more blocks.
            match self.state(&id).await? {
                Some(SnapshotState::Completed) => return Ok(id),
                _ => return Err(error),
            }
        }
        self.is_complete(&id).await?;
        Ok(id)
    }

    /// Returns the account's own snapshots with these properties.
    pub(super) async fn snapshots(&self, filters: Vec<Filter>) -> Result<Vec<Snapshot>, Error> {
        let what = "find the snapshots of images";
        let ask = self.ec2.client.describe_snapshots().owner_ids("self").set_filters(Some(filters));
        let found = self.ec2.call("DescribeSnapshots", OWNER, what, until(), || ask.clone().send()).await?;
        Ok(found.snapshots.unwrap_or_default())
    }

    async fn state(&self, id: &str) -> Result<Option<SnapshotState>, Error> {
        let found = self.snapshots(vec![filter("snapshot-id", id)]).await?.pop();
        Ok(found.and_then(|snapshot| snapshot.state))
    }

    /// Starts a snapshot. The token makes a repeated request find the same one; `failed` ones before it have used theirs.
    async fn start(&self, failed: usize) -> Result<String, Error> {
        let gib = i64::try_from(self.disk.bytes.div_ceil(GIB).max(1)).unwrap_or(i64::MAX);
        let tag = |key: &str, value: &str| Tag::builder().key(key).value(value).build();
        let started = self
            .ebs
            .start_snapshot()
            .volume_size(gib)
            .description("VM image of Peerpod")
            .client_token(format!("{}-{failed}", self.disk.short(TOKEN_DIGITS)))
            .tags(tag(TAG, &self.disk.sha256))
            .tags(tag("Name", &self.name()))
            .send()
            .await
            .map_err(|error| client::ebs_failure("StartSnapshot", "start a snapshot", &error))?;
        started.snapshot_id.ok_or_else(|| {
            Error::transient("start a snapshot: EBS returned no id; repeat the upload".to_owned())
        })
    }

    /// Writes all blocks that are not zeros, and completes the snapshot.
    async fn fill(&self, id: &str) -> Result<(), Error> {
        let progress = Progress::new(self.say.clone(), self.disk.bytes);
        let mut blocks = Blocks::open(&self.disk.path).await?;
        let (mut running, mut written) = (FuturesUnordered::new(), Written::new());
        while let Some((number, block, read)) = blocks.next().await? {
            if block.iter().any(|byte| *byte != 0) {
                running.push(self.put(id, number, block));
            }
            if running.len() >= AT_ONCE
                && let Some(done) = running.next().await
            {
                written.extend([done?]);
            }
            progress.add(read);
        }
        while let Some(done) = running.next().await {
            written.extend([done?]);
        }
        let mut all = Sha256::new();
        written.values().for_each(|digest| all.update(digest));
        self.ebs
            .complete_snapshot()
            .snapshot_id(id)
            .changed_blocks_count(i32::try_from(written.len()).unwrap_or(i32::MAX))
            .checksum(STANDARD.encode(all.finalize()))
            .checksum_algorithm(ChecksumAlgorithm::ChecksumAlgorithmSha256)
            .checksum_aggregation_method(ChecksumAggregationMethod::ChecksumAggregationLinear)
            .send()
            .await
            .map_err(|error| {
                client::ebs_failure("CompleteSnapshot", &format!("complete snapshot {id}"), &error)
            })?;
        Ok(())
    }

    /// Writes one block; returns its number and digest.
    async fn put(&self, id: &str, number: i32, block: Vec<u8>) -> Result<(i32, [u8; 32]), Error> {
        let digest: [u8; 32] = Sha256::digest(&block).into();
        let since = Instant::now();
        loop {
            let put = self
                .ebs
                .put_snapshot_block()
                .snapshot_id(id)
                .block_index(number)
                .data_length(i32::try_from(BLOCK).unwrap_or(i32::MAX))
                .checksum(STANDARD.encode(digest))
                .checksum_algorithm(ChecksumAlgorithm::ChecksumAlgorithmSha256)
                .block_data(ByteStream::from(block.clone()));
            let Err(error) = put.send().await else { return Ok((number, digest)) };
            let what = format!("write block {number} of snapshot {id}");
            match client::ebs_failure("PutSnapshotBlock", &what, &error) {
                // EBS does not know a new snapshot everywhere at once.
                Error::NotFound { .. } if since.elapsed() < KNOWN => sleep(Duration::from_secs(1)).await,
                error => return Err(error),
            }
        }
    }

    /// Returns once the snapshot is complete.
    async fn is_complete(&self, id: &str) -> Result<(), Error> {
        let look = async || match self.state(id).await? {
            Some(SnapshotState::Completed) => Ok(Some(())),
            Some(SnapshotState::Error) => Err(Error::invalid(format!(
                "snapshot {id} failed; repeat the upload, which makes another one"
            ))),
            _ => Ok(None),
        };
        let done = LOOKS.until(Some(Instant::now() + COMPLETE), look).await?;
        done.ok_or_else(|| {
            Error::transient(format!("snapshot {id} is not complete within {COMPLETE:?}; repeat the upload"))
        })
    }
}

/// Blocks of a disk, in order.
struct Blocks<'a> {
    path: &'a Path,
    file: File,
    next: i32,
}

impl Blocks<'_> {
    async fn open(path: &Path) -> Result<Blocks<'_>, Error> {
        let file = File::open(path).await.map_err(|error| unreadable(path, &error))?;
        Ok(Blocks { path, file, next: 0 })
    }

    /// Returns the next block with its number and its bytes of the disk. Zeros fill the last block.
    async fn next(&mut self) -> Result<Option<(i32, Vec<u8>, u64)>, Error> {
        let mut block = Vec::with_capacity(BLOCK);
        let read = (&mut self.file).take(BLOCK as u64).read_to_end(&mut block).await;
        let read = read.map_err(|error| unreadable(self.path, &error))?;
        if read == 0 {
            return Ok(None);
        }
        block.resize(BLOCK, 0);
        let number = self.next;
        self.next = number.checked_add(1).ok_or_else(|| {
            Error::invalid(format!("{}: larger than an EBS volume can be", self.path.display()))
        })?;
        Ok(Some((number, block, read as u64)))
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::invalid(format!("read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_block_is_filled_with_zeros() {
        let path = std::env::temp_dir().join(format!("peerpod-blocks-{}", std::process::id()));
        std::fs::write(&path, vec![7; BLOCK + 3]).unwrap();
        let mut blocks = Blocks::open(&path).await.unwrap();
        assert_eq!(blocks.next().await.unwrap(), Some((0, vec![7; BLOCK], BLOCK as u64)));
        let (number, block, read) = blocks.next().await.unwrap().unwrap();
        assert_eq!((number, block.len(), read), (1, BLOCK, 3));
        assert_eq!((&block[..3], block[3..].iter().all(|byte| *byte == 0)), (&[7, 7, 7][..], true));
        assert_eq!(blocks.next().await.unwrap(), None);
        std::fs::remove_file(&path).unwrap();
    }
}
