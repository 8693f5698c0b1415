//! The servers as processes: found, started so that they die with us, and their last words.

use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{OnceLock, mpsc},
};

use anyhow::{Context, Result, bail};

/// A process that ends when this is dropped, and when the test's process ends.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Process {
    pub(crate) fn start(name: &'static str, program: &Path, arguments: &[String], folder: &Path) -> Result<Process> {
        let log = folder.join(format!("{name}.log"));
        let out = File::create(&log).with_context(|| format!("make {}", log.display()))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program).args(arguments).current_dir(folder);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = spawn(command).with_context(|| format!("start {name}"))?;
        Ok(Process { name, child, log })
    }

    /// Says why, if it has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}):\n{}", self.name, self.last_words()),
        }
    }

    pub(crate) fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
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
fn spawn(command: Command) -> Result<Child> {
    type Job = (Command, mpsc::Sender<std::io::Result<Child>>);
    static KEEPER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (jobs, todo) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, done) in todo {
                // Fails only when nobody waits any more.
                drop(done.send(command.spawn()));
            }
        });
        jobs
    });
    let (done, result) = mpsc::channel();
    keeper.send((command, done)).ok().context("the thread that starts processes ended")?;
    Ok(result.recv().context("the thread that starts processes ended")??)
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Where `tests/kube/build` puts its program.
pub(crate) fn servers() -> Result<PathBuf> {
    let us = std::env::current_exe()?;
    for folder in us.ancestors() {
        let path = folder.join("kube/kube-server");
        if path.is_file() {
            return Ok(path);
        }
    }
    bail!("no kube/kube-server beside {}: build it first (`tests/kube/build`, or `make test-kube`)", us.display())
}
