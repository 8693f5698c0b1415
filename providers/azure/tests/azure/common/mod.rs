//! Provider in front of a fake Azure of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::Owner;
use peerpod_provider_azure::{AzureConfig, AzureProvider};
use peerpod_test_clouds::azure::{CLIENT, GROUP, REGION, SECRET, SUBSCRIPTION, TENANT};
use peerpod_test_clouds::{Azure, Cloud, Fault};
pub use peerpod_tests::cloud::{PATIENCE, TestCloud, key, owner, placed, request, stranger};

/// Action that creates a VM.
pub const CREATE: &str = "VirtualMachines_CreateOrUpdate";
/// Type of the tests' VMs.
pub const TYPE: &str = "Standard_D2s_v5";

/// Cloud of one test.
pub struct Site {
    /// The fake.
    pub cloud: Cloud<Azure>,
}

impl Site {
    /// Starts a fake that decides and boots at once.
    pub async fn start() -> Site {
        Site { cloud: Cloud::start(Azure::default()).await.unwrap() }
    }

    fn config(&self, settings: &[(&str, &str)], creates: bool) -> AzureConfig {
        self.read(settings, |reader| AzureConfig::read(reader, creates))
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<AzureProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<AzureProvider> {
        Arc::new(AzureProvider::new(self.config(settings, true), owner).unwrap())
    }

    /// Provider as in the cluster's controller.
    pub fn collector(&self) -> Arc<AzureProvider> {
        let none =
            [("image-id", ""), ("subnet-id", ""), ("second-subnet-id", ""), ("region", ""), ("zones", "")];
        Arc::new(AzureProvider::new(self.config(&none, false), owner("")).unwrap())
    }

    /// Names of all VMs in the cloud.
    pub fn machines(&self) -> Vec<String> {
        self.cloud.with(|azure, _| azure.vms.all().map(|(name, _)| name.to_owned()).collect())
    }

    /// Numbers of VMs, interfaces and disks in the cloud.
    pub fn parts(&self) -> (usize, usize, usize) {
        self.cloud
            .with(|azure, _| (azure.vms.all().count(), azure.nics.all().count(), azure.disks.all().count()))
    }

    /// Makes a disk in a zone; returns its volume handle.
    pub fn disk(&self, name: &str, zone: &str) -> String {
        self.cloud.with(|azure, world| azure.add_disk(name, zone, world.now))
    }
}

impl TestCloud for Site {
    const KIND: &'static str = "azure";

    fn settings(&self) -> Vec<(String, String)> {
        // Plain VMs of one type in all zones.
        let endpoint = self.cloud.endpoint();
        [
            ("endpoint", endpoint.clone()),
            ("authority-host", endpoint.clone()),
            ("metadata-endpoint", endpoint),
            ("subscription-id", SUBSCRIPTION.to_owned()),
            ("tenant-id", TENANT.to_owned()),
            ("client-id", CLIENT.to_owned()),
            ("client-secret", SECRET.to_owned()),
            ("resource-group", GROUP.to_owned()),
            ("region", REGION.to_owned()),
            ("zones", "1,2,3".to_owned()),
            ("image-id", Azure::image("peerpod")),
            ("subnet-id", Azure::subnet("default")),
            ("second-subnet-id", Azure::subnet("second")),
            ("instance-type", TYPE.to_owned()),
            ("disable-cvm", "true".to_owned()),
            ("arch", "x86_64".to_owned()),
            ("market", "spot-first".to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .to_vec()
    }

    async fn ids(&self) -> Vec<String> {
        let id = |name| {
            format!(
                "/subscriptions/{SUBSCRIPTION}/resourcegroups/{GROUP}/providers/microsoft.compute/virtualmachines/{name}"
            )
        };
        self.machines().into_iter().map(id).collect()
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

/// Name of a VM in the cloud.
pub fn name(id: &str) -> &str {
    id.rsplit('/').next().unwrap()
}
