//! Serves ttrpc on `node.sock`, which only the relay dials. Services `hypervisor.Hypervisor` and `podvminfo.PodVMInfo`
//! (the relay forwards the shims' frames unchanged) and `peerpod.node.v1.Node`. Handlers check, forward and wait: the
//! library drops them at the caller's deadline and when the connection ends, so no work runs in them.

pub(crate) mod volumes;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_base::lifecycle::Drain;
use peerpod_common::blocking::blocking;
use peerpod_proto::hypervisor::{
    CreateVMRequest, CreateVMResponse, StartVMRequest, StartVMResponse, StopVMRequest, StopVMResponse,
    VersionRequest, VersionResponse,
};
use peerpod_proto::hypervisor_ttrpc::{Hypervisor, create_hypervisor};
use peerpod_proto::node::{
    ClaimRequest, ClaimResponse, ReadInboxRequest, ReadInboxResponse, TakeOverFailedRequest,
    TakeOverFailedResponse,
};
use peerpod_proto::node_ttrpc::{Node, create_node};
use peerpod_proto::podvminfo::{GetInfoRequest, GetInfoResponse};
use peerpod_proto::podvminfo_ttrpc::{PodVmInfo, create_pod_vm_info};
use tracing::{debug, warn};
use ttrpc::Code;
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Server, TtrpcContext};

use crate::ledger::Inbox;
use crate::metrics::Metrics;
use crate::one_line;
use crate::sandbox::{Claim, ClaimRefused, CreateVm, Error, Sandboxes, Stop};
use crate::spec::{self, SandboxId, Wanted};
use crate::traces::traceparent;

/// Size limit of a CSR, larger than every valid one; a hostile guest's data beyond it is not parsed.
const MAX_CSR: usize = 8 << 10;
/// Time that GetInfo waits when its caller sets no deadline.
const INFO_WITHIN: Duration = Duration::from_secs(600);

pub(crate) struct Service {
    pub sandboxes: Sandboxes,
    pub inbox: Inbox,
    pub metrics: Metrics,
    pub drain: Drain,
}

pub(crate) async fn serve(listener: Listener, service: Service) -> ttrpc::Result<Server> {
    let service = Arc::new(service);
    let mut server = Server::new()
        .add_listener(listener)
        .register_service(create_hypervisor(service.clone()))
        .register_service(create_pod_vm_info(service.clone()))
        .register_service(create_node(service));
    server.start().await?;
    Ok(server)
}

/// Maps the sandboxes' errors to ttrpc statuses, in this one place.
impl From<Error> for ttrpc::Error {
    fn from(error: Error) -> ttrpc::Error {
        let code = match &error {
            Error::Unknown(_) | Error::NoSuchPod(_) => Code::NOT_FOUND,
            Error::Stopped { .. } | Error::VolumeTaken { .. } => Code::FAILED_PRECONDITION,
            Error::Failed { .. } => Code::ABORTED,
            Error::Late { .. } => Code::DEADLINE_EXCEEDED,
            Error::Netns { .. } | Error::Invalid(_) => Code::INVALID_ARGUMENT,
            Error::NetnsTaken { .. } => Code::ALREADY_EXISTS,
            Error::Full(_) | Error::Disk { full: true, .. } => Code::RESOURCE_EXHAUSTED,
            Error::Disk { full: false, .. } => Code::INTERNAL,
            Error::NoVmYet(_) | Error::Unavailable(_) | Error::Claim(ClaimRefused::NotYet) => {
                Code::UNAVAILABLE
            }
            Error::Claim(_) => Code::PERMISSION_DENIED,
        };
        status(code, error)
    }
}

fn status(code: Code, why: impl ToString) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, why))
}

fn sandbox_id(text: &str) -> ttrpc::Result<SandboxId> {
    text.parse().map_err(|error| status(Code::INVALID_ARGUMENT, error))
}

/// Returns a limit slightly below the caller's deadline, so that the caller receives the reason and no bare timeout.
fn patience(context: &TtrpcContext) -> Option<Duration> {
    let whole =
        u64::try_from(context.timeout_nano).ok().filter(|nanos| *nanos > 0).map(Duration::from_nanos)?;
    Some(whole - (whole / 10).min(Duration::from_millis(500)))
}

#[async_trait]
impl Hypervisor for Service {
    async fn create_vm(
        &self,
        call: &TtrpcContext,
        request: CreateVMRequest,
    ) -> ttrpc::Result<CreateVMResponse> {
        let _busy = self.drain.busy("CreateVM");
        let id = sandbox_id(&request.id)?;
        let parent = call.metadata.get("traceparent").and_then(|values| traceparent(values.first()?));
        let wanted = spec::parse(&request.annotations)
            .map(|wanted| Wanted { traceparent: parent, ..wanted })
            .map_err(|error| error.to_string());
        let pod = wanted.as_ref().map_or_else(|_| "-".to_owned(), |wanted| wanted.pod.to_string());
        let create = CreateVm { id: id.clone(), wanted, netns: request.networkNamespacePath.into() };
        let created = self.sandboxes.create(create).await.inspect_err(|error| {
            warn!(sandbox = %id, pod, %error, "CreateVM refused");
            if let Ok(pod) = spec::pod_of(&request.annotations) {
                self.sandboxes.refused(&pod, error);
            }
        });
        Ok(CreateVMResponse { agentSocketPath: created?, ..CreateVMResponse::default() })
    }

