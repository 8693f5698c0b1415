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
use peerpod_provider_api::{Error, InstanceId, Provider, with_deadline};
use protobuf::MessageField;
use tokio::time::{Instant, timeout};
use ttrpc::r#async::{Server, TtrpcContext};
use ttrpc::asynchronous::transport::Listener;

use crate::wire::FallibleAnswer;
use crate::{Owner, wire};
use events::EventLog;
pub use listen::{listen_on_socket, listen_with_tls, socket_we_were_given, until_orphaned};

/// Longest time for which a request is held open, even if its caller asks for more.
const LONGEST_HOLD: Duration = Duration::from_secs(60);
/// VMs on one page of a list: a frame of 4 MiB has space for some 2 KiB each.
const PAGE: usize = 2000;
/// Most owners with an event log; further owners get no events.
const OWNERS: usize = 1024;

/// Provider that is being served.
pub struct Serving {
    // Never locked: the mutex makes this shareable, which the library's server is not.
    server: Mutex<Server>,
}

impl Serving {
    /// Serves until the value is dropped or stopped. `name` is the provider's name: 1 to 32 of `[a-z0-9-]`. `providers`
    /// returns the provider for the calls of an owner: always the same one for the same owner. An owner that is not
    /// served here is an error, preferably [`Error::Auth`].
    ///
    /// # Errors
    /// When the library cannot start.
    pub async fn start(
        name: &str,
        listener: Listener,
        providers: impl Fn(&Owner) -> Result<Arc<dyn Provider>, Error> + Send + Sync + 'static,
    ) -> Result<Serving, Error> {
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

/// Returns the provider of an owner.
type Providers = dyn Fn(&Owner) -> Result<Arc<dyn Provider>, Error> + Send + Sync;

struct Served {
    name: String,
    providers: Box<Providers>,
    events: Mutex<HashMap<Owner, Arc<EventLog>>>,
}

/// Returns an answer that is this error.
fn refusal<R: FallibleAnswer>(error: &Error) -> R {
    let mut answer = R::default();
    *answer.error() = MessageField::some(wire::error_to(error));
    answer
}

impl Served {
    /// Runs `work` with the owner's provider. Its errors become answers. The library drops it at the caller's deadline,
    /// which the provider can read.
    async fn answer<'s, R, F>(
        &'s self,
        context: &TtrpcContext,
        owner: MessageField<proto::Owner>,
        work: impl FnOnce(Caller<'s>) -> F,
    ) -> ttrpc::Result<R>
    where
        R: FallibleAnswer,
        F: Future<Output = Result<R, Error>>,
    {
        let found = wire::owner_from(owner).and_then(|owner| Ok(((self.providers)(&owner)?, owner)));
        let (provider, owner) = match found {
            Ok(found) => found,
            Err(error) => return Ok(refusal(&error)),
        };
        let work = work(Caller { served: self, provider, owner });
        let answer = match u64::try_from(context.timeout_nano) {
            Ok(nanos @ 1..) => with_deadline(Instant::now() + Duration::from_nanos(nanos), work).await,
            _ => work.await,
        };
        Ok(answer.unwrap_or_else(|error| refusal(&error)))
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

fn hold(wait_ms: u32) -> Duration {
    Duration::from_millis(wait_ms.into()).min(LONGEST_HOLD)
}

fn without(field: &str) -> Error {
    Error::unsupported(field, format!("this provider has no {field}"))
}

/// Implements the service: a call of a method goes to the [`Caller`]'s method of that name. `=>` precedes the owner of
/// the request.
macro_rules! service {
    ($($method:ident($request:ident: $Request:ident => $owner:expr) -> $Response:ident;)*) => {
        #[async_trait]
        impl Service for Served {
            async fn health(
                &self,
                _: &TtrpcContext,
                _: proto::HealthRequest,
            ) -> ttrpc::Result<proto::HealthResponse> {
                Ok(proto::HealthResponse::default())
            }

            $(async fn $method(
                &self,
                context: &TtrpcContext,
                mut $request: proto::$Request,
            ) -> ttrpc::Result<proto::$Response> {
                let owner = std::mem::take(&mut $owner);
                self.answer(context, owner, |caller| caller.$method($request)).await
            })*
        }
    };
}
service! {
    handshake(request: HandshakeRequest => request.owner) -> HandshakeResponse;
    preflight(request: PreflightRequest => request.owner) -> PreflightResponse;
    place(request: CreateRequest => request.owner) -> PlaceResponse;
    create(request: CreateRequest => request.owner) -> CreateResponse;
    create_many(request: CreateManyRequest => request.request.mut_or_insert_default().owner) -> CreateManyResponse;
    addresses(request: AddressesRequest => request.owner) -> AddressesResponse;
    delete(request: DeleteRequest => request.owner) -> DeleteResponse;
    list_owned(request: ListOwnedRequest => request.owner) -> ListOwnedResponse;
    attach(request: AttachRequest => request.owner) -> AttachResponse;
    detach(request: DetachRequest => request.owner) -> DetachResponse;
    grown(request: GrownRequest => request.owner) -> GrownResponse;
    console(request: ConsoleRequest => request.owner) -> ConsoleResponse;
    events(request: EventsRequest => request.owner) -> EventsResponse;
}

/// Caller of a method, with its provider.
struct Caller<'s> {
    served: &'s Served,
    provider: Arc<dyn Provider>,
    owner: Owner,
}

impl Caller<'_> {
    async fn handshake(self, request: proto::HandshakeRequest) -> Result<proto::HandshakeResponse, Error> {
        tracing::info!(program = wire::clipped(&request.program, wire::WORD), "a node shakes hands");
        Ok(proto::HandshakeResponse {
            // There is only one version. A client that does not support it detects that itself.
            version: wire::VERSION,
            name: self.served.name.clone(),
            capabilities: MessageField::some(wire::capabilities_to(self.provider.capabilities())),
            program: concat!("peerpod-provider-external ", env!("CARGO_PKG_VERSION")).to_owned(),
            ..Default::default()
        })
    }

    async fn preflight(self, _: proto::PreflightRequest) -> Result<proto::PreflightResponse, Error> {
        Ok(wire::preflight_to(self.provider.preflight().await?))
    }

    async fn place(self, request: proto::CreateRequest) -> Result<proto::PlaceResponse, Error> {
        let placement = self.provider.place(&wire::request_from(request)?).await?;
        Ok(proto::PlaceResponse {
            placement: placement.map(String::from).unwrap_or_default(),
            ..Default::default()
        })
    }

    async fn create(self, mut request: proto::CreateRequest) -> Result<proto::CreateResponse, Error> {
        let key = wire::key_from(std::mem::take(&mut request.key))?;
        let request = wire::request_from(request)?;
        self.provider.capabilities().check(&request, &self.served.name)?;
        Ok(wire::created_to(&self.provider.create(&request, &key).await?))
    }

    async fn create_many(
        self,
        request: proto::CreateManyRequest,
    ) -> Result<proto::CreateManyResponse, Error> {
        let mut one = request.request.into_option().unwrap_or_default();
        let key = wire::key_from(std::mem::take(&mut one.key))?;
        let one = wire::request_from(one)?;
        let count = NonZeroU32::new(request.count)
            .ok_or_else(|| Error::invalid("create of 0 VMs: at least one is needed"))?;
        self.provider.capabilities().check_batch(&one, count, &self.served.name)?;
        let batch = self.provider.extensions().batch.ok_or_else(|| without("batch"))?;
        Ok(wire::created_many_to(&batch.create_many(&one, count, &key).await?))
    }

    async fn addresses(self, request: proto::AddressesRequest) -> Result<proto::AddressesResponse, Error> {
        let id = InstanceId::new(request.id)?;
        let found = match timeout(hold(request.wait_ms), self.provider.addresses(&id)).await {
            Ok(found) => found?,
            // Not known yet; the client repeats the request.
            Err(_) => Vec::new(),
        };
        Ok(proto::AddressesResponse {
            addresses: found.iter().map(ToString::to_string).collect(),
            ..Default::default()
        })
    }

    async fn delete(self, request: proto::DeleteRequest) -> Result<proto::DeleteResponse, Error> {
        self.provider.delete(&InstanceId::new(request.id)?).await?;
        Ok(proto::DeleteResponse::default())
    }

    async fn list_owned(self, request: proto::ListOwnedRequest) -> Result<proto::ListOwnedResponse, Error> {
        let mut owned = self.provider.list_owned().await?;
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
    }

    async fn attach(self, request: proto::AttachRequest) -> Result<proto::AttachResponse, Error> {
        let disk = wire::disk_from(request.disk.into_option().unwrap_or_default())?;
        let volumes = self.provider.extensions().volumes.ok_or_else(|| without("volumes"))?;
        let identity = volumes.attach(&InstanceId::new(request.id)?, &disk).await?;
        Ok(proto::AttachResponse {
            identity: MessageField::some(wire::identity_to(&identity)),
            ..Default::default()
        })
    }

    async fn detach(self, request: proto::DetachRequest) -> Result<proto::DetachResponse, Error> {
        let volumes = self.provider.extensions().volumes.ok_or_else(|| without("volumes"))?;
        volumes.detach(&InstanceId::new(request.id)?, &request.volume).await?;
        Ok(proto::DetachResponse::default())
    }

    async fn grown(self, request: proto::GrownRequest) -> Result<proto::GrownResponse, Error> {
        let disk = wire::disk_from(request.disk.into_option().unwrap_or_default())?;
        let volumes = self.provider.extensions().volumes.ok_or_else(|| without("volumes"))?;
        volumes.grown(&InstanceId::new(request.id)?, &disk, request.bytes).await?;
        Ok(proto::GrownResponse::default())
    }

    async fn console(self, request: proto::ConsoleRequest) -> Result<proto::ConsoleResponse, Error> {
        let limit = usize::try_from(request.limit).unwrap_or(usize::MAX).min(wire::CONSOLE);
        let console = self.provider.extensions().console.ok_or_else(|| without("console"))?;
        let tail = console.tail(&InstanceId::new(request.id)?, limit).await?;
        Ok(proto::ConsoleResponse { tail, ..Default::default() })
    }

    async fn events(self, request: proto::EventsRequest) -> Result<proto::EventsResponse, Error> {
        let log = self.served.log_of(self.owner, &*self.provider)?;
        let (cursor, events) = log.since(&request.cursor, hold(request.wait_ms)).await;
        Ok(proto::EventsResponse {
            cursor,
            events: events.iter().map(wire::event_to).collect(),
            ..Default::default()
        })
    }
}
