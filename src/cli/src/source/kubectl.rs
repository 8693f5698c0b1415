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

use super::Cluster;
use crate::run;

/// Time limit of a program in a pod. On a node the console and the list of VMs wait for the provider.
const EXEC: Duration = Duration::from_secs(90);
/// Time limit until kubectl listens.
const LISTENS: Duration = Duration::from_secs(30);
/// Label and container of `peerpod-node`, as the chart has them.
const NODE: &str = "node";
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
        let words = ["exec", "--namespace", namespace, pod, "--container", container, "--"];
        let words = self.kubectl(&[&words, program].concat());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = run::output(&words, EXEC).await;
        output.with_context(|| format!("run {} in pod {namespace}/{pod}", program.join(" ")))
    }

    /// Returns the ready pods of `peerpod-node`, by their node.
    ///
    /// # Errors
    /// The API server refuses or is away.
    pub(crate) async fn node_daemons(&self) -> anyhow::Result<BTreeMap<String, Pod>> {
        let pods = self.ours::<Pod>("Pods").await?.into_iter().filter(|pod| {
            let component = pod.labels().get("app.kubernetes.io/component");
            component.is_some_and(|component| component == NODE) && is_ready(pod)
        });
        let by_node = pods.filter_map(|pod| Some((pod.spec.as_ref()?.node_name.clone()?, pod)));
        Ok(by_node.collect())
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

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Folder of the sockets in the container of `peerpod-node`: the chart's `paths.run`.
fn run_dir(pod: &Pod) -> String {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers).filter(|one| one.name == NODE);
    let mut mounts = containers.flat_map(|container| container.volume_mounts.iter().flatten());
    let mount = mounts.find(|mount| mount.name == "run");
    mount.map_or_else(|| "/run/peerpod".to_owned(), |mount| mount.mount_path.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

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
    fn the_port_is_that_which_kubectl_prints() {
        assert_eq!(listens("Forwarding from 127.0.0.1:40001 -> 8080\n"), Some(40_001));
        assert_eq!(listens("Forwarding from [::1]:40002 -> 8080\n"), Some(40_002));
        assert_eq!(listens("error: no pod\n"), None);
    }
}
