//! Lists all parts of the controller and their settings. This is the only place that names a part.

use std::future::Future;
use std::sync::Arc;

use peerpod_base::config::Reader;
use peerpod_kube::lease::Term;
use peerpod_providers::Purpose;
use prometheus_client::registry::Registry;
use tokio::task::JoinSet;

use super::Context;
use super::config::ControllerConfig;
use super::vms::{Vms, VmsConfig, peerpods, sweep};
use crate::rollout::{self, RolloutConfig};
use crate::secrets::{self, SecretsConfig};

/// Settings of all parts.
pub(crate) struct ControllerSettings {
    pub(super) controller: ControllerConfig,
    provider: peerpod_providers::ProviderSettings,
    vms: VmsConfig,
    /// `None`: the chart installs the nodes.
    rollout: Option<RolloutConfig>,
    /// `None`: not served here.
    secrets: Option<SecretsConfig>,
}

impl ControllerSettings {
    /// Reads all keys. The reader collects mistakes.
    pub(crate) fn read(reader: &mut Reader) -> ControllerSettings {
        let context = peerpod_providers::Context {
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
        ControllerSettings {
            controller: ControllerConfig::read(reader),
            vms: VmsConfig::read(reader, &context.cluster_id),
            rollout: RolloutConfig::read(reader, provider.kind()),
            provider,
            secrets: SecretsConfig::read(reader),
        }
    }
}

/// Running parts: each returns its name. A part ends after a shutdown; if it ends earlier, the process ends with its
/// error.
pub(super) type Tasks = JoinSet<(&'static str, anyhow::Result<()>)>;

/// The parts that the settings ask for.
pub(super) struct Parts {
    vms: Arc<Vms>,
    rollout: Option<RolloutConfig>,
    secrets: Option<(SecretsConfig, secrets::SecretsMetrics)>,
}

impl Parts {
    /// Opens the provider for the VMs of this installation, and registers the metrics once.
    pub(super) async fn open(
        settings: ControllerSettings,
        installation: String,
        registry: &mut Registry,
    ) -> anyhow::Result<Parts> {
        let vms = Vms::open(settings.vms, settings.provider, installation, registry).await?;
        let secrets = settings.secrets.map(|config| (config, secrets::SecretsMetrics::register(registry)));
        Ok(Parts { vms, rollout: settings.rollout, secrets })
    }

    /// Starts the parts that run in every replica.
    pub(super) fn start(&self, context: &Context) -> Tasks {
        let mut tasks = Tasks::new();
        if let Some((config, metrics)) = self.secrets.clone() {
            spawn(&mut tasks, "secrets", secrets::run(config, metrics, context.clone()));
        }
        tasks
    }

    /// Starts the parts of the leader, for one term.
    pub(super) fn lead(&self, context: &Context, term: &Term) -> Tasks {
        let mut tasks = Tasks::new();
        spawn(&mut tasks, "peerpods", peerpods::run(self.vms.clone(), context.clone(), term.clone()));
        spawn(&mut tasks, "sweep", sweep::run(self.vms.clone(), context.clone(), term.clone()));
        if let Some(config) = self.rollout.clone() {
            spawn(&mut tasks, "rollout", rollout::run(config, context.clone(), term.clone()));
        }
        tasks
    }
}

fn spawn(
    tasks: &mut Tasks,
    name: &'static str,
    part: impl Future<Output = anyhow::Result<()>> + Send + 'static,
) {
    tasks.spawn(async move { (name, part.await) });
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::Sources;

    use super::*;

    fn read(words: &[&str]) -> Result<ControllerSettings, String> {
        let sources = Sources::from_process(words.iter().map(ToString::to_string), []);
        let mine = ["controller", "kubernetes", "paths", "provider", "cluster", "node", "secrets"];
        let mut reader = Reader::load(sources, &mine, &[]).map_err(|mistakes| mistakes.to_string())?;
        let settings = ControllerSettings::read(&mut reader);
        reader.finish().map_err(|mistakes| mistakes.to_string())?;
        Ok(settings)
    }

    #[test]
    fn by_default_a_lease_ends_before_another_may_begin_and_orphans_have_long_to_be_claimed() {
        let ControllerSettings { controller, vms, .. } = read(&[]).unwrap();
        let election = controller.election;
        assert!(election.renew_deadline < election.duration);
        assert!(election.retry * 2 < election.renew_deadline);
        assert!(vms.delete_orphans);
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
