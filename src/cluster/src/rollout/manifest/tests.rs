use peerpod_kube::crds::PeerPodConfigSpec;

use super::*;

fn set(name: &str) -> String {
    format!(
        "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {{name: {name}, namespace: x, labels: {{a: b}}}}\nspec:\n  \
         selector: {{matchLabels: {{a: b}}}}\n  template:\n    metadata: {{labels: {{a: b}}}}\n    spec:\n      \
         nodeSelector: {{kata: 'true'}}\n      containers:\n        - name: c\n          env:\n            - \
         {{name: PEERPOD_CLUSTER_CAPACITY, value: '3'}}\n            - {{name: KEPT, value: '1'}}\n"
    )
}

fn manifests() -> Manifests {
    let class = "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: kata-remote}\nhandler: kata-remote\n\
                 scheduling: {nodeSelector: {kata: 'true'}, tolerations: []}\n";
    let data = [
        ("node.yaml", set("pp-node")),
        ("relay.yaml", set("pp-relay")),
        ("runtimeclass.yaml", class.to_owned()),
    ];
    Manifests::read(&data.map(|(key, text)| (key.to_owned(), text)).into()).unwrap()
}

fn config(name: &str, spec: Value) -> PeerPodConfig {
    let spec: PeerPodConfigSpec = serde_json::from_value(spec).unwrap();
    let mut config = PeerPodConfig::new(name, spec);
    config.metadata.namespace = Some("ours".to_owned());
    config.metadata.uid = Some("u-1".to_owned());
    config
}

fn env(set: &Value) -> Vec<(String, String)> {
    let all = set["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    all.iter().map(|one| (text(&one["name"]), text(&one["value"]))).collect()
}

fn pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

#[test]
fn each_config_has_its_own_daemon_sets_for_its_own_nodes() {
    let variable = Some("PEERPOD_PROVIDER_X_INSTANCE_TYPE");
    let wanted = json!({"limit": "20", "instanceType": "big", "nodeSelector": {"pool": "a"}, "configMapName": "m",
        "cloudSecretName": "s"});
    let [node, relay] = daemon_sets(&manifests(), &config("gold", wanted), variable, "7/9").unwrap();
    assert_eq!(node["metadata"]["name"], "pp-node-gold");
    assert_eq!(relay["metadata"]["name"], "pp-relay-gold");
    for set in [&node, &relay] {
        assert_eq!(set["metadata"]["namespace"], "ours");
        assert_eq!(set["metadata"]["ownerReferences"][0]["uid"], "u-1");
        let labels = json!({"a": "b", LABEL: "gold"});
        assert_eq!(set["spec"]["selector"]["matchLabels"], labels);
        assert_eq!(set["spec"]["template"]["metadata"]["labels"], labels);
        assert_eq!(set["spec"]["template"]["spec"]["nodeSelector"], json!({"pool": "a"}));
    }
    let expected = [
        pair("KEPT", "1"),
        pair("PEERPOD_CLUSTER_CAPACITY", "20"),
        pair("PEERPOD_PROVIDER_X_INSTANCE_TYPE", "big"),
    ];
    assert_eq!(env(&node), expected);
    let from = &node["spec"]["template"]["spec"]["containers"][0]["envFrom"];
    assert_eq!(from[0]["configMapRef"]["name"], "m");
    assert_eq!(from[1]["secretRef"]["name"], "s");
    assert_eq!(node["spec"]["template"]["metadata"]["annotations"][SETTINGS], "7/9");
}

#[test]
fn a_change_of_node_settings_leaves_the_relay_unchanged() {
    let of = |spec: Value, settings: &str| {
        daemon_sets(&manifests(), &config("a", spec), Some("X"), settings).unwrap()
    };
    let [node, relay] = of(json!({}), "1");
    let [other, same] = of(json!({"limit": "9", "instanceType": "y"}), "2");
    assert_ne!(node, other);
    assert_eq!(relay, same);
}

#[test]
fn without_a_selector_it_is_all_workers_and_without_a_limit_the_charts() {
    let [node, _] = daemon_sets(&manifests(), &config("a", json!({})), None, "").unwrap();
    assert_eq!(node["spec"]["template"]["spec"]["nodeSelector"], json!({"node.kubernetes.io/worker": ""}));
    assert_eq!(env(&node), [pair("PEERPOD_CLUSTER_CAPACITY", "3"), pair("KEPT", "1")]);
}

#[test]
fn impossible_values_are_reported() {
    let refused = |config| daemon_sets(&manifests(), &config, None, "").unwrap_err();
    let typed = config("a", json!({"instanceType": "big"}));
    assert!(refused(typed).starts_with("instanceType: this provider has no setting of that kind"));
    let many = config("a", json!({"limit": "1001"}));
    assert!(refused(many).starts_with("spec.limit 1001: a node runs at most 1000 peer pods"));
    let long = config(&"x".repeat(60), json!({}));
    assert!(refused(long).contains("is too long for the name of a PeerPodConfig"));
    for (data, part) in [
        (vec![], "manifest node.yaml: missing"),
        (vec![("node.yaml", "a: ["), ("relay.yaml", "")], "manifest node.yaml"),
        (vec![("node.yaml", "kind: Pod\nmetadata: {name: x}")], "not a DaemonSet with a name"),
        (vec![("node.yaml", "kind: DaemonSet\nmetadata: {name: x}")], "it has no container"),
    ] {
        let data = data.into_iter().map(|(key, text)| (key.to_owned(), text.to_owned())).collect();
        let why = Manifests::read(&data).unwrap_err();
        assert!(why.contains(part), "{why}");
    }
}

#[test]
fn the_runtime_class_follows_the_one_config_and_is_free_with_several() {
    let (one, two) = (config("a", json!({"nodeSelector": {"pool": "a"}})), config("b", json!({})));
    let class = manifests().runtime_class(&[&one]).unwrap();
    assert_eq!(class["scheduling"]["nodeSelector"], json!({"pool": "a"}));
    let class = manifests().runtime_class(&[&one, &two]).unwrap();
    assert_eq!(class["scheduling"], json!({"tolerations": []}));
}

#[test]
fn settings_of_the_replaced_system_are_recognised() {
    let data = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), "x".to_owned())).collect();
    assert!(is_foreign(&data(&["CLOUD_PROVIDER", "PODVM_INSTANCE_TYPE"])));
    assert!(!is_foreign(&data(&["CLOUD_PROVIDER", "PEERPOD_PROVIDER_KIND"])));
    assert!(!is_foreign(&data(&[])));
}
