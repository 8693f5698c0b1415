//! Lists all parts of the controller and their settings. This is the only place that names a part: a field, a line in
//! [`Settings::read`], a line in [`Settings::parts`].

use peerpod_base::config::Reader;
use peerpod_providers::{Context, Purpose};
use prometheus_client::registry::Registry;

use super::Part;
use super::config::ControllerConfig;
use super::vms::{Vms, VmsConfig, peerpods, sweep};
use crate::rollout::{self, RolloutConfig};
use crate::secrets::{self, SecretsConfig};

/// Settings of all parts.
pub struct Settings {
    /// Settings of the whole process.
    pub controller: ControllerConfig,
    /// Section `provider`: the provider of the VMs.
    pub provider: peerpod_providers::Settings,
    /// Management of the VMs.
    pub vms: VmsConfig,
    /// The rollout; `None`: the chart installs the nodes.
    pub rollout: Option<RolloutConfig>,
    /// Section `secrets`: the nodes' pull secrets; `None`: not served here.
    pub secrets: Option<SecretsConfig>,
}

impl Settings {
    /// Reads all keys. The reader collects mistakes.
    pub fn read(reader: &mut Reader) -> Settings {
        let context = Context {
            state_dir: reader.get("paths.state-dir", "/var/lib/peerpod", "folder of a provider's state"),
            cluster_id: reader.get(
                "node.cluster-id",
                "peerpod",
                "name of this cluster in the cloud's account: marks its VMs; the same as in the nodes' \
                 settings",
            ),
            // Empty: the VMs of all nodes.
            node_name: String::new(),
            purpose: Purpose::Collect,
        };
        let provider = peerpod_providers::read(reader, &context);
        Settings {
            controller: ControllerConfig::read(reader),
            vms: VmsConfig::read(reader, &context.cluster_id),
            rollout: RolloutConfig::read(reader, provider.kind()),
            provider,
            secrets: SecretsConfig::read(reader),
        }
    }

    /// Returns the parts to run, and registers the metrics once.
    ///
    /// # Errors
    /// A part does not find something that it needs.
    pub async fn parts(self, registry: &mut Registry) -> anyhow::Result<Vec<Part>> {
        let vms = Vms::open(self.vms, self.provider, registry).await?;
        let mut parts = vec![peerpods::part(vms.clone()), sweep::part(vms)];
        parts.extend(self.rollout.map(rollout::part));
        if let Some(config) = self.secrets {
            parts.push(secrets::part(config, secrets::Metrics::register(registry)));
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::Sources;

    use super::*;
    use crate::controller::vms::Orphans;

    fn read(words: &[&str]) -> Result<Settings, String> {
        let sources = Sources::from_process(words.iter().map(ToString::to_string), []);
        let mine = ["controller", "kubernetes", "paths", "provider", "cluster", "node", "secrets"];
        let mut reader = Reader::load(sources, &mine, &[]).map_err(|mistakes| mistakes.to_string())?;
        let settings = Settings::read(&mut reader);
        reader.finish().map_err(|mistakes| mistakes.to_string())?;
        Ok(settings)
    }

    #[test]
    fn by_default_a_lease_ends_before_another_may_begin_and_orphans_have_long_to_be_claimed() {
        let Settings { controller, vms, .. } = read(&[]).unwrap();
        assert!(controller.lease_renew_deadline < controller.lease_duration);
        assert!(controller.lease_retry * 2 < controller.lease_renew_deadline);
        assert_eq!(vms.orphans, Orphans::Delete);
        assert!(vms.orphan_grace >= std::time::Duration::from_secs(600));
        assert_eq!(vms.concurrency, 50);
    }

    #[test]
    fn unknown_words_and_removed_keys_are_reported_at_once() {
        let told = read(&["--controller.lease-duration=15s", "--controller.orphans=perhaps"]).err().unwrap();
        for part in ["constant LEASE_DURATION is 15s", "controller.orphans"] {
            assert!(told.contains(part), "{part} in {told}");
        }
    }
}
