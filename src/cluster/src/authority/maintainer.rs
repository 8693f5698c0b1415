//! Maintains the CA in a Secret and publishes its certificates where clients read them.
//!
//! Any number of processes may do this at once: the Secret is created once, and a change succeeds only with the
//! Secret's newest version. A process that was second reads again. May touch: that Secret, and the object named by
//! [`Published`].

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Error, Result, bail};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use peerpod_kube::client::within;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::{Policy, StoredCas};

/// Key in the Secret's data.
const STATE: &str = "authority.json";
/// Key in the Secret and in the ConfigMap, for people and for mounts.
const BUNDLE: &str = "ca.crt";
/// Field manager of the ConfigMap.
const MANAGER: &str = "peerpod-authority";
/// Longest interval between reads of the Secret; the settle time of the policy also limits it.
const EVERY: Duration = Duration::from_secs(10);
/// Attempts against concurrent writers before the next interval.
const TRIES: usize = 5;

/// Object in which clients find the CA.
#[derive(Clone, Debug)]
pub(crate) enum Published {
    /// A ConfigMap of this name, key `ca.crt`, which nodes mount.
    ConfigMap(String),
    /// The `caBundle` of every webhook in the MutatingWebhookConfiguration of this name.
    Webhook(String),
}

/// Maintains one CA.
pub(crate) struct CaMaintainer {
    pub(crate) client: Client,
    /// Namespace of the Secret and the ConfigMap.
    pub(crate) namespace: String,
    pub(crate) secret: String,
    pub(crate) published: Published,
    pub(crate) policy: Policy,
}

/// The CA as it was last read.
pub(crate) struct Current {
    state: StoredCas,
    pub(super) signer: peerpod_pki::Authority,
    /// All CAs to be trusted, in PEM.
    bundle: String,
}

impl Current {
    /// End of the CA that signs.
    pub(crate) fn not_after(&self) -> SystemTime {
        self.signer.not_after
    }
}

/// Receiver of the CA; `None` until its first read.
pub(crate) type Authority = watch::Receiver<Option<Arc<Current>>>;

impl CaMaintainer {
    /// Maintains the CA for ever. Logs an error when it begins; the last CA read stays in use meanwhile.
    pub(super) async fn run(self, current: watch::Sender<Option<Arc<Current>>>) {
        let every = EVERY.min(self.policy.settle / 4).max(Duration::from_millis(100));
        let mut said = String::new();
        loop {
            let before = current.borrow().clone();
            let why = match self.inspect(before.as_ref().map(|before| &before.state), SystemTime::now()).await
            {
                Ok((now, why)) => {
                    if before.is_none_or(|before| {
                        before.bundle != now.bundle || before.signer.certificate != now.signer.certificate
                    }) {
                        let ends = Timestamp::try_from(now.not_after()).unwrap_or_default();
                        info!(secret = self.secret, %ends, "read the CA");
                        current.send_replace(Some(Arc::new(now)));
                    }
                    why.map(|why| format!("{why:#}")).unwrap_or_default()
                }
                Err(why) => format!("{why:#}"),
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
    async fn inspect(&self, before: Option<&StoredCas>, now: SystemTime) -> Result<(Current, Option<Error>)> {
        let mut state = self.settle(before, now, |state| state.advance(&self.policy, now)).await?;
        let bundle = state.bundle(&self.policy, now);
        let published = self.publish(&bundle).await;
        if published.is_ok() {
            // Only if the bundle is still the published one: another process may have added a CA since.
            let same =
                |state: &mut StoredCas| Ok(state.bundle(&self.policy, now) == bundle && state.published(now));
            state = self.settle(Some(&state), now, same).await?;
        }
        let (signer, bundle) = (state.signer(&self.policy, now)?, state.bundle(&self.policy, now));
        Ok((Current { state, signer, bundle }, published.err()))
    }

    /// Reads, changes and writes the state; repeats when another writer was first. A deleted Secret, or its removed
    /// data, is restored from memory, because clients still trust the CA.
    async fn settle(
        &self,
        before: Option<&StoredCas>,
        now: SystemTime,
        mut change: impl FnMut(&mut StoredCas) -> Result<bool>,
    ) -> Result<StoredCas> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let what = |doing: &str| format!("{doing} Secret {}/{}", self.namespace, self.secret);
        for _ in 0..TRIES {
            let found = within(what("read"), secrets.get_opt(&self.secret)).await?;
            let kept =
                found.as_ref().and_then(|secret| secret.data.as_ref()).and_then(|data| data.get(STATE));
            let mut state = match kept {
                Some(kept) => StoredCas::read(&kept.0)?,
                None => before.cloned().unwrap_or_default(),
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
            let written = match &found {
                Some(_) => within(what("change"), secrets.replace(&self.secret, &post, &secret)).await,
                None => within(what("create"), secrets.create(&post, &secret)).await,
            };
            match written {
                Ok(_) => return Ok(state),
                Err(why) if why.is_conflict() || why.is_not_found() => {}
                Err(why) if found.is_none() && why.status() == Some(403) => {
                    bail!("{why}; make an empty Secret of this name, as the chart does")
                }
                Err(why) => return Err(why.into()),
            }
        }
        bail!("Secret {} is changed all the time by others; looking again later", self.secret)
    }

    fn blank(&self) -> Secret {
        let managed = ("app.kubernetes.io/managed-by".to_owned(), "peerpod-cluster".to_owned());
        let metadata = ObjectMeta {
            name: Some(self.secret.clone()),
            labels: Some([managed].into()),
            ..ObjectMeta::default()
        };
        Secret { metadata, type_: Some("Opaque".to_owned()), ..Secret::default() }
    }

    async fn publish(&self, bundle: &str) -> Result<()> {
        match &self.published {
            Published::ConfigMap(name) => self.publish_map(name, bundle).await,
            Published::Webhook(name) => self.publish_webhook(name, bundle).await,
        }
    }

    async fn publish_map(&self, name: &str, bundle: &str) -> Result<()> {
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

    async fn publish_webhook(&self, name: &str, bundle: &str) -> Result<()> {
        let all: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        let what = |doing: &str| format!("{doing} MutatingWebhookConfiguration {name}");
        let Some(found) = within(what("read"), all.get_opt(name)).await? else {
            bail!(
                "there is no MutatingWebhookConfiguration {name}: the webhook is not called; register it, or name the \
                 registration in webhook.registration"
            );
        };
        let wanted = ByteString(bundle.as_bytes().to_vec());
        let all_hooks = found.webhooks.iter().flatten();
        let outdated = all_hooks.filter(|hook| hook.client_config.ca_bundle.as_ref() != Some(&wanted));
        let hooks: Vec<Value> =
            outdated.map(|hook| json!({"name": hook.name, "clientConfig": {"caBundle": wanted}})).collect();
        if hooks.is_empty() {
            return Ok(());
        }
        // A newer bundle of another process is never overwritten: the patch fails if the object has changed.
        let read = json!({"resourceVersion": found.metadata.resource_version});
        let patch = Patch::Strategic(json!({"metadata": read, "webhooks": hooks}));
        within(what("patch"), all.patch(name, &PatchParams::default(), &patch)).await?;
        Ok(())
    }
}
