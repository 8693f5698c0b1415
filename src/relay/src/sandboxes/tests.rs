//! Tests of putting, repeating, replacing and deleting sandboxes, with real sockets and files.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use prometheus_client::registry::Registry;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

struct World {
    base: PathBuf,
    sandboxes: Arc<Sandboxes>,
}

impl World {
    fn new(name: &str) -> World {
        let base = std::env::temp_dir().join(format!("peerpod-sandboxes-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&base));
        std::fs::create_dir_all(&base).unwrap();
        let sandboxes = World::sandboxes(&base);
        World { base, sandboxes }
    }

    fn sandboxes(base: &Path) -> Arc<Sandboxes> {
        let metrics = Arc::new(Metrics::new(&mut Registry::default()));
        Sandboxes::new(RelayStore::open(base).unwrap(), Arc::new(States::new("e".into())), metrics)
    }

    fn record(&self, id: &str, certificate: u8) -> SandboxRecord {
        SandboxRecord {
            id: SandboxId::new(id).unwrap(),
            agent_socket: self.base.join("pods").join(id).join("agent.ttrpc"),
            guest_certificates: vec![[certificate; 32]],
            pod: "shop/web".into(),
            tunnel_peer: None,
            dial: Vec::new(),
            volumes: Vec::new(),
            addresses: vec!["10.0.0.7".parse().unwrap()],
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.base));
    }
}

#[tokio::test]
async fn the_addresses_of_vms_are_known_as_long_as_a_sandbox_has_them() {
    let world = World::new("addresses");
    let vms = |text: &str| world.sandboxes.vms_at(&text.parse().unwrap());
    let (a, b) = (world.record("a", 1), world.record("b", 2));
    world.sandboxes.put(a.clone(), ()).await.unwrap();
    world.sandboxes.put(b.clone(), ()).await.unwrap();
    assert_eq!(vms("10.0.0.7"), 2);
    let dial = vec!["10.0.0.8:1".parse().unwrap(), "10.0.0.8:2".parse().unwrap()];
    let moved = SandboxRecord { addresses: Vec::new(), dial, ..a };
    world.sandboxes.put(moved.clone(), ()).await.unwrap();
    assert_eq!([vms("10.0.0.7"), vms("10.0.0.8")], [1, 1]);
    world.sandboxes.delete(&b.id).await.unwrap();
    assert_eq!([vms("10.0.0.7"), vms("10.0.0.8")], [0, 1]);
    world.sandboxes.delete(&moved.id).await.unwrap();
    assert_eq!(vms("10.0.0.8"), 0);
}

/// Whether the socket of a removed sandbox closes a late shim's connection.
async fn is_closed(record: &SandboxRecord) -> bool {
    let Ok(mut shim) = UnixStream::connect(&record.agent_socket).await else { return true };
    matches!(tokio::time::timeout(PATIENCE, shim.read(&mut [0])).await, Ok(Ok(0) | Err(_)))
}

#[tokio::test]
async fn a_put_sandbox_listens_and_a_deleted_one_leaves_nothing() {
    let world = World::new("put");
    let record = world.record("a", 1);
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    let folder = record.agent_socket.parent().unwrap();
    assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    UnixStream::connect(&record.agent_socket).await.unwrap();
    assert!(world.sandboxes.of_certificate(&[1; 32]).is_some());
    world.sandboxes.delete(&record.id).await.unwrap();
    world.sandboxes.delete(&record.id).await.unwrap();
    assert!(is_closed(&record).await);
    assert!(world.sandboxes.of_certificate(&[1; 32]).is_none());
    assert_eq!(std::fs::read_dir(world.base.join("relay/sandboxes")).unwrap().count(), 0);
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    UnixStream::connect(&record.agent_socket).await.unwrap();
}

#[tokio::test]
async fn a_removed_socket_is_restored_by_the_next_put() {
    let world = World::new("removed");
    let record = world.record("a", 1);
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    std::fs::remove_dir_all(world.base.join("pods")).unwrap();
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    UnixStream::connect(&record.agent_socket).await.unwrap();
    std::fs::remove_file(&record.agent_socket).unwrap();
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    UnixStream::connect(&record.agent_socket).await.unwrap();
}

#[tokio::test]
async fn a_certificate_has_one_sandbox_and_the_later_put_wins() {
    let world = World::new("certificates");
    world.sandboxes.put(world.record("a", 1), ()).await.unwrap();
    let stolen = world.sandboxes.put(world.record("b", 1), ()).await;
    assert!(matches!(stolen, Err(SandboxError::Certificate(..))));
    assert!(world.sandboxes.get(&SandboxId::new("b").unwrap()).is_none());
    world.sandboxes.put(world.record("a", 2), ()).await.unwrap();
    assert!(world.sandboxes.of_certificate(&[1; 32]).is_none());
    assert_eq!(world.sandboxes.of_certificate(&[2; 32]).unwrap().id.as_str(), "a");
    world.sandboxes.put(world.record("b", 1), ()).await.unwrap();
}

#[tokio::test]
async fn paths_that_lead_elsewhere_are_refused() {
    let world = World::new("paths");
    for path in ["agent.ttrpc", "/run/x/../a/agent.ttrpc", "/run/peerpod/b/agent.ttrpc", "/"] {
        let record = SandboxRecord { agent_socket: path.into(), ..world.record("a", 1) };
        assert!(matches!(world.sandboxes.put(record, ()).await, Err(SandboxError::Path(..))), "{path}");
    }
}

#[tokio::test]
async fn a_new_process_serves_the_same_sandboxes() {
    let world = World::new("again");
    let record = world.record("a", 1);
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    world.sandboxes.stop().await;
    assert!(!record.agent_socket.exists());
    let next = World::sandboxes(&world.base);
    next.restore(RelayStore::open(&world.base).unwrap().records().unwrap()).await;
    UnixStream::connect(&record.agent_socket).await.unwrap();
    assert!(next.of_certificate(&[1; 32]).is_some());
}

#[tokio::test]
async fn an_abandoned_put_leaves_no_record_after_a_later_delete() {
    let world = World::new("left");
    let record = world.record("a", 1);
    let mut abandoned = 0;
    for _ in 0..50 {
        let mut put = Box::pin(world.sandboxes.put(record.clone(), ()));
        // The record is being written when the caller leaves, unless the write was quicker than this look.
        let is_written = || {
            world.sandboxes.table.lock().slots.get(&record.id).is_some_and(|slot| slot.try_lock().is_err())
        };
        while !is_written() && futures_util::poll!(&mut put).is_pending() {
            tokio::task::yield_now().await;
        }
        abandoned += usize::from(is_written());
        drop(put);
        world.sandboxes.delete(&record.id).await.unwrap();
        assert!(world.sandboxes.get(&record.id).is_none() && is_closed(&record).await);
        assert_eq!(std::fs::read_dir(world.base.join("relay/sandboxes")).unwrap().count(), 0);
    }
    assert!(abandoned > 0, "each record was written before its caller left");
}

#[tokio::test]
async fn puts_and_deletes_at_once_end_consistent() {
    let world = Arc::new(World::new("race"));
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..60 {
        let world = world.clone();
        tasks.spawn(async move {
            let record = world.record("a", 1);
            if n % 3 == 0 {
                world.sandboxes.delete(&record.id).await
            } else {
                world.sandboxes.put(record, ()).await
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap().unwrap();
    }
    let record = world.record("a", 1);
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    UnixStream::connect(&record.agent_socket).await.unwrap();
    world.sandboxes.delete(&record.id).await.unwrap();
    assert!(is_closed(&record).await);
    let table = world.sandboxes.table.lock();
    assert!(table.slots.is_empty() && table.attached.is_empty() && table.fingerprints.is_empty());
}

#[tokio::test]
async fn an_endpoint_that_ends_early_is_replaced() {
    let world = World::new("panic");
    let record = world.record("a", 1);
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    for round in 1..=3 {
        let mut shim = UnixStream::connect(&record.agent_socket).await.unwrap();
        let before = world.sandboxes.get(&record.id).unwrap();
        let slot = world.sandboxes.table.lock().slots[&record.id].clone();
        // Ends the task at any point, as a panic does.
        slot.lock().await.as_ref().unwrap().endpoint.abort();
        let closed = tokio::time::timeout(PATIENCE, shim.read(&mut [0])).await.unwrap();
        assert!(matches!(closed, Ok(0) | Err(_)), "the shim sees the end");
        let anew = async {
            while world.sandboxes.get(&record.id).is_none_or(|now| Arc::ptr_eq(&now.guest, &before.guest)) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, anew).await.unwrap();
        assert_eq!(world.sandboxes.metrics.sandboxes.panics.get(), round);
        assert!(world.sandboxes.of_certificate(&[1; 32]).is_some(), "its guest finds it");
        assert_eq!(world.sandboxes.metrics.sandboxes.served.get(), 1);
        let mut shim = UnixStream::connect(&record.agent_socket).await.unwrap();
        let open = tokio::time::timeout(Duration::from_millis(50), shim.read(&mut [0])).await;
        assert!(open.is_err(), "the next connection is kept: {open:?}");
    }
    world.sandboxes.delete(&record.id).await.unwrap();
    assert!(world.sandboxes.table.lock().slots.is_empty());
    assert!(is_closed(&record).await);
}

#[tokio::test]
async fn an_endpoint_that_panics_is_counted_and_served_by_another_one() {
    let world = World::new("bug");
    let record = world.record("a", 1);
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    let before = world.sandboxes.get(&record.id).unwrap();
    // An impossible number: the endpoint's own task panics when it reports the next connection (overflow checks).
    before.guest.connections.store(1 << 63, std::sync::atomic::Ordering::Relaxed);
    let (mut shim, adopted) = UnixStream::pair().unwrap();
    before.endpoint.adopt(adopted);
    let closed = tokio::time::timeout(PATIENCE, shim.read(&mut [0])).await.unwrap();
    assert!(matches!(closed, Ok(0) | Err(_)), "the shim sees the end");
    let anew = async {
        while world.sandboxes.get(&record.id).is_none_or(|now| Arc::ptr_eq(&now.guest, &before.guest)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, anew).await.unwrap();
    assert_eq!(world.sandboxes.metrics.sandboxes.panics.get(), 1);
    assert!(world.sandboxes.of_certificate(&[1; 32]).is_some(), "its guest finds it");
    let mut shim = UnixStream::connect(&record.agent_socket).await.unwrap();
    let open = tokio::time::timeout(Duration::from_millis(50), shim.read(&mut [0])).await;
    assert!(open.is_err(), "the next connection is kept: {open:?}");
    world.sandboxes.delete(&record.id).await.unwrap();
    assert!(is_closed(&record).await);
}

#[tokio::test]
async fn a_deleted_sandbox_does_not_come_back_when_its_endpoint_ended_early() {
    let world = World::new("late");
    let record = world.record("a", 1);
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    let slot = world.sandboxes.table.lock().slots[&record.id].clone();
    let ended = {
        let live = slot.lock().await;
        live.as_ref().unwrap().endpoint.abort();
        live.as_ref().unwrap().attached.clone()
    };
    world.sandboxes.delete(&record.id).await.unwrap();
    world.sandboxes.renew(&ended).await;
    assert!(world.sandboxes.get(&record.id).is_none() && is_closed(&record).await);
    // A sandbox that was put again meanwhile is not changed.
    world.sandboxes.put(record.clone(), ()).await.unwrap();
    let now = world.sandboxes.get(&record.id).unwrap();
    world.sandboxes.renew(&ended).await;
    assert!(Arc::ptr_eq(&world.sandboxes.get(&record.id).unwrap().guest, &now.guest));
}
