//! Converts the settings of a cloud-api-adaptor (its `peer-pods-cm` ConfigMap and secret) into settings of this
//! provider. Pure.
//!
//! Names and defaults: `aws/manager.go` of cloud-api-adaptor at `fbdde756`. Its flags have other names, which only its
//! command line reads; a deployment sets the variables.

use peerpod_provider_api::caa::{Converted, Form, Row, Value, Variables, get, is_true};
use peerpod_provider_cloud::marks::PREFIX;

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
const OF_THE_SDK: &[&str] =
    &["AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_PROFILE", "AWS_DEFAULT_REGION"];

/// Converts the variables of a cloud-api-adaptor for AWS; ignores all other variables.
pub fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.aws", TABLE, variables);
    pairs(&mut converted);
    for name in ["USE_PODVM_LAUNCHTEMPLATE", "PODVM_LAUNCHTEMPLATE_NAME"].iter().chain(OF_THE_SDK) {
        converted.recognise(variables, name);
    }
    if get(variables, "USE_PODVM_LAUNCHTEMPLATE").is_some_and(is_true) {
        template(get(variables, "PODVM_LAUNCHTEMPLATE_NAME"), &mut converted);
    }
    for name in OF_THE_SDK.iter().filter(|name| get(variables, name).is_some()) {
        converted.lose(name, "the AWS SDK reads it from the environment; set it on our daemon, too");
    }
    converted
}

/// Removes tags that AWS or this provider reserves, and entries that are not key=value; reports them as lost.
fn pairs(converted: &mut Converted) {
    let Some(Value::Array(tags)) = converted.settings.get_mut("tags") else { return };
    let mut lost = Vec::new();
    tags.retain(|pair| {
        let pair = pair.as_str().unwrap_or_default();
        let why = match pair.split_once('=').map(|(key, _)| key.trim()) {
            None | Some("") => "is not key=value",
            Some("Name") => "is taken by us for the VM's name",
            Some(key) if key.starts_with("aws:") => "is taken by AWS",
            Some(key) if key.starts_with(PREFIX) => "is taken by us",
            Some(_) => return true,
        };
        lost.push(("TAGS".to_owned(), format!("`{pair}` {why}; choose another")));
        false
    });
    if tags.is_empty() {
        converted.settings.remove("tags");
    }
    converted.lost.extend(lost);
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

#[cfg(test)]
mod tests {
    use peerpod_base::config::{Reader, Sources};

    use super::*;
    use crate::AwsConfig;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn read_back(converted: &Converted) -> Result<AwsConfig, String> {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Array(list) => list.iter().map(|one| one.as_str().unwrap()).collect::<Vec<_>>().join(","),
            other => other.to_string(),
        };
        let env = |key: &str| format!("PEERPOD_PROVIDER_AWS_{}", key.to_ascii_uppercase().replace('-', "_"));
        let env = converted.settings.iter().map(|(key, value)| (env(key), text(value)));
        let mut reader =
            Reader::load(Sources { env: env.collect(), ..Sources::default() }, &["provider"], &[]).unwrap();
        let config = AwsConfig::read(&mut reader, true);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn every_setting_of_a_full_config_map_arrives_and_is_read_without_a_mistake() {
        let converted = convert(&variables(&[
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
        ]));
        assert_eq!(converted.lost, []);
        assert_eq!(converted.known.len(), 16);
        let config = read_back(&converted).unwrap();
        assert_eq!(config.instance_types, ["m6a.large", "c6a.large"]);
        assert!(config.use_public_ip && !config.confidential);
        assert_eq!((config.root.size_gib, config.tags["cost"].as_str()), (40, "7"));
        assert_eq!(config.security_group_ids.len(), 2);
        assert!(config.launch_template.is_none());
    }

    #[test]
    fn a_variable_without_a_setting_is_named_with_a_remedy() {
        let converted = convert(&variables(&[
            ("PODVM_AMI_ID", "ami-0123456789abcdef0"),
            ("USE_PODVM_LAUNCHTEMPLATE", "true"),
            ("ROOT_VOLUME_SIZE", "30GiB"),
            ("TAGS", "Name=x,odd,peerpod.node=y,aws:z=1"),
            ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"),
            ("AWS_REGION", ""),
        ]));
        let config = read_back(&converted).unwrap();
        assert_eq!(config.launch_template.as_deref(), Some("kata"));
        assert_eq!(config.root.size_gib, 30);
        assert!(config.tags.is_empty() && config.region.is_none());
        let lost = format!("{:?}", converted.lost);
        for part in [
            "30GiB",
            "Name=x",
            "odd",
            "peerpod.node=y",
            "aws:z=1",
            "AWS_ROLE_ARN",
            "PODVM_AMI_ID",
            "check both",
        ] {
            assert!(lost.contains(part), "{part} in {lost}");
        }
    }
}
