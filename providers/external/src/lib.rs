//! Implements the provider trait of `providers/api` with a provider in another process, over a unix socket or over
//! mutual TLS. A service behind TLS can be the only holder of the cloud's keys. `proto/protos/provider.proto` defines
//! the protocol, and `providers/README.md` is the guide for authors of the other end. [`serve`] implements the other
//! end in Rust.
//!
//! The provider is a program that this process starts, restarts and reads the output of, or it is started elsewhere.
//! Its answers are not trusted: they are checked, frames and texts are bounded, and every call has a deadline. This
//! crate repeats no call; the decorator does that, with the same key.
//!
//! **Opening dials.** The capabilities of a provider are known only after its handshake. [`External::open`] therefore
//! returns after the handshake, or with the obstacle to it; it makes no cloud call. A provider with different
//! capabilities in a later handshake is refused until this process restarts.
//!
//! May touch: its socket and the folder around it, the files of `provider.external.*`, the process it starts.

pub mod config;
mod connection;
mod plugin;
pub mod serve;
mod tls;
mod watched;
mod wire;

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use peerpod_common::backoff::Backoff;
use peerpod_proto::provider as proto;
use peerpod_proto::provider_ttrpc::ProviderClient;
use peerpod_provider_api::{
    Batch, Capabilities, Console, CreateRequest, Created, CreatedMany, DiskIdentity, DiskRequest, Error,
    Extensions, IdempotencyKey, InstanceId, Owned, Placement, Preflight, Provider, ProviderEvent, Volumes,
    deadline, unless_gone,
};
use protobuf::MessageField;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};
use ttrpc::context::{Context, with_duration};

pub use config::{Endpoint, ExternalConfig, TlsFiles};
use connection::{HandshakeData, PluginConnection};
pub use peerpod_provider_api::Owner;
pub use plugin::SOCKET_VARIABLE;
use wire::FallibleAnswer;

/// Longest time for which the provider may hold a request for addresses or events open.
const HOLD: Duration = Duration::from_secs(20);
/// Pauses between requests that the provider answers at once without a result.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Pause after a failed request for events.
const EVENTS_PAUSE: Duration = Duration::from_secs(5);
/// Most pages of one list, and most VMs on them.
const PAGES: usize = 1000;
const VMS: usize = 1 << 16;

/// Provider in another process. Dropping it closes the connection, and ends the process if this process started it.
pub struct External {
    connection: Arc<PluginConnection>,
    task: AbortHandle,
}

impl External {
    /// Starts or dials the provider, does the handshake, and keeps the connection from then on. Needs a tokio runtime.
    ///
    /// # Errors
    /// The obstacle to an answer within the handshake timeout: the program, the socket, the certificates, the version
    /// or the handshake data.
    pub async fn open(config: ExternalConfig) -> Result<External, Error> {
        let connection = PluginConnection::new(config);
        let task = tokio::spawn(Arc::clone(&connection).run()).abort_handle();
        // From here on, dropping `external` also ends the connection task.
        let external = External { connection, task };
        external.connection.first().await?;
        Ok(external)
    }

    fn known(&self) -> &HandshakeData {
        self.connection.known().expect("`open` waits for the handshake")
    }

    fn call<'c>(&self, what: &'c str) -> Call<'c> {
        Call { what, limit: self.connection.config.call_timeout, secret: None }
    }
}

impl Drop for External {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Properties of a call, apart from its request.
struct Call<'c> {
    /// Operation and object, for errors.
    what: &'c str,
    limit: Duration,
    /// Text that errors must not show.
    secret: Option<&'c str>,
}

impl PluginConnection {
    async fn ask<R, F>(
        &self,
        call: Call<'_>,
        ask: impl FnOnce(ProviderClient, Context) -> F,
    ) -> Result<R, Error>
    where
        R: FallibleAnswer,
        F: Future<Output = ttrpc::Result<R>> + Send + 'static,
    {
        let stub = self.stub().await?;
        let left = deadline().map(|at| at.saturating_duration_since(Instant::now()));
        let limit = left.map_or(call.limit, |left| left.min(call.limit)).max(Duration::from_millis(1));
        // In a separate task: dropping this future in the middle of a frame would break the connection for all calls.
        let answer = tokio::spawn(ask(stub, with_duration(limit))).await;
        let answer = answer.unwrap_or_else(|error| Err(ttrpc::Error::Others(error.to_string())));
        let mut answer = answer.map_err(|error| wire::status_error(&self.who(), call.what, &error))?;
        let error = answer.error().take();
        match error.filter(|error| !(error.class.is_empty() && error.text.is_empty())) {
            Some(error) => Err(wire::error_from(&self.who(), error, call.secret)),
            None => Ok(answer),
        }
    }

