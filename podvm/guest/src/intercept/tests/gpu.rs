//! Tests which containers are marked for the VM's GPUs, in whole requests.

use super::*;

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
    }
}
