//! The published rules of the agent's policy (`policy/peerpod.rego`) against what the agent gets from us, evaluated by the
//! program that the agent itself evaluates policies with.

use serde_json::{Value, json};

use super::*;

const RULES: &str = include_str!("../../../policy/peerpod.rego");

/// What the rules say of a request, as the agent shows it to them.
fn says(rule: &str, request: &Value) -> bool {
    let mut engine = regorus::Engine::new();
    engine.add_policy("peerpod.rego".into(), RULES.into()).unwrap();
    let asking =
        format!("package agent_policy\nimport rego.v1\ndefault asked := false\nasked if {rule}(input)\n");
    engine.add_policy("asking.rego".into(), asking).unwrap();
    engine.set_input(regorus::Value::from_json_str(&request.to_string()).unwrap());
    engine.eval_rule("data.agent_policy.asked".into()).unwrap() == regorus::Value::from(true)
}

/// As the agent's serialisation names the fields.
fn shown(request: &agent::CreateContainerRequest) -> Value {
    let mounts = request.OCI.Mounts.iter();
    let namespaces = request.OCI.Linux.Namespaces.iter();
    json!({ "container_id": request.container_id, "OCI": {
        "Annotations": request.OCI.Annotations,
        "Mounts": mounts.map(|mount| json!({ "destination": mount.destination, "source": mount.source,
            "type_": mount.type_, "options": mount.options })).collect::<Vec<_>>(),
        "Linux": { "Namespaces": namespaces.map(|one| json!({ "Type": one.Type, "Path": one.Path })).collect::<Vec<_>>() },
    } })
}

fn sent_on(recording: &str, gpus: u32) -> Vec<agent::CreateContainerRequest> {
    let mut bench = Bench::new();
    bench.seen.1.store(gpus, std::sync::atomic::Ordering::Relaxed);
    for (from_shim, bytes) in recorded(recording) {
        if from_shim {
            bench.request(&bytes);
        }
    }
    frames(&bench.to_agent)
        .into_iter()
        .filter_map(|(_, payload)| ttrpc_frame::Request::parse_from_bytes(&payload).ok())
        .filter(|request| request.method == "CreateContainer")
        .map(|request| agent::CreateContainerRequest::parse_from_bytes(&request.payload).unwrap())
        .collect()
}

#[test]
fn what_we_send_passes_and_what_we_do_not_send_does_not() {
    for recording in ["rust-cri-pod.jsonl", "rust-volume.jsonl"] {
        let requests = sent_on(recording, 0);
        assert!(!requests.is_empty());
        for request in requests {
            let good = shown(&request);
            assert!(says("peerpod_container", &good), "{recording}: {good}");
            let with = |change: &dyn Fn(&mut Value)| {
                let mut request = good.clone();
                change(&mut request);
                says("peerpod_container", &request)
            };
            let namespaces =
                |list: Value| move |request: &mut Value| request["OCI"]["Linux"]["Namespaces"] = list.clone();
            assert!(!with(&namespaces(json!([]))), "the VM's own network");
            assert!(!with(&namespaces(json!([{ "Type": "network", "Path": "" }]))));
            assert!(!with(&namespaces(
                json!([{ "Type": "network", "Path": PODNS }, { "Type": "network", "Path": "/proc/1/ns/net" }])
            )));
            for source in [
                "/etc",
                "/run/peerpod/guest/key",
                "/run/peerpod/volumes/../guest",
                "/run/peerpod/volumes/x/..",
            ] {
                let mount = json!({ "destination": "/x", "source": source, "type_": "bind", "options": [] });
                assert!(
                    !with(&|request| request["OCI"]["Mounts"].as_array_mut().unwrap().push(mount.clone())),
                    "{source}"
                );
            }
            for (value, may) in [
                ("nvidia.com/gpu=all", true),
                ("nvidia.com/gpu=0,nvidia.com/gpu=1", true),
                ("vendor.com/net=all", false),
            ] {
                assert_eq!(
                    with(&|request| request["OCI"]["Annotations"]["cdi.k8s.io/peer-pods"] = json!(value)),
                    may,
                    "{value}"
                );
            }
        }
    }
    assert!(says("peerpod_sandbox", &json!({ "dns": [] })) && says("peerpod_sandbox", &json!({})));
    assert!(!says("peerpod_sandbox", &json!({ "dns": ["nameserver 10.96.0.10"] })));
}

#[test]
fn no_recorded_container_asks_for_gpus_and_none_gets_them() {
    for request in sent_on("rust-cri-pod.jsonl", 2) {
        assert!(!request.OCI.Annotations.contains_key("cdi.k8s.io/peer-pods"));
    }
}

#[test]
fn a_container_that_asks_in_a_vm_with_gpus_gets_them_in_the_whole_request() {
    let mut container = agent::CreateContainerRequest::new();
    container.container_id = "c".into();
    container.OCI.mut_or_insert_default().Process.mut_or_insert_default().Env =
        vec!["NVIDIA_VISIBLE_DEVICES=all".into()];
    let payload = request("CreateContainer", container.write_to_bytes().unwrap());
    for (gpus, expected) in [(0, None), (1, Some("nvidia.com/gpu=all"))] {
        let mut bench = Bench::new();
        bench.seen.1.store(gpus, std::sync::atomic::Ordering::Relaxed);
        bench.request(&frame(1, REQUEST, &payload));
        let (_, sent) = frames(&bench.to_agent).remove(0);
        let sent = ttrpc_frame::Request::parse_from_bytes(&sent).unwrap();
        let sent = agent::CreateContainerRequest::parse_from_bytes(&sent.payload).unwrap();
        assert_eq!(sent.OCI.Annotations.get("cdi.k8s.io/peer-pods").map(String::as_str), expected);
        assert_eq!(sent.OCI.Process.Env, ["NVIDIA_VISIBLE_DEVICES=all"]);
        assert!(says("peerpod_container", &shown(&sent)));
    }
}
