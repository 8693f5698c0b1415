//! Common start and end of a daemon: prints its version or its settings on request, sets its umask and limits, runs it.

use std::error::Error;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};

use tokio::runtime::Runtime;

use crate::chain::chain;
use crate::config::{self, Mistakes, Setting};
use crate::lifecycle::{self, Shutdown};
use crate::telemetry::{self, LogConfig};

/// Description of a program, for its own output.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Name of the binary.
    pub name: &'static str,
    /// Version of the package.
    pub version: &'static str,
    /// Purpose of the program, in one line.
    pub about: &'static str,
}

impl Program {
    /// Returns the text to print instead of running, if the first argument requests it. Only help calls `settings`.
    pub fn answer(
        &self,
        mut arguments: impl Iterator<Item = String>,
        settings: impl FnOnce() -> Vec<Setting>,
    ) -> Option<String> {
        let Program { name, version, about } = self;
        match arguments.next().as_deref() {
            Some("--version" | "-V") => Some(format!("{name} {version}\n")),
            Some("--help" | "-h" | "help") => Some(format!(
                "{name}: {about}\n\n\
                 settings, as flags (--key value), environment (PEERPOD_KEY) or YAML (--config FILE):\n{}",
                config::help(&settings())
            )),
            _ => None,
        }
    }

    /// Runs with these settings, and prints mistakes in them or the error. Exit codes: 0 stopped on request, 1 error,
    /// 2 mistakes.
    pub fn run<T, E: AsRef<dyn Error>>(
        &self,
        settings: Result<T, Mistakes>,
        run: impl FnOnce(T) -> Result<(), E>,
    ) -> ExitCode {
        match settings.map(run) {
            Ok(Ok(())) => ExitCode::SUCCESS,
            Ok(Err(error)) => {
                eprintln!("{}: {}", self.name, chain(error.as_ref()));
                ExitCode::FAILURE
            }
            Err(mistakes) => {
                eprintln!("{}: {mistakes}", self.name);
                ExitCode::from(2)
            }
        }
    }
}

/// Returns this process's arguments without its name.
pub fn arguments() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned())
}

/// Runs a daemon with its log, its limits and the shutdown of [`lifecycle::signals`]. `runtime` makes the runtime.
pub fn run<E: From<telemetry::Error> + From<io::Error>>(
    log: &LogConfig,
    runtime: impl FnOnce() -> io::Result<Runtime>,
    daemon: impl AsyncFnOnce(Shutdown) -> Result<(), E>,
) -> Result<(), E> {
    telemetry::init(log)?;
    if let Err(error) = own_rights_and_limits() {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    let runtime = runtime()?;
    runtime.spawn(telemetry::finish_lines());
    let ended = runtime.block_on(async { daemon(lifecycle::signals()?).await });
    // A blocking step that hangs (a netlink request, a read from a dead mount) must not keep the process alive.
    runtime.shutdown_timeout(Duration::from_secs(2));
    ended
}

/// Makes new files and sockets accessible to the owner alone, also before their permissions are set, and raises the
/// limit of open files to its maximum. Returns the error of raising the limit.
pub fn own_rights_and_limits() -> Result<(), Errno> {
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: Program = Program { name: "peerpod-x", version: "1.2.3", about: "does x" };

    fn answer(words: &[&str]) -> Option<String> {
        PROGRAM.answer(words.iter().map(ToString::to_string), Vec::new)
    }

    #[test]
    fn version_and_help_count_only_as_the_first_argument() {
        for word in ["--version", "-V"] {
            assert_eq!(answer(&[word]).as_deref(), Some("peerpod-x 1.2.3\n"));
        }
        for word in ["--help", "-h", "help"] {
            assert!(answer(&[word, "--x"]).unwrap().starts_with("peerpod-x: does x\n\nsettings"), "{word}");
        }
        for words in [&[][..], &["--config", "--help"], &["version"]] {
            assert_eq!(answer(words), None, "{words:?}");
        }
    }
}
