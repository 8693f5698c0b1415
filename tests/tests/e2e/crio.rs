//! The dozen cases that `tests/kube` runs on a real node and in VMs of libvirt, with the frames of CRI-O: Kata's Go shim
//! passes CRI-O's name of the sandbox to the node, and CRI-O's annotations of each container to the agent.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::ensure;
use peerpod_client::{ContainerSpec, SHARED_CONTAINERS, copy_file, exec_request};
use peerpod_proto::agent::{CreateContainerRequest, Storage};
use peerpod_tests::{PATIENCE, Sandbox, fresh_id};
use peerpod_world::page::{fetch, page_for};
use peerpod_world::{Daemons, Pod, Settings, World, eventually, stages};
use tokio::task::spawn_blocking;

use crate::cases::listed;

const UID: &str = "5b3c1f6e-1d1f-4a07-9a55-6f4f0c1f4a11";
const NAMESPACE: &str = "shop";
const POD: &str = "web";
const PORT: u16 = 8080;
/// Bytes of a copy.
const COPIED: usize = 3_000_000;

/// A pod of CRI-O with a container `main` that sleeps.
struct Crio {
    sandbox: Sandbox,
    other: Pod,
}

/// CRI-O's name of a container; its sandbox has the same without the container.
fn name_of(container: &str, attempt: u32) -> String {
    format!("k8s_{container}_{POD}_{NAMESPACE}_{UID}_{attempt}")
}

fn sandbox_name() -> String {
    format!("k8s_{POD}_{NAMESPACE}_{UID}_0")
}

/// Returns a request with the annotations of CRI-O and the labels of kubelet, which CRI-O adds to them.
fn annotated(id: &str, arguments: &[&str], more: &[(&str, &str)]) -> CreateContainerRequest {
    let bundle = format!("/run/containers/storage/overlay-containers/{id}/userdata");
    let sandbox = sandbox_name();
    let common = [
        ("io.container.manager", "cri-o"),
        ("io.katacontainers.pkg.oci.bundle_path", &bundle),
        ("io.kubernetes.cri-o.SandboxName", &sandbox),
        ("io.kubernetes.pod.name", POD),
        ("io.kubernetes.pod.namespace", NAMESPACE),
        ("io.kubernetes.pod.uid", UID),
    ];
    let all = common.iter().chain(more);
    all.fold(ContainerSpec::new(id, arguments), |spec, (key, value)| spec.annotation(key, value)).request()
}

fn container(name: &str, attempt: u32, arguments: &[&str]) -> CreateContainerRequest {
    let full = name_of(name, attempt);
    let more = [
        ("io.kubernetes.cri-o.ContainerType", "container"),
        ("io.kubernetes.cri-o.Name", &full),
        ("io.kubernetes.container.name", name),
    ];
    annotated(&fresh_id(name), arguments, &more)
}

/// Returns the request of the pod's own container, whose image is in the VM already.
fn infrastructure(id: &str) -> CreateContainerRequest {
    let name = name_of("POD", 0);
    let more = [
        ("io.kubernetes.cri-o.ContainerType", "sandbox"),
        ("io.kubernetes.cri-o.ContainerName", &name),
        ("io.kubernetes.cri-o.KubeName", POD),
        ("io.kubernetes.cri-o.Namespace", NAMESPACE),
        ("io.kubernetes.container.name", "POD"),
    ];
    let mut request = annotated(id, &["sleep", "infinity"], &more);
    let mut storage = Storage::new();
    (storage.driver, storage.source) = ("image_guest_pull".into(), "pause".into());
    request.storages.push(storage);
    request
}

impl Crio {
    async fn start(world: &World, daemons: &Daemons) -> anyhow::Result<Crio> {
        let name = sandbox_name();
        let named = |annotations: peerpod_client::Annotations| {
            let annotations = annotations.raw("io.kubernetes.cri.sandbox-name", Some(&name));
            annotations.raw("io.kubernetes.cri.sandbox-namespace", Some(NAMESPACE)).size("0", 0)
        };
        let sandbox = Sandbox::boot(daemons, world.pod()?, "crio", named, PATIENCE).await?;
        let pause = infrastructure(&sandbox.id);
        sandbox.agent.create_container(&pause).await?;
        sandbox.agent.start_container(&sandbox.id).await?;
        Ok(Crio { sandbox, other: world.pod()? })
    }

    /// Starts a container, and returns its id.
    async fn run(&self, request: &CreateContainerRequest) -> anyhow::Result<String> {
        self.sandbox.agent.create_container(request).await?;
        self.sandbox.agent.start_container(&request.container_id).await?;
        Ok(request.container_id.clone())
    }

    /// Starts a container of a shell script, and returns its id.
    async fn script(&self, script: &str) -> anyhow::Result<String> {
        self.run(&container("c", 0, &["/bin/sh", "-c", script])).await
    }

    /// Starts a container of a shell script, and compares its output and its exit code.
    async fn prints(&self, script: &str, out: &str, code: i32) -> anyhow::Result<()> {
        let id = self.script(script).await?;
        self.ends(&id, out, code).await
    }

