//! Provider in front of a fake Azure of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_base::config::{Reader, Sources};
use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, Owner, Provider, Size};
use peerpod_provider_azure::{AzureConfig, AzureProvider};
use peerpod_test_clouds::azure::{CLIENT, GROUP, REGION, SECRET, SUBSCRIPTION, TENANT};
use peerpod_test_clouds::{Azure, Cloud};

/// Longest wait of a test for any condition.
pub const PATIENCE: Duration = Duration::from_secs(60);
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

    /// Settings below `provider.azure`: plain VMs of one type in all zones.
    pub fn settings(&self) -> Vec<(String, String)> {
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

    /// Reads the settings, with these in place of others; an empty one is left out.
    fn read(&self, settings: &[(&str, &str)], creates: bool) -> AzureConfig {
        let mut all = self.settings();
        for (key, value) in settings {
            all.retain(|(known, _)| known != key);
            if !value.is_empty() {
                all.push(((*key).to_owned(), (*value).to_owned()));
            }
        }
        let name =
            |key: &str| format!("PEERPOD_PROVIDER_AZURE_{}", key.to_ascii_uppercase().replace('-', "_"));
        let env = all.into_iter().map(|(key, value)| (name(&key), value)).collect();
        let mut reader =
            Reader::load(Sources { env, ..Sources::default() }.for_tests(), &["provider"], &[]).unwrap();
        let config = AzureConfig::read(&mut reader, creates);
        reader.finish().map_err(|mistakes| mistakes.to_string()).unwrap();
        config
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<AzureProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<AzureProvider> {
        Arc::new(AzureProvider::new(self.read(settings, true), owner).unwrap())
    }

    /// Provider as in the cluster's controller.
    pub fn collector(&self) -> Arc<AzureProvider> {
        let none =
            [("image-id", ""), ("subnet-id", ""), ("second-subnet-id", ""), ("region", ""), ("zones", "")];
        Arc::new(AzureProvider::new(self.read(&none, false), owner("")).unwrap())
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

/// Owner of a node's VMs.
pub fn owner(node: &str) -> Owner {
    Owner { cluster_id: "c".to_owned(), node_name: node.to_owned(), installation: "i".to_owned() }
}

/// Request that any of the types meets.
pub fn request(name: &str) -> CreateRequest {
    CreateRequest {
        name: name.to_owned(),
        user_data: format!("{{\"peerpod\":1,\"for\":\"{name}\"}}"),
        size: Size { vcpus: 1, memory_mib: 512, ..Size::default() },
        labels: [("peerpod.pod".to_owned(), name.to_owned())].into(),
        ..CreateRequest::default()
    }
}

/// Idempotency key of this test.
pub fn key(test: &str, number: u32) -> IdempotencyKey {
    IdempotencyKey::derive("c", test, number)
}

/// Places a request as the node does: the node records the placement, and then creates.
pub async fn placed(provider: &dyn Provider, request: &CreateRequest) -> Result<CreateRequest, Error> {
    let placement = provider.place(request).await?;
    Ok(CreateRequest { placement, ..request.clone() })
}

/// Name of a VM in the cloud.
pub fn name(id: &str) -> &str {
    id.rsplit('/').next().unwrap()
}
