//! Provider in front of a fake VPC API of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::Owner;
use peerpod_provider_ibmcloud::{IbmCloudConfig, IbmCloudProvider};
use peerpod_test_clouds::iam::API_KEY;
use peerpod_test_clouds::ibmcloud::{RESOURCE_GROUP, SECURITY_GROUP, VPC, ZONES};
use peerpod_test_clouds::{Cloud, Fault, IbmCloud};
pub use peerpod_tests::cloud::{PATIENCE, TestCloud, key, owner, placed, request, stranger};

/// Action that creates a VM.
pub const CREATE: &str = "create_instance";
/// Type of the tests' VMs. It is sold on the spot market.
pub const TYPE: &str = "bxf-2x8";

/// Cloud of one test.
pub struct Site {
    /// The fake.
    pub cloud: Cloud<IbmCloud>,
}

impl Site {
    /// Starts a fake that decides and boots at once.
    pub async fn start() -> Site {
        Site { cloud: Cloud::start(IbmCloud::default()).await.unwrap() }
    }

    fn config(&self, settings: &[(&str, &str)], creates: bool) -> IbmCloudConfig {
        self.read(settings, |reader| IbmCloudConfig::read(reader, creates))
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<IbmCloudProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<IbmCloudProvider> {
        Arc::new(IbmCloudProvider::new(self.config(settings, true), owner))
    }

    /// Provider as in the cluster's controller.
    pub fn collector(&self) -> Arc<IbmCloudProvider> {
        let none = [("image-ids", ""), ("subnet-ids", ""), ("second-subnet-ids", "")];
        Arc::new(IbmCloudProvider::new(self.config(&none, false), owner("")))
    }

    /// Ids of all VMs in the cloud.
    pub fn machines(&self) -> Vec<String> {
        self.cloud.with(|ibm, _| ibm.instances.all().map(|(id, _)| id.to_owned()).collect())
    }

    /// Numbers of VMs and volumes in the cloud.
    pub fn parts(&self) -> (usize, usize) {
        self.cloud.with(|ibm, _| (ibm.instances.all().count(), ibm.volumes.all().count()))
    }

    /// Makes a volume in a zone; returns its volume handle.
    pub fn volume(&self, name: &str, zone: &str) -> String {
        self.cloud.with(|ibm, world| ibm.add_volume(name, zone, world.now))
    }
}

/// Subnets of this name in all zones, as a setting.
pub fn subnets(name: &str) -> String {
    ZONES.map(|zone| IbmCloud::subnet(zone, name)).join(",")
}

impl TestCloud for Site {
    const KIND: &'static str = "ibmcloud";

    fn settings(&self) -> Vec<(String, String)> {
        // Plain VMs of one type in all zones.
        let endpoint = self.cloud.endpoint();
        [
            ("endpoint", format!("{endpoint}/v1")),
            ("iam-endpoint", format!("{endpoint}/identity/token")),
            ("tagging-endpoint", endpoint),
            ("api-key", API_KEY.to_owned()),
            ("zones", ZONES.join(",")),
            ("vpc-id", VPC.to_owned()),
            ("resource-group-id", RESOURCE_GROUP.to_owned()),
            ("security-group-ids", SECURITY_GROUP.to_owned()),
            ("subnet-ids", subnets("pods")),
            ("second-subnet-ids", subnets("second")),
            ("image-ids", IbmCloud::image("peerpod")),
            ("instance-type", TYPE.to_owned()),
            ("confidential", "none".to_owned()),
            ("arch", "x86_64".to_owned()),
            ("market", "spot-first".to_owned()),
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
