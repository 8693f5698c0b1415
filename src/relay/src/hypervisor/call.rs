//! Parses one request of a shim as far as the hypervisor proxy needs. Pure; the payload is passed on unchanged.

use bytes::Bytes;
use peerpod_proto::hypervisor::{CreateVMRequest, StartVMRequest, StopVMRequest};
use peerpod_proto::ttrpc_frame::{Request, Response, Status};
use protobuf::Message;
use serde::{Deserialize, Serialize};

use crate::id::SandboxId;

/// gRPC status codes that the relay itself returns.
pub(crate) mod code {
    pub(crate) const CANCELLED: i32 = 1;
    pub(crate) const INVALID_ARGUMENT: i32 = 3;
    pub(crate) const DEADLINE_EXCEEDED: i32 = 4;
    pub(crate) const RESOURCE_EXHAUSTED: i32 = 8;
    pub(crate) const UNIMPLEMENTED: i32 = 12;
    pub(crate) const FAILED_PRECONDITION: i32 = 9;
    pub(crate) const INTERNAL: i32 = 13;
    pub(crate) const UNAVAILABLE: i32 = 14;

    /// Codes after which the same request never succeeds: INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS,
    /// PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED.
    pub(crate) const FINAL: [i32; 6] = [INVALID_ARGUMENT, 5, 6, 7, 9, 16];
}

/// Role of a call in the order of one sandbox's calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "sandbox")]
pub(crate) enum Kind {
    Create(SandboxId),
    Start(SandboxId),
    Stop(SandboxId),
    /// Any other permitted call: no order, no sandbox.
    Other,
}

impl Kind {
    pub(crate) fn id(&self) -> Option<&SandboxId> {
        match self {
            Kind::Create(id) | Kind::Start(id) | Kind::Stop(id) => Some(id),
            Kind::Other => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) kind: Kind,
    pub(crate) request: Request,
    /// `namespace/name` of the pod if the call has it (CreateVM), for log records.
    pub(crate) pod: Option<String>,
}

/// Reason why the relay itself answers a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) code: i32,
    pub(crate) message: String,
}

/// Parses the envelope and, for the three calls that have one, the sandbox id.
pub(crate) fn read(body: &[u8]) -> Result<Incoming, Refused> {
    let request: Request = parse("the request's ttrpc header", body)?;
    let (method, payload) = (request.method.as_str(), request.payload.as_slice());
    let id = |id: &str| SandboxId::new(id).map_err(|error| invalid(method, &error));
    let mut pod = None;
    let kind = match (request.service.as_str(), method) {
        ("hypervisor.Hypervisor", "CreateVM") => {
            let message: CreateVMRequest = parse(method, payload)?;
            pod = pod_of(&message);
            Kind::Create(id(&message.id)?)
        }
        ("hypervisor.Hypervisor", "StartVM") => {
            Kind::Start(id(&parse::<StartVMRequest>(method, payload)?.id)?)
        }
        ("hypervisor.Hypervisor", "StopVM") => Kind::Stop(id(&parse::<StopVMRequest>(method, payload)?.id)?),
        ("hypervisor.Hypervisor" | "podvminfo.PodVMInfo", _) => Kind::Other,
        (service, method) => {
            let message = format!(
                "{service:.64}/{method:.64} is not served here; this socket has hypervisor.Hypervisor and podvminfo.PodVMInfo"
            );
            return Err(Refused { code: code::UNIMPLEMENTED, message });
        }
    };
    Ok(Incoming { kind, request, pod })
}

fn parse<M: Message>(what: &str, bytes: &[u8]) -> Result<M, Refused> {
    M::parse_from_bytes(bytes).map_err(|error| invalid(what, &error))
}

fn invalid(what: &str, why: &dyn std::fmt::Display) -> Refused {
    Refused { code: code::INVALID_ARGUMENT, message: format!("read {what}: {why}") }
}

