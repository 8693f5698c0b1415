//! Tests the node in a cluster: the real daemons, with VMs made of namespaces, against a real API server. `kubectl`
//! applies a pod; the test plays its kubelet and its shim.

use super::node_common;
use std::path::Path;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use node_common::{History, LIMIT, NODE, OWN, Rig, Running, age, vm_in, vms};
use peerpod_client::Annotations;
use peerpod_kube::crds::{FINALIZER, PeerPod, Phase};
use peerpod_test_kube::{Rule, wait_for};
use peerpod_tests::{Dice, fresh_id, long, stop_in_time};
use peerpod_world::{Settings, Sight};
use serde_json::Value;

fn settings() -> Settings {
    Settings::none()
        .set("node.vm-gone-grace", "1s")
        .set("node.slow-after", "3s")
        .set("node.orphan-grace", "2s")
        .set("node.metrics-listen", "127.0.0.1:15157")
        .set("node.otlp-endpoint", "127.0.0.1:4318")
}

/// One cluster serves all stages, because its start takes most of the time.
#[tokio::test(flavor = "multi_thread")]
async fn status_and_events_show_the_real_state() {
    let mut rig = Rig::start(settings().set("cluster.withdraw-after", "5s")).await;
    assert_eq!(rig.capacity().await, None, "nothing serves yet");
    rig.daemons().await;
    metrics_are_served_to_callers_with_the_right(&rig).await;
    a_start_is_a_trace(&rig).await;
    a_user_sees_capacity_and_its_pods_vm(&rig).await;
    what_is_refused_is_said_on_the_pod(&rig).await;
    a_vm_that_dies_is_said_on_the_pod(&rig).await;
    a_take_over_that_fails_is_an_event_of_the_new_relays_pod(&rig).await;
    capacity_that_is_lost_comes_back(&rig).await;
    a_node_that_is_not_ready_withdraws_its_capacity(&mut rig).await;
    pods_of_one_name_are_told_apart(&rig).await;
    kills_around_the_create_leave_nothing(&mut rig).await;
    vms_carry_the_clusters_uid_and_another_id_is_reported(&mut rig).await;
    an_emptied_ledger_costs_no_pod_its_vm(&mut rig).await;
    a_rolling_update_keeps_the_capacity(&mut rig).await;
    a_daemon_that_never_serves_keeps_no_claim(&mut rig).await;
    a_node_that_is_to_have_no_peer_pods_loses_the_capacity(&mut rig).await;
}

/// Returns the token of a new service account, which may get the URL `/metrics` or has no right.
async fn scraper(rig: &Rig, name: &str, is_permitted: bool) -> String {
    let urls = Rule {
        non_resource_urls: Some(vec!["/metrics".to_owned()]),
        verbs: vec!["get".to_owned()],
        ..Rule::default()
    };
    let rules = if is_permitted { vec![urls] } else { Vec::new() };
    rig.cluster.service_account(OWN, name, rules).await.unwrap();
    rig.cluster.token(OWN, name, &[], None).await.unwrap()
}

async fn metrics_are_served_to_callers_with_the_right(rig: &Rig) {
    let (permitted, stranger) =
        (scraper(rig, "prometheus", true).await, scraper(rig, "stranger", false).await);
    assert_eq!(rig.scrape("/metrics", None).0, 401);
    assert_eq!(rig.scrape("/metrics", Some("no-token-of-this-cluster")).0, 401);
    let (status, text) = rig.scrape("/metrics", Some(&stranger));
    assert!(status == 403 && text.contains("bind it to a role"), "{status} {text}");
    // The second answer comes from the remembered one.
    for _ in 0..2 {
        let (status, text) = rig.scrape("/metrics", Some(&permitted));
        assert!(
            status == 200 && text.contains("peerpod_node_sandboxes{phase=\"running\"} 0"),
            "{status} {text}"
        );
    }
    assert!(text_of_relay(rig, &permitted).contains("peerpod_relay_sandboxes 0"));
    assert_eq!(rig.scrape("/relay/metrics", Some(&stranger)).0, 403);
    assert_eq!(rig.scrape("/readyz", Some(&permitted)).0, 404);
    let metrics = rig.daemons.metrics("node").unwrap();
    let asked = "peerpod_node_cluster_calls_total{call=\"token_review\",result=\"ok\"} 3\n";
    assert!(metrics.contains(asked), "one review of each token: {metrics}");
}

