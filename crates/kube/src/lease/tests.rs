use k8s_openapi::api::coordination::v1::LeaseSpec;

use super::*;

fn lease(version: &str, seconds: Option<i32>) -> Lease {
    let metadata = ObjectMeta {
        name: Some("x".into()),
        uid: Some("u".into()),
        resource_version: Some(version.into()),
        ..ObjectMeta::default()
    };
    let spec = LeaseSpec {
        holder_identity: Some("a".into()),
        lease_duration_seconds: seconds,
        ..LeaseSpec::default()
    };
    Lease { metadata, spec: Some(spec) }
}

#[test]
fn a_lease_ends_only_after_its_whole_time_without_a_change() {
    let mut watched = Watched::default();
    let began = Instant::now();
    let at = |seconds| began + Duration::from_secs(seconds);
    assert!(!watched.expired(&lease("1", Some(15)), at(0)), "independent of its renewTime");
    assert!(!watched.expired(&lease("1", Some(15)), at(14)));
    assert!(!watched.expired(&lease("2", Some(15)), at(15)), "renewed");
    assert!(!watched.expired(&lease("2", Some(15)), at(29)));
    assert!(watched.expired(&lease("2", Some(15)), at(30)));
    assert!(!watched.expired(&lease("3", None), at(30)));
    assert!(!watched.expired(&lease("3", None), at(1_000_000)), "without a duration it is kept");
}

#[test]
fn each_owner_has_a_greater_token_and_foreign_marks_stay() {
    let mut lease = lease("1", None);
    lease.metadata.annotations = Some([("x".to_owned(), "y".to_owned())].into());
    let tokens: Vec<i32> = ["a", "b", "a"]
        .map(|identity| {
            let owner =
                LeaseOwner { identity: identity.into(), incarnation: "1".into(), ..LeaseOwner::default() };
            hand_to(&mut lease, &owner, Some(Duration::from_secs(15)));
            Held { lease: lease.clone() }.token()
        })
        .into();
    assert_eq!(tokens, [1, 2, 3]);
    for (node, marks) in [("n1", &[("peerpod.io/node", "n1"), ("x", "y")][..]), ("", &[("x", "y")])] {
        let owner = LeaseOwner { identity: "vm".into(), node: node.into(), ..LeaseOwner::default() };
        hand_to(&mut lease, &owner, None);
        assert_eq!(lasts(&lease), None);
        let notes = lease.metadata.annotations.as_ref().unwrap();
        assert_eq!(
            notes.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect::<Vec<_>>(),
            marks
        );
    }
}

#[test]
fn an_owner_is_known_by_name_incarnation_and_count() {
    let mut mine = lease("1", Some(15));
    hand_to(
        &mut mine,
        &LeaseOwner { identity: "a".into(), incarnation: "1".into(), ..LeaseOwner::default() },
        None,
    );
    let mut labelled = mine.clone();
    labelled.metadata.resource_version = Some("2".into());
    assert!(same_owner(&mine, &labelled));
    let mut again = mine.clone();
    hand_to(
        &mut again,
        &LeaseOwner { identity: "a".into(), incarnation: "2".into(), ..LeaseOwner::default() },
        None,
    );
    assert!(!same_owner(&mine, &again));
    let mut empty = mine.clone();
    empty.spec.get_or_insert_default().holder_identity = Some(String::new());
    assert_eq!(holder(&empty), None);
    assert!(!same_owner(&mine, &empty));
}
