//! Runs Helm and kubectl like a user, and reads the rendered objects.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use serde_json::Value;

use crate::Cluster;
use crate::process::servers;

/// Returns the path of a project's file or folder, given relative to the repository.
pub fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Returns the output of `helm` with these arguments. `home` is a folder for its own files.
///
/// # Errors
/// When it fails; the error has its error output.
pub fn helm(home: &Path, words: &[&str]) -> Result<String> {
    run(home, None, words)
}

/// Returns the words that run `helm`.
///
/// # Errors
/// When `tests/kube/build` did not make it.
pub fn helm_program() -> Result<String> {
    Ok(format!("{} helm", servers()?.display()))
}

/// Returns the output of `helm` with these arguments and this kubeconfig file. `home` is a folder for its own files.
///
/// # Errors
/// As [`helm`].
pub fn helm_of(home: &Path, kubeconfig: &Path, words: &[&str]) -> Result<String> {
    run(home, Some(kubeconfig), words)
}

/// Returns the output of `kubectl` with these arguments, without a cluster.
///
/// # Errors
/// As [`helm`].
pub fn kubectl(words: &[&str]) -> Result<String> {
    let done = Command::new(servers()?).arg("kubectl").args(words).output()?;
    if !done.status.success() {
        bail!("kubectl {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

impl Cluster {
    /// Returns the output of `helm` with these arguments, run with all rights.
    ///
    /// # Errors
    /// As [`helm`].
    pub fn helm(&self, words: &[&str]) -> Result<String> {
        run(self.folder(), Some(&self.folder().join("admin.kubeconfig")), words)
    }

    /// Installs the chart like a user into this namespace, which it makes. Returns Helm's output when the custom resources
    /// are established.
    ///
    /// # Errors
    /// As [`helm`].
    pub fn install(&self, namespace: &str, more: &[&str]) -> Result<String> {
        let chart = project("deploy/chart");
        let words = ["install", "peerpod", &chart.to_string_lossy(), "-n", namespace, "--create-namespace"];
        let said = self.helm(&[&words, more].concat())?;
        self.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;
        Ok(said)
    }

    /// Writes a kubeconfig file for a service account. With a pod, the token is bound to it like a kubelet's.
    ///
    /// # Errors
    /// When the API server issues no token.
    pub async fn kubeconfig_of(&self, namespace: &str, account: &str, pod: Option<&str>) -> Result<PathBuf> {
        let mut bound = None;
        if let Some(pod) = pod {
            let words = ["get", "pod", "-n", namespace, pod, "-o", "jsonpath={.metadata.uid}"];
            bound = Some((pod, self.kubectl(&words)?));
        }
        let bound = bound.as_ref().map(|(pod, uid)| (*pod, uid.as_str()));
        let token = self.token(namespace, account, &[], bound).await?;
        let file = self.folder().join(format!("{account}-{}.kubeconfig", pod.unwrap_or("unbound")));
        std::fs::write(&file, self.kubeconfig(&token))?;
        Ok(file)
    }
}

fn run(home: &Path, kubeconfig: Option<&Path>, words: &[&str]) -> Result<String> {
    let mut command = Command::new(servers()?);
    command.arg("helm").args(words).env("HOME", home).env_remove("XDG_CACHE_HOME");
    command.env("KUBECONFIG", kubeconfig.unwrap_or(Path::new("/nonexistent")));
    let done = command.output()?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        // helm prints a line for every link in the chart.
        let said: Vec<&str> = said.lines().filter(|line| !line.contains("found symbolic link")).collect();
        bail!("helm {}: {}{}", words.join(" "), said.join("\n"), String::from_utf8_lossy(&done.stdout));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Parses one object of each document, and leaves empty documents out.
///
/// # Errors
/// When the text is not YAML.
pub fn objects(yaml: &str) -> Result<Vec<Value>> {
    use serde::Deserialize;
    let all = serde_yaml::Deserializer::from_str(yaml).map(|document| Ok(Value::deserialize(document)?));
    let all: Result<Vec<Value>> = all.collect();
    Ok(all?.into_iter().filter(|object| !object.is_null()).collect())
}

/// Returns the object of this kind and name.
///
/// # Errors
/// When there is none.
pub fn object<'a>(all: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    let is = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
    match all.iter().find(is) {
        Some(object) => Ok(object),
        None => bail!("no {kind} {name}"),
    }
}
