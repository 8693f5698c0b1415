//! Table of the variables for Alibaba Cloud.

use peerpod_provider_alibabacloud::config::ALPHABET;

use crate::{Converted, Form, Row, STAYS, Variables, get};

/// [`convert`] handles the variables that need more than that.
const TABLE: &[Row] = &[
    ("ALIBABACLOUD_ACCESS_KEY_ID", "access-key-id", Form::Text),
    ("ALIBABACLOUD_ACCESS_KEY_SECRET", "secret-key", Form::Text),
    ("ALIBABACLOUD_SECURITY_TOKEN", "security-token", Form::Text),
    ("REGION", "region", Form::Text),
    ("IMAGEID", "image-id", Form::Text),
    ("PODVM_INSTANCE_TYPE", "instance-type", Form::Text),
    ("VSWITCH_ID", "vswitch-ids", Form::List),
    ("SECURITY_GROUP_IDS", "security-group-ids", Form::List),
    ("KEYNAME", "key-name", Form::Text),
    ("USE_PUBLIC_IP", "use-public-ip", Form::Flag),
    ("SYSTEM_DISK_SIZE", "root-volume-size", Form::Number),
    ("DISABLECVM", "disable-cvm", Form::Flag),
    ("TAGS", "tags", Form::List),
];

/// Variables that the provider reads from its environment.
const OF_THE_ENVIRONMENT: [&str; 3] =
    ["ALIBABA_CLOUD_ROLE_ARN", "ALIBABA_CLOUD_OIDC_PROVIDER_ARN", "ALIBABA_CLOUD_OIDC_TOKEN_FILE"];

/// Default of the cloud-api-adaptor for the region and, by mistake, for the security groups.
const REGION: &str = "cn-beijing";
/// Default of the cloud-api-adaptor for the size of the system disk, in GiB.
const SYSTEM_DISK_SIZE: u64 = 40;

/// Converts the variables of a cloud-api-adaptor for Alibaba Cloud; ignores all other variables.
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.alibabacloud", TABLE, variables);
    converted.settings.entry("region".to_owned()).or_insert_with(|| REGION.into());
    converted.settings.entry("root-volume-size".to_owned()).or_insert_with(|| SYSTEM_DISK_SIZE.into());
    // Its container's start script gives this one as a flag, which counts more than a variable.
    converted.recognise(variables, "INSTANCE_TYPE");
    if let Some(kind) = get(variables, "INSTANCE_TYPE") {
        converted.settings.insert("instance-type".to_owned(), kind.into());
    }
    if get(variables, "SECURITY_GROUP_IDS") == Some(REGION) {
        converted.settings.remove("security-group-ids");
        let why =
            "`cn-beijing` is a default by mistake and no group; set provider.alibabacloud.security-group-ids";
        converted.lose("SECURITY_GROUP_IDS", why);
    }
    converted.keep_tags("tags", |key, value| ALPHABET.refusal(key, value));
    converted.lose_all(variables, &OF_THE_ENVIRONMENT.map(|name| (name, STAYS)));
    converted
}
