//! Converts answers. An answer that exceeds a limit is refused as a whole: half of a list would be taken for all of it.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use peerpod_proto::provider as wire;
use peerpod_provider_api::{
    Arch, Capabilities, Chosen, Confidential, CreateRequest, Created, CreatedMany, DiskIdentity, Error,
    EventKind, IdempotencyKey, InstanceId, Owned, OwnedState, Preflight, ProviderEvent,
};
use protobuf::MessageField;

use super::{TEXT, WORD, clipped, error_from, error_to, printable};

/// Least user-data that a VM needs to boot, and most that fits in a frame.
const USER_DATA: std::ops::RangeInclusive<u64> = 2048..=3 << 20;
/// Most addresses of one VM, and of the node.
const ADDRESSES: usize = 32;
/// Most facts, and most warnings.
const FACTS: usize = 64;
/// Most VMs of one call; their answers must fit into one frame.
const BATCH: u32 = 1000;
/// Most memory of a guest, in MiB: 1 TiB.
const GUEST_MEMORY: u64 = 1 << 20;
/// Most bytes of a node's name, the limit of Kubernetes.
const NODE: usize = 253;
/// Longest identity of a disk.
const IDENTITY: usize = 256;

/// Error for an answer that cannot be used. The first argument names the provider.
fn refused(who: &str, why: impl std::fmt::Display) -> Error {
    Error::invalid(format!(
        "{who} gave an answer that cannot be used: {why}; this is a fault of that provider"
    ))
}

pub(crate) fn capabilities_to(can: Capabilities) -> wire::Capabilities {
    let Capabilities {
        max_user_data,
        images,
        instance_types,
        gpus,
        archs,
        confidential,
        spot,
        zones,
        public_ip,
        volumes,
        second_nic,
        max_batch,
        guest_memory_mib,
        console,
        events,
    } = can;
    wire::Capabilities {
        max_user_data: u64::try_from(max_user_data).unwrap_or(u64::MAX).min(*USER_DATA.end()),
        images,
        instance_types,
        gpus,
        archs: archs.iter().map(|arch| arch.word().to_owned()).collect(),
        confidential: confidential.iter().map(|one| one.word().to_owned()).collect(),
        spot,
        zones,
        public_ip,
        volumes,
        second_nic,
        // A provider's choice of placements is unknown before a call of `place`.
        places: true,
        // It is also unknown whether a grown disk needs a call.
        growth: volumes,
        max_batch: max_batch.min(BATCH),
        guest_memory_mib,
        console,
        events,
        ..wire::Capabilities::default()
    }
}

pub(crate) fn capabilities_from(who: &str, can: &wire::Capabilities) -> Result<Capabilities, Error> {
    if !USER_DATA.contains(&can.max_user_data) {
        let why = format!("max_user_data of {} is not from 2048 to {}", can.max_user_data, USER_DATA.end());
        return Err(refused(who, why));
    }
    if can.max_batch > BATCH {
        return Err(refused(who, format!("max_batch of {} is more than {BATCH}", can.max_batch)));
    }
    if can.guest_memory_mib > GUEST_MEMORY {
        let why = format!("guest_memory_mib of {} is more than {GUEST_MEMORY}", can.guest_memory_mib);
        return Err(refused(who, why));
    }
    Ok(Capabilities {
        max_user_data: usize::try_from(can.max_user_data).map_err(|error| refused(who, error))?,
        images: can.images,
        instance_types: can.instance_types,
        gpus: can.gpus,
        archs: can.archs.iter().filter_map(|word| Arch::from_word(word)).collect(),
        confidential: can.confidential.iter().filter_map(|word| Confidential::from_word(word)).collect(),
        spot: can.spot,
        zones: can.zones,
        public_ip: can.public_ip,
        volumes: can.volumes,
        second_nic: can.second_nic,
        max_batch: can.max_batch,
        guest_memory_mib: can.guest_memory_mib,
        console: can.console,
        events: can.events,
    })
}

/// Parses addresses of VMs. Unspecified, multicast and broadcast addresses are refused.
pub(crate) fn addresses_from(who: &str, texts: &[String]) -> Result<Vec<IpAddr>, Error> {
    if texts.len() > ADDRESSES {
        return Err(refused(who, format!("{} addresses, of at most {ADDRESSES}", texts.len())));
    }
    let one = |text: &String| {
        let address: IpAddr = text.parse().ok()?;
        let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
        (!address.is_unspecified() && !address.is_multicast() && !broadcast).then_some(address)
    };
    let checked = |text| {
        one(text).ok_or_else(|| refused(who, format!("{:?} is no address of a VM", clipped(text, 80))))
    };
    texts.iter().map(checked).collect()
}

