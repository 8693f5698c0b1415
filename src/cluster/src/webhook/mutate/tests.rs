use proptest::prelude::*;

use super::*;

fn profile(totals: Totals) -> Profile {
    Profile {
        runtime_classes: vec!["kata-remote".to_owned(), "kata-second".to_owned()],
        resource: "kata.peerpods.io/vm".to_owned(),
        totals,
        gpus: vec!["nvidia.com/gpu".to_owned()],
    }
}

/// Returns `"cpu=2,memory=4Gi"` as a list of resources.
fn list(text: &str) -> Value {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    Value::Object(pairs.map(|(name, value)| (name.to_owned(), json!(value))).collect())
}

fn container(name: &str, requests: &str, limits: &str) -> Value {
    json!({"name": name, "image": "x", "resources": {"requests": list(requests), "limits": list(limits)}})
}

fn pod(init: Vec<Value>, containers: Vec<Value>) -> Value {
    json!({"metadata": {"name": "p"}, "spec": {
        "runtimeClassName": "kata-remote", "initContainers": init, "containers": containers,
    }})
}

fn after(pod: &Value, profile: &Profile) -> Value {
    let mut changed = pod.clone();
    json_patch::patch(&mut changed, &mutate(pod, profile).unwrap()).unwrap();
    changed
}

fn sizes(pod: &Value) -> [Option<&str>; 3] {
    [VCPUS, MEMORY, GPUS].map(|key| annotation(pod, key))
}

fn assert_one_vm(pod: &Value) {
    let one = json!({"kata.peerpods.io/vm": "1"});
    let spec = &pod["spec"];
    assert_eq!(spec["containers"][0]["resources"], json!({"requests": one, "limits": one}));
    let init = spec["initContainers"].as_array().into_iter().flatten();
    for container in init.chain(spec["containers"].as_array().unwrap().iter().skip(1)) {
        assert!(container.get("resources").is_none_or(|has| has == &json!({})), "{container}");
    }
    assert!(spec.get("resources").is_none());
}

