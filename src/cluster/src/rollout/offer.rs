//! What the whole cluster sees of peer pods while there is a PeerPodConfig: the webhook's registration and the
//! RuntimeClass.
//!
//! The registration is there from the chart, empty: so the right to change that one object is enough, and none is needed
//! to make others. While nobody wants peer pods there is no RuntimeClass, so that the API server refuses such a pod with
//! its name, where one that the webhook has not seen would wait or fail on some node.

use k8s_openapi::api::{
    admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration},
    apps::v1::Deployment,
    node::v1::RuntimeClass,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use peerpod_kube::{client::within, crds::PeerPodConfig};
use serde_json::json;
use tracing::info;

use super::{
    MANAGER,
    apply::{Error, Work},
    manifest::Manifests,
};

impl Work {
    /// Applies what pods of these PeerPodConfigs are admitted by; why none is, if so.
    pub(super) async fn offer(
        &self,
        manifests: &Manifests,
        live: &[&PeerPodConfig],
    ) -> Result<Option<String>, Error> {
        // The class last: a pod of it is to find the webhook.
        let webhook = self.webhook(manifests).await?;
        if let Some(class) = manifests.runtime_class(live) {
            self.put::<RuntimeClass>(None, &class).await?;
        }
        Ok(webhook)
    }

    /// Takes back what was applied for PeerPodConfigs, when there are none any more.
    pub(super) async fn withdraw_if_none(&self) -> Result<(), Error> {
        let configs: Api<PeerPodConfig> = self.ours();
        let all = within("list PeerPodConfigs", configs.list_metadata(&ListParams::default())).await?.items;
        if all.iter().any(|one| one.metadata.deletion_timestamp.is_none()) {
            return Ok(());
        }
        // Without the manifests nothing was applied, or its name is not known.
        let Ok(manifests) = self.manifests().await? else { return Ok(()) };
        if let Some(class) = manifests.runtime_class(&[]) {
            self.withdraw_class(class["metadata"]["name"].as_str().unwrap_or_default()).await?;
        }
        if let Some(registration) = manifests.registration() {
            self.unregister(registration["metadata"]["name"].as_str().unwrap_or_default()).await?;
        }
        Ok(())
    }

    async fn withdraw_class(&self, name: &str) -> Result<(), Error> {
        let classes: Api<RuntimeClass> = Api::all(self.client());
        let found = within(format!("get RuntimeClass {name}"), classes.get_metadata_opt(name)).await?;
        // Somebody else's of that name stays.
        let is_ours = |found: &kube::core::PartialObjectMeta<RuntimeClass>| {
            found.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(MANAGER))
        };
        if !found.as_ref().is_some_and(is_ours) {
            return Ok(());
        }
        self.context.may_act()?;
        match within(format!("delete RuntimeClass {name}"), classes.delete(name, &DeleteParams::default()))
            .await
        {
            Err(error) if error.status() == Some(404) => {}
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
        self.context.may_act()?;
        // Not by an apply without them: who put the caBundle in would keep half of each.
        let none = Patch::Merge(json!({"webhooks": []}));
        within(what("empty"), registrations.patch(name, &PatchParams::default(), &none)).await?;
        info!(registration = name, "no PeerPodConfig is left: the webhook's registration was emptied");
        Ok(())
    }

    /// Why no pod is admitted, if so.
    async fn webhook(&self, manifests: &Manifests) -> Result<Option<String>, Error> {
        let name = &self.config.webhook;
        if name.is_empty() {
            return Ok(None);
        }
        let registrations: Api<MutatingWebhookConfiguration> = Api::all(self.client());
        let found = within(format!("get webhook registration {name}"), registrations.get_opt(name)).await?;
        let (Some(found), wanted) = (found, manifests.registration()) else {
            return Ok(Some(format!(
                "there is no MutatingWebhookConfiguration {name}; install the chart with it"
            )));
        };
        let hooks: Vec<MutatingWebhook> = match wanted {
            Some(wanted) => {
                let applied = self.put::<MutatingWebhookConfiguration>(None, wanted).await?;
                // What cannot be read is no hook that is trusted.
                serde_json::from_value(applied.data["webhooks"].clone()).unwrap_or_default()
            }
            None => found.webhooks.unwrap_or_default(),
        };
        if hooks.is_empty() {
            return Ok(Some(format!(
                "MutatingWebhookConfiguration {name} has no webhooks: nobody admits a pod"
            )));
        }
        let trusted = |hook: &MutatingWebhook| {
            hook.client_config.ca_bundle.as_ref().is_some_and(|bundle| !bundle.0.is_empty())
        };
        if !hooks.iter().all(trusted) {
            let why = format!(
                "MutatingWebhookConfiguration {name} has no caBundle yet: its certificate's issuer puts it there"
            );
            return Ok(Some(why));
        }
        let deployments: Api<Deployment> = self.ours();
        let found = within(format!("get Deployment {name}"), deployments.get_opt(name)).await?;
        let available = found.and_then(|one| one.status).and_then(|status| status.available_replicas);
        let none = || format!("no replica of Deployment {name} is available: no peer pod is admitted");
        Ok((available.unwrap_or(0) < 1).then(none))
    }
}
