//! Provider in front of a fake Google Cloud of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_base::config::{Reader, Sources};
use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, Owner, Provider, Size};
use peerpod_provider_gcp::{GcpConfig, GcpProvider};
use peerpod_test_clouds::gcp::{PROJECT, ZONES};
use peerpod_test_clouds::{Cloud, Gcp};
use serde_json::Value;
use tokio::time::Instant;

/// Longest wait of a test for any condition.
pub const PATIENCE: Duration = Duration::from_secs(60);
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

    /// Settings below `provider.gcp`: all zones, one type, one image, plain VMs.
    pub fn settings(&self) -> Vec<(String, String)> {
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

    fn read(&self, settings: &[(&str, &str)], creates: bool) -> GcpConfig {
        let mut all = self.settings();
        for (key, value) in settings {
            all.retain(|(known, _)| known != key);
            if !value.is_empty() {
                all.push(((*key).to_owned(), (*value).to_owned()));
            }
        }
        let name = |key: &str| format!("PEERPOD_PROVIDER_GCP_{}", key.to_ascii_uppercase().replace('-', "_"));
        let env = all.into_iter().map(|(key, value)| (name(&key), value)).collect();
        let mut reader =
            Reader::load(Sources { env, ..Sources::default() }.for_tests(), &["provider"], &[]).unwrap();
        let config = GcpConfig::read(&mut reader, creates);
        reader.finish().map_err(|mistakes| mistakes.to_string()).unwrap();
        config
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<GcpProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<GcpProvider> {
        Arc::new(GcpProvider::new(self.read(settings, true), owner))
    }

    /// Provider as in the cluster's controller: with credentials and a project only.
    pub fn collector(&self) -> Arc<GcpProvider> {
        let none = [("image", ""), ("zones", ""), ("subnetwork", ""), ("second-subnetwork", "")];
        Arc::new(GcpProvider::new(self.read(&none, false), owner("")))
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

/// Runs a call with this time as its deadline.
pub async fn within<F: Future>(time: Duration, call: F) -> F::Output {
    peerpod_provider_api::with_deadline(Instant::now() + time, call).await
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
