//! Makes pods with volumes as the CSI wrapper, kubelet, the container runtime and the shim do: records, published
//! targets, bundles and copied markers. All components behind them are real.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use peerpod_client::{AgentClient, Annotations, ContainerSpec, Output, ShimClient, copy_file, exec_request};
use peerpod_proto::agent::{CopyFileRequest, CreateContainerRequest, CreateSandboxRequest};
use peerpod_volume::descriptor::{Attach, VERSION};
use peerpod_volume::records::{self, Record, Records};
use peerpod_volume::{Credentials, FsGroup, FsGroupPolicy, GuestVolume, Mode, Source, VolumeId};
use peerpod_world::{Daemons, Pod, Settings, World};

use crate::machines::{self, Place};
use crate::{fresh_id, stop_in_time};

/// Node with disks.
pub struct Node {
    /// The world that contains the node.
    pub world: World,
    /// Relay and node.
    pub daemons: Daemons,
    /// The CSI wrapper's records.
    pub records: Records,
    /// Environment of the machines, if the VMs are machines that boot.
    pub machines: Option<Place>,
}

impl Node {
    /// Starts a node with the local provider; its disks are loop devices.
    pub async fn start() -> Node {
        let world = World::new().unwrap();
        let disks = disks(&world);
        Node::begin(world, Settings::none().set("provider.local.volumes-dir", disks), None).await
    }

    /// Starts a node with machines that boot as its VMs; its disks are virtio disks.
    pub async fn start_in_machines() -> Node {
        let place = Place::new();
        let settings = place.settings.clone().set("provider.libvirt.volume-dirs", vec![disks(&place.world)]);
        Node::begin(place.world.clone(), settings, Some(place)).await
    }

    async fn begin(world: World, settings: Settings, machines: Option<Place>) -> Node {
        let daemons = Daemons::start(&world, settings).await.unwrap();
        let records = Records::new(world.folder().join("state/volumes"));
        Node { world, daemons, records, machines }
    }

    /// Returns the kubelet's folder.
    pub fn kubelet(&self) -> PathBuf {
        self.world.folder().join("kubelet")
    }

    /// Makes an empty disk.
    pub fn disk(&self, name: &str, mib: u64) -> Disk {
        let file = self.world.folder().join("disks").join(name);
        let source = if self.machines.is_some() { file.display().to_string() } else { name.into() };
        let disk = Disk { name: name.into(), file, source };
        fs::File::create(&disk.file).unwrap().set_len(mib << 20).unwrap();
        disk
    }

    /// Makes a pod with these volumes: recorded and published, not started.
    pub fn pod(&self, name: &str, volumes: Vec<Volume>) -> PodToBe {
        let (name, uid) = (name.to_owned(), fresh_id("uid"));
        let volumes = volumes.into_iter().map(|volume| self.publish(&name, &uid, volume)).collect();
        PodToBe { name, uid, volumes }
    }

    fn publish(&self, pod: &str, uid: &str, volume: Volume) -> Record {
        let id = VolumeId::of("test.driver", &volume.handle);
        let target_path = self.kubelet().join("pods").join(uid).join(&volume.handle).join("mount");
        let marker = format!("{id}{id}");
        if volume.mode != Mode::Block {
            fs::create_dir_all(&target_path).unwrap();
            if volume.tmpfs {
                mount(Some("tmpfs"), &target_path, Some("tmpfs"), MsFlags::empty(), Some("size=64k"))
                    .unwrap();
            }
            fs::write(target_path.join(records::MARKER), &marker).unwrap();
        }
        let record = Record {
            version: VERSION,
            volume: GuestVolume {
                version: VERSION,
                id,
                name: format!("pvc-{}", volume.handle),
                source: volume.source,
                mode: volume.mode,
                read_only: volume.read_only,
            },
            pod: records::Pod { uid: uid.into(), namespace: "default".into(), name: pod.into() },
            driver: "test.driver".into(),
            handle: volume.handle,
            target_path,
            marker,
            fence: Some(1),
        };
        self.records.put_credentials(uid, &record.volume.id, volume.credentials.as_ref()).unwrap();
        self.records.put(&record).unwrap();
        record
    }