    async fn ends(&self, id: &str, out: &str, code: i32) -> anyhow::Result<()> {
        let output = self.sandbox.agent.output(id, "").await?;
        let seen = String::from_utf8_lossy(&output.stdout);
        ensure!((seen.as_ref(), output.status) == (out, code), "{output:?}");
        Ok(self.sandbox.agent.remove_container(id).await?)
    }

    /// Runs a shell script in a container, and compares its output and its exit code.
    async fn exec(&self, id: &str, script: &str, out: &str, code: i32) -> anyhow::Result<()> {
        let request = exec_request(id, &fresh_id("exec"), &["/bin/sh", "-c", script]);
        let output = self.sandbox.agent.exec(&request).await?;
        let seen = String::from_utf8_lossy(&output.stdout);
        ensure!((seen.as_ref(), output.status) == (out, code), "{script}: {output:?}");
        Ok(())
    }

    /// Starts a container that serves a page.
    async fn serve(&self) -> anyhow::Result<String> {
        let id = self.script("while :; do sleep 0.05; done").await?;
        let server = exec_request(&id, "page", &["peerpod-test-tool", "page", &PORT.to_string()]);
        self.sandbox.agent.exec_process(&server).await?;
        let out = self.sandbox.agent.read_stdout(&id, "page", 8192).await?;
        ensure!(out.starts_with(b"listening"), "{}", String::from_utf8_lossy(&out));
        Ok(id)
    }

    /// Fetches the container's page as a client in a namespace, which has the address `asker` for the server.
    async fn fetches(&self, from: &Pod, to: IpAddr, asker: IpAddr) -> anyhow::Result<()> {
        let page = eventually("the page server answers", PATIENCE, async || {
            let from = from.namespace().clone();
            spawn_blocking(move || fetch(&from, SocketAddr::new(to, PORT))).await.ok()?.ok()
        });
        let page = page.await?;
        ensure!(page == page_for(asker), "{page:?}");
        Ok(())
    }

    async fn kill(&self, id: &str) -> anyhow::Result<()> {
        self.sandbox.agent.signal_process(id, "", 9).await?;
        self.sandbox.agent.wait_process(id, "").await?;
        Ok(self.sandbox.agent.remove_container(id).await?)
    }

    async fn case(&self, name: &str) -> anyhow::Result<()> {
        match name {
            "run, logs" => self.prints("echo out; echo err >&2", "out\n", 0).await,
            "exec: output, exit codes" => {
                let id = self.script("while :; do sleep 0.05; done").await?;
                for (script, out, code) in [("echo x", "x\n", 0), ("exit 3", "", 3), ("kill -9 $$", "", 137)]
                {
                    self.exec(&id, script, out, code).await?;
                }
                self.kill(&id).await
            }
            "exec: stdin" => {
                let id = self.script("while :; do sleep 0.05; done").await?;
                stages::transfer(&self.sandbox.agent, &id, "stdin", COPIED).await?;
                self.kill(&id).await
            }
            "cp: 3 MB there and back" => self.copy().await,
            "delete: preStop, SIGTERM, last lines" => {
                let script =
                    "trap 'echo terminated; exit 0' TERM; echo started; while :; do sleep 0.05; done";
                let id = self.script(script).await?;
                let out = self.sandbox.agent.read_stdout(&id, "", 8192).await?;
                ensure!(out == b"started\n", "{out:?}");
                self.exec(&id, "echo prestop", "prestop\n", 0).await?;
                self.sandbox.agent.signal_process(&id, "", 15).await?;
                self.ends(&id, "terminated\n", 0).await
            }
            "restart in the same VM, logs --previous" => {
                for (attempt, code) in [(0, 7), (1, 0)] {
                    let script = format!("echo run {attempt}; exit {code}");
                    let id = self.run(&container("again", attempt, &["/bin/sh", "-c", &script])).await?;
                    self.ends(&id, &format!("run {attempt}\n"), code).await?;
                }
                Ok(())
            }
            "exit code and termination message" => self.termination().await,
            "probes: exec, http, tcp; startup" => {
                let id = self.serve().await?;
                self.exec(&id, "test -e /proc/1", "", 0).await?;
                self.exec(&id, "test -e /nonexistent", "", 1).await?;
                let (pod, other) = (&self.sandbox.pod, &self.other);
                self.fetches(other, pod.v4(), other.v4()).await?;
                self.kill(&id).await
            }
            "config map and secret: live update" => self.update().await,
            "network: from node, runc pod, peer pod, service" => {
                let id = self.serve().await?;
                let (pod, other) = (&self.sandbox.pod, &self.other);
                for (to, asker) in pod.addresses().into_iter().zip(other.addresses()) {
                    self.fetches(other, to, asker).await?;
                }
                self.kill(&id).await
            }
            "port-forward" => {
                let id = self.serve().await?;
                let here = IpAddr::from(Ipv4Addr::LOCALHOST);
                self.fetches(&self.sandbox.pod, here, here).await?;
                self.kill(&id).await
            }
            "pod: runAsUser, fsGroup, supplementalGroups" => {
                // The test agent sets no supplementary groups.
                let mut request = container("user", 0, &["/bin/sh", "-c", "id -u; id -g"]);
                let process = request.OCI.mut_or_insert_default().Process.mut_or_insert_default();
                let user = process.User.mut_or_insert_default();
                (user.UID, user.GID) = (1000, 3000);
                let id = self.run(&request).await?;
                self.ends(&id, "1000\n3000\n", 0).await
            }
            other => anyhow::bail!("no frames of {other:?}"),
        }
    }

