//! Serves any [`Provider`] in Rust over the unix socket or mutual TLS: the other end of the protocol.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use peerpod_provider_api::{Error, Provider};
//! # use peerpod_provider_external::serve::{Serving, listen_on_socket, socket_we_were_given, until_orphaned};
//! # async fn example(mine: Arc<dyn Provider>) -> Result<(), Error> {
//! let listener = listen_on_socket(&socket_we_were_given()?)?;
//! // One provider for whoever asks; or look at the owner, and keep one for each.
//! let serving = Serving::start("shelf", listener, move |_owner: &_| Ok(mine.clone())).await?;
//! until_orphaned().await;
//! serving.stop().await;
//! # Ok(())
//! # }
//! ```

mod events;
mod listen;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use peerpod_proto::provider as proto;
use peerpod_proto::provider_ttrpc::{Provider as Service, create_provider};
use peerpod_provider_api::{Capabilities, Error, InstanceId, Provider, with_deadline};
use protobuf::MessageField;
use tokio::time::{Instant, timeout};
use ttrpc::r#async::{Server, TtrpcContext};
use ttrpc::asynchronous::transport::Listener;

use crate::{Owner, wire};
use events::EventLog;
pub use listen::{listen_on_socket, listen_with_tls, socket_we_were_given, until_orphaned};

/// Longest time for which a request is held open, even if its caller asks for more.
const LONGEST_HOLD: Duration = Duration::from_secs(60);
/// VMs on one page of a list: a frame of 4 MiB has space for some 2 KiB each.
const PAGE: usize = 2000;
/// Most owners with an event log; further owners get no events.
const OWNERS: usize = 1024;

/// Selects the provider for the calls of an owner: always the same one for the same owner.
pub trait Providers: Send + Sync + 'static {
    /// Returns the owner's provider.
    ///
    /// # Errors
    /// For an owner that is not served here, preferably [`Error::Auth`].
    fn provider(&self, owner: &Owner) -> Result<Arc<dyn Provider>, Error>;
}

impl<F> Providers for F
where
    F: Fn(&Owner) -> Result<Arc<dyn Provider>, Error> + Send + Sync + 'static,
{
    fn provider(&self, owner: &Owner) -> Result<Arc<dyn Provider>, Error> {
        self(owner)
    }
}

/// Provider that is being served.
pub struct Serving {
    // Never locked: the mutex makes this shareable, which the library's server is not.
    server: Mutex<Server>,
}

impl Serving {
    /// Serves until the value is dropped or stopped. `name` is the provider's name: 1 to 32 of `[a-z0-9-]`.
    ///
    /// # Errors
    /// When the library cannot start.
    pub async fn start(name: &str, listener: Listener, providers: impl Providers) -> Result<Serving, Error> {
        let served =
            Served { name: name.to_owned(), providers: Box::new(providers), events: Mutex::default() };
        let mut server =
            Server::new().add_listener(listener).register_service(create_provider(Arc::new(served)));
        let started = server.start().await;
        started.map_err(|error| Error::transient(format!("serve the provider {name}: {error}")))?;
        Ok(Serving { server: Mutex::new(server) })
    }

    /// Closes the listener and all connections.
    pub async fn stop(self) {
        let mut server = self.server.into_inner();
        if let Err(error) = server.shutdown().await {
            tracing::debug!(%error, "a connection did not close");
        }
    }
}

struct Served {
    name: String,
    providers: Box<dyn Providers>,
    events: Mutex<HashMap<Owner, Arc<EventLog>>>,
}

/// Answer that can be an error instead.
trait Refusable: Default {
    fn refuse(error: &Error) -> Self;
}

macro_rules! refusable {
    ($($answer:ident),* $(,)?) => {$(
        impl Refusable for proto::$answer {
            fn refuse(error: &Error) -> Self {
                proto::$answer { error: MessageField::some(wire::error_to(error)), ..Default::default() }
            }
        }
    )*};
}
refusable!(
    HandshakeResponse,
    PreflightResponse,
    PlaceResponse,
    CreateResponse,
    CreateManyResponse,
    AddressesResponse,
    DeleteResponse,
    ListOwnedResponse,
    AttachResponse,
    DetachResponse,
    GrownResponse,
    ConsoleResponse,
    EventsResponse,
);

