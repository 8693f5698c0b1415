//! The cases: what users do with pods, each in a Kubernetes namespace of its own.

pub(crate) mod claims;
pub(crate) mod front_door;
pub(crate) mod images;
mod life;
pub(crate) mod network;
mod prints;
mod rights;
mod volumes;

use std::process::{Output, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};
use peerpod_world::{LedgerEntry, eventually_blocking};
use serde_json::{Value, json};

use crate::node::{ADDRESS, Node};

/// Time limit of one step of a case, on a busy machine that emulates VMs.
const STEP: Duration = Duration::from_secs(180);

/// Time limit for the cause of a failure, from the moment at which the test looks for it. An emulated VM boots meanwhile.
const CAUSE: [Duration; 2] = [Duration::from_secs(30), STEP];

/// Command that begins a script whose output is compared, in manifests by the word `PAUSE`. The output of a container that
/// ends at once may be missing from its log; the cause is not known (docs/limits.md).
pub(crate) const PAUSE: &str = "sleep 0.5";

/// Begins a line that belongs to the next line of the table.
pub(crate) const NOTE: &str = "                 ";

/// Pause between two looks at the cluster.
const POLL: Duration = Duration::from_millis(100);

/// A case's function.
pub(crate) type Run = fn(&Case<'_>) -> anyhow::Result<()>;

/// Every case with its name.
pub(crate) const CASES: &[(&str, Run)] = &[
    ("run, logs", life::run_and_logs),
    ("images: longer than every timeout", images::slow_registry),
    ("images: 1 GiB, and its progress in the log", rights::large_image),
    ("cp: 200 MB there and back", life::large_copy),
    ("port-forward: 100 MB", network::large_forward),
    ("logs -f until the end", life::follow),
    ("exec: output, exit codes", life::exec),
    ("exec: output after the end of the input", life::closed_stdin),
    ("exec: stdin", life::exec_stdin),
    ("exec: twenty at once", life::exec_many),
    ("cp: 3 MB there and back", life::copy),
    ("delete: preStop, SIGTERM, last lines", life::graceful_end),
    ("restart in the same VM, logs --previous", life::restart),
    ("exit code and termination message", life::termination),
    ("job with parallelism", life::job),
    ("deployment with rollout", life::deployment),
    ("stateful set", life::stateful_set),
    ("daemon set", life::daemon_set),
    ("ephemeral container by kubectl debug", life::debug),
    ("activeDeadlineSeconds", life::deadline),
    ("OOMKilled", life::out_of_memory),
    ("probes: exec, http, tcp; startup", life::probes),
    ("probes: liveness restarts", life::liveness),
    ("probes: readiness and the service's endpoints", network::readiness),
    ("images: a missing image", life::missing_image),
    ("network: from node, runc pod, peer pod, service", network::reachable),
    ("port-forward", network::port_forward),
    ("config map and secret: live update", volumes::live_update),
    ("exec: a terminal and its size", life::terminal),
    ("exec: a killed client", life::killed_client),
    ("attach with input", life::attach),
    ("kubectl run -i --rm", life::run_with_input),
    ("delete --force", life::forced_end),
    ("eviction by the API", life::evicted),
    ("eviction for a log beyond the ephemeral storage", rights::long_log),
    ("delete: SIGTERM ignored", life::ignored_term),
    ("postStart before the container is ready", life::post_start),
    ("postStart that fails", life::failed_post_start),
    ("cron job", life::cron_job),
    ("job that fails", life::failed_job),
    ("scale up and to zero", life::scale),
    ("logs: tail, prefix, timestamps, long lines", life::log_options),
    ("back-off in one VM", life::back_off),
    ("a missing command", life::missing_command),
    ("an init container that fails", life::failed_init),
    ("a second pod of the same name", life::same_name),
    ("the VM of a finished pod", life::finished_vm),
    ("resize in place", life::resize_in_place),
    ("probes: grpc", life::grpc_probe),
    ("probes: http liveness", life::http_liveness),
    ("volumes: all or nothing of a config map", volumes::atomic_update),
    ("volumes: changed labels", volumes::changed_labels),
    ("volumes: projected, token for an audience", volumes::projected),
    ("volumes: optional config map", volumes::optional),
    ("volumes: missing config map", volumes::missing),
    ("volumes: binary data", volumes::binary_data),
    ("volumes: a secret of 900 kB", volumes::large_secret),
    ("volumes: emptyDir outlives a container", volumes::empty_dir),
    ("volumes: hostPath", rights::host_path),
    ("claims: the next pod sees the bytes", claims::next_pod),
    ("claims: raw block", claims::block),
    ("claims: expansion under a running pod", claims::expansion),
    ("claims: detached and deleted", claims::removal),
    ("claims: a pod's own (ephemeral)", claims::ephemeral),
    ("claims: for peer pods only", claims::without_vm),
    ("claims: inline CSI volume", claims::inline),
    ("a missing secret for variables", volumes::missing_variable),
    ("hostNetwork is refused", rights::host_network),
    ("hostPID", rights::host_pid),
    ("initdata: a policy that the agent does not enforce", rights::unenforced_policy),
    ("AppArmor", rights::app_armor),
    ("allowPrivilegeEscalation: false", rights::no_new_privileges),
    ("a privileged container", rights::privileged),
    ("runAsNonRoot with an image of root", rights::root_refused),
    ("seccomp: RuntimeDefault", rights::seccomp),
    ("limits in the cgroup", rights::limits),
    ("stats/summary", rights::summary),
    ("metrics/resource", rights::resource_metrics),
    ("kubectl top", rights::top),
    ("overhead of the runtime class", rights::overhead),
    ("capacity: a third pod waits", rights::capacity),
    ("six containers", rights::many_containers),
    ("images: never pulled", rights::never_pulled),
    ("images: pulled always", rights::always_pulled),
    ("images: by digest", rights::digest),
    ("images: entrypoint, variables, folder, user", rights::image_config),
    ("network: IPv6", network::both_families),
    ("network: names of Services", network::names),
    ("network: 20 MB between pods", network::large_transfer),
    ("network: the node's own rules count", network::denied_by_the_node),
    ("pod: init containers", prints::init),
    ("pod: native sidecar", prints::sidecar),
    ("pod: containers share localhost and emptyDir", prints::shared),
    ("pod: memory emptyDir", prints::memory_dir),
    ("pod: environment of the downward API", prints::downward),
    ("pod: config map, secret, subPath, mode", prints::files),
    ("pod: service account token", prints::token),
    ("pod: runAsUser, fsGroup, supplementalGroups", prints::users),
    ("pod: read-only root", prints::read_only),
    ("pod: capabilities", prints::capabilities),
    ("pod: sysctl", prints::sysctl),
    ("pod: hostAliases, hostname, dnsConfig", prints::names),
    ("pod: shared process namespace", prints::processes),
    ("peerpod test", front_door::connectivity),
    ("peerpod orphans by the node's pod", front_door::orphans),
];

/// Cases of each kind, for CI and for VMs of libvirt.
pub(crate) const OF_SLICE: [&str; 12] = [
    "run, logs",
    "exec: output, exit codes",
    "exec: stdin",
    "cp: 3 MB there and back",
    "delete: preStop, SIGTERM, last lines",
    "restart in the same VM, logs --previous",
    "exit code and termination message",
    "probes: exec, http, tcp; startup",
    "config map and secret: live update",
    "network: from node, runc pod, peer pod, service",
    "port-forward",
    "pod: runAsUser, fsGroup, supplementalGroups",
];

/// Cases of many minutes, for long runs.
pub(crate) const LONG_CASES: &[(&str, Run)] = &[("volumes: token renewal", volumes::token_renewal)];

/// A case in its namespace.
pub(crate) struct Case<'a> {
    pub(crate) node: &'a Node,
    pub(crate) namespace: &'a str,
}

