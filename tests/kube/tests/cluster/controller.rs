//! Tests `peerpod-cluster controller` against a real API server (with the garbage collector) and a cloud that outlives
//! it.
//!
//! Counts are small. With `PEERPOD_TEST_LONG=1`, or `PEERPOD_TEST_BENCH=<file>` to which the figures are added, they are
//! those that the project promises.

use super::{controller_world, drain, front_door};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use controller_world::cloud::Cloud;
use controller_world::{LIMIT, World, key};
use futures_util::{StreamExt, stream};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use peerpod_kube::crds::{FINALIZER, PeerPod};
use peerpod_provider_api::Error;
use peerpod_test_kube::{report, wait_for};
use serde_json::{from_value, json};

/// This cloud's list does not lag.
const SETTLE: (&str, &str) = ("controller.settle", "1s");

/// The stages run one after the other: they share one API server, and each controller watches all of it.
#[tokio::test(flavor = "multi_thread")]
async fn the_controller() {
    let world = World::start().await;
    let stage = |name: &str| println!("--- {name}");
    stage("PeerPods end");
    peerpods_end(&world).await;
    stage("orphans");
    orphans(&world).await;
    stage("command line");
    front_door::shows(&world).await;
    stage("drain");
    drain::drains(&world).await;
    stage("many, killed");
    many_while_it_is_killed(&world).await;
    stage("two replicas");
    one_leader(&world).await;
    stage("API server away");
    api_server_away(&world).await;
}

fn is_long() -> bool {
    ["PEERPOD_TEST_LONG", "PEERPOD_TEST_BENCH"].iter().any(|name| std::env::var_os(name).is_some())
}

async fn peerpods_end(world: &World) {
    const NS: &str = "ends";
    world.cluster.namespace(NS).await.unwrap();
    let (cloud, _serving) = world.cloud(Duration::from_millis(50)).await;
    a_list_that_lags_leaks_no_vm(world, &cloud, NS).await;
    let settings = [("controller.settle", "2s"), ("controller.node-first", "4s")];
    let controller = world.controller("a", &settings).await;
    controller.leads().await;
    by_id_and_by_key(world, &cloud, NS).await;
    others_are_left_alone(world, &cloud, NS).await;
    a_vm_of_another_one_stays(world, &cloud, NS).await;
    a_vm_of_another_cluster_stays(world, &cloud, NS).await;
    a_pod_that_runs_keeps_its_vm(world, &cloud, NS).await;
    refusals_are_told(world, &cloud, NS).await;
    its_own_node_first(world, &cloud, NS, &controller).await;
    assert_eq!(cloud.count(""), 0);
    assert_eq!(controller.ready().await["ready"], true);
}

async fn by_id_and_by_key(world: &World, cloud: &Arc<Cloud>, ns: &str) {
    // A record as the replaced system writes it.
    cloud.make("vm-old", None, None);
    world.peerpod(ns, "old", json!({"cloudProvider": "external", "instanceID": "vm-old"}), None).await;
    // A later attempt made the VM, and the record was not updated.
    cloud.make("vm-key", Some("n"), Some(key("s1", 2)));
    let spec =
        json!({"cloudProvider": "external", "sandboxID": "s1", "idempotencyKey": key("s1", 0).as_str()});
    world.peerpod(ns, "key", spec, None).await;
    world.peerpod(ns, "gone", json!({"instanceID": "vm-that-never-was"}), None).await;
    // A record without a VM: the controller waits for the VM until a limit.
    let spec = json!({"sandboxID": "s2", "idempotencyKey": key("s2", 0).as_str()});
    world.peerpod(ns, "before", spec, None).await;
    for name in ["old", "key", "gone", "before"] {
        world.delete(ns, name).await;
    }
    for name in ["old", "key", "gone", "before"] {
        world.gone(ns, name).await;
    }
    assert_eq!(cloud.count("vm-"), 0);
    world.has_event(ns, "old", "VMDeleted").await;
    // The Event for a VM of another system is the same.
    world.has_event(ns, "gone", "VMNotOurs").await;
}

