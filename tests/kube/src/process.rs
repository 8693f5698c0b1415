//! Finds the servers' programs, starts them so that they end with the test's process, and reads the end of their logs.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use peerpod_world::{Container, Spawner};

/// A process that ends when this is dropped, and when the test's process ends.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// Its own cgroup, which is removed after its end.
    cgroup: Option<PathBuf>,
}

/// Folders of the memory controller in version 1 and in version 2, with the file of the limit.
const MEMORY: [(&str, &str); 2] =
    [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];

impl Process {
    /// Starts a process in this folder; its output goes to `<name>.log` there.
    ///
    /// # Errors
    /// When the program does not exist.
    pub fn start(name: &str, program: &Path, arguments: &[String], folder: &Path) -> Result<Process> {
        Process::start_as(name, program, arguments, folder, false)
    }

    /// Starts a process that may use this many bytes of memory: in a cgroup, or else with a limit of its data.
    ///
    /// # Errors
    /// When the program does not exist.
    pub fn start_limited(
        bytes: u64,
        name: &str,
        program: &Path,
        arguments: &[String],
        folder: &Path,
    ) -> Result<Process> {
        let cgroup = MEMORY.iter().find_map(|(controller, file)| {
            let cgroup = Path::new(controller).join(format!("peerpod-test-{}-{name}", std::process::id()));
            // In a mixture of both versions the second folder is none of a controller.
            if !Path::new(controller).join("cgroup.procs").exists() || fs::create_dir(&cgroup).is_err() {
                return None;
            }
            if fs::write(cgroup.join(file), bytes.to_string()).is_err() {
                drop(fs::remove_dir(&cgroup));
                return None;
            }
            Some(cgroup)
        });
        let (starter, mut words) = match &cgroup {
            Some(cgroup) => {
                let procs = cgroup.join("cgroup.procs").display().to_string();
                ("sh", vec!["-c".to_owned(), "echo $$ > \"$0\" && exec \"$@\"".to_owned(), procs])
            }
            None => ("prlimit", vec![format!("--data={bytes}")]),
        };
        words.push(program.display().to_string());
        words.extend_from_slice(arguments);
        let mut process = Process::start_as(name, Path::new(starter), &words, folder, false)?;
        process.cgroup = cgroup;
        Ok(process)
    }

    /// Starts it as the first process of a PID namespace, in a container of the chart.
    ///
    /// # Errors
    /// When the program does not exist.
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
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = spawn(command, own_pids).with_context(|| format!("start {name}"))?;
        Ok(Process { name: name.to_owned(), child, log, cgroup: None })
    }

    /// Checks that it still runs.
    ///
    /// # Errors
    /// When it has ended; the error has the end of its log.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}):\n{}", self.name, self.last_lines()),
        }
    }

    /// Returns the name that it was started with.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends it a signal, by name.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: &str) -> Result<()> {
        let sent = Command::new("kill").args(["-s", signal, &self.child.id().to_string()]).status()?;
        anyhow::ensure!(sent.success(), "kill -s {signal} {}: {sent}", self.name);
        Ok(())
    }

    /// Returns its output so far.
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns the last 15 lines of its output.
    pub fn last_lines(&self) -> String {
        let text = self.said();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail only if the process has ended.
        drop(self.child.kill());
        drop(self.child.wait());
        if let Some(cgroup) = &self.cgroup {
            drop(fs::remove_dir(cgroup));
        }
    }
}

/// Starts a process from a thread that lives as long as this process: the kernel sends the parent-death signal when the
/// thread ends.
fn spawn(command: Command, own_pids: bool) -> Result<Child> {
    static SPAWNER: LazyLock<Result<Spawner>> = LazyLock::new(|| Spawner::start(None));
    match &*SPAWNER {
        Ok(spawner) => spawner.spawn(command, own_pids),
        Err(error) => bail!("the thread that starts processes: {error:#}"),
    }
}

/// Returns a port that was free a moment ago.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Returns the program that `tests/kube/build` builds.
///
/// # Errors
/// When it does not exist.
pub fn servers() -> Result<PathBuf> {
    beside_us("kube/kube-server").context("build it first (`tests/kube/build`, or `make test-kube`)")
}

/// Returns the OTLP receiver that `tests/kube/build` builds.
///
/// # Errors
/// When it does not exist.
pub fn otlp_receiver() -> Result<PathBuf> {
    beside_us("kube/otlp-receiver").context("build it first (`tests/kube/build`, or `make test-kube`)")
}

/// Returns one of Peerpod's programs from the tests' build.
///
/// # Errors
/// When it does not exist.
pub fn program(name: &str) -> Result<PathBuf> {
    beside_us(name).context("build it first (`make test-kube` does)")
}

/// Finds a file in the folder of the test's program, or in one above.
fn beside_us(name: &str) -> Result<PathBuf> {
    let us = std::env::current_exe()?;
    let found = us.ancestors().skip(1).take(4).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.with_context(|| format!("no {name} beside {}", us.display()))
}
