use super::*;

const GRACE: Duration = Duration::from_secs(900);
const NODE_GRACE: Duration = Duration::from_secs(300);
const LASTS: Duration = Duration::from_secs(40);

/// A cluster that changes over time and is observed repeatedly.
struct World {
    began: Instant,
    owned: Vec<Owned>,
    claims: Claims,
    beats: HashMap<String, Beat>,
    nodes: HashSet<String>,
    seen: Seen,
}

fn vm(id: &str, node: Option<&str>) -> Owned {
    Owned {
        id: InstanceId::new(id).unwrap(),
        key: Some(IdempotencyKey::derive("c", id, 0)),
        name: None,
        state: OwnedState::Running,
        addresses: vec![],
        created: None,
        node: node.map(str::to_owned),
    }
}

impl World {
    fn new() -> World {
        World {
            began: Instant::now(),
            owned: vec![vm("a", Some("n"))],
            claims: Claims::default(),
            beats: HashMap::new(),
            nodes: HashSet::new(),
            seen: Seen::default(),
        }
    }

    fn beat(&mut self, version: u64) {
        self.beats.insert("n".into(), Beat { version: version.to_string(), lasts: LASTS });
    }

    fn inspect(&mut self, second: u64) -> Observation {
        let World { began, owned, claims, beats, nodes, seen } = self;
        let inspect = Look { owned, claims, beats, nodes, at: *began + Duration::from_secs(second) };
        seen.inspect(&inspect, &HashSet::from(["n".to_owned()]), GRACE, NODE_GRACE)
    }

    fn suspects(&mut self, second: u64) -> usize {
        self.inspect(second).suspects.len()
    }
}

#[test]
fn a_vm_of_a_lost_node_is_suspect_after_the_grace_and_not_before() {
    let mut world = World::new();
    world.beat(1);
    assert_eq!(world.suspects(0), 0);
    assert_eq!(world.suspects(899), 0);
    let found = world.inspect(900);
    assert_eq!(found.suspects.len(), 1);
    assert!(!found.suspects[0].node_exists);
    assert_eq!((found.unclaimed, found.unattributed.len()), (1, 0));
}

#[test]
fn the_grace_begins_anew_with_each_beat() {
    let mut world = World::new();
    for minute in 0..60 {
        world.beat(minute);
        assert_eq!(world.suspects(minute * 60), 0, "its daemon lives: it is that one's matter, for ever");
    }
    assert_eq!(world.suspects(59 * 60 + 899), 0);
    assert_eq!(world.suspects(59 * 60 + 900), 1);
}

#[test]
fn the_grace_restarts_after_a_claim() {
    for spec in [
        PeerPodSpec { instance_id: Some("a".into()), ..PeerPodSpec::default() },
        PeerPodSpec {
            idempotency_key: Some(IdempotencyKey::derive("c", "a", 0).to_string()),
            ..PeerPodSpec::default()
        },
        PeerPodSpec { sandbox_id: Some("a".into()), ..PeerPodSpec::default() },
    ] {
        let mut world = World::new();
        world.beat(1);
        assert_eq!(world.suspects(0), 0);
        world.claims.add("c", &spec);
        assert_eq!(
            world.inspect(2000),
            Observation { gone: HashSet::new(), ..Observation::default() },
            "{spec:?}"
        );
        world.claims = Claims::default();
        assert_eq!(world.suspects(2001), 0);
        assert_eq!(world.suspects(2900), 0);
        assert_eq!(world.suspects(2901), 1);
    }
}

#[test]
fn a_peerpod_with_an_instance_claims_no_other_vm() {
    let mut world = World::new();
    world.beat(1);
    let spec =
        PeerPodSpec { sandbox_id: Some("a".into()), instance_id: Some("b".into()), ..PeerPodSpec::default() };
    world.claims.add("c", &spec);
    assert_eq!(world.suspects(0) + world.suspects(900), 1, "an attempt that was given up");
}

#[test]
fn vms_of_other_clusters_and_without_owner_are_never_deleted() {
    let mut world = World::new();
    world.owned = vec![vm("a", Some("elsewhere")), vm("b", None)];
    world.beat(1);
    assert_eq!(world.suspects(0), 0);
    let found = world.inspect(1_000_000);
    assert_eq!((found.suspects.len(), found.unattributed.len()), (0, 2));
}

#[test]
fn a_vm_that_is_going_already_is_not_touched() {
    let mut world = World::new();
    world.owned[0].state = OwnedState::Deleting;
    world.beat(1);
    assert_eq!(world.suspects(0) + world.suspects(9000), 0);
}

#[test]
fn a_heartbeat_is_never_called_silent_within_its_own_time() {
    let mut world = World::new();
    world.beats.insert("n".into(), Beat { version: "1".into(), lasts: Duration::from_secs(3600) });
    assert_eq!(world.suspects(0) + world.suspects(3599), 0);
    assert_eq!(world.suspects(3600), 1);
}

#[test]
fn a_node_is_gone_when_object_and_heartbeat_are_for_the_grace() {
    let gone = |world: &mut World, second| world.inspect(second).gone.len();
    let mut world = World::new();
    world.beat(1);
    world.nodes.insert("n".into());
    assert_eq!(gone(&mut world, 0) + gone(&mut world, 9000), 0, "its object is there");
    world.nodes.clear();
    assert_eq!(gone(&mut world, 9001), 0);
    world.beat(2);
    assert_eq!(gone(&mut world, 9301), 0, "its daemon lives");
    assert_eq!(gone(&mut world, 9340), 0, "until its heartbeat's time is over");
    assert_eq!(gone(&mut world, 9341), 0);
    assert_eq!(gone(&mut world, 9640), 0);
    assert_eq!(gone(&mut world, 9641), 1);
    world.nodes.insert("n".into());
    assert_eq!(gone(&mut world, 9642), 0, "it came back");
    world.nodes.clear();
    world.beats.clear();
    assert_eq!(gone(&mut world, 9643), 0);
    assert_eq!(gone(&mut world, 9943), 1, "also one that never had a heartbeat");
}

#[test]
fn only_objects_not_yet_deleted_go_with_their_node() {
    let gone = HashSet::from(["n".to_owned()]);
    let mut peerpod = PeerPod::default();
    assert!(!goes_with(&peerpod, &gone), "of the replaced system: no node is known");
    peerpod.spec.node_name = Some("n".into());
    assert!(goes_with(&peerpod, &gone));
    peerpod.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(k8s_openapi::jiff::Timestamp::now()));
    assert!(!goes_with(&peerpod, &gone));
}
