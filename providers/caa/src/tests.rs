//! Converts full ConfigMaps, and reads the results as the providers do.

use peerpod_base::config::{Reader, Sources};
use peerpod_provider_alibabacloud::AlibabaCloudConfig;
use peerpod_provider_api::Confidential;
use peerpod_provider_aws::AwsConfig;
use peerpod_provider_azure::AzureConfig;
use peerpod_provider_azure::config::AzureCredentials;
use peerpod_provider_byom::ByomConfig;
use peerpod_provider_byom::config::HostKeys;
use peerpod_provider_gcp::GcpConfig;
use peerpod_provider_ibmcloud::IbmCloudConfig;
use peerpod_provider_powervs::PowerVsConfig;
use peerpod_provider_vsphere::VsphereConfig;

use super::*;

const SUBNET: &str =
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/pods";
const GROUP: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkSecurityGroups/n";

fn of(provider: &str, pairs: &[(&str, &str)]) -> Converted {
    let variables = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    convert(provider, &variables.collect()).unwrap()
}

/// Reads converted settings as the provider of this kind does.
fn read_back<C>(kind: &str, converted: &Converted, read: impl FnOnce(&mut Reader, bool) -> C) -> C {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Array(list) => list.iter().map(|one| one.as_str().unwrap()).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    };
    let env = |key: &str| format!("PEERPOD_PROVIDER_{kind}_{key}").to_ascii_uppercase().replace('-', "_");
    let env = converted.settings.iter().map(|(key, value)| (env(key), text(value)));
    let mut reader =
        Reader::load(Sources { env: env.collect(), ..Sources::default() }, &["provider"], &[]).unwrap();
    let config = read(&mut reader, true);
    reader.finish().map_err(|mistakes| mistakes.to_string()).unwrap();
    config
}

fn lists(converted: &Converted, parts: &[&str]) {
    let lost = format!("{:?}", converted.lost);
    for part in parts {
        assert!(lost.contains(part), "{part} in {lost}");
    }
}

#[test]
fn every_setting_of_a_full_config_map_for_aws_arrives_and_is_read_without_a_mistake() {
    let converted = of(
        "aws",
        &[
            ("AWS_ACCESS_KEY_ID", "AKIA"),
            ("AWS_SECRET_ACCESS_KEY", "hush"),
            ("AWS_SESSION_TOKEN", "token"),
            ("AWS_REGION", "eu-west-1"),
            ("AWS_SUBNET_ID", "subnet-0123456789abcdef0"),
            ("AWS_SG_IDS", "sg-0123456789abcdef0,sg-0123456789abcdef1"),
            ("PODVM_AMI_ID", "ami-0123456789abcdef0"),
            ("PODVM_INSTANCE_TYPE", "m6a.large"),
            ("PODVM_INSTANCE_TYPES", "m6a.large, c6a.large"),
            ("SSH_KP_NAME", "me"),
            ("USE_PUBLIC_IP", "TRUE"),
            ("ROOT_VOLUME_SIZE", "40"),
            ("DISABLECVM", "1"),
            ("TAGS", "team=blue,cost=7"),
            ("PODVM_LAUNCHTEMPLATE_NAME", "kata"),
            ("USE_PODVM_LAUNCHTEMPLATE", "false"),
        ],
    );
    assert_eq!(converted.lost, []);
    assert_eq!(converted.known.len(), 16);
    let config = read_back("aws", &converted, AwsConfig::read);
    assert_eq!(config.instance_types, ["m6a.large", "c6a.large"]);
    assert!(config.use_public_ip && !config.confidential);
    assert_eq!((config.root.size_gib, config.tags["cost"].as_str()), (40, "7"));
    assert_eq!(config.security_group_ids.len(), 2);
    assert!(config.launch_template.is_none());
}

