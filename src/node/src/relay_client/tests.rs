//! Tests against a fake relay on a real socket.

use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use peerpod_proto::relay::{
    ConfigureResponse, DeleteSandboxResponse, GuestCallResponse, PutSandboxResponse, WatchResponse,
};
use peerpod_proto::relay_ttrpc::{Relay, create_relay};
use tokio::net::UnixListener;
use tokio::time::Instant;
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Server, TtrpcContext};

use super::*;
use crate::sandbox::ports::Relay as _;

#[derive(Default)]
struct Said {
    configured: AtomicU64,
    puts: Mutex<Vec<String>>,
    states: watch::Sender<(u64, Vec<SandboxState>)>,
    epoch: Mutex<String>,
}

struct Fake(Arc<Said>);

#[async_trait]
impl Relay for Fake {
    async fn configure(
        &self,
        _: &TtrpcContext,
        request: ConfigureRequest,
    ) -> ttrpc::Result<ConfigureResponse> {
        assert_eq!(request.private_key, b"key");
        self.0.configured.fetch_add(1, Ordering::SeqCst);
        let epoch = self.0.epoch.lock().clone();
        Ok(ConfigureResponse { listen_address: "[::]:4711".into(), epoch, ..Default::default() })
    }

    async fn put_sandbox(
        &self,
        _: &TtrpcContext,
        request: PutSandboxRequest,
    ) -> ttrpc::Result<PutSandboxResponse> {
        self.0.puts.lock().push(request.id);
        Ok(PutSandboxResponse::new())
    }

    async fn delete_sandbox(
        &self,
        _: &TtrpcContext,
        _: DeleteSandboxRequest,
    ) -> ttrpc::Result<DeleteSandboxResponse> {
        Ok(DeleteSandboxResponse::new())
    }

    async fn guest_call(
        &self,
        _: &TtrpcContext,
        request: GuestCallRequest,
    ) -> ttrpc::Result<GuestCallResponse> {
        if request.id == "away" {
            let status = ttrpc::get_status(ttrpc::Code::UNAVAILABLE, "the guest is not connected");
            return Err(ttrpc::Error::RpcStatus(status));
        }
        let reply = Reply { error: "heard".into(), ..Reply::default() }.write_to_bytes().unwrap();
        Ok(GuestCallResponse { reply, ..Default::default() })
    }

    async fn watch(&self, _: &TtrpcContext, request: WatchRequest) -> ttrpc::Result<WatchResponse> {
        let mut states = self.0.states.subscribe();
        let epoch = self.0.epoch.lock().clone();
        let since = if request.epoch == epoch { request.since } else { u64::MAX };
        let newer = states.wait_for(|(version, _)| *version != since);
        match timeout(Duration::from_secs(1), newer).await {
            Ok(Ok(newer)) => Ok(WatchResponse {
                epoch: epoch.clone(),
                version: newer.0,
                changed: newer.1.clone(),
                ..Default::default()
            }),
            _ => Ok(WatchResponse { epoch, version: request.since, ..Default::default() }),
        }
    }
}

async fn serve(socket: &std::path::Path, said: &Arc<Said>, epoch: &str) -> Server {
    drop(std::fs::remove_file(socket));
    *said.epoch.lock() = epoch.into();
    let listener = Listener::from(UnixListener::bind(socket).unwrap());
    let mut server =
        Server::new().add_listener(listener).register_service(create_relay(Arc::new(Fake(said.clone()))));
    server.start().await.unwrap();
    server
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn state(id: &str, session: &str) -> SandboxState {
    SandboxState { id: id.into(), guest_connected: true, guest_session: session.into(), ..Default::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_relay_is_configured_and_the_state_of_the_last_one_is_dropped() {
    let socket = std::env::temp_dir().join(format!("peerpod-relay-client-{}.sock", std::process::id()));
    let said = Arc::new(Said::default());
    let identity: RelayIdentity =
        Arc::new(|| Ok(ConfigureRequest { private_key: b"key".to_vec(), ..Default::default() }));
    let client = RelayClient::new(socket.clone(), identity, Metrics::default());
    let running = tokio::spawn(client.clone().run());
    let id: SandboxId = "a".parse().unwrap();

    // A call waits for a relay that is starting.
    let put = PutSandboxRequest { id: "a".into(), ..Default::default() };
    let (done, server) = tokio::join!(client.put(put), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        serve(&socket, &said, "one").await
    });
    done.unwrap();
    let mut server = server;
    until("the first epoch", || *client.epoch().borrow() == 1).await;
    assert_eq!(client.listen(), Some("[::]:4711".parse().unwrap()));

    let guest = client.guest(&id);
    said.states.send_replace((1, vec![state("a", "s1"), state("b", "s2")]));
    until("heard", || guest.borrow().connected && guest.borrow().session == "s1").await;
    assert_eq!(client.call(&id, Request::new(), Duration::from_secs(5)).await.unwrap().error, "heard");
    let away = client.call(&"away".parse().unwrap(), Request::new(), Duration::from_secs(5)).await;
    assert!(away.is_err_and(|error| error.text.contains("not connected") && !error.not_served));

    // A shim without a connection is gone, but not before its first one.
    let shim = |seen, agent, hypervisor| SandboxState {
        shim_seen: seen,
        shim_connections: agent,
        hypervisor_connected: hypervisor,
        ..state("a", "s1")
    };
    let shims = [(false, 0, true), (false, 0, false), (true, 2, true), (true, 1, false), (true, 0, true)];
    for (version, (seen, agent, hypervisor)) in (2..).zip(shims) {
        let alone =
            SandboxState { guest_address: format!("192.0.2.{version}"), ..shim(seen, agent, hypervisor) };
        said.states.send_replace((version, vec![alone.clone()]));
        until("heard", || guest.borrow().address == alone.guest_address.parse().ok()).await;
        assert!(!guest.borrow().shim_gone, "{alone}");
    }
    said.states.send_replace((7, vec![shim(true, 0, false)]));
    until("the shim is gone", || guest.borrow().shim_gone).await;

    // The same relay again: no new epoch.
    server.disconnect().await;
    drop(server);
    let mut server = serve(&socket, &said, "one").await;
    until("configured again", || said.configured.load(Ordering::SeqCst) == 2).await;
    // Another relay, without any state.
    said.states.send_replace((1, vec![]));
    server.shutdown().await.unwrap();
    drop(server);
    let server = serve(&socket, &said, "two").await;
    until("another epoch", || *client.epoch().borrow() > 1).await;
    until("forgotten", || !guest.borrow().connected).await;
    until("connected", || client.connection().borrow().is_some()).await;
    client.configure().await.unwrap();
    assert!(said.configured.load(Ordering::SeqCst) >= 4);

    running.abort();
    drop(server);
    std::fs::remove_file(&socket).unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_absent_relay_is_reported_and_calls_time_out() {
    let identity: RelayIdentity = Arc::new(|| Ok(ConfigureRequest::default()));
    let client = RelayClient::new("/nonexistent/relay.sock".into(), identity, Metrics::default());
    let running = tokio::spawn(client.clone().run());
    let error = client.remove(&"a".parse().unwrap()).await.unwrap_err();
    assert!(error.contains("peerpod-relay"), "{error}");
    running.abort();
}
