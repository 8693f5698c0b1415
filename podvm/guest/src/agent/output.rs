//! Copies the kata-agent's stdout and stderr to the console and, line by line, into the log ring.
//!
//! Of the kata-agent's own log, only warnings and errors enter the ring. Its lower levels contain whole requests,
//! including container environments, and the node's log has more readers than may read a pod's secrets.
//!
//! The kata-agent writes into a named pipe that it also holds open for reading. The death of the guest is therefore no
//! broken pipe for the kata-agent, and the next run of the guest reads the output written meanwhile. A thread does the
//! reading: the console may be a slow serial line, and the link must not wait for it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use peerpod_link::record::{Level, MAX_TEXT};

use crate::log::Ring;

/// Log target of the kata-agent's lines.
const TARGET: &str = "kata-agent";
/// Capacity of the pipe in bytes. The kata-agent blocks when the pipe is full and has no reader.
const PIPE: i32 = 1 << 20;
/// Bytes per write to the console: a slow serial line is locked against other writers during a write.
const PIECE: usize = 1 << 10;

pub(super) struct Output {
    path: PathBuf,
    ring: Ring,
    /// Whether the reader thread runs. Without a reader, a full pipe would stop the kata-agent.
    is_read: AtomicBool,
}

impl Output {
    pub(super) fn new(path: PathBuf, ring: Ring) -> Output {
        Output { path, ring, is_read: AtomicBool::new(false) }
    }

    /// Starts the reader thread, and makes a missing pipe. Called once per run, also if an earlier run started the
    /// kata-agent.
    pub(super) fn read(&self) -> io::Result<()> {
        let pipe = open(&self.path)?;
        let ring = self.ring.clone();
        // A descriptor of its own: the standard library's stderr has a lock, and the guest's own log would wait for it.
        let console = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        std::thread::Builder::new().name("agent-output".into()).spawn(move || copy(pipe, console, &ring))?;
        self.is_read.store(true, Relaxed);
        Ok(())
    }

    /// Returns the output for the kata-agent: the pipe, or the guest's console if the pipe has no reader.
    pub(super) fn stdio(&self) -> Stdio {
        let pipe = self.is_read.load(Relaxed).then(|| open(&self.path)).and_then(Result::ok);
        pipe.map_or_else(Stdio::inherit, Stdio::from)
    }
}

fn open(path: &Path) -> io::Result<File> {
    match mkfifo(path, Mode::from_bits_truncate(0o600)) {
        Ok(()) | Err(nix::Error::EEXIST) => {}
        Err(error) => return Err(error.into()),
    }
    // Read and write: a read-only open would wait for a writer, and the writer must be its own reader.
    let flags = nix::libc::O_CLOEXEC | nix::libc::O_NOFOLLOW;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.file_type().is_fifo() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is no pipe"));
    }
    if let Err(error) = fcntl(&file, FcntlArg::F_SETPIPE_SZ(PIPE)) {
        tracing::debug!(%error, "cannot enlarge the agent's pipe");
    }
    Ok(file)
}

fn copy(mut pipe: File, mut console: File, ring: &Ring) {
    let (mut buffer, mut lines) = (vec![0; 16 << 10], Lines::default());
    loop {
        match pipe.read(&mut buffer) {
            Ok(0) => return, // not while this file is open for writing, too
            Ok(n) => {
                for piece in buffer[..n].chunks(PIECE) {
                    // Reading continues even if the console takes nothing.
                    drop(console.write_all(piece));
                }
                lines.add(&buffer[..n], |line| {
                    if leaves_the_vm(line) {
                        ring.say(level(line), TARGET, line);
                    }
                });
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot read the agent's output");
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }
}

/// Joins bytes into lines; keeps only the beginning of an overlong line.
#[derive(Default)]
struct Lines {
    begun: Vec<u8>,
}

impl Lines {
    fn add(&mut self, bytes: &[u8], mut say: impl FnMut(&str)) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            let room = MAX_TEXT - self.begun.len();
            self.begun.extend_from_slice(&text[..text.len().min(room)]);
            if text.len() < part.len() {
                let line = std::mem::take(&mut self.begun);
                let line = String::from_utf8_lossy(&line);
                let line = line.trim_end_matches('\r');
                if !line.is_empty() {
                    say(line);
                }
            }
        }
    }
}

/// Returns whether a line may go to the node. Lines outside the kata-agent's log (a panic, a library) may, and log
/// lines of level warning or above. A truncated log line has no readable level and stays in the VM.
fn leaves_the_vm(line: &str) -> bool {
    !line.trim_start().starts_with('{') || level(line) <= Level::Warn
}

/// Returns the level of a JSON line of the kata-agent (slog's short names); any other line has level info.
fn level(line: &str) -> Level {
    #[derive(serde::Deserialize)]
    struct Leveled<'a> {
        #[serde(borrow)]
        level: std::borrow::Cow<'a, str>,
    }
    let leveled: Option<Leveled<'_>> =
        line.starts_with('{').then(|| serde_json::from_str(line).ok()).flatten();
    match leveled.as_ref().map(|leveled| &*leveled.level) {
        Some("CRIT" | "ERRO" | "ERROR") => Level::Error,
        Some("WARN") => Level::Warn,
        Some("DEBG" | "DEBUG") => Level::Debug,
        Some("TRCE" | "TRACE") => Level::Trace,
        _ => Level::Info,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_for_any_chunks_and_bounded_in_length() {
        let said = format!("one\r\n\n\u{fc}ber\n{}\nlast\nnot ended", "x".repeat(100_000));
        for step in [1, 7, 4096, usize::MAX] {
            let (mut lines, mut seen) = (Lines::default(), Vec::new());
            for part in said.as_bytes().chunks(step.min(said.len())) {
                lines.add(part, |line| seen.push(line.to_owned()));
                assert!(lines.begun.len() <= MAX_TEXT);
            }
            assert_eq!((seen[0].as_str(), seen[1].as_str(), seen[2].len()), ("one", "\u{fc}ber", MAX_TEXT));
            assert_eq!((seen[3].as_str(), seen.len()), ("last", 4));
        }
    }

    #[test]
    fn bytes_that_are_no_utf8_make_a_line() {
        let mut seen = Vec::new();
        Lines::default().add(b"a\xff\xfeb\n", |line| seen.push(line.to_owned()));
        assert_eq!(seen, ["a\u{fffd}\u{fffd}b"]);
    }

    #[test]
    fn requests_in_the_agents_log_stay_in_the_vm() {
        let spec = r#"{"msg":"receive createcontainer, spec: env: [\"PASSWORD=x\"]","level":"INFO"}"#;
        assert!(!leaves_the_vm(spec));
        assert!(!leaves_the_vm(&spec[..40]), "cut");
        assert!(!leaves_the_vm(&spec.replace("INFO", "DEBG")));
        assert!(leaves_the_vm(&spec.replace("INFO", "WARN")) && leaves_the_vm(&spec.replace("INFO", "ERRO")));
        assert!(leaves_the_vm("thread 'main' panicked at src/main.rs:1"));
    }

    #[test]
    fn the_agent_s_own_levels_are_kept() {
        assert_eq!(level(r#"{"msg":"x \"y\"","level":"ERRO","ts":"2024"}"#), Level::Error);
        assert_eq!(level(r#"{"msg":"x","level":"DEBG"}"#), Level::Debug);
        assert_eq!(level(r#"{"level":7}"#), Level::Info);
        assert_eq!(level("thread 'main' panicked"), Level::Info);
    }
}