impl<'a> Case<'a> {
    /// Makes the namespace, and waits for its service account.
    pub(crate) fn new(node: &'a Node, namespace: &'a str) -> anyhow::Result<Case<'a>> {
        node.kubectl(&["create", "namespace", namespace])?;
        let case = Case::of(node, namespace);
        case.until("the namespace's service account", || {
            Ok(case.get("serviceaccount/default").ok().map(drop))
        })?;
        Ok(case)
    }

    /// Returns the case in a namespace that exists.
    pub(crate) fn of(node: &'a Node, namespace: &'a str) -> Case<'a> {
        Case { node, namespace }
    }

    /// Waits until `inspect` returns a value. An error of it ends the wait.
    pub(crate) fn until<T>(
        &self,
        text: &str,
        inspect: impl FnMut() -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<T> {
        self.within(STEP, text, inspect)
    }

    /// Does the same as [`Case::until`] with this limit, which is later on a busy machine.
    pub(crate) fn within<T>(
        &self,
        limit: Duration,
        text: &str,
        mut inspect: impl FnMut() -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<T> {
        eventually_blocking(text, limit, || {
            let found = inspect().transpose();
            if found.is_none() {
                thread::sleep(POLL);
            }
            found
        })?
    }

    /// Returns the output of kubectl in the namespace.
    pub(crate) fn kubectl(&self, words: &[&str]) -> anyhow::Result<String> {
        self.node.kubectl(&[&["-n", self.namespace], words].concat())
    }

    /// Returns the result of kubectl with this input.
    pub(crate) fn kubectl_with(&self, words: &[&str], input: &[u8]) -> anyhow::Result<Output> {
        let mut command = self.node.kubectl_command(&[&["-n", self.namespace], words].concat())?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut stdin = child.stdin.take().context("stdin")?;
        let input = input.to_owned();
        let writer = thread::spawn(move || std::io::Write::write_all(&mut stdin, &input));
        let output = child.wait_with_output()?;
        // A command that ends early reads no more.
        let _written = writer.join();
        Ok(output)
    }

    /// Applies manifests, with `IMAGE` and `PAUSE` replaced.
    pub(crate) fn apply(&self, manifests: &str) -> anyhow::Result<()> {
        self.node.apply(self.namespace, &manifests.replace("IMAGE", &image()).replace("PAUSE", PAUSE))
    }

    /// Makes a peer pod of this specification in YAML's flow style, without its braces.
    pub(crate) fn pod(&self, name: &str, spec: &str) -> anyhow::Result<()> {
        self.apply(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, labels: {{app: {name}}}}}, \
             spec: {{runtimeClassName: kata-remote, terminationGracePeriodSeconds: 5, {spec}}}}}"
        ))
    }

    /// Makes a peer pod whose only container `c` runs a shell script.
    pub(crate) fn script(&self, name: &str, restart: &str, script: &str) -> anyhow::Result<()> {
        let command = json!(["sh", "-c", script]);
        self.pod(
            name,
            &format!("restartPolicy: {restart}, containers: [{{name: c, image: IMAGE, command: {command}}}]"),
        )
    }

    /// Makes a peer pod that runs until it is stopped, and waits until it is ready.
    pub(crate) fn sleeper(&self, name: &str) -> anyhow::Result<()> {
        self.script(name, "Always", SLEEP)?;
        self.ready(name)
    }

    /// Waits until a pod is ready.
    pub(crate) fn ready(&self, pod: &str) -> anyhow::Result<()> {
        self.until_pod(pod, "ready", is_ready)
    }

    /// Whether a pod is ready.
    pub(crate) fn is_ready(&self, pod: &str) -> anyhow::Result<bool> {
        Ok(is_ready(&self.get(&format!("pod/{pod}"))?["status"]))
    }

    /// Waits until a pod has this phase.
    pub(crate) fn phase(&self, pod: &str, phase: &str) -> anyhow::Result<()> {
        self.until_pod(pod, phase, |status| status["phase"] == phase)
    }

    /// Waits until the first container of a pod waits for one of these reasons with this text in its message. The limit
    /// is [`CAUSE`].
    pub(crate) fn waiting(&self, pod: &str, reasons: &[&str], text: &str) -> anyhow::Result<()> {
        let object = format!("pod/{pod}");
        self.within(self.cause(), &format!("{pod} waits for {reasons:?} with {text:?}"), || {
            let status = &self.get(&object)?["status"];
            let waiting = &status["containerStatuses"][0]["state"]["waiting"];
            let has_reason = waiting["reason"].as_str().is_some_and(|reason| reasons.contains(&reason));
            let has_text = waiting["message"].as_str().unwrap_or_default().contains(text);
            Ok((has_reason && has_text).then_some(()))
        })
    }

    fn until_pod(&self, pod: &str, text: &str, is_so: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        let object = format!("pod/{pod}");
        self.until(&format!("{pod} is {text}"), || Ok(is_so(&self.get(&object)?["status"]).then_some(())))
    }

    fn cause(&self) -> Duration {
        CAUSE[usize::from(self.node.has_chart())]
    }

    /// Waits for an event with this reason and this text in its message. The limit is [`CAUSE`].
    pub(crate) fn event(&self, reason: &str, text: &str) -> anyhow::Result<()> {
        self.within(self.cause(), &format!("an event {reason} with {text:?}"), || {
            let events = self.get("event/")?;
            let mut all = events["items"].as_array().into_iter().flatten();
            let found = all.any(|one| {
                one["reason"] == reason && one["message"].as_str().unwrap_or_default().contains(text)
            });
            Ok(found.then_some(()))
        })
    }

    /// Returns an object, or with an empty name the list of all.
    pub(crate) fn get(&self, object: &str) -> anyhow::Result<Value> {
        let (kind, name) = object.split_once('/').context("a kind and a name")?;
        let api = match kind {
            "job" => "apis/batch/v1",
            "endpointslice" => "apis/discovery.k8s.io/v1",
            _ => "api/v1",
        };
        self.node.read(&format!("/{api}/namespaces/{}/{kind}s/{name}", self.namespace))
    }

    /// Returns the ids of this namespace's sandboxes with a VM in the node's ledger.
    pub(crate) fn sandboxes(&self) -> anyhow::Result<Vec<String>> {
        let namespace = format!("\"{}\"", self.namespace);
        let mut sandboxes = self.node.ledger()?;
        sandboxes.retain(|entry: &LedgerEntry| {
            !entry.is_tombstone() && entry.record.to_string().contains(&namespace)
        });
        Ok(sandboxes.into_iter().map(|entry| entry.id).collect())
    }

    /// Returns the number of this namespace's VMs in the node's ledger.
    pub(crate) fn vms(&self) -> anyhow::Result<usize> {
        Ok(self.sandboxes()?.len())
    }

    /// Returns the output of a command in a pod's container, which must succeed.
    pub(crate) fn exec(&self, pod: &str, command: &[&str]) -> anyhow::Result<String> {
        self.kubectl(&[&["exec", pod, "--"], command].concat())
    }

    /// Runs a pod to its end, and compares the log of its container `c`. Each script begins with [`PAUSE`].
    pub(crate) fn prints(&self, spec: &str, expected: &str) -> anyhow::Result<()> {
        let spec = spec.replace("[sh, -c, '", "[sh, -c, 'PAUSE; ");
        self.pod("p", &format!("restartPolicy: Never, {spec}"))?;
        self.phase("p", "Succeeded")?;
        let log = self.kubectl(&["logs", "p", "-c", "c"])?;
        ensure!(log == expected, "the log is {log:?}, expected {expected:?}");
        Ok(())
    }

    /// Returns the namespace's pods and events, for an error.
    pub(crate) fn state(&self) -> String {
        let pods = self.kubectl(&["get", "pods", "-o", "wide"]).unwrap_or_default();
        let events = self.kubectl(&["get", "events", "--sort-by=.lastTimestamp"]).unwrap_or_default();
        format!("{pods}\n{events}")
    }
}

fn is_ready(status: &Value) -> bool {
    has_condition(status, "Ready")
}

/// Whether the status of a pod has a true condition of this type.
pub(crate) fn has_condition(status: &Value, kind: &str) -> bool {
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    conditions.any(|one| one["type"] == kind && one["status"] == "True")
}

/// A script that ends when it is asked to.
pub(crate) const SLEEP: &str = "trap exit TERM; while :; do sleep 0.2; done";

/// Name of the image of all pods.
pub(crate) fn image() -> String {
    format!("{ADDRESS}:{}/busybox:1", crate::images_common::PORT)
}
