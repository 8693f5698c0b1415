//! Rewrites a CreateContainer with volumes: each volume becomes a Storage (or a Device) that the guest fills in, and
//! the mounts on it point to its mount point in the VM.

use std::path::Path;

use peerpod_link::frame::MAX_PAYLOAD;
use peerpod_proto::intercept::{CreateContainerRequest, Device, Mount, Storage};
use peerpod_proto::ttrpc_frame::Request;
use protobuf::Message;

use super::bundle::{self, Spec, VolumePath};
use super::{COPIES, Copies, Folder, Volume, is_volume_id};

/// Folder in the VM in which the volumes of containers are mounted.
const VOLUMES: &str = "/run/peerpod/volumes";
/// Driver of a Storage, and type of a Device, that the guest fills in.
const OURS: &str = "peerpod-volume";
/// Annotation with the bundle's folder on this node.
const BUNDLE: &str = "io.katacontainers.pkg.oci.bundle_path";

/// Returns the request for the guest, or the reason to refuse the container. Reads the bundle.
pub(crate) fn create_container(
    payload: &[u8],
    volumes: &[Volume],
    copies: &mut Copies,
) -> Result<Vec<u8>, String> {
    let unreadable = |error: protobuf::Error| format!("CreateContainer cannot be decoded: {error}");
    let mut request = Request::parse_from_bytes(payload).map_err(unreadable)?;
    let mut container = CreateContainerRequest::parse_from_bytes(&request.payload).map_err(unreadable)?;
    let sent = container.clone();
    let result = rewrite(&mut container, volumes, copies);
    copies.forget(&container.container_id);
    result.map_err(|why| format!("volumes of container {}: {why}", container.container_id))?;
    if container == sent {
        // Passed on byte for byte: encoding it again would reorder its maps.
        return Ok(payload.to_vec());
    }
    request.payload = container.write_to_bytes().map_err(unreadable)?;
    let bytes = request.write_to_bytes().map_err(unreadable)?;
    let size = bytes.len();
    if size > MAX_PAYLOAD {
        return Err(format!("CreateContainer with its volumes has {size} bytes, more than {MAX_PAYLOAD}"));
    }
    Ok(bytes)
}

fn rewrite(
    container: &mut CreateContainerRequest,
    volumes: &[Volume],
    copies: &Copies,
) -> Result<(), String> {
    // Only the relay may use this driver and type.
    if container.storages.iter().any(|storage| storage.driver == OURS)
        || container.devices.iter().any(|device| device.type_ == OURS)
    {
        return Err(format!("the request already has a {OURS}, which only the relay adds"));
    }
    let Some(oci) = container.OCI.as_mut() else { return Ok(()) };
    let spec = match oci.Annotations.get(BUNDLE) {
        Some(bundle) => Spec::read(bundle),
        None => Err(format!("the annotation {BUNDLE} is missing")),
    };
    let sources: Vec<&str> = oci.Mounts.iter().map(|mount| mount.source.as_str()).collect();
    if let Some(folder) = copies.unused(&container.container_id, &sources) {
        return Err(format!(
            "the shim copied a volume to {folder}, and no mount of the container has that source"
        ));
    }
    let mut used = vec![false; volumes.len()];
    for mount in oci.Mounts.iter_mut().filter(|mount| is_bind(mount)) {
        let Some(VolumePath { volume, path }) = place(mount, spec.as_ref(), volumes, copies)? else {
            continue;
        };
        let of = &volumes[volume];
        used[volume] = true;
        // A shim that handles the volume itself (Kata's direct volumes) adds a Storage of a disk that no VM has.
        container.storages.retain(|storage| storage.mount_point != mount.source);
        let source = Path::new(VOLUMES).join(&of.id).join(path);
        mount.source = source
            .to_str()
            .ok_or("a subPath that is not UTF-8 cannot be mounted")?
            .trim_end_matches('/')
            .into();
        if of.read_only {
            mount.options.retain(|option| option != "rw" && option != "ro");
            mount.options.push("ro".into());
        }
    }
    for (volume, _) in volumes.iter().zip(used).filter(|(_, used)| *used) {
        container.storages.push(Storage {
            driver: OURS.into(),
            source: volume.id.clone(),
            mount_point: format!("{VOLUMES}/{}", volume.id),
            ..Storage::default()
        });
    }
    devices(container, spec.as_ref().ok(), volumes)
}

