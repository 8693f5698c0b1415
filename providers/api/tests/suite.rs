//! Runs the conformance suite against an in-memory cloud. A conforming provider passes, and each fault is found by the
//! check for it.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use peerpod_provider_api::conformance::{self, Harness, ListPages, ProviderRole, Stop, SuiteLimits, promise};
use peerpod_provider_api::{
    Batch, Capabilities, Chosen, CreateRequest, Created, CreatedMany, DiskIdentity, DiskRequest, Error,
    Extensions, IdempotencyKey, InstanceId, Owned, OwnedState, Placement, Preflight, Provider, Volumes,
};

/// Faults of a provider.
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
    HidesWhatIsHalfMade,
    ShowsUserData,
    CallsGoneTransient,
    BlocksItsThread,
    MakesAnotherBatch,
    MovesDisks,
    TakesNothingAttachedForAnError,
    AttachesToTwo,
    HasItsOwnMemory,
    MakesAVmToFindAPlace,
    TakesAnyPlace,
    NeedsAPreflight,
    DeletesAnyVm,
    DetachesFromAnyVm,
    AttachesToAnyVm,
    AnswersBeforeTheDecision,
    KeepsWhatWasRefused,
    CallsALateRefusalQuota,
    ChoosesTheRefusedPlace,
    GivesADyingVm,
    LosesAPage,
}

struct Vm {
    owner: &'static str,
    key: IdempotencyKey,
    request: CreateRequest,
    number: u32,
    answered: bool,
    /// End of the deletion, once the VM is being deleted.
    ends: Option<Instant>,
}

#[derive(Default)]
struct Cloud {
    vms: BTreeMap<InstanceId, Vm>,
    /// Whether the next create is refused after it was accepted, and the place that is then exhausted.
    refuses_late: bool,
    exhausted: bool,
    /// Whether the next second page is lost.
    loses_page: bool,
    made: u32,
    disks: BTreeMap<String, (InstanceId, u32)>,
    attached: u32,
}

impl Cloud {
    fn make(&mut self, owner: &'static str, request: &CreateRequest, key: &IdempotencyKey) -> InstanceId {
        self.made += 1;
        let number = self.made;
        let id = InstanceId::new(format!("shelf-{number}")).unwrap();
        let (key, request) = (key.clone(), request.clone());
        let vm = Vm { owner, key, request, number, answered: false, ends: None };
        self.vms.insert(id.clone(), vm);
        id
    }

    /// Begins the deletion of a VM.
    fn delete(&mut self, id: &InstanceId) {
        self.disks.retain(|_, (vm, _)| vm != id);
        if let Some(vm) = self.vms.get_mut(id) {
            vm.ends.get_or_insert_with(|| Instant::now() + DELETION);
        }
    }

    fn is_of(&self, id: &InstanceId, owner: &str) -> bool {
        self.vms.get(id).is_some_and(|vm| vm.owner == owner)
    }
}

/// Time that a deletion takes.
const DELETION: Duration = Duration::from_millis(15);
/// Number of VMs on a page of a list.
const PAGE: u32 = 3;

struct Shelf {
    cloud: Arc<Mutex<Cloud>>,
    owner: &'static str,
    fault: Fault,
}

impl Shelf {
    /// Returns the cloud as it is now.
    fn cloud(&self) -> MutexGuard<'_, Cloud> {
        let mut cloud = self.cloud.lock().unwrap();
        // On a busy machine a VM must not be gone before it is given.
        let more = if self.fault == Fault::GivesADyingVm { Duration::from_secs(1) } else { Duration::ZERO };
        cloud.vms.retain(|_, vm| vm.ends.is_none_or(|end| Instant::now() < end + more));
        cloud
    }

    /// Refuses a VM that was accepted.
    fn refuse(&self, id: &InstanceId) -> Result<(), Error> {
        let mut cloud = self.cloud();
        if !std::mem::take(&mut cloud.refuses_late) {
            return Ok(());
        }
        cloud.exhausted = self.fault != Fault::ChoosesTheRefusedPlace;
        if self.fault != Fault::KeepsWhatWasRefused {
            cloud.delete(id);
        }
        let text = "create: the shelf is full".to_owned();
        match self.fault {
            Fault::AnswersBeforeTheDecision => Ok(()),
            Fault::CallsALateRefusalQuota => Err(Error::Quota { text }),
            _ => Err(Error::capacity("the left one", text)),
        }
    }
}

