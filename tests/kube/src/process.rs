//! The servers as processes: found, started so that they die with us, and their last words.

use std::{
    ffi::OsStr,
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::LazyLock,
};

use anyhow::{Context, Result, bail};
use peerpod_world::{Container, Spawner};

/// A process that ends when this is dropped, and when the test's process ends.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts one; what it says goes to `<name>.log` in this folder, where it runs.
    ///
    /// # Errors
    /// There is no such program.
    pub fn start(name: &str, program: &Path, arguments: &[String], folder: &Path) -> Result<Process> {
        Process::start_as(name, program, arguments, folder, false)
    }

    /// The same as the first process of a PID namespace, in a container of the chart.
    ///
    /// # Errors
    /// There is no such program.
    pub fn start_in(
        container: &Container,
        name: &str,
        program: &Path,
        arguments: &[String],
        folder: &Path,
    ) -> Result<Process> {
        let (starter, words) = container.command(program, arguments)?;
        Process::start_as(name, &starter, &words, folder, true)
    }

    fn start_as<Word: AsRef<OsStr>>(
        name: &str,
        program: &Path,
        arguments: &[Word],
        folder: &Path,
        own_pids: bool,
    ) -> Result<Process> {
        let log = folder.join(format!("{name}.log"));
        let out = File::create(&log).with_context(|| format!("make {}", log.display()))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program).args(arguments).current_dir(folder);
        // Not a setting of ours that a daemon of ours would know.
        command.env_remove("PEERPOD_BENCH");
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = spawn(command, own_pids).with_context(|| format!("start {name}"))?;
        Ok(Process { name: name.to_owned(), child, log })
    }

    /// Says why, if it has ended.
    ///
    /// # Errors
    /// It has; its last words are in the text.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}):\n{}", self.name, self.last_words()),
        }
    }

    /// What it was started as.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Sends it a signal, by its name.
    ///
    /// # Errors
    /// It is gone.
    pub fn signal(&self, signal: &str) -> Result<()> {
        let sent = Command::new("kill").args(["-s", signal, &self.child.id().to_string()]).status()?;
        anyhow::ensure!(sent.success(), "kill -s {signal} {}: {sent}", self.name);
        Ok(())
    }

    /// What it has said until now.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn last_words(&self) -> String {
        let text = self.said();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a process that is gone.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Starts it from a thread that lives as long as this process: the kernel's "when the parent dies" means the thread.
fn spawn(command: Command, own_pids: bool) -> Result<Child> {
    static SPAWNER: LazyLock<Result<Spawner>> = LazyLock::new(|| Spawner::start(None));
    match &*SPAWNER {
        Ok(spawner) => spawner.spawn(command, own_pids),
        Err(error) => bail!("the thread that starts processes: {error:#}"),
    }
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Where `tests/kube/build` puts its program.
pub(crate) fn servers() -> Result<PathBuf> {
    beside_us("kube/kube-server").context("build it first (`tests/kube/build`, or `make test-kube`)")
}

/// A program of ours, as the build of the tests has made it.
///
/// # Errors
/// It is not there.
pub fn program(name: &str) -> Result<PathBuf> {
    beside_us(name).context("build it first (`make test-kube` does)")
}

/// In the folder of the test's program, or in one above.
fn beside_us(name: &str) -> Result<PathBuf> {
    let us = std::env::current_exe()?;
    let found = us.ancestors().skip(1).take(4).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.with_context(|| format!("no {name} beside {}", us.display()))
}
