//! Runs other programs to their end, within a time limit, without a shell. A program's error output is in the error.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Time limit of every step; the longest real step, compression, takes seconds.
const PATIENCE: Duration = Duration::from_secs(600);
const LOOK: Duration = Duration::from_millis(20);

/// Runs a command to its end, and returns its standard output.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<Vec<u8>> {
    with_input(command, &[])
}

/// Returns a program as every step starts it: in the C locale and UTC, with the folders of system programs in its path.
/// The result depends on neither the user nor the machine.
pub(crate) fn tool(program: &str) -> Command {
    let mut command = Command::new(program);
    let standard = "/usr/sbin:/sbin:/usr/bin:/bin";
    let path = std::env::var("PATH").map_or(standard.to_owned(), |path| format!("{path}:{standard}"));
    command.env("PATH", path);
    command.env("LC_ALL", "C").env("TZ", "UTC").env_remove("SOURCE_DATE_EPOCH");
    command
}

/// Runs a command to its end with `input` on its standard input, and returns its standard output.
pub(crate) fn with_input(command: &mut Command, input: &[u8]) -> anyhow::Result<Vec<u8>> {
    let arguments = command.get_args().map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ");
    let what = format!("{} {arguments}", command.get_program().to_string_lossy());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| {
        format!("cannot start {what}; `scripts/setup` installs the programs that build images")
    })?;
    let (Some(mut stdin), Some(stdout), Some(stderr)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        bail!("{what}: no pipes");
    };
    thread::scope(|scope| {
        // A program that does not read all of its input reports the reason itself.
        scope.spawn(move || drop(stdin.write_all(input)));
        let output = scope.spawn(|| read_all(stdout));
        let errors = scope.spawn(|| read_all(stderr));
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if began.elapsed() > PATIENCE {
                child.kill()?;
                child.wait()?;
                bail!("{what}: not done within {PATIENCE:?}");
            }
            thread::sleep(LOOK);
        };
        let (Ok(output), Ok(errors)) = (output.join(), errors.join()) else {
            bail!("{what}: its output is lost")
        };
        if !status.success() {
            bail!("{what}: {status}: {}", String::from_utf8_lossy(&errors).trim());
        }
        Ok(output)
    })
}

fn read_all(mut from: impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    match from.read_to_end(&mut all) {
        Ok(_) | Err(_) => all, // output up to an error is kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_contains_the_output_of_the_program() {
        let error = output(tool("ls").arg("/nonexistent")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent") && error.contains("No such file"), "{error}");
        let error = format!("{:#}", output(&mut tool("peerpod-no-such-program")).unwrap_err());
        assert!(error.contains("scripts/setup"), "{error}");
    }

    #[test]
    fn more_than_a_pipe_holds_goes_through() {
        let input = vec![7; 3 << 20];
        assert_eq!(with_input(&mut tool("cat"), &input).unwrap(), input);
    }
}