#[async_trait]
impl Provider for Shelf {
    fn name(&self) -> &'static str {
        "shelf"
    }

    fn capabilities(&self) -> Capabilities {
        let console = self.fault == Fault::PromisesAConsole;
        Capabilities { console, volumes: true, max_batch: 5, ..Capabilities::minimal(4096) }
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        Ok(Preflight::default())
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, Error> {
        if request.size.vcpus > 64 {
            return Err(Error::invalid("place: no shelf is so large"));
        }
        if self.fault == Fault::MakesAVmToFindAPlace {
            let key = IdempotencyKey::derive("c", "a try", 0);
            self.cloud.lock().unwrap().make(self.owner, request, &key);
        }
        if self.cloud().exhausted {
            return Err(Error::capacity("the left one", "place: the shelf is full"));
        }
        Placement::new("the left one").map(Some)
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        let place = request.placement.as_ref().map_or("the left one", Placement::as_str);
        if place != "the left one" && self.fault != Fault::TakesAnyPlace {
            return Err(Error::invalid("create: there is no such shelf"));
        }
        match self.fault {
            Fault::MeasuresNothing => {
                let short = CreateRequest { user_data: String::new(), ..request.clone() };
                self.capabilities().check(&short, self.name())?;
            }
            Fault::DropsWhatItCannotDo => {}
            _ => self.capabilities().check(request, self.name())?,
        }
        // The effect takes a while, and so does the answer after it.
        tokio::time::sleep(Duration::from_millis(3)).await;
        let id = {
            let mut cloud = self.cloud();
            let known = cloud.vms.iter().find(|(_, vm)| vm.key == *key && vm.owner == self.owner);
            match known {
                Some((_, vm)) if self.fault != Fault::TakesAnyRequestForAKey && vm.request != *request => {
                    let shown = if self.fault == Fault::ShowsUserData { &request.user_data } else { "" };
                    return Err(Error::key_reused(format!(
                        "create: this key came with another request {shown}"
                    )));
                }
                Some((_, vm)) if vm.ends.is_some() && self.fault != Fault::GivesADyingVm => {
                    return Err(Error::transient("create: its VM is being deleted"));
                }
                Some((id, _)) if self.fault != Fault::ForgetsKeys => id.clone(),
                _ if request.disks.iter().any(|disk| disk.volume != DISK) => {
                    return Err(Error::not_found("create: there is no such disk"));
                }
                _ => cloud.make(self.owner, request, key),
            }
        };
        for disk in &request.disks {
            self.attach(&id, disk).await?;
        }
        self.refuse(&id)?;
        // On a busy machine, too, a create must be dropped before its answer.
        let more = if self.fault == Fault::HidesWhatIsHalfMade { 200 } else { 3 };
        tokio::time::sleep(Duration::from_millis(more)).await;
        if let Some(vm) = self.cloud().vms.get_mut(&id) {
            vm.answered = true;
        }
        Ok(Created { id, addresses: vec![], chosen: Chosen::default(), disks: vec![] })
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        loop {
            let lives = |vm: &&Vm| vm.ends.is_none() || self.fault == Fault::GivesADyingVm;
            let number = self.cloud().vms.get(id).filter(lives).map(|vm| vm.number);
            match number {
                Some(_) if self.fault == Fault::GivesOneAddressToAll => {
                    return Ok(vec![Ipv4Addr::LOCALHOST.into()]);
                }
                Some(number) => return Ok(vec![Ipv4Addr::from_bits(0x0a00_0000 + number).into()]),
                None if self.fault == Fault::WaitsForGoneVms => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                None if self.fault == Fault::CallsGoneTransient => return Err(Error::transient("not there")),
                None => return Err(Error::not_found(format!("addresses of {id}: there is no such VM"))),
            }
        }
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let gone = {
            let mut cloud = self.cloud();
            if !cloud.is_of(id, self.owner) && self.fault != Fault::DeletesAnyVm {
                true
            } else {
                cloud.delete(id);
                !cloud.vms.contains_key(id)
            }
        };
        if gone && self.fault == Fault::GoneIsAnError {
            return Err(Error::not_found(format!("delete of {id}: there is no such VM")));
        }
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        if self.fault == Fault::NeedsAPreflight {
            return Err(Error::invalid("list_owned: preflight was not called"));
        }
        if self.fault == Fault::BlocksItsThread {
            std::thread::sleep(Duration::from_millis(2100));
        }
        let mut cloud = self.cloud();
        let loses_page = cloud.vms.len() > PAGE as usize && std::mem::take(&mut cloud.loses_page);
        if loses_page && self.fault != Fault::LosesAPage {
            return Err(Error::transient("list_owned: the second page has no answer"));
        }
        let pages = if loses_page { 1 } else { usize::MAX };
        let half = |vm: &Vm| self.fault == Fault::HidesWhatIsHalfMade && !vm.answered;
        let ours = |vm: &Vm| (vm.owner == self.owner || self.fault == Fault::ListsEverybody) && !half(vm);
        let owned = cloud.vms.iter().filter(|(_, vm)| ours(vm)).map(|(id, vm)| Owned {
            id: id.clone(),
            key: Some(vm.key.clone()),
            name: None,
            state: if vm.ends.is_some() { OwnedState::Deleting } else { OwnedState::Running },
            addresses: vec![],
            created: None,
            node: None,
        });
        let hidden = self.fault == Fault::HidesWhatItMade;
        Ok(owned.filter(|_| !hidden).take(pages.saturating_mul(PAGE as usize)).collect())
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions { batch: Some(self), volumes: Some(self), console: None }
    }
}

