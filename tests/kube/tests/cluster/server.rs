//! Tests that the test server is a real one: rights, custom resources, admission, leases, nodes, tokens and the garbage
//! collector work as the other tests need them.

use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::{DynamicObject, GroupVersionKind};
use kube::discovery::ApiResource;
use peerpod_test_kube::{Cluster, Hook, Options, Rule, wait_for};
use serde_json::{Value, from_value, json};

const LIMIT: Duration = Duration::from_secs(60);

fn post() -> PostParams {
    PostParams::default()
}

/// One server serves all stages, because its start takes most of the time.
#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_is_a_real_one() {
    let options = Options { controllers: vec!["garbage-collector-controller"], ..Options::default() };
    let cluster = Cluster::start(options).await.unwrap();
    cluster.namespace("shop").await.unwrap();
    rights(&cluster).await;
    custom_resource(&cluster).await;
    webhook_by_url(&cluster).await;
    lease(&cluster).await;
    node_status(&cluster).await;
    bound_token(&cluster).await;
    owners(&cluster).await;
    let seen = cluster.kubectl(&["get", "namespace", "shop", "-o", "name"]).unwrap();
    assert_eq!(seen, "namespace/shop\n");
}

async fn rights(cluster: &Cluster) {
    let rule = Rule {
        api_groups: Some(vec![String::new()]),
        resources: Some(vec!["configmaps".to_owned()]),
        verbs: vec!["list".to_owned()],
        ..Rule::default()
    };
    cluster.service_account("shop", "reader", vec![rule]).await.unwrap();
    let reader = cluster.client_as("shop", "reader").await.unwrap();
    // The authorizer learns of the role by a watch.
    wait_for("the role to hold", LIMIT, async || {
        Ok(Api::<ConfigMap>::all(reader.clone()).list(&ListParams::default()).await.ok())
    })
    .await
    .unwrap();
    let refused =
        Api::<Secret>::all(reader.clone()).list(&ListParams::default()).await.unwrap_err().to_string();
    assert!(refused.contains("cannot list resource \"secrets\""), "{refused}");
    let stranger = cluster.client_with("no-token-of-ours").unwrap();
    let refused = Api::<ConfigMap>::all(stranger).list(&ListParams::default()).await.unwrap_err().to_string();
    assert!(refused.contains("Unauthorized"), "{refused}");
}

async fn custom_resource(cluster: &Cluster) {
    let client = cluster.client().unwrap();
    let crd: CustomResourceDefinition = from_value(json!({
        "metadata": {"name": "things.example.org"},
        "spec": {
            "group": "example.org", "scope": "Namespaced",
            "names": {"kind": "Thing", "plural": "things"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "properties": {"spec": {"type": "object", "properties": {"size": {"type": "integer"}}}},
            }}}],
        },
    }))
    .unwrap();
    let crds = Api::<CustomResourceDefinition>::all(client.clone());
    crds.create(&post(), &crd).await.unwrap();
    let established = kube::runtime::conditions::is_crd_established();
    let wait = kube::runtime::wait::await_condition(crds, "things.example.org", established);
    tokio::time::timeout(LIMIT, wait).await.unwrap().unwrap();
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("example.org", "v1", "Thing"));
    let things: Api<DynamicObject> = Api::namespaced_with(client, "shop", &kind);
    let thing = DynamicObject::new("a", &kind).data(json!({"spec": {"size": 3, "unknown": true}}));
    let made = things.create(&post(), &thing).await.unwrap();
    assert_eq!(made.data["spec"], json!({"size": 3}), "unknown fields are dropped");
    let wrong = DynamicObject::new("b", &kind).data(json!({"spec": {"size": "large"}}));
    assert!(
        things.create(&post(), &wrong).await.unwrap_err().to_string().contains("must be of type integer")
    );
}

async fn webhook_by_url(cluster: &Cluster) {
    let hook =
        Hook::start(|_| Some(json!([{"op": "add", "path": "/metadata/labels", "value": {"seen": "yes"}}])))
            .await
            .unwrap();
    let client = cluster.client().unwrap();
    let registration: MutatingWebhookConfiguration = from_value(hook.registration("seen.example.org", json!({
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
        "matchConditions": [{"name": "named", "expression": "object.metadata.name.startsWith('seen-')"}],
    })))
    .unwrap();
    let registrations: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    registrations.create(&post(), &registration).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(client, "shop");
    let map = |name: &str| from_value(json!({"metadata": {"name": name}})).unwrap();
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    wait_for("the webhook to be called", LIMIT, async || {
        let made: ConfigMap = maps.create(&dry, &map("seen-1")).await?;
        Ok(made.metadata.labels.filter(|labels| labels.contains_key("seen")))
    })
    .await
    .unwrap();
    let before = hook.calls();
    assert!(maps.create(&dry, &map("other")).await.unwrap().metadata.labels.is_none());
    assert_eq!(hook.calls(), before);
    registrations.delete("seen.example.org", &DeleteParams::default()).await.unwrap();
}

