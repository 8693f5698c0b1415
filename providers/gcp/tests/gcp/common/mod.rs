//! Provider in front of a fake Google Cloud of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{Error, Owner};
use peerpod_provider_gcp::{GcpConfig, GcpProvider};
use peerpod_test_clouds::gcp::{PROJECT, ZONES};
use peerpod_test_clouds::{Cloud, Fault, Gcp};
pub use peerpod_tests::cloud::{TestCloud, key, owner, placed, request, stranger, within};
use serde_json::Value;

/// Action that creates one VM.
pub const CREATE: &str = "compute.instances.insert";
/// Type of the tests' VMs: it can be confidential in the first two zones.
pub const TYPE: &str = "n2d-standard-2";

/// Settings for this cloud.
pub struct Site {
    /// The fake.
    pub cloud: Cloud<Gcp>,
}

impl Site {
    pub async fn start() -> Site {
        Site { cloud: Cloud::start(Gcp::default()).await.unwrap() }
    }

    fn config(&self, settings: &[(&str, &str)], creates: bool) -> GcpConfig {
        self.read(settings, |reader| GcpConfig::read(reader, creates))
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<GcpProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<GcpProvider> {
        Arc::new(GcpProvider::new(self.config(settings, true), owner))
    }

    /// Provider as in the cluster's controller: with credentials and a project only.
    pub fn collector(&self) -> Arc<GcpProvider> {
        let none = [("image", ""), ("zones", ""), ("subnetwork", ""), ("second-subnetwork", "")];
        Arc::new(GcpProvider::new(self.config(&none, false), owner("")))
    }

    /// The VM as the cloud shows it to a witness.
    pub fn vm(&self, id: &str) -> Option<Value> {
        let (zone, name) = id.split_once('/')?;
        let path = format!("/compute/v1/projects/{PROJECT}/zones/{zone}/instances/{name}");
        let answer = self.cloud.ask("GET", &path, None);
        (answer.status == 200).then(|| answer.value())
    }

    /// Ids of all VMs.
    pub fn machines(&self) -> Vec<String> {
        let path = format!("/compute/v1/projects/{PROJECT}/aggregated/instances");
        let zones = self.cloud.ask("GET", &path, None).value();
        let zones = zones["items"].as_object().cloned().unwrap_or_default();
        let id = |zone: &str, vm: &Value| {
            format!("{}/{}", zone.trim_start_matches("zones/"), vm["name"].as_str().unwrap())
        };
        zones
            .iter()
            .flat_map(|(zone, found)| {
                found["instances"].as_array().into_iter().flatten().map(|vm| id(zone, vm)).collect::<Vec<_>>()
            })
            .collect()
    }

    /// Makes a disk in a zone; returns its volume handle.
    pub fn disk(&self, zone: &str, name: &str) -> String {
        self.cloud.with(|gcp, world| gcp.add_disk(name, zone, world.now))
    }
}

impl TestCloud for Site {
    const KIND: &'static str = "gcp";

    fn settings(&self) -> Vec<(String, String)> {
        // Plain VMs of one type and one image in all zones.
        [
            ("endpoint", self.cloud.endpoint()),
            ("metadata", self.cloud.endpoint()),
            ("project-id", PROJECT.to_owned()),
            ("zones", ZONES.join(",")),
            ("image", "peerpod".to_owned()),
            ("subnetwork", "pods".to_owned()),
            ("second-subnetwork", "second".to_owned()),
            ("instance-type", TYPE.to_owned()),
            ("confidential", "none".to_owned()),
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
        for action in [CREATE, "compute.instances.bulkInsert"] {
            self.cloud.fail(action, Fault::Late(Duration::from_secs(5)), 1);
        }
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
