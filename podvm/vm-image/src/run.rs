//! Runs other programs to their end, within a time limit, without a shell. A program's error output is in the error.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Time limit of every step; the longest real step, compression, takes seconds.
const PATIENCE: Duration = Duration::from_secs(600);
const LOOK: Duration = Duration::from_millis(20);

/// Runs a program with these arguments.
///
/// # Errors
/// When the program cannot be started (the error names the package that has it), fails, or does not end in ten minutes.
pub(crate) fn run(program: &str, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
    with_input(tool(program).args(arguments), &[])
}

/// Returns a program as every step starts it: in the C locale and UTC, with the folders of system programs in its path.
/// The result depends on neither the user nor the machine.
pub(crate) fn tool(program: &str) -> Command {
    let mut command = Command::new(find(program).unwrap_or_else(|| program.into()));
    command.env("LC_ALL", "C").env("TZ", "UTC").env_remove("SOURCE_DATE_EPOCH");
    command
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let standard = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(standard)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// Runs a command to its end with `input` on its standard input, and returns its standard output.
///
/// # Errors
/// As [`run`].
pub(crate) fn with_input(command: &mut Command, input: &[u8]) -> anyhow::Result<Vec<u8>> {
    let what = format!("{command:?}");
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_owned();
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().with_context(
            || {
                format!(
                    "cannot start {} ({what}); `scripts/setup` installs what images are built with",
                    program.display()
                )
            },
        )?;
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
        let error = run("ls", &["/nonexistent"]).unwrap_err().to_string();
        assert!(error.contains("/nonexistent") && error.contains("No such file"), "{error}");
        let error = format!("{:#}", run("peerpod-no-such-program", &[]).unwrap_err());
        assert!(error.contains("scripts/setup"), "{error}");
    }

    #[test]
    fn more_than_a_pipe_holds_goes_through() {
        let input = vec![7; 3 << 20];
        assert_eq!(with_input(&mut tool("cat"), &input).unwrap(), input);
    }
}
