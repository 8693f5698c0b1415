//! A node whose starts and tickets end soon, and which is away too long, or has no provider.

use std::path::Path;
use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_test_kube::wait_for;
use peerpod_world::{Settings, World};
use serde_json::Value;
use tokio::time::{Instant, sleep_until, timeout};

use super::super::node_common::{LIMIT, Rig, Running};
use super::injected::{Folder, located};
use super::side::Side;
use super::{Texts, describe};

const NODE: &str = "worker-3";
/// Time limit of a start, and of a ticket. Two pods are created in less, also on a loaded machine.
const SHORT: Duration = Duration::from_secs(20);

/// Injects the faults.
pub(super) async fn all(rig: &Rig, kubeconfig: &Path, folder: &Folder) -> Texts {
    let short = format!("{}s", SHORT.as_secs());
    let settings = Settings::none().set("node.boot-timeout", short.as_str()).set("node.ticket-ttl", short);
    let world = World::new().unwrap();
    let mut side = Side::start(rig, world, (NODE, kubeconfig), folder.settings(settings)).await;
    let mut texts = Texts::default();
    too_long(rig, &mut side, folder, &mut texts).await;
    without_provider(rig, &mut side, &mut texts).await;
    texts
}

/// Makes a pod, and calls CreateVM for it.
async fn create(rig: &Rig, side: &Side, pod: &str) -> (String, Running) {
    let uid = rig.pod_on(side.name, pod);
    let (running, made) = side.create(pod, Annotations::new("shop", pod)).await;
    made.unwrap();
    (uid, running)
}

/// Waits for the failure of a start, and keeps its texts.
async fn failed(
    rig: &Rig,
    side: &Side,
    (fault, uid, running): (&'static str, &str, &Running),
    texts: &mut Texts,
) {
    let start = timeout(LIMIT, running.shim.start_vm(&running.id)).await;
    let error = start.unwrap_or_else(|_| panic!("{}", side.daemons.log_tails())).unwrap_err();
    let (event, _) = rig.event(uid, "StartFailed").await;
    texts.add(fault, event, Some(error.to_string()), describe(&side.daemons, &running.id));
}

/// Kills the node while two VMs boot. One ticket expires before its return, and another program takes the VNI of one.
async fn too_long(rig: &Rig, side: &mut Side, folder: &Folder, texts: &mut Texts) {
    let ((late_uid, late), (vni_uid, vni)) =
        tokio::join!(create(rig, side, "late-ticket"), create(rig, side, "late-vni"));
    let expired = Instant::now() + SHORT;
    let number = reserved(side, &vni).await;
    located(&side.daemons, &late.id).await;
    side.daemons.kill_node().unwrap();
    vni.network.namespace().ip("link del pp-vx0\n").unwrap();
    let foreign = format!("link add foreign0 type vxlan id {number} dstport 4789 remote 192.0.2.1\n");
    side.world.node().ip(&foreign).unwrap();
    sleep_until(expired).await;
    side.daemons.start_node().unwrap();
    folder.go("go-late");
    failed(rig, side, ("another program has the tunnel's VNI", &vni_uid, &vni), texts).await;
    failed(rig, side, ("the ticket has expired", &late_uid, &late), texts).await;
    side.daemons.ready().await.unwrap();
}

/// Returns the VNI of a sandbox, once it is recorded.
async fn reserved(side: &Side, running: &Running) -> u64 {
    let found = wait_for("the VNI", LIMIT, async || {
        let shown = running.network.namespace().shell("ip -j -d link show type vxlan", &[])?;
        let shown: Value = serde_json::from_str(&shown).unwrap_or_default();
        let Some(number) = shown[0]["linkinfo"]["info_data"]["id"].as_u64() else { return Ok(None) };
        let recorded = format!("\"vni\":{number}");
        let entries = side.daemons.ledger()?;
        Ok(entries.iter().any(|entry| entry.record.to_string().contains(&recorded)).then_some(number))
    });
    found.await.unwrap_or_else(|error| panic!("{error}\n{}", side.daemons.log_tails()))
}

async fn without_provider(rig: &Rig, side: &mut Side, texts: &mut Texts) {
    side.daemons.kill_cloud().unwrap();
    let (uid, running) = create(rig, side, "provider").await;
    failed(rig, side, ("the provider's process crashed", &uid, &running), texts).await;
}