#[test]
fn a_variable_for_aws_without_a_setting_is_named_with_a_remedy() {
    let converted = of(
        "aws",
        &[
            ("PODVM_AMI_ID", "ami-0123456789abcdef0"),
            ("USE_PODVM_LAUNCHTEMPLATE", "true"),
            ("ROOT_VOLUME_SIZE", "30GiB"),
            ("TAGS", "Name=x,odd,peerpod.node=y,aws:z=1"),
            ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"),
            ("AWS_REGION", ""),
        ],
    );
    let config = read_back("aws", &converted, AwsConfig::read);
    assert_eq!(config.launch_template.as_deref(), Some("kata"));
    assert_eq!(config.root.size_gib, 30);
    assert!(config.tags.is_empty() && config.region.is_none());
    lists(
        &converted,
        &[
            "30GiB",
            "Name=x",
            "odd",
            "peerpod.node=y",
            "aws:z=1",
            "AWS_ROLE_ARN",
            "PODVM_AMI_ID",
            "check both",
        ],
    );
}

#[test]
fn every_setting_of_a_full_config_map_for_azure_arrives_and_is_read_without_a_mistake() {
    let converted = of(
        "azure",
        &[
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_CLIENT_SECRET", "hush"),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_SUBSCRIPTION_ID", "s"),
            ("AZURE_REGION", "westeurope"),
            ("AZURE_RESOURCE_GROUP", "g"),
            ("AZURE_INSTANCE_SIZE", "Standard_D2s_v5"),
            ("AZURE_INSTANCE_SIZES", "Standard_D2s_v5, Standard_D4s_v5"),
            ("AZURE_SUBNET_ID", SUBNET),
            ("AZURE_NSG_ID", GROUP),
            ("AZURE_IMAGE_ID", "/CommunityGalleries/cococommunity-42/Images/peerpod/Versions/1.0.0"),
            ("DISABLECVM", "true"),
            ("ENABLE_SECURE_BOOT", "1"),
            ("USE_PUBLIC_IP", "TRUE"),
            ("ROOT_VOLUME_SIZE", "40"),
            ("TAGS", "team=blue,cost=7"),
        ],
    );
    assert_eq!(converted.lost, []);
    assert_eq!(converted.known.len(), 16);
    let config = read_back("azure", &converted, AzureConfig::read);
    assert_eq!(config.instance_types, ["Standard_D2s_v5", "Standard_D4s_v5"]);
    assert!(config.use_public_ip && config.secure_boot && !config.confidential);
    assert_eq!((config.root_gib, config.tags["cost"].as_str()), (40, "7"));
    assert_eq!((config.subnet.as_str(), config.security_group.as_deref()), (SUBNET, Some(GROUP)));
    assert!(matches!(&config.credentials, AzureCredentials::Secret { tenant, .. } if tenant == "tenant"));
}

#[test]
fn a_variable_for_azure_without_a_setting_is_named_with_a_remedy() {
    let converted = of(
        "azure",
        &[
            ("SSH_USERNAME", "peerpod"),
            ("AZURE_FEDERATED_TOKEN_FILE", "/var/run/secrets/azure/tokens/azure-identity-token"),
            ("AZURE_AUTHORITY_HOST", "https://login.microsoftonline.com/"),
            ("ROOT_VOLUME_SIZE", "30GiB"),
            ("TAGS", "odd,peerpod.node=y,microsoft.z=1,good=1"),
            ("AZURE_REGION", ""),
        ],
    );
    assert_eq!(converted.settings["tags"], serde_json::json!(["good=1"]));
    lists(
        &converted,
        &[
            "SSH_USERNAME",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_AUTHORITY_HOST",
            "30GiB",
            "odd",
            "peerpod.node",
            "microsoft.z",
        ],
    );
    assert_eq!(converted.known.len(), 6);
}

