//! Runs the real peerpod-node with this provider, against moto behind the fault proxy. The tests simulate shims, but no
//! guests: no pod gets ready, but each gets its VM, its addresses, and its deletion.
//!
//! With `PEERPOD_TEST_BENCH=<file>` the figures are added to that summary. With it or with `PEERPOD_TEST_LONG` the
//! counts are those of the issue: 500 pods, 100 kills.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::time::{Duration, Instant};

use peerpod_client::Annotations;
use peerpod_test_ec2::{Fault, Proxy, rate};
use peerpod_tests::cloud_node::{CloudNode, is_full, place, report_makespan, settings};
use peerpod_tests::{report, sample};
use peerpod_world::{Daemons, Settings, binary, eventually};
use serde_json::json;

use super::common::{Cloud, PATIENCE};

async fn start(more: impl FnOnce(Settings) -> Settings) -> CloudNode<Cloud> {
    let (world, listener) = place();
    let cloud = Cloud::behind(Proxy::start_on(listener).await.unwrap()).await;
    CloudNode::start(world, cloud, more).await
}

/// VMs that boto3 lists.
async fn witnessed(cloud: &Cloud) -> BTreeSet<String> {
    let filter = json!({"Filters": [{"Name": "instance-state-name", "Values": ["pending", "running"]}]});
    let seen = cloud.proxy.boto3("describe_instances", &filter).await.unwrap();
    let vms =
        seen["Reservations"].as_array().unwrap().iter().flat_map(|one| one["Instances"].as_array().unwrap());
    vms.map(|vm| vm["InstanceId"].as_str().unwrap().to_owned()).collect()
}

struct Burst {
    calls_per_pod: f64,
    took: Duration,
    fleets: usize,
}