#[async_trait]
impl Batch for Shelf {
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        if count.get() > 5 {
            return Err(Error::invalid("create: at most 5"));
        }
        let mut cloud = self.cloud.lock().unwrap();
        let known = |(id, vm): (&InstanceId, &Vm)| (vm.key == *key).then(|| id.clone());
        let mut ids: Vec<InstanceId> = cloud.vms.iter().filter_map(known).collect();
        if ids.is_empty() || self.fault == Fault::MakesAnotherBatch {
            ids = (0..count.get()).map(|_| cloud.make(self.owner, request, key)).collect();
        }
        ids.sort();
        let made = |id| Created { id, addresses: vec![], chosen: Chosen::default(), disks: vec![] };
        Ok(CreatedMany { made: ids.into_iter().map(made).collect(), rest: None })
    }
}

#[async_trait]
impl Volumes for Shelf {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        let mut cloud = self.cloud.lock().unwrap();
        let is_there = match self.fault {
            Fault::AttachesToAnyVm => cloud.vms.contains_key(id),
            _ => cloud.is_of(id, self.owner),
        };
        if !is_there || disk.volume != DISK {
            return Err(Error::not_found("attach: there is no such VM or disk"));
        }
        cloud.attached += 1;
        let number = cloud.attached;
        let (vm, first) = cloud.disks.entry(disk.volume.clone()).or_insert_with(|| (id.clone(), number));
        if vm != id && self.fault != Fault::AttachesToTwo {
            return Err(Error::invalid("attach: the disk belongs to another VM"));
        }
        Ok(DiskIdentity::Lun(if self.fault == Fault::MovesDisks { number } else { *first }))
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        let mut cloud = self.cloud.lock().unwrap();
        let is_ours = cloud.is_of(id, self.owner) || self.fault == Fault::DetachesFromAnyVm;
        if is_ours && cloud.disks.get(volume).is_some_and(|(vm, _)| vm == id) {
            cloud.disks.remove(volume);
        } else if self.fault == Fault::TakesNothingAttachedForAnError {
            return Err(Error::not_found("detach: it is not attached"));
        }
        Ok(())
    }
}

/// The only disk of this cloud.
const DISK: &str = "disk-1";

struct Bench {
    cloud: Arc<Mutex<Cloud>>,
    ours: Arc<Shelf>,
    theirs: Arc<Shelf>,
    next: Arc<Shelf>,
    fault: Fault,
}

fn with(fault: Fault) -> Bench {
    let cloud = Arc::new(Mutex::new(Cloud::default()));
    let shelf = |owner, fault| Arc::new(Shelf { cloud: cloud.clone(), owner, fault });
    let next = match fault {
        Fault::NeedsAPreflight => shelf("us", fault),
        Fault::HasItsOwnMemory => Arc::new(Shelf { cloud: Arc::default(), owner: "us", fault }),
        _ => shelf("us", fault),
    };
    let ours = if fault == Fault::NeedsAPreflight { shelf("us", Fault::None) } else { shelf("us", fault) };
    Bench { ours, theirs: shelf("them", Fault::None), next, cloud: cloud.clone(), fault }
}

#[async_trait]
impl Harness for Bench {
    fn provider(&self) -> Arc<dyn Provider> {
        self.ours.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let cloud = self.cloud.lock().unwrap();
        let whole = &cloud.vms.get(id).unwrap().request.user_data;
        let seen = if self.fault == Fault::CutsUserData { whole.trim_end() } else { whole };
        Some(seen.as_bytes().to_vec())
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.ours.cloud().vms.len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("shelf-0").ok()
    }

