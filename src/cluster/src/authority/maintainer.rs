//! Maintains the CA in a Secret and publishes its certificates where clients read them.
//!
//! Any number of processes may do this at once: the Secret is created once, and a change succeeds only with the
//! Secret's newest version. A process that was second reads again. May touch: that Secret, and the object named by
//! [`Published`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use peerpod_kube::client::{self, within};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::{Policy, Signer, State};

/// Key in the Secret's data.
const STATE: &str = "authority.json";
/// Key in the Secret and in the ConfigMap, for people and for mounts.
pub const BUNDLE: &str = "ca.crt";
/// Field manager of the ConfigMap.
const MANAGER: &str = "peerpod-authority";
/// Longest interval between reads of the Secret; the settle time of the policy also limits it.
const EVERY: Duration = Duration::from_secs(10);
/// Attempts against concurrent writers before the next interval.
const TRIES: usize = 5;

/// Reasons why the CA is not maintained.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server failed.
    #[error(transparent)]
    Api(#[from] client::Error),
    /// The CA itself failed.
    #[error(transparent)]
    Authority(#[from] super::Error),
    /// The object to publish the CA in does not exist.
    #[error("{0}")]
    Unpublished(String),
    /// Other writers were first each time.
    #[error("Secret {0} is changed all the time by others; looking again later")]
    Busy(String),
}

/// Object in which clients find the CA.
#[derive(Clone, Debug)]
pub enum Published {
    /// A ConfigMap of this name, key `ca.crt`, which nodes mount.
    ConfigMap(String),
    /// The `caBundle` of every webhook in the MutatingWebhookConfiguration of this name.
    Webhook(String),
}

impl fmt::Display for Published {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Published::ConfigMap(name) => write!(f, "ConfigMap {name}"),
            Published::Webhook(name) => write!(f, "MutatingWebhookConfiguration {name}"),
        }
    }
}

/// Maintains one CA.
pub struct CaMaintainer {
    /// Client of the API server.
    pub client: Client,
    /// Namespace of the Secret and the ConfigMap.
    pub namespace: String,
    /// Name of the Secret.
    pub secret: String,
    /// Object in which the CAs are published.
    pub published: Published,
    /// Lifetimes.
    pub policy: Policy,
}

/// The CA as it was last read.
pub struct Current {
    state: State,
    /// The CA that signs now.
    pub signer: Signer,
    /// All CAs to be trusted, in PEM.
    pub bundle: String,
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt(f)
    }
}

/// Receiver of the CA; `None` until its first read.
pub type Authority = watch::Receiver<Option<Arc<Current>>>;

impl CaMaintainer {
    /// Maintains the CA for ever. Logs an error when it begins; the last CA read stays in use meanwhile.
    pub async fn run(self, current: watch::Sender<Option<Arc<Current>>>) {
        let every = EVERY.min(self.policy.settle / 4).max(Duration::from_millis(100));
        let mut said = String::new();
        loop {
            let before = current.borrow().clone();
            let why = match self.inspect(before.as_deref(), SystemTime::now()).await {
                Ok((now, why)) => {
                    if before.is_none_or(|before| {
                        before.bundle != now.bundle || before.signer.certificate() != now.signer.certificate()
                    }) {
                        info!(secret = self.secret, state = ?now, "CA read");
                        current.send_replace(Some(Arc::new(now)));
                    }
                    why.map(|why| why.to_string()).unwrap_or_default()
                }
                Err(why) => why.to_string(),
            };
            if why != said && !why.is_empty() {
                warn!(error = why, secret = self.secret, "the CA could not be updated; trying again");
            }
            said = why;
            sleep(every).await;
        }
    }

    /// Runs one pass: reads the state, applies the passage of time, publishes. Returns the CA, and the error if it is
    /// not published.
    async fn inspect(
        &self,
        before: Option<&Current>,
        now: SystemTime,
    ) -> Result<(Current, Option<Error>), Error> {
        let mut state = self.settle(before, now, |state| Ok(state.advance(&self.policy, now)?)).await?;
        let bundle = state.bundle(&self.policy, now);
        let unpublished = match self.publish(&bundle).await {
            Ok(()) => {
                // Only if the bundle is still the published one: another process may have added a CA since.
                let same =
                    |state: &mut State| Ok(state.bundle(&self.policy, now) == bundle && state.published(now));
                state = self.settle(Some(&self.current(state, now)?), now, same).await?;
                None
            }
            Err(why) => Some(why),
        };
        Ok((self.current(state, now)?, unpublished))
    }

    fn current(&self, state: State, now: SystemTime) -> Result<Current, Error> {
        let (signer, bundle) = (state.signer(&self.policy, now)?, state.bundle(&self.policy, now));
        Ok(Current { state, signer, bundle })
    }