#[test]
fn every_setting_of_a_full_config_map_for_gcp_arrives_and_is_read_without_a_mistake() {
    let converted = of(
        "gcp",
        &[
            ("GCP_CREDENTIALS", "{\"type\": \"service_account\"}"),
            ("GCP_PROJECT_ID", "project-1"),
            ("GCP_ZONE", "us-central1-a"),
            ("PODVM_IMAGE_NAME", "/projects/project-1/global/images/podvm-1"),
            ("GCP_MACHINE_TYPE", "n2d-standard-4"),
            ("GCP_INSTANCE_TYPES", "n2d-standard-4, n2d-standard-8"),
            ("GCP_NETWORK", "global/networks/default"),
            ("GCP_SUBNETWORK", "pods"),
            ("GCP_DISK_TYPE", "pd-ssd"),
            ("GCP_CONFIDENTIAL_TYPE", "SEV_SNP"),
            ("ROOT_VOLUME_SIZE", "40"),
            ("DISABLECVM", "false"),
            ("USE_PUBLIC_IP", "TRUE"),
            ("TAGS", "env=prod,team=blue"),
        ],
    );
    assert_eq!(converted.lost, []);
    assert_eq!(converted.known.len(), 14);
    let config = read_back("gcp", &converted, GcpConfig::read);
    assert_eq!(config.instance_types, ["n2d-standard-4", "n2d-standard-8"]);
    assert_eq!((config.zones.len(), config.root.size_gib, config.root.kind.as_str()), (1, 40, "pd-ssd"));
    assert!(config.use_public_ip && config.confidential == Some(Confidential::SevSnp));
    assert_eq!(config.resource_manager_tags["project-1/env"], "prod");
    assert_eq!(config.nic.network.as_deref(), Some("projects/project-1/global/networks/default"));
}

