//! Runs the wrapper, the node and a VM together. Pods with volumes come and go while both roles of the wrapper, the
//! node and the VM are killed at random.
//!
//! All data that a container synced persists. No disk is ever formatted again, stays attached to a deleted VM, or is
//! lost. The guest answers kubelet's calls about a volume.

#![cfg(test)]

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_proto::csi::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    CreateVolumeRequest, CreateVolumeResponse, Empty, NodeExpandVolumeRequest, NodeExpandVolumeResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest,
    NodeUnpublishVolumeRequest, VolumeCapability,
};
use peerpod_test_csi::grpc::Client;
use peerpod_test_csi::{Driver, Folder, Wrapper, long, report};
use peerpod_tests::volumes::{At, By, Node, PodToBe, Running, boot};
use peerpod_tests::{Dice, PATIENCE};
use peerpod_volume::records::Records;
use peerpod_world::{Sight, World, eventually};
use protobuf::Message;

const DRIVER: &str = "mock.csi.test";
const VOLUMES: usize = 3;
/// `VolumeUsage.Unit`.
const BYTES: i32 = 1;
/// kubelet and the sidecars repeat unanswered calls.
const AGAIN: Duration = Duration::from_millis(50);
/// Time limit of the repetitions, on a busy machine with random kills.
const PERSEVERANCE: Duration = Duration::from_secs(90);

/// A disk, and its expected content.
struct Disk {
    id: String,
    context: HashMap<String, String>,
    file: PathBuf,
    /// Identifier of its filesystem, once it has one.
    uuid: Option<[u8; 16]>,
    /// Lines with a confirmed sync by a container.
    synced: usize,
}

/// State of a cycle, without the processes that are killed.
#[derive(Clone)]
struct Cycle {
    world: World,
    hypervisor: PathBuf,
    records: Records,
    node: PathBuf,
    controller: PathBuf,
    kubelet: PathBuf,
    filesystem: &'static str,
}

fn capability(filesystem: &str) -> VolumeCapability {
    let mut capability = VolumeCapability::new();
    capability.access_mode.mut_or_insert_default().mode = 1;
    capability.mut_mount().fs_type = filesystem.to_owned();
    capability
}