    /// Calls CreateVM, StartVM and CreateSandbox for a pod.
    ///
    /// # Errors
    /// Returns the error of the failed call.
    pub async fn boot(&self, pod: PodToBe) -> anyhow::Result<Running> {
        let booted = boot(&self.world, &self.daemons.hypervisor_socket(), *machines::PATIENCE, pod).await;
        booted.with_context(|| self.daemons.log_tails())
    }

    /// Boots a pod like [`Node::boot`]; panics on an error.
    pub async fn run(&self, pod: PodToBe) -> Running {
        let consoles = || self.machines.as_ref().map(Place::consoles).unwrap_or_default();
        self.boot(pod)
            .await
            .unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", self.daemons.log_tails(), consoles()))
    }

    /// Calls StopVM, and unpublishes the volumes when the sandbox is gone, as kubelet does.
    pub async fn stop(&self, running: Running) {
        stop_in_time(&running.shim, &running.id).await.unwrap();
        self.daemons.gone(&running.id, *machines::PATIENCE).await.unwrap();
        for record in &running.pod.volumes {
            self.records.remove(&record.pod, &record.volume.id).unwrap();
            umount2(&record.target_path, MntFlags::MNT_DETACH).ok();
        }
    }

    /// Returns the files of this node's disks that are loop devices now.
    pub fn loops(&self) -> Vec<String> {
        self.loop_devices("BACK-FILE")
    }

    fn loop_devices(&self, column: &str) -> Vec<String> {
        let list = ["--list", "--noheadings", "--output", &format!("BACK-FILE,{column}")];
        let ours = self.world.folder().display().to_string();
        let listed = run("losetup", &list);
        let lines = listed.lines().filter(|line| line.starts_with(&ours));
        lines.filter_map(|line| line.split_whitespace().nth(1)).map(str::to_owned).collect()
    }
}

/// Calls CreateVM, StartVM and CreateSandbox for a pod with published volumes, through the given hypervisor socket.
///
/// # Errors
/// Returns the error of the failed call.
pub async fn boot(
    world: &World,
    hypervisor: &Path,
    patience: Duration,
    pod: PodToBe,
) -> anyhow::Result<Running> {
    let (id, network) = (fresh_id("volumes"), world.pod()?);
    let shim = ShimClient::connect(hypervisor).await?;
    let annotations = Annotations::new("default", &pod.name);
    let socket = shim.create_vm(&id, annotations, &network.namespace().path()).await?;
    let running = async {
        let started = tokio::time::timeout(patience, shim.start_vm(&id)).await;
        started.context("StartVM was not answered")??;
        let agent = AgentClient::connect(&socket).await?;
        let mut request = CreateSandboxRequest::new();
        request.sandbox_id.clone_from(&id);
        agent.create_sandbox(&request).await?;
        anyhow::Ok(agent)
    };
    match running.await {
        Ok(agent) => {
            Ok(Running { id, folder: world.folder().to_owned(), pod, shim, agent, _network: network })
        }
        // kubelet also removes a sandbox that did not start.
        Err(error) => {
            shim.stop_vm(&id).await.ok();
            Err(error)
        }
    }
}

/// Returns the folder of the disks' files, which it creates.
fn disks(world: &World) -> String {
    let folder = world.folder().join("disks");
    fs::create_dir_all(&folder).unwrap();
    folder.display().to_string()
}

impl Drop for Node {
    fn drop(&mut self) {
        // Unmount the leftovers of a failed test.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let ours = self.world.folder().join("kubelet").display().to_string();
        for place in
            mounts.lines().filter_map(|line| line.split(' ').nth(4)).filter(|at| at.starts_with(&ours))
        {
            umount2(place, MntFlags::MNT_DETACH).ok();
        }
        // Detach the loop devices of its VMs. The kernel gives an open device to no other file.
        let held: Vec<_> = self.loop_devices("NAME").iter().map(fs::File::open).collect();
        for device in self.loop_devices("NAME") {
            Command::new("losetup").args(["--detach", &device]).status().ok();
        }
        drop(held);
    }
}

