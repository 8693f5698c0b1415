//! Checks the generated types against recorded frames of a real shim and a real agent. The frames decode as the named
//! types, leave no unknown fields, and encode to the same messages. Unknown fields survive.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_proto::{agent, hypervisor, ttrpc_frame};
use proptest::prelude::*;
use protobuf::reflect::{ReflectFieldRef, ReflectValueRef};
use protobuf::{Message, MessageDyn, MessageFull, UnknownValueRef};

/// One frame of a transcript.
struct Frame {
    file: String,
    service: String,
    method: String,
    kind: u64,
    length: usize,
    timeout_nano: i64,
    payload: Vec<u8>,
}

fn transcripts() -> Vec<Frame> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/transcripts");
    let mut frames = Vec::new();
    for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jsonl") {
            continue;
        }
        for line in fs::read_to_string(&path).unwrap().lines() {
            let object: serde_json::Value = serde_json::from_str(line).unwrap();
            let Some(payload) = object["payload_b64"].as_str() else { continue };
            frames.push(Frame {
                file: path.file_name().unwrap().to_string_lossy().into_owned(),
                service: object["service"].as_str().unwrap().into(),
                method: object["method"].as_str().unwrap().into(),
                kind: object["type"].as_u64().unwrap(),
                length: object["len"].as_u64().unwrap() as usize,
                timeout_nano: object["timeout_nano"].as_i64().unwrap(),
                payload: BASE64_STANDARD.decode(payload).unwrap(),
            });
        }
    }
    assert!(frames.len() > 250, "the transcripts are there: {}", frames.len());
    frames
}

/// Collects every unknown field of a message and of its nested messages, as `path#number`.
fn unknown_fields(message: &dyn MessageDyn, path: &str, found: &mut Vec<String>) {
    found.extend(message.unknown_fields_dyn().iter().map(|(number, _)| format!("{path}#{number}")));
    for field in message.descriptor_dyn().fields() {
        let path = format!("{path}.{}", field.name());
        let mut visit = |value: ReflectValueRef<'_>| {
            if let ReflectValueRef::Message(inner) = value {
                unknown_fields(&*inner, &path, found);
            }
        };
        match field.get_reflect(message) {
            ReflectFieldRef::Optional(value) => value.value().into_iter().for_each(&mut visit),
            ReflectFieldRef::Repeated(values) => values.into_iter().for_each(&mut visit),
            ReflectFieldRef::Map(values) => values.into_iter().for_each(|(_, value)| visit(value)),
        }
    }
}

/// Decodes, encodes, decodes again and compares (the order of map entries is free). Returns the unknown fields.
fn holds<M: MessageFull + PartialEq>(bytes: &[u8]) -> Vec<String> {
    let message = M::parse_from_bytes(bytes).expect("a recorded payload decodes");
    let again = message.write_to_bytes().expect("a message encodes");
    assert_eq!(again.len(), bytes.len(), "{} is as long as it was", M::NAME);
    assert!(M::parse_from_bytes(&again).expect("what we wrote decodes") == message, "{} came back", M::NAME);
    let mut found = Vec::new();
    unknown_fields(&message, M::NAME, &mut found);
    found
}

