//! Tests of the settings.

use peerpod_base::config::Sources;

use super::*;

const LEAST: [(&str, &str); 3] =
    [("project-id", "project-1"), ("zones", "us-central1-a,us-central1-b"), ("image", "podvm-1")];

pub(crate) fn read_as(flags: &[(&str, &str)], creates: bool) -> Result<GcpConfig, String> {
    let flags = flags.iter().map(|(key, value)| (format!("provider.gcp.{key}"), (*value).to_owned()));
    let sources = Sources { flags: flags.collect(), ..Sources::default() };
    let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
    let config = GcpConfig::read(&mut reader, creates);
    reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
}

pub(crate) fn read(flags: &[(&str, &str)]) -> Result<GcpConfig, String> {
    read_as(flags, true)
}

#[test]
fn project_zones_and_image_are_the_required_settings() {
    let config = read(&LEAST).unwrap();
    assert_eq!(config.instance_types, ["n2d-standard-2"]);
    assert_eq!(config.confidential, Some(Confidential::SevSnp), "plain VMs are a decision");
    assert_eq!(config.nic.network.as_deref(), Some("projects/project-1/global/networks/default"));
    assert!(config.nic.subnetwork.is_none() && config.second_nic.is_none());
    assert_eq!((config.root.size_gib, config.root.kind.as_str()), (10, "pd-balanced"));
    assert!(matches!(config.credentials, GcpCredentials::Default));
    let told = read(&[]).unwrap_err();
    for key in ["project-id", "zones", "image"] {
        assert!(told.contains(key), "{key} in {told}");
    }
    read_as(&[("project-id", "project-1"), ("subnetwork", "pods")], false).unwrap();
}

#[test]
fn all_mistakes_are_reported_at_once_with_a_remedy() {
    let told = read(&[
        ("project-id", "12345"),
        ("zones", "us-central1-a,europe-west1-b,us"),
        ("image", "Podvm"),
        ("network", "a b"),
        ("subnetwork", "x/y/z"),
        ("second-subnetwork", "S"),
        ("network-tags", "Pods"),
        ("confidential", "snp"),
        ("service-account", "me"),
        ("tags", "Team=blue,peerpod.node=x,goog-x=y,peerpod-key=z"),
        ("resource-manager-tags", "env"),
        ("root-volume-type", "PD"),
        ("instance-type", "large"),
    ])
    .unwrap_err();
    for part in [
        "not its number",
        "us is not a zone",
        "in the regions us-central1 and europe-west1",
        "not an image",
        "not a network",
        "not a subnetwork",
        "Pods is no network tag",
        "write one of none, sev, sev_snp, tdx",
        "not an e-mail address",
        "`Team=blue` is no label",
        "peerpod.node is taken",
        "goog-x is taken",
        "peerpod-key is taken",
        "`env` is not key=value",
        "write it like pd-balanced",
        "write it like n2d-standard-2",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
}

#[test]
fn a_key_is_a_secret_and_excludes_a_file() {
    let env = [("PEERPOD_PROVIDER_GCP_CREDENTIALS".to_owned(), "{\"hush\":1}".to_owned())];
    let flags = [&LEAST[..], &[("credentials-file", "/key.json")]].concat();
    let flags =
        flags.iter().map(|(key, value)| (format!("provider.gcp.{key}"), (*value).to_owned())).collect();
    let sources = Sources { env: env.into(), flags, ..Sources::default() };
    let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
    let config = GcpConfig::read(&mut reader, true);
    assert!(!format!("{config:?}").contains("hush"));
    let told = reader.finish().unwrap_err().to_string();
    assert!(told.contains("given together with credentials") && !told.contains("hush"), "{told}");
}

#[test]
fn paths_name_the_project_and_the_region() {
    let all = [
        ("subnetwork", "pods"),
        ("second-network", "projects/host/global/networks/storage"),
        ("second-subnetwork", "storage"),
        ("resource-manager-tags", "env=prod,tagKeys/12=tagValues/34,other/team=blue"),
        ("confidential", "none"),
    ];
    let config = read(&[&LEAST[..], &all[..]].concat()).unwrap();
    let subnetwork = "projects/project-1/regions/us-central1/subnetworks/pods";
    assert_eq!(config.nic.subnetwork.as_deref(), Some(subnetwork));
    assert_eq!(config.nic.network, None, "a subnetwork has its network");
    let second = config.second_nic.unwrap();
    assert_eq!(second.network.as_deref(), Some("projects/host/global/networks/storage"));
    let tags: Vec<_> = config.resource_manager_tags.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(tags, ["other/team=blue", "project-1/env=prod", "tagKeys/12=tagValues/34"]);
    assert_eq!(config.confidential, None);
}
