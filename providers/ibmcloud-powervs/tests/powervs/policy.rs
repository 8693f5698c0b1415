//! Checks that the roles in the README allow the calls that a whole life of VMs needs. PowerVS has no finer ones.

use std::collections::BTreeSet;

use peerpod_provider_api::Provider;
use peerpod_test_clouds::powervs::DHCP;

use super::common::{Site, key, request};

#[tokio::test(flavor = "multi_thread")]
async fn a_node_needs_manager_and_preflight_and_lists_need_reader_alone() {
    let site = Site::start().await;
    let provider = site.provider(&[("network-id", DHCP)]);
    provider.preflight().await.unwrap();
    provider.list_owned().await.unwrap();
    assert_eq!(site.cloud.rights(), BTreeSet::from(["Reader".to_owned()]));
    let made = provider.create(&request("web-0"), &key("role", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    provider.delete(&made.id).await.unwrap();
    assert_eq!(site.cloud.rights(), ["Manager", "Reader"].map(str::to_owned).into());
    let readme = include_str!("../../README.md");
    assert!(readme.contains("--roles Manager,Viewer"), "the commands of the README give this role");
    site.cloud.deny("Manager");
    let error = provider.create(&request("web-1"), &key("role", 1)).await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("role Manager"), "{error}");
}
