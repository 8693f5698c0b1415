//! Converts the settings of a cloud-api-adaptor (its `peer-pods-cm` ConfigMap and secret) into settings of this
//! provider. Pure.
//!
//! Names and defaults: `azure/manager.go` of cloud-api-adaptor at `fbdde756`. Its flags have other names, which only its
//! command line reads; a deployment sets the variables.

use peerpod_provider_api::caa::{Converted, Form, Row, Value, Variables, get};

use crate::config::ALPHABET;

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
    ("AZURE_FEDERATED_TOKEN_FILE", "it is read from the environment; set it on our daemon, too"),
    ("AZURE_AUTHORITY_HOST", "it is read from the environment; set it on our daemon, too"),
];

/// Converts the variables of a cloud-api-adaptor for Azure; ignores all other variables.
pub fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.azure", TABLE, variables);
    pairs(&mut converted);
    for (name, why) in LOST {
        converted.recognise(variables, name);
        if get(variables, name).is_some() {
            converted.lose(name, *why);
        }
    }
    converted
}

/// Removes tags that Azure or this provider reserves, and entries that are not key=value; reports them as lost.
fn pairs(converted: &mut Converted) {
    let Some(Value::Array(tags)) = converted.settings.get_mut("tags") else { return };
    let mut lost = Vec::new();
    tags.retain(|pair| {
        let pair = pair.as_str().unwrap_or_default();
        let why = match pair.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            None | Some(("", _)) => "is not key=value; correct it".to_owned(),
            Some((key, value)) => match ALPHABET.refusal(key, value) {
                Some(why) => why,
                None => return true,
            },
        };
        lost.push(("TAGS".to_owned(), format!("`{pair}`: {why}")));
        false
    });
    if tags.is_empty() {
        converted.settings.remove("tags");
    }
    converted.lost.extend(lost);
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::{Reader, Sources};

    use super::*;
    use crate::AzureConfig;
    use crate::config::Credentials;

    const SUBNET: &str =
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/pods";
    const GROUP: &str =
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkSecurityGroups/n";

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn read_back(converted: &Converted) -> Result<AzureConfig, String> {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Array(list) => list.iter().map(|one| one.as_str().unwrap()).collect::<Vec<_>>().join(","),
            other => other.to_string(),
        };
        let env =
            |key: &str| format!("PEERPOD_PROVIDER_AZURE_{}", key.to_ascii_uppercase().replace('-', "_"));
        let env = converted.settings.iter().map(|(key, value)| (env(key), text(value)));
        let mut reader =
            Reader::load(Sources { env: env.collect(), ..Sources::default() }, &["provider"], &[]).unwrap();
        let config = AzureConfig::read(&mut reader, true);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn every_setting_of_a_full_config_map_arrives_and_is_read_without_a_mistake() {
        let converted = convert(&variables(&[
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
        ]));
        assert_eq!(converted.lost, []);
        assert_eq!(converted.known.len(), 16);
        let config = read_back(&converted).unwrap();
        assert_eq!(config.instance_types, ["Standard_D2s_v5", "Standard_D4s_v5"]);
        assert!(config.use_public_ip && config.secure_boot && !config.confidential);
        assert_eq!((config.root_gib, config.tags["cost"].as_str()), (40, "7"));
        assert_eq!((config.subnet.as_str(), config.security_group.as_deref()), (SUBNET, Some(GROUP)));
        assert!(matches!(&config.credentials, Credentials::Secret { tenant, .. } if tenant == "tenant"));
    }

    #[test]
    fn a_variable_without_a_setting_is_named_with_a_remedy() {
        let converted = convert(&variables(&[
            ("SSH_USERNAME", "peerpod"),
            ("AZURE_FEDERATED_TOKEN_FILE", "/var/run/secrets/azure/tokens/azure-identity-token"),
            ("AZURE_AUTHORITY_HOST", "https://login.microsoftonline.com/"),
            ("ROOT_VOLUME_SIZE", "30GiB"),
            ("TAGS", "odd,peerpod.node=y,microsoft.z=1,good=1"),
            ("AZURE_REGION", ""),
        ]));
        assert_eq!(converted.settings["tags"], serde_json::json!(["good=1"]));
        let lost = format!("{:?}", converted.lost);
        for part in [
            "SSH_USERNAME",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_AUTHORITY_HOST",
            "30GiB",
            "odd",
            "peerpod.node",
            "microsoft.z",
        ] {
            assert!(lost.contains(part), "{part} in {lost}");
        }
        assert_eq!(converted.known.len(), 6);
    }
}
