//! Reads the settings `controller.rollout…`.

use peerpod_base::config::{Reader, Sources};
use peerpod_providers::{Context, Purpose};

#[derive(Clone)]
pub(crate) struct RolloutConfig {
    pub(super) config_map: String,
    /// The common name of the webhook's registration and its Deployment; empty: there is none.
    pub(super) webhook: String,
    /// Environment variable of the provider's default instance type; `None`: this provider has no such setting.
    pub(super) instance_type: Option<String>,
}

impl RolloutConfig {
    /// Reads the keys; `None` when there are no manifests to roll out. `kind` is `provider.kind`.
    pub(crate) fn read(reader: &mut Reader, kind: &str) -> Option<RolloutConfig> {
        let config_map: Option<String> = reader.optional(
            "controller.rollout-config-map",
            "ConfigMap with the manifests of node and relay, which are rolled out for each PeerPodConfig; when not set, the \
             chart does it",
        );
        let webhook = reader.get(
            "controller.rollout-webhook",
            "",
            "name of the webhook's registration and Deployment, without which no PeerPodConfig is ready; none when not set",
        );
        let instance_type = instance_type(kind);
        Some(RolloutConfig { config_map: config_map?, webhook, instance_type })
    }
}

/// Returns the variable if the provider has the setting. The setting has the same name with all providers.
fn instance_type(kind: &str) -> Option<String> {
    let key = format!("provider.{kind}.instance-type");
    let flags = vec![("provider.kind".to_owned(), kind.to_owned())];
    let mut reader = Reader::load(Sources { flags, ..Sources::default() }, &["provider"], &[]).ok()?;
    let context = Context {
        state_dir: std::path::PathBuf::from("/"),
        cluster_id: String::new(),
        node_name: String::new(),
        purpose: Purpose::Create,
    };
    drop(peerpod_providers::read(&mut reader, &context));
    let has = reader.asked().iter().any(|setting| setting.key == key);
    has.then(|| peerpod_base::config::env_name(&key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_manifests_there_is_no_rollout() {
        let read = |flags: &[(&str, &str)]| {
            let flags = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            let mut reader =
                Reader::load(Sources { flags, ..Sources::default() }, &["controller"], &[]).unwrap();
            let config = RolloutConfig::read(&mut reader, "none");
            reader.finish().unwrap();
            config
        };
        assert!(read(&[]).is_none());
        let config = read(&[("controller.rollout-config-map", "m")]).unwrap();
        assert_eq!((config.config_map.as_str(), config.webhook.as_str()), ("m", ""));
        assert_eq!(config.instance_type, None);
    }

    /// For every provider of this build, the variable is one that the provider reads.
    #[test]
    fn the_instance_types_variable_is_the_providers_own() {
        for kind in peerpod_providers::kinds() {
            let Some(variable) = instance_type(kind) else { continue };
            assert_eq!(variable, format!("PEERPOD_PROVIDER_{}_INSTANCE_TYPE", kind.to_uppercase()));
        }
    }
}
