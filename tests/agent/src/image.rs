//! Pulls a container's image like the real agent. For a Storage of driver `image_guest_pull` it calls the confidential
//! data hub's socket. The pod's own container is an exception: its program comes with the VM image.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, umount2};
use peerpod_proto::agent::CreateContainerRequest;
use peerpod_proto::hub::ImagePullRequest;
use peerpod_proto::hub_ttrpc::ImagePullServiceClient;
use ttrpc::asynchronous::Client;
use ttrpc::{Code, context};

use crate::error;

/// Annotations with the container's type, of containerd and of CRI-O.
const TYPES: [&str; 2] = ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"];
const DRIVER: &str = "image_guest_pull";
const HUB: &str = "unix:///run/confidential-containers/cdh.sock";
/// Registry of the recorded shims' images. Such containers run in the VM's own root, because replays have no access to
/// that registry.
const RECORDED: &str = "docker.io/";
/// The real agent's `image_pull_timeout`.
const TIMEOUT: Duration = Duration::from_secs(20 * 60);

/// Pulls the container's image and returns the folder of its root; `None` if the container has no image to pull.
pub(crate) async fn pull(root: &Path, request: &CreateContainerRequest) -> ttrpc::Result<Option<PathBuf>> {
    let Some(storage) = request.storages.iter().find(|storage| storage.driver == DRIVER) else {
        return Ok(None);
    };
    if TYPES.iter().any(|key| request.OCI.Annotations.get(*key).is_some_and(|kind| kind == "sandbox")) {
        return Ok(None);
    }
    if storage.source.starts_with(RECORDED) {
        return Ok(None);
    }
    let bundle = root.join(&request.container_id);
    std::fs::create_dir_all(&bundle).map_err(error::io)?;
    let mut pull = ImagePullRequest::new();
    pull.image_url.clone_from(&storage.source);
    pull.bundle_path = bundle.to_string_lossy().into_owned();
    let client = Client::connect(HUB).await?;
    let hub = ImagePullServiceClient::new(client);
    hub.pull_image(context::with_duration(TIMEOUT), &pull)
        .await
        .map_err(|failed| error::status(Code::INTERNAL, format!("pull image: {failed}")))?;
    Ok(Some(bundle.join("rootfs")))
}

/// Unmounts the container's root; a missing mount is fine.
pub(crate) fn unmount(rootfs: &Path) {
    umount2(rootfs, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).ok();
}
