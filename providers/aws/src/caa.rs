//! Converts the settings of a cloud-api-adaptor (its `peer-pods-cm` ConfigMap and secret) into settings of this
//! provider. Pure.
//!
//! Names and defaults: `aws/manager.go` of cloud-api-adaptor at `fbdde756`. Its flags have other names, which only its
//! command line reads; a deployment sets the variables.

use std::collections::BTreeMap;

/// Value of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Text.
    Text(String),
    /// List of texts.
    List(Vec<String>),
    /// Number.
    Number(u64),
    /// Boolean.
    Flag(bool),
}

/// Result of a conversion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// Keys below `provider.aws`, with their values.
    pub settings: BTreeMap<String, Value>,
    /// Variables that have no counterpart, or have a value without one, each with its remedy.
    pub lost: Vec<(String, String)>,
    /// All recognised variables, converted or not.
    pub known: Vec<String>,
}

enum Kind {
    Text,
    List,
    Flag,
    Number,
}

/// Variable, key of this provider, kind. [`convert`] handles the variables that need more than that.
const TABLE: &[(&str, &str, Kind)] = &[
    ("AWS_ACCESS_KEY_ID", "access-key-id", Kind::Text),
    ("AWS_SECRET_ACCESS_KEY", "secret-key", Kind::Text),
    ("AWS_SESSION_TOKEN", "session-token", Kind::Text),
    ("AWS_REGION", "region", Kind::Text),
    ("AWS_SUBNET_ID", "subnet-ids", Kind::List),
    ("AWS_SG_IDS", "security-group-ids", Kind::List),
    ("PODVM_AMI_ID", "image-id", Kind::Text),
    ("PODVM_INSTANCE_TYPE", "instance-type", Kind::Text),
    ("PODVM_INSTANCE_TYPES", "instance-types", Kind::List),
    ("SSH_KP_NAME", "key-name", Kind::Text),
    ("USE_PUBLIC_IP", "use-public-ip", Kind::Flag),
    ("ROOT_VOLUME_SIZE", "root-volume-size", Kind::Number),
    ("DISABLECVM", "disable-cvm", Kind::Flag),
    ("TAGS", "tags", Kind::List),
];

/// Variables that the AWS SDK reads itself; they must stay in the environment.
const OF_THE_SDK: &[&str] =
    &["AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_PROFILE", "AWS_DEFAULT_REGION"];

/// Converts the variables of a cloud-api-adaptor for AWS; ignores all other variables.
pub fn convert(variables: &BTreeMap<String, String>) -> Converted {
    let mut converted = Converted::default();
    let get = |name: &str| variables.get(name).map(|value| value.trim()).filter(|value| !value.is_empty());
    for (name, key, kind) in TABLE {
        if variables.contains_key(*name) {
            converted.known.push((*name).to_owned());
        }
        let Some(text) = get(name) else { continue };
        let value = match kind {
            Kind::Text => Some(Value::Text(text.to_owned())),
            Kind::List => Some(Value::List(list(text))),
            Kind::Flag => Some(Value::Flag(is_true(text))),
            Kind::Number => number(text, name, key, &mut converted.lost),
        };
        if let Some(value) = value {
            converted.settings.insert((*key).to_owned(), value);
        }
    }
    pairs(&mut converted);
    template(
        get("USE_PODVM_LAUNCHTEMPLATE").is_some_and(is_true),
        get("PODVM_LAUNCHTEMPLATE_NAME"),
        &mut converted,
    );
    for name in ["USE_PODVM_LAUNCHTEMPLATE", "PODVM_LAUNCHTEMPLATE_NAME"].iter().chain(OF_THE_SDK) {
        if variables.contains_key(*name) {
            converted.known.push((*name).to_owned());
        }
        if OF_THE_SDK.contains(name) && get(name).is_some() {
            let why = "the AWS SDK reads it from the environment; set it on our daemon, too".to_owned();
            converted.lost.push(((*name).to_owned(), why));
        }
    }
    converted
}

/// Parses a flag as the cloud-api-adaptor does: `1` and `true` are true, all other texts are false.
fn is_true(text: &str) -> bool {
    text == "1" || text.eq_ignore_ascii_case("true")
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Parses a number as the cloud-api-adaptor does, and reports the deviations. The cloud-api-adaptor silently reads
/// `30GiB` as 30 and `lots` as the default.
fn number(text: &str, name: &str, key: &str, lost: &mut Vec<(String, String)>) -> Option<Value> {
    let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
    let value = digits.parse().ok();
    if value.is_none() {
        lost.push((
            name.to_owned(),
            format!("`{text}` is no number and was ignored; set provider.aws.{key} if you want one"),
        ));
    } else if digits != text {
        lost.push((
            name.to_owned(),
            format!("`{text}` was read as {digits}, and is written so; check that this is intended"),
        ));
    }
    value.map(Value::Number)
}

/// Removes tags that AWS or this provider reserves, and entries that are not key=value; reports them as lost.
fn pairs(converted: &mut Converted) {
    let Some(Value::List(tags)) = converted.settings.get_mut("tags") else { return };
    let mut lost = Vec::new();
    tags.retain(|pair| {
        let why = match pair.split_once('=').map(|(key, _)| key.trim()) {
            None | Some("") => "is not key=value",
            Some("Name") => "is taken by us for the VM's name",
            Some(key) if key.starts_with("aws:") => "is taken by AWS",
            Some(key) if key.starts_with(crate::config::TAG_PREFIX) => "is taken by us",
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

fn template(is_used: bool, name: Option<&str>, converted: &mut Converted) {
    if !is_used {
        return;
    }
    // `kata` is the default of the cloud-api-adaptor.
    converted.settings.insert("launch-template".to_owned(), Value::Text(name.unwrap_or("kata").to_owned()));
    // The cloud-api-adaptor takes image, type, network and confidentiality from the template, although it requires an
    // image id.
    for (name, key) in
        [("PODVM_AMI_ID", "image-id"), ("AWS_SG_IDS", "security-group-ids"), ("SSH_KP_NAME", "key-name")]
    {
        if converted.settings.remove(key).is_some() {
            converted.lost.push((name.to_owned(), "the launch template sets it".to_owned()));
        }
    }
    let why = "a VM's type and subnet are chosen from instance-types and subnet-ids, not from the template; check both";
    converted.lost.push(("USE_PODVM_LAUNCHTEMPLATE".to_owned(), why.to_owned()));
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::{Reader, Sources};

    use super::*;
    use crate::AwsConfig;

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn read_back(converted: &Converted) -> Result<AwsConfig, String> {
        let text = |value: &Value| match value {
            Value::Text(text) => text.clone(),
            Value::List(list) => list.join(","),
            Value::Number(number) => number.to_string(),
            Value::Flag(flag) => flag.to_string(),
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