/// Disk that is a file of the test machine.
pub struct Disk {
    /// The test's name for it.
    pub name: String,
    /// File with its content.
    pub file: PathBuf,
    /// The provider's name for it.
    pub source: String,
}

impl Disk {
    /// Writes to the disk from outside the VM.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        fs::OpenOptions::new().write(true).open(&self.file).unwrap().write_all_at(bytes, at).unwrap();
    }

    /// Returns the whole content.
    pub fn read(&self) -> Vec<u8> {
        fs::read(&self.file).unwrap()
    }

    /// Enlarges the disk as its driver would. The node has to make the new size visible in the VM.
    pub fn grow(&self, mib: u64) {
        fs::OpenOptions::new().write(true).open(&self.file).unwrap().set_len(mib << 20).unwrap();
    }

    /// Returns a volume on this disk.
    pub fn volume(&self) -> Volume {
        Volume {
            handle: self.name.clone(),
            source: Source::AttachedBlock {
                volume: self.source.clone(),
                zone: None,
                attach: Attach::Provider,
            },
            mode: Mode::Filesystem { fs_type: None, mount_options: Vec::new(), fs_group: None },
            read_only: false,
            tmpfs: false,
            credentials: None,
        }
    }
}

/// Runs a tool, which must succeed, and returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Volume as a pod requests it.
pub struct Volume {
    /// The CSI volume's handle.
    pub handle: String,
    /// Source of its data.
    pub source: Source,
    /// Mode of use.
    pub mode: Mode,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether the published target is a separate tmpfs.
    pub tmpfs: bool,
    /// Credentials of the mount.
    pub credentials: Option<Credentials>,
}

impl Volume {
    /// Sets the file system.
    pub fn fs(mut self, kind: &str) -> Volume {
        if let Mode::Filesystem { fs_type, .. } = &mut self.mode {
            *fs_type = Some(kind.to_owned());
        }
        self
    }

    /// Sets the group and its policy.
    pub fn group(mut self, gid: u32, policy: FsGroupPolicy) -> Volume {
        if let Mode::Filesystem { fs_group, .. } = &mut self.mode {
            *fs_group = Some(FsGroup { gid, policy });
        }
        self
    }

    /// Makes it a raw device.
    pub fn block(mut self) -> Volume {
        self.mode = Mode::Block;
        self
    }

    /// Makes it read-only.
    pub fn read_only(mut self) -> Volume {
        self.read_only = true;
        self
    }

    /// Publishes it on a separate tmpfs.
    pub fn published_as_tmpfs(mut self) -> Volume {
        self.tmpfs = true;
        self
    }
}

/// Pod with published volumes, not started.
pub struct PodToBe {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Its volumes, as recorded.
    pub volumes: Vec<Record>,
}

/// Mount of a container.
pub struct At {
    /// Index of the volume in the pod's list.
    pub volume: usize,
    /// The mounted part of the volume (subPath).
    pub path: &'static str,
    /// Path in the container.
    pub place: &'static str,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Host path to which kubelet bound the part; if `None`, the part is below the target.
    pub source: Option<PathBuf>,
}

/// Returns a mount of a whole volume at this path.
pub fn at(volume: usize, place: &'static str) -> At {
    At { volume, path: "", place, read_only: false, source: None }
}

/// Means by which a container's mounts can be matched to volumes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The host path in the bundle.
    Bundle,
    /// The marker that the shim copied.
    Marker,
    /// Neither of them.
    Nothing,
}

/// Pod that runs in its VM.
pub struct Running {
    /// The sandbox id.
    pub id: String,
    folder: PathBuf,
    /// The pod.
    pub pod: PodToBe,
    /// The shim's connection to the node.
    pub shim: ShimClient,
    /// The shim's connection to the agent.
    pub agent: AgentClient,
    _network: Pod,
}