async fn others_are_left_alone(world: &World, cloud: &Arc<Cloud>, ns: &str) {
    cloud.make("vm-theirs", None, None);
    let spec = json!({"cloudProvider": "another", "instanceID": "vm-theirs"});
    world.peerpod(ns, "theirs", spec, None).await;
    world.delete(ns, "theirs").await;
    world.stays(ns, "theirs", "OtherProvider").await;
    world.has_event(ns, "theirs", "OtherProvider").await;
    assert!(cloud.has("vm-theirs"));
    world.finalizers(ns, "theirs", &[]).await;
    world.gone(ns, "theirs").await;

    // The controller removes only its own finalizer.
    world.peerpod(ns, "shared", json!({"instanceID": "vm-theirs"}), None).await;
    world.finalizers(ns, "shared", &["example.org/first", FINALIZER, "example.org/last"]).await;
    world.delete(ns, "shared").await;
    let left = world.has_finalizers(ns, "shared", &["example.org/first", "example.org/last"]).await;
    let status = left.status.unwrap();
    assert_eq!(status.cleaned, Some(true));
    assert!(status.conditions.iter().any(|one| one.type_ == "Deleted" && one.status == "True"));
    world.finalizers(ns, "shared", &[]).await;
    world.gone(ns, "shared").await;
    assert!(!cloud.has("vm-theirs"));
}

/// Any user with write access to PeerPods can write any VM's id into one; the controller must not delete that VM.
async fn a_vm_of_another_one_stays(world: &World, cloud: &Arc<Cloud>, ns: &str) {
    cloud.make("vm-victim", Some("n1"), None);
    world.peerpod(ns, "victim", json!({"instanceID": "vm-victim", "nodeName": "n1"}), None).await;
    for (name, node) in [("of-another-node", "n2"), ("of-the-same-node", "n1")] {
        world.peerpod(ns, name, json!({"instanceID": "vm-victim", "nodeName": node}), None).await;
        // Another finalizer keeps the object, so that its condition is seen.
        world.finalizers(ns, name, &["example.org/other", FINALIZER]).await;
        world.delete(ns, name).await;
        // The VM of another owner does not keep the object for ever.
        world.has_finalizers(ns, name, &["example.org/other"]).await;
        world.stays(ns, name, "VMNotOurs").await;
        world.has_event(ns, name, "VMNotOurs").await;
        world.finalizers(ns, name, &[]).await;
        world.gone(ns, name).await;
    }
    assert!(cloud.has("vm-victim"));
    assert!(cloud.deletes().iter().all(|delete| delete.vm != "vm-victim"), "{:?}", cloud.deletes());
    world.delete(ns, "victim").await;
    world.gone(ns, "victim").await;
    assert!(!cloud.has("vm-victim"));
}

/// The provider's credentials may end VMs of other owners in the account; the controller ends only listed ones.
async fn a_vm_of_another_cluster_stays(world: &World, cloud: &Arc<Cloud>, ns: &str) {
    cloud.make("x-elsewhere", None, None);
    cloud.hide("x-elsewhere", true);
    // Nor one of this cluster that no PeerPod names, by its id and another sandbox.
    cloud.make("x-unnamed", Some("n1"), Some(key("unnamed", 0)));
    for (name, id) in [("elsewhere", "x-elsewhere"), ("unnamed", "x-unnamed")] {
        let spec = json!({"instanceID": id, "sandboxID": "of-the-attacker", "nodeName": "n1"});
        world.peerpod(ns, name, spec, None).await;
        world.delete(ns, name).await;
    }
    for name in ["elsewhere", "unnamed"] {
        world.gone(ns, name).await;
        world.has_event(ns, name, "VMNotOurs").await;
    }
    assert_eq!(cloud.count("x-"), 2);
    assert!(cloud.deletes().iter().all(|delete| !delete.vm.starts_with("x-")), "{:?}", cloud.deletes());
    cloud.end("x-");
}

/// The controller of this stage has the default `controller.settle`, which is longer than any wait here.
async fn a_list_that_lags_leaks_no_vm(world: &World, cloud: &Arc<Cloud>, ns: &str) {
    let controller = world.controller("a", &[]).await;
    controller.leads().await;
    cloud.make("vm-late", None, None);
    cloud.hide("vm-late", true);
    world.peerpod(ns, "late", json!({"instanceID": "vm-late"}), None).await;
    let peerpods = world.peerpods(ns);
    // The controller looks again at once after a change.
    let change = async || {
        let patch = json!({"metadata": {"annotations": {"lists": cloud.lists().to_string()}}});
        peerpods.patch("late", &PatchParams::default(), &Patch::Merge(patch)).await
    };
    let before = cloud.lists();
    world.delete(ns, "late").await;
    // One of them may be for the search for orphans.
    wait_for("two lists without it", LIMIT, async || {
        change().await?;
        Ok((cloud.lists() >= before + 2).then_some(()))
    })
    .await
    .unwrap();
    cloud.hide("vm-late", false);
    change().await.unwrap();
    world.gone(ns, "late").await;
    assert!(!cloud.has("vm-late"));
}