/// Checks a payload as the request or response of `method`; `None` when the method is not in the table.
fn check(service: &str, method: &str, kind: u64, payload: &[u8]) -> Option<Vec<String>> {
    macro_rules! table {
        ($($service:literal { $($method:ident: $request:ty => $response:ty,)* })*) => {
            match (service, method, kind) {
                $($(($service, stringify!($method), 1) => Some(holds::<$request>(payload)),
                    ($service, stringify!($method), 2) => Some(holds::<$response>(payload)),)*)*
                _ => None,
            }
        };
    }
    table! {
        "hypervisor.Hypervisor" {
            CreateVM: hypervisor::CreateVMRequest => hypervisor::CreateVMResponse,
            StartVM: hypervisor::StartVMRequest => hypervisor::StartVMResponse,
            StopVM: hypervisor::StopVMRequest => hypervisor::StopVMResponse,
        }
        "grpc.Health" {
            Check: agent::CheckRequest => agent::HealthCheckResponse,
        }
        "grpc.AgentService" {
            CreateSandbox: agent::CreateSandboxRequest => agent::Empty,
            GetGuestDetails: agent::GuestDetailsRequest => agent::GuestDetailsResponse,
            GetOOMEvent: agent::GetOOMEventRequest => agent::OOMEvent,
            CopyFile: agent::CopyFileRequest => agent::Empty,
            CreateContainer: agent::CreateContainerRequest => agent::Empty,
            StartContainer: agent::StartContainerRequest => agent::Empty,
            ExecProcess: agent::ExecProcessRequest => agent::Empty,
            WaitProcess: agent::WaitProcessRequest => agent::WaitProcessResponse,
            SignalProcess: agent::SignalProcessRequest => agent::Empty,
            RemoveContainer: agent::RemoveContainerRequest => agent::Empty,
            StatsContainer: agent::StatsContainerRequest => agent::StatsContainerResponse,
            ReadStdout: agent::ReadStreamRequest => agent::ReadStreamResponse,
            ReadStderr: agent::ReadStreamRequest => agent::ReadStreamResponse,
            WriteStdin: agent::WriteStreamRequest => agent::WriteStreamResponse,
        }
    }
}

#[test]
fn every_recorded_frame_decodes_and_leaves_nothing_over() {
    let mut seen = BTreeMap::<String, usize>::new();
    for frame in transcripts() {
        let place = format!("{}: {} {} type {}", frame.file, frame.service, frame.method, frame.kind);
        assert_eq!(frame.payload.len(), frame.length, "{place}");
        let inner = if frame.kind == 1 {
            assert_eq!(holds::<ttrpc_frame::Request>(&frame.payload), Vec::<String>::new(), "{place}");
            let request = ttrpc_frame::Request::parse_from_bytes(&frame.payload).unwrap();
            assert_eq!((&request.service, &request.method), (&frame.service, &frame.method), "{place}");
            assert_eq!(request.timeout_nano, frame.timeout_nano, "{place}");
            request.payload
        } else {
            assert_eq!(holds::<ttrpc_frame::Response>(&frame.payload), Vec::<String>::new(), "{place}");
            ttrpc_frame::Response::parse_from_bytes(&frame.payload).unwrap().payload
        };
        let left = check(&frame.service, &frame.method, frame.kind, &inner);
        assert_eq!(left, Some(Vec::new()), "{place}: fields we do not know, or a method we do not");
        *seen.entry(frame.method).or_default() += 1;
    }
    assert!(seen.len() >= 18, "{seen:?}");
}

#[test]
fn a_recorded_create_container_says_what_the_shim_meant() {
    let frame =
        transcripts().into_iter().find(|frame| frame.method == "CreateContainer" && frame.kind == 1).unwrap();
    let request = ttrpc_frame::Request::parse_from_bytes(&frame.payload).unwrap();
    let request = agent::CreateContainerRequest::parse_from_bytes(&request.payload).unwrap();
    let process = &request.OCI.Process;
    assert!(!request.container_id.is_empty());
    assert!(!process.Args.is_empty() && process.Env.iter().any(|entry| entry.starts_with("PATH=")));
    assert!(request.OCI.Annotations.contains_key("io.katacontainers.pkg.oci.bundle_path"));
    assert!(request.OCI.Mounts.iter().any(|mount| mount.destination == "/proc" && mount.type_ == "proc"));
    assert!(request.OCI.Linux.Namespaces.iter().all(|namespace| namespace.Type != "network"));
    assert_eq!(request.storages[0].driver, "image_guest_pull");
}

#[test]
fn create_vm_carries_exactly_the_nine_annotations() {
    for frame in transcripts().into_iter().filter(|frame| frame.method == "CreateVM" && frame.kind == 1) {
        let request = ttrpc_frame::Request::parse_from_bytes(&frame.payload).unwrap();
        let request = hypervisor::CreateVMRequest::parse_from_bytes(&request.payload).unwrap();
        assert_eq!(request.annotations.len(), 9, "{}: {:?}", frame.file, request.annotations);
        assert!(!request.id.is_empty() && request.networkNamespacePath.starts_with('/'), "{}", frame.file);
    }
}

