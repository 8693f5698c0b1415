//! Keeps a connection to the provider for the life of the process. Starts or dials the provider, does the handshake,
//! checks its health every few seconds, and reconnects whenever the connection ends. Calls share the connection, and
//! wait up to 5 s for one.
//!
//! This module repeats no call. After a lost answer, the caller repeats the call with the same key.

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use peerpod_common::backoff::Backoff;
use peerpod_proto::provider as wire;
use peerpod_proto::provider_ttrpc::ProviderClient;
use peerpod_provider_api::{Capabilities, Error};
use rustls_pki_types::ServerName;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context::with_duration;

use crate::config::{Endpoint, ExternalConfig, TlsFiles};
use crate::plugin::Plugin;
use crate::watched::{StreamHandle, watched};
use crate::{tls, wire as convert};

/// Interval between attempts to connect to a provider that is not there yet.
const DIAL_EVERY: Duration = Duration::from_millis(50);
/// Longest wait of a call for a connection, before the call fails.
const AWAY: Duration = Duration::from_secs(5);
/// First and longest pause before a provider is started or dialled again.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Lifetime after which a connection resets the pause.
const GOOD: Duration = Duration::from_secs(60);

/// Handshake data of the provider. It never changes, because the trait promises constant capabilities to the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HandshakeData {
    pub(crate) name: String,
    pub(crate) capabilities: Capabilities,
    pub(crate) places: bool,
    pub(crate) grows: bool,
}

/// Stub for calls, or the reason why there is none; `None` before the first handshake.
type State = Option<Result<ProviderClient, Error>>;

/// State of the connection, shared with the calls.
pub(crate) struct PluginConnection {
    pub(crate) config: ExternalConfig,
    state: watch::Sender<State>,
    known: OnceLock<HandshakeData>,
}

impl PluginConnection {
    pub(crate) fn new(config: ExternalConfig) -> Arc<PluginConnection> {
        Arc::new(PluginConnection { config, state: watch::Sender::new(None), known: OnceLock::new() })
    }

    /// Returns the provider's name for error texts.
    pub(crate) fn who(&self) -> String {
        match (self.known.get(), &self.config.endpoint) {
            (Some(known), _) => format!("external provider {}", known.name),
            (None, Endpoint::Unix { socket, .. }) => format!("the provider at {}", socket.display()),
            (None, Endpoint::Tls { address, .. }) => format!("the provider at {address}"),
        }
    }

    /// Returns the data of the first handshake; `None` before that.
    pub(crate) fn known(&self) -> Option<&HandshakeData> {
        self.known.get()
    }

    /// Waits for the result of the first start.
    pub(crate) async fn first(&self) -> Result<(), Error> {
        let mut state = self.state.subscribe();
        let outcome = state.wait_for(Option::is_some).await.ok().and_then(|state| state.clone());
        let ended = || Err(Error::transient("open the provider: its task has ended"));
        outcome.unwrap_or_else(ended).map(drop)
    }

    /// Returns the stub for a call. Waits up to 5 s for a connection. An error that a wait cannot resolve is returned
    /// at once.
    pub(crate) async fn stub(&self) -> Result<ProviderClient, Error> {
        let mut state = self.state.subscribe();
        let settled = |state: &State| !matches!(state, None | Some(Err(Error::Transient { .. })));
        let found = timeout(AWAY, state.wait_for(settled)).await;
        // Bound to a name, because a guard of the channel must not live across the match.
        let found = match found {
            Ok(Ok(state)) => state.clone(),
            _ => self.state.borrow().clone(),
        };
        found.unwrap_or_else(|| Err(Error::transient(format!("{} is not there yet", self.who()))))
    }

