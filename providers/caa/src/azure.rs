//! Table of the variables for Azure.

use peerpod_provider_azure::config::ALPHABET;

use crate::{Converted, Form, Row, STAYS, Variables};

const TABLE: &[Row] = &[
    ("AZURE_CLIENT_ID", "client-id", Form::Text),
    ("AZURE_CLIENT_SECRET", "client-secret", Form::Text),
    ("AZURE_TENANT_ID", "tenant-id", Form::Text),
    ("AZURE_SUBSCRIPTION_ID", "subscription-id", Form::Text),
    ("AZURE_REGION", "region", Form::Text),
    ("AZURE_RESOURCE_GROUP", "resource-group", Form::Text),
    ("AZURE_INSTANCE_SIZE", "instance-type", Form::Text),
    ("AZURE_INSTANCE_SIZES", "instance-types", Form::List),
    ("AZURE_SUBNET_ID", "subnet-id", Form::Text),
    ("AZURE_NSG_ID", "security-group-id", Form::Text),
    ("AZURE_IMAGE_ID", "image-id", Form::Text),
    ("DISABLECVM", "disable-cvm", Form::Flag),
    ("ENABLE_SECURE_BOOT", "secure-boot", Form::Flag),
    ("USE_PUBLIC_IP", "use-public-ip", Form::Flag),
    ("ROOT_VOLUME_SIZE", "root-volume-size", Form::Number),
    ("TAGS", "tags", Form::List),
];

/// Variables without a setting, each with the reason.
const LOST: &[(&str, &str)] = &[
    ("SSH_USERNAME", "a person does not log in to a pod VM; remove it"),
    ("AZURE_FEDERATED_TOKEN_FILE", STAYS),
    ("AZURE_AUTHORITY_HOST", STAYS),
];

/// Converts the variables of a cloud-api-adaptor for Azure; ignores all other variables.
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.azure", TABLE, variables);
    converted.keep_tags("tags", |key, value| ALPHABET.refusal(key, value));
    converted.lose_all(variables, LOST);
    converted
}