/// The trace of a start continues the shim's, and reaches a real receiver.
async fn a_start_is_a_trace(rig: &Rig) {
    let (mut receiver, log) = rig.otlp_receiver();
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    wait_for("the receiver", LIMIT, async || Ok(said().contains("ready").then_some(()))).await.unwrap();
    let uid = rig.pod("traced");
    let shim = rig.daemons.shim().await.unwrap();
    let shim = shim.traced("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    let running = Running { id: fresh_id("traced"), shim, network: rig.world.pod().unwrap() };
    rig.create_again(&running, "traced").await.unwrap();
    tokio::time::timeout(LIMIT, running.shim.start_vm(&running.id)).await.unwrap().unwrap();
    let line = wait_for("the trace", LIMIT, async || {
        Ok(said().lines().find(|line| line.contains(&running.id)).map(str::to_owned))
    });
    let line: serde_json::Value = serde_json::from_str(&line.await.unwrap()).unwrap();
    let spans = line["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().clone();
    let find = |name: &str| {
        let found = spans.iter().find(|span| span["name"] == name);
        found.unwrap_or_else(|| panic!("no span {name} in {spans:?}")).clone()
    };
    let (start, guest) = (find("start"), find("guest"));
    assert!(spans.iter().all(|span| span["traceId"] == "0af7651916cd43dd8448eb211c80319c"), "{spans:?}");
    assert_eq!(start["parentSpanId"], "b7ad6b7169203331");
    assert!(start["attributes"].to_string().contains(&uid), "{start}");
    // Provider's call, stage on the node, stage in the VM.
    for (name, parent) in [("vm_made", &start), ("running", &start), ("boot", &guest), ("guest", &start)] {
        assert_eq!(find(name)["parentSpanId"], parent["spanId"], "{name}");
    }
    rig.stop(running).await;
    rig.delete_pod("traced");
    receiver.kill().unwrap();
    receiver.wait().unwrap();
}

fn text_of_relay(rig: &Rig, token: &str) -> String {
    let (status, text) = rig.scrape("/relay/metrics", Some(token));
    assert_eq!(status, 200, "{text}");
    text
}

async fn a_user_sees_capacity_and_its_pods_vm(rig: &Rig) {
    rig.wait_capacity(Some("50")).await;
    assert_eq!(rig.owner().await.as_deref(), Some("first-daemon"));
    let columns = "-o=custom-columns=NAME:.metadata.name,PEER-PODS:.status.capacity.kata\\.peerpods\\.io/vm,OWNER:.metadata.annotations.kata\\.peerpods\\.io/caa-owner";
    let seen = rig.show(&["get", "node", NODE, columns]);
    assert!(seen.contains("50") && seen.contains("first-daemon"), "{seen}");
    let leases: Api<Lease> = Api::namespaced(rig.client.clone(), OWN);
    let beat =
        async || Ok(leases.get_opt(&format!("peerpod-node-{NODE}")).await?.and_then(|lease| lease.spec));
    let first = wait_for("a heartbeat", LIMIT, beat).await.unwrap();
    rig.show(&["get", "lease", "-n", OWN]);

    let history = History::of(&rig.client).await;
    let uid = rig.pod("web");
    let running = rig.run("web").await;
    rig.exactly(&[("web", &running)]).await;
    let seen = rig.show(&["get", "peerpod", "-n", "shop", "-o", "wide"]);
    let vm = vm_in(&rig.daemons, &running.id).unwrap();
    for part in [vm.as_str(), NODE, "Running", "local", &running.id] {
        assert!(seen.contains(part), "{part} in {seen}");
    }
    rig.show(&["get", "peerpod", "-n", "shop", "-o", "yaml"]);
    let object = rig.peerpod("web", &running.id).await.unwrap();
    let owners = object.metadata.owner_references.unwrap();
    assert_eq!(
        (owners[0].uid.as_str(), owners[0].kind.as_str(), owners[0].controller),
        (uid.as_str(), "Pod", Some(true))
    );
    assert_eq!(object.metadata.finalizers.unwrap(), [FINALIZER]);
    let uid_of_peerpod = object.metadata.uid.unwrap();
    for (uid, reason, part) in [
        (&uid, "VMCreated", vm.as_str()),
        (&uid, "VMReady", "ready after"),
        (&uid_of_peerpod, "VMCreated", &vm),
    ] {
        let (text, count) = rig.event(uid, reason).await;
        assert!(text.contains(part) && count == 1, "{reason}: {count} {text}");
    }
    assert_eq!(rig.show(&["get", "pp", "-n", "shop", "-o", "jsonpath={.items[*].status.phase}"]), "Running");
    let status = object.status.unwrap();
    let stage = |name: &str| status.stages.iter().position(|stage| stage.name == name);
    assert!(stage("announced").unwrap() < stage("vm_made").unwrap(), "{:?}", status.stages);
    assert!(!status.addresses.is_empty());
    // The ledger has the pod's UID, which volumes need.
    let entry = rig.daemons.ledger().unwrap().into_iter().find(|entry| entry.id == running.id).unwrap();
    assert_eq!(entry.record["pod"]["uid"], uid.as_str());

    rig.stop(running).await;
    rig.exactly(&[]).await;
    assert!(rig.event(&uid, "VMDeleted").await.0.contains(&vm));
    let of_node = format!("involvedObject.kind=Node,involvedObject.name={NODE},reason=VMDeleted");
    wait_for("the same on the Node", LIMIT, async || {
        let seen = rig.cluster.kubectl(&["get", "events", "-n", "default", "--field-selector", &of_node])?;
        Ok(seen.contains(&format!("shop/web: VM {vm}")).then_some(()))
    })
    .await
    .unwrap();
    let seen = history.seen();
    let first_seen = &seen[0];
    assert_eq!(
        (first_seen.spec.instance_id.as_ref(), first_seen.metadata.finalizers.as_deref().map(<[_]>::len)),
        (None, Some(1))
    );
    assert!(first_seen.spec.idempotency_key.is_some(), "the intent can be found by its key");
    let phases: Vec<Phase> = seen.iter().filter_map(|object| object.status.as_ref()?.phase).collect();
    assert!(phases.contains(&Phase::Running) && phases.contains(&Phase::Leaving), "{phases:?}");
    rig.delete_pod("web");
    let later = wait_for("another beat", LIMIT, async || {
        Ok(beat().await?.filter(|spec| spec.renew_time > first.renew_time))
    });
    assert_eq!(later.await.unwrap().acquire_time, first.acquire_time);
    wait_for("no backlog", LIMIT, async || {
        let metrics = rig.daemons.metrics("node")?;
        assert!(
            metrics.contains("peerpod_node_cluster_calls_total{call=\"apply\",result=\"ok\"}"),
            "{metrics}"
        );
        Ok(metrics.contains("peerpod_node_cluster_backlog 0").then_some(()))
    })
    .await
    .unwrap();
    assert_eq!(rig.readyz()["ready"], true, "{}", rig.readyz());
}

async fn what_is_refused_is_said_on_the_pod(rig: &Rig) {
    let uid = rig.pod("wrong");
    let (shim, network) = (rig.daemons.shim().await.unwrap(), rig.world.pod().unwrap());
    for _ in 0..3 {
        let annotations = Annotations::new("shop", "wrong").hypervisor("default_vcpus", "many");
        shim.create_vm(&fresh_id("wrong"), annotations, &network.namespace().path()).await.unwrap_err();
    }
    wait_for("one Event that counts three", LIMIT, async || {
        let (text, count) = rig.event(&uid, "CreateRefused").await;
        assert!(text.contains("default_vcpus") && text.contains("many"), "{text}");
        Ok((count == 3).then_some(()))
    })
    .await
    .unwrap();
    let seen = rig.show(&["describe", "pod", "-n", "shop", "wrong"]);
    assert!(seen.contains("CreateRefused") && seen.contains("x3"), "{seen}");
    rig.delete_pod("wrong");
    // For a pod with hostNetwork the shim sends no namespace; the node's own namespace is refused by any path, too.
    let uid = rig.pod("host-network");
    for path in ["", "/proc/self/ns/net"] {
        let annotations = Annotations::new("shop", "host-network");
        let said = shim.create_vm(&fresh_id("host"), annotations, Path::new(path)).await.unwrap_err();
        let said = said.to_string();
        assert!(said.contains("a peer pod cannot share the node's network"), "{path:?}: {said}");
    }
    let (text, _) = rig.event(&uid, "CreateRefused").await;
    assert!(text.contains("hostNetwork") && text.contains("runtimeClassName"), "{text}");
    rig.delete_pod("host-network");
    assert!(rig.peerpods().await.is_empty(), "nothing was begun");
}

/// Gives a node with a VM the state of another cluster. The node keeps the id that its VM carries, and reports it.
async fn vms_carry_the_clusters_uid_and_another_id_is_reported(rig: &mut Rig) {
    let uid = rig.cluster.uid().unwrap();
    let file = rig.daemons.state_dir().join("installation.json");
    let kept = || serde_json::from_slice::<Value>(&std::fs::read(&file).unwrap()).unwrap()["id"].clone();
    assert_eq!(kept(), uid.as_str());
    rig.pod("moved");
    let running = rig.run("moved").await;
    rig.daemons.kill_node().unwrap();
    std::fs::write(&file, r#"{"version":1,"id":"of-another-cluster"}"#).unwrap();
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    let warned = || rig.readyz()["warnings"]["installation"].as_str().map(str::to_owned);
    let text = wait_for("the warning", LIMIT, async || Ok(warned())).await.unwrap();
    assert!(text.contains("of-another-cluster") && text.contains(&uid), "{text}");
    assert_eq!(kept(), "of-another-cluster");
    rig.stop(running).await;
    rig.delete_pod("moved");
    rig.daemons.kill_node().unwrap();
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    assert_eq!(kept(), uid.as_str(), "without VMs the cluster decides");
}

/// Empties the ledger under a running pod. The node reports the VM, and deletes it after the pod's stop.
async fn an_emptied_ledger_costs_no_pod_its_vm(rig: &mut Rig) {
    let uid = rig.pod("forgotten");
    let running = rig.run("forgotten").await;
    rig.exactly(&[("forgotten", &running)]).await;
    let vm = vm_in(&rig.daemons, &running.id).unwrap();
    rig.daemons.kill_node().unwrap();
    for entry in std::fs::read_dir(rig.daemons.state_dir().join("sandboxes")).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    let (text, _) = rig.event(&uid, "RecordLost").await;
    assert!(text.contains(&vm), "{text}");
    assert_eq!(vms(&rig.daemons), [vm]);
    stop_in_time(&running.shim, &running.id).await.unwrap();
    rig.delete_pod("forgotten");
    // A start compares the VMs and the PeerPods with the tombstones.
    rig.daemons.kill_node().unwrap();
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    wait_for("its VM to go", LIMIT, async || Ok(vms(&rig.daemons).is_empty().then_some(())))
        .await
        .unwrap_or_else(|error| panic!("{error}\n{}", rig.daemons.log_tails()));
    rig.exactly(&[]).await;
}

async fn a_vm_that_dies_is_said_on_the_pod(rig: &Rig) {
    let uid = rig.pod("dying");
    let before = vms(&rig.daemons).len();
    let running = rig.run("dying").await;
    assert_eq!(vms(&rig.daemons).len(), before + 1);
    let peerpod = rig.peerpod("dying", &running.id).await.unwrap().metadata.uid.unwrap();
    assert!(Sight::of(&rig.world, &[], &rig.daemons).unwrap().kill("peerpod-guest", "").unwrap() > 0);
    for uid in [&uid, &peerpod] {
        let (text, _) = rig.event(uid, "VMFailed").await;
        assert!(text.contains("is gone") || text.contains("has ended"), "{text}");
    }
    rig.show(&["get", "events", "-n", "shop", "--field-selector", "involvedObject.name=dying"]);
    rig.daemons.gone(&running.id, LIMIT).await.unwrap();
    rig.exactly(&[]).await;
    stop_in_time(&running.shim, &running.id).await.unwrap();
    rig.delete_pod("dying");
}

async fn a_take_over_that_fails_is_an_event_of_the_new_relays_pod(rig: &Rig) {
    let uid = rig.pod("relay");
    rig.pod("served");
    let running = rig.run("served").await;
    // The state-dir differs from the running relay's, so the records of its sandboxes are missing.
    let state_dir = rig.world.folder().join("other-state");
    let pod = format!("shop/relay/{uid}");
    let mut relay = rig.second_relay(&state_dir, &pod);
    let (text, _) = rig.event(&uid, "TakeOverFailed").await;
    assert!(text.contains("has no record") && text.contains("rollout undo"), "{text}");
    assert!(!relay.wait().unwrap().success());
    // The running relay goes on.
    stop_in_time(&running.shim, &running.id).await.unwrap();
    rig.daemons.gone(&running.id, LIMIT).await.unwrap();
    rig.delete_pod("served");
    rig.delete_pod("relay");
}

async fn capacity_that_is_lost_comes_back(rig: &Rig) {
    // A kubelet that registers anew overwrites the status.
    let path = "/status/capacity/kata.peerpods.io~1vm";
    let lost = format!("[{{\"op\":\"remove\",\"path\":\"{path}\"}}]");
    rig.cluster
        .kubectl(&["patch", "node", NODE, "--subresource=status", "--type=json", "-p", &lost])
        .unwrap();
    let began = Instant::now();
    rig.wait_capacity(Some("50")).await;
    println!("capacity was back after {}", age(began));
    // Another client writes another number.
    let other = format!("[{{\"op\":\"add\",\"path\":\"{path}\",\"value\":\"7\"}}]");
    rig.cluster
        .kubectl(&["patch", "node", NODE, "--subresource=status", "--type=json", "-p", &other])
        .unwrap();
    rig.wait_capacity(Some("50")).await;
    // A new Node object, without a status.
    rig.cluster.kubectl(&["delete", "node", NODE]).unwrap();
    rig.apply(&serde_json::json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}));
    rig.wait_capacity(Some("50")).await;
    assert_eq!(rig.owner().await.as_deref(), Some("first-daemon"));
    rig.make_node();
    rig.wait_capacity(Some("50")).await;
}

/// Kills the relay, then the provider's program: capacity, condition and an Event follow, and return with them.
async fn a_node_that_is_not_ready_withdraws_its_capacity(rig: &mut Rig) {
    let condition = async |rig: &Rig, status: &str| {
        let path = "jsonpath={.status.conditions[?(@.type=='PeerPodsReady')]}";
        let what = format!("PeerPodsReady: {status}");
        let seen = wait_for(&what, LIMIT, async || {
            let text = rig.cluster.kubectl(&["get", "node", NODE, "-o", path])?;
            let seen: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
            Ok((seen["status"] == status).then_some(seen))
        });
        seen.await.unwrap_or_else(|error| panic!("{error}\n{}", rig.daemons.log_tails()))
    };
    let before = condition(rig, "True").await;
    // A relay that returns at once changes nothing.
    rig.daemons.kill_relay().unwrap();
    wait_for("not ready", LIMIT, async || Ok((rig.readyz()["ready"] == false).then_some(()))).await.unwrap();
    rig.daemons.start_relay().unwrap();
    rig.daemons.ready().await.unwrap();
    assert_eq!(condition(rig, "True").await["lastTransitionTime"], before["lastTransitionTime"]);

    rig.daemons.kill_relay().unwrap();
    rig.wait_capacity(None).await;
    let away = condition(rig, "False").await;
    assert_eq!(away["reason"], "RelayAway", "{away}");
    assert!(away["message"].as_str().unwrap().contains("peerpod-relay is away"), "{away}");
    // The provider goes before the relay returns: the node stays without capacity, for another cause.
    rig.daemons.kill_cloud().unwrap();
    rig.daemons.start_relay().unwrap();
    wait_for("the provider's cause", LIMIT, async || {
        let reason = condition(rig, "False").await["reason"].clone();
        let waiting = rig.readyz()["waiting"]["provider-connection"].clone();
        Ok((reason == "ProviderRefuses" && waiting.is_string()).then_some(()))
    })
    .await
    .unwrap();
    rig.daemons.start_cloud().unwrap();
    rig.daemons.ready().await.unwrap();
    rig.wait_capacity(Some("50")).await;
    condition(rig, "True").await;
    let fields = format!("involvedObject.kind=Node,involvedObject.name={NODE}");
    let words = ["get", "events", "-n", "default", "--field-selector", &fields];
    wait_for("an Event of each change", LIMIT, async || {
        let seen = rig.cluster.kubectl(&words)?;
        Ok((seen.contains("CapacityWithdrawn") && seen.contains("CapacityRestored")).then_some(()))
    })
    .await
    .unwrap();
    let seen = rig.show(&words);
    assert_eq!(seen.matches("CapacityWithdrawn").count(), 1, "{seen}");
    rig.show(&["describe", "node", NODE]);
}

/// Deletes a StatefulSet's pod by force while its sandbox lives, and makes the next one of the same name at once.
async fn pods_of_one_name_are_told_apart(rig: &Rig) {
    let owner = async |sandbox: &str| {
        let object = rig.peerpod("db-0", sandbox).await?;
        Some(object.metadata.owner_references?[0].uid.clone())
    };
    for round in 0..if long() { 20 } else { 3 } {
        let old_uid = rig.pod("db-0");
        let old = rig.run("db-0").await;
        assert_eq!(owner(&old.id).await.as_deref(), Some(old_uid.as_str()), "round {round}");
        rig.delete_pod("db-0");
        let uid = rig.pod("db-0");
        assert_ne!(uid, old_uid);
        let new = rig.run("db-0").await;
        assert_eq!(owner(&new.id).await, Some(uid), "round {round}\n{}", rig.daemons.log_tails());
        assert_eq!(owner(&old.id).await, Some(old_uid), "round {round}");
        rig.stop(old).await;
        rig.exactly(&[("db-0", &new)]).await;
        // The same pod may get another sandbox.
        let again = rig.run("db-0").await;
        assert_eq!(owner(&again.id).await, owner(&new.id).await, "round {round}");
        rig.stop(new).await;
        rig.stop(again).await;
        rig.exactly(&[]).await;
        rig.delete_pod("db-0");
    }
}

/// Kills the node between intent and create, between create and record, and around both.
async fn kills_around_the_create_leave_nothing(rig: &mut Rig) {
    let mut dice = Dice(17);
    for round in 0..if long() { 60 } else { 8 } {
        let name = format!("crash-{round}");
        rig.pod(&name);
        let running = rig.create(&name).await;
        // The delay begins when the intent appears.
        wait_for("the intent", LIMIT, async || Ok(rig.peerpod(&name, &running.id).await)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(dice.roll(120))).await;
        rig.daemons.kill_node().unwrap();
        let seen = rig.peerpods().await;
        assert!(seen.len() == 1 && seen[0].metadata.finalizers.is_some(), "{seen:?}");
        let stopped = round % 2 == 1;
        if stopped {
            // The relay confirms the stop for the killed node.
            stop_in_time(&running.shim, &running.id).await.unwrap();
        }
        rig.daemons.start_node().unwrap();
        rig.daemons.ready().await.unwrap();
        if stopped {
            rig.daemons.gone(&running.id, LIMIT).await.unwrap();
        } else {
            let started = tokio::time::timeout(LIMIT, running.shim.start_vm(&running.id)).await;
            started.unwrap_or_else(|_| panic!("{}", rig.daemons.log_tails())).unwrap();
            rig.exactly(&[(&name, &running)]).await;
            assert_eq!(vms(&rig.daemons).len(), 1, "{:?}", vms(&rig.daemons));
            rig.stop(running).await;
        }
        rig.exactly(&[]).await;
        wait_for("no VM is left", LIMIT, async || Ok(vms(&rig.daemons).is_empty().then_some(())))
            .await
            .unwrap();
        rig.delete_pod(&name);
    }
    a_record_that_nobody_speaks_for_goes(rig).await;
}

/// Removes a record without a sandbox. A call after its caller's timeout or an expired tombstone can leave one.
async fn a_record_that_nobody_speaks_for_goes(rig: &mut Rig) {
    rig.apply(&serde_json::json!({
        "apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPod",
        "metadata": {"name": "left", "namespace": "shop", "finalizers": ["example.org/other", FINALIZER]},
        "spec": {"cloudProvider": "local", "sandboxID": "nobody-knows-it", "nodeName": NODE, "idempotencyKey": "k"},
    }));
    rig.apply(&serde_json::json!({
        "apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPod",
        "metadata": {"name": "others", "namespace": "shop", "finalizers": [FINALIZER]},
        "spec": {"cloudProvider": "local", "sandboxID": "another-nodes", "nodeName": "worker-2", "idempotencyKey": "k"},
    }));
    rig.daemons.kill_node().unwrap();
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    let api: Api<PeerPod> = Api::namespaced(rig.client.clone(), "shop");
    wait_for("our finalizer to go, and no other", LIMIT, async || {
        let object = api.get("left").await?;
        let deleted = object.metadata.deletion_timestamp.is_some();
        Ok((deleted && object.metadata.finalizers.as_deref() == Some(&["example.org/other".to_owned()]))
            .then_some(()))
    })
    .await
    .unwrap();
    assert!(api.get("others").await.unwrap().metadata.deletion_timestamp.is_none());
    for name in ["left", "others"] {
        let free = [
            "patch",
            "peerpod",
            "-n",
            "shop",
            name,
            "--type=merge",
            "-p",
            "{\"metadata\":{\"finalizers\":null}}",
        ];
        rig.cluster.kubectl(&free).unwrap();
    }
    rig.cluster.kubectl(&["delete", "peerpod", "-n", "shop", "--all"]).unwrap();
}

/// Starts the next daemon beside the serving one; it waits for the exit of that one. The capacity is never absent.
async fn a_rolling_update_keeps_the_capacity(rig: &mut Rig) {
    rig.wait_capacity(Some("50")).await;
    rig.pod("lasting");
    let running = rig.run("lasting").await;
    let mut second = rig.second_daemon("second-daemon", &[]);
    let claimed = async || Ok((rig.owner().await.as_deref() == Some("second-daemon")).then_some(()));
    wait_for("the next daemon to claim the capacity", LIMIT, claimed).await.unwrap();
    rig.daemons.terminate_node().unwrap();
    assert_eq!(rig.capacity().await.as_deref(), Some("50"), "the objects of other owners are left");
    rig.daemons.ready().await.unwrap();
    rig.exactly(&[("lasting", &running)]).await;
    // Back to the first one: the exiting daemon removes its capacity.
    second.kill().unwrap();
    second.wait().unwrap();
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    let claimed = async || Ok((rig.owner().await.as_deref() == Some("first-daemon")).then_some(()));
    wait_for("the first daemon's claim", LIMIT, claimed).await.unwrap();
    rig.stop(running).await;
    rig.exactly(&[]).await;
    rig.wait_capacity(Some("50")).await;
    rig.daemons.terminate_node().unwrap();
    assert_eq!(rig.capacity().await, None, "\n{}", rig.daemons.log_tails());
    rig.show(&["get", "node", NODE, "-o", "jsonpath={.status.capacity}"]);
}

/// Ends the next daemon while it waits for its predecessor, and lets one fail after it took over.
async fn a_daemon_that_never_serves_keeps_no_claim(rig: &mut Rig) {
    let owned_by = async |rig: &Rig, owner: Option<&str>| {
        let what = format!("the owner {owner:?}");
        let is_owner = async || Ok((rig.owner().await.as_deref() == owner).then_some(()));
        let waited = wait_for(&what, LIMIT, is_owner).await;
        waited.unwrap_or_else(|error| panic!("{error}\n{}", rig.daemons.log_tails()));
    };
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    rig.wait_capacity(Some("50")).await;
    let mut waiting = rig.second_daemon("second-daemon", &[]);
    owned_by(rig, Some("second-daemon")).await;
    kill(Pid::from_raw(waiting.id() as i32), Signal::SIGTERM).unwrap();
    assert!(waiting.wait().unwrap().success());
    owned_by(rig, Some("first-daemon")).await;
    assert_eq!(rig.capacity().await.as_deref(), Some("50"));

    let mut failing = rig.second_daemon("second-daemon", &["--node.admin-listen", "192.0.2.1:1"]);
    owned_by(rig, Some("second-daemon")).await;
    rig.daemons.kill_node().unwrap();
    assert!(!failing.wait().unwrap().success());
    owned_by(rig, None).await;
    assert_eq!(rig.capacity().await, None, "\n{}", rig.daemons.log_tails());
}

/// A killed daemon leaves the capacity. The next daemon, which is set to advertise none, removes it.
async fn a_node_that_is_to_have_no_peer_pods_loses_the_capacity(rig: &mut Rig) {
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    rig.wait_capacity(Some("50")).await;
    let config = std::fs::read(rig.daemons.config()).unwrap();
    let mut none: serde_json::Value = serde_json::from_slice(&config).unwrap();
    none["cluster"]["capacity"] = (-1).into();
    rig.daemons.kill_node().unwrap();
    assert_eq!(rig.capacity().await.as_deref(), Some("50"));
    std::fs::write(rig.daemons.config(), none.to_string()).unwrap();
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    rig.wait_capacity(None).await;
    let owner = async || Ok(rig.owner().await.is_none().then_some(()));
    wait_for("the annotation to go", LIMIT, owner).await.unwrap();
}

/// Stops, kills and restarts the API server during starts and stops.
#[tokio::test(flavor = "multi_thread")]
async fn rides_out_an_api_server_that_is_away() {
    // On a busy machine the steps before the boot take seconds.
    let mut rig = Rig::start(settings().set("node.slow-after", "15s")).await;
    rig.daemons().await;
    rig.wait_capacity(Some("50")).await;
    readiness_says_what_is_wrong(&mut rig).await;
    slow_starts_are_said(&mut rig).await;
    for kill in [false, true] {
        away_in_the_middle(&mut rig, kill).await;
    }
    without_an_api_server_a_node_starts(&mut rig).await;
}

async fn slow_starts_are_said(rig: &mut Rig) {
    rig.daemons.set_of_cloud("boot-delay", "20s").unwrap();
    let uid = rig.pod("slow");
    let running = rig.run("slow").await;
    let (text, _) = rig.event(&uid, "SlowStart").await;
    assert!(text.contains("did not dial this node within 15s"), "{text}");
    rig.show(&["get", "events", "-n", "shop", "--field-selector", "involvedObject.name=slow"]);
    rig.stop(running).await;
    rig.delete_pod("slow");
    rig.daemons.set_of_cloud("boot-delay", "0s").unwrap();
    rig.daemons.ready().await.unwrap();
}

async fn readiness_says_what_is_wrong(rig: &mut Rig) {
    rig.daemons.kill_relay().unwrap();
    let is_ready = async |expected: bool| {
        let what = format!("ready: {expected}");
        wait_for(&what, LIMIT, async || Ok((rig.readyz()["ready"] == expected).then_some(()))).await.unwrap();
    };
    is_ready(false).await;
    assert!(
        rig.readyz()["waiting"]["relay"].as_str().unwrap().contains("no pod can start"),
        "{}",
        rig.readyz()
    );
    rig.daemons.start_relay().unwrap();
    rig.daemons.ready().await.unwrap();
    wait_for("ready again", LIMIT, async || Ok((rig.readyz()["ready"] == true).then_some(()))).await.unwrap();
}

/// Makes the API server unreachable while half of the pods start and the other half stop. The final state is exact.
async fn away_in_the_middle(rig: &mut Rig, kill: bool) {
    let (count, away) = if long() { (20, Duration::from_secs(60)) } else { (4, Duration::from_secs(8)) };
    let mut old = Vec::new();
    for number in 0..count {
        let name = format!("old-{kill}-{number}");
        rig.pod(&name);
        old.push((rig.run(&name).await, name));
    }
    let names: Vec<String> = (0..count).map(|number| format!("new-{kill}-{number}")).collect();
    let uids: Vec<String> = names.iter().map(|name| rig.pod(name)).collect();
    // Half of the calls come before, half after.
    let began = Instant::now();
    let mut new = Vec::new();
    for (number, name) in names.iter().enumerate() {
        if number == count / 2 {
            if kill {
                rig.cluster.kill_api_server();
            } else {
                rig.cluster.freeze_api_server(true).unwrap();
            }
        }
        new.push(rig.create(name).await);
        let (running, _) = &old[number];
        stop_in_time(&running.shim, &running.id).await.unwrap();
    }
    for running in &new {
        let started = tokio::time::timeout(LIMIT, running.shim.start_vm(&running.id)).await;
        started.unwrap_or_else(|_| panic!("{}", rig.daemons.log_tails())).unwrap();
    }
    for (running, _) in &old {
        rig.daemons.gone(&running.id, LIMIT).await.unwrap();
    }
    println!("{count} starts and {count} stops with the API server away (killed: {kill}): {}", age(began));
    wait_for("a warning, and ready all the same", LIMIT, async || {
        let seen = rig.readyz();
        assert_eq!(seen["ready"], true, "{seen}");
        Ok(seen["warnings"]["api-server"].as_str().map(|text| println!("/readyz warns: {text}")))
    })
    .await
    .unwrap();
    // One more pod starts and stops during the outage; the API server never has a record of it.
    let brief = rig.create("brief").await;
    stop_in_time(&brief.shim, &brief.id).await.unwrap();
    rig.daemons.gone(&brief.id, LIMIT).await.unwrap();
    if kill {
        // The pending records are in the ledger alone, and survive.
        rig.daemons.kill_node().unwrap();
        rig.daemons.start_node().unwrap();
        rig.daemons.ready().await.unwrap();
    }
    tokio::time::sleep(away.saturating_sub(began.elapsed())).await;
    if kill {
        rig.cluster.restart_api_server().await.unwrap();
    } else {
        rig.cluster.freeze_api_server(false).unwrap();
    }
    let back = Instant::now();
    let expected: Vec<(&str, &Running)> = names.iter().map(String::as_str).zip(&new).collect();
    rig.exactly(&expected).await;
    println!("exact {} after it was back", age(back));
    for ((name, running), uid) in expected.iter().zip(&uids) {
        let object = rig.peerpod(name, &running.id).await.unwrap();
        assert_eq!(object.metadata.owner_references.unwrap()[0].uid, *uid, "{name}");
    }
    let mut known: Vec<String> = new.iter().filter_map(|running| vm_in(&rig.daemons, &running.id)).collect();
    known.sort();
    // The local provider finishes a delete in the background when it takes more than a second.
    wait_for("no VM too many, none too few", LIMIT, async || {
        let mut there = vms(&rig.daemons);
        there.sort();
        Ok((there == known).then_some(()))
    })
    .await
    .unwrap_or_else(|error| panic!("{error}: {:?} instead of {known:?}", vms(&rig.daemons)));
    let warned = || rig.readyz()["warnings"]["api-server"].clone();
    wait_for("no warning of the API server any more", LIMIT, async || Ok(warned().is_null().then_some(())))
        .await
        .unwrap_or_else(|error| panic!("{error}: {}", rig.readyz()));
    for running in new {
        rig.stop(running).await;
    }
    rig.exactly(&[]).await;
    for name in old.iter().map(|(_, name)| name).chain(&names) {
        rig.delete_pod(name);
    }
}

async fn without_an_api_server_a_node_starts(rig: &mut Rig) {
    let token = scraper(rig, "prometheus", true).await;
    rig.daemons.kill_node().unwrap();
    rig.cluster.kill_api_server();
    rig.daemons.start_node().unwrap();
    rig.daemons.ready().await.unwrap();
    // Nothing permits the scraper now; the answer comes all the same.
    let (status, text) = rig.scrape("/metrics", Some(&token));
    assert!(status == 503 && text.contains("does not answer"), "{status} {text}");
    let running = rig.run("alone").await;
    rig.stop(running).await;
    // Its shutdown does not wait long either.
    let began = Instant::now();
    rig.daemons.terminate_node().unwrap();
    println!("a node without an API server ended in {}", age(began));
}
