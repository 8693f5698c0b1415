//! All parts of the controller, and their settings. The one place where a part is plugged in: a field, a line in
//! [`Settings::read`], a line in [`Settings::parts`].

use peerpod_base::config::Reader;
use peerpod_providers::{Context, Purpose};
use prometheus_client::registry::Registry;

use super::{
    Part,
    config::ControllerConfig,
    vms::{Vms, VmsConfig, peerpods, sweep},
};
use crate::secrets::{self, SecretsConfig};

/// What all parts are told.
pub struct Settings {
    /// The process as a whole.
    pub controller: ControllerConfig,
    /// Section `provider`: who has the VMs.
    pub provider: peerpod_providers::Settings,
    /// How VMs are looked after.
    pub vms: VmsConfig,
    /// Section `secrets`: nodes' pull secrets; `None`: not given here.
    pub secrets: Option<SecretsConfig>,
}

impl Settings {
    /// Asks for all keys. Mistakes stay with the reader.
    pub fn read(reader: &mut Reader) -> Settings {
        let context = Context {
            state_dir: reader.get("paths.state-dir", "/var/lib/peerpod", "folder of what a provider keeps"),
            cluster_id: reader.get(
                "node.cluster-id",
                "peerpod",
                "name of this cluster in the cloud's account: marks its VMs; the same as the nodes'",
            ),
            // The VMs of all nodes.
            node_name: String::new(),
            purpose: Purpose::Collect,
        };
        Settings {
            controller: ControllerConfig::read(reader),
            vms: VmsConfig::read(reader, &context.cluster_id),
            provider: peerpod_providers::read(reader, &context),
            secrets: SecretsConfig::read(reader),
        }
    }

    /// What runs. Metrics are registered here, once.
    ///
    /// # Errors
    /// What a part needs and does not find.
    pub async fn parts(self, registry: &mut Registry) -> anyhow::Result<Vec<Part>> {
        let vms = Vms::open(self.vms, self.provider, registry).await?;
        let mut parts = vec![peerpods::part(vms.clone()), sweep::part(vms)];
        if let Some(config) = self.secrets {
            parts.push(secrets::part(config, secrets::Metrics::register(registry)));
        }
        Ok(parts)
    }
}