/// Checks that running pods keep their VMs: a StatefulSet's new pod, which has the old one's name, and a pod with a
/// PeerPod that a user deletes by hand.
async fn a_pod_that_runs_keeps_its_vm(world: &World, cloud: &Arc<Cloud>, ns: &str) {
    for id in ["vm-first", "vm-second"] {
        cloud.make(id, None, None);
    }
    let first = world.pod(ns, "web-0", None).await;
    world.peerpod(ns, "web-0-1", json!({"instanceID": "vm-first"}), Some(&first)).await;
    world.delete_pod(ns, "web-0").await;
    let second = world.pod(ns, "web-0", None).await;
    world.peerpod(ns, "web-0-2", json!({"instanceID": "vm-second"}), Some(&second)).await;
    // The garbage collector deletes it, because its pod's uid no longer exists.
    world.gone(ns, "web-0-1").await;
    assert!(!cloud.has("vm-first"));
    world.delete(ns, "web-0-2").await;
    world.stays(ns, "web-0-2", "PodRuns").await;
    assert!(cloud.has("vm-second"));
    assert!(cloud.deletes().iter().all(|delete| delete.vm != "vm-second"));
    world.delete_pod(ns, "web-0").await;
    world.gone(ns, "web-0-2").await;
    assert!(!cloud.has("vm-second"));
}

async fn refusals_are_told(world: &World, cloud: &Arc<Cloud>, ns: &str) {
    cloud.make("vm-refused", None, None);
    world.peerpod(ns, "refused", json!({"instanceID": "vm-refused"}), None).await;
    cloud.refuse(Some(Error::Auth { text: "the role may not terminate; add ec2:TerminateInstances".into() }));
    world.delete(ns, "refused").await;
    world.stays(ns, "refused", "Unauthorized").await;
    world.has_event(ns, "refused", "Unauthorized").await;
    let status = world.peerpods(ns).get("refused").await.unwrap().status.unwrap();
    assert!(status.conditions[0].message.contains("add ec2:TerminateInstances"), "{status:?}");
    cloud.refuse(None);
    world.gone(ns, "refused").await;
    let tries = cloud.deletes().iter().filter(|delete| delete.vm == "vm-refused").count();
    assert!((2..=8).contains(&tries), "{tries} tries: with pauses between them");
}

async fn its_own_node_first(
    world: &World,
    cloud: &Arc<Cloud>,
    ns: &str,
    controller: &controller_world::Controller,
) {
    for name in ["lives", "dead"] {
        cloud.make(&format!("vm-{name}"), Some(name), None);
        let spec = json!({"instanceID": format!("vm-{name}"), "nodeName": name});
        world.peerpod(ns, name, spec, None).await;
    }
    world.beat("lives", Duration::ZERO, 40).await;
    world.beat("dead", Duration::from_secs(3600), 40).await;
    world.delete(ns, "lives").await;
    world.delete(ns, "dead").await;
    world.gone(ns, "dead").await;
    wait_for("the node's turn", LIMIT, async || {
        Ok((controller.metric("peerpod_controller_peerpods_total{outcome=\"LeftToNode\"}").await > 0.0)
            .then_some(()))
    })
    .await
    .unwrap();
    // The node did not release it.
    world.gone(ns, "lives").await;
    let at = |vm: &str| cloud.deletes().iter().find(|delete| delete.vm == vm).unwrap().at;
    assert!(at("vm-lives") > at("vm-dead"));
}

