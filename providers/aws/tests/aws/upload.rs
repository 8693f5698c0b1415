//! Uploads disk images with the real command line.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use peerpod_test_ec2::{Fault, xml};
use peerpod_tests::cloud::TestCloud;
use peerpod_world::binary;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::process::Command;

use super::common::{Cloud, PATIENCE, until};

/// Size of a block of EBS in bytes.
const BLOCK: usize = 512 << 10;
/// Blocks of an image that are not zeros.
const FILLED: usize = 20;

/// Folder of a built image, removed at the end.
struct Image(PathBuf);

impl Image {
    /// Makes an image with this number. Half of its blocks are zeros, and the last one is not whole.
    fn new(number: u8) -> Image {
        let name =
            format!("peerpod-aws-image-{}-{:?}-{number}", std::process::id(), std::thread::current().id());
        let folder = std::env::temp_dir().join(name.replace(['(', ')'], ""));
        fs::create_dir_all(&folder).unwrap();
        let mut disk = vec![0; (2 * FILLED - 1) * BLOCK - 100];
        for block in 0..FILLED {
            disk[2 * block * BLOCK..][..100].fill(number + block as u8);
        }
        fs::write(folder.join("peerpod.raw"), &disk).unwrap();
        let digest = hex::encode(Sha256::digest(&disk));
        let about = format!(r#"{{"version": 1, "arch": "x86_64", "sha256": {{"peerpod.raw": "{digest}"}}}}"#);
        fs::write(folder.join("image.json"), about).unwrap();
        Image(folder)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Returns the command for an upload to this cloud.
fn command(cloud: &Cloud, folder: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(binary("peerpod").unwrap());
    command.args(["image", "upload", "aws", "--image"]).arg(folder).args(more);
    // Secrets are refused as flags.
    let variable = |key: &str| format!("PEERPOD_PROVIDER_AWS_{}", key.to_uppercase().replace('-', "_"));
    command.envs(cloud.settings().iter().map(|(key, value)| (variable(key), value)));
    command.env("AWS_ENDPOINT_URL_EBS", cloud.proxy.endpoint()).env("PEERPOD_TESTING", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

async fn run(cloud: &Cloud, image: &Image, more: &[&str]) -> (Output, String) {
    let output =
        tokio::time::timeout(PATIENCE, command(cloud, &image.0, more).output()).await.unwrap().unwrap();
    let lines = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, lines)
}

/// Returns the id of the uploaded AMI, and the lines about the progress.
async fn uploaded(cloud: &Cloud, image: &Image, more: &[&str]) -> (String, String) {
    let (output, lines) = run(cloud, image, more).await;
    assert!(output.status.success(), "{lines}");
    let values = String::from_utf8(output.stdout).unwrap();
    let id = values.lines().find_map(|line| line.trim().strip_prefix("image-id: ")).unwrap().to_owned();
    assert!(values.starts_with("config:\n  provider:\n    aws:\n"), "{values}");
    assert!(values.contains("region: eu-central-1"), "{values}");
    (id, lines)
}

fn count(cloud: &Cloud, actions: [&str; 3]) -> [usize; 3] {
    actions.map(|action| cloud.proxy.count(Some(action)))
}

const STEPS: [&str; 3] = ["StartSnapshot", "PutSnapshotBlock", "RegisterImage"];

#[tokio::test(flavor = "multi_thread")]
async fn an_image_becomes_one_ami_without_its_zeros() {
    let (cloud, image) = (Cloud::start().await, Image::new(1));
    let (id, lines) = uploaded(&cloud, &image, &[]).await;
    assert!(lines.contains("uploaded 100 %"), "{lines}");
    assert_eq!(count(&cloud, STEPS), [1, FILLED, 1]);
    let call = cloud.proxy.calls().into_iter().find(|call| call.action == "RegisterImage").unwrap();
    let said = |key: &str| call.params.get(key).map(String::as_str);
    for (key, value) in [
        ("BootMode", "uefi"),
        ("EnaSupport", "true"),
        ("Architecture", "x86_64"),
        ("VirtualizationType", "hvm"),
        ("RootDeviceName", "/dev/xvda"),
        ("BlockDeviceMapping.1.DeviceName", "/dev/xvda"),
        ("BlockDeviceMapping.1.Ebs.VolumeType", "gp3"),
        ("BlockDeviceMapping.1.Ebs.DeleteOnTermination", "true"),
    ] {
        assert_eq!(said(key), Some(value), "{key}");
    }
    assert_eq!(said("TpmSupport"), None);
    let snapshot = said("BlockDeviceMapping.1.Ebs.SnapshotId").unwrap().to_owned();
    let put = cloud.proxy.calls().into_iter().find(|call| call.action == "PutSnapshotBlock").unwrap();
    assert_eq!(put.params["SnapshotId"], snapshot);

    let (again, lines) = uploaded(&cloud, &image, &[]).await;
    assert_eq!(again, id);
    assert!(lines.contains("nothing is uploaded"), "{lines}");
    assert_eq!(count(&cloud, STEPS), [1, FILLED, 1]);
    // An AMI with a TPM is another one, of the same snapshot.
    let (with_tpm, _) = uploaded(&cloud, &image, &["--tpm"]).await;
    assert_ne!(with_tpm, id);
    assert_eq!(count(&cloud, STEPS), [1, FILLED, 2]);
    let call = cloud.proxy.calls().into_iter().rfind(|call| call.action == "RegisterImage").unwrap();
    assert_eq!(call.params["TpmSupport"], "v2.0");
    assert_eq!(call.params["BlockDeviceMapping.1.Ebs.SnapshotId"], snapshot);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_was_killed_is_continued() {
    let (cloud, image) = (Cloud::start().await, Image::new(1));
    cloud.proxy.fail("PutSnapshotBlock", Fault::Late(Duration::from_secs(60)), 1000);
    let mut child = command(&cloud, &image.0, &[]).spawn().unwrap();
    until("a block is written", || async { cloud.proxy.late() > 0 }).await;
    child.kill().await.unwrap();
    cloud.proxy.heal();
    cloud.proxy.deny("RegisterImage");
    let (output, lines) = run(&cloud, &image, &[]).await;
    assert_eq!(output.status.code(), Some(1), "{lines}");
    assert!(lines.contains("continuing snapshot snap-"), "{lines}");
    assert!(lines.contains("allow ec2:RegisterImage") && lines.contains("image-policy.json"), "{lines}");
    // The snapshot is complete now.
    cloud.proxy.heal();
    let before = cloud.proxy.count(Some("PutSnapshotBlock"));
    let (_, lines) = uploaded(&cloud, &image, &[]).await;
    assert!(lines.contains("has this image already"), "{lines}");
    assert_eq!(count(&cloud, STEPS), [1, before, 2]);
    assert_eq!(cloud.proxy.count(Some("CompleteSnapshot")), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_the_block_api_are_repeated_or_explained() {
    let (cloud, image) = (Cloud::start().await, Image::new(1));
    let busy = Fault::Refuse {
        status: 400,
        code: "RequestThrottledException".to_owned(),
        message: "Rate exceeded".to_owned(),
    };
    cloud.proxy.fail("PutSnapshotBlock", busy, 3);
    cloud.proxy.fail("PutSnapshotBlock", Fault::LostAnswer, 2);
    cloud.proxy.fail("StartSnapshot", Fault::LostAnswer, 1);
    let (_, _) = uploaded(&cloud, &image, &[]).await;
    let snapshots = cloud
        .proxy
        .ask("DescribeSnapshots", &[("Filter.1.Name", "tag-key"), ("Filter.1.Value.1", "peerpod.image")]);
    assert_eq!(xml::values(&snapshots.await.unwrap(), "snapshotId").len(), 1);
    cloud.proxy.deny("StartSnapshot");
    let (output, lines) = run(&cloud, &Image::new(2), &[]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(
        lines.contains("EBS refused StartSnapshot") && lines.contains("allow ebs:StartSnapshot"),
        "{lines}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_deletes_only_unused_images_of_ours_and_the_policy_allows_exactly_our_calls() {
    let cloud = Cloud::start().await;
    let (old, _) = uploaded(&cloud, &Image::new(1), &[]).await;
    let stranger = cloud.proxy.ask("RegisterImage", &[("Name", "peerpod-stranger")]).await.unwrap();
    let stranger = xml::value(&stranger, "imageId").unwrap().to_owned();
    let run = [("ImageId", old.as_str()), ("MinCount", "1"), ("MaxCount", "1")];
    let vm = cloud.proxy.ask("RunInstances", &run).await.unwrap();
    let vm = xml::value(&vm, "instanceId").unwrap().to_owned();
    let snapshots = async || {
        let ours = [("Filter.1.Name", "tag-key"), ("Filter.1.Value.1", "peerpod.image")];
        xml::values(&cloud.proxy.ask("DescribeSnapshots", &ours).await.unwrap(), "snapshotId").len()
    };
    let images = async || {
        let own = cloud.proxy.ask("DescribeImages", &[("Owner.1", "self")]).await.unwrap();
        xml::values(&own, "imageId").into_iter().map(str::to_owned).collect::<BTreeSet<String>>()
    };

    let newer = Image::new(2);
    let (current, lines) = uploaded(&cloud, &newer, &["--prune", "1"]).await;
    assert!(lines.contains(&format!("kept AMI {old}: VM {vm} uses it")), "{lines}");
    cloud.proxy.ask("TerminateInstances", &[("InstanceId.1", &vm)]).await.unwrap();
    uploaded(&cloud, &newer, &["--prune", "2"]).await;
    let set = |ids: &[&String]| ids.iter().map(|id| (*id).clone()).collect::<BTreeSet<String>>();
    assert_eq!((images().await, snapshots().await), (set(&[&current, &old, &stranger]), 2));
    let (_, lines) = uploaded(&cloud, &newer, &["--prune", "1"]).await;
    assert!(lines.contains(&format!("deregistered AMI {old}")), "{lines}");
    assert_eq!((images().await, snapshots().await), (set(&[&current, &stranger]), 1));

    let policy: Value = serde_json::from_str(include_str!("../../image-policy.json")).unwrap();
    let actions = policy["Statement"].as_array().unwrap().iter().flat_map(|statement| {
        let action = &statement["Action"];
        action.as_array().cloned().unwrap_or_else(|| vec![action.clone()])
    });
    let allowed: BTreeSet<String> =
        actions.map(|action| action.as_str().unwrap().split(':').nth(1).unwrap().to_owned()).collect();
    // Tags at creation need the right to tag.
    let asked: BTreeSet<String> =
        cloud.proxy.actions().into_iter().chain(["CreateTags".to_owned()]).collect();
    assert_eq!(asked, allowed, "left: our calls; right: the calls that the policy allows");
}