    fn owner(&self) -> MessageField<proto::Owner> {
        wire::owner_to(&self.config.owner)
    }
}

/// Makes one call of the service, with this request of the connection's owner.
macro_rules! ask {
    ($connection:expr, $call:expr, $method:ident, $Request:ident { $($field:ident $(: $value:expr)?),* $(,)? }) => {{
        let request = proto::$Request {
            owner: $connection.owner(),
            $($field $(: $value)?,)*
            ..Default::default()
        };
        ask!($connection, $call, $method, request)
    }};
    ($connection:expr, $call:expr, $method:ident, $request:ident) => {
        $connection.ask($call, |stub, context| async move { stub.$method(context, &$request).await }).await
    };
}

#[async_trait]
impl Provider for External {
    fn name(&self) -> &'static str {
        "external"
    }

    fn capabilities(&self) -> Capabilities {
        self.known().capabilities.clone()
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        let answer = ask!(self.connection, self.call("preflight"), preflight, PreflightRequest {})?;
        let mut found = wire::preflight_from(&self.connection.who(), &answer)?;
        found.facts.insert(0, self.connection.who());
        Ok(found)
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, Error> {
        if !self.known().places {
            return Ok(None);
        }
        let what = format!("place {}", request.name);
        let call = Call { secret: Some(&request.user_data), ..self.call(&what) };
        let mut asked = wire::request_to(&self.connection.config.owner, request, None);
        // Choosing a placement needs no ticket.
        asked.user_data.clear();
        let answer: proto::PlaceResponse = ask!(self.connection, call, place, asked)?;
        (!answer.placement.is_empty()).then(|| Placement::new(answer.placement)).transpose()
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.capabilities().check(request, self.name())?;
        let what = format!("create of {}", request.name);
        let call = Call { secret: Some(&request.user_data), ..self.call(&what) };
        let asked = wire::request_to(&self.connection.config.owner, request, Some(key));
        let answer = ask!(self.connection, call, create, asked)?;
        wire::created_from(&self.connection.who(), answer, request)
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let what = format!("addresses of {id}");
        let mut backoff = Backoff::new(SHORTEST_PAUSE, LONGEST_PAUSE);
        loop {
            let asked = Instant::now();
            let call = Call { limit: HOLD + self.connection.config.call_timeout, ..self.call(&what) };
            let (id, wait_ms) = (id.to_string(), HOLD.as_millis() as u32);
            let answer: proto::AddressesResponse =
                ask!(self.connection, call, addresses, AddressesRequest { id, wait_ms })?;
            if !answer.addresses.is_empty() {
                return wire::addresses_from(&self.connection.who(), &answer.addresses);
            }
            // A provider that does not hold the request open is asked only after a pause.
            sleep(backoff.pause().saturating_sub(asked.elapsed())).await;
        }
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let what = format!("delete of {id}");
        let answer: Result<proto::DeleteResponse, Error> =
            ask!(self.connection, self.call(&what), delete, DeleteRequest { id: id.to_string() });
        unless_gone(answer.map(drop))
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let (mut seen, mut owned, mut page) = (HashSet::new(), Vec::new(), String::new());
        for _ in 0..PAGES {
            let call = self.call("list of VMs");
            let answer: proto::ListOwnedResponse =
                ask!(self.connection, call, list_owned, ListOwnedRequest { page })?;
            owned.extend(wire::owned_from(&self.connection.who(), answer.vms, &mut seen)?);
            if answer.next_page.is_empty() {
                return Ok(owned);
            }
            if owned.len() > VMS || answer.next_page.len() > wire::MARK {
                break;
            }
            page = answer.next_page;
        }
        Err(Error::invalid(format!("list of VMs: {} does not come to an end with it", self.connection.who())))
    }

    fn extensions(&self) -> Extensions<'_> {
        let Capabilities { max_batch, volumes, console, .. } = &self.known().capabilities;
        Extensions {
            batch: (*max_batch > 0).then_some(self as &dyn Batch),
            volumes: volumes.then_some(self as &dyn Volumes),
            console: console.then_some(self as &dyn Console),
        }
    }

    fn events(&self) -> Option<BoxStream<'static, ProviderEvent>> {
        let following = Following {
            connection: Arc::downgrade(&self.connection),
            cursor: String::new(),
            received: VecDeque::new(),
        };
        self.known().capabilities.events.then(|| stream::unfold(following, Following::next).boxed())
    }

    fn health(&self) -> Option<BoxStream<'static, Option<String>>> {
        Some(self.connection.health())
    }
}

