//! Runs programs in pods and reaches their ports by kubectl, with the kubeconfig of the command line. It may touch:
//! processes of its own, and a port on the loopback.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use peerpod_node::admin::SOCKET;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use super::cluster::{COMPONENT, NODE};
use super::{Cluster, text};
use crate::run;

/// Time limit of a program in a pod. On a node the console and the list of VMs wait for the provider.
const EXEC: Duration = Duration::from_secs(90);
/// Time limit until kubectl listens.
const LISTENS: Duration = Duration::from_secs(30);
/// Reason why a node cannot be asked.
pub(crate) const NO_DAEMON: &str = "it has no running pod of peerpod-node; see `peerpod status`";
/// Path of this program in the container image.
const PEERPOD: &str = "/usr/bin/peerpod";

/// A port of the loopback that kubectl forwards to a pod, until this is dropped.
#[derive(Debug)]
pub(crate) struct Forward {
    pub(crate) port: u16,
    _kubectl: Child,
    // kubectl ends when it cannot write a line for each connection.
    _lines: BufReader<ChildStdout>,
}

impl Cluster {
    /// Returns the output of a program in a container of a pod.
    ///
    /// # Errors
    /// kubectl is missing, or the program fails; the error has its text.
    pub(crate) async fn exec(
        &self,
        (namespace, pod): (&str, &str),
        container: &str,
        program: &[&str],
    ) -> anyhow::Result<String> {
        let words = self.exec_words((namespace, pod), container, program);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = run::output(&words, EXEC).await;
        output.with_context(|| format!("run {} in pod {namespace}/{pod}", program.join(" ")))
    }

    fn exec_words(&self, (namespace, pod): (&str, &str), container: &str, program: &[&str]) -> Vec<String> {
        let words = ["exec", "--namespace", namespace, pod, "--container", container, "--"];
        self.kubectl(&[&words, program].concat())
    }

    /// Returns the running pod of `peerpod-node` of each node that has one of its pods, or else the reason why none can
    /// be asked.
    ///
    /// # Errors
    /// The API server refuses or is away.
    pub(crate) async fn node_daemons(&self) -> anyhow::Result<BTreeMap<String, Result<Pod, String>>> {
        let accounts = self.accounts().await?;
        Ok(by_node(self.ours("Pods").await?, &accounts))
    }

    /// As [`Cluster::node_daemons`], also with the nodes that have a PeerPod and no pod of `peerpod-node`.
    ///
    /// # Errors
    /// The API server refuses or is away.
    pub(crate) async fn daemons_of_vms(&self) -> anyhow::Result<BTreeMap<String, Result<Pod, String>>> {
        let mut daemons = self.node_daemons().await?;
        let named = self.peerpods().await?;
        let named = named.iter().filter_map(|one| text(&one.data, "/spec/nodeName"));
        for node in named.filter(|node| is_name(node)) {
            daemons.entry(node).or_insert_with(|| Err(NO_DAEMON.to_owned()));
        }
        Ok(daemons)
    }

    /// Returns the output of `peerpod` with these words in a pod of `peerpod-node`, by the node's admin socket.
    ///
    /// # Errors
    /// As [`Cluster::exec`].
    pub(crate) async fn ask_daemon(&self, pod: &Pod, words: &[&str]) -> anyhow::Result<String> {
        let socket = format!("{}/{SOCKET}", run_dir(pod));
        let name = (&*pod.namespace().unwrap_or_default(), &*pod.name_any());
        let words = [&[PEERPOD], words, &["--socket", &socket]].concat();
        self.exec(name, NODE, &words).await
    }

    /// Returns the node's own sysdump, of less than `most` bytes, by a pod of `peerpod-node`.
    ///
    /// # Errors
    /// As [`Cluster::exec`], and if the archive is too large, or is not complete within `limit`.
    pub(crate) async fn sysdump(&self, pod: &Pod, limit: Duration, most: u64) -> anyhow::Result<Vec<u8>> {
        let socket = format!("{}/{SOCKET}", run_dir(pod));
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let program = [PEERPOD, "sysdump", "--out", "-", "--socket", &socket];
        let words = self.exec_words((&namespace, &name), NODE, &program);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let archive = run::bytes(&words, limit, most).await;
        archive.with_context(|| format!("run peerpod sysdump in pod {namespace}/{name}"))
    }

    /// Forwards a free port of the loopback to a port of a pod.
    ///
    /// # Errors
    /// kubectl is missing or does not listen.
    pub(crate) async fn forward(&self, namespace: &str, pod: &str, port: u16) -> anyhow::Result<Forward> {
        let target = format!("pod/{pod}");
        let words = self.kubectl(&["port-forward", "--namespace", namespace, &target, &format!(":{port}")]);
        let Some((program, rest)) = words.split_first() else { bail!("no program") };
        let mut command = Command::new(program);
        command
            .args(rest)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut kubectl = command.spawn().context("start kubectl")?;
        let mut lines = BufReader::new(kubectl.stdout.take().context("start kubectl: it has no output")?);
        let mut line = String::new();
        let read = timeout(LISTENS, lines.read_line(&mut line)).await;
        read.with_context(|| format!("kubectl port-forward {target} does not listen within {LISTENS:?}"))??;
        let port = listens(&line)
            .with_context(|| format!("kubectl port-forward {target} ended, or printed {line:?}"))?;
        Ok(Forward { port, _kubectl: kubectl, _lines: lines })
    }

    fn kubectl(&self, words: &[&str]) -> Vec<String> {
        let mut all = vec!["kubectl".to_owned()];
        all.extend(self.kubeconfig.iter().map(|path| format!("--kubeconfig={}", path.display())));
        all.extend(words.iter().map(|word| (*word).to_owned()));
        all
    }
}