impl Served {
    /// Runs `work` with the owner's provider. Its errors become answers. The library drops it at the caller's deadline,
    /// which the provider can read.
    async fn answer<R, F>(
        &self,
        context: &TtrpcContext,
        owner: MessageField<proto::Owner>,
        work: impl FnOnce(Arc<dyn Provider>, Owner) -> F,
    ) -> ttrpc::Result<R>
    where
        R: Refusable,
        F: Future<Output = Result<R, Error>>,
    {
        let found = wire::owner_from(owner).and_then(|owner| Ok((self.providers.provider(&owner)?, owner)));
        let (provider, owner) = match found {
            Ok(found) => found,
            Err(error) => return Ok(R::refuse(&error)),
        };
        let work = work(provider, owner);
        let answer = match u64::try_from(context.timeout_nano) {
            Ok(nanos @ 1..) => with_deadline(Instant::now() + Duration::from_nanos(nanos), work).await,
            _ => work.await,
        };
        Ok(answer.unwrap_or_else(|error| R::refuse(&error)))
    }

    fn log_of(&self, owner: Owner, provider: &dyn Provider) -> Result<Arc<EventLog>, Error> {
        let mut logs = self.events.lock();
        if let Some(log) = logs.get(&owner) {
            return Ok(Arc::clone(log));
        }
        let Some(events) = provider.events().filter(|_| logs.len() < OWNERS) else {
            return Err(Error::unsupported("events", format!("provider {} has no events", self.name)));
        };
        let log = EventLog::follow(events);
        logs.insert(owner, Arc::clone(&log));
        Ok(log)
    }
}

fn id(text: String) -> Result<InstanceId, Error> {
    InstanceId::new(text).map_err(|error| Error::invalid(error.to_string()))
}

fn hold(wait_ms: u32) -> Duration {
    Duration::from_millis(wait_ms.into()).min(LONGEST_HOLD)
}

fn without(field: &str) -> Error {
    Error::unsupported(field, format!("this provider has no {field}"))
}

#[async_trait]
impl Service for Served {
    async fn handshake(
        &self,
        context: &TtrpcContext,
        request: proto::HandshakeRequest,
    ) -> ttrpc::Result<proto::HandshakeResponse> {
        tracing::info!(program = wire::clipped(&request.program, wire::WORD), "a node shakes hands");
        self.answer(context, request.owner, |provider, _| async move {
            Ok(proto::HandshakeResponse {
                // There is only one version. A client that does not support it detects that itself.
                version: wire::VERSION,
                name: self.name.clone(),
                capabilities: MessageField::some(wire::capabilities_to(provider.capabilities())),
                program: concat!("peerpod-provider-external ", env!("CARGO_PKG_VERSION")).to_owned(),
                ..Default::default()
            })
        })
        .await
    }

    async fn health(
        &self,
        _: &TtrpcContext,
        _: proto::HealthRequest,
    ) -> ttrpc::Result<proto::HealthResponse> {
        Ok(proto::HealthResponse::default())
    }

    async fn preflight(
        &self,
        context: &TtrpcContext,
        request: proto::PreflightRequest,
    ) -> ttrpc::Result<proto::PreflightResponse> {
        self.answer(context, request.owner, |provider, _| async move {
            Ok(wire::preflight_to(provider.preflight().await?))
        })
        .await
    }

    async fn place(
        &self,
        context: &TtrpcContext,
        mut request: proto::CreateRequest,
    ) -> ttrpc::Result<proto::PlaceResponse> {
        self.answer(context, request.owner.take().into(), |provider, _| async move {
            let placement = provider.place(&wire::request_from(request)?).await?;
            Ok(proto::PlaceResponse {
                placement: placement.map(String::from).unwrap_or_default(),
                ..Default::default()
            })
        })
        .await
    }

    async fn create(
        &self,
        context: &TtrpcContext,
        mut request: proto::CreateRequest,
    ) -> ttrpc::Result<proto::CreateResponse> {
        self.answer(context, request.owner.take().into(), |provider, _| async move {
            let key = wire::key_from(std::mem::take(&mut request.key))?;
            let request = wire::request_from(request)?;
            provider.capabilities().check(&request, &self.name)?;
            Ok(wire::created_to(&provider.create(&request, &key).await?))
        })
        .await
    }

    async fn create_many(
        &self,
        context: &TtrpcContext,
        request: proto::CreateManyRequest,
    ) -> ttrpc::Result<proto::CreateManyResponse> {
        let mut one = request.request.into_option().unwrap_or_default();
        self.answer(context, one.owner.take().into(), |provider, _| async move {
            let key = wire::key_from(std::mem::take(&mut one.key))?;
            let one = wire::request_from(one)?;
            let Capabilities { max_batch, .. } = provider.capabilities();
            let count = NonZeroU32::new(request.count).filter(|count| count.get() <= max_batch);
            let count = count.ok_or_else(|| {
                Error::invalid(format!("create of {} VMs: not from 1 to {max_batch}", request.count))
            })?;
            let batch = provider.batch().ok_or_else(|| without("batch"))?;
            Ok(wire::created_many_to(&batch.create_many(&one, count, &key).await?))
        })
        .await
    }

