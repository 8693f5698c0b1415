//! Rewrites requests: bytes of a ttrpc request in, bytes out. The types name only the fields that are touched; all
//! others are unknown fields and survive.

use std::time::Duration;

use anyhow::{Context, ensure};
use peerpod_link::frame::MAX_PAYLOAD;
use peerpod_proto::intercept::{CreateContainerRequest, CreateSandboxRequest, LinuxNamespace};
use peerpod_proto::ttrpc_frame::Request;
use protobuf::Message;

use super::Notice;

mod gpu;
mod memory;
mod volumes;

pub(super) use volumes::Waiting;

pub(super) enum Rewritten {
    /// The request can go to the kata-agent.
    Whole(Vec<u8>),
    /// The request must wait for its volumes.
    Waits(Box<Waiting>),
}

const DECODE: &str = "cannot be decoded";
/// Capability to change the pod's network.
const NETWORK_ADMIN: &str = "CAP_NET_ADMIN";

/// Puts the pod's network namespace into the container's specification, and reports its bind sources and capabilities.
/// A request without an OCI specification passes unchanged: the kata-agent has the right error for it.
pub(super) fn create_container(
    payload: Vec<u8>,
    podns: &str,
    notice: &dyn Notice,
) -> anyhow::Result<Rewritten> {
    let mut request = Request::parse_from_bytes(&payload).context(DECODE)?;
    let mut container = CreateContainerRequest::parse_from_bytes(&request.payload).context(DECODE)?;
    if let Some(nanos) = u64::try_from(request.timeout_nano).ok().filter(|nanos| *nanos > 0) {
        notice.wanted_within(&container.container_id, Duration::from_nanos(nanos));
    }
    let wanted = volumes::wanted(&container)?;
    let Some(spec) = container.OCI.as_mut() else { return Ok(Rewritten::Whole(payload)) };

    let is_bind = |mount: &&peerpod_proto::intercept::Mount| {
        mount.type_ == "bind" || mount.options.iter().any(|option| option == "bind" || option == "rbind")
    };
    for mount in spec.Mounts.iter().filter(is_bind) {
        // Sources on a volume are made when the volume is made ready.
        if !wanted.iter().any(|volume| volumes::path_on(&volume.id, &mount.source).is_some()) {
            notice.bind_source(&mount.source);
        }
    }
    if let Some(capabilities) = spec.Process.as_ref().and_then(|process| process.Capabilities.as_ref()) {
        let mut all =
            capabilities.Bounding.iter().chain(&capabilities.Effective).chain(&capabilities.Permitted);
        if all.any(|capability| capability == NETWORK_ADMIN) {
            notice.network_admin();
        }
    }

    memory::limit(spec).with_context(|| format!("the pod's annotation {} cannot be read", memory::LIMITS))?;
    if notice.gpus() > 0 {
        gpu::mark(spec);
    }

    let namespaces = &mut spec.Linux.mut_or_insert_default().Namespaces;
    namespaces.retain(|namespace| namespace.Type != "network");
    namespaces.push(LinuxNamespace {
        Type: "network".to_owned(),
        Path: podns.to_owned(),
        ..LinuxNamespace::default()
    });

    if !wanted.is_empty() {
        return Ok(Rewritten::Waits(Box::new(Waiting { wanted, request, container })));
    }
    request.payload = container.write_to_bytes()?;
    encode(&request).map(Rewritten::Whole)
}

/// Removes the pod's DNS lines, which the kata-agent would write over the VM's own resolv.conf. Containers get a file.
pub(super) fn create_sandbox(payload: Vec<u8>) -> anyhow::Result<Vec<u8>> {
    let mut request = Request::parse_from_bytes(&payload).context(DECODE)?;
    let mut sandbox = CreateSandboxRequest::parse_from_bytes(&request.payload).context(DECODE)?;
    if sandbox.dns.is_empty() {
        return Ok(payload);
    }
    sandbox.dns.clear();
    request.payload = sandbox.write_to_bytes()?;
    encode(&request)
}

fn encode(request: &Request) -> anyhow::Result<Vec<u8>> {
    let bytes = request.write_to_bytes()?;
    ensure!(
        bytes.len() <= MAX_PAYLOAD,
        "with the pod's network namespace it has {} bytes, more than the {MAX_PAYLOAD} an agent accepts",
        bytes.len()
    );
    Ok(bytes)
}
