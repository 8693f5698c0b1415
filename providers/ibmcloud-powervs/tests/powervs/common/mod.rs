//! Provider in front of a fake PowerVS of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::Owner;
use peerpod_provider_powervs::{PowerVsConfig, PowerVsProvider};
use peerpod_test_clouds::iam::API_KEY;
use peerpod_test_clouds::powervs::{IMAGE, NETWORK, SECOND, WORKSPACE, ZONE};
use peerpod_test_clouds::{Cloud, Fault, PowerVs};
pub use peerpod_tests::cloud::{TestCloud, key, owner, request, stranger};

/// Action that creates a VM.
pub const CREATE: &str = "pvminstances.post";

/// Cloud of one test.
pub struct Site {
    /// The fake.
    pub cloud: Cloud<PowerVs>,
}

impl Site {
    /// Starts a fake that builds at once.
    pub async fn start() -> Site {
        Site { cloud: Cloud::start(PowerVs::default()).await.unwrap() }
    }

    fn config(&self, settings: &[(&str, &str)], creates: bool) -> PowerVsConfig {
        self.read(settings, |reader| PowerVsConfig::read(reader, creates))
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<PowerVsProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<PowerVsProvider> {
        Arc::new(PowerVsProvider::new(self.config(settings, true), owner))
    }

    /// Provider as in the cluster's controller.
    pub fn collector(&self) -> Arc<PowerVsProvider> {
        let none = [("image-id", ""), ("network-id", ""), ("second-network-id", "")];
        Arc::new(PowerVsProvider::new(self.config(&none, false), owner("")))
    }

    /// Ids of all VMs in the cloud.
    pub fn machines(&self) -> Vec<String> {
        self.cloud.with(|power, _| power.instances.all().map(|(id, _)| id.to_owned()).collect())
    }
}

impl TestCloud for Site {
    const KIND: &'static str = "ibmcloud-powervs";

    fn settings(&self) -> Vec<(String, String)> {
        let endpoint = self.cloud.endpoint();
        [
            ("endpoint", endpoint.clone()),
            ("iam-endpoint", endpoint),
            ("api-key", API_KEY.to_owned()),
            ("zone", ZONE.to_owned()),
            ("workspace-id", WORKSPACE.to_owned()),
            ("network-id", NETWORK.to_owned()),
            ("second-network-id", SECOND.to_owned()),
            ("image-id", IMAGE.to_owned()),
            ("settle-time", "50ms".to_owned()),
            ("first-pause", "20ms".to_owned()),
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
