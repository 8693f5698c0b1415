//! Values survive the round trip. Values beyond a limit and garbage give an error and no panic.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, SystemTime};

use peerpod_proto::provider as wire;
use peerpod_provider_api::{
    Arch, Capabilities, Chosen, Confidential, CreateRequest, Created, CreatedMany, DiskIdentity, DiskRequest,
    Error, EventKind, IdempotencyKey, InstanceId, Market, Owned, OwnedState, Placement, ProviderEvent,
    Rejected, Size,
};
use proptest::prelude::*;
use protobuf::{Message, MessageField};

use super::*;
use crate::Owner;

const WHO: &str = "external provider shelf";

fn owner() -> Owner {
    Owner { cluster_id: "c".into(), node_name: "n".into(), installation: "i".into() }
}

/// Returns a request with every field filled.
fn request() -> CreateRequest {
    CreateRequest {
        name: "pod".into(),
        user_data: "the secret ticket ä€🦀\n".into(),
        size: Size { vcpus: 1, memory_mib: 2, gpus: 3, gpu_model: Some("g".into()) },
        instance_type: Some("t".into()),
        image: Some("i".into()),
        disks: vec![DiskRequest { volume: "v".into(), read_only: true, zone: Some("z".into()) }],
        second_nic: true,
        labels: BTreeMap::from([("k".into(), "v".into())]),
        arch: Some(Arch::Aarch64),
        confidential: Some(Confidential::SevSnp),
        market: Some(Market::Spot),
        zones: vec!["z".into()],
        public_ip: true,
        placement: Placement::new("p").ok(),
    }
}

fn key() -> IdempotencyKey {
    IdempotencyKey::derive("c", "s", 0)
}

/// Converts a message to bytes and back.
fn over<M: Message>(message: &M) -> M {
    M::parse_from_bytes(&message.write_to_bytes().unwrap()).unwrap()
}

fn id(text: &str) -> InstanceId {
    InstanceId::new(text).unwrap()
}

#[test]
fn a_request_arrives_whole_and_with_its_digest() {
    let sent = over(&request_to(&owner(), &request(), Some(&key())));
    assert_eq!(sent.digest, request().digest());
    assert_eq!(owner_from(sent.owner.clone()).unwrap(), owner());
    assert_eq!(key_from(sent.key.clone()).unwrap(), key());
    assert_eq!(request_from(sent).unwrap(), request());
    let plain = CreateRequest::default();
    assert_eq!(request_from(over(&request_to(&owner(), &plain, None))).unwrap(), plain);
    let unmarked = Owner { installation: String::new(), ..owner() };
    assert!(owner_from(over(&request_to(&unmarked, &plain, None)).owner).is_err());
}

#[test]
fn every_error_arrives_as_the_class_it_was() {
    let text = || "create of pod: the cloud says no".to_owned();
    let rejected = vec![Rejected { offerings: "m6a".into(), reason: "none left".into() }];
    for error in [
        Error::Throttled { after: Some(Duration::from_millis(1500)), text: text() },
        Error::Throttled { after: None, text: text() },
        Error::Capacity { offering: "m6a".into(), rejected, text: text() },
        Error::Quota { text: text() },
        Error::Auth { text: text() },
        Error::invalid(text()),
        Error::not_found(text()),
        Error::key_reused(text()),
        Error::transient(text()),
        Error::unsupported("image", text()),
    ] {
        let arrived = error_from(WHO, over(&error_to(&error)), None);
        assert_eq!(arrived.to_string(), format!("{WHO}: {}", text()));
        let mut again = error_to(&arrived);
        again.text = text();
        assert_eq!(again, error_to(&error));
    }
}

#[test]
fn an_unknown_class_is_repeated_only_with_a_pause() {
    let unknown = wire::Error { class: "tired".into(), text: "later".into(), ..wire::Error::default() };
    let never = error_from(WHO, unknown.clone(), None);
    assert!(matches!(never, Error::Invalid { .. }), "{never:?}");
    assert!(never.to_string().contains("\"tired\""), "{never}");
    let later = error_from(WHO, wire::Error { retry_after_ms: 7, ..unknown.clone() }, None);
    assert_eq!(later.retry(), peerpod_provider_api::Retry::After(Duration::from_millis(7)));
    let forever = error_from(WHO, wire::Error { retry_after_ms: u64::MAX, ..unknown }, None);
    assert_eq!(forever.retry(), peerpod_provider_api::Retry::After(Duration::from_secs(3600)));
}

