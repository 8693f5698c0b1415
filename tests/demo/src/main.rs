//! Runs `make demo`: one pod's whole path, with a line for each stage as it happens and a table at the end. The stages
//! are those of `peerpod_world::stages`, which the tests run too. The demo makes everything it needs under its own names
//! and removes all of it, even when a check fails and at Ctrl-C.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use peerpod_world::Settings;
use peerpod_world::stages::{self, Progress, Report};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Prints a line. A closed output, as with `peerpod-demo | head`, does not stop the demo.
macro_rules! say {
    ($($words:tt)*) => { writeln!(std::io::stdout(), $($words)*).ok() };
}

/// Exit code that shells report for a program ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

/// Width of the stages' names.
const NAME_WIDTH: usize = 46;

const USAGE: &str = "usage: peerpod-demo
  Walks through the stages of one pod, from CreateVM to its removal, and checks each. It takes no arguments, and needs
  root. Everything runs in namespaces of this machine, and is removed at the end.";

/// Runs the demo. A failed stage is an error. Exit code 2: it has arguments, and did nothing.
#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    match std::env::args_os().nth(1) {
        None => {}
        Some(word) if ["--help", "-h", "help"].iter().any(|help| word == *help) => {
            say!("{USAGE}");
            return Ok(ExitCode::SUCCESS);
        }
        Some(word) => {
            eprintln!("peerpod-demo: unexpected argument {word:?}\n{USAGE}");
            return Ok(ExitCode::from(2));
        }
    }
    // The handlers are installed first and kept until the clean-up is done: a second Ctrl-C does not interrupt it.
    let mut signals = Signals::new()?;
    say!("The stages of one pod: a VM beside its node, all in namespaces of this machine.\n");
    let began = Instant::now();
    let mut lines = Lines { live: std::io::stdout().is_terminal() };
    let outcome = tokio::select! {
        biased;
        name = signals.next() => {
            // Dropping the walk cleans up.
            return Ok(interrupted(name));
        }
        outcome = stages::walk(Settings::privileged(), &mut lines) => outcome,
    };
    let report = match outcome {
        Ok(report) => report,
        // A Ctrl-C can also reach a program that was just started; then its failure is no failure of the demo.
        Err(error) => match tokio::time::timeout(Duration::from_millis(20), signals.next()).await {
            Ok(name) => return Ok(interrupted(name)),
            Err(_) => return Err(error),
        },
    };
    table(&report, began.elapsed());
    Ok(ExitCode::SUCCESS)
}

fn interrupted(name: &str) -> ExitCode {
    say!("\n\n{name}: everything that was made is being taken away");
    ExitCode::from(INTERRUPTED)
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "Ctrl-C",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}

/// Prints the stages as they happen.
struct Lines {
    live: bool,
}

impl Progress for Lines {
    fn begin(&mut self, number: usize, of: usize, name: &str) {
        write!(std::io::stdout(), "{number:>2}/{of}  {name:<NAME_WIDTH$}").ok();
        if self.live {
            // A failed flush is ignored, like a closed output.
            std::io::stdout().flush().ok();
        }
    }

    fn done(&mut self, took: Duration, seen: &str) {
        say!("{:>8}  {seen}", seconds(took));
    }
}

fn table(report: &Report, total: Duration) {
    say!("\n{:<NAME_WIDTH$}{:>10}{:>8}", "stage", "took", "share");
    for stage in &report.passed {
        let share = stage.took.as_secs_f64() / total.as_secs_f64() * 100.0;
        say!("{:<NAME_WIDTH$}{:>10}{share:>7.1}%", stage.name, seconds(stage.took));
    }
    say!("{:<NAME_WIDTH$}{:>10}", "all of it", seconds(total));
    say!("\n{:<NAME_WIDTH$}{:>10}", "the node's own stages", "reached");
    for (name, at) in &report.inside {
        say!("{name:<NAME_WIDTH$}{:>10}", seconds(*at));
    }
}

fn seconds(duration: Duration) -> String {
    if duration < Duration::from_secs(1) {
        format!("{:.1} ms", duration.as_secs_f64() * 1e3)
    } else {
        format!("{:.2} s", duration.as_secs_f64())
    }
}
