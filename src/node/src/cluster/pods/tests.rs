use super::*;

fn pod(uid: &str, second: i64, terminating: bool) -> KnownPod {
    KnownPod {
        uid: uid.into(),
        namespace: "shop".into(),
        name: "web-0".into(),
        created: Timestamp::from_second(second).ok(),
        terminating,
        ..KnownPod::default()
    }
}

fn id(text: &str) -> SandboxId {
    text.parse().unwrap()
}

fn found(inspect: Look) -> String {
    match inspect {
        Look::Found(found) => found.uid,
        other => format!("{other:?}"),
    }
}

#[test]
fn a_name_resolves_to_the_newest_pod_that_is_not_terminating() {
    let mut state = State::default();
    assert_eq!(state.inspect("shop", "web-0", &id("one-sandbox")), Look::Unknown);
    state.apply(pod("old", 1, false));
    assert_eq!(found(state.inspect("shop", "web-0", &id("one-sandbox"))), "old");
    state.taken.insert("old".into(), id("one-sandbox"));
    state.apply(pod("old", 1, true));
    // The match is uncertain for a new sandbox: the watch may lag.
    assert_eq!(state.inspect("shop", "web-0", &id("other-sandbox")), Look::Doubtful);
    state.apply(pod("new", 9, false));
    assert_eq!(found(state.inspect("shop", "web-0", &id("other-sandbox"))), "new");
    state.remove("shop", "web-0", "old");
    assert_eq!(found(state.inspect("shop", "web-0", &id("other-sandbox"))), "new");
    assert!(state.taken.is_empty());
}

#[test]
fn a_pod_of_another_sandbox_is_doubtful() {
    let mut state = State::default();
    state.apply(pod("old", 1, false));
    state.taken.insert("old".into(), id("one-sandbox"));
    assert_eq!(found(state.inspect("shop", "web-0", &id("one-sandbox"))), "old");
    assert_eq!(state.inspect("shop", "web-0", &id("other-sandbox")), Look::Doubtful);
}

#[test]
fn pods_missing_from_a_list_are_removed() {
    let mut state = State::default();
    state.apply(pod("old", 1, false));
    state.taken.insert("old".into(), id("one-sandbox"));
    state.list();
    // The pod stays until the list has been read to its end.
    assert_eq!(found(state.inspect("shop", "web-0", &id("one-sandbox"))), "old");
    state.apply(pod("new", 2, false));
    state.listed();
    assert_eq!(state.pods.len(), 1);
    assert_eq!(found(state.inspect("shop", "web-0", &id("one-sandbox"))), "new");
    assert!(state.taken.is_empty());
    state.list();
    state.listed();
    assert!(state.pods.is_empty(), "bounded by the list of pods");
}

#[test]
fn only_needed_fields_of_a_pod_are_kept() {
    let pod: Pod = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "web-0", "namespace": "shop", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "imagePullSecrets": [{"name": "s"}],
            "containers": [{"name": "c", "env": [{"name": "SECRET", "value": "x"}]}],
        },
    }))
    .unwrap();
    let found = read(&pod).unwrap();
    assert!(found.terminating && found.image_pull_secrets == ["s"]);
    assert_eq!(read(&Pod::default()), None);
}
