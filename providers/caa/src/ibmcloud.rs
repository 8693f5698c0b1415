//! Table of the variables for IBM Cloud VPC.

use peerpod_provider_rest::ibm::{IAM, TAGS};

use crate::{Converted, Form, Row, Value, Variables, get, is_true};

/// [`convert`] handles the variables that need more than that.
const TABLE: &[Row] = &[
    ("IBMCLOUD_API_KEY", "api-key", Form::Text),
    ("IBMCLOUD_IAM_PROFILE_ID", "iam-profile-id", Form::Text),
    ("IBMCLOUD_IAM_ENDPOINT", "iam-endpoint", Form::Text),
    ("IBMCLOUD_VPC_ENDPOINT", "endpoint", Form::Text),
    ("IBMCLOUD_RESOURCE_GROUP_ID", "resource-group-id", Form::Text),
    ("IBMCLOUD_ZONE", "zones", Form::List),
    ("IBMCLOUD_VPC_ID", "vpc-id", Form::Text),
    ("IBMCLOUD_VPC_SUBNET_ID", "subnet-ids", Form::List),
    ("IBMCLOUD_SECURITY_GROUP_IDS", "security-group-ids", Form::List),
    ("IBMCLOUD_PODVM_INSTANCE_PROFILE_NAME", "instance-type", Form::Text),
    ("IBMCLOUD_PODVM_INSTANCE_PROFILE_LIST", "instance-types", Form::List),
    ("IBMCLOUD_PODVM_IMAGE_ID", "image-ids", Form::List),
    ("IBMCLOUD_SSH_KEY_ID", "key-id", Form::Text),
    ("IBMCLOUD_DEDICATED_HOST_IDS", "dedicated-host-ids", Form::List),
    ("IBMCLOUD_DEDICATED_HOST_GROUP_IDS", "dedicated-host-group-ids", Form::List),
    ("TAGS", "tags", Form::List),
];

/// Variables without a setting, each with the reason.
const LOST: &[(&str, &str)] =
    &[("IBMCLOUD_CLUSTER_ID", "VMs have the mark of node.cluster-id, which the chart sets; remove it")];

/// Values that the cloud-api-adaptor reads from its node where the variable is empty, each with the place to look at.
const FROM_THE_NODE: &[(&str, &str, &str)] = &[
    ("IBMCLOUD_ZONE", "zones", "set provider.ibmcloud.zones to the node's label topology.kubernetes.io/zone"),
    (
        "IBMCLOUD_VPC_ID",
        "vpc-id",
        "set provider.ibmcloud.vpc-id to the VPC of the cluster (ibmcloud ks cluster get)",
    ),
    (
        "IBMCLOUD_VPC_SUBNET_ID",
        "subnet-ids",
        "set provider.ibmcloud.subnet-ids to the node's label ibm-provider.kubernetes.io/subnet-id",
    ),
];

/// Converts the variables of a cloud-api-adaptor for IBM Cloud VPC; ignores all other variables.
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.ibmcloud", TABLE, variables);
    pairs(&mut converted);
    converted.keep_tags("tags", |key, value| TAGS.refusal(key, value));
    converted.lose_all(variables, LOST);
    let lost: Vec<_> =
        FROM_THE_NODE.iter().filter(|(_, key, _)| !converted.settings.contains_key(*key)).collect();
    for (name, _, why) in lost {
        converted.lose(name, format!("it was read from the node; {why}"));
    }
    converted.lose(
        "IBMCLOUD_SECURITY_GROUP_IDS",
        "the cluster's own group was added to it; add kube-CLUSTER-ID to provider.ibmcloud.security-group-ids",
    );
    types(&mut converted);
    confidential(&mut converted, variables);
    // The same path in both; the default of the cloud-api-adaptor is this provider's.
    if converted.settings.get("iam-endpoint").is_some_and(|url| *url == format!("{IAM}/identity/token")) {
        converted.settings.remove("iam-endpoint");
    }
    converted
}

/// Writes tags as pairs. IBM's convention for a pair is `name:value`.
fn pairs(converted: &mut Converted) {
    let Some(Value::Array(tags)) = converted.settings.get_mut("tags") else { return };
    for tag in tags {
        let pair = tag.as_str().filter(|text| !text.contains('=')).map(|text| text.replacen(':', "=", 1));
        if let Some(pair) = pair {
            *tag = pair.into();
        }
    }
}

/// Converts the profile for pods that request none. The cloud-api-adaptor has no default.
fn types(converted: &mut Converted) {
    if converted.settings.contains_key("instance-type") {
        return;
    }
    converted.lose(
        "IBMCLOUD_PODVM_INSTANCE_PROFILE_NAME",
        "it has no value; set provider.ibmcloud.instance-type to a profile of the third generation, like bx3d-2x10",
    );
}

/// Converts the flag for plain VMs, which the cloud-api-adaptor sets by default.
fn confidential(converted: &mut Converted, variables: &Variables) {
    converted.recognise(variables, "DISABLECVM");
    let is_plain = get(variables, "DISABLECVM").is_none_or(is_true);
    let technology = if is_plain { "none" } else { "tdx" };
    converted.settings.insert("confidential".to_owned(), technology.into());
}