    /// Returns the changes of the connection from now on: the reason why there is none.
    pub(crate) fn health(&self) -> BoxStream<'static, Option<String>> {
        let next = |mut state: watch::Receiver<State>| async move {
            state.changed().await.ok()?;
            let why = match &*state.borrow_and_update() {
                Some(Err(error)) => Some(error.to_string()),
                Some(Ok(_)) | None => None,
            };
            Some((why, state))
        };
        stream::unfold(self.state.subscribe(), next).boxed()
    }

    /// Keeps the connection up. Never returns.
    pub(crate) async fn run(self: Arc<PluginConnection>) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut said = None;
        loop {
            let began = Instant::now();
            let error = self.one_life().await;
            if began.elapsed() >= GOOD {
                backoff.reset();
                said = None;
            }
            let pause = backoff.pause();
            let text = error.to_string();
            // A repeated error is logged only once. The failure of a first start is left to its caller.
            if said.as_ref() == Some(&text) || self.known.get().is_none() {
                tracing::debug!("{text}; trying again");
            } else {
                tracing::warn!(class = error.class(), ?pause, "{text}; trying again");
                said = Some(text);
            }
            self.state.send_replace(Some(Err(error)));
            sleep(pause).await;
        }
    }

    /// Runs the provider from its start to its end, and returns the cause of the end.
    async fn one_life(&self) -> Error {
        let deadline = Instant::now() + self.config.handshake_timeout;
        let Endpoint::Unix { socket, command: Some(command), .. } = &self.config.endpoint else {
            return ended(self.connected(deadline).await);
        };
        let mut plugin = match Plugin::start(command, socket).await {
            Ok(plugin) => plugin,
            Err(error) => return error,
        };
        let mut error = tokio::select! {
            error = plugin.ended() => error,
            never = self.connected(deadline) => ended(never),
        };
        // Calls must not get a connection that is about to be closed.
        self.state.send_if_modified(|state| {
            let up = matches!(state, Some(Ok(_)));
            if up {
                *state = Some(Err(error.clone()));
            }
            up
        });
        if matches!(error, Error::Transient { .. })
            && let Some(how) = plugin.just_ended().await
        {
            error = how;
        }
        plugin.kill().await;
        error
    }

    /// Runs one connection from its beginning to its end.
    async fn connected(&self, deadline: Instant) -> Result<Infallible, Error> {
        let (socket, mut handle) = self.dial(deadline).await?;
        let stub = ProviderClient::new(ttrpc::r#async::Client::new(socket));
        if let Err(error) = self.handshake(&stub, deadline).await {
            return Err(match handle.end() {
                Some(end) if matches!(error, Error::Transient { .. }) => self.broken(&end),
                _ => error,
            });
        }
        self.state.send_replace(Some(Ok(stub.clone())));
        loop {
            tokio::select! {
                end = handle.ended() => return Err(self.broken(&end)),
                () = sleep(self.config.health_every) => {}
            }
            let limit = self.config.health_timeout;
            if let Err(error) = stub.health(with_duration(limit), &wire::HealthRequest::default()).await {
                let what = format!("health check within {limit:?}");
                return Err(convert::status_error(&self.who(), &what, &error));
            }
        }
    }

    fn broken(&self, end: &crate::watched::StreamEnd) -> Error {
        let (who, why) = (self.who(), &end.why);
        if end.refused {
            let text = format!("connect to {who}: {why}; look at the certificates on both sides");
            return Error::Auth { text };
        }
        Error::transient(format!("connection to {who}: {why}; see its log, and start it again"))
    }

    async fn handshake(&self, stub: &ProviderClient, deadline: Instant) -> Result<(), Error> {
        let request = wire::HandshakeRequest {
            oldest_version: convert::VERSION,
            newest_version: convert::VERSION,
            owner: convert::owner_to(&self.config.owner),
            program: concat!("peerpod ", env!("CARGO_PKG_VERSION")).to_owned(),
            ..wire::HandshakeRequest::default()
        };
        let left = deadline.saturating_duration_since(Instant::now()).max(DIAL_EVERY);
        let who = self.who();
        let answer = stub.handshake(with_duration(left), &request).await;
        let answer = answer.map_err(|error| convert::status_error(&who, "handshake", &error))?;
        if let Some(error) = answer.error.into_option() {
            return Err(convert::error_from(&who, error, None));
        }
        if answer.version != convert::VERSION {
            return Err(Error::invalid(format!(
                "handshake with {who}: it speaks version {} of the provider service, this program version {}; \
                 install versions that fit",
                answer.version,
                convert::VERSION
            )));
        }
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if answer.name.is_empty() || answer.name.len() > 32 || !answer.name.chars().all(fits) {
            let name = convert::clipped(&answer.name, 40);
            return Err(Error::invalid(format!(
                "handshake with {who}: its name {name:?} is not 1 to 32 of [a-z0-9-]"
            )));
        }
        let can = answer.capabilities.into_option().unwrap_or_default();
        let capabilities = convert::capabilities_from(&who, &can)?;
        let program = convert::clipped(&answer.program, convert::WORD);
        tracing::info!(provider = answer.name, program, ?capabilities, "external provider answers");
        self.is_the_same(HandshakeData {
            name: answer.name,
            capabilities,
            places: can.places,
            grows: can.growth,
        })
    }

    /// Refuses a provider that has changed since the first handshake, because earlier decisions rely on that data.
    fn is_the_same(&self, now: HandshakeData) -> Result<(), Error> {
        let known = self.known.get_or_init(|| now.clone());
        // `grows` may change: it is no promise to a caller, and an upgraded provider may begin to need that call.
        if *known == (HandshakeData { grows: known.grows, ..now.clone() }) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{} describes itself differently than when this program started: {} with {:?}, before {} with \
             {:?}; restart this program to accept the change",
            self.who(),
            now.name,
            now.capabilities,
            known.name,
            known.capabilities
        )))
    }

    async fn dial(&self, deadline: Instant) -> Result<(Socket, StreamHandle), Error> {
        match &self.config.endpoint {
            Endpoint::Unix { socket, peer_uid, .. } => {
                let stream =
                    until(deadline, &socket.display().to_string(), || UnixStream::connect(socket)).await?;
                trusted(&stream, socket, *peer_uid)?;
                let (stream, handle) = watched(stream);
                Ok((Socket::new(stream), handle))
            }
            Endpoint::Tls { address, server_name, files } => {
                over_tls(deadline, address, server_name, files).await
            }
        }
    }
}