async fn lease(cluster: &Cluster) {
    let leases: Api<Lease> = Api::namespaced(cluster.client().unwrap(), "shop");
    let lease = from_value(json!({"metadata": {"name": "leader"}, "spec": {"holderIdentity": "a"}})).unwrap();
    let made = leases.create(&post(), &lease).await.unwrap();
    let (mut first, mut second) = (made.clone(), made);
    first.spec.as_mut().unwrap().holder_identity = Some("b".to_owned());
    second.spec.as_mut().unwrap().holder_identity = Some("c".to_owned());
    leases.replace("leader", &post(), &first).await.unwrap();
    let refused = leases.replace("leader", &post(), &second).await.unwrap_err();
    assert!(matches!(refused, kube::Error::Api(ref status) if status.code == 409), "{refused}");
    assert_eq!(leases.get("leader").await.unwrap().spec.unwrap().holder_identity.as_deref(), Some("b"));
}

async fn node_status(cluster: &Cluster) {
    let nodes: Api<Node> = Api::all(cluster.client().unwrap());
    nodes.create(&post(), &from_value(json!({"metadata": {"name": "worker-1"}})).unwrap()).await.unwrap();
    let patch = |operations: Value| Patch::Json::<()>(from_value(operations).unwrap());
    let capacity = json!({"op": "add", "path": "/status/capacity/kata.peerpods.io~1vm", "value": "10"});
    let none = PatchParams::default();
    let refused = nodes.patch_status("worker-1", &none, &patch(json!([capacity]))).await.unwrap_err();
    assert!(
        matches!(refused, kube::Error::Api(ref status) if status.code == 422),
        "the parent is missing: {refused}"
    );
    let whole = json!([{"op": "add", "path": "/status/capacity", "value": {}}, capacity]);
    let node = nodes.patch_status("worker-1", &none, &patch(whole)).await.unwrap();
    let status = node.status.unwrap();
    assert_eq!(status.capacity.unwrap()["kata.peerpods.io/vm"].0, "10");
    assert_eq!(status.allocatable.unwrap()["kata.peerpods.io/vm"].0, "10");
}

/// Checks the data by which the controller decides on pull secrets: the API server names a caller's node.
async fn bound_token(cluster: &Cluster) {
    let client = cluster.client().unwrap();
    cluster.service_account("shop", "node", Vec::new()).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(client.clone(), "shop");
    let pod = json!({"metadata": {"name": "node-abc"}, "spec": {
        "nodeName": "worker-1", "serviceAccountName": "node", "containers": [{"name": "c", "image": "x"}],
    }});
    let pod = pods.create(&post(), &from_value(pod).unwrap()).await.unwrap();
    let uid = pod.metadata.uid.unwrap();
    let token = cluster.token("shop", "node", &["peerpod-cluster"], Some(("node-abc", &uid))).await.unwrap();
    let reviews: Api<TokenReview> = Api::all(client);
    let review = async |audience: &str| {
        let spec = TokenReviewSpec { token: Some(token.clone()), audiences: Some(vec![audience.to_owned()]) };
        reviews
            .create(&post(), &TokenReview { spec, ..TokenReview::default() })
            .await
            .unwrap()
            .status
            .unwrap()
    };
    let seen = review("peerpod-cluster").await;
    assert_eq!(seen.authenticated, Some(true), "{:?}", seen.error);
    let user = seen.user.unwrap();
    assert_eq!(user.username.as_deref(), Some("system:serviceaccount:shop:node"));
    assert_eq!(user.extra.unwrap()["authentication.kubernetes.io/node-name"], ["worker-1"]);
    assert_ne!(review("somebody-else").await.authenticated, Some(true));
}

async fn owners(cluster: &Cluster) {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client().unwrap(), "shop");
    let owner =
        maps.create(&post(), &from_value(json!({"metadata": {"name": "owner"}})).unwrap()).await.unwrap();
    let reference =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid});
    let owned = json!({"metadata": {"name": "owned", "ownerReferences": [reference]}});
    maps.create(&post(), &from_value(owned).unwrap()).await.unwrap();
    maps.delete("owner", &DeleteParams::default()).await.unwrap();
    wait_for("its objects to go", LIMIT, async || Ok(maps.get_opt("owned").await?.is_none().then_some(())))
        .await
        .unwrap();
}