    async fn late_refusal(&self) -> Option<CreateRequest> {
        self.cloud.lock().unwrap().refuses_late = true;
        Some(self.request())
    }

    fn pages(&self) -> Option<ListPages<'_>> {
        let lose_next = Box::new(|| self.cloud.lock().unwrap().loses_page = true);
        Some(ListPages { size: PAGE, lose_next })
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        Some(match role {
            ProviderRole::Stranger => self.theirs.clone(),
            ProviderRole::Successor | ProviderRole::Collector => self.next.clone(),
        })
    }

    fn volume(&self) -> Option<DiskRequest> {
        Some(DiskRequest { volume: DISK.into(), ..DiskRequest::default() })
    }

    fn limits(&self) -> SuiteLimits {
        SuiteLimits {
            patience: Duration::from_secs(if self.fault == Fault::None { 120 } else { 2 }),
            ..SuiteLimits::default()
        }
    }
}

fn make() -> Bench {
    with(Fault::None)
}

peerpod_provider_api::conformance_suite!(make);

#[test]
fn each_violation_is_found_by_its_check() {
    // A fault mostly shows as a wait without end, so all are tried at once.
    macro_rules! found {
        ($($fault:ident: $check:ident),* $(,)?) => {
            std::thread::scope(|threads| {$(
                threads.spawn(|| {
                    let verdict = conformance::verdict(|| with(Fault::$fault), promise(stringify!($check)));
                    let found = matches!(verdict, Err(Stop::Broken(_)));
                    assert!(found, "{} did not find {:?}: {verdict:?}", stringify!($check), Fault::$fault);
                });
            )*});
        };
    }
    found! {
        ForgetsKeys: a_repeated_create_finds_the_same_vm,
        ForgetsKeys: creates_with_one_key_at_once_make_one_vm,
        ForgetsKeys: a_create_dropped_at_any_time_and_repeated_makes_one_vm,
        TakesAnyRequestForAKey: a_key_with_another_request_is_refused,
        GoneIsAnError: a_second_delete_is_fine,
        GoneIsAnError: a_delete_of_something_unknown_is_fine,
        ListsEverybody: only_our_vms_are_listed,
        DeletesAnyVm: a_vm_of_another_owner_survives_our_calls,
        DetachesFromAnyVm: a_vm_of_another_owner_survives_our_calls,
        AttachesToAnyVm: a_vm_of_another_owner_survives_our_calls,
        DropsWhatItCannotDo: what_cannot_be_done_is_refused_not_dropped,
        CutsUserData: user_data_arrives_byte_for_byte,
        MeasuresNothing: user_data_over_the_limit_is_refused_before_any_call,
        HidesWhatItMade: a_repeated_create_finds_the_same_vm,
        HidesWhatItMade: a_delete_dropped_at_any_time_and_repeated_leaves_nothing,
        WaitsForGoneVms: a_deleted_vm_has_no_addresses,
        PromisesAConsole: the_provider_says_what_it_can_do,
        GivesOneAddressToAll: many_creates_at_once_all_succeed,
        HidesWhatIsHalfMade: a_create_dropped_and_forgotten_is_listed,
        ShowsUserData: errors_have_their_class_and_show_no_user_data,
        CallsGoneTransient: errors_have_their_class_and_show_no_user_data,
        BlocksItsThread: calls_end_at_their_deadline,
        MakesAnotherBatch: a_batch_is_as_many_vms_as_it_says,
        MovesDisks: an_attached_disk_keeps_its_identity,
        AttachesToTwo: an_attached_disk_keeps_its_identity,
        TakesNothingAttachedForAnError: a_detach_of_nothing_is_fine,
        HasItsOwnMemory: another_process_finds_what_was_made,
        MakesAVmToFindAPlace: a_recorded_place_is_kept,
        TakesAnyPlace: a_recorded_place_is_kept,
        NeedsAPreflight: who_only_collects_lists_and_deletes,
        AnswersBeforeTheDecision: a_late_refusal_leaves_nothing_but_what_is_being_deleted,
        KeepsWhatWasRefused: a_late_refusal_leaves_nothing_but_what_is_being_deleted,
        CallsALateRefusalQuota: a_late_refusal_leaves_nothing_but_what_is_being_deleted,
        ChoosesTheRefusedPlace: a_late_refusal_leaves_nothing_but_what_is_being_deleted,
        GivesADyingVm: a_key_whose_vm_is_being_deleted_gives_no_dying_vm,
        LosesAPage: a_list_with_an_unread_page_is_an_error,
    }
}
