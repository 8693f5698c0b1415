//! Keeps the CA in a Secret and its public half where those look who are to trust it.
//!
//! Any number of processes do this beside each other: a Secret is created once, and changed only by whoever has its
//! newest version; who was second reads again. May touch: that Secret, and what [`Published`] names.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        core::v1::{ConfigMap, Secret},
    },
};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use peerpod_kube::client::{self, within};
use serde_json::json;
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use super::{Policy, Signer, State};

/// The key in the Secret's data.
const STATE: &str = "authority.json";
/// The key in the Secret and in the ConfigMap, for people and for mounts.
pub const BUNDLE: &str = "ca.crt";
/// Who applies the ConfigMap.
const MANAGER: &str = "peerpod-authority";
/// How often the Secret is read, at the most rarely; also bounded by the time others have to follow.
const EVERY: Duration = Duration::from_secs(10);
/// Somebody else was first so often in a row: then at the next look.
const TRIES: usize = 5;

/// Why the CA is not kept.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server.
    #[error(transparent)]
    Api(#[from] client::Error),
    /// The CA itself.
    #[error(transparent)]
    Authority(#[from] super::Error),
    /// Where it is to be published there is nothing.
    #[error("{0}")]
    Unpublished(String),
    /// Others were first each time.
    #[error("Secret {0} is changed all the time by others; looking again later")]
    Busy(String),
}

/// Where those look who are to trust the CA.
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

/// What is to be kept where.
pub struct Keeper {
    /// The API server.
    pub client: Client,
    /// Where the Secret is, and the ConfigMap.
    pub namespace: String,
    /// The Secret's name.
    pub secret: String,
    /// Where the CAs are published.
    pub published: Published,
    /// How long things last.
    pub policy: Policy,
}

/// The CA as it was last read.
pub struct Current {
    state: State,
    /// Signs certificates now.
    pub signer: Signer,
    /// All that are to be trusted, PEM.
    pub bundle: String,
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt(f)
    }
}

/// The CA for who uses it; `None` until it was read once.
pub type Authority = watch::Receiver<Option<Arc<Current>>>;

impl Keeper {
    /// Keeps it for ever. What goes wrong is said when it begins; what was read stays in use meanwhile.
    pub async fn run(self, current: watch::Sender<Option<Arc<Current>>>) {
        let every = EVERY.min(self.policy.settle / 4).max(Duration::from_millis(100));
        let mut said = String::new();
        loop {
            let before = current.borrow().clone();
            let why = match self.look(before.as_deref(), SystemTime::now()).await {
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
                warn!(error = why, secret = self.secret, "the CA is not kept as it should be; trying again");
            }
            said = why;
            sleep(every).await;
        }
    }

    /// One look, and what time makes of what is there. The CA; and why it is not published, if it is not.
    async fn look(
        &self,
        before: Option<&Current>,
        now: SystemTime,
    ) -> Result<(Current, Option<Error>), Error> {
        let mut state = self.settle(before, now, |state| Ok(state.advance(&self.policy, now)?)).await?;
        let bundle = state.bundle(&self.policy, now);
        let unpublished = match self.publish(&bundle).await {
            Ok(()) => {
                // Only what was in what we published: another process may have added one since.
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

    /// Reads, changes, writes; again where somebody else was first. A Secret that somebody deleted comes back with what we
    /// remember, for those who trust it still do.
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
            // With the version that was read, so that only its successor is written.
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
        // Nobody's newer bundle is overwritten by ours.
        steps.insert(0, json!({"op": "test", "path": "/metadata/resourceVersion", "value": found.metadata.resource_version}));
        let patch: kube::api::Patch<()> = Patch::Json(
            serde_json::from_value(json!(steps))
                .map_err(|why| Error::Unpublished(format!("write a patch: {why}")))?,
        );
        within(what("patch"), all.patch(name, &PatchParams::default(), &patch)).await?;
        Ok(())
    }
}
