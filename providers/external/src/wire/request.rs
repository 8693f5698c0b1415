//! Converts requests.

use peerpod_proto::provider as wire;
use peerpod_provider_api::{
    Arch, Confidential, CreateRequest, DiskRequest, Error, IdempotencyKey, Market, Placement, Size,
};
use protobuf::MessageField;

use super::{clipped, printable};
use crate::Owner;

/// Longest name of a cluster, node or installation.
const OWNER: usize = 253;

pub(crate) fn owner_to(owner: &Owner) -> MessageField<wire::Owner> {
    MessageField::some(wire::Owner {
        cluster_id: owner.cluster_id.clone(),
        node_name: owner.node_name.clone(),
        installation: owner.installation.clone(),
        ..wire::Owner::default()
    })
}

pub(crate) fn owner_from(owner: MessageField<wire::Owner>) -> Result<Owner, Error> {
    let wire::Owner { cluster_id, node_name, installation, .. } = owner.into_option().unwrap_or_default();
    for (what, text, least) in
        [("cluster id", &cluster_id, 1), ("node name", &node_name, 0), ("installation", &installation, 1)]
    {
        if text.len() < least || text.len() > OWNER || text.chars().any(char::is_control) {
            return Err(Error::invalid(format!("the owner's {what} is invalid: {:?}", clipped(text, 80))));
        }
    }
    Ok(Owner { cluster_id, node_name, installation })
}

pub(crate) fn disk_to(disk: &DiskRequest) -> wire::Disk {
    let DiskRequest { volume, read_only, zone } = disk;
    wire::Disk {
        volume: volume.clone(),
        read_only: *read_only,
        zone: zone.clone().unwrap_or_default(),
        ..wire::Disk::default()
    }
}

pub(crate) fn disk_from(disk: wire::Disk) -> Result<DiskRequest, Error> {
    if !printable(&disk.volume, 1024) {
        return Err(Error::invalid(format!("{:?} is no volume id", clipped(&disk.volume, 80))));
    }
    Ok(DiskRequest { volume: disk.volume, read_only: disk.read_only, zone: named(disk.zone) })
}

pub(crate) fn request_to(
    owner: &Owner,
    request: &CreateRequest,
    key: Option<&IdempotencyKey>,
) -> wire::CreateRequest {
    let digest = request.digest();
    // Destructured without `..`: a new field does not compile until it has a field in the protocol.
    let CreateRequest {
        name,
        user_data,
        size: Size { vcpus, memory_mib, gpus, gpu_model },
        instance_type,
        image,
        disks,
        second_nic,
        labels,
        arch,
        confidential,
        market,
        zones,
        public_ip,
        placement,
    } = request.clone();
    wire::CreateRequest {
        owner: owner_to(owner),
        key: key.map(ToString::to_string).unwrap_or_default(),
        digest,
        name,
        user_data: user_data.into_bytes(),
        vcpus,
        memory_mib,
        gpus,
        gpu_model: gpu_model.unwrap_or_default(),
        instance_type: instance_type.unwrap_or_default(),
        image: image.unwrap_or_default(),
        disks: disks.iter().map(disk_to).collect(),
        labels: labels.into_iter().collect(),
        second_nic,
        arch: arch.map(|arch| arch.word().to_owned()).unwrap_or_default(),
        confidential: confidential.map(|one| one.word().to_owned()).unwrap_or_default(),
        market: market.map(|market| market.word().to_owned()).unwrap_or_default(),
        zones,
        public_ip,
        placement: placement.map(String::from).unwrap_or_default(),
        ..wire::CreateRequest::default()
    }
}

fn named(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

/// Looks up a word that both ends define. A word of a later version is unsupported.
fn word<T>(field: &str, text: &str, known: impl Fn(&str) -> Option<T>) -> Result<Option<T>, Error> {
    if text.is_empty() {
        return Ok(None);
    }
    let unknown = || Error::unsupported(field, format!("{field} {:?} is not known here", clipped(text, 40)));
    known(text).ok_or_else(unknown).map(Some)
}

pub(crate) fn request_from(request: wire::CreateRequest) -> Result<CreateRequest, Error> {
    let name = clipped(&request.name, 80);
    let user_data = String::from_utf8(request.user_data)
        .map_err(|_| Error::invalid(format!("create of {name}: user-data is not UTF-8")))?;
    let disks = request.disks.into_iter().map(disk_from).collect::<Result<Vec<_>, _>>()?;
    let size = Size {
        vcpus: request.vcpus,
        memory_mib: request.memory_mib,
        gpus: request.gpus,
        gpu_model: named(request.gpu_model),
    };
    Ok(CreateRequest {
        name: request.name,
        user_data,
        size,
        instance_type: named(request.instance_type),
        image: named(request.image),
        disks,
        second_nic: request.second_nic,
        labels: request.labels.into_iter().collect(),
        arch: word("arch", &request.arch, Arch::from_word)?,
        confidential: word("confidential", &request.confidential, Confidential::from_word)?,
        market: word("market", &request.market, Market::from_word)?,
        zones: request.zones,
        public_ip: request.public_ip,
        placement: named(request.placement).map(Placement::new).transpose()?,
    })
}

pub(crate) fn key_from(key: String) -> Result<IdempotencyKey, Error> {
    Ok(IdempotencyKey::parse(key)?)
}
