//! Table of the variables for AWS.

use peerpod_provider_aws::config::ALPHABET;

use crate::{Converted, Form, Row, STAYS, Variables, get, is_true};

/// [`convert`] handles the variables that need more than that.
const TABLE: &[Row] = &[
    ("AWS_ACCESS_KEY_ID", "access-key-id", Form::Text),
    ("AWS_SECRET_ACCESS_KEY", "secret-key", Form::Text),
    ("AWS_SESSION_TOKEN", "session-token", Form::Text),
    ("AWS_REGION", "region", Form::Text),
    ("AWS_SUBNET_ID", "subnet-ids", Form::List),
    ("AWS_SG_IDS", "security-group-ids", Form::List),
    ("PODVM_AMI_ID", "image-id", Form::Text),
    ("PODVM_INSTANCE_TYPE", "instance-type", Form::Text),
    ("PODVM_INSTANCE_TYPES", "instance-types", Form::List),
    ("SSH_KP_NAME", "key-name", Form::Text),
    ("USE_PUBLIC_IP", "use-public-ip", Form::Flag),
    ("ROOT_VOLUME_SIZE", "root-volume-size", Form::Number),
    ("DISABLECVM", "disable-cvm", Form::Flag),
    ("TAGS", "tags", Form::List),
];

/// Variables that the AWS SDK reads itself; they must stay in the environment.
const OF_THE_SDK: [&str; 4] =
    ["AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_PROFILE", "AWS_DEFAULT_REGION"];

/// Converts the variables of a cloud-api-adaptor for AWS; ignores all other variables.
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.aws", TABLE, variables);
    converted.keep_tags("tags", |key, value| ALPHABET.refusal(key, value));
    for name in ["USE_PODVM_LAUNCHTEMPLATE", "PODVM_LAUNCHTEMPLATE_NAME"] {
        converted.recognise(variables, name);
    }
    if get(variables, "USE_PODVM_LAUNCHTEMPLATE").is_some_and(is_true) {
        template(get(variables, "PODVM_LAUNCHTEMPLATE_NAME"), &mut converted);
    }
    converted.lose_all(variables, &OF_THE_SDK.map(|name| (name, STAYS)));
    converted
}

fn template(name: Option<&str>, converted: &mut Converted) {
    // `kata` is the default of the cloud-api-adaptor.
    converted.settings.insert("launch-template".to_owned(), name.unwrap_or("kata").into());
    // The cloud-api-adaptor takes image, type, network and confidentiality from the template, although it requires an
    // image id.
    for (name, key) in
        [("PODVM_AMI_ID", "image-id"), ("AWS_SG_IDS", "security-group-ids"), ("SSH_KP_NAME", "key-name")]
    {
        if converted.settings.remove(key).is_some() {
            converted.lose(name, "the launch template sets it");
        }
    }
    let why = "a VM's type and subnet are chosen from instance-types and subnet-ids, not from the template; check both";
    converted.lose("USE_PODVM_LAUNCHTEMPLATE", why);
}