impl Running {
    /// Returns the shim's CreateContainer request, and the CopyFile requests that precede it.
    pub fn container(
        &self,
        name: &str,
        mounts: &[At],
        by: By,
    ) -> (Vec<CopyFileRequest>, CreateContainerRequest) {
        let bundle = self.folder.join("bundles").join(&self.id).join(name);
        fs::create_dir_all(&bundle).unwrap();
        let mut spec = ContainerSpec::new(name, &["sleep", "infinity"]);
        let (mut copies, mut listed) = (Vec::new(), Vec::new());
        for (number, mount) in mounts.iter().enumerate() {
            let record = &self.pod.volumes[mount.volume];
            let base = Path::new(mount.place).file_name().unwrap().to_str().unwrap();
            let copied = format!("{name}-{number:016x}-{base}");
            let mut folder = copy_file(&copied, 0, b"");
            folder.file_mode = 0o40755;
            folder.dir_mode = 0o40750;
            copies.push(folder);
            if by != By::Nothing && mount.path.is_empty() {
                let marker =
                    copy_file(&format!("{copied}/{}", records::MARKER), 0o444, record.marker.as_bytes());
                copies.push(marker);
            }
            let source = mount.source.clone().unwrap_or_else(|| record.target_path.join(mount.path));
            listed.push(serde_json::json!({ "destination": mount.place, "type": "bind", "source": source }));
            spec = spec.bind(&format!("/run/kata-containers/shared/containers/{copied}"), mount.place);
        }
        if by == By::Bundle {
            let config = serde_json::json!({ "ociVersion": "1.1.0", "mounts": listed });
            fs::write(bundle.join("config.json"), config.to_string()).unwrap();
        }
        let spec = spec.annotation("io.katacontainers.pkg.oci.bundle_path", bundle.to_str().unwrap());
        let mut request = spec.request();
        for (mount, sent) in mounts.iter().zip(request.OCI.mut_or_insert_default().Mounts.iter_mut().skip(1))
        {
            if mount.read_only {
                sent.options = ["rbind", "ro"].map(str::to_owned).into();
            }
        }
        (copies, request)
    }

    /// Creates and starts a container with these mounts.
    ///
    /// # Errors
    /// Returns the error of the agent or of the relay.
    pub async fn try_create(&self, name: &str, mounts: &[At], by: By) -> Result<(), peerpod_client::Error> {
        let (copies, request) = self.container(name, mounts, by);
        for copied in &copies {
            self.agent.copy_file(copied).await?;
        }
        self.agent.create_container(&request).await?;
        self.agent.start_container(name).await
    }

    /// Creates and starts a container with these mounts; panics on an error.
    pub async fn create(&self, name: &str, mounts: &[At]) {
        self.try_create(name, mounts, By::Bundle).await.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// Kills and removes a container.
    pub async fn remove(&self, name: &str) {
        self.agent.signal_process(name, "", 9).await.unwrap();
        self.agent.remove_container(name).await.unwrap();
    }

    /// Runs a script in the container, and returns its output and exit code.
    pub async fn try_shell(&self, container: &str, script: &str) -> Output {
        let request = exec_request(container, &fresh_id("exec"), &["/bin/sh", "-c", script]);
        self.agent.exec(&request).await.unwrap()
    }

    /// Runs a script in the container, which must succeed, and returns its output.
    pub async fn shell(&self, container: &str, script: &str) -> String {
        let output = self.try_shell(container, script).await;
        let words = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(output.status, 0, "{script}: {} {}", words(&output.stdout), words(&output.stderr));
        words(&output.stdout)
    }
}

/// Runs a pod with three volumes, which writes a canary to each volume (`again`: finds it there). The volumes hold no
/// data of other pods.
pub async fn lives_once(node: &Node, pod: usize, disks: &[Disk], again: bool) {
    let volumes = disks.iter().map(Disk::volume).collect();
    let running = node.run(node.pod(&format!("pod-{pod}"), volumes)).await;
    running.create("main", &[at(0, "/v0"), at(1, "/v1"), at(2, "/v2")]).await;
    for n in 0..disks.len() {
        let canary = format!("canary {pod} {n}");
        let write = format!("ls -A /v{n}; echo '{canary}' > /v{n}/canary; sync");
        let script = if again { format!("cat /v{n}/canary") } else { write };
        let seen = running.shell("main", &script).await;
        assert_eq!(seen.trim(), if again { canary.as_str() } else { "lost+found" });
    }
    node.stop(running).await;
}
