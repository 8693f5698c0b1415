//! Tests of the settings.

use peerpod_base::config::Sources;

use super::*;

const LEAST: [(&str, &str); 4] = [
    ("region", "cn-beijing"),
    ("image-id", "m-2ze0123456789abcdefg"),
    ("vswitch-ids", "vsw-2ze0123456789abcdefg"),
    ("security-group-ids", "sg-2ze0123456789abcdefg"),
];

fn read_as(settings: &[(&str, &str)], creates: bool) -> Result<AlibabaCloudConfig, String> {
    // A flag may not hold a secret.
    let name =
        |key: &str| format!("PEERPOD_PROVIDER_ALIBABACLOUD_{key}").to_ascii_uppercase().replace('-', "_");
    let env = settings.iter().map(|(key, value)| (name(key), (*value).to_owned()));
    let sources = Sources { env: env.collect(), ..Sources::default() };
    let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
    let config = AlibabaCloudConfig::read(&mut reader, creates);
    reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
}

/// Reads the required settings and these.
pub(crate) fn read(settings: &[(&str, &str)]) -> Result<AlibabaCloudConfig, String> {
    read_as(&[&LEAST[..], settings].concat(), true)
}

#[test]
fn region_image_and_network_are_the_required_settings() {
    let config = read(&[]).unwrap();
    assert_eq!(config.instance_types, ["ecs.g8i.xlarge"]);
    assert!(config.confidential, "plain VMs are a decision");
    assert_eq!((config.root.size_gib, config.root.category.as_str()), (20, "cloud_essd"));
    assert!(matches!(
        config.credentials,
        AlibabaCloudCredentials::Role { role: None, provider: None, file: None }
    ));
    let told = read_as(&[], true).unwrap_err();
    for key in ["region", "image-id", "vswitch-ids", "security-group-ids"] {
        assert!(told.contains(key), "{key} in {told}");
    }
    let collects = read_as(&[("region", "cn-beijing")], false).unwrap();
    assert!(collects.image.is_none() && collects.vswitch_ids.is_empty());
}

#[test]
fn all_mistakes_are_reported_at_once_with_a_remedy() {
    let told = read(&[
        ("region", "Beijing"),
        ("image-id", "a b"),
        ("vswitch-ids", "subnet-1"),
        ("second-vswitch-ids", "vsw-"),
        ("security-group-ids", "cn-beijing"),
        ("instance-type", "g8i.xlarge"),
        ("root-volume-type", "ssd"),
        ("root-volume-size", "4000"),
        ("access-key-id", "LTAI"),
        ("security-token", "t"),
        ("tags", "aliyun.x=1,acs:y=2,team=blue"),
        ("endpoint", "ecs"),
    ])
    .unwrap_err();
    for part in [
        "write it like cn-beijing",
        "not the id of an image",
        "subnet-1 is no id of these",
        "vsw- is no id of these",
        "cn-beijing is no id of these; write them like sg-",
        "write it like ecs.g8i.xlarge",
        "cloud_essd, cloud_auto",
        "at most 2048 (GiB)",
        "secret-key is missing",
        "aliyun.x is taken",
        "acs:y is taken",
        "not a URL; write it like https://ecs-vpc.cn-beijing.aliyuncs.com",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert!(read(&[("security-token", "t")]).unwrap_err().contains("give all three"));
}

#[test]
fn types_and_ids_have_their_forms() {
    for (name, is) in [
        ("ecs.g8i.xlarge", true),
        ("ecs.gn7i-c8g1.2xlarge", true),
        ("ecs.t5-lc1m1.small", true),
        ("ecs.", false),
        ("ecs", false),
        ("g8i.xlarge", false),
        ("ecs.g8i.X", false),
    ] {
        assert_eq!(is_type(name), is, "{name}");
    }
    assert!(is_id("i-bp67acfmxazb4p0aaaaa", "i-") && !is_id("i-x", "i-") && !is_id("i-BP67ACFMXAZ", "i-"));
    assert!(is_image("aliyun_3_x64_20G_alibase_20240528.vhd") && !is_image("../x"));
}

#[test]
fn other_services_have_the_endpoints_network() {
    let service = |endpoint: &str| {
        let settings = if endpoint.is_empty() { vec![] } else { vec![("endpoint", endpoint)] };
        read(&settings).unwrap().service("sts")
    };
    assert_eq!(service(""), "https://sts.cn-beijing.aliyuncs.com");
    assert_eq!(
        service("https://ecs-vpc.cn-beijing.aliyuncs.com/"),
        "https://sts-vpc.cn-beijing.aliyuncs.com"
    );
    assert_eq!(service("http://127.0.0.1:1"), "http://127.0.0.1:1");
    assert_eq!(service("https://ecstatic.example"), "https://ecstatic.example");
}
