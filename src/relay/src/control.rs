//! Serves `relay.sock`, the API that the node calls. Handlers only check, pass on and map errors; all may be repeated.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_common::blocking::blocking;
use peerpod_proto::guest::Request;
use peerpod_proto::relay::{
    self, ConfigureRequest, ConfigureResponse, DeleteSandboxRequest, DeleteSandboxResponse, GuestCallRequest,
    GuestCallResponse, PutSandboxRequest, PutSandboxResponse, WatchRequest, WatchResponse,
};
use peerpod_proto::relay_ttrpc::Relay;
use protobuf::Message;
use ttrpc::Code;
use ttrpc::r#async::TtrpcContext as Context;

use crate::guest_dialer::ADDRESSES;
use crate::guests::Trust;
use crate::handover::Pause;
use crate::id::SandboxId;
use crate::metrics::Metrics;
use crate::sandboxes::guest::Gone;
use crate::sandboxes::states::States;
use crate::sandboxes::{SandboxError, Sandboxes};
use crate::store::{RelayStore, SandboxRecord, ServerIdentity, TunnelPeer};
use crate::volumes::{self, Volume};
use crate::wireguard::WireGuard;

/// Time after which a Watch returns an empty answer.
const WATCH: Duration = Duration::from_secs(30);
/// Time limit of a guest call without a deadline.
const CALL: Duration = Duration::from_secs(60);
/// Upper bound of every guest call's time limit.
const CALL_AT_MOST: Duration = Duration::from_secs(600);
/// Largest request to a guest, in bytes: the size of one control message.
const REQUEST_BYTES: usize = (5 << 20) - 64;
/// Limit of certificates per sandbox: the present one, the next one, and some reserve.
const CERTIFICATES: usize = 16;

pub(crate) struct Control {
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) states: Arc<States>,
    pub(crate) store: RelayStore,
    pub(crate) trust: Arc<Trust>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) wireguard: Arc<WireGuard>,
    pub(crate) listen: SocketAddr,
    /// Pauses these calls during a handover, while the state that they change is frozen.
    pub(crate) pause: Pause,
}

fn status(code: Code, why: impl ToString) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, why))
}

fn invalid(why: impl ToString) -> ttrpc::Error {
    status(Code::INVALID_ARGUMENT, why)
}

/// The only mapping from `SandboxError` to status codes.
impl From<SandboxError> for ttrpc::Error {
    fn from(error: SandboxError) -> ttrpc::Error {
        let code = match &error {
            SandboxError::Path(..) => Code::INVALID_ARGUMENT,
            SandboxError::Certificate(..) => Code::ALREADY_EXISTS,
            SandboxError::Listen { .. } | SandboxError::Store(_) => Code::INTERNAL,
            SandboxError::Interrupted(_) => Code::UNAVAILABLE,
        };
        status(code, error)
    }
}

impl From<Gone> for ttrpc::Error {
    fn from(gone: Gone) -> ttrpc::Error {
        let code = match &gone {
            Gone::NotConnected(_) | Gone::Replaced(_) => Code::UNAVAILABLE,
            Gone::TooMany(_) => Code::RESOURCE_EXHAUSTED,
        };
        status(code, gone)
    }
}

/// Returns a call's time limit: a little less than its caller waits, so that the caller gets the reason and no timeout.
fn patience(context: &Context, without: Duration) -> Duration {
    match u64::try_from(context.timeout_nano) {
        Ok(nanos) if nanos > 0 => {
            let whole = Duration::from_nanos(nanos);
            whole - (whole / 10).min(Duration::from_secs(1))
        }
        _ => without,
    }
}

fn id_of(text: &str) -> ttrpc::Result<SandboxId> {
    SandboxId::new(text).map_err(invalid)
}

fn record_of(request: PutSandboxRequest) -> ttrpc::Result<SandboxRecord> {
    let id = id_of(&request.id)?;
    let (certificates, addresses) = (request.guest_certificates.len(), request.dial.len());
    if certificates > CERTIFICATES {
        let why = format!("sandbox {id} has {certificates} certificates, more than {CERTIFICATES}");
        return Err(invalid(why));
    }
    let prints = request.guest_certificates.into_iter().map(<[u8; 32]>::try_from);
    let guest_certificates = prints
        .collect::<Result<_, _>>()
        .map_err(|_| invalid("a certificate's fingerprint does not have 32 bytes"))?;
    let tunnel_peer = request.tunnel_peer.into_option().map(tunnel_peer).transpose()?;
    if addresses > ADDRESSES {
        let why = format!("sandbox {id} has {addresses} addresses to dial, more than {ADDRESSES}");
        return Err(invalid(why));
    }
    let dial = request.dial.iter().map(|address| address.parse()).collect::<Result<_, _>>();
    let dial = dial.map_err(|_| invalid("an address to dial is not an IP address with a port"))?;
    let addresses = request.addresses.iter().take(ADDRESSES).map(|address| address.parse());
    let addresses = addresses
        .collect::<Result<_, _>>()
        .map_err(|_| invalid("an address of the VM is not an IP address"))?;
    let (agent_socket, pod) = (request.agent_socket.into(), request.pod);
    let volumes = volumes_of(&id, request.volumes)?;
    Ok(SandboxRecord { id, agent_socket, guest_certificates, pod, tunnel_peer, dial, volumes, addresses })
}