    async fn start_vm(&self, call: &TtrpcContext, request: StartVMRequest) -> ttrpc::Result<StartVMResponse> {
        let id = sandbox_id(&request.id)?;
        let started = self.sandboxes.start(&id);
        let result = match patience(call) {
            None => started.await,
            Some(limit) => match tokio::time::timeout(limit, started).await {
                Ok(result) => result,
                Err(_) => Err(self.sandboxes.late(&id, limit)),
            },
        };
        result.inspect_err(
            |error| debug!(sandbox = %id, pod = &*self.sandboxes.pod(&id), %error, "StartVM failed"),
        )?;
        Ok(StartVMResponse::default())
    }

    async fn stop_vm(&self, _: &TtrpcContext, request: StopVMRequest) -> ttrpc::Result<StopVMResponse> {
        let _busy = self.drain.busy("StopVM");
        let id = sandbox_id(&request.id)?;
        let stopped = self.sandboxes.stop(&id, Stop::Called).await;
        stopped.inspect_err(
            |error| warn!(sandbox = %id, pod = &*self.sandboxes.pod(&id), %error, "StopVM failed"),
        )?;
        Ok(StopVMResponse::default())
    }

    async fn version(&self, _: &TtrpcContext, _: VersionRequest) -> ttrpc::Result<VersionResponse> {
        Ok(VersionResponse { version: env!("CARGO_PKG_VERSION").into(), ..VersionResponse::default() })
    }
}

#[async_trait]
impl PodVmInfo for Service {
    async fn get_info(&self, call: &TtrpcContext, request: GetInfoRequest) -> ttrpc::Result<GetInfoResponse> {
        let (namespace, name) = (&request.PodNamespace, &request.PodName);
        if namespace.is_empty() || name.is_empty() {
            return Err(status(Code::INVALID_ARGUMENT, "GetInfo needs the pod's namespace and name"));
        }
        let limit = patience(call).unwrap_or(INFO_WITHIN);
        let found = tokio::time::timeout(limit, self.sandboxes.vm_of(namespace, name, request.Wait)).await;
        let vm = found.map_err(|_| {
            let text = format!("pod {namespace}/{name} has no VM on this node after {limit:?}");
            status(Code::DEADLINE_EXCEEDED, text)
        })??;
        Ok(GetInfoResponse { VMID: vm.to_string(), ..GetInfoResponse::default() })
    }
}

#[async_trait]
impl Node for Service {
    async fn claim(&self, _: &TtrpcContext, request: ClaimRequest) -> ttrpc::Result<ClaimResponse> {
        let _busy = self.drain.busy("Claim");
        if request.csr.len() > MAX_CSR {
            return Err(status(Code::INVALID_ARGUMENT, "the certificate request is too long"));
        }
        let claim = Claim {
            secret: request.ticket_secret,
            csr: request.csr,
            peer: one_line(&request.peer_address, 64),
            guest_version: one_line(&request.guest_version, 64),
            tunnel_key: request.tunnel_key,
            dialled: request.dialled,
        };
        let granted = self.sandboxes.claim(&request.ticket_id, claim).await?;
        Ok(ClaimResponse {
            sandbox_id: granted.id.to_string(),
            certificates: granted.chain,
            ..ClaimResponse::default()
        })
    }

    async fn read_inbox(&self, _: &TtrpcContext, _: ReadInboxRequest) -> ttrpc::Result<ReadInboxResponse> {
        let _busy = self.drain.busy("ReadInbox");
        let handled = read_inbox(&self.sandboxes, &self.inbox, &self.metrics).await?;
        Ok(ReadInboxResponse { handled, ..ReadInboxResponse::default() })
    }

    async fn take_over_failed(
        &self,
        _: &TtrpcContext,
        request: TakeOverFailedRequest,
    ) -> ttrpc::Result<TakeOverFailedResponse> {
        let _busy = self.drain.busy("TakeOverFailed");
        let TakeOverFailedRequest { namespace, name, uid, why, .. } = request;
        self.sandboxes.take_over_failed(spec::PodRef { namespace, name, uid: Some(uid) }, &why);
        Ok(TakeOverFailedResponse::default())
    }
}

/// Carries out the stops that the relay has confirmed. Returns the number of notes handled. After an error the notes
/// stay, and are read again.
pub(crate) async fn read_inbox(table: &Sandboxes, inbox: &Inbox, metrics: &Metrics) -> Result<u32, Error> {
    let reader = inbox.clone();
    let (notes, bad) = blocking(move || reader.read().map_err(Error::from)).await?;
    for bad in bad {
        metrics.sandboxes.quarantined.inc();
        tracing::error!(file = %bad.file.display(), moved_to = %bad.moved_to.display(), why = bad.why, "a note in the inbox is not valid");
    }
    let mut handled = 0;
    for note in notes {
        // A stop that cannot be recorded now must not delay the others: its note stays, and is read again soon.
        if let Err(error) = table.stop(&note.id, Stop::Inbox).await {
            warn!(sandbox = %note.id, pod = &*table.pod(&note.id), %error, "cannot record an acknowledged stop yet; trying again");
            continue;
        }
        let inbox = inbox.clone();
        blocking(move || inbox.done(&note).map_err(Error::from)).await?;
        handled += 1;
    }
    Ok(handled)
}
