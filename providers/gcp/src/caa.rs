//! Converts the settings of a cloud-api-adaptor (its `peer-pods-cm` ConfigMap and secret) into settings of this
//! provider. Pure.
//!
//! Names and defaults: `gcp/manager.go` of cloud-api-adaptor at `fbdde756`. Its flags have other names, which only its
//! command line reads; a deployment sets the variables.

use peerpod_provider_api::Confidential;
use peerpod_provider_api::caa::{Converted, Form, Row, Value, Variables, get, is_true};

/// [`convert`] handles the variables that need more than that.
const TABLE: &[Row] = &[
    ("GCP_CREDENTIALS", "credentials", Form::Text),
    ("GCP_PROJECT_ID", "project-id", Form::Text),
    ("GCP_ZONE", "zones", Form::List),
    ("PODVM_IMAGE_NAME", "image", Form::Text),
    ("GCP_MACHINE_TYPE", "instance-type", Form::Text),
    ("GCP_INSTANCE_TYPES", "instance-types", Form::List),
    ("GCP_NETWORK", "network", Form::Text),
    ("GCP_SUBNETWORK", "subnetwork", Form::Text),
    ("GCP_DISK_TYPE", "root-volume-type", Form::Text),
    ("ROOT_VOLUME_SIZE", "root-volume-size", Form::Number),
    ("USE_PUBLIC_IP", "use-public-ip", Form::Flag),
    ("TAGS", "resource-manager-tags", Form::List),
];

/// Defaults of the cloud-api-adaptor that are not those of this provider.
const DEFAULTS: &[(&str, &str)] = &[("instance-type", "e2-medium"), ("root-volume-type", "pd-standard")];

/// Variable with a path, which stays in the environment.
const CREDENTIALS_FILE: &str = "GOOGLE_APPLICATION_CREDENTIALS";

/// Converts the variables of a cloud-api-adaptor for Google Cloud; ignores all other variables.
pub fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.gcp", TABLE, variables);
    for (key, default) in DEFAULTS {
        converted.settings.entry((*key).to_owned()).or_insert_with(|| (*default).into());
    }
    tags(&mut converted);
    confidential(&mut converted, variables);
    converted.recognise(variables, CREDENTIALS_FILE);
    if get(variables, CREDENTIALS_FILE).is_some() {
        converted.lose(CREDENTIALS_FILE, "it is read from the environment; set it on our daemon, too");
    }
    converted
}

/// Removes the tags that are not key=value; reports them as lost.
fn tags(converted: &mut Converted) {
    let Some(Value::Array(tags)) = converted.settings.get_mut("resource-manager-tags") else { return };
    let is_pair = |pair: &Value| {
        let pair = pair.as_str().and_then(|pair| pair.split_once('='));
        pair.is_some_and(|(key, value)| !key.trim().is_empty() && !value.trim().is_empty())
    };
    let (pairs, others): (Vec<_>, Vec<_>) = std::mem::take(tags).into_iter().partition(is_pair);
    *tags = pairs;
    if tags.is_empty() {
        converted.settings.remove("resource-manager-tags");
    }
    for other in others {
        converted.lose("TAGS", format!("{other} is not key=value; correct it"));
    }
}

/// Converts the technology, which the cloud-api-adaptor ignores for plain VMs and demands for others.
fn confidential(converted: &mut Converted, variables: &Variables) {
    for name in ["DISABLECVM", "GCP_CONFIDENTIAL_TYPE"] {
        converted.recognise(variables, name);
    }
    if get(variables, "DISABLECVM").is_some_and(is_true) {
        converted.settings.insert("confidential".to_owned(), "none".into());
        return;
    }
    let wanted = get(variables, "GCP_CONFIDENTIAL_TYPE").map(str::to_ascii_lowercase);
    let technology = wanted.as_deref().and_then(Confidential::from_word);
    let technology = technology.filter(|one| *one != Confidential::SecureExecution);
    match (technology, wanted) {
        (Some(technology), _) => {
            converted.settings.insert("confidential".to_owned(), technology.word().into());
        }
        (None, Some(wanted)) => {
            converted.lose(
                "GCP_CONFIDENTIAL_TYPE",
                format!("`{wanted}` is none of SEV, SEV_SNP and TDX; choose one"),
            );
        }
        (None, None) => converted.lose(
            "GCP_CONFIDENTIAL_TYPE",
            "without it no VM was made; set provider.gcp.confidential to none, or to sev, sev_snp or tdx and \
             instance-type to one that has it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::{Reader, Sources};

    use super::*;
    use crate::GcpConfig;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn read_back(converted: &Converted) -> Result<GcpConfig, String> {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Array(list) => list.iter().map(|one| one.as_str().unwrap()).collect::<Vec<_>>().join(","),
            other => other.to_string(),
        };
        let env = |key: &str| format!("PEERPOD_PROVIDER_GCP_{}", key.to_ascii_uppercase().replace('-', "_"));
        let env = converted.settings.iter().map(|(key, value)| (env(key), text(value)));
        let mut reader =
            Reader::load(Sources { env: env.collect(), ..Sources::default() }, &["provider"], &[]).unwrap();
        let config = GcpConfig::read(&mut reader, true);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn every_setting_of_a_full_config_map_arrives_and_is_read_without_a_mistake() {
        let converted = convert(&variables(&[
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
        ]));
        assert_eq!(converted.lost, []);
        assert_eq!(converted.known.len(), 14);
        let config = read_back(&converted).unwrap();
        assert_eq!(config.instance_types, ["n2d-standard-4", "n2d-standard-8"]);
        assert_eq!((config.zones.len(), config.root.size_gib, config.root.kind.as_str()), (1, 40, "pd-ssd"));
        assert!(config.use_public_ip && config.confidential == Some(Confidential::SevSnp));
        assert_eq!(config.resource_manager_tags["project-1/env"], "prod");
        assert_eq!(config.nic.network.as_deref(), Some("projects/project-1/global/networks/default"));
    }

    #[test]
    fn a_variable_without_a_setting_is_named_with_a_remedy() {
        let least =
            [("GCP_PROJECT_ID", "project-1"), ("GCP_ZONE", "us-central1-a"), ("PODVM_IMAGE_NAME", "podvm")];
        let odd = [
            ("ROOT_VOLUME_SIZE", "30GiB"),
            ("TAGS", "odd,=x"),
            ("GOOGLE_APPLICATION_CREDENTIALS", "/key.json"),
            ("GCP_CONFIDENTIAL_TYPE", ""),
        ];
        let converted = convert(&variables(&[&least[..], &odd[..]].concat()));
        let config = read_back(&converted).unwrap();
        assert_eq!((config.root.size_gib, config.root.kind.as_str()), (30, "pd-standard"));
        assert_eq!(config.instance_types, ["e2-medium"], "the default of the cloud-api-adaptor");
        assert!(config.resource_manager_tags.is_empty());
        let lost = format!("{:?}", converted.lost);
        for part in ["30GiB", "odd", "=x", "set it on our daemon", "without it no VM was made"] {
            assert!(lost.contains(part), "{part} in {lost}");
        }
        let plain = convert(&variables(&[&least[..], &[("DISABLECVM", "true")]].concat()));
        assert_eq!(plain.lost, []);
        assert!(read_back(&plain).unwrap().confidential.is_none());
        let other = convert(&variables(&[&least[..], &[("GCP_CONFIDENTIAL_TYPE", "SGX")]].concat()));
        assert!(format!("{:?}", other.lost).contains("none of SEV"), "{:?}", other.lost);
    }
}
