//! Adds the files that every image has: the guest program, an agent with its configuration, certificates, accounts.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::arch::Arch;
use crate::inputs::{self, Inputs};
use crate::kata::Kata;
use crate::program;
use crate::report::{Report, sha256};
use crate::tree::Tree;

/// Path of the agent, a kata-agent or the test agent.
const AGENT: &str = "usr/local/bin/kata-agent";
const PULL: &str = "usr/local/bin/peerpod-pull";
/// The socket is not below /run/kata-containers, because CreateSandbox removes that folder. The agent starts no
/// attestation processes: the guest program starts them, in order.
const AGENT_CONFIG: &str =
    "server_addr = \"unix:///run/peerpod/agent.sock\"\nguest_components_procs = \"none\"\n";
/// If the VM has a data disk, it is mounted on /var/lib/peerpod. All other settings are the guest program's defaults.
const SETTINGS: &str = "{\"version\":1,\"images\":{\"store\":\"/var/lib/peerpod/images\"}}\n";
/// File that the test agent prints on the console at each boot.
const NOTICE_PATH: &str = "etc/peerpod/test-agent";
const NOTICE: &str =
    "this image has the project's test agent instead of a kata-agent: it is not for production\n";
const PASSWD: &str =
    "root:x:0:0:root:/:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
const GROUP: &str = "root:x:0:\nnogroup:x:65534:\n";
const HOSTS: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";

/// Programs and folders that the user supplies.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SuppliedParts {
    /// peerpod-guest, a static build
    #[arg(long, value_name = "PATH", default_value_os_t = beside("peerpod-guest"))]
    guest: PathBuf,
    /// peerpod-pull, a static build
    #[arg(long, value_name = "PATH", default_value_os_t = beside("peerpod-pull"))]
    pull: PathBuf,
    /// Kata release that has agent and pause bundle: its archive, a guest image of it, a folder, or a version to download
    #[arg(long, value_name = "PATH|VERSION", conflicts_with_all = ["kata_agent", "pause_bundle"])]
    kata: Option<String>,
    /// kata-agent as a file; with neither this nor --kata the image gets the test agent and is not for production
    #[arg(long, value_name = "PATH")]
    kata_agent: Option<PathBuf>,
    /// The project's test agent, for an image without --kata-agent
    #[arg(long, value_name = "PATH")]
    test_agent: Option<PathBuf>,
    /// The OCI bundle that kata-agent runs as a pod's sandbox container: config.json and rootfs; it becomes /pause_bundle
    #[arg(long, value_name = "DIR")]
    pause_bundle: Option<PathBuf>,
    /// Confidential guest components and their dependencies: a folder that is laid over the image's root
    #[arg(long, value_name = "DIR")]
    guest_components: Option<PathBuf>,
    /// Folder of the providers: each guest.toml describes how a VM recognises its cloud and reads its user-data
    #[arg(long, value_name = "DIR", default_value_os_t = beside("providers"))]
    providers: PathBuf,
}

/// Returns the path of a file or folder that is beside this program, as in a release, or otherwise below the current
/// folder, as in the repository.
pub(crate) fn beside(name: &str) -> PathBuf {
    let program = std::env::current_exe().ok();
    let path = program.and_then(|program| Some(program.parent()?.join(name)));
    path.filter(|path| path.exists()).unwrap_or_else(|| name.into())
}

impl SuppliedParts {
    /// Takes agent and pause bundle out of the Kata release of `--kata`, into a folder in `work`.
    pub(crate) fn find_kata(&mut self, arch: Arch, cache: &Path, work: &Path) -> anyhow::Result<()> {
        let Some(source) = &self.kata else { return Ok(()) };
        let found = Kata::find(source, arch, cache, &inputs::folder(work, "kata")?)?;
        (self.kata_agent, self.pause_bundle) = (Some(found.agent), found.pause_bundle);
        Ok(())
    }