fn pod_of(message: &CreateVMRequest) -> Option<String> {
    let get = |key: &str| message.annotations.get(key).map(String::as_str).filter(|text| !text.is_empty());
    let name = get("io.kubernetes.cri.sandbox-name")?;
    // With the Go shim under CRI-O it is k8s_<pod>_<namespace>_<uid>_<attempt>. No name of Kubernetes has an underscore.
    let name = name.strip_prefix("k8s_").and_then(|rest| rest.split('_').next()).unwrap_or(name);
    let namespace = get("io.kubernetes.cri.sandbox-namespace").unwrap_or("");
    Some(format!("{namespace:.128}/{name:.256}"))
}

/// Encodes the envelope of an answer that the relay itself gives.
pub(crate) fn status(code: i32, message: &str) -> Bytes {
    let status = Status { code, message: message.to_owned(), ..Default::default() };
    let response = Response { status: Some(status).into(), ..Default::default() };
    // Encoding these messages never fails. The fallback is code 13, because an empty envelope would mean success.
    response.write_to_bytes().map_or_else(|_| Bytes::from_static(&[0x0a, 0x02, 0x08, 0x0d]), Bytes::from)
}

pub(crate) fn done() -> Bytes {
    status(0, "")
}

/// Returns whether an envelope, also one of the node, is no error.
pub(crate) fn is_ok(body: &[u8]) -> bool {
    Response::parse_from_bytes(body).is_ok_and(|response| response.status.code == 0)
}

#[cfg(test)]
mod tests {
    use peerpod_proto::{hypervisor, ttrpc_frame};

    use super::*;

    fn request(service: &str, method: &str, payload: Vec<u8>) -> Vec<u8> {
        ttrpc_frame::Request { service: service.into(), method: method.into(), payload, ..Default::default() }
            .write_to_bytes()
            .unwrap()
    }

    #[test]
    fn a_create_names_its_sandbox_and_pod() {
        for name in ["web", "k8s_web_shop_5b3c1f6e_0"] {
            let mut create = hypervisor::CreateVMRequest { id: "sb1".into(), ..Default::default() };
            create.annotations.insert("io.kubernetes.cri.sandbox-name".into(), name.into());
            create.annotations.insert("io.kubernetes.cri.sandbox-namespace".into(), "shop".into());
            let body = request("hypervisor.Hypervisor", "CreateVM", create.write_to_bytes().unwrap());
            let incoming = read(&body).unwrap();
            assert_eq!(incoming.kind, Kind::Create(SandboxId::new("sb1").unwrap()));
            assert_eq!(incoming.pod.as_deref(), Some("shop/web"), "{name}");
        }
    }

    #[test]
    fn other_services_are_unimplemented_and_bad_ids_invalid() {
        assert_eq!(read(&request("grpc.Health", "Check", vec![])).unwrap_err().code, code::UNIMPLEMENTED);
        let stop = hypervisor::StopVMRequest { id: "../x".into(), ..Default::default() };
        let body = request("hypervisor.Hypervisor", "StopVM", stop.write_to_bytes().unwrap());
        assert_eq!(read(&body).unwrap_err().code, code::INVALID_ARGUMENT);
        assert_eq!(read(&[0xff, 0xff, 0xff]).unwrap_err().code, code::INVALID_ARGUMENT);
    }

    #[test]
    fn calls_without_a_sandbox_pass() {
        for (service, method) in [("podvminfo.PodVMInfo", "GetInfo"), ("hypervisor.Hypervisor", "Version")] {
            assert_eq!(read(&request(service, method, vec![])).unwrap().kind, Kind::Other);
        }
    }

    #[test]
    fn an_own_answer_carries_its_code() {
        let read = ttrpc_frame::Response::parse_from_bytes(&status(14, "away")).unwrap();
        assert_eq!((read.status.code, read.status.message.as_str()), (14, "away"));
        assert_eq!(ttrpc_frame::Response::parse_from_bytes(&done()).unwrap().status.code, 0);
    }
}
