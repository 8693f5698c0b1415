//! Makes namespaces, service accounts with rights, and their tokens.

use anyhow::{Context, Result};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use serde_json::{from_value, json};

use crate::Cluster;

/// Rule of a role: verbs on resources of groups.
pub type Rule = PolicyRule;

/// Returns the right of node and controller to read the cluster's UID.
pub fn cluster_uid() -> Rule {
    Rule {
        api_groups: Some(vec![String::new()]),
        resources: Some(vec!["namespaces".to_owned()]),
        resource_names: Some(vec!["kube-system".to_owned()]),
        verbs: vec!["get".to_owned()],
        ..Rule::default()
    }
}

impl Cluster {
    /// Returns the UID of the namespace `kube-system`, as kubectl shows it.
    ///
    /// # Errors
    /// As [`Cluster::kubectl`].
    pub fn uid(&self) -> Result<String> {
        self.kubectl(&["get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}"])
    }

    /// Makes a namespace.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn namespace(&self, name: &str) -> Result<()> {
        let meta = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let namespace = Namespace { metadata: meta, ..Namespace::default() };
        Api::all(self.client()?).create(&PostParams::default(), &namespace).await?;
        Ok(())
    }

    /// Makes a service account with these rights in the whole cluster.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn service_account(&self, namespace: &str, name: &str, rules: Vec<Rule>) -> Result<()> {
        let client = self.client()?;
        let post = PostParams::default();
        let meta = |name: &str| ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let account = ServiceAccount { metadata: meta(name), ..ServiceAccount::default() };
        Api::namespaced(client.clone(), namespace).create(&post, &account).await?;
        let role = format!("{namespace}-{name}");
        let rights = ClusterRole { metadata: meta(&role), rules: Some(rules), ..ClusterRole::default() };
        Api::all(client.clone()).create(&post, &rights).await?;
        let binding: ClusterRoleBinding = from_value(json!({
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": name}],
        }))?;
        Api::all(client).create(&post, &binding).await?;
        Ok(())
    }

    /// Returns a service account's token for these audiences (none: the API server's own). With a pod, the token is
    /// bound to it, as a kubelet's token for that pod.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn token(
        &self,
        namespace: &str,
        name: &str,
        audiences: &[&str],
        pod: Option<(&str, &str)>,
    ) -> Result<String> {
        let bound_object_ref = pod.map(|(name, uid)| BoundObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
        });
        let audiences = audiences.iter().map(|audience| (*audience).to_owned()).collect();
        let spec = TokenRequestSpec { audiences, bound_object_ref, expiration_seconds: Some(3600) };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client()?, namespace);
        let answer = accounts.create_token_request(name, &PostParams::default(), &request).await?;
        Ok(answer.status.context("no status in the answer")?.token)
    }

    /// Returns a client with this service account's rights.
    ///
    /// # Errors
    /// When the API server issues no token.
    pub async fn client_as(&self, namespace: &str, name: &str) -> Result<Client> {
        self.client_with(&self.token(namespace, name, &[], None).await?)
    }
}
