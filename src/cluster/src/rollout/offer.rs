//! Applies the cluster-wide objects that exist while there is a PeerPodConfig: the webhook's registration and the
//! RuntimeClass.
//!
//! The chart creates the registration empty, so the right to change that one object is enough and none is needed to
//! create others. While there is no PeerPodConfig there is no RuntimeClass, so the API server refuses a peer pod and
//! names the class. Otherwise a pod that the webhook has not seen would run on some node. The class therefore is made
//! after the webhook's registration and deleted before it. Where the class belongs to another owner, the registration
//! stays.

use std::sync::atomic::Ordering::Relaxed;

use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::core::PartialObjectMeta;
use kube::{Api, ResourceExt};
use peerpod_kube::client::within;
use peerpod_kube::crds::PeerPodConfig;
use serde_json::json;
use tracing::info;

use super::MANAGER;
use super::apply::{Error, Work};
use super::manifest::Manifests;

/// Annotation of a RuntimeClass that names its release, by namespace.
const OF: &str = "peerpod.io/namespace";

impl Work {
    /// Applies the objects that admit pods of these PeerPodConfigs. Returns the reason if no pod is admitted, and the name
    /// of a RuntimeClass of another owner, like kata-deploy's: it stays as it is.
    pub(super) async fn offer(
        &self,
        manifests: &Manifests,
        live: &[&PeerPodConfig],
    ) -> Result<(Option<String>, Option<String>), Error> {
        let (registered, why_not) = self.webhook(manifests).await?;
        if let Some(mut class) = manifests.runtime_class(live).filter(|_| registered) {
            let name = class["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let classes: Api<RuntimeClass> = Api::all(self.client());
            let found = within(format!("get RuntimeClass {name}"), classes.get_metadata_opt(&name)).await?;
            if found.is_some_and(|found| found.annotations().get(OF) != Some(&self.context.namespace)) {
                return Ok((why_not, Some(name)));
            }
            class["metadata"]["annotations"][OF] = json!(self.context.namespace);
            self.put::<RuntimeClass>(None, &class).await?;
        }
        Ok((why_not, None))
    }

    /// Removes the applied objects when no PeerPodConfig is left. One pass deletes the class; a later pass that finds
    /// no class empties the registration. By then every API server knows that the class is gone.
    pub(super) async fn withdraw_if_none(&self) -> Result<(), Error> {
        let configs: Api<PeerPodConfig> = self.ours();
        let all = within("list PeerPodConfigs", configs.list_metadata(&ListParams::default())).await?.items;
        if all.iter().any(|one| one.metadata.deletion_timestamp.is_none()) {
            return Ok(());
        }
        // Without the manifests nothing was applied, or the class's name is unknown.
        let manifests = match self.manifests().await {
            Err(Error::Not(..)) => return Ok(()),
            manifests => manifests?,
        };
        let Some(class) = manifests.runtime_class(&[]) else { return Ok(()) };
        let name = class["metadata"]["name"].as_str().unwrap_or_default();
        let classes: Api<RuntimeClass> = Api::all(self.client());
        match within(format!("get RuntimeClass {name}"), classes.get_metadata_opt(name)).await? {
            Some(found) => self.withdraw_class(&classes, &found).await,
            None => match &manifests.registration {
                Some(hooks) => self.unregister(hooks["metadata"]["name"].as_str().unwrap_or_default()).await,
                None => Ok(()),
            },
        }
    }

    /// Deletes the class, unless another owner made it or another field manager set fields of it.
    async fn withdraw_class(
        &self,
        classes: &Api<RuntimeClass>,
        found: &PartialObjectMeta<RuntimeClass>,
    ) -> Result<(), Error> {
        let only_ours = found.managed_fields().iter().all(|entry| entry.manager.as_deref() == Some(MANAGER));
        let name = found.name_any();
        if !only_ours || found.annotations().get(OF) != Some(&self.context.namespace) {
            if !self.said.swap(true, Relaxed) {
                info!(
                    runtime_class = name,
                    "no PeerPodConfig is left, but others have a part in the RuntimeClass: it stays"
                );
            }
            return Ok(());
        }
        self.term.check()?;
        let this_one = Preconditions { uid: found.uid(), resource_version: found.resource_version() };
        let how = DeleteParams::default().preconditions(this_one);
        match within(format!("delete RuntimeClass {name}"), classes.delete(&name, &how)).await {
            // The class is gone, or has been replaced or changed.
            Err(error) if matches!(error.status(), Some(404 | 409)) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => info!(runtime_class = name, "no PeerPodConfig is left: the RuntimeClass was deleted"),
        }
        Ok(())
    }

    async fn unregister(&self, name: &str) -> Result<(), Error> {
        let registrations: Api<MutatingWebhookConfiguration> = Api::all(self.client());
        let what = |doing: &str| format!("{doing} webhook registration {name}");
        let found = within(what("get"), registrations.get_opt(name)).await?;
        if found.and_then(|found| found.webhooks).is_none_or(|hooks| hooks.is_empty()) {
            return Ok(());
        }
        self.term.check()?;
        // An apply without the webhooks would leave half of each entry to the field manager of the caBundle.
        let none = Patch::Merge(json!({"webhooks": []}));
        within(what("empty"), registrations.patch(name, &PatchParams::default(), &none)).await?;
        info!(registration = name, "no PeerPodConfig is left: the webhook's registration was emptied");
        Ok(())
    }

    /// Returns whether the webhook is registered, and the reason if no pod is admitted.
    async fn webhook(&self, manifests: &Manifests) -> Result<(bool, Option<String>), Error> {
        let name = &self.config.webhook;
        if name.is_empty() {
            return Ok((true, None));
        }
        let registrations: Api<MutatingWebhookConfiguration> = Api::all(self.client());
        let found = within(format!("get webhook registration {name}"), registrations.get_opt(name)).await?;
        let Some(found) = found else {
            let why = format!("there is no MutatingWebhookConfiguration {name}; install the chart with it");
            return Ok((false, Some(why)));
        };
        let hooks: Vec<MutatingWebhook> = match &manifests.registration {
            Some(wanted) => {
                let applied = self.put::<MutatingWebhookConfiguration>(None, wanted).await?;
                // An unreadable list counts as no webhook.
                serde_json::from_value(applied.data["webhooks"].clone()).unwrap_or_default()
            }
            None => found.webhooks.unwrap_or_default(),
        };
        if hooks.is_empty() {
            let why = format!("MutatingWebhookConfiguration {name} has no webhooks: no peer pod is admitted");
            return Ok((false, Some(why)));
        }
        let trusted = |hook: &MutatingWebhook| {
            hook.client_config.ca_bundle.as_ref().is_some_and(|bundle| !bundle.0.is_empty())
        };
        if !hooks.iter().all(trusted) {
            let why = format!(
                "MutatingWebhookConfiguration {name} has no caBundle yet: its certificate's issuer puts it there"
            );
            return Ok((true, Some(why)));
        }
        let deployments: Api<Deployment> = self.ours();
        let found = within(format!("get Deployment {name}"), deployments.get_opt(name)).await?;
        let available = found.and_then(|one| one.status).and_then(|status| status.available_replicas);
        let none = || format!("no replica of Deployment {name} is available: no peer pod is admitted");
        Ok((true, (available.unwrap_or(0) < 1).then(none)))
    }
}