#[test]
fn unknown_fields_survive_at_every_depth() {
    // A later Kata may send new fields: in the request, in the specification and in one of its lists.
    let mut request = agent::CreateContainerRequest::new();
    request.container_id = "c".into();
    request.OCI.mut_or_insert_default().Linux.mut_or_insert_default().Namespaces.push(Default::default());
    request.mut_unknown_fields().add_length_delimited(9001, b"new in the request".to_vec());
    let specification = request.OCI.as_mut().unwrap();
    specification.mut_unknown_fields().add_varint(9002, 7);
    let namespace = &mut specification.Linux.as_mut().unwrap().Namespaces[0];
    namespace.mut_unknown_fields().add_fixed64(9003, 11);

    let bytes = request.write_to_bytes().unwrap();
    let mut read = agent::CreateContainerRequest::parse_from_bytes(&bytes).unwrap();
    // A change to known fields leaves the unknown ones alone.
    read.OCI.as_mut().unwrap().Hostname = "changed".into();
    let read = agent::CreateContainerRequest::parse_from_bytes(&read.write_to_bytes().unwrap()).unwrap();

    assert_eq!(read.OCI.Hostname, "changed");
    let expected = UnknownValueRef::LengthDelimited(b"new in the request");
    assert_eq!(read.unknown_fields().get(9001), Some(expected));
    assert_eq!(read.OCI.unknown_fields().get(9002), Some(UnknownValueRef::Varint(7)));
    assert_eq!(read.OCI.Linux.Namespaces[0].unknown_fields().get(9003), Some(UnknownValueRef::Fixed64(11)));
}

#[test]
fn a_type_that_knows_less_passes_the_rest_on() {
    // The whole specification survives a type that declares none of its fields.
    for frame in
        transcripts().into_iter().filter(|frame| frame.method == "CreateContainer" && frame.kind == 1)
    {
        let request = ttrpc_frame::Request::parse_from_bytes(&frame.payload).unwrap();
        let narrow = agent::StartContainerRequest::parse_from_bytes(&request.payload).unwrap();
        let wide =
            agent::CreateContainerRequest::parse_from_bytes(&narrow.write_to_bytes().unwrap()).unwrap();
        assert!(wide == agent::CreateContainerRequest::parse_from_bytes(&request.payload).unwrap());
    }
}

#[test]
fn services_are_called_on_the_wire_what_the_protos_call_them() {
    struct Nothing;
    impl peerpod_proto::podvminfo_ttrpc::PodVmInfo for Nothing {}
    impl peerpod_proto::agent_ttrpc::AgentService for Nothing {}
    impl peerpod_proto::hypervisor_ttrpc::Hypervisor for Nothing {}
    let nothing = Arc::new(Nothing);
    let mut services = peerpod_proto::podvminfo_ttrpc::create_pod_vm_info(nothing.clone());
    services.extend(peerpod_proto::agent_ttrpc::create_agent_service(nothing.clone()));
    services.extend(peerpod_proto::hypervisor_ttrpc::create_hypervisor(nothing));
    let mut names: Vec<&str> = services.keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["grpc.AgentService", "hypervisor.Hypervisor", "podvminfo.PodVMInfo"]);
    assert_eq!(services["grpc.AgentService"].methods.len(), 42);
}

proptest! {
    #[test]
    fn decoding_garbage_is_an_error_or_a_message_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        if let Ok(message) = agent::CreateContainerRequest::parse_from_bytes(&bytes) {
            let again = message.write_to_bytes().unwrap();
            prop_assert!(agent::CreateContainerRequest::parse_from_bytes(&again).unwrap() == message);
        }
        // A parse error is a valid result.
        drop(ttrpc_frame::Request::parse_from_bytes(&bytes));
    }
}