async fn orphans(world: &World) {
    const NS: &str = "orphans";
    const GRACE: Duration = Duration::from_secs(5);
    world.cluster.namespace(NS).await.unwrap();
    let (cloud, _serving) = world.cloud(Duration::from_millis(50)).await;
    let class = json!({"metadata": {"name": "kata-remote"}, "handler": "kata-remote"});
    let classes: Api<RuntimeClass> = Api::all(world.client.clone());
    classes.create(&PostParams::default(), &from_value(class).unwrap()).await.unwrap();
    for node in ["idle", "busy"] {
        world.node(node).await;
    }
    for node in ["lost", "idle", "busy"] {
        world.beat(node, Duration::from_secs(3600), 1).await;
    }
    let pod = json!({"metadata": {"name": "runs"}, "spec": {
        "nodeName": "busy", "runtimeClassName": "kata-remote", "containers": [{"name": "c", "image": "x"}]}});
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(world.client.clone(), NS);
    pods.create(&PostParams::default(), &from_value(pod).unwrap()).await.unwrap();
    // A live daemon without its Node object.
    let beats = Arc::new(AtomicBool::new(true));

    // VMs that were created before their records; then the node was lost.
    cloud.make("o-lost", Some("lost"), Some(key("x1", 0)));
    cloud.make("o-idle", Some("idle"), Some(key("x2", 0)));
    // VMs that may be alive.
    cloud.make("k-daemon", Some("lives-on"), Some(key("x3", 0)));
    cloud.make("k-busy", Some("busy"), Some(key("x4", 0)));
    cloud.make("k-elsewhere", Some("another-clusters"), Some(key("x5", 0)));
    cloud.make("k-nobody", None, None);
    cloud.make("k-by-id", Some("lost"), Some(key("x6", 0)));
    world.peerpod(NS, "by-id", json!({"instanceID": "k-by-id"}), None).await;
    cloud.make("k-by-key", Some("lost"), Some(key("x7", 1)));
    let spec = json!({"sandboxID": "x7", "idempotencyKey": key("x7", 0).as_str()});
    world.peerpod(NS, "by-key", spec, None).await;
    // PeerPods of a lost node: one has a VM and a pod object that still exists, the VM of the other was never made.
    let pod = world.pod(NS, "left", Some("lost")).await;
    cloud.make("o-record", Some("lost"), Some(key("x8", 0)));
    let spec = json!({"instanceID": "o-record", "nodeName": "lost", "sandboxID": "x8"});
    world.peerpod(NS, "record", spec, Some(&pod)).await;
    world
        .peerpod(
            NS,
            "before",
            json!({"nodeName": "lost", "sandboxID": "x9", "idempotencyKey": key("x9", 0).as_str()}),
            None,
        )
        .await;
    let keep_beating = async {
        while beats.load(Ordering::Relaxed) {
            world.beat("lives-on", Duration::ZERO, 2).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    let checks = async {
        let mut settings = vec![
            ("controller.orphan-grace", "5s"),
            ("controller.node-gone-grace", "2s"),
            ("controller.settle", "1s"),
            ("controller.sweep-every", "300ms"),
            ("controller.orphans", "report"),
        ];
        only_told_of(world, &cloud, &settings).await;
        settings.pop();
        let began = Instant::now();
        let controller = world.controller("a", &settings).await;
        for orphan in ["o-lost", "o-idle"] {
            wait_for(orphan, LIMIT, async || Ok((!cloud.has(orphan)).then_some(()))).await.unwrap();
            let delete = cloud.deletes().into_iter().find(|delete| delete.vm == orphan).unwrap();
            assert!(delete.at.duration_since(began) >= GRACE, "{orphan}: before its grace period was over");
        }
        world.has_event("default", "lost", "VMOrphanDeleted").await;
        assert_eq!(controller.metric("peerpod_controller_orphans_total{outcome=\"Deleted\"}").await, 2.0);
        assert_eq!(controller.metric("peerpod_controller_vms_unattributed").await, 2.0);
        assert_eq!(cloud.count("o-"), 0);
        assert_eq!(cloud.count("k-"), 6, "nothing that may be alive");
        beats.store(false, Ordering::Relaxed);
        wait_for("the VM of a daemon that died", LIMIT, async || Ok((!cloud.has("k-daemon")).then_some(())))
            .await
            .unwrap();
        world.delete_pod(NS, "runs").await;
        wait_for("the VM of a node without pods", LIMIT, async || Ok((!cloud.has("k-busy")).then_some(())))
            .await
            .unwrap();
        assert_eq!(cloud.count("k-"), 4);
    };
    tokio::join!(keep_beating, checks);
    world.delete_pod(NS, "left").await;
    for name in ["by-id", "by-key"] {
        world.finalizers(NS, name, &[]).await;
        world.delete(NS, name).await;
    }
}

/// In report mode orphans are reported and kept. PeerPods of a lost node are not orphans.
async fn only_told_of(world: &World, cloud: &Arc<Cloud>, settings: &[(&str, &str)]) {
    let controller = world.controller("a", settings).await;
    for name in ["record", "before"] {
        world.gone("orphans", name).await;
    }
    world.has_event("orphans", "record", "NodeGone").await;
    assert!(!cloud.has("o-record"));
    wait_for("the report", LIMIT, async || {
        let reported = controller.metric("peerpod_controller_orphans_total{outcome=\"Reported\"}").await;
        Ok((reported >= 2.0).then_some(()))
    })
    .await
    .unwrap();
    world.has_event("default", "lost", "VMOrphaned").await;
    assert_eq!(cloud.count("o-"), 2);
    assert_eq!(controller.metric("peerpod_controller_orphans_total").await, 2.0, "each once");
    assert!(cloud.deletes().iter().all(|delete| delete.vm == "o-record"), "{:?}", cloud.deletes());
}

async fn many_while_it_is_killed(world: &World) {
    const NS: &str = "many";
    const LIVE: usize = 20;
    let (count, concurrency, takes, kills) = if is_long() { (500, 50, 2000, 20) } else { (60, 20, 500, 5) };
    let takes = Duration::from_millis(takes);
    world.cluster.namespace(NS).await.unwrap();
    let (cloud, _serving) = world.cloud(takes).await;
    let make = |name: String, label: &'static str| {
        let cloud = cloud.clone();
        async move {
            let id = format!("{label}-{name}");
            cloud.make(&id, Some("n"), None);
            let mut peerpod: PeerPod = from_value(json!({
                "apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPod",
                "metadata": {"name": id, "labels": {"test": label}, "finalizers": [FINALIZER]},
                "spec": {"cloudProvider": "external"},
            }))
            .unwrap();
            peerpod.spec.sandbox_id = Some(format!("sandbox-{id}"));
            peerpod.spec.instance_id = Some(id);
            world.peerpods(NS).create(&PostParams::default(), &peerpod).await.unwrap();
        }
    };
    stream::iter((0..count).map(|number| make(number.to_string(), "goes")))
        .buffer_unordered(16)
        .collect::<()>()
        .await;
    stream::iter((0..LIVE).map(|number| make(number.to_string(), "lives")))
        .buffer_unordered(16)
        .collect::<()>()
        .await;
    let at_once = concurrency.to_string();
    // A killed controller may have deleted a VM and not yet its finalizer.
    let settings = [("controller.concurrency", at_once.as_str()), SETTLE];
    let mut controller = world.controller("a", &settings).await;
    controller.leads().await;
    let peerpods = world.peerpods(NS);
    let going = ListParams::default().labels("test=goes");
    let began = Instant::now();
    peerpods.delete_collection(&DeleteParams::default(), &going).await.unwrap();
    for kill in 1..=kills {
        let left = count - count * kill / (kills + 1);
        wait_for("progress", Duration::from_secs(300), async || {
            Ok((cloud.count("goes-") <= left).then_some(()))
        })
        .await
        .unwrap();
        // SIGKILL, and an immediate restart, like that of a container in its pod.
        drop(controller);
        controller = world.controller("a", &settings).await;
    }
    wait_for("all of them to go", Duration::from_secs(300), async || {
        Ok(peerpods.list_metadata(&going).await?.items.is_empty().then_some(()))
    })
    .await
    .unwrap();
    let took = began.elapsed();
    let leaked = cloud.count("goes-") + (LIVE - cloud.count("lives-"));
    assert_eq!(leaked, 0);
    assert_eq!(peerpods.list_metadata(&ListParams::default()).await.unwrap().items.len(), LIVE);
    assert!(cloud.deletes().iter().all(|delete| delete.vm.starts_with("goes-")));
    let ideal = takes * u32::try_from(count.div_ceil(concurrency)).unwrap();
    println!(
        "{count} PeerPods, {concurrency} at once, {takes:?} each, {kills} kills: {took:.1?}, ideal {ideal:.1?}; {} at once",
        cloud.peak()
    );
    if is_long() {
        report("controller_500_deletes_vs_ideal", took.as_secs_f64() / ideal.as_secs_f64()).unwrap();
        report("controller_leaks", leaked as f64).unwrap();
    }
    for number in 0..LIVE {
        world.finalizers(NS, &format!("lives-{number}"), &[]).await;
    }
    peerpods.delete_collection(&DeleteParams::default(), &ListParams::default()).await.unwrap();
}

/// Makes this number of PeerPods with their VMs, and deletes the PeerPods.
async fn delete_some(world: &World, cloud: &Arc<Cloud>, ns: &str, prefix: &str, count: usize) {
    for number in 0..count {
        let name = format!("{prefix}-{number}");
        cloud.make(&name, None, None);
        world.peerpod(ns, &name, json!({"instanceID": name}), None).await;
        world.delete(ns, &name).await;
    }
}

async fn all_gone(world: &World, cloud: &Arc<Cloud>, ns: &str, prefix: &str) {
    let peerpods = world.peerpods(ns);
    wait_for("all to go", LIMIT, async || {
        let left = peerpods.list_metadata(&ListParams::default()).await?.items;
        let none =
            left.iter().all(|one| !one.metadata.name.as_deref().unwrap_or_default().starts_with(prefix));
        Ok(none.then_some(()))
    })
    .await
    .unwrap();
    assert_eq!(cloud.count(prefix), 0);
}

/// Checks that a leader that is stopped past its lease does nothing more when it is resumed.
async fn one_leader(world: &World) {
    const NS: &str = "leaders";
    world.cluster.namespace(NS).await.unwrap();
    let cloud = world.unserved_cloud(Duration::from_millis(700));
    let _serving = [cloud.serve(&world.socket("a"), "a").await, cloud.serve(&world.socket("b"), "b").await];
    let settings = [("controller.concurrency", "1"), SETTLE];
    let a = world.controller("a", &settings).await;
    a.leads().await;
    let b = world.controller("b", &settings).await;
    wait_for("the other to wait", LIMIT, async || Ok(b.said("another replica leads").then_some(())))
        .await
        .unwrap();
    assert_eq!(b.ready().await["ready"], true, "a waiting replica is ready");
    delete_some(world, &cloud, NS, "one", 12).await;
    wait_for("the leader to begin", LIMIT, async || Ok((!cloud.deletes().is_empty()).then_some(())))
        .await
        .unwrap();
    a.process.signal("STOP").unwrap();
    all_gone(world, &cloud, NS, "one").await;
    assert!(cloud.deletes().iter().any(|delete| delete.via == "b"), "the standby took over");
    // It resumes during the other leader's work, with an outdated view of the remaining work.
    delete_some(world, &cloud, NS, "two", 12).await;
    a.process.signal("CONT").unwrap();
    all_gone(world, &cloud, NS, "two").await;
    wait_for("the first to know", LIMIT, async || Ok(a.said("the lease is lost").then_some(())))
        .await
        .unwrap();
    let deletes = cloud.deletes();
    let first_of_b = deletes.iter().filter(|delete| delete.via == "b").map(|delete| delete.at).min().unwrap();
    let late: Vec<_> = deletes.iter().filter(|delete| delete.via == "a" && delete.at >= first_of_b).collect();
    assert!(late.is_empty(), "both acted: {late:?}");
    // On SIGTERM the leader releases its lease, and the first one leads again at once.
    b.process.signal("TERM").unwrap();
    a.leads().await;
    delete_some(world, &cloud, NS, "three", 1).await;
    all_gone(world, &cloud, NS, "three").await;
    assert_eq!(cloud.deletes().last().unwrap().via, "a");
    assert!(b.said("the lease is given back"));
    let times = a.process.said().matches("another replica leads").count();
    assert_eq!(times, 1, "it is logged once, not with each look");
}

/// Stops the API server during deletes. A leader that cannot renew stops, and continues when the API server is back.
async fn api_server_away(world: &World) {
    const NS: &str = "away";
    let away = Duration::from_secs(if is_long() { 60 } else { 8 });
    world.cluster.namespace(NS).await.unwrap();
    let (cloud, _serving) = world.cloud(Duration::from_millis(300)).await;
    let controller = world.controller("a", &[("controller.concurrency", "2"), SETTLE]).await;
    controller.leads().await;
    delete_some(world, &cloud, NS, "away", 20).await;
    wait_for("the first to go", LIMIT, async || Ok((cloud.count("away") < 18).then_some(()))).await.unwrap();
    world.cluster.freeze_api_server(true).unwrap();
    let frozen = Instant::now();
    wait_for("it to report this", LIMIT, async || {
        let ready = controller.ready().await;
        Ok(ready["waiting"]["lease"].is_string().then_some(()))
    })
    .await
    .unwrap();
    assert_eq!(controller.metric("peerpod_controller_leading").await, 0.0);
    let before = cloud.deletes().len();
    tokio::time::sleep(away.saturating_sub(frozen.elapsed())).await;
    assert_eq!(cloud.deletes().len(), before, "a leader without its lease deletes nothing");
    world.cluster.freeze_api_server(false).unwrap();
    all_gone(world, &cloud, NS, "away").await;
    assert!(cloud.peak() <= 2, "{} at once", cloud.peak());
    wait_for("it to be ready", LIMIT, async || Ok((controller.ready().await["ready"] == true).then_some(())))
        .await
        .unwrap();
}