fn ended(never: Result<Infallible, Error>) -> Error {
    match never {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

/// Connects repeatedly until the deadline.
async fn until<T, F>(deadline: Instant, whom: &str, connect: impl Fn() -> F) -> Result<T, Error>
where
    F: Future<Output = std::io::Result<T>>,
{
    let mut last = "it does not accept".to_owned();
    loop {
        match timeout_at(deadline, connect()).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error.to_string(),
            Err(_) => {}
        }
        if Instant::now() + DIAL_EVERY > deadline {
            return Err(Error::transient(format!(
                "connect to the provider at {whom}: {last}; start it, or correct its address in provider.external"
            )));
        }
        sleep(DIAL_EVERY).await;
    }
}

/// Accepts only a listener of root, of this process's user or of the configured user, because user-data goes over this
/// socket.
fn trusted(stream: &UnixStream, socket: &Path, peer_uid: Option<u32>) -> Result<(), Error> {
    let failed =
        |why: String| Error::Auth { text: format!("connect to the provider at {}: {why}", socket.display()) };
    let uid = stream.peer_cred().map_err(|error| failed(error.to_string()))?.uid();
    if uid == 0 || uid == nix::unistd::Uid::effective().as_raw() || Some(uid) == peer_uid {
        return Ok(());
    }
    Err(failed(format!("user {uid} listens there; if that is right, set provider.external.peer-uid")))
}

async fn over_tls(
    deadline: Instant,
    address: &str,
    server_name: &ServerName<'static>,
    files: &TlsFiles,
) -> Result<(Socket, StreamHandle), Error> {
    let config = tls::client(files)?;
    let stream = until(deadline, address, || TcpStream::connect(address)).await?;
    // The frames are small, and each one is awaited.
    let quick = stream.set_nodelay(true);
    quick.map_err(|error| Error::transient(format!("connect to the provider at {address}: {error}")))?;
    let handshake = TlsConnector::from(Arc::new(config)).connect(server_name.clone(), stream);
    let stream = match timeout_at(deadline, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            let tls = error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
            let text = format!("TLS with the provider at {address}: {error}");
            return Err(if tls { Error::Auth { text } } else { Error::transient(text) });
        }
        Err(_) => {
            return Err(Error::transient(format!("TLS with the provider at {address}: no answer in time")));
        }
    };
    let (stream, handle) = watched(stream);
    Ok((Socket::new(stream), handle))
}