    /// Reads, changes and writes the state; repeats when another writer was first. A deleted Secret is restored from
    /// memory, because clients still trust the CA.
    async fn settle(
        &self,
        before: Option<&Current>,
        now: SystemTime,
        mut change: impl FnMut(&mut State) -> Result<bool, Error>,
    ) -> Result<State, Error> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let what = |doing: &str| format!("{doing} Secret {}/{}", self.namespace, self.secret);
        for _ in 0..TRIES {
            let found = within(what("read"), secrets.get_opt(&self.secret)).await?;
            let kept =
                found.as_ref().and_then(|secret| secret.data.as_ref()).and_then(|data| data.get(STATE));
            let mut state = match (kept, before) {
                (Some(kept), _) => State::read(&kept.0)?,
                (None, Some(before)) => before.state.clone(),
                (None, None) => State::default(),
            };
            if !change(&mut state)? && kept.is_some() {
                return Ok(state);
            }
            let bundle = state.bundle(&self.policy, now);
            let mut secret = found.clone().unwrap_or_else(|| self.blank());
            let data = secret.data.get_or_insert_default();
            data.insert(STATE.to_owned(), ByteString(state.write()?.to_vec()));
            data.insert(BUNDLE.to_owned(), ByteString(bundle.into_bytes()));
            let post = PostParams::default();
            // The Secret contains the version that was read, so only its direct successor is written.
            let written = match found {
                Some(_) => within(what("change"), secrets.replace(&self.secret, &post, &secret)).await,
                None => within(what("create"), secrets.create(&post, &secret)).await,
            };
            match written {
                Ok(_) => return Ok(state),
                Err(why) if why.is_conflict() || why.is_not_found() => {}
                Err(why) => return Err(why.into()),
            }
        }
        Err(Error::Busy(self.secret.clone()))
    }

    fn blank(&self) -> Secret {
        Secret {
            metadata: ObjectMeta {
                name: Some(self.secret.clone()),
                labels: Some(BTreeMap::from([(
                    "app.kubernetes.io/managed-by".to_owned(),
                    "peerpod-cluster".to_owned(),
                )])),
                ..ObjectMeta::default()
            },
            type_: Some("Opaque".to_owned()),
            ..Secret::default()
        }
    }

    async fn publish(&self, bundle: &str) -> Result<(), Error> {
        match &self.published {
            Published::ConfigMap(name) => self.publish_map(name, bundle).await,
            Published::Webhook(name) => self.publish_webhook(name, bundle).await,
        }
    }

    async fn publish_map(&self, name: &str, bundle: &str) -> Result<(), Error> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let what = |doing: &str| format!("{doing} ConfigMap {}/{name}", self.namespace);
        let found = within(what("read"), maps.get_opt(name)).await?;
        if found.and_then(|map| map.data?.remove(BUNDLE)).as_deref() == Some(bundle) {
            return Ok(());
        }
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {BUNDLE: bundle},
        });
        let apply = PatchParams::apply(MANAGER).force();
        within(what("apply"), maps.patch(name, &apply, &Patch::Apply(map))).await?;
        Ok(())
    }

    async fn publish_webhook(&self, name: &str, bundle: &str) -> Result<(), Error> {
        let all: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        let what = |doing: &str| format!("{doing} MutatingWebhookConfiguration {name}");
        let Some(found) = within(what("read"), all.get_opt(name)).await? else {
            let text = format!(
                "there is no MutatingWebhookConfiguration {name}: the webhook is not called; register it, or name the \
                 registration in webhook.registration"
            );
            return Err(Error::Unpublished(text));
        };
        let wanted = ByteString(bundle.as_bytes().to_vec());
        let mut steps = Vec::new();
        for (index, webhook) in found.webhooks.iter().flatten().enumerate() {
            if webhook.client_config.ca_bundle.as_ref() != Some(&wanted) {
                let at = format!("/webhooks/{index}");
                steps.push(json!({"op": "test", "path": format!("{at}/name"), "value": webhook.name}));
                steps.push(
                    json!({"op": "add", "path": format!("{at}/clientConfig/caBundle"), "value": wanted}),
                );
            }
        }
        if steps.is_empty() {
            return Ok(());
        }
        // A newer bundle of another process is never overwritten.
        steps.insert(0, json!({"op": "test", "path": "/metadata/resourceVersion", "value": found.metadata.resource_version}));
        let patch: kube::api::Patch<()> = Patch::Json(
            serde_json::from_value(json!(steps))
                .map_err(|why| Error::Unpublished(format!("write a patch: {why}")))?,
        );
        within(what("patch"), all.patch(name, &PatchParams::default(), &patch)).await?;
        Ok(())
    }
}
