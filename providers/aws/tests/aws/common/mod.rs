//! Provider in front of a simulated EC2 of its own.

#![allow(unreachable_pub, clippy::unwrap_used)] // a module of tests

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_aws::{AwsConfig, AwsProvider};
use peerpod_test_ec2::{Fault, Proxy, REGION, xml};
pub use peerpod_tests::cloud::{PATIENCE, TestCloud, key, owner, placed, request, stranger, within};
use tokio::time::Instant;

/// AMI of `tests/ec2/amis.json` that the tests boot.
pub const IMAGE: &str = "ami-0aaaaaaaaaaaaaaa2";
/// The same for arm64.
pub const ARM_IMAGE: &str = "ami-0bbbbbbbbbbbbbbb1";
/// AMI with another root device.
pub const OTHER_IMAGE: &str = "ami-0ccccccccccccccc1";

/// Simulated EC2 with a default network: subnets in three zones and a security group.
pub struct Cloud {
    /// Fault proxy in front of moto.
    pub proxy: Proxy,
    /// Subnets, one per zone, in the order of the zones.
    pub subnets: Vec<String>,
    /// Default security group.
    pub group: String,
}

impl Cloud {
    pub async fn start() -> Cloud {
        Cloud::behind(Proxy::start().await.unwrap()).await
    }

    /// Sets up the cloud behind a proxy that already listens.
    pub async fn behind(proxy: Proxy) -> Cloud {
        let subnets = proxy.ask("DescribeSubnets", &[]).await.unwrap();
        let mut by_zone: Vec<(&str, &str)> = xml::values(&subnets, "availabilityZone")
            .into_iter()
            .zip(xml::values(&subnets, "subnetId"))
            .collect();
        by_zone.sort_unstable();
        let subnets = by_zone.into_iter().map(|(_, subnet)| subnet.to_owned()).collect();
        let groups = proxy.ask("DescribeSecurityGroups", &[]).await.unwrap();
        let group = xml::value(&groups, "groupId").unwrap().to_owned();
        Cloud { proxy, subnets, group }
    }

    /// Settings for this cloud, and those of the test.
    pub fn config(&self, settings: &[(&str, &str)]) -> AwsConfig {
        self.read(settings, |reader| AwsConfig::read(reader, true))
    }

    /// Provider of node `n`.
    pub fn provider(&self, settings: &[(&str, &str)]) -> Arc<AwsProvider> {
        self.provider_of("n", settings)
    }

    /// Provider of the given node.
    pub fn provider_of(&self, node: &str, settings: &[(&str, &str)]) -> Arc<AwsProvider> {
        Arc::new(AwsProvider::new(self.config(settings), owner(node)))
    }

    /// Provider as in the cluster's controller: with credentials and a region only.
    pub fn collector(&self) -> Arc<AwsProvider> {
        let none = [("image-id", ""), ("subnet-ids", ""), ("security-group-ids", "")];
        let config = self.read(&none, |reader| AwsConfig::read(reader, false));
        Arc::new(AwsProvider::new(config, owner("")))
    }

    /// Ids of the VMs that moto lists.
    pub async fn machines(&self) -> Vec<String> {
        // A page of moto has 100 VMs otherwise.
        let mut params = vec![("Filter.1.Name", "instance-state-name"), ("MaxResults", "1000")];
        params.extend([
            ("Filter.1.Value.1", "pending"),
            ("Filter.1.Value.2", "running"),
            ("Filter.1.Value.3", "stopping"),
            ("Filter.1.Value.4", "stopped"),
            ("Filter.1.Value.5", "shutting-down"),
        ]);
        let answer = self.proxy.ask("DescribeInstances", &params).await.unwrap();
        let items = xml::items(&answer, "instancesSet").into_iter();
        items.filter_map(|place| xml::value(&answer[place], "instanceId").map(str::to_owned)).collect()
    }

    /// Creates a volume in a zone.
    pub async fn volume(&self, zone: &str) -> String {
        let answer =
            self.proxy.ask("CreateVolume", &[("AvailabilityZone", zone), ("Size", "1")]).await.unwrap();
        xml::value(&answer, "volumeId").unwrap().to_owned()
    }
}

impl TestCloud for Cloud {
    const KIND: &'static str = "aws";

    fn settings(&self) -> Vec<(String, String)> {
        // All subnets, one type, one image.
        vec![
            ("endpoint".to_owned(), self.proxy.endpoint()),
            ("region".to_owned(), REGION.to_owned()),
            ("access-key-id".to_owned(), "AKIATEST".to_owned()),
            ("secret-key".to_owned(), "not a secret".to_owned()),
            ("subnet-ids".to_owned(), self.subnets.join(",")),
            ("security-group-ids".to_owned(), self.group.clone()),
            ("image-id".to_owned(), IMAGE.to_owned()),
            ("arch".to_owned(), "x86_64".to_owned()),
            ("call-timeout".to_owned(), "60s".to_owned()),
        ]
    }

    async fn ids(&self) -> Vec<String> {
        self.machines().await
    }

    fn creates(&self) -> usize {
        self.proxy.count(Some("CreateFleet"))
    }

    fn delay_answer(&self) {
        self.proxy.fail("CreateFleet", Fault::Late(Duration::from_secs(5)), 1);
    }

    fn late(&self) -> usize {
        self.proxy.late()
    }

    fn heal(&self) {
        self.proxy.heal();
    }
}

/// Waits for a condition.
pub async fn until<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let end = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