/// Creates `count` pods at once behind EC2's buckets, waits until each has a VM with an address, and stops them all.
async fn burst(count: usize, batch: &str) -> Burst {
    let node = start(|settings| settings.set("node.batch", batch)).await;
    let pods = node.pods(count);
    node.site.proxy.forget_calls();
    node.site.proxy.set_buckets(1.0);
    let took = node.burst(&pods).await;
    assert_eq!(witnessed(&node.site).await.len(), count);
    node.stop(&pods).await;
    let calls = node.site.proxy.calls();
    let mut by_action: BTreeMap<(&str, u16), usize> = BTreeMap::new();
    for call in &calls {
        *by_action.entry((&call.action, call.status)).or_default() += 1;
    }
    println!("{count} pods, batch {batch}: {took:?}, {} calls: {by_action:?}", calls.len());
    let fleets = calls.iter().filter(|call| call.action == "CreateFleet" && call.status == 200).count();
    Burst { calls_per_pod: calls.len() as f64 / count as f64, took, fleets }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_pods_at_once_cost_less_than_half_a_call_each() {
    let burst = burst(50, "auto").await;
    report("aws_calls_per_pod_50", burst.calls_per_pod);
    assert!(burst.calls_per_pod <= 0.5, "{} calls per pod", burst.calls_per_pod);
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_pods_at_once_cost_a_fifth_of_a_call_each() {
    let count = if is_full() { 500 } else { 150 };
    let burst = burst(count, "auto").await;
    report(&format!("aws_calls_per_pod_{count}"), burst.calls_per_pod);
    assert!(burst.calls_per_pod <= 0.2, "{} calls per pod", burst.calls_per_pod);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_ticket_each_they_are_as_fast_as_the_buckets_permit() {
    let count = if is_full() { 500 } else { 120 };
    let burst = burst(count, "off").await;
    report_makespan::<Cloud>(burst.took, rate("CreateFleet").least(count, Duration::ZERO, 1.0), 1.2);
    report(&format!("aws_calls_per_pod_{count}_single"), burst.calls_per_pod);
    // One call for each pod. A call that got its answer too late is repeated with its token, and makes no VM.
    assert!(burst.fleets >= count, "{} calls for {count} pods", burst.fleets);
    assert!(burst.calls_per_pod <= 1.2, "{} calls per pod", burst.calls_per_pod);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_ec2_answers_has_one_vm_for_each_pod_afterwards() {
    let mut node = start(|settings| settings).await;
    node.kill_while_creating(|cloud| cloud.proxy.set_lag(Duration::from_millis(300))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_spot_vm_is_reported_with_its_pods_name() {
    let node =
        start(|settings| settings.set("provider.aws.market", "spot").set("provider.aws.spot-watch", "1s"))
            .await;
    let pods = node.pods(1);
    node.answered(node.create(&pods)).await;
    let vm = node.all_located(&pods).await.remove(&pods[0].0).unwrap();
    for (code, kind, words) in [
        ("marked-for-termination", "interruption", "the cloud reclaims this pod's VM"),
        ("instance-terminated-no-capacity", "ended", "reports that this pod's VM has ended"),
    ] {
        node.site.proxy.interrupt(&vm, code);
        node.until(kind, || async {
            let metrics = node.daemons.metrics("node").ok()?;
            let told = sample(&metrics, &format!(r#"peerpod_node_vm_notices_total{{kind="{kind}""#)).ok()?;
            (told > 0.0).then_some(())
        })
        .await;
        let log = std::fs::read_to_string(node.daemons.log("node")).unwrap();
        let line = log.lines().find(|line| line.contains(words)).unwrap();
        assert!(line.contains(&vm) && line.contains(&format!("default/{}", pods[0].0)), "{line}");
    }
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unsupported_request_is_refused_with_a_clear_text() {
    let node = start(|settings| {
        settings
            .set("provider.aws.instance-types", "m6a.large,c6a.large")
            .set("provider.aws.market", "spot-first")
    })
    .await;
    let shim = node.daemons.shim().await.unwrap();
    let wishes = [
        ("io.peerpod/market", "on-demand"),
        ("io.peerpod/zones", "eu-central-1c"),
        ("io.peerpod/confidential", "sev-snp"),
        ("io.peerpod/arch", "amd64"),
    ];
    let pods = node.pods(4);
    let all =
        wishes.iter().fold(Annotations::new("default", "had"), |all, (key, value)| all.raw(key, Some(value)));
    shim.create_vm(&pods[0].0, all, &pods[0].1).await.unwrap();
    shim.create_vm(&pods[1].0, Annotations::new("default", "plain"), &pods[1].1).await.unwrap();
    let vms = node.all_located(&pods[..2]).await;
    let seen = node.site.proxy.boto3("describe_instances", &json!({})).await.unwrap();
    let vms = vms.values().map(|id| {
        let all = seen["Reservations"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|one| one["Instances"].as_array().unwrap());
        all.clone().find(|vm| vm["InstanceId"] == **id).unwrap()
    });
    let vms: Vec<_> = vms
        .map(|vm| (vm["Placement"]["AvailabilityZone"].as_str().unwrap(), vm["InstanceLifecycle"].as_str()))
        .collect();
    assert!(vms.contains(&("eu-central-1c", None)), "on demand, in the zone: {vms:?}");
    assert!(vms.iter().any(|(_, market)| *market == Some("spot")), "the provider's VMs: {vms:?}");
    for (key, value, parts) in [
        (
            "io.peerpod/public-ip",
            "true",
            ["does not let pods choose that", "add public-ip to node.vm-annotations"],
        ),
        ("io.peerpod/market", "cheap", ["io.peerpod/market = \"cheap\"", "write spot or on-demand"]),
    ] {
        let annotations = Annotations::new("default", "no").raw(key, Some(value));
        let error = shim.create_vm(&pods[2].0, annotations, &pods[2].1).await.unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    // StartVM returns the refusals of the provider.
    let annotations = Annotations::new("default", "tdx").raw("io.peerpod/confidential", Some("tdx"));
    shim.create_vm(&pods[3].0, annotations, &pods[3].1).await.unwrap();
    let error = shim.start_vm(&pods[3].0).await.unwrap_err().to_string();
    assert!(error.contains("tdx cannot be had from provider aws, which has sev_snp"), "{error}");
    node.stop(&pods[..2]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_ec2_reaches_the_pods_error() {
    let node = start(|settings| settings.set("provider.aws.instance-types", "m6a.large,c6a.large")).await;
    let refusals = [
        ("UnauthorizedOperation", 403, "allow ec2:CreateFleet"),
        ("RequestExpired", 400, "renew the credentials"),
        ("InvalidSubnetID.NotFound", 400, "set subnet-ids"),
        ("InvalidGroup.NotFound", 400, "set security-group-ids"),
        ("InvalidAMIID.NotFound", 400, "set image-id"),
        ("InvalidKeyPair.NotFound", 400, "set key-name"),
        ("OptInRequired", 401, "subscribe the account"),
        ("InvalidParameterValue", 400, "correct the settings"),
    ];
    let pods = node.pods(refusals.len() + 5);
    let plain = || Annotations::new("default", "refused").size("1", 512);
    for (number, (code, status, remedy)) in refusals.into_iter().enumerate() {
        node.site.proxy.fail("CreateFleet", Fault::refuse(status, code, "Because."), 1);
        let error = node.refused(&pods[number], plain()).await;
        assert!(error.contains(code) && error.contains("Because") && error.contains(remedy), "{error}");
    }
    let number = refusals.len();
    let error = node.refused(&pods[number], plain().machine_type("p5.48xlarge")).await;
    assert!(error.contains("p5.48xlarge") && error.contains("not part of"), "{error}");
    let error = node.refused(&pods[number + 1], plain().size("96", 1 << 20)).await;
    // With the guest's 256 MiB, and 1/32 of both.
    assert!(error.contains("vcpus (96) and memory (1081608), the guest's own included"), "{error}");
    node.site.proxy.set_stock("*", "*", "*", 0);
    let error = node.refused(&pods[number + 2], plain().machine_type("m6a.large")).await;
    for part in ["m6a.large in eu-central-1a", "InsufficientInstanceCapacity"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    // EC2 refuses the first pod. The provider remembers this and refuses the second one itself.
    node.site.proxy.heal();
    node.site.proxy.fail("CreateFleet", Fault::refuse(400, "VcpuLimitExceeded", "Because."), 1);
    for more in [3, 4] {
        let error = node.refused(&pods[number + more], plain().machine_type("c6a.large")).await;
        for part in ["VcpuLimitExceeded", "ask for a higher quota"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
    assert!(node.site.machines().await.is_empty());
}

/// Starts a node whose keys have expired. Its `/readyz` has the cause as soon as EC2 has answered once.
#[tokio::test(flavor = "multi_thread")]
async fn expired_keys_are_the_cause_in_readyz_at_the_first_answer() {
    let (world, listener) = place();
    let cloud = Cloud::behind(Proxy::start_on(listener).await.unwrap()).await;
    cloud.proxy.expire();
    cloud.proxy.forget_calls();
    let mut daemons = Daemons::prepare(&world, settings(&cloud)).unwrap();
    daemons.start_relay().unwrap();
    let began = Instant::now();
    daemons.start_node().unwrap();
    let mut seen = Vec::new();
    let refused = eventually("a cause of the provider", PATIENCE, async || {
        let answer = daemons.readyz().ok()?;
        let cause = answer["waiting"]["provider"].as_str()?.to_owned();
        seen.push(cause.clone());
        (!cause.starts_with("asking provider aws since")).then_some(cause)
    });
    let refused = refused.await.unwrap_or_else(|error| panic!("{error}: {seen:?}\n{}", daemons.log_tails()));
    println!("/readyz has the cause {:?} after the node's start: {refused}", began.elapsed());
    assert!(refused.contains("RequestExpired") && refused.contains("renew the credentials"), "{refused}");
    let calls = cloud.proxy.calls();
    let images = calls.iter().filter(|call| call.action == "DescribeImages").count();
    assert_eq!(images, 1, "the cause came after a later preflight: {calls:?}");
}

/// Runs a second node with the same names of cluster and node and a state folder of its own, as of another cluster in
/// the same account. It deletes its own orphan, and no VM of the first node.
#[tokio::test(flavor = "multi_thread")]
async fn two_installations_with_equal_names_leave_each_others_vms_alone() {
    let node = start(|settings| settings.set("node.orphan-grace", "1ms")).await;
    let pods = node.pods(2);
    node.answered(node.create(&pods)).await;
    let vms: BTreeSet<String> = node.all_located(&pods).await.into_values().collect();
    let other = node.world.folder().join("other");
    let start = || {
        let (state, run) = (other.join("state"), other.join("run"));
        let arguments = [
            OsStr::new("--config"),
            node.daemons.config().as_os_str(),
            OsStr::new("--paths.state-dir"),
            state.as_os_str(),
            OsStr::new("--paths.run-dir"),
            run.as_os_str(),
            OsStr::new("--node.admin-listen"),
            OsStr::new("127.0.0.1:15163"),
        ];
        let log = node.world.folder().join("other.log");
        Ended(node.world.spawn(&binary("peerpod-node").unwrap(), &arguments, &log).unwrap())
    };
    let first = start();
    let installation = node
        .until("the other one's id", || async {
            let kept = std::fs::read(other.join("state/installation.json")).ok()?;
            let kept: serde_json::Value = serde_json::from_slice(&kept).ok()?;
            Some(kept["id"].as_str()?.to_owned())
        })
        .await;
    drop(first);
    let seen = node.site.proxy.boto3("describe_instances", &json!({})).await.unwrap();
    let made = &seen["Reservations"][0]["Instances"][0];
    let tag = |key: &str| {
        let all = made["Tags"].as_array().unwrap();
        all.iter().find(|tag| tag["Key"] == key).unwrap()["Value"].clone()
    };
    let tags = json!([
        {"Key": "peerpod.cluster", "Value": tag("peerpod.cluster")},
        {"Key": "peerpod.node", "Value": tag("peerpod.node")},
        {"Key": "peerpod.installation", "Value": installation},
    ]);
    let orphan = json!({"ImageId": made["ImageId"], "MinCount": 1, "MaxCount": 1,
        "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}]});
    let mut second = None;
    // The second orphan goes in a later pass than the first: each pass had its chance at the first node's VMs.
    for _ in 0..2 {
        node.site.proxy.boto3("run_instances", &orphan).await.unwrap();
        assert_eq!(witnessed(&node.site).await.len(), 3);
        drop(second.take());
        second = Some(start());
        node.until("its orphan is gone", || async { (witnessed(&node.site).await.len() < 3).then_some(()) })
            .await;
        assert_eq!(witnessed(&node.site).await, vms);
    }
    drop(second);
    node.stop(&pods).await;
}

/// A process that ends with the test.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}