    /// Copies as `kubectl cp` does: by the input and the output of a command.
    async fn copy(&self) -> anyhow::Result<()> {
        let (agent, id) = (&self.sandbox.agent, self.script("while :; do sleep 0.05; done").await?);
        let bytes: Vec<u8> = (0..COPIED).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        agent.exec_process(&exec_request(&id, "in", &["/bin/sh", "-c", "cat >/tmp/copied-by-crio"])).await?;
        for piece in bytes.chunks(256 << 10) {
            agent.write_stdin(&id, "in", piece.to_vec()).await?;
        }
        agent.write_stdin(&id, "in", Vec::new()).await?;
        ensure!(agent.output(&id, "in").await?.status == 0, "cat failed");
        let back = agent.exec(&exec_request(&id, "out", &["cat", "/tmp/copied-by-crio"])).await?;
        ensure!(back.stdout == bytes, "{} other bytes came back", back.stdout.len());
        self.kill(&id).await
    }

    /// Copies a file for a container as the shim does, and returns its path in the VM.
    async fn shared(
        &self,
        of: &CreateContainerRequest,
        name: &str,
        mode: u32,
        text: &[u8],
    ) -> anyhow::Result<String> {
        let name = format!("{}-0123456789abcdef-{name}", of.container_id);
        self.sandbox.agent.copy_file(&copy_file(&name, mode, text)).await?;
        Ok(format!("{SHARED_CONTAINERS}/{name}"))
    }

    /// kubelet's file for the message is one of the shim's files. It lies in the VM after the container's end. The test
    /// agent's containers have the VM's root, so they see it there.
    async fn termination(&self) -> anyhow::Result<()> {
        let mut request = container("last", 0, &[]);
        let file = self.shared(&request, "termination-log", 0o666, b"").await?;
        mount(&mut request, &file, "/dev/termination-log");
        let process = request.OCI.mut_or_insert_default().Process.mut_or_insert_default();
        process.Args = ["/bin/sh", "-c", &format!("echo why >{file}; exit 3")].map(str::to_owned).to_vec();
        let id = self.run(&request).await?;
        self.ends(&id, "", 3).await?;
        self.prints(&format!("cat {file}"), "why\n", 0).await
    }

    /// The shim copies a changed file again; the container reads it.
    async fn update(&self) -> anyhow::Result<()> {
        let mut request = container("reads", 0, &["/bin/sh", "-c", "while :; do sleep 0.05; done"]);
        let file = self.shared(&request, "config", 0o644, b"one\n").await?;
        mount(&mut request, &file, "/run/config");
        let id = self.run(&request).await?;
        let read = format!("cat {file}");
        self.exec(&id, &read, "one\n", 0).await?;
        self.shared(&request, "config", 0o644, b"two\n").await?;
        self.exec(&id, &read, "two\n", 0).await?;
        self.kill(&id).await
    }
}

fn mount(request: &mut CreateContainerRequest, source: &str, destination: &str) {
    let mut mount = peerpod_proto::agent::Mount::new();
    (mount.source, mount.destination) = (source.into(), destination.into());
    (mount.type_, mount.options) = ("bind".into(), vec!["rbind".into(), "rw".into()]);
    request.OCI.mut_or_insert_default().Mounts.push(mount);
}

#[tokio::test]
async fn the_dozen_cases_pass_with_the_names_and_annotations_of_crio() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let crio = Crio::start(&world, &daemons)
        .await
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemons.log_tails()));
    let vm = crio.sandbox.shim.vm_id(NAMESPACE, POD, true, PATIENCE).await.unwrap();
    let dozen = listed("OF_SLICE");
    assert_eq!(dozen.len(), 12, "{dozen:?}");
    for name in dozen {
        crio.case(&name).await.unwrap_or_else(|error| panic!("{name}: {error:#}\n{}", daemons.log_tails()));
    }
    assert_eq!(crio.sandbox.shim.vm_id(NAMESPACE, POD, true, PATIENCE).await.unwrap(), vm);
    crio.sandbox.stop(&daemons).await.unwrap();
    // Users know the pod by its own name.
    for daemon in ["node", "relay"] {
        let log = std::fs::read_to_string(daemons.log(daemon)).unwrap();
        assert!(log.contains(&format!("{NAMESPACE}/{POD}")), "{daemon}");
        assert_eq!(log.lines().find(|line| line.contains("k8s_")), None, "{daemon}");
    }
}