#[test]
fn a_variable_for_gcp_without_a_setting_is_named_with_a_remedy() {
    let least =
        [("GCP_PROJECT_ID", "project-1"), ("GCP_ZONE", "us-central1-a"), ("PODVM_IMAGE_NAME", "podvm")];
    let odd = [
        ("ROOT_VOLUME_SIZE", "30GiB"),
        ("TAGS", "odd,=x"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/key.json"),
        ("GCP_CONFIDENTIAL_TYPE", ""),
    ];
    let converted = of("gcp", &[&least[..], &odd[..]].concat());
    let config = read_back("gcp", &converted, GcpConfig::read);
    assert_eq!((config.root.size_gib, config.root.kind.as_str()), (30, "pd-standard"));
    assert_eq!(config.instance_types, ["e2-medium"], "the default of the cloud-api-adaptor");
    assert!(config.resource_manager_tags.is_empty());
    lists(&converted, &["30GiB", "odd", "=x", "set it on our daemon", "without it no VM was made"]);
    let plain = of("gcp", &[&least[..], &[("DISABLECVM", "true")]].concat());
    assert_eq!(plain.lost, []);
    assert!(read_back("gcp", &plain, GcpConfig::read).confidential.is_none());
    let other = of("gcp", &[&least[..], &[("GCP_CONFIDENTIAL_TYPE", "SGX")]].concat());
    assert!(format!("{:?}", other.lost).contains("none of SEV"), "{:?}", other.lost);
}

#[test]
fn every_setting_of_a_full_config_map_for_alibaba_cloud_arrives_and_is_read_without_a_mistake() {
    let least = [
        ("IMAGEID", "m-2ze0123456789abcdefg"),
        ("VSWITCH_ID", "vsw-2ze0123456789abcdefg"),
        ("SECURITY_GROUP_IDS", "sg-2ze0123456789abcdefg,sg-2ze0123456789abcdefh"),
    ];
    let more = [
        ("ALIBABACLOUD_ACCESS_KEY_ID", "LTAI"),
        ("ALIBABACLOUD_ACCESS_KEY_SECRET", "hush"),
        ("ALIBABACLOUD_SECURITY_TOKEN", "token"),
        ("REGION", "cn-hongkong"),
        ("PODVM_INSTANCE_TYPE", "ecs.g7.large"),
        ("KEYNAME", "me"),
        ("USE_PUBLIC_IP", "TRUE"),
        ("SYSTEM_DISK_SIZE", "60"),
        ("DISABLECVM", "1"),
        ("TAGS", "team=blue,cost=7"),
    ];
    let converted = of("alibabacloud", &[&least[..], &more].concat());
    assert_eq!(converted.lost, []);
    assert_eq!(converted.known.len(), 13);
    let config = read_back("alibabacloud", &converted, AlibabaCloudConfig::read);
    assert_eq!((config.region.as_str(), config.instance_type.as_str()), ("cn-hongkong", "ecs.g7.large"));
    assert_eq!((config.security_group_ids.len(), config.vswitch_ids.len()), (2, 1));
    assert!(config.use_public_ip && !config.confidential && config.key_name.as_deref() == Some("me"));
    assert_eq!((config.root.size_gib, config.tags["cost"].as_str()), (60, "7"));
    let other = [
        ("INSTANCE_TYPE", "ecs.g7.xlarge"),
        ("ALIBABA_CLOUD_ROLE_ARN", "acs:ram::1:role/x"),
        ("TAGS", "acs:x=1"),
    ];
    let defaults = of("alibabacloud", &[&least[..], &other].concat());
    lists(&defaults, &["ALIBABA_CLOUD_ROLE_ARN", "from the environment", "acs:x is taken"]);
    let config = read_back("alibabacloud", &defaults, AlibabaCloudConfig::read);
    assert_eq!((config.region.as_str(), config.instance_type.as_str()), ("cn-beijing", "ecs.g7.xlarge"));
    assert!(config.root.size_gib == 40 && config.confidential);
    let mistake = of("alibabacloud", &[("SECURITY_GROUP_IDS", "cn-beijing")]);
    assert!(!mistake.settings.contains_key("security-group-ids"));
    lists(&mistake, &["SECURITY_GROUP_IDS", "no group; set provider.alibabacloud.security-group-ids"]);
}

#[test]
fn every_setting_of_a_full_config_map_for_ibmcloud_arrives_and_is_read_without_a_mistake() {
    let converted = of(
        "ibmcloud",
        &[
            ("IBMCLOUD_API_KEY", "hush"),
            ("IBMCLOUD_IAM_ENDPOINT", "https://private.iam.cloud.ibm.com/identity/token"),
            ("IBMCLOUD_VPC_ENDPOINT", "https://us-south.iaas.cloud.ibm.com/v1"),
            ("IBMCLOUD_RESOURCE_GROUP_ID", "fee82deba12e4c0fb69c3b09d1f12345"),
            ("IBMCLOUD_ZONE", "us-south-1"),
            ("IBMCLOUD_VPC_ID", "r006-vpc"),
            ("IBMCLOUD_VPC_SUBNET_ID", "0717-subnet"),
            ("IBMCLOUD_SECURITY_GROUP_IDS", "r006-a,r006-b"),
            ("IBMCLOUD_PODVM_INSTANCE_PROFILE_NAME", "bx3dc-2x10"),
            ("IBMCLOUD_PODVM_INSTANCE_PROFILE_LIST", "bx3dc-2x10, bx3dc-4x20"),
            ("IBMCLOUD_PODVM_IMAGE_ID", "r006-image,r006-image-z"),
            ("IBMCLOUD_SSH_KEY_ID", "r006-key"),
            ("IBMCLOUD_DEDICATED_HOST_IDS", "0717-host"),
            ("IBMCLOUD_DEDICATED_HOST_GROUP_IDS", "0717-group"),
            ("DISABLECVM", "false"),
            ("TAGS", "team:blue,cost:7"),
        ],
    );
    lists(&converted, &["add kube-CLUSTER-ID"]);
    assert_eq!((converted.lost.len(), converted.known.len()), (1, 16), "{:?}", converted.lost);
    let config = read_back("ibmcloud", &converted, IbmCloudConfig::read);
    assert_eq!(config.instance_types, ["bx3dc-2x10", "bx3dc-4x20"]);
    assert_eq!((config.region(), config.images.len(), config.security_groups.len()), ("us-south", 2, 2));
    assert_eq!((config.hosts.len(), config.host_groups.len(), config.tags["cost"].as_str()), (1, 1, "7"));
    assert_eq!(config.confidential, Some(Confidential::Tdx));
}

#[test]
fn a_variable_for_ibmcloud_without_a_setting_is_named_with_a_remedy() {
    let converted = of(
        "ibmcloud",
        &[
            ("IBMCLOUD_IAM_PROFILE_ID", "Profile-1"),
            ("IBMCLOUD_IAM_ENDPOINT", "https://iam.cloud.ibm.com/identity/token"),
            ("IBMCLOUD_CLUSTER_ID", "c0ffee"),
            ("IBMCLOUD_PODVM_IMAGE_ID", "r006-image"),
            ("IBMCLOUD_ZONE", ""),
            ("TAGS", "odd,peerpod.node=y"),
        ],
    );
    assert_eq!(converted.settings["confidential"], "none", "the default of the cloud-api-adaptor");
    assert!(!converted.settings.contains_key("iam-endpoint") && !converted.settings.contains_key("tags"));
    lists(
        &converted,
        &[
            "node.cluster-id",
            "topology.kubernetes.io/zone",
            "vpc-id",
            "ibm-provider.kubernetes.io/subnet-id",
            "add kube-CLUSTER-ID",
            "bx3d-2x10",
            "odd",
            "peerpod.node",
        ],
    );
}

#[test]
fn every_setting_of_a_full_config_map_for_powervs_arrives_and_is_read_without_a_mistake() {
    let converted = of(
        "ibmcloud-powervs",
        &[
            ("IBMCLOUD_API_KEY", "hush"),
            ("POWERVS_ZONE", "dal12"),
            ("POWERVS_SERVICE_INSTANCE_ID", "w-1"),
            ("POWERVS_NETWORK_ID", "net-1"),
            ("POWERVS_IMAGE_ID", "image-1"),
            ("POWERVS_SSH_KEY_NAME", "me"),
            ("POWERVS_PROCESSOR_TYPE", "capped"),
            ("POWERVS_SYSTEM_TYPE", "e1080"),
            ("POWERVS_MEMORY", "8.0"),
            ("POWERVS_PROCESSORS", "0.75"),
            ("USE_PUBLIC_IP", "true"),
        ],
    );
    assert_eq!((converted.lost.len(), converted.known.len()), (0, 11), "{:?}", converted.lost);
    let config = read_back("ibmcloud-powervs", &converted, PowerVsConfig::read);
    assert_eq!((config.size.to_string().as_str(), config.region()), ("e1080-0.75x8", "dal"));
    assert_eq!((config.processor_type.as_str(), config.key_name.as_deref()), ("capped", Some("me")));
    assert!(config.use_public_ip && config.key.is_some());
}

#[test]
fn a_variable_for_powervs_without_a_setting_is_named_with_a_remedy() {
    let converted = of(
        "ibmcloud-powervs",
        &[("POWERVS_MEMORY", "2.5"), ("POWERVS_BUILD_TIMEOUT", "15m"), ("POWERVS_ZONE", "")],
    );
    lists(&converted, &["`2.5` is written as 3", "node.boot-timeout"]);
    assert_eq!(converted.settings["memory-gib"], 3);
    let odd = of("ibmcloud-powervs", &[("POWERVS_MEMORY", "lots")]);
    lists(&odd, &["`lots` is no number; set provider.ibmcloud-powervs.memory-gib"]);
}

#[test]
fn every_setting_of_a_full_config_map_for_vsphere_arrives_and_is_read_without_a_mistake() {
    let all = [
        ("GOVC_URL", "https://vcenter.example.com/sdk"),
        ("GOVC_USERNAME", "peerpod@vsphere.local"),
        ("GOVC_PASSWORD", "hush"),
        ("GOVC_TEMPLATE", "/templates/podvm"),
        ("GOVC_DATACENTER", "DC0"),
        ("GOVC_FOLDER", "pods/"),
        ("GOVC_VCLUSTER", "C0"),
        ("GOVC_DRS", "false"),
        ("GOVC_HOST", "esx-1.example.com"),
        ("GOVC_DATASTORE", "fast"),
        ("GOVC_THUMBPRINT", "AB:CD"),
    ];
    let converted = of("vsphere", &all);
    assert_eq!(converted.known.len(), 11);
    lists(&converted, &["GOVC_THUMBPRINT", "fingerprint-sha256"]);
    let config = read_back("vsphere", &converted, VsphereConfig::read);
    assert_eq!((config.template.as_str(), config.folder.as_str()), ("templates/podvm", "pods"));
    assert_eq!((config.hosts.len(), config.datastores.as_slice()), (1, &["fast".to_owned()][..]));
    let converted = of("vsphere", &[&all[..7], &[("GOVC_DRS", "true"), all[8]]].concat());
    lists(&converted, &["GOVC_HOST", "DRS chooses the host"]);
    let config = read_back("vsphere", &converted, VsphereConfig::read);
    assert!(config.drs && config.hosts.is_empty() && config.cluster.as_deref() == Some("C0"));
}

#[test]
fn every_setting_of_a_full_config_map_for_byom_arrives_and_is_read_without_a_mistake() {
    let converted = of(
        "byom",
        &[
            ("VM_POOL_IPS", "10.0.0.7, 10.0.0.10-10.0.0.12"),
            ("SSH_USERNAME", "peerpod"),
            ("SSH_PUB_KEY_PATH", "/keys/id_ed25519.pub"),
            ("SSH_PRIV_KEY_PATH", "/keys/id_ed25519"),
            ("SSH_TIMEOUT", "20"),
            ("SSH_HOST_KEY_ALLOWLIST_DIR", "/keys/hosts"),
            ("POOL_NAMESPACE", "confidential-containers-system"),
            ("POOL_CONFIGMAP_NAME", "byom-ip-pool-state"),
            ("MAX_RANGE_IPS", "100"),
        ],
    );
    assert_eq!((converted.known.len(), converted.lost.len()), (9, 4));
    lists(
        &converted,
        &["follows from the private key", "delete the ConfigMap", "POOL_NAMESPACE", "MAX_RANGE_IPS"],
    );
    let config = read_back("byom", &converted, ByomConfig::read);
    assert_eq!((config.machines.len(), config.username.as_str()), (4, "peerpod"));
    assert_eq!(config.host_keys, HostKeys::Folder("/keys/hosts".into()));
    assert_eq!(config.connect_timeout.as_secs(), 20);
}

#[test]
fn defaults_for_byom_that_are_not_safe_are_named_with_a_remedy() {
    let converted = of("byom", &[("VM_POOL_IPS", "10.0.0.7"), ("SSH_TIMEOUT", "soon")]);
    assert_eq!(converted.settings["private-key-file"], "/root/.ssh/id_rsa");
    assert_eq!(converted.settings["connect-timeout"], "30s");
    lists(&converted, &["RSA keys are not supported", "every host key was accepted", "`soon` is no number"]);
    let mut converted = converted;
    converted.settings.insert("known-hosts-file".to_owned(), "/keys/known_hosts".into());
    assert_eq!(read_back("byom", &converted, ByomConfig::read).machines.len(), 1);
}

#[test]
fn every_variable_maps_to_a_setting_or_a_hint() {
    let all: Vec<(&str, &str)> = libvirt::TABLE
        .iter()
        .map(|(name, _, form)| (*name, if *form == Form::Number { "7" } else { "/x" }))
        .chain([("DISABLECVM", "false"), ("LIBVIRT_LAUNCH_SECURITY", "s390-pv"), ("AWS_REGION", "x")])
        .collect();
    let converted = of("libvirt", &all);
    assert_eq!(converted.known.len(), all.len() - 1);
    assert_eq!(converted.settings["memory-mib"], 7);
    assert_eq!(converted.settings["cpuset"], "/x");
    let lost: Vec<&str> = converted.lost.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(lost, ["LIBVIRT_URI", "DISABLECVM", "LIBVIRT_LAUNCH_SECURITY"]);
}

#[test]
fn its_default_uri_is_not_dialled_and_a_hint_is_given() {
    let converted = of("libvirt", &[("LIBVIRT_URI", "qemu+ssh://root@192.168.122.1/system?no_verify=1")]);
    assert!(converted.lost[0].1.contains("ssh -L"), "{converted:?}");
    assert!(!converted.settings.contains_key("uri"));
    assert_eq!(of("libvirt", &[("LIBVIRT_ROOT_DISK_SIZE", "0")]).settings["root-disk-gib"], 10);
    assert_eq!(of("libvirt", &[("LIBVIRT_CPU", "two")]).lost.len(), 1);
}

#[test]
fn a_number_with_a_unit_has_the_value_that_caa_read_and_is_reported() {
    let converted = of("libvirt", &[("LIBVIRT_MEMORY", "8Gi")]);
    assert_eq!(converted.settings["memory-mib"], 8);
    assert!(converted.lost.iter().any(|(name, _)| name == "LIBVIRT_MEMORY"), "{converted:?}");
}
