use peerpod_provider_api::{Chosen, IdempotencyKey, Market};

use super::*;
use crate::spec::PodRef;

fn about() -> About {
    About { provider: "local".into(), node: "n1".into(), cluster_id: "c".into() }
}

fn record(phase: Phase) -> Record {
    let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some("u".into()) };
    let mut record = Record::tombstone("a-sandbox".parse().unwrap(), 1_000);
    (record.phase, record.pod, record.end.cause) = (phase, Some(pod), None);
    record.reached("recorded", 1_100);
    record
}

fn vm() -> InstanceId {
    InstanceId::new("vm-1").unwrap()
}

fn states(shown: &DesiredPeerPod) -> Vec<(String, String)> {
    let conditions = shown.status.conditions.iter();
    conditions.map(|condition| (condition.type_.clone(), condition.status.clone())).collect()
}

#[test]
fn an_intent_names_the_key_and_no_vm() {
    let shown = DesiredPeerPod::of(&record(Phase::Booting { attempt: 0 }), &about(), 5_000).unwrap();
    assert_eq!(
        shown.spec.idempotency_key.as_deref(),
        Some(IdempotencyKey::derive("c", "a-sandbox", 0).as_str())
    );
    assert_eq!((shown.spec.instance_id.as_deref(), shown.spec.node_name.as_deref()), (None, Some("n1")));
    assert!(shown.is_live && !shown.is_gone && shown.uid.as_deref() == Some("u"));
    assert_eq!(shown.status.phase, Some(crds::Phase::Created));
    assert_eq!(shown.status.stages[0].took_milliseconds, 100);
    // Until the VM is known, the key does not change with the attempt: a rule of the resource.
    let again = DesiredPeerPod::of(&record(Phase::Booting { attempt: 3 }), &about(), 5_000).unwrap();
    assert_eq!(again.spec, shown.spec);
}

#[test]
fn a_shown_vm_has_the_key_of_its_create() {
    let mut record = record(Phase::Joining { vm: vm() });
    record.wanted.attempt = 2;
    let shown = DesiredPeerPod::of(&record, &about(), 5_000).unwrap();
    assert_eq!(shown.spec.instance_id.as_deref(), Some("vm-1"));
    assert_eq!(
        shown.spec.idempotency_key.as_deref(),
        Some(IdempotencyKey::derive("c", "a-sandbox", 2).as_str())
    );
    assert_eq!(shown.status.phase, Some(crds::Phase::Booting));
    let expected = [("Created".to_owned(), "True".to_owned()), ("Ready".to_owned(), "False".to_owned())];
    assert_eq!(states(&shown), expected);
}

#[test]
fn a_vm_is_shown_with_its_type_zone_market_and_image() {
    let mut record = record(Phase::Running { vm: vm() });
    record.wanted.chosen = Some(Chosen {
        instance_type: Some("m6a.large".into()),
        zone: Some("eu-1a".into()),
        market: Some(Market::Spot),
        image: Some("ami-1".into()),
        price: None,
    });
    let status = DesiredPeerPod::of(&record, &about(), 5_000).unwrap().status;
    let shown = [status.instance_type, status.zone, status.market, status.image];
    assert_eq!(shown.map(Option::unwrap), ["m6a.large", "eu-1a", "spot", "ami-1"]);
    record.phase = Phase::Booting { attempt: 0 };
    assert_eq!(DesiredPeerPod::of(&record, &about(), 5_000).unwrap().status.zone, None, "it has no VM");
}

#[test]
fn the_same_record_gives_the_same_status_at_any_time() {
    let mut record = record(Phase::Running { vm: vm() });
    for (stage, at) in [("vm_made", 2_000), ("running", 3_000)] {
        record.reached(stage, at);
    }
    let (now, later) =
        (DesiredPeerPod::of(&record, &about(), 5_000), DesiredPeerPod::of(&record, &about(), 500_000));
    assert_eq!(now, later);
    assert_eq!(now.unwrap().status.phase, Some(crds::Phase::Running));
}

#[test]
fn a_failure_is_shown_with_its_cause_cut_to_size() {
    let mut record = record(Phase::Leaving { vm: None });
    (record.end.failed, record.end.cause) = (true, Some("q".repeat(5_000)));
    let shown = DesiredPeerPod::of(&record, &about(), 5_000).unwrap();
    assert!(!shown.is_live);
    assert!(shown.status.conditions.iter().all(|condition| condition.reason == "Failed"));
    assert_eq!(shown.status.conditions[0].message.len(), MOST_TEXT);
    record.pod = None;
    assert!(DesiredPeerPod::of(&record, &about(), 5_000).is_none());
}