fn volumes_of(id: &SandboxId, told: Vec<relay::Volume>) -> ttrpc::Result<Vec<Volume>> {
    let refused = |why: String| invalid(format!("volumes of sandbox {id}: {why}"));
    if told.len() > volumes::MOST {
        return Err(refused(format!("{} volumes are more than {}", told.len(), volumes::MOST)));
    }
    let volume = |told: relay::Volume| {
        let relay::Volume { id, name, target_path, marker, read_only, block, .. } = told;
        // A volume with the root as its target would own all files of the node.
        let path = std::path::Path::new(&target_path);
        // The id becomes part of paths.
        if !volumes::is_volume_id(&id) || !path.is_absolute() || path.components().count() < 3 {
            return Err(refused(format!("id {id:?} at {target_path:?} is not a volume")));
        }
        Ok(Volume { id, name, target_path, marker, read_only, block })
    };
    told.into_iter().map(volume).collect()
}

fn tunnel_peer(peer: relay::TunnelPeer) -> ttrpc::Result<TunnelPeer> {
    let wrong = |what: &str| invalid(format!("the tunnel peer's {what} is not valid"));
    Ok(TunnelPeer {
        key: peer.key,
        inner: peer.inner_address.parse().map_err(|_| wrong("inner address"))?,
        vnis: peer.vnis,
        vxlan_port: u16::try_from(peer.vxlan_port).map_err(|_| wrong("VXLAN port"))?,
    })
}

#[async_trait]
impl Relay for Control {
    async fn configure(&self, _: &Context, request: ConfigureRequest) -> ttrpc::Result<ConfigureResponse> {
        let _open = self.pause.clone().read_owned().await;
        let identity = ServerIdentity {
            certificates: request.certificates,
            private_key: request.private_key,
            trusted_cas: request.trusted_cas,
        };
        let config = identity.server_config().map_err(invalid)?;
        let store = self.store.clone();
        blocking(move || store.put_identity(&identity).map_err(SandboxError::from)).await?;
        *self.trust.write() = Some(config);
        tracing::info!("configured by peerpod-node");
        let (listen_address, epoch) = (self.listen.to_string(), self.states.epoch().to_owned());
        Ok(ConfigureResponse { listen_address, epoch, ..Default::default() })
    }

    async fn put_sandbox(
        &self,
        _: &Context,
        request: PutSandboxRequest,
    ) -> ttrpc::Result<PutSandboxResponse> {
        let open = self.pause.clone().read_owned().await;
        let record = record_of(request)?;
        let (id, pod) = (record.id.clone(), record.pod.clone());
        let refused = |why| invalid(format!("tunnel peer of sandbox {id}: {why}"));
        self.wireguard.put(&id, record.tunnel_peer.as_ref()).map_err(refused)?;
        self.sandboxes.put(record, open).await?;
        tracing::info!(sandbox = %id, pod, "sandbox is served");
        Ok(PutSandboxResponse::new())
    }

    async fn delete_sandbox(
        &self,
        _: &Context,
        request: DeleteSandboxRequest,
    ) -> ttrpc::Result<DeleteSandboxResponse> {
        let open = self.pause.clone().read_owned().await;
        let id = id_of(&request.id)?;
        let (sandboxes, gone) = (self.sandboxes.clone(), id.clone());
        let pod = self.states.pod(&id);
        // Runs in its own task: a dropped call must not leave a sandbox half deleted.
        let deleted = async move {
            let _open = open;
            sandboxes.delete(&gone).await
        };
        tokio::spawn(deleted).await.map_err(|_| status(Code::UNAVAILABLE, "the relay is stopping"))??;
        self.wireguard.delete(&id);
        tracing::info!(sandbox = %id, pod = &*pod, "sandbox is no longer served");
        Ok(DeleteSandboxResponse::new())
    }

    async fn guest_call(
        &self,
        context: &Context,
        request: GuestCallRequest,
    ) -> ttrpc::Result<GuestCallResponse> {
        let id = id_of(&request.id)?;
        let bytes = request.request.len();
        if bytes > REQUEST_BYTES {
            return Err(invalid(format!("the request has {bytes} bytes, more than {REQUEST_BYTES}")));
        }
        let mut message = Request::parse_from_bytes(&request.request)
            .map_err(|error| invalid(format!("read the request: {error}")))?;
        let unknown = || status(Code::NOT_FOUND, format!("sandbox {id} is not served here; put it first"));
        let attached = self.sandboxes.get(&id).ok_or_else(unknown)?;
        let open = self.pause.clone().read_owned().await;
        let mut waiting = attached.guest.call()?;
        message.id = waiting.id;
        let bytes = message.write_to_bytes().map_err(|error| status(Code::INTERNAL, error))?;
        let size = bytes.len();
        let sent = attached.endpoint.control(bytes.into());
        sent.map_err(|full| status(Code::RESOURCE_EXHAUSTED, full))?;
        drop(open);
        self.metrics.guests.calls.inc();
        let patience = patience(context, CALL).min(CALL_AT_MOST);
        tracing::debug!(sandbox = %id, pod = attached.guest.pod(), call = waiting.id, bytes = size, "call to the guest");
        match tokio::time::timeout(patience, &mut waiting.answer).await {
            Ok(Ok(answer)) => Ok(GuestCallResponse { reply: answer?.to_vec(), ..Default::default() }),
            Ok(Err(_)) => Err(Gone::Replaced(id).into()),
            Err(_) => {
                let why = format!("the guest of sandbox {id} did not answer within {patience:?}");
                Err(status(Code::DEADLINE_EXCEEDED, why))
            }
        }
    }

    async fn watch(&self, context: &Context, request: WatchRequest) -> ttrpc::Result<WatchResponse> {
        let patience = patience(context, WATCH).min(WATCH);
        let newer = self.states.newer(&request.epoch, request.since);
        Ok(tokio::time::timeout(patience, newer).await.unwrap_or_else(|_| self.states.nothing(request.since)))
    }
}
