//! Watches PeerPodConfigs and their DaemonSets, applies the wanted objects and writes the status.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Secret};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::DynamicObject;
use kube::discovery::ApiResource;
use kube::runtime::controller::{self, Action, Controller};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use peerpod_kube::client::{self, within};
use peerpod_kube::crds::PeerPodConfig;
use peerpod_kube::lease::{NotHeld, Term};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::select;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use super::manifest::{self, Manifests, daemon_sets, node_selector};
use super::status::{Progress, Verdict, status, verdict};
use super::{MANAGER, RolloutConfig};
use crate::controller::Context;

/// Interval at which manifests and settings are read again, even without an event.
const AGAIN: Duration = Duration::from_secs(15);
/// Delay after a failure.
const RETRY: Duration = Duration::from_secs(5);
/// Duration of one watch in seconds, which bounds the cost of a connection that died unnoticed.
const WATCH: u32 = 60;
/// Debounce: objects change together and cause one reconciliation.
const TOGETHER: Duration = Duration::from_millis(200);

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Api(#[from] client::Error),
    #[error(transparent)]
    NotHeld(#[from] NotHeld),
    /// A prerequisite is missing: reason in one word, and the cause.
    #[error("{1}")]
    Not(&'static str, String),
}

pub(super) struct Work {
    pub(super) config: RolloutConfig,
    pub(super) context: Context,
    pub(super) term: Term,
    /// Whether the log has mentioned that the RuntimeClass of another owner stays.
    pub(super) said: AtomicBool,
}

pub(crate) async fn run(config: RolloutConfig, context: Context, term: Term) -> anyhow::Result<()> {
    let namespace = context.namespace.clone();
    let configs: Api<PeerPodConfig> = Api::namespaced(context.client.clone(), &namespace);
    let sets: Api<DaemonSet> = Api::namespaced(context.client.clone(), &namespace);
    let of_ours = watcher::Config::default().labels(manifest::LABEL).timeout(WATCH);
    let ready = context.ready.clone();
    let work = Arc::new(Work { config, context, term, said: AtomicBool::default() });
    let mut done = std::pin::pin!(
        Controller::new(configs, watcher::Config::default().timeout(WATCH))
            .owns(sets, of_ours)
            .with_config(controller::Config::default().debounce(TOGETHER))
            .run(reconcile, again, Arc::clone(&work))
    );
    // The deletion of the last PeerPodConfig causes no reconciliation.
    let mut inspect = interval(AGAIN);
    inspect.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let one = select! {
            one = done.next() => one,
            _ = inspect.tick() => {
                if let Err(error) = work.withdraw_if_none().await {
                    warn!(%error, "unwanted objects may still exist; trying again");
                }
                continue;
            }
        };
        match one {
            None => return Ok(()),
            Some(Err(controller::Error::QueueError(error))) => {
                let error = client::explain(&error);
                warn!(error, "PeerPodConfigs cannot be followed");
                ready.not_ready("rollout", &format!("PeerPodConfigs cannot be followed: {error}"));
            }
            // The status of a PeerPodConfig shows its own failures.
            Some(Ok(_) | Err(_)) => ready.ready("rollout"),
        }
    }
}

fn again(config: Arc<PeerPodConfig>, error: &Error, _: Arc<Work>) -> Action {
    warn!(config = config.name_any(), %error, "PeerPodConfig not rolled out; trying again");
    Action::requeue(RETRY)
}

async fn reconcile(config: Arc<PeerPodConfig>, work: Arc<Work>) -> Result<Action, Error> {
    if config.metadata.deletion_timestamp.is_some() {
        // Kubernetes garbage-collects the objects that it owns.
        return Ok(Action::await_change());
    }
    let verdict = match work.apply(&config).await {
        Ok(verdict) => verdict,
        Err(Error::Not(reason, why)) => (false, reason, why),
        // A refusal by the API server goes to the owner's status; an unreachable API server does not.
        Err(Error::Api(error)) if error.status().is_some() => (false, "ApplyFailed", error.to_string()),
        Err(error) => return Err(error),
    };
    work.say(&config, verdict).await?;
    Ok(Action::requeue(AGAIN))
}

impl Work {
    pub(super) fn ours<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client(), &self.context.namespace)
    }

    pub(super) fn client(&self) -> Client {
        self.context.client.clone()
    }

    /// Applies all objects for this PeerPodConfig and judges their progress.
    async fn apply(&self, config: &PeerPodConfig) -> Result<Verdict, Error> {
        let manifests = self.manifests().await?;
        let all: Api<PeerPodConfig> = self.ours();
        let all = within("list PeerPodConfigs", all.list(&ListParams::default())).await?.items;
        self.check_taken(config, &all).await?;
        let settings = self.settings(config).await?;
        let [node, relay] = daemon_sets(&manifests, config, self.config.instance_type.as_deref(), &settings)
            .map_err(|why| Error::Not("Invalid", why))?;
        let live: Vec<&PeerPodConfig> =
            all.iter().filter(|one| one.metadata.deletion_timestamp.is_none()).collect();
        let (webhook, foreign_class) = self.offer(&manifests, &live).await?;
        // The relay comes first: the node is not ready without it.
        let relay = self.put::<DaemonSet>(config.namespace(), &relay).await?;
        let node = self.put::<DaemonSet>(config.namespace(), &node).await?;
        let (ready, reason, mut text) = verdict(progress(&node), progress(&relay), webhook);
        if let Some(name) = foreign_class {
            text += &format!("; RuntimeClass {name} has another owner, and stays as it is");
        }
        Ok((ready, reason, text))
    }

    /// Returns the chart's manifests; [`Error::Not`]: there are none.
    pub(super) async fn manifests(&self) -> Result<Manifests, Error> {
        let name = &self.config.config_map;
        let maps: Api<ConfigMap> = self.ours();
        let found = within(format!("get ConfigMap {name}"), maps.get_opt(name)).await?;
        let read = match found {
            None => Err(format!("there is no ConfigMap {name}; install the chart with rollout.mode: config")),
            Some(map) => Manifests::read(&map.data.unwrap_or_default())
                .map_err(|why| format!("ConfigMap {name}: {why}")),
        };
        read.map_err(|why| Error::Not("ManifestsMissing", why))
    }

    /// Fails if an older PeerPodConfig selects one of the same nodes: a node can have only one relay.
    async fn check_taken(&self, config: &PeerPodConfig, all: &[PeerPodConfig]) -> Result<(), Error> {
        let age = |one: &PeerPodConfig| (one.creation_timestamp(), one.name_any());
        let older: Vec<&PeerPodConfig> = all
            .iter()
            .filter(|one| one.uid() != config.uid() && age(one) < age(config))
            .filter(|one| one.metadata.deletion_timestamp.is_none())
            .collect();
        if older.is_empty() {
            return Ok(());
        }
        let mine = ListParams::default().labels(&selector(&node_selector(config)));
        let nodes: Api<Node> = Api::all(self.client());
        for node in within("list nodes", nodes.list_metadata(&mine)).await?.items {
            let has = |(key, value): (&String, &String)| node.labels().get(key) == Some(value);
            if let Some(other) = older.iter().find(|one| node_selector(one).iter().all(has)) {
                let (node, other) = (node.name_any(), other.name_any());
                let why = format!(
                    "node {node} belongs to PeerPodConfig {other}, which is older; change a nodeSelector so \
                     that no node has both"
                );
                return Err(Error::Not("NodesTaken", why));
            }
        }
        Ok(())
    }

    /// Returns the versions of the settings in ConfigMap and Secret; [`Error::Not`]: they cannot be used.
    async fn settings(&self, config: &PeerPodConfig) -> Result<String, Error> {
        let (map, secret) = (&config.spec.config_map_name, &config.spec.cloud_secret_name);
        let maps: Api<ConfigMap> = self.ours();
        let found = within(format!("get ConfigMap {map}"), maps.get_opt(map)).await?;
        if found.as_ref().and_then(|map| map.data.as_ref()).is_some_and(manifest::is_foreign) {
            let why = format!(
                "ConfigMap {map} has the settings of a cloud-api-adaptor, which Peerpod does not read; \
                 `peerpod config convert-caa` converts them to variables PEERPOD_… or to the chart's `config`"
            );
            return Err(Error::Not("ForeignSettings", why));
        }
        let secrets: Api<Secret> = self.ours();
        // Reads the Secret's version alone, never its contents.
        let secret = within(format!("get Secret {secret}"), secrets.get_metadata_opt(secret)).await?;
        let none = || "none".to_owned();
        let map = found.as_ref().map_or_else(none, digest);
        let secret = secret.and_then(|secret| secret.resource_version()).unwrap_or_else(none);
        Ok(format!("{map}/{secret}"))
    }

    /// Applies an object by server-side apply and returns the result.
    pub(super) async fn put<K>(
        &self,
        namespace: Option<String>,
        object: &Value,
    ) -> Result<DynamicObject, Error>
    where
        K: Resource<DynamicType = ()>,
    {
        let resource = ApiResource::erase::<K>(&());
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(self.client(), &namespace, &resource),
            None => Api::all_with(self.client(), &resource),
        };
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        self.term.check()?;
        let apply = PatchParams::apply(MANAGER).force();
        let what = format!("apply {} {name}", resource.kind);
        Ok(within(what, api.patch(name, &apply, &Patch::Apply(object))).await?)
    }

    async fn say(&self, config: &PeerPodConfig, verdict: Verdict) -> Result<(), Error> {
        let status = status(config, verdict, Timestamp::now());
        if config.status.as_ref() == Some(&status) {
            return Ok(());
        }
        let name = config.name_any();
        if let [ready] = status.conditions.as_slice() {
            info!(
                config = name,
                ready = ready.status,
                reason = ready.reason,
                message = ready.message,
                "PeerPodConfig"
            );
        }
        self.term.check()?;
        let object = json!({
            "apiVersion": PeerPodConfig::api_version(&()), "kind": PeerPodConfig::kind(&()),
            "metadata": {"name": name}, "status": status,
        });
        let configs: Api<PeerPodConfig> = self.ours();
        let apply = PatchParams::apply(MANAGER).force();
        let object = Patch::Apply(&object);
        within(format!("status of PeerPodConfig {name}"), configs.patch_status(&name, &apply, &object))
            .await?;
        Ok(())
    }
}

/// Hashes the contents alone: a new label is no reason for new pods.
fn digest(map: &ConfigMap) -> String {
    let texts = map.data.iter().flatten().map(|(name, text)| (name, text.as_bytes()));
    let bytes = map.binary_data.iter().flatten().map(|(name, bytes)| (name, bytes.0.as_slice()));
    let mut hash = Sha256::new();
    for (name, value) in texts.chain(bytes) {
        for part in [name.as_bytes(), value] {
            hash.update(part.len().to_le_bytes());
            hash.update(part);
        }
    }
    hex::encode(&hash.finalize()[..8])
}

fn selector(labels: &BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

fn progress(set: &DynamicObject) -> Progress {
    let status = &set.data["status"];
    let number =
        |name: &str| status[name].as_i64().and_then(|number| i32::try_from(number).ok()).unwrap_or(0);
    Progress {
        wanted: number("desiredNumberScheduled"),
        ready: number("numberReady"),
        updated: number("updatedNumberScheduled"),
        seen: status["observedGeneration"].as_i64() == set.metadata.generation,
    }
}
