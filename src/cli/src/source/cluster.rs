//! Reads peer pods of a cluster from the API server.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{ApiResource, ListParams, LogParams};
use kube::core::DynamicObject;
use kube::{Api, Client, Resource, ResourceExt};
use peerpod_kube::client::{Error, within};
use peerpod_kube::crds::PeerPod;
use serde::de::DeserializeOwned;

/// Objects per request of a list.
const PAGE: u32 = 500;
/// Limit of one container's log, in bytes.
const LOG: i64 = 16 << 20;
/// The API server cuts the end off beyond that size, so the last lines are asked for.
const LOG_LINES: i64 = 50_000;
/// Label that the chart gives to the pods of Peerpod itself.
const OURS: &str = "app.kubernetes.io/name=peerpod";
/// Label of the component, and its value for `peerpod-node`. Its container has that name, too.
pub(super) const COMPONENT: &str = "app.kubernetes.io/component";
pub(super) const NODE: &str = "node";
/// Extended resource of a node's VMs, by the default of `cluster.extended-resource`.
pub(crate) const RESOURCE: &str = "kata.peerpods.io/vm";

/// A cluster's API server.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// The kubeconfig of the command line, for kubectl.
    pub(super) kubeconfig: Option<PathBuf>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

impl Cluster {
    pub(crate) fn new(client: Client, kubeconfig: Option<PathBuf>) -> Cluster {
        Cluster { client, kubeconfig }
    }

    /// Lists objects of all namespaces, page by page. `what` names them in errors.
    ///
    /// # Errors
    /// The API server refused or did not answer.
    pub(crate) async fn list<K>(&self, what: &str, params: ListParams) -> Result<Vec<K>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        pages(what, &Api::all(self.client.clone()), params).await
    }

    /// Lists objects of a kind with all their fields, also those that this version does not know.
    ///
    /// # Errors
    /// The API server refused or did not answer.
    pub(crate) async fn raw<K: Resource<DynamicType = ()>>(&self) -> Result<Vec<DynamicObject>, Error> {
        let kind = ApiResource::erase::<K>(&());
        pages(&kind.plural, &Api::all_with(self.client.clone(), &kind), ListParams::default()).await
    }

    /// Lists the PeerPods.
    ///
    /// # Errors
    /// The API server refused or did not answer.
    pub(crate) async fn peerpods(&self) -> Result<Vec<DynamicObject>, Error> {
        self.raw::<PeerPod>().await
    }

    /// Lists the objects of a kind that belong to Peerpod itself, by the chart's label.
    ///
    /// # Errors
    /// The API server refused or did not answer.
    pub(crate) async fn ours<K>(&self, what: &str) -> Result<Vec<K>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        self.list(what, ListParams::default().labels(OURS)).await
    }

    /// Lists the service accounts of `peerpod-node` as (namespace, name), by the chart's ClusterRoleBindings. Only an
    /// administrator makes those, and the labels of other objects may be a tenant's.
    ///
    /// # Errors
    /// The API server refused or did not answer.
    pub(crate) async fn accounts(&self) -> Result<Vec<(String, String)>, Error> {
        let bindings: Vec<ClusterRoleBinding> = self.ours("ClusterRoleBindings").await?;
        let bindings =
            bindings.into_iter().filter(|one| one.labels().get(COMPONENT).is_some_and(|of| of == NODE));
        let subjects = bindings.flat_map(|binding| binding.subjects.unwrap_or_default());
        let accounts = subjects.filter(|subject| subject.kind == "ServiceAccount");
        Ok(accounts.filter_map(|account| Some((account.namespace?, account.name))).collect())
    }

    /// Lists the Events on an object of this name, the oldest first.
    ///
    /// # Errors
    /// The API server refused or did not answer.
    pub(crate) async fn events(&self, namespace: &str, name: &str) -> Result<Vec<Event>, Error> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let of = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let mut found = pages("Events", &events, of).await?;
        found.sort_by_key(|event| event.last_timestamp.clone().map(|at| at.0));
        Ok(found)
    }

    /// Returns the end of a container's log, each line with its time.
    ///
    /// # Errors
    /// The API server refused or did not answer.
    pub(crate) async fn log(&self, pod: &Pod, container: &str) -> Result<String, Error> {
        let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace.unwrap_or_default());
        let name = name.unwrap_or_default();
        let params = LogParams {
            container: Some(container.to_owned()),
            timestamps: true,
            tail_lines: Some(LOG_LINES),
            limit_bytes: Some(LOG),
            ..LogParams::default()
        };
        within(format!("read the log of {name}/{container}"), pods.logs(name, &params)).await
    }
}

async fn pages<K>(what: &str, objects: &Api<K>, params: ListParams) -> Result<Vec<K>, Error>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let (mut found, mut params) = (Vec::new(), params.limit(PAGE));
    loop {
        let page = within(format!("list {what}"), objects.list(&params)).await?;
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(found),
        }
    }
}