/// Returned only where the provider announced batches.
#[async_trait]
impl Batch for External {
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        self.capabilities().check_batch(request, count, self.name())?;
        let what = format!("create of {count} VMs {}", request.name);
        let call = Call { secret: Some(&request.user_data), ..self.call(&what) };
        let asked = proto::CreateManyRequest {
            request: MessageField::some(wire::request_to(&self.connection.config.owner, request, Some(key))),
            count: count.get(),
            ..Default::default()
        };
        let answer = ask!(self.connection, call, create_many, asked)?;
        wire::created_many_from(&self.connection.who(), answer, request, count.get())
    }
}

/// Returned only where the provider announced volumes.
#[async_trait]
impl Volumes for External {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        let what = format!("attach of {} to {id}", disk.volume);
        let (id, disk) = (id.to_string(), MessageField::some(wire::disk_to(disk)));
        let answer: proto::AttachResponse =
            ask!(self.connection, self.call(&what), attach, AttachRequest { id, disk })?;
        wire::identity_from(&self.connection.who(), answer.identity)
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        let what = format!("detach of {volume} from {id}");
        let (id, volume) = (id.to_string(), volume.to_owned());
        let answer: Result<proto::DetachResponse, Error> =
            ask!(self.connection, self.call(&what), detach, DetachRequest { id, volume });
        unless_gone(answer.map(drop))
    }

    async fn grown(&self, id: &InstanceId, disk: &DiskRequest, bytes: u64) -> Result<(), Error> {
        if !self.known().grows {
            return Ok(());
        }
        let what = format!("growth of {} of {id}", disk.volume);
        let (id, disk) = (id.to_string(), MessageField::some(wire::disk_to(disk)));
        let answer: Result<proto::GrownResponse, Error> =
            ask!(self.connection, self.call(&what), grown, GrownRequest { id, disk, bytes });
        unless_gone(answer.map(drop))
    }
}

/// Returned only where the provider announced a console.
#[async_trait]
impl Console for External {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        let what = format!("console of {id}");
        let limit = limit.min(wire::CONSOLE);
        let (id, most) = (id.to_string(), limit as u32);
        let answer: proto::ConsoleResponse =
            ask!(self.connection, self.call(&what), console, ConsoleRequest { id, limit: most })?;
        // Only the end was requested; a provider may send more.
        let from = answer.tail.len().saturating_sub(limit);
        Ok(answer.tail[from..].to_vec())
    }
}

/// Stream of VM events. Ends with the provider object.
struct Following {
    connection: Weak<PluginConnection>,
    cursor: String,
    received: VecDeque<ProviderEvent>,
}

impl Following {
    async fn next(mut self) -> Option<(ProviderEvent, Following)> {
        let mut backoff = Backoff::new(SHORTEST_PAUSE, LONGEST_PAUSE);
        loop {
            if let Some(event) = self.received.pop_front() {
                return Some((event, self));
            }
            let asked = Instant::now();
            let answer: Result<proto::EventsResponse, Error> = {
                let connection = self.connection.upgrade()?;
                let limit = HOLD + connection.config.call_timeout;
                let call = Call { what: "events", limit, secret: None };
                let (cursor, wait_ms) = (self.cursor.clone(), HOLD.as_millis() as u32);
                ask!(connection, call, events, EventsRequest { cursor, wait_ms })
            };
            match answer {
                Ok(answer) if answer.cursor.len() <= wire::MARK => {
                    self.cursor = answer.cursor;
                    self.received.extend(answer.events.into_iter().filter_map(wire::event_from));
                    sleep(backoff.pause().saturating_sub(asked.elapsed())).await;
                }
                Ok(_) => sleep(EVENTS_PAUSE).await,
                Err(error) => {
                    tracing::debug!("no events for now: {error}");
                    sleep(EVENTS_PAUSE).await;
                }
            }
        }
    }
}
