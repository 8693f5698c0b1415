//! Runs one life of the node process in the fake world, and the guests that dial it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerpod_base::admin::Ready;
use peerpod_link::user_data::UserData;
use peerpod_provider_api::InstanceId;
use sha2::{Digest, Sha256};

use super::world::*;
use crate::ledger::{Inbox, Ledger};
use crate::metrics::Metrics;
use crate::sandbox::{Claim, CreateVm, Kept, Orphans, Reaper, Sandboxes, Settings, VmLiveness, recover};
use crate::spec::{PodRef, Size, VmOptions, Wanted};
use crate::traces::Tracer;

pub(super) fn settings() -> Settings {
    Settings {
        cluster_id: "test".into(),
        node_name: "node".into(),
        pods_dir: "/run/peerpod/pods".into(),
        guest_addresses: "10.99.0.1:15151".into(),
        boot_timeout: Duration::from_secs(300),
        slow_after: Duration::from_secs(60),
        start_timeout: Duration::from_secs(540),
        agent_timeout: Duration::from_secs(30),
        flush_timeout: Duration::from_secs(3),
        ticket_ttl: Duration::from_secs(1800),
        lease: Duration::from_secs(900),
        tombstone_ttl: Duration::from_secs(6 * 3600),
        never_started_grace: Duration::from_secs(900),
        netns_gone_grace: Duration::from_secs(30),
        shim_gone_grace: Duration::from_secs(20),
        vm_gone_grace: Duration::from_secs(24),
        max_sandboxes: 1000,
        guest_memory_mib: 100,
        second_nic: false,
        allowed_options: Vec::new(),
        dial: None,
        max_batch: 0,
        tracer: Tracer::default(),
        ready: Ready::default(),
    }
}

/// One life of the node process.
pub(super) struct Node {
    pub table: Sandboxes,
    pub fx: Arc<Fake>,
    pub fuse: Arc<Fuse>,
    pub metrics: Metrics,
    others: Vec<tokio::task::AbortHandle>,
}

impl Node {
    pub(super) async fn start(world: &Arc<World>, dir: &Dir) -> Node {
        Node::start_with(world, dir, Fuse::after(None), settings()).await.unwrap()
    }

    /// Starts and recovers a node; `None` if the fuse blows before the end of that.
    pub(super) async fn start_with(
        world: &Arc<World>,
        dir: &Dir,
        fuse: Arc<Fuse>,
        settings: Settings,
    ) -> Option<Node> {
        let ledger = Ledger::open(&dir.0).unwrap();
        let inbox = Inbox::open(&dir.0).unwrap();
        let (notes, bad) = inbox.read().unwrap();
        assert_eq!(bad, []);
        let loaded = ledger.load().unwrap();
        assert_eq!(loaded.quarantined, [], "our own crashes must not leave a file that cannot be read");
        let ledger_unread = ledger.in_quarantine().unwrap();
        let fx = Fake::new(world.clone(), ledger, fuse.clone());
        let metrics = Metrics::default();
        let kept = Kept {
            records: loaded.records,
            batches: loaded.batches,
            unread: ledger_unread,
            notes,
            ..Kept::default()
        };
        let table = Sandboxes::new(fx.ports(), settings, metrics.clone());
        tokio::select! {
            done = recover(&table, kept) => {
                for note in done { inbox.done(&note).unwrap() }
            }
            () = fuse.blown.notified() => {
                table.close().await;
                return None;
            }
        }
        let guests = tokio::spawn(play_guests(table.clone(), fx.clone())).abort_handle();
        let reaper = tokio::spawn(Reaper::default().run(table.clone())).abort_handle();
        let vm_liveness = tokio::spawn(VmLiveness::default().run(table.clone())).abort_handle();
        let mut others = vec![guests, reaper, vm_liveness];
        if world.late_creates.load(Ordering::Relaxed) {
            let orphans = Orphans::new(Vec::new(), vec![], Duration::from_secs(10));
            others.push(tokio::spawn(orphans.run(table.clone(), Duration::from_secs(20))).abort_handle());
        }
        Some(Node { table, fx, fuse, metrics, others })
    }

    /// Ends the node like `kill -9`.
    pub(super) async fn kill(self) {
        for other in &self.others {
            other.abort();
        }
        self.table.close().await;
    }

    pub(super) async fn create(&self, name: &str) -> Result<String, crate::sandbox::Error> {
        self.table.create(create_vm(name)).await
    }

    pub(super) async fn run(&self, name: &str) {
        self.create(name).await.unwrap();
        self.table.start(&id(name)).await.unwrap();
    }

    /// Returns the phase's name, `-` for an unknown sandbox.
    pub(super) fn phase(&self, name: &str) -> String {
        self.table.view(&id(name)).map_or("-".into(), |view| view.borrow().phase.name().into())
    }

    /// Waits until the condition holds. The clock is paused, so waiting costs nothing.
    pub(super) async fn until(&self, what: &str, condition: impl Fn(&Node) -> bool) {
        for _ in 0..200_000 {
            if condition(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("never: {what}");
    }
}

/// Returns the settings of a node with batches of at most `max_batch` VMs.
pub(super) fn batching(max_batch: u32) -> Settings {
    Settings { max_batch, ..settings() }
}

pub(super) fn create_vm(name: &str) -> CreateVm {
    let pod = PodRef { namespace: "default".into(), name: format!("pod-{name}"), uid: None };
    let wanted = Wanted {
        pod,
        size: Size { vcpus: 1, memory_mib: 2048, ..Size::default() },
        instance_type: None,
        image: None,
        initdata: None,
        vm_options: VmOptions::default(),
        traceparent: None,
    };
    CreateVm { id: id(name), wanted: Ok(wanted), netns: format!("/run/netns/{name}").into() }
}

/// Runs a guest in every VM; each guest dials the node.
async fn play_guests(table: Sandboxes, fx: Arc<Fake>) {
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        if fx.world.guests_stay_away.load(Ordering::Relaxed) || fx.fuse.is_blown() {
            continue;
        }
        let vms: Vec<(InstanceId, UserData)> =
            fx.world.state().vms.iter().map(|(id, vm)| (id.clone(), vm.user_data.clone())).collect();
        for (vm, user_data) in vms {
            if fx.world.state().links.values().any(|session| session == vm.as_str()) {
                continue;
            }
            let claim = Claim {
                peer: fx.world.home_of(&vm).to_string(),
                ..claim(&user_data, vm.as_str().as_bytes())
            };
            let granted =
                tokio::time::timeout(Duration::from_secs(5), table.claim(&user_data.ticket.id, claim)).await;
            let Ok(Ok(granted)) = granted else { continue };
            let digest = Sha256::digest(&granted.chain[0]).to_vec();
            let known = fx.world.state().relay.get(granted.id.as_str()).cloned().unwrap_or_default();
            assert!(
                known.guest_certificates.contains(&digest),
                "the relay must know a certificate before its guest"
            );
            fx.link(granted.id.as_str(), vm.as_str());
        }
    }
}

pub(super) fn claim(user_data: &UserData, csr: &[u8]) -> Claim {
    Claim {
        secret: user_data.ticket.secret.expose().to_vec(),
        csr: csr.to_vec(),
        peer: "10.99.0.7".into(),
        guest_version: "test".into(),
        tunnel_key: vec![7; 32],
        dialled: String::new(),
    }
}
