//! Provider in front of a vCenter of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{Error, Owner};
use peerpod_provider_vsphere::{VsphereConfig, VsphereProvider};
use peerpod_test_clouds::vcsim::{CLUSTER, DATACENTER, DATASTORES, HOSTS, NETWORKS};
use peerpod_test_clouds::{Fault, Vcsim};
pub use peerpod_tests::cloud::{TestCloud, key, owner, placed, request, stranger};

/// Method that makes one VM.
pub const CREATE: &str = "CloneVM_Task";

/// Settings for this vCenter.
pub struct Site {
    /// The simulator.
    pub vcsim: Vcsim,
}

impl Site {
    pub fn start() -> Site {
        Site { vcsim: Vcsim::start().unwrap() }
    }

    pub fn config(&self, settings: &[(&str, &str)], creates: bool) -> VsphereConfig {
        self.read(settings, |reader| VsphereConfig::read(reader, creates))
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<VsphereProvider> {
        self.provider_of(owner("n"), settings)
    }

    /// Provider of the given owner.
    pub fn provider_of(&self, owner: Owner, settings: &[(&str, &str)]) -> Arc<VsphereProvider> {
        Arc::new(VsphereProvider::new(self.config(settings, true), owner))
    }

    /// Provider as in the cluster's controller: without hosts and template.
    pub fn collector(&self) -> Arc<VsphereProvider> {
        let none = [("hosts", ""), ("datastores", ""), ("template", ""), ("second-network", "")];
        Arc::new(VsphereProvider::new(self.config(&none, false), owner("")))
    }
}

impl TestCloud for Site {
    const KIND: &'static str = "vsphere";

    fn settings(&self) -> Vec<(String, String)> {
        [
            ("url", self.vcsim.url()),
            ("username", self.vcsim.said("user").to_owned()),
            ("password", self.vcsim.said("password").to_owned()),
            ("datacenter", DATACENTER.to_owned()),
            ("cluster", CLUSTER.to_owned()),
            ("hosts", HOSTS.join(",")),
            ("datastores", DATASTORES.join(",")),
            ("second-network", NETWORKS[0].to_owned()),
            ("console", "true".to_owned()),
            ("call-timeout", "60s".to_owned()),
            ("first-pause", "20ms".to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .to_vec()
    }

    async fn ids(&self) -> Vec<String> {
        let vms = self.vcsim.vms();
        vms.iter().filter_map(|vm| vm["Name"].as_str().map(str::to_owned)).collect()
    }

    fn creates(&self) -> usize {
        self.vcsim.count(CREATE)
    }

    fn delay_answer(&self) {
        self.vcsim.fail(CREATE, Fault::Late(Duration::from_secs(5)), 1);
    }

    fn late(&self) -> usize {
        self.vcsim.late()
    }

    fn heal(&self) {
        self.vcsim.heal();
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