    async fn addresses(
        &self,
        context: &TtrpcContext,
        request: proto::AddressesRequest,
    ) -> ttrpc::Result<proto::AddressesResponse> {
        self.answer(context, request.owner, |provider, _| async move {
            let id = id(request.id)?;
            let found = match timeout(hold(request.wait_ms), provider.addresses(&id)).await {
                Ok(found) => found?,
                // Not known yet; the client repeats the request.
                Err(_) => Vec::new(),
            };
            Ok(proto::AddressesResponse {
                addresses: found.iter().map(ToString::to_string).collect(),
                ..Default::default()
            })
        })
        .await
    }

    async fn delete(
        &self,
        context: &TtrpcContext,
        request: proto::DeleteRequest,
    ) -> ttrpc::Result<proto::DeleteResponse> {
        self.answer(context, request.owner, |provider, _| async move {
            provider.delete(&id(request.id)?).await?;
            Ok(proto::DeleteResponse::default())
        })
        .await
    }

    async fn list_owned(
        &self,
        context: &TtrpcContext,
        request: proto::ListOwnedRequest,
    ) -> ttrpc::Result<proto::ListOwnedResponse> {
        self.answer(context, request.owner, |provider, _| async move {
            let mut owned = provider.list_owned().await?;
            // A page begins after an id, not at an index, because VMs come and go between two pages.
            owned.sort_unstable_by(|a, b| a.id.cmp(&b.id));
            let start = owned.partition_point(|one| one.id.as_str() <= request.page.as_str());
            let page = owned[start..].get(..PAGE).unwrap_or(&owned[start..]);
            let more = start + page.len() < owned.len();
            Ok(proto::ListOwnedResponse {
                vms: page.iter().map(wire::owned_to).collect(),
                next_page: page.last().filter(|_| more).map(|last| last.id.to_string()).unwrap_or_default(),
                ..Default::default()
            })
        })
        .await
    }

    async fn attach(
        &self,
        context: &TtrpcContext,
        request: proto::AttachRequest,
    ) -> ttrpc::Result<proto::AttachResponse> {
        self.answer(context, request.owner, |provider, _| async move {
            let disk = wire::disk_from(request.disk.into_option().unwrap_or_default())?;
            let volumes = provider.volumes().ok_or_else(|| without("volumes"))?;
            let identity = volumes.attach(&id(request.id)?, &disk).await?;
            Ok(proto::AttachResponse {
                identity: MessageField::some(wire::identity_to(&identity)),
                ..Default::default()
            })
        })
        .await
    }

    async fn detach(
        &self,
        context: &TtrpcContext,
        request: proto::DetachRequest,
    ) -> ttrpc::Result<proto::DetachResponse> {
        self.answer(context, request.owner, |provider, _| async move {
            let volumes = provider.volumes().ok_or_else(|| without("volumes"))?;
            volumes.detach(&id(request.id)?, &request.volume).await?;
            Ok(proto::DetachResponse::default())
        })
        .await
    }

    async fn grown(
        &self,
        context: &TtrpcContext,
        request: proto::GrownRequest,
    ) -> ttrpc::Result<proto::GrownResponse> {
        self.answer(context, request.owner, |provider, _| async move {
            let disk = wire::disk_from(request.disk.into_option().unwrap_or_default())?;
            let volumes = provider.volumes().ok_or_else(|| without("volumes"))?;
            volumes.grown(&id(request.id)?, &disk, request.bytes).await?;
            Ok(proto::GrownResponse::default())
        })
        .await
    }

    async fn console(
        &self,
        context: &TtrpcContext,
        request: proto::ConsoleRequest,
    ) -> ttrpc::Result<proto::ConsoleResponse> {
        self.answer(context, request.owner, |provider, _| async move {
            let limit = usize::try_from(request.limit).unwrap_or(usize::MAX).min(wire::CONSOLE);
            let console = provider.console().ok_or_else(|| without("console"))?;
            let tail = console.tail(&id(request.id)?, limit).await?;
            Ok(proto::ConsoleResponse { tail, ..Default::default() })
        })
        .await
    }

    async fn events(
        &self,
        context: &TtrpcContext,
        request: proto::EventsRequest,
    ) -> ttrpc::Result<proto::EventsResponse> {
        self.answer(context, request.owner, |provider, owner| async move {
            let log = self.log_of(owner, &*provider)?;
            let (cursor, events) = log.since(&request.cursor, hold(request.wait_ms)).await;
            Ok(proto::EventsResponse {
                cursor,
                events: events.iter().map(wire::event_to).collect(),
                ..Default::default()
            })
        })
        .await
    }
}