impl Cycle {
    /// Repeats a call until it succeeds.
    async fn persist<A: Message>(&self, socket: &Path, method: &str, request: &impl Message) -> Result<A> {
        let mut last = None;
        let answered = tokio::time::timeout(PERSEVERANCE, async {
            loop {
                let answer = match Client::connect(socket).await {
                    Ok(mut client) => client.unary::<A>(method, request).await,
                    Err(error) => Err(error),
                };
                match answer {
                    Ok(answer) => return answer,
                    Err(error) => last = Some(error),
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
        answered
            .await
            .map_err(|_| last.unwrap_or_else(|| anyhow::anyhow!("no answer")))
            .context(method.to_owned())
    }

    fn request(
        &self,
        disk: &(String, HashMap<String, String>),
        uid: &str,
        pod: &str,
    ) -> NodePublishVolumeRequest {
        let (id, context) = disk;
        let target = self.kubelet.join(format!("pods/{uid}/volumes/kubernetes.io~csi/pv-{id}/mount"));
        let mut request = NodePublishVolumeRequest {
            volume_id: id.clone(),
            target_path: target.display().to_string(),
            volume_context: context.clone(),
            ..Default::default()
        };
        request.volume_capability = Some(capability(self.filesystem)).into();
        for (key, value) in [("uid", uid), ("name", pod), ("namespace", "default")] {
            request.volume_context.insert(format!("csi.storage.k8s.io/pod.{key}"), value.to_owned());
        }
        request
    }

    /// Runs one pod from publish to unpublish. The inner result is the pod's failure, if any. In all cases the pod is
    /// gone and its volumes are unpublished on return.
    async fn cycle(
        &self,
        number: usize,
        disks: Vec<(String, HashMap<String, String>)>,
    ) -> Result<Result<()>> {
        let (uid, name) = (format!("uid-{number}"), format!("web-{}", number % 2));
        let requests: Vec<_> = disks.iter().map(|disk| self.request(disk, &uid, &name)).collect();
        self.publish(&disks, &requests).await?;
        let lived = self.live(number, &uid, &name).await;
        self.give_back(&requests).await?;
        Ok(lived)
    }

    async fn publish(
        &self,
        disks: &[(String, HashMap<String, String>)],
        requests: &[NodePublishVolumeRequest],
    ) -> Result<()> {
        for (disk, request) in disks.iter().zip(requests) {
            let mut attach = ControllerPublishVolumeRequest {
                volume_id: disk.0.clone(),
                node_id: DRIVER.to_owned(),
                volume_context: disk.1.clone(),
                ..Default::default()
            };
            attach.volume_capability = Some(capability(self.filesystem)).into();
            let _: ControllerPublishVolumeResponse =
                self.persist(&self.controller, "Controller/ControllerPublishVolume", &attach).await?;
            let _: Empty = self.persist(&self.node, "Node/NodePublishVolume", request).await?;
        }
        Ok(())
    }

    async fn give_back(&self, requests: &[NodePublishVolumeRequest]) -> Result<()> {
        for request in requests {
            let unpublish = NodeUnpublishVolumeRequest {
                volume_id: request.volume_id.clone(),
                target_path: request.target_path.clone(),
                ..Default::default()
            };
            let _: Empty = self.persist(&self.node, "Node/NodeUnpublishVolume", &unpublish).await?;
            let detach = ControllerUnpublishVolumeRequest {
                volume_id: request.volume_id.clone(),
                node_id: DRIVER.to_owned(),
                ..Default::default()
            };
            let _: Empty =
                self.persist(&self.controller, "Controller/ControllerUnpublishVolume", &detach).await?;
        }
        Ok(())
    }

    /// Returns the filesystem's size and its used bytes, from kubelet's stats call.
    async fn bytes(&self, request: &NodePublishVolumeRequest) -> Result<(i64, i64)> {
        let asked = NodeGetVolumeStatsRequest {
            volume_id: request.volume_id.clone(),
            volume_path: request.target_path.clone(),
            ..Default::default()
        };
        let stats: NodeGetVolumeStatsResponse =
            self.persist(&self.node, "Node/NodeGetVolumeStats", &asked).await?;
        let usage = stats.usage.iter().find(|usage| usage.unit == BYTES);
        usage.map(|usage| (usage.total, usage.used)).with_context(|| format!("no bytes in {stats:?}"))
    }

    async fn boot(&self, uid: &str, name: &str) -> Result<Running> {
        let volumes = self.records.of_pod(uid)?;
        ensure!(volumes.len() == VOLUMES, "records: {volumes:?}");
        let pod = PodToBe { name: name.into(), uid: uid.into(), volumes };
        boot(&self.world, &self.hypervisor, PATIENCE, pod).await
    }

    /// Boots a VM, appends a line to each volume, and stops it.
    async fn live(&self, number: usize, uid: &str, name: &str) -> Result<()> {
        let running = self.boot(uid, name).await?;
        let lived = tokio::time::timeout(PATIENCE * 2, self.write(number, &running)).await;
        // Also when the VM was killed.
        running.shim.stop_vm(&running.id).await?;
        lived.context("its containers did not answer")?
    }

    async fn write(&self, number: usize, running: &Running) -> Result<()> {
        const PLACES: [&str; VOLUMES] = ["/v0", "/v1", "/v2"];
        let mounts: Vec<At> = PLACES
            .iter()
            .enumerate()
            .map(|(volume, place)| At { volume, path: "", place, read_only: false, source: None })
            .collect();
        running.try_create("main", &mounts, By::Bundle).await?;
        for place in PLACES {
            let script = format!("echo {number} >> {place}/lines && sync {place}/lines && sync");
            self.run(running, &script).await?;
        }
        Ok(())
    }

    /// Writes this many MiB into a file.
    async fn fill(&self, running: &Running, file: &str, mebibytes: u32) -> Result<()> {
        self.run(running, &format!("dd if=/dev/urandom of={file} bs=1M count={mebibytes} && sync")).await
    }

    async fn run(&self, running: &Running, script: &str) -> Result<()> {
        let id = peerpod_tests::fresh_id("e");
        let output = running
            .agent
            .exec(&peerpod_client::exec_request("main", &id, &["/bin/sh", "-c", script]))
            .await?;
        ensure!(output.status == 0, "{script}: {output:?}");
        Ok(())
    }
}

/// All processes that may be killed.
struct Parties {
    node: Node,
    folder: Folder,
    wrapper: Option<Wrapper>,
    controller: Option<Wrapper>,
    filesystem: &'static str,
    /// Size of each disk in MiB.
    mebibytes: u64,
    _driver: Driver,
}

impl Parties {
    async fn start(filesystem: &'static str, mebibytes: u64) -> Result<Parties> {
        let node = Node::start().await;
        let folder = Folder::new("crash")?;
        symlink(node.daemons.run_dir(), folder.path("run"))?;
        symlink(node.daemons.state_dir(), folder.path("state"))?;
        symlink(node.kubelet(), folder.path("kubelet"))?;
        let driver = Driver::start(&folder, &[&format!("--name={DRIVER}")])?;
        let mut parties =
            Parties { node, folder, wrapper: None, controller: None, filesystem, mebibytes, _driver: driver };
        parties.restart()?;
        Ok(parties)
    }

    /// Starts the wrapper's roles that do not run.
    fn restart(&mut self) -> Result<()> {
        if self.wrapper.is_none() {
            self.wrapper = Some(Wrapper::start("node", &self.folder, &[])?);
        }
        if self.controller.is_none() {
            self.controller = Some(Wrapper::start("controller", &self.folder, &[])?);
        }
        Ok(())
    }

    /// Kills one of them with SIGKILL. True for the VM, because its pod fails with it.
    fn kill(&mut self, victim: u64) -> Result<bool> {
        match victim {
            0 => drop(self.wrapper.take()),
            1 => drop(self.controller.take()),
            2 => {
                self.node.daemons.kill_node()?;
                self.node.daemons.start_node()?;
            }
            _ => {
                let guests = Sight::of(&self.node.world, &[], &self.node.daemons)?.pids("peerpod-guest");
                for pid in &guests {
                    // The process may have ended already.
                    kill(Pid::from_raw(i32::try_from(*pid)?), Signal::SIGKILL).ok();
                }
                return Ok(!guests.is_empty());
            }
        }
        self.restart()?;
        Ok(false)
    }

    fn cycle(&self) -> Cycle {
        Cycle {
            world: self.node.world.clone(),
            hypervisor: self.node.daemons.hypervisor_socket(),
            records: Records::new(self.folder.path("state/volumes")),
            node: self.folder.socket("node"),
            controller: self.folder.socket("controller"),
            kubelet: self.node.kubelet(),
            filesystem: self.filesystem,
        }
    }

    async fn disk(&self, number: usize) -> Result<Disk> {
        let mut request = CreateVolumeRequest { name: format!("v{number}"), ..Default::default() };
        request.parameters.insert("peerpod".to_owned(), "true".to_owned());
        request
            .special_fields
            .mut_unknown_fields()
            .add_length_delimited(3, capability(self.filesystem).write_to_bytes()?);
        let answer: CreateVolumeResponse = self
            .cycle()
            .persist(&self.folder.socket("controller"), "Controller/CreateVolume", &request)
            .await?;
        let volume = answer.volume.into_option().context("no volume")?;
        let file = self.node.disk(&volume.volume_id, self.mebibytes).file;
        Ok(Disk { id: volume.volume_id, context: volume.volume_context, file, uuid: None, synced: 0 })
    }

    /// Checks that no attachment, record or mount of the pod is left.
    async fn nothing_is_left(&self, uid: &str) -> Result<()> {
        let records = self.cycle().records;
        eventually("no disk is attached, and no record is left", PERSEVERANCE, async || {
            let free = self.node.loops().is_empty() && records.of_pod(uid).ok()?.is_empty();
            (free && self.folder.mounts().ok()?.is_empty()).then_some(())
        })
        .await
        .with_context(|| {
            format!(
                "{uid}: attached {:?}, records {:?}, mounts {:?}\n{}",
                self.node.loops(),
                records.of_pod(uid),
                self.folder.mounts(),
                self.node.daemons.log_tails()
            )
        })
    }
}

impl Disk {
    /// Compares the identifier that mkfs.ext4 chose; a newly formatted disk has another.
    fn same_filesystem(&mut self) -> Result<bool> {
        let mut uuid = [0; 16];
        fs::File::open(&self.file)?.read_exact_at(&mut uuid, 1024 + 104)?;
        if uuid == [0; 16] {
            return Ok(self.uuid.is_none());
        }
        Ok(*self.uuid.get_or_insert(uuid) == uuid)
    }

    /// Reads the disk's lines like a booting machine: the journal is replayed, on a copy.
    fn lines(&self, scratch: &Path) -> Result<Vec<String>> {
        let copy = scratch.join("copy");
        fs::copy(&self.file, &copy)?;
        let copy = copy.to_str().context("a path")?;
        let checked = std::process::Command::new("e2fsck").args(["-f", "-y", copy]).output()?;
        // 0: clean, 1: the journal was replayed.
        ensure!(matches!(checked.status.code(), Some(0 | 1)), "e2fsck: {checked:?}");
        let output = std::process::Command::new("debugfs").args(["-R", "cat /lines", copy]).output()?;
        Ok(String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_kills_lose_format_or_leave_no_disk() -> Result<()> {
    let cycles = if long() { 200 } else { 12 };
    let mut parties = Parties::start("ext4", 16).await?;
    let mut disks = Vec::new();
    for number in 0..VOLUMES {
        disks.push(parties.disk(number).await?);
    }
    let (mut dice, mut kills, mut pods, mut bad) = (Dice(2026), [0; 4], 0, Vec::new());
    for number in 0..cycles {
        let cycle = parties.cycle();
        let asked = disks.iter().map(|disk| (disk.id.clone(), disk.context.clone())).collect();
        let life = tokio::spawn(async move { cycle.cycle(number, asked).await });
        let mut vm_killed = false;
        for _ in 0..1 + dice.roll(3) {
            tokio::time::sleep(Duration::from_millis(dice.roll(900))).await;
            if life.is_finished() {
                break;
            }
            let victim = dice.roll(4);
            kills[usize::try_from(victim)?] += 1;
            vm_killed |= parties.kill(victim)?;
        }
        let lived =
            life.await?.with_context(|| format!("cycle {number}\n{}", parties.node.daemons.log_tails()))?;
        if let Err(why) = &lived {
            ensure!(vm_killed, "cycle {number}: {why:#}\n{}", parties.node.daemons.log_tails());
        }
        parties.nothing_is_left(&format!("uid-{number}")).await?;
        for disk in &mut disks {
            if !disk.same_filesystem()? {
                bad.push(format!("cycle {number}: disk {} was formatted", disk.id));
            }
            let lines = if disk.uuid.is_some() { disk.lines(parties.folder.root())? } else { Vec::new() };
            let of_this = usize::from(lived.is_ok());
            if lines.len() < disk.synced + of_this {
                bad.push(format!(
                    "cycle {number}: disk {}: {} lines of {}",
                    disk.id,
                    lines.len(),
                    disk.synced + of_this
                ));
            }
            disk.synced = lines.len();
        }
        pods += usize::from(lived.is_ok());
    }
    println!(
        "{cycles} pods, {pods} lived to their end; killed: csi-node {}, csi-controller {}, node {}, VM {}",
        kills[0], kills[1], kills[2], kills[3]
    );
    report("csi_crash200_lost_or_formatted", bad.len() as f64);
    ensure!(bad.is_empty(), "{}", bad.join("\n"));
    ensure!(pods > 0, "no pod lived");
    Ok(())
}

/// Uses XFS: online growth of ext4 needs a capability that a containerised machine may lack, and a VM made of
/// namespaces has its machine's capabilities.
#[tokio::test(flavor = "multi_thread")]
async fn the_guest_reports_and_grows_a_volume_for_kubelet() -> Result<()> {
    const MIB: i64 = 1 << 20;
    let parties = Parties::start("xfs", 320).await?;
    let mut disks = Vec::new();
    for number in 0..VOLUMES {
        disks.push(parties.disk(number).await?);
    }
    let cycle = parties.cycle();
    let asked: Vec<_> = disks.iter().map(|disk| (disk.id.clone(), disk.context.clone())).collect();
    let (uid, name) = ("uid-0", "web-0");
    let requests: Vec<_> = asked.iter().map(|disk| cycle.request(disk, uid, name)).collect();
    cycle.publish(&asked, &requests).await?;
    let running = cycle.boot(uid, name).await?;
    cycle.write(0, &running).await?;
    let [one, other, _] = requests.as_slice() else { anyhow::bail!("{requests:?}") };
    let (total, used) = cycle.bytes(one).await?;
    ensure!((200 * MIB..=320 * MIB).contains(&total) && (1..total).contains(&used), "{used} of {total}");

    cycle.fill(&running, "/v0/big", 4).await?;
    let (_, more) = cycle.bytes(one).await?;
    ensure!(more >= used + 4 * MIB, "{used}, then {more}");

    // As the driver's ControllerExpandVolume does.
    fs::File::options().write(true).open(&disks[0].file)?.set_len(640 << 20)?;
    let mut grow = NodeExpandVolumeRequest {
        volume_id: one.volume_id.clone(),
        volume_path: one.target_path.clone(),
        ..Default::default()
    };
    grow.capacity_range.mut_or_insert_default().required_bytes = 640 * MIB;
    for _ in 0..2 {
        let grown: NodeExpandVolumeResponse =
            cycle.persist(&cycle.node, "Node/NodeExpandVolume", &grow).await?;
        ensure!(grown.capacity_bytes == 640 * MIB, "{grown:?}");
    }
    let (total, used) = cycle.bytes(one).await?;
    ensure!((500 * MIB..=640 * MIB).contains(&total) && used >= more, "{used} of {total}");
    ensure!(cycle.bytes(other).await?.0 <= 320 * MIB, "another one grew");
    cycle.run(&running, "test $(cat /v0/lines) = 0").await?;

    running.shim.stop_vm(&running.id).await?;
    cycle.give_back(&requests).await?;
    parties.nothing_is_left(uid).await
}