/// Finds the port in `Forwarding from 127.0.0.1:PORT -> …`.
fn listens(line: &str) -> Option<u16> {
    line.split_once(" -> ")?.0.rsplit_once(':')?.1.parse().ok()
}

/// Finds the pods of DaemonSets with an account of `peerpod-node`: everyone may make pods with the same labels. A pod
/// that is not ready answers, too.
fn by_node(pods: Vec<Pod>, accounts: &[(String, String)]) -> BTreeMap<String, Result<Pod, String>> {
    let mut found: BTreeMap<String, Vec<Pod>> = BTreeMap::new();
    for pod in pods {
        let spec = pod.spec.as_ref();
        let account = (
            pod.namespace().unwrap_or_default(),
            spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        );
        let owned =
            pod.owner_references().iter().any(|one| one.kind == "DaemonSet" && one.controller == Some(true));
        let is_node = pod.labels().get(COMPONENT).is_some_and(|component| component == NODE);
        let Some(node) = spec.and_then(|spec| spec.node_name.clone()) else { continue };
        if !(is_node && owned && accounts.contains(&account)) {
            continue;
        }
        let running = found.entry(node).or_default();
        if is_running(&pod) {
            running.push(pod);
        }
    }
    let the_one = |mut running: Vec<Pod>| match (running.pop(), running.pop()) {
        (Some(pod), None) => Ok(pod),
        (Some(one), Some(other)) => Err(format!(
            "pods {} and {} of peerpod-node run there; see `kubectl get daemonsets`",
            one.name_any(),
            other.name_any()
        )),
        (None, _) => Err(NO_DAEMON.to_owned()),
    };
    found.into_iter().map(|(node, running)| (node, the_one(running))).collect()
}

/// Whether the pod runs and is not ending.
fn is_running(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
}

/// Folder of the sockets in the container of `peerpod-node`: the chart's `paths.run`.
fn run_dir(pod: &Pod) -> String {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers).filter(|one| one.name == NODE);
    let mut mounts = containers.flat_map(|container| container.volume_mounts.iter().flatten());
    let mount = mounts.find(|mount| mount.name == "run");
    mount.map_or_else(|| "/run/peerpod".to_owned(), |mount| mount.mount_path.clone())
}

/// Whether this can be the name of a Node. A PeerPod's `nodeName` may be any text.
fn is_name(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    !name.starts_with('.') && name.bytes().all(is_part)
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_peerpod_names_no_path_as_its_node() {
        for (name, is) in [("worker-1.example", true), ("10.0.0.7", true), ("..", false), ("a/b", false)] {
            assert_eq!(is_name(name), is, "{name}");
        }
    }

    #[test]
    fn the_folder_of_the_sockets_is_that_of_the_pod() {
        let pod = |mounts| {
            from_value::<Pod>(json!({"metadata": {"name": "n"}, "spec": {"containers": [
                {"name": "other", "volumeMounts": [{"name": "run", "mountPath": "/x"}]},
                {"name": "node", "volumeMounts": mounts}]}}))
            .unwrap()
        };
        assert_eq!(run_dir(&pod(json!([{"name": "run", "mountPath": "/var/run/pp"}]))), "/var/run/pp");
        assert_eq!(run_dir(&pod(json!([]))), "/run/peerpod");
    }

    #[test]
    fn only_one_running_pod_with_the_account_of_the_node_is_asked() {
        let accounts = [("home".to_owned(), "pp-node".to_owned())];
        let pod = |name: &str, change: fn(&mut serde_json::Value)| {
            let mut pod = json!({
                "metadata": {"namespace": "home", "name": name, "labels": {COMPONENT: NODE}, "ownerReferences": [
                    {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true}]},
                "spec": {"nodeName": "n", "serviceAccountName": "pp-node", "containers": []},
                "status": {"phase": "Running"}});
            change(&mut pod);
            from_value::<Pod>(pod).unwrap()
        };
        let asked =
            |pods: &[&Pod]| by_node(pods.iter().map(|&pod| pod.clone()).collect(), &accounts).remove("n");
        let good = pod("good", |_| ());
        for foreign in [
            pod("a", |pod| pod["metadata"]["namespace"] = "tenant".into()),
            pod("b", |pod| pod["spec"]["serviceAccountName"] = "default".into()),
            pod("c", |pod| pod["metadata"]["ownerReferences"][0]["kind"] = "ReplicaSet".into()),
            pod("d", |pod| pod["metadata"]["labels"][COMPONENT] = "relay".into()),
        ] {
            assert!(asked(&[&foreign]).is_none(), "{foreign:?}");
            assert_eq!(asked(&[&foreign, &good, &foreign]).unwrap().unwrap().name_any(), "good");
        }
        for silent in [
            pod("e", |pod| pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into()),
            pod("f", |pod| pod["status"]["phase"] = "Pending".into()),
        ] {
            assert_eq!(asked(&[&silent]).unwrap().unwrap_err(), NO_DAEMON);
            assert_eq!(asked(&[&silent, &good, &silent]).unwrap().unwrap().name_any(), "good");
        }
        let other = pod("other", |_| ());
        for pods in [&[&good, &other][..], &[&good, &other, &good]] {
            let why = asked(pods).unwrap().unwrap_err();
            assert!(why.contains("of peerpod-node run there"), "{why}");
        }
    }

    #[test]
    fn the_port_is_that_which_kubectl_prints() {
        assert_eq!(listens("Forwarding from 127.0.0.1:40001 -> 8080\n"), Some(40_001));
        assert_eq!(listens("Forwarding from [::1]:40002 -> 8080\n"), Some(40_002));
        assert_eq!(listens("error: no pod\n"), None);
    }
}