#[test]
fn an_error_shows_no_user_data_and_is_one_bounded_line() {
    let text = format!("cannot take the secret ticket!\n\x1b[2J{}", "x".repeat(10_000));
    let error = wire::Error { class: "invalid".into(), text, ..wire::Error::default() };
    let text = error_from(WHO, error, Some("the secret ticket")).to_string();
    assert!(!text.contains("secret") && text.contains("(user-data)"), "{text}");
    assert!(text.chars().all(|c| !c.is_control()) && text.chars().count() < 2100, "{}", text.len());
}

#[test]
fn each_ttrpc_status_has_a_class() {
    use ttrpc::Code;
    let class = |code| {
        let status = ttrpc::Error::RpcStatus(ttrpc::get_status(code, "so it is"));
        status_error(WHO, "console", &status).class()
    };
    assert_eq!(class(Code::UNIMPLEMENTED), "unsupported");
    assert_eq!(class(Code::INVALID_ARGUMENT), "invalid");
    assert_eq!(class(Code::PERMISSION_DENIED), "auth");
    assert_eq!(class(Code::RESOURCE_EXHAUSTED), "throttled");
    for code in [Code::UNAVAILABLE, Code::DEADLINE_EXCEEDED, Code::UNKNOWN, Code::INTERNAL] {
        assert_eq!(class(code), "transient");
    }
    let lost = status_error(WHO, "create of pod", &ttrpc::Error::RemoteClosed);
    assert_eq!(lost.class(), "transient");
    assert!(lost.to_string().contains("only the same call may be repeated"), "{lost}");
}

#[test]
fn capabilities_arrive_and_must_be_possible() {
    let can = Capabilities {
        max_user_data: 16384,
        images: true,
        instance_types: true,
        gpus: true,
        archs: Arch::ALL.to_vec(),
        confidential: Confidential::ALL.to_vec(),
        spot: true,
        zones: true,
        public_ip: true,
        volumes: true,
        second_nic: true,
        max_batch: 500,
        guest_memory_mib: 128,
        console: true,
        events: true,
    };
    let sent = over(&capabilities_to(can.clone()));
    assert_eq!(capabilities_from(WHO, &sent).unwrap(), can);
    for max_user_data in [0, 2047, u64::MAX] {
        let lie = wire::Capabilities { max_user_data, ..sent.clone() };
        assert!(capabilities_from(WHO, &lie).is_err(), "{max_user_data}");
    }
    let lie = wire::Capabilities { max_batch: u32::MAX, ..sent.clone() };
    assert!(capabilities_from(WHO, &lie).is_err());
    let lie = wire::Capabilities { guest_memory_mib: u64::MAX, ..sent.clone() };
    assert!(capabilities_from(WHO, &lie).is_err());
    let future = wire::Capabilities { archs: vec!["riscv64".into()], ..sent };
    assert_eq!(capabilities_from(WHO, &future).unwrap().archs, vec![]);
}

#[test]
fn a_created_vm_arrives_and_invalid_fields_are_refused() {
    let made = Created {
        id: id("i-1"),
        addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        chosen: Chosen { instance_type: Some("m6a.large".into()), ..Chosen::default() },
        disks: vec![("v".into(), DiskIdentity::Serial("vol1".into()))],
    };
    let sent = over(&created_to(&made));
    assert_eq!(created_from(WHO, sent.clone(), &request()).unwrap(), made);
    let lies: [fn(&mut wire::CreateResponse); 9] = [
        |r| r.id.clear(),
        |r| r.id = "two words".into(),
        |r| r.id = "x".repeat(1025),
        |r| r.addresses = vec!["0.0.0.0".into()],
        |r| r.addresses = vec!["ff02::1".into()],
        |r| r.addresses = vec!["localhost".into()],
        |r| r.addresses = vec!["10.0.0.1".into(); 33],
        |r| r.disks[0].volume = "another's".into(),
        |r| r.disks.push(r.disks[0].clone()),
    ];
    for (number, lie) in lies.iter().enumerate() {
        let mut sent = sent.clone();
        lie(&mut sent);
        let error = created_from(WHO, sent, &request()).unwrap_err();
        assert!(error.to_string().contains("cannot be used"), "lie {number}: {error}");
    }
}