fn is_bind(mount: &Mount) -> bool {
    mount.type_ == "bind" || mount.options.iter().any(|option| option == "bind" || option == "rbind")
}

/// Finds the volume of a mount by bundle and marker, which must not contradict each other.
fn place(
    mount: &Mount,
    spec: Result<&Spec, &String>,
    volumes: &[Volume],
    copies: &Copies,
) -> Result<Option<VolumePath>, String> {
    let here = |why: &str| format!("mount {}: {why}", mount.destination);
    let copied = copies.of(&mount.source);
    let marked = match copied {
        Some(Folder::Volume(id)) => volumes.iter().position(|volume| volume.id == *id),
        Some(Folder::Stranger) => {
            return Err(here(
                "it has the marker of a volume that the pod did not have when its VM was made; start the pod \
                 anew",
            ));
        }
        _ => None,
    };
    let by_bundle = match spec.map(|spec| spec.source(&mount.destination)) {
        Ok(Some(source)) => bundle::place(volumes, source).map_err(|why| here(&why))?,
        Ok(None) => None,
        // A mount that the Go shim does not copy keeps kubelet's path.
        Err(_) => bundle::place(volumes, Path::new(&mount.source)).map_err(|why| here(&why))?,
    };
    if let (Some(place), Some(marked)) = (&by_bundle, marked)
        && place.volume != marked
    {
        let (one, other) = (&volumes[place.volume].name, &volumes[marked].name);
        return Err(here(&format!("its source names volume {one}, its marker {other}")));
    }
    if let Some(place) = by_bundle.or(marked.map(|volume| VolumePath { volume, path: "".into() })) {
        return Ok(Some(place));
    }
    let why = match spec {
        Ok(spec) => spec.source(&mount.destination).and_then(|source| subpath_of(volumes, source)).map(|name| {
            format!(
                "it is a subPath of volume {name}, and the relay cannot see it: mount kubelet's folder in the \
                 relay's container at the same path, with mountPropagation HostToContainer"
            )
        }),
        // A subPath of a volume is copied as an empty folder; only the bundle distinguishes it from others.
        Err(why) => {
            let is_empty_copy = copied == Some(&Folder::Empty) && mount.source.starts_with(COPIES);
            (is_empty_copy && volumes.iter().any(|volume| !volume.block)).then(|| {
                format!(
                    "it may be a subPath of a volume, and the container's bundle cannot be read to decide: {why}"
                )
            })
        }
    };
    why.map_or(Ok(None), |why| Err(here(&why)))
}

/// Returns the volume named in the path to which kubelet binds a part of it:
/// `…/volume-subpaths/VOLUME/CONTAINER/NUMBER`.
fn subpath_of<'v>(volumes: &'v [Volume], source: &Path) -> Option<&'v str> {
    let mut parts = source.iter().skip_while(|part| *part != "volume-subpaths").skip(1);
    let named = parts.next()?;
    volumes.iter().map(|volume| volume.name.as_str()).find(|name| named == *name)
}

/// Adds the raw volumes. Each is published as a folder with a device that is named after the volume. The container
/// runtime lists it at the container's path joined with that name.
fn devices(
    container: &mut CreateContainerRequest,
    spec: Option<&Spec>,
    volumes: &[Volume],
) -> Result<(), String> {
    let Some(linux) = container.OCI.as_mut().and_then(|oci| oci.Linux.as_mut()) else { return Ok(()) };
    let mut listed: Vec<String> = linux.Devices.iter().map(|device| device.Path.clone()).collect();
    listed.extend(spec.iter().flat_map(|spec| spec.devices()).map(str::to_owned));
    listed.sort_unstable();
    listed.dedup();
    for path in listed {
        let Some((place, id)) = path.rsplit_once('/').filter(|(_, id)| is_volume_id(id)) else { continue };
        let Some(volume) = volumes.iter().find(|volume| volume.block && volume.id == id) else {
            return Err(format!(
                "device {place}: it is a raw volume that the pod did not have when its VM was made; start \
                 the pod anew"
            ));
        };
        for device in linux.Devices.iter_mut().filter(|device| device.Path == path) {
            device.Path = place.to_owned();
        }
        // A shim that handles the volume as its own device adds a Device that no VM has.
        container.devices.retain(|device| device.container_path != path);
        container.devices.push(Device {
            id: volume.id.clone(),
            type_: OURS.into(),
            vm_path: volume.id.clone(),
            container_path: place.to_owned(),
            ..Device::default()
        });
    }
    Ok(())
}
