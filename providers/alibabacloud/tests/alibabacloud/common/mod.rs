//! Provider in front of a fake Alibaba Cloud of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_alibabacloud::{AlibabaCloudConfig, AlibabaCloudProvider};
use peerpod_provider_api::{Error, Owner};
use peerpod_test_clouds::alibaba::{GROUP, IMAGES, Instance, KEY_ID, KEY_SECRET, REGION, VSWITCHES};
use peerpod_test_clouds::{Alibaba, Cloud, Fault};
pub use peerpod_tests::cloud::{TestCloud, key, owner, placed, request, stranger, within};
use serde_json::Value;

/// Action that creates VMs.
pub const CREATE: &str = "RunInstances";
/// Type of the tests' VMs: it can be confidential in the first two zones.
pub const TYPE: &str = "ecs.g8i.xlarge";

/// Settings for this cloud.
pub struct Site {
    /// The fake.
    pub cloud: Cloud<Alibaba>,
}

impl Site {
    pub async fn start() -> Site {
        Site { cloud: Cloud::start(Alibaba::default()).await.unwrap() }
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<AlibabaCloudProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<AlibabaCloudProvider> {
        let config = self.read(settings, |reader| AlibabaCloudConfig::read(reader, true));
        Arc::new(AlibabaCloudProvider::new(config, owner))
    }

    /// Provider as in the cluster's controller: with credentials and a region only.
    pub fn collector(&self) -> Arc<AlibabaCloudProvider> {
        let none =
            [("image-id", ""), ("vswitch-ids", ""), ("second-vswitch-ids", ""), ("security-group-ids", "")];
        let config = self.read(&none, |reader| AlibabaCloudConfig::read(reader, false));
        Arc::new(AlibabaCloudProvider::new(config, owner("")))
    }

    /// The VM as the cloud has it.
    pub fn vm(&self, id: &str) -> Option<Instance> {
        self.cloud.with(|alibaba, _| alibaba.instances.get(id).cloned())
    }

    /// The VM as the cloud shows it to a witness.
    pub fn shown(&self, id: &str) -> Value {
        let target = format!("/?Action=DescribeInstances&RegionId={REGION}&InstanceIds=[%22{id}%22]");
        self.cloud.ask("POST", &target, None).value()["Instances"]["Instance"][0].clone()
    }

    /// Ids of all VMs.
    pub fn machines(&self) -> Vec<String> {
        self.cloud.with(|alibaba, _| alibaba.instances.all().map(|(id, _)| id.to_owned()).collect())
    }

    /// Makes a disk in a zone; returns its volume handle.
    pub fn disk(&self, zone: &str) -> String {
        self.cloud.with(|alibaba, world| alibaba.add_disk(zone, world.now))
    }
}

impl TestCloud for Site {
    const KIND: &'static str = "alibabacloud";

    fn settings(&self) -> Vec<(String, String)> {
        // Plain VMs of one type and one image in all zones.
        [
            ("endpoint", self.cloud.endpoint()),
            ("metadata", self.cloud.endpoint()),
            ("access-key-id", KEY_ID.to_owned()),
            ("secret-key", KEY_SECRET.to_owned()),
            ("region", REGION.to_owned()),
            ("image-id", IMAGES[0].to_owned()),
            ("vswitch-ids", VSWITCHES.join(",")),
            ("second-vswitch-ids", VSWITCHES.join(",")),
            ("security-group-ids", GROUP.to_owned()),
            ("instance-type", TYPE.to_owned()),
            ("disable-cvm", "true".to_owned()),
            ("arch", "x86_64".to_owned()),
            ("market", "spot-first".to_owned()),
            ("call-timeout", "60s".to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .to_vec()
    }

    async fn ids(&self) -> Vec<String> {
        self.machines()
    }

    fn creates(&self) -> usize {
        self.cloud.count(Some(CREATE))
    }

    fn delay_answer(&self) {
        self.cloud.fail(CREATE, Fault::Late(Duration::from_secs(5)), 1);
    }

    fn late(&self) -> usize {
        self.cloud.late()
    }

    fn heal(&self) {
        self.cloud.heal();
    }
}

/// Asserts the class of an error, and every part of its text.
#[track_caller]
pub fn says(error: &Error, class: &str, parts: &[&str]) {
    assert_eq!(error.class(), class, "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part} in: {text}");
    }
    assert!(text.len() < 3000 && !text.contains("for\":"), "{} bytes: {text}", text.len());
}