fn texts(addresses: &[IpAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}

fn id_from(who: &str, id: String) -> Result<InstanceId, Error> {
    InstanceId::new(id).map_err(|error| refused(who, error))
}

pub(crate) fn preflight_to(found: Preflight) -> wire::PreflightResponse {
    wire::PreflightResponse {
        facts: found.facts,
        warnings: found.warnings,
        node_addresses: texts(&found.node_addresses),
        ..wire::PreflightResponse::default()
    }
}

pub(crate) fn preflight_from(who: &str, found: &wire::PreflightResponse) -> Result<Preflight, Error> {
    let lines = |texts: &[String]| texts.iter().take(FACTS).map(|text| clipped(text, TEXT)).collect();
    Ok(Preflight {
        facts: lines(&found.facts),
        warnings: lines(&found.warnings),
        node_addresses: addresses_from(who, &found.node_addresses)?,
    })
}

pub(crate) fn created_to(made: &Created) -> wire::CreateResponse {
    let disk = |(volume, identity): &(String, DiskIdentity)| wire::AttachedDisk {
        volume: volume.clone(),
        identity: MessageField::some(identity_to(identity)),
        ..wire::AttachedDisk::default()
    };
    wire::CreateResponse {
        id: made.id.to_string(),
        addresses: texts(&made.addresses),
        instance_type: made.chosen.instance_type.clone().unwrap_or_default(),
        disks: made.disks.iter().map(disk).collect(),
        ..wire::CreateResponse::default()
    }
}

/// Converts the answer to `request`. A disk that was not requested is refused, because it belongs to another VM.
pub(crate) fn created_from(
    who: &str,
    made: wire::CreateResponse,
    request: &CreateRequest,
) -> Result<Created, Error> {
    let mut disks = Vec::new();
    for disk in made.disks {
        let asked = request.disks.iter().any(|asked| asked.volume == disk.volume);
        if !asked || disks.iter().any(|(volume, _)| *volume == disk.volume) {
            return Err(refused(
                who,
                format!("a disk {:?} that was not asked for", clipped(&disk.volume, 80)),
            ));
        }
        disks.push((disk.volume, identity_from(who, disk.identity)?));
    }
    let instance_type = Some(made.instance_type).filter(|text| !text.is_empty());
    if instance_type.as_ref().is_some_and(|text| !printable(text, WORD)) {
        return Err(refused(who, "an invalid instance type"));
    }
    Ok(Created {
        id: id_from(who, made.id)?,
        addresses: addresses_from(who, &made.addresses)?,
        chosen: Chosen { instance_type, ..Chosen::default() },
        disks,
    })
}

pub(crate) fn created_many_to(many: &CreatedMany) -> wire::CreateManyResponse {
    wire::CreateManyResponse {
        made: many.made.iter().map(created_to).collect(),
        rest: many.rest.as_ref().map(error_to).into(),
        ..wire::CreateManyResponse::default()
    }
}

/// Converts the answer to a call for `count` VMs like `request`.
pub(crate) fn created_many_from(
    who: &str,
    many: wire::CreateManyResponse,
    request: &CreateRequest,
    count: u32,
) -> Result<CreatedMany, Error> {
    let wanted = usize::try_from(count).unwrap_or(usize::MAX);
    let rest = many.rest.into_option().map(|rest| error_from(who, rest, Some(&request.user_data)));
    if many.made.is_empty() || many.made.len() > wanted || (many.made.len() < wanted) != rest.is_some() {
        let why = format!(
            "{} VMs of {count}, {} a reason",
            many.made.len(),
            if rest.is_some() { "with" } else { "without" }
        );
        return Err(refused(who, why));
    }
    let made = many.made.into_iter().map(|made| created_from(who, made, request));
    let made = made.collect::<Result<Vec<_>, _>>()?;
    let ids: HashSet<_> = made.iter().map(|made| &made.id).collect();
    if ids.len() != made.len() {
        return Err(refused(who, "one VM twice"));
    }
    Ok(CreatedMany { made, rest })
}

pub(crate) fn identity_to(identity: &DiskIdentity) -> wire::DiskIdentity {
    use wire::disk_identity::Identity;
    let identity = match identity {
        DiskIdentity::Serial(text) => Identity::Serial(text.clone()),
        DiskIdentity::ById(text) => Identity::ById(text.clone()),
        DiskIdentity::Lun(number) => Identity::Lun(*number),
        DiskIdentity::Wwn(text) => Identity::Wwn(text.clone()),
    };
    wire::DiskIdentity { identity: Some(identity), ..wire::DiskIdentity::default() }
}

pub(crate) fn identity_from(
    who: &str,
    identity: MessageField<wire::DiskIdentity>,
) -> Result<DiskIdentity, Error> {
    use wire::disk_identity::Identity;
    let found = match identity.into_option().and_then(|identity| identity.identity) {
        Some(Identity::Serial(text)) => DiskIdentity::Serial(text),
        Some(Identity::ById(text)) => DiskIdentity::ById(text),
        Some(Identity::Lun(number)) => DiskIdentity::Lun(number),
        Some(Identity::Wwn(text)) => DiskIdentity::Wwn(text),
        // An identity of a later kind is unusable here.
        _ => return Err(refused(who, "a disk without an identity that is known here")),
    };
    match &found {
        DiskIdentity::Serial(text) | DiskIdentity::ById(text) | DiskIdentity::Wwn(text)
            // The guest looks for this name below /dev, so it must not lead anywhere else.
            if !printable(text, IDENTITY) || text.contains('/') || text.starts_with('.') =>
        {
            Err(refused(who, format!("{:?} is no identity of a disk", clipped(text, 80))))
        }
        _ => Ok(found),
    }
}

fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Converts a time; `None` for 0 and for a time out of range.
fn time_from(unix_ms: u64) -> Option<SystemTime> {
    let since = (unix_ms > 0).then(|| Duration::from_millis(unix_ms))?;
    SystemTime::UNIX_EPOCH.checked_add(since)
}

pub(crate) fn owned_to(owned: &Owned) -> wire::OwnedVm {
    wire::OwnedVm {
        id: owned.id.to_string(),
        key: owned.key.as_ref().map(ToString::to_string).unwrap_or_default(),
        name: owned.name.clone().unwrap_or_default(),
        state: owned.state.word().to_owned(),
        addresses: texts(&owned.addresses),
        created_unix_ms: owned.created.map(unix_ms).unwrap_or_default(),
        node: owned.node.clone().unwrap_or_default(),
        ..wire::OwnedVm::default()
    }
}

/// Converts one page of a list and adds its ids to `seen`.
pub(crate) fn owned_from(
    who: &str,
    vms: Vec<wire::OwnedVm>,
    seen: &mut HashSet<InstanceId>,
) -> Result<Vec<Owned>, Error> {
    let one = |vm: wire::OwnedVm| {
        let id = id_from(who, vm.id)?;
        if !seen.insert(id.clone()) {
            return Err(refused(who, format!("VM {id} twice in one list")));
        }
        let state = OwnedState::from_word(&vm.state).ok_or_else(|| {
            refused(who, format!("VM {id} is {:?}, which is no state", clipped(&vm.state, 40)))
        })?;
        let key = (!vm.key.is_empty()).then(|| IdempotencyKey::parse(vm.key)).transpose();
        Ok(Owned {
            key: key.map_err(|error| refused(who, format!("VM {id}: {error}")))?,
            name: (!vm.name.is_empty()).then(|| clipped(&vm.name, WORD)),
            state,
            addresses: addresses_from(who, &vm.addresses)?,
            created: time_from(vm.created_unix_ms),
            // A truncated name could be that of another node.
            node: (!vm.node.is_empty() && vm.node.len() <= NODE).then_some(vm.node),
            id,
        })
    };
    vms.into_iter().map(one).collect()
}

pub(crate) fn event_to(event: &ProviderEvent) -> wire::Event {
    let mut out = wire::Event { id: event.id.to_string(), ..wire::Event::default() };
    match &event.kind {
        EventKind::Interruption { at } => {
            out.kind = "interruption".to_owned();
            out.at_unix_ms = unix_ms(*at);
        }
        EventKind::Ended { reason } => {
            out.kind = "ended".to_owned();
            out.reason.clone_from(reason);
        }
    }
    out
}

/// Converts an event. `None` for an unknown kind or an invalid id: an event is a hint, not a fact to rely on.
pub(crate) fn event_from(event: wire::Event) -> Option<ProviderEvent> {
    let id = InstanceId::new(event.id).ok()?;
    let kind = match event.kind.as_str() {
        "interruption" => EventKind::Interruption { at: time_from(event.at_unix_ms)? },
        "ended" => EventKind::Ended { reason: clipped(&event.reason, TEXT) },
        _ => return None,
    };
    Some(ProviderEvent { id, kind })
}
