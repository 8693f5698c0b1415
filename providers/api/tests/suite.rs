//! The conformance suite against a cloud in memory: one that conforms passes, and each way of not conforming is
//! found by the check that is for it.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use peerpod_provider_api::conformance::{self, Harness, checks};
use peerpod_provider_api::{
    Capabilities, CreateRequest, Created, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Preflight,
    Provider,
};

/// Ways of not conforming.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    ForgetsKeys,
    TakesAnyRequestForAKey,
    GoneIsAnError,
    ListsEverybody,
    DropsWhatItCannotDo,
    CutsUserData,
    MeasuresNothing,
    HidesWhatItMade,
    WaitsForGoneVms,
    PromisesAConsole,
    GivesOneAddressToAll,
}

struct Vm {
    owner: &'static str,
    key: IdempotencyKey,
    request: CreateRequest,
    number: u32,
}

#[derive(Default)]
struct Cloud {
    vms: BTreeMap<InstanceId, Vm>,
    made: u32,
}

struct Shelf {
    cloud: Arc<Mutex<Cloud>>,
    owner: &'static str,
    fault: Fault,
}

#[async_trait]
impl Provider for Shelf {
    fn name(&self) -> &'static str {
        "shelf"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { console: self.fault == Fault::PromisesAConsole, ..Capabilities::minimal(4096) }
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        Ok(Preflight::default())
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        match self.fault {
            Fault::MeasuresNothing => {
                let short = CreateRequest { user_data: String::new(), ..request.clone() };
                self.capabilities().check(&short, self.name())?;
            }
            Fault::DropsWhatItCannotDo => {}
            _ => self.capabilities().check(request, self.name())?,
        }
        // A cloud that takes a while, and answers a while after the effect.
        tokio::time::sleep(Duration::from_millis(3)).await;
        let id = {
            let mut cloud = self.cloud.lock().unwrap();
            let known = cloud.vms.iter().find(|(_, vm)| vm.key == *key && vm.owner == self.owner);
            match known {
                Some((_, vm)) if self.fault != Fault::TakesAnyRequestForAKey && vm.request != *request => {
                    return Err(Error::key_reused("create: this key came with another request"));
                }
                Some((id, _)) if self.fault != Fault::ForgetsKeys => id.clone(),
                _ => {
                    cloud.made += 1;
                    let number = cloud.made;
                    let id = InstanceId::new(format!("shelf-{number}")).unwrap();
                    let vm = Vm { owner: self.owner, key: key.clone(), request: request.clone(), number };
                    cloud.vms.insert(id.clone(), vm);
                    id
                }
            }
        };
        tokio::time::sleep(Duration::from_millis(3)).await;
        Ok(Created { id, addresses: vec![], instance_type: None, disks: vec![] })
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        loop {
            let number = self.cloud.lock().unwrap().vms.get(id).map(|vm| vm.number);
            match number {
                Some(_) if self.fault == Fault::GivesOneAddressToAll => {
                    return Ok(vec![Ipv4Addr::LOCALHOST.into()]);
                }
                Some(number) => return Ok(vec![Ipv4Addr::from_bits(0x0a00_0000 + number).into()]),
                None if self.fault == Fault::WaitsForGoneVms => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                None => return Err(Error::not_found(format!("addresses of {id}: there is no such VM"))),
            }
        }
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let gone = self.cloud.lock().unwrap().vms.remove(id).is_none();
        if gone && self.fault == Fault::GoneIsAnError {
            return Err(Error::not_found(format!("delete of {id}: there is no such VM")));
        }
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let cloud = self.cloud.lock().unwrap();
        let ours = |vm: &Vm| vm.owner == self.owner || self.fault == Fault::ListsEverybody;
        let owned = cloud.vms.iter().filter(|(_, vm)| ours(vm)).map(|(id, vm)| Owned {
            id: id.clone(),
            key: Some(vm.key.clone()),
            name: None,
            state: OwnedState::Running,
            addresses: vec![],
            created: None,
        });
        let hidden = self.fault == Fault::HidesWhatItMade;
        Ok(owned.filter(|_| !hidden).collect())
    }
}

struct Bench {
    cloud: Arc<Mutex<Cloud>>,
    ours: Arc<Shelf>,
    theirs: Arc<Shelf>,
    fault: Fault,
}

fn with(fault: Fault) -> Bench {
    let cloud = Arc::new(Mutex::new(Cloud::default()));
    let shelf = |owner, fault| Arc::new(Shelf { cloud: cloud.clone(), owner, fault });
    Bench { ours: shelf("us", fault), theirs: shelf("them", Fault::None), cloud: cloud.clone(), fault }
}

#[async_trait]
impl Harness for Bench {
    fn provider(&self) -> Arc<dyn Provider> {
        self.ours.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Vec<u8> {
        let cloud = self.cloud.lock().unwrap();
        let whole = &cloud.vms.get(id).unwrap().request.user_data;
        let seen = if self.fault == Fault::CutsUserData { whole.trim_end() } else { whole };
        seen.as_bytes().to_vec()
    }

    async fn machines(&self) -> usize {
        self.cloud.lock().unwrap().vms.len()
    }

    fn unknown_id(&self) -> InstanceId {
        InstanceId::new("shelf-0").unwrap()
    }

    fn stranger(&self) -> Option<Arc<dyn Provider>> {
        Some(self.theirs.clone())
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(if self.fault == Fault::None { 120 } else { 2 })
    }
}

fn make() -> Bench {
    with(Fault::None)
}

peerpod_provider_api::conformance_suite!(make);

#[test]
fn each_way_of_not_conforming_is_found_by_its_check() {
    macro_rules! found {
        ($($fault:ident: $check:ident),* $(,)?) => {$(
            let run = || conformance::run(|| with(Fault::$fault), checks::$check);
            let found = catch_unwind(AssertUnwindSafe(run)).is_err();
            assert!(found, "{} did not find {:?}", stringify!($check), Fault::$fault);
        )*};
    }
    found! {
        ForgetsKeys: a_repeated_create_finds_the_same_vm,
        ForgetsKeys: creates_with_one_key_at_once_make_one_vm,
        ForgetsKeys: a_create_dropped_at_any_time_and_repeated_makes_one_vm,
        TakesAnyRequestForAKey: a_key_with_another_request_is_refused,
        GoneIsAnError: a_second_delete_is_fine,
        GoneIsAnError: a_delete_of_something_unknown_is_fine,
        ListsEverybody: only_our_vms_are_listed,
        DropsWhatItCannotDo: what_cannot_be_done_is_refused_not_dropped,
        CutsUserData: user_data_arrives_byte_for_byte,
        MeasuresNothing: user_data_over_the_limit_is_refused_before_any_call,
        HidesWhatItMade: a_repeated_create_finds_the_same_vm,
        HidesWhatItMade: a_delete_dropped_at_any_time_and_repeated_leaves_nothing,
        WaitsForGoneVms: a_deleted_vm_has_no_addresses,
        PromisesAConsole: the_provider_says_what_it_can_do,
        GivesOneAddressToAll: many_creates_at_once_all_succeed,
    }
}
