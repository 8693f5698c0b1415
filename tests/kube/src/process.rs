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
        let log = folder.join(format!("{name}.log"));
        let out = File::create(&log).with_context(|| format!("make {}", log.display()))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program).args(arguments).current_dir(folder);
        // Not a setting of ours that a daemon of ours would know.
        command.env_remove("PEERPOD_BENCH");
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = spawn(command).with_context(|| format!("start {name}"))?;
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
