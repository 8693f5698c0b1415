//! What the agent writes to its stdout and stderr: to the console, as it is, and line by line into the log's ring. Of the
//! agent's own log only warnings and worse go there: below that it writes whole requests, a container's environment among
//! them, and the node's log is read by more people than may read a pod's secrets.
//!
//! It writes into a named pipe that it holds open itself for reading, too: so a death of this program is no broken pipe
//! for the agent, and what it says meanwhile is read by our next run. The reading is a thread's, because the console
//! may be a slow serial line, and the link must not wait for it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::AsFd,
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::stat::Mode,
    unistd::mkfifo,
};
use peerpod_link::record::{Level, MAX_TEXT};

use crate::log::Ring;

/// Whose lines they are.
const TARGET: &str = "kata-agent";
/// What the agent may say while nobody reads; then it waits.
const PIPE: i32 = 1 << 20;
/// Bytes that are written to the console at once: a slow serial line is locked for so long against other writers.
const PIECE: usize = 1 << 10;

/// The pipe between the agent and us.
pub(super) struct Output {
    path: PathBuf,
    ring: Ring,
    /// Somebody reads: what is written to a pipe that nobody reads would stop the agent.
    is_read: AtomicBool,
}

impl Output {
    pub(super) fn new(path: PathBuf, ring: Ring) -> Output {
        Output { path, ring, is_read: AtomicBool::new(false) }
    }

    /// Begins to read, once: the pipe is there from then on. Also for an agent that an earlier run started.
    pub(super) fn read(&self) -> io::Result<()> {
        let pipe = open(&self.path)?;
        let ring = self.ring.clone();
        // Our own descriptor: the standard library's has a lock, and what this program itself says would wait for it.
        let console = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        std::thread::Builder::new().name("agent-output".into()).spawn(move || copy(pipe, console, &ring))?;
        self.is_read.store(true, Relaxed);
        Ok(())
    }

    /// For the agent: the pipe, or our own console where nobody reads it.
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
    // Both ways: an open for reading alone would wait for a writer, and the writer must be its own reader.
    let flags = nix::libc::O_CLOEXEC | nix::libc::O_NOFOLLOW;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.file_type().is_fifo() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is there and is no pipe"));
    }
    if let Err(error) = fcntl(&file, FcntlArg::F_SETPIPE_SZ(PIPE)) {
        tracing::debug!(%error, "the agent's pipe stays as small as it is");
    }
    Ok(file)
}

fn copy(mut pipe: File, mut console: File, ring: &Ring) {
    let (mut buffer, mut lines) = (vec![0; 16 << 10], Lines::default());
    loop {
        match pipe.read(&mut buffer) {
            Ok(0) => return, // not while we hold it open for writing
            Ok(n) => {
                for piece in buffer[..n].chunks(PIECE) {
                    // A console that takes nothing is no reason to stop reading.
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

/// Bytes put together to lines; of one that is too long, the beginning.
#[derive(Default)]
struct Lines {
    begun: Vec<u8>,
}

impl Lines {
    fn add(&mut self, bytes: &[u8], mut say: impl FnMut(&str)) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = match part.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (part, false),
            };
            let room = MAX_TEXT - self.begun.len();
            self.begun.extend_from_slice(&text[..text.len().min(room)]);
            if ends {
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

/// Whether a line may go to the node: what is no line of the agent's log (a panic, a library), and of that log what warns.
/// One that was cut says no level any more and stays.
fn leaves_the_vm(line: &str) -> bool {
    !line.trim_start().starts_with('{') || level(line) <= Level::Warn
}

/// The agent writes JSON lines with a `level` (slog's short names); anything else is information.
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
    fn lines_come_whole_however_they_were_cut_and_never_longer_than_allowed() {
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
    fn bytes_that_are_no_text_are_a_line_all_the_same() {
        let mut seen = Vec::new();
        Lines::default().add(b"a\xff\xfeb\n", |line| seen.push(line.to_owned()));
        assert_eq!(seen, ["a\u{fffd}\u{fffd}b"]);
    }

    #[test]
    fn requests_that_the_agent_writes_down_stay_in_the_vm() {
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