/// Name, init containers, containers (requests, limits), then vcpus, memory, gpus.
type Row = (
    &'static str,
    Vec<(&'static str, &'static str)>,
    Vec<(&'static str, &'static str)>,
    [Option<&'static str>; 3],
);

/// Test table of the replaced webhook.
fn rows() -> Vec<Row> {
    vec![
        (
            "CpuMemReqLimit",
            vec![],
            vec![("cpu=2,memory=4Gi", "cpu=3,memory=5Gi")],
            [Some("3"), Some("5120"), None],
        ),
        ("CpuReq", vec![], vec![("cpu=2", "")], [Some("2"), None, None]),
        ("MemReq", vec![], vec![("memory=4Gi", "")], [None, Some("4096"), None]),
        ("GpuReq", vec![], vec![("nvidia.com/gpu=1", "nvidia.com/gpu=1")], [None, None, Some("1")]),
        ("NoReq", vec![], vec![("", "")], [None, None, None]),
        (
            "CpuMemReqLimitSame",
            vec![],
            vec![("cpu=2,memory=4Gi", "cpu=2,memory=4Gi")],
            [Some("2"), Some("4096"), None],
        ),
        (
            "InitContainers",
            vec![("cpu=1,memory=2Gi", "cpu=1,memory=2Gi")],
            vec![
                ("cpu=2,memory=4Gi", "cpu=3,memory=5Gi"),
                ("cpu=1,memory=1Gi", "cpu=1,memory=1Gi"),
                ("cpu=1,nvidia.com/gpu=1", "cpu=1,nvidia.com/gpu=1"),
            ],
            [Some("6"), Some("8192"), Some("1")],
        ),
        (
            "FractionalCpu",
            vec![],
            vec![("cpu=200m,memory=4Gi", "cpu=500m,memory=4Gi")],
            [Some("1"), Some("4096"), None],
        ),
        (
            "FractionalCpuMoreThanOne",
            vec![],
            vec![("cpu=200m,memory=4Gi", "cpu=1500m,memory=4Gi")],
            [Some("2"), Some("4096"), None],
        ),
        (
            "FractionalCpu_MultipleContainers",
            vec![("cpu=200m,memory=4Gi", "cpu=0.7,memory=4Gi")],
            vec![("cpu=200m,memory=4Gi", "cpu=0.5,memory=4Gi")],
            [Some("2"), Some("8192"), None],
        ),
    ]
}

/// Claims concern devices and not the node's cpu and memory, so the webhook leaves them.
#[test]
fn claims_of_devices_stay() {
    let claims = json!([{"name": "gpu"}]);
    let with = |name: &str| {
        let mut container = container(name, "cpu=1", "cpu=1");
        container["resources"]["claims"] = claims.clone();
        container
    };
    let pod = pod(vec![with("i")], vec![with("a"), with("b")]);
    let changed = after(&pod, &profile(Totals::Effective));
    let one = json!({"kata.peerpods.io/vm": "1"});
    let spec = &changed["spec"];
    let first = json!({"requests": one, "limits": one, "claims": claims});
    assert_eq!(spec["containers"][0]["resources"], first);
    for other in [&spec["containers"][1], &spec["initContainers"][0]] {
        assert_eq!(other["resources"], json!({"claims": claims}));
    }
    assert_eq!(after(&changed, &profile(Totals::Effective)), changed);
}

fn pod_of(row: &Row) -> Value {
    let named = |prefix: &str, list: &[(&str, &str)]| {
        let each = list.iter().enumerate();
        each.map(|(i, (requests, limits))| container(&format!("{prefix}{i}"), requests, limits)).collect()
    };
    pod(named("i", &row.1), named("c", &row.2))
}

#[test]
fn every_row_of_the_replaced_webhook_holds_in_sum_mode() {
    for row in rows() {
        let changed = after(&pod_of(&row), &profile(Totals::Sum));
        assert_eq!(sizes(&changed), row.3, "{}", row.0);
        assert_one_vm(&changed);
    }
}

#[test]
fn by_kubernetes_rule_only_the_rows_with_init_containers_differ() {
    for row in rows() {
        let changed = after(&pod_of(&row), &profile(Totals::Effective));
        let expected = match row.0 {
            "InitContainers" => [Some("5"), Some("6144"), Some("1")],
            "FractionalCpu_MultipleContainers" => [Some("1"), Some("4096"), None],
            _ => row.3,
        };
        assert_eq!(sizes(&changed), expected, "{}", row.0);
        assert_one_vm(&changed);
    }
}

#[test]
fn other_pods_stay_as_they_are() {
    let mut other = pod(vec![], vec![container("c", "cpu=2", "cpu=3")]);
    other["spec"]["runtimeClassName"] = json!("different-runtime");
    assert_eq!(mutate(&other, &profile(Totals::Sum)).unwrap().0, []);
    other["spec"].as_object_mut().unwrap().remove("runtimeClassName");
    assert_eq!(mutate(&other, &profile(Totals::Sum)).unwrap().0, []);
}

#[test]
fn sidecars_count_to_the_sum_and_pod_level_resources_before_all() {
    let mut sidecar = container("mesh", "cpu=1", "cpu=1");
    sidecar["restartPolicy"] = json!("Always");
    let setup = container("setup", "cpu=2", "cpu=2");
    let mut pod = pod(vec![sidecar, setup], vec![container("c", "cpu=1500m", "")]);
    assert_eq!(sizes(&after(&pod, &profile(Totals::Effective)))[0], Some("3"));
    pod["spec"]["resources"] = json!({"requests": {"cpu": "4"}, "limits": {"memory": "3Gi"}});
    let changed = after(&pod, &profile(Totals::Effective));
    assert_eq!(sizes(&changed), [Some("4"), Some("3072"), None]);
    assert_one_vm(&changed);
}

#[test]
fn a_container_without_a_limit_counts_with_its_request() {
    let pod = pod(vec![], vec![container("a", "cpu=2", "cpu=3"), container("b", "cpu=4", "")]);
    assert_eq!(sizes(&after(&pod, &profile(Totals::Effective)))[0], Some("7"));
    assert_eq!(sizes(&after(&pod, &profile(Totals::Sum)))[0], Some("6"));
}

#[test]
fn a_second_call_changes_nothing() {
    for totals in [Totals::Sum, Totals::Effective] {
        for row in rows() {
            let once = after(&pod_of(&row), &profile(totals));
            assert_eq!(mutate(&once, &profile(totals)).unwrap().0, [], "{}", row.0);
        }
    }
}

#[test]
fn a_sidecar_injected_between_two_calls_is_added() {
    let profiles = profile(Totals::Effective);
    let mut pod = after(&pod(vec![], vec![container("c", "cpu=2", "cpu=3")]), &profiles);
    // One of the service meshes inserts its sidecar at the front.
    pod["spec"]["containers"]
        .as_array_mut()
        .unwrap()
        .insert(0, container("mesh", "cpu=100m,memory=64Mi", ""));
    let pod = after(&pod, &profiles);
    assert_eq!(sizes(&pod), [Some("4"), Some("64"), None]);
    assert_one_vm(&pod);
    assert_eq!(mutate(&pod, &profiles).unwrap().0, []);
}

#[test]
fn a_container_that_another_webhook_removes_or_resizes_is_followed() {
    let profiles = profile(Totals::Effective);
    let two = vec![container("a", "cpu=2", ""), container("b", "cpu=4", "")];
    let mut pod = after(&pod(vec![], two), &profiles);
    pod["spec"]["containers"].as_array_mut().unwrap().pop();
    let mut pod = after(&pod, &profiles);
    assert_eq!(sizes(&pod)[0], Some("2"));
    pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("5");
    assert_eq!(sizes(&after(&pod, &profiles))[0], Some("5"));
}

/// The API server runs its LimitRanger again after a webhook has changed a pod. It finds the cleared containers and
/// fills in the namespace's defaults.
#[test]
fn later_defaults_of_the_limit_ranger_do_not_count() {
    let profiles = profile(Totals::Effective);
    let two = vec![container("a", "cpu=4,memory=1Gi", ""), container("b", "", "")];
    let mut pod = after(&pod(vec![container("i", "cpu=1", "")], two), &profiles);
    for place in ["/spec/containers/0", "/spec/containers/1", "/spec/initContainers/0"] {
        let container = pod.pointer_mut(place).unwrap();
        container["resources"]["requests"]["cpu"] = json!("100m");
        container["resources"]["limits"]["cpu"] = json!("200m");
    }
    pod["metadata"]["annotations"][LIMIT_RANGER] = json!(
        "LimitRanger plugin set: cpu request for container a; cpu limit for container a; cpu request for container b; cpu \
         limit for container b; cpu request for init container i; cpu limit for init container i"
    );
    let pod = after(&pod, &profiles);
    assert_eq!(sizes(&pod), [Some("4"), Some("1024"), None]);
    assert_one_vm(&pod);
}

#[test]
fn memory_limits_go_to_the_vm_in_bytes_and_by_container() {
    let init = vec![container("setup", "", "memory=32Mi")];
    let containers = vec![
        container("web", "memory=64Mi", "memory=256Mi"),
        container("log", "memory=64Mi", ""),
        container("half", "", "cpu=1,memory=1.5e3"),
        container("none", "", "memory=0"),
    ];
    for totals in [Totals::Effective, Totals::Sum] {
        let changed = after(&pod(init.clone(), containers.clone()), &profile(totals));
        let limits: Value = serde_json::from_str(annotation(&changed, MEMORY_LIMITS).unwrap()).unwrap();
        assert_eq!(limits, json!({"setup": 32 << 20, "web": 256 << 20, "half": 1500}));
    }
    let without = after(&pod(vec![], vec![container("c", "memory=1Gi", "")]), &profile(Totals::Effective));
    assert_eq!(annotation(&without, MEMORY_LIMITS), None);
}

/// Without the webhook the shim receives the same sum from the kubelet.
#[test]
fn a_vm_is_sized_by_the_sum_of_limits_and_of_requests_where_there_is_none() {
    let size = |containers: Vec<Value>| {
        let changed = after(&pod(vec![], containers), &profile(Totals::Effective));
        sizes(&changed)[1].map(str::to_owned)
    };
    for limit in ["32Mi", "64Mi", "256Mi"] {
        let limits = format!("memory={limit}");
        assert_eq!(size(vec![container("c", "", &limits)]).as_deref(), limit.strip_suffix("Mi"));
    }
    assert_eq!(size(vec![container("c", "", "")]), None);
    let both = vec![container("a", "memory=16Mi", "memory=64Mi"), container("b", "memory=100Mi", "")];
    assert_eq!(size(both).as_deref(), Some("164"));
}

#[test]
fn the_containers_requests_are_kept() {
    let changed = after(
        &pod(vec![], vec![container("c", "cpu=2,ephemeral-storage=1Gi", "cpu=3")]),
        &profile(Totals::Sum),
    );
    let kept: Value = serde_json::from_str(annotation(&changed, ACCOUNTED).unwrap()).unwrap();
    assert_eq!(
        kept,
        json!({"version": 1, "containers": {"c": {
            "requests": {"cpu": "2", "ephemeral-storage": "1Gi"}, "limits": {"cpu": "3"},
        }}})
    );
}

#[test]
fn a_users_own_sizes_stay_where_the_containers_ask_for_nothing() {
    let mut own = pod(vec![], vec![container("c", "cpu=2", "")]);
    own["metadata"]["annotations"] =
        json!({VCPUS: "9", MEMORY: "777", "io.katacontainers.config.hypervisor.machine_type": "m"});
    let changed = after(&own, &profile(Totals::Effective));
    assert_eq!(sizes(&changed), [Some("2"), Some("777"), None]);
    assert_eq!(annotation(&changed, "io.katacontainers.config.hypervisor.machine_type"), Some("m"));
}

#[test]
fn a_pod_that_is_to_share_a_namespace_of_the_node_is_refused() {
    for (key, what) in [("hostNetwork", "network"), ("hostPID", "processes"), ("hostIPC", "IPC")] {
        let mut pod = pod(vec![], vec![container("c", "cpu=1", "")]);
        pod["spec"][key] = json!(false);
        assert!(mutate(&pod, &profile(Totals::Effective)).is_ok(), "{key}: false");
        pod["spec"][key] = json!(true);
        let said = mutate(&pod, &profile(Totals::Effective)).unwrap_err().to_string();
        assert!(said.starts_with(&format!("spec.{key}: true: a peer pod runs in a VM")), "{said}");
        assert!(said.contains(what) && said.ends_with("give the pod another runtimeClassName"), "{said}");
        pod["spec"]["runtimeClassName"] = json!("runc");
        assert_eq!(mutate(&pod, &profile(Totals::Effective)).unwrap(), Patch(Vec::new()), "not our pod");
    }
}

#[test]
fn refuses_values_that_no_later_check_would_see() {
    let refused = |requests, limits| {
        mutate(&pod(vec![], vec![container("web", requests, limits)]), &profile(Totals::Effective))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refused("cpu=4", "cpu=500m"),
        "container web, cpu: the limit 500m is below the request 4; raise the limit or lower the request"
    );
    assert_eq!(refused("cpu=-1", ""), "container web, cpu: \"-1\" is no quantity of a resource: negative");
    let mut forged = pod(vec![], vec![container("c", "", "")]);
    forged["metadata"]["annotations"] = json!({ACCOUNTED: "{"});
    assert!(
        mutate(&forged, &profile(Totals::Sum)).unwrap_err().to_string().contains("remove the annotation")
    );
    forged["metadata"]["annotations"] = json!({ACCOUNTED: " ".repeat(MOST_RECORD + 1)});
    assert!(mutate(&forged, &profile(Totals::Sum)).unwrap_err().to_string().contains("it is too long"));
    forged["metadata"]["annotations"] = json!({ACCOUNTED: r#"{"version":2}"#});
    assert!(mutate(&forged, &profile(Totals::Sum)).unwrap_err().to_string().contains("version is 2"));
}

#[test]
fn each_class_of_the_profile_counts() {
    let mut pod = pod(vec![container("i", "cpu=1,nvidia.com/gpu=1", "")], vec![container("c", "cpu=1", "")]);
    for class in ["kata-remote", "kata-second"] {
        pod["spec"]["runtimeClassName"] = json!(class);
        let changed = after(&pod, &profile(Totals::Effective));
        assert_eq!(sizes(&changed), [Some("1"), None, Some("1")]);
        assert_one_vm(&changed);
    }
    let profile = Profile { resource: "example.org/vm".to_owned(), gpus: vec![], ..profile(Totals::Sum) };
    let changed = after(&pod, &profile);
    assert_eq!(sizes(&changed), [Some("2"), None, None]);
    assert_eq!(changed["spec"]["containers"][0]["resources"]["requests"], json!({"example.org/vm": "1"}));
}

pub(in crate::webhook) fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z0-9.]{0,6}(m|Gi|)".prop_map(Value::from)
    ];
    let key = "resources|requests|limits|cpu|memory|name|containers|initContainers|restartPolicy|spec|metadata|annotations|volumes|hostPath|securityContext|seccompProfile|type";
    leaf.prop_recursive(6, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..5)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

proptest! {
    /// For any input there is no panic, and a second call changes nothing.
    #[test]
    fn any_pod_is_changed_once_or_refused(mut pod in any_json()) {
        if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) {
            spec.insert("runtimeClassName".to_owned(), json!("kata-remote"));
        }
        for totals in [Totals::Sum, Totals::Effective] {
            let profiles = profile(totals);
            if let Ok(patch) = mutate(&pod, &profiles) {
                let mut changed = pod.clone();
                json_patch::patch(&mut changed, &patch).unwrap();
                prop_assert!(mutate(&changed, &profiles).unwrap().0.is_empty());
            }
        }
    }
}