    /// Adds all parts, and notes the supplied ones in the report.
    pub(crate) fn add(
        &self,
        tree: &mut Tree,
        guest_path: &str,
        inputs: &Inputs,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        add_static(tree, guest_path, &self.guest, inputs.arch)?;
        add_static(tree, PULL, &self.pull, inputs.arch)?;
        tree.file("etc/peerpod/guest.json", 0o644, SETTINGS.as_bytes());
        self.sources(tree)?;
        if let Some(folder) = &self.guest_components {
            tree.add_folder("", folder).context("--guest-components")?;
            report.supplied.insert("guest-components", tree_digest(folder)?);
        }
        match (&self.kata_agent, &self.test_agent) {
            (Some(agent), _) => {
                tree.add_file(AGENT, agent)?;
                report.supplied.extend(tree.content(AGENT).map(|agent| ("kata-agent", sha256(agent))));
            }
            (None, Some(agent)) => {
                tree.add_file(AGENT, agent)?;
                tree.file(NOTICE_PATH, 0o644, NOTICE.as_bytes());
                report.test_agent = true;
            }
            (None, None) => {
                bail!("no agent: give --kata (or, for an image to test with, --test-agent)")
            }
        }
        let option = if report.test_agent { "--test-agent" } else { "--kata-agent" };
        program::check_supplied(AGENT, tree, &inputs.packages, inputs.arch).context(option)?;
        tree.file("etc/agent-config.toml", 0o644, AGENT_CONFIG.as_bytes());
        if let Some(bundle) = &self.pause_bundle {
            for part in ["config.json", "rootfs"] {
                let shown = bundle.display();
                ensure!(
                    bundle.join(part).exists(),
                    "--pause-bundle: {shown} has no {part}: not an OCI bundle"
                );
            }
            tree.directory("pause_bundle", 0o755);
            tree.add_folder("pause_bundle", bundle).context("--pause-bundle")?;
            report.supplied.insert("pause-bundle", tree_digest(bundle)?);
        }
        tree.file("etc/hosts", 0o644, HOSTS.as_bytes());
        Ok(())
    }

    fn sources(&self, tree: &mut Tree) -> anyhow::Result<()> {
        let what = || format!("read the providers in {}", self.providers.display());
        for entry in std::fs::read_dir(&self.providers).with_context(what)? {
            let folder = entry?.path();
            let file = folder.join("guest.toml");
            if let (true, Some(name)) = (file.is_file(), folder.file_name().and_then(|name| name.to_str())) {
                let text = std::fs::read(&file).with_context(what)?;
                let json: serde_json::Value =
                    basic_toml::from_slice(&text).with_context(|| format!("read {}", file.display()))?;
                let path = format!("etc/peerpod/sources/{name}.json");
                tree.file(&path, 0o644, format!("{json}\n").into_bytes());
            }
        }
        Ok(())
    }
}

/// Adds a static program, which runs independently of the image's libraries.
pub(crate) fn add_static(tree: &mut Tree, path: &str, from: &Path, arch: Arch) -> anyhow::Result<()> {
    tree.add_file(path, from)?;
    let content = tree.content(path).unwrap_or_default();
    let from = from.display();
    let program = program::Program::read(content, arch).with_context(|| from.to_string())?;
    let needs = program.libraries.join(", ");
    ensure!(
        program.interpreter.is_none() && needs.is_empty(),
        "{from}: must be a static build (--target {}-unknown-linux-musl): it needs {needs}",
        arch.name()
    );
    Ok(())
}

/// Adds the accounts of an image without other services. None permits a login.
pub(crate) fn accounts(tree: &mut Tree) {
    tree.file("etc/passwd", 0o644, PASSWD.as_bytes());
    tree.file("etc/group", 0o644, GROUP.as_bytes());
}

/// Joins all certificates of the distribution into the one file where programs look for them.
pub(crate) fn certificates(tree: &mut Tree, packages: &Tree) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for (path, _, content) in packages.files() {
        if path.starts_with("usr/share/ca-certificates/") && path.ends_with(".crt") {
            all.extend_from_slice(content);
            if !all.ends_with(b"\n") {
                all.push(b'\n');
            }
        }
    }
    ensure!(!all.is_empty(), "no package has certificates");
    tree.file("etc/ssl/certs/ca-certificates.crt", 0o644, all);
    Ok(())
}

/// Returns one digest for a folder, over the paths, modes and digests of its files, in order.
fn tree_digest(folder: &Path) -> anyhow::Result<String> {
    let mut tree = Tree::default();
    tree.add_folder("", folder)?;
    let lines: String =
        tree.files().map(|(path, mode, content)| format!("{path} {mode:o} {}\n", sha256(content))).collect();
    Ok(sha256(lines.as_bytes()))
}