#[test]
fn a_batch_is_complete_or_has_a_reason() {
    let one =
        |name: &str| Created { id: id(name), addresses: vec![], chosen: Chosen::default(), disks: vec![] };
    let rest = Error::capacity("m6a", format!("{WHO}: none left"));
    let whole = CreatedMany { made: vec![one("a"), one("b")], rest: None };
    assert_eq!(created_many_from(WHO, over(&created_many_to(&whole)), &request(), 2).unwrap(), whole);
    let part = CreatedMany { made: vec![one("a")], rest: Some(rest) };
    let arrived = created_many_from(WHO, over(&created_many_to(&part)), &request(), 2).unwrap();
    assert_eq!(arrived.made, part.made);
    assert_eq!(arrived.rest.map(|error| error.class()), Some("capacity"));
    for lie in [
        CreatedMany { made: vec![one("a")], rest: None },
        CreatedMany { made: vec![one("a"), one("a")], rest: None },
        CreatedMany { made: vec![one("a"), one("b"), one("c")], rest: None },
        CreatedMany { made: vec![], rest: Some(Error::invalid("x")) },
    ] {
        assert!(created_many_from(WHO, created_many_to(&lie), &request(), 2).is_err(), "{lie:?}");
    }
}

#[test]
fn disk_identities_cannot_name_other_paths() {
    for identity in [
        DiskIdentity::Serial("vol123".into()),
        DiskIdentity::ById("nvme-x".into()),
        DiskIdentity::Lun(7),
        DiskIdentity::Wwn("0x5000".into()),
    ] {
        let sent = MessageField::some(over(&identity_to(&identity)));
        assert_eq!(identity_from(WHO, sent).unwrap(), identity);
    }
    for lie in ["", "../../sda", "a/b", ".", "with space", "x\n"] {
        let sent = MessageField::some(identity_to(&DiskIdentity::ById(lie.into())));
        assert!(identity_from(WHO, sent).is_err(), "{lie:?}");
    }
    assert!(identity_from(WHO, MessageField::none()).is_err());
}

#[test]
fn a_list_arrives_whole_or_not_at_all() {
    let owned = Owned {
        id: id("i-1"),
        key: Some(key()),
        name: Some("pod".into()),
        state: OwnedState::Pending,
        addresses: vec!["10.0.0.1".parse().unwrap()],
        created: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(5)),
        node: Some("worker-1".into()),
    };
    let bare = Owned {
        id: id("i-2"),
        key: None,
        name: None,
        state: OwnedState::Deleting,
        addresses: vec![],
        created: None,
        node: None,
    };
    let sent: Vec<_> = [&owned, &bare].map(|one| over(&owned_to(one))).into();
    let mut seen = HashSet::new();
    assert_eq!(owned_from(WHO, sent.clone(), &mut seen).unwrap(), [owned, bare]);
    assert!(owned_from(WHO, sent.clone(), &mut seen).is_err(), "a VM twice, on two pages");
    let lies: [fn(&mut wire::OwnedVm); 4] = [
        |vm| vm.id = "i-1".into(),
        |vm| vm.key = "not a key".into(),
        |vm| vm.state = "dreaming".into(),
        |vm| vm.addresses = vec!["?".into()],
    ];
    for (number, lie) in lies.iter().enumerate() {
        let mut sent = sent.clone();
        lie(&mut sent[1]);
        assert!(owned_from(WHO, sent, &mut HashSet::new()).is_err(), "lie {number}");
    }
}

#[test]
fn events_arrive_and_unknown_ones_are_skipped() {
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(9);
    for kind in [EventKind::Interruption { at }, EventKind::Ended { reason: "spot".into() }] {
        let event = ProviderEvent { id: id("i-1"), kind };
        assert_eq!(event_from(over(&event_to(&event))), Some(event));
    }
    let unknown = wire::Event { id: "i-1".into(), kind: "moved".into(), ..wire::Event::default() };
    assert_eq!(event_from(unknown), None);
}

proptest! {
    #[test]
    fn garbage_is_an_error_or_an_answer_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(answer) = wire::CreateResponse::parse_from_bytes(&bytes) {
            drop(created_from(WHO, answer, &request()));
        }
        if let Ok(answer) = wire::ListOwnedResponse::parse_from_bytes(&bytes) {
            drop(owned_from(WHO, answer.vms, &mut HashSet::new()));
        }
        if let Ok(answer) = wire::HandshakeResponse::parse_from_bytes(&bytes) {
            drop(capabilities_from(WHO, &answer.capabilities.unwrap_or_default()));
        }
        if let Ok(request) = wire::CreateRequest::parse_from_bytes(&bytes) {
            drop(request_from(request));
        }
        if let Ok(answer) = wire::EventsResponse::parse_from_bytes(&bytes) {
            prop_assert!(answer.events.into_iter().filter_map(event_from).count() < 300);
        }
    }

    #[test]
    fn user_data_arrives_byte_for_byte(user_data in ".{0,200}") {
        let request = CreateRequest { user_data, ..CreateRequest::default() };
        let arrived = request_from(over(&request_to(&owner(), &request, None))).unwrap();
        prop_assert_eq!(arrived.user_data, request.user_data);
    }
}
