//! Helm, as a user runs it; and what it renders, object by object.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, bail};
use serde_json::Value;

use crate::{Cluster, process::servers};

/// A file or folder of the project, by its path below the top.
pub fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// What `helm` prints for these words. `home` is where it may keep what it likes.
///
/// # Errors
/// It failed; what it said is in the text.
pub fn helm(home: &Path, words: &[&str]) -> Result<String> {
    run(home, None, words)
}

/// What `kubectl` prints for these words, without a cluster.
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
    /// What `helm` prints for these words, as a user who may do everything.
    ///
    /// # Errors
    /// As [`helm`].
    pub fn helm(&self, words: &[&str]) -> Result<String> {
        run(self.folder(), Some(&self.folder().join("admin.kubeconfig")), words)
    }

    /// The chart, as a user installs it, in this namespace, which is made. Custom resources are there when it returns.
    ///
    /// # Errors
    /// As [`helm`].
    pub fn install(&self, namespace: &str, more: &[&str]) -> Result<()> {
        let chart = project("deploy/chart");
        let words = ["install", "peerpod", &chart.to_string_lossy(), "-n", namespace, "--create-namespace"];
        self.helm(&[&words, more].concat())?;
        self.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;
        Ok(())
    }

    /// A kubeconfig's file for a service account; bound to this pod, as a kubelet gives it its token.
    ///
    /// # Errors
    /// The API server gives no token.
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
        // It tells of every link in the chart.
        let said: Vec<&str> = said.lines().filter(|line| !line.contains("found symbolic link")).collect();
        bail!("helm {}: {}{}", words.join(" "), said.join("\n"), String::from_utf8_lossy(&done.stdout));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// One object of each document, the empty ones left out.
///
/// # Errors
/// It is not YAML.
pub fn objects(yaml: &str) -> Result<Vec<Value>> {
    use serde::Deserialize;
    let all = serde_yaml::Deserializer::from_str(yaml).map(|document| Ok(Value::deserialize(document)?));
    let all: Result<Vec<Value>> = all.collect();
    Ok(all?.into_iter().filter(|object| !object.is_null()).collect())
}

/// The one of this kind and name.
///
/// # Errors
/// There is none.
pub fn object<'a>(all: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    let is = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
    match all.iter().find(is) {
        Some(object) => Ok(object),
        None => bail!("no {kind} {name}"),
    }
}
