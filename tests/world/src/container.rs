//! Describes a container of the chart and starts a program with its rights.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::mount::{MsFlags, mount};

use crate::binary;

/// Container with its volumes, each by its name in the chart, and the folders that an operator adds.
#[derive(Debug, Clone, Default)]
pub struct Container {
    /// Name in the chart.
    pub name: &'static str,
    /// Volumes of the chart with their paths on this machine.
    pub volumes: Vec<(&'static str, PathBuf)>,
    /// Folders that an operator adds as host paths, such as a provider's files (`node.extraVolumes`).
    pub extra: Vec<PathBuf>,
    /// Variables of the environment beyond this process's, each `NAME=VALUE`.
    pub env: Vec<String>,
}

impl Container {
    /// Returns the command that starts a program with the container's rights. Its process must be the first of a PID
    /// namespace.
    pub fn command<Word: AsRef<OsStr>>(
        &self,
        program: &Path,
        arguments: &[Word],
    ) -> anyhow::Result<(PathBuf, Vec<OsString>)> {
        let mut words = vec![OsString::from(self.name)];
        for (name, path) in &self.volumes {
            // As the kubelet does, make the folders of a host path writable by root alone.
            if !path.exists() {
                fs::DirBuilder::new().recursive(true).mode(0o755).create(path)?;
            }
            let mut volume = OsString::from(format!("{name}="));
            volume.push(path);
            words.extend(["--volume".into(), volume]);
        }
        for path in &self.extra {
            words.extend(["--extra".into(), path.into()]);
        }
        words.extend(self.env.iter().flat_map(|entry| ["--env".into(), entry.into()]));
        words.extend(["--".into(), program.into()]);
        words.extend(arguments.iter().map(|word| word.as_ref().to_owned()));
        Ok((binary("peerpod-test-container")?, words))
    }
}

/// Makes the folder a shared mount, as the kubelet's folder is on a node. Does nothing if it is one already.
pub fn share(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)?;
    let none = None::<&str>;
    let attempt = || format!("make {} a shared mount", folder.display());
    if mount(none, folder, none, MsFlags::MS_SHARED, none).is_ok() {
        return Ok(());
    }
    mount(Some(folder), folder, none, MsFlags::MS_BIND, none).with_context(attempt)?;
    mount(none, folder, none, MsFlags::MS_SHARED, none).with_context(attempt)
}
