//! Runs other programs with bounded time and output. It may touch: processes of its own.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::time::timeout;

/// Size limit of a program's output, in bytes.
const OUTPUT: u64 = 4 << 20;

/// Returns the output of a program, or its beginning: the program is killed at the limit.
///
/// # Errors
/// The program is missing, fails (with its own text), or does not end within `limit`.
pub(crate) async fn output(words: &[&str], limit: Duration) -> anyhow::Result<String> {
    let Some((program, rest)) = words.split_first() else { bail!("no program") };
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("start {program}"))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let end = async {
        let read = tokio::try_join!(read(stdout), read(stderr));
        if read.is_err() {
            child.start_kill().ok();
        }
        std::io::Result::Ok((child.wait().await?, read))
    };
    let end = timeout(limit, end).await.with_context(|| format!("no end of {program} within {limit:?}"))?;
    match end.with_context(|| format!("wait for {program}"))? {
        (_, Err(beginning)) => Ok(format!("{}\n(cut after {OUTPUT} bytes)", lossy(&beginning))),
        (status, Ok((stdout, _))) if status.success() => Ok(lossy(&stdout)),
        (status, Ok((_, stderr))) => bail!("{program}: {status}: {}", lossy(&stderr).trim()),
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns all that a program wrote, or the beginning as an error if the limit is reached.
async fn read(from: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        // After a failure there is no more to read, and the program's status tells the rest.
        from.take(OUTPUT).read_to_end(&mut bytes).await.ok();
    }
    let is_cut = u64::try_from(bytes.len()).is_ok_and(|length| length >= OUTPUT);
    if is_cut { Err(bytes) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_with_endless_output_is_killed_at_the_limit() {
        const LIMIT: Duration = Duration::from_secs(60);
        let text = output(&["yes"], LIMIT).await.unwrap();
        assert!(text.ends_with("bytes)") && text.len() < 5 << 20, "{} bytes", text.len());
        assert_eq!(output(&["echo", "a"], LIMIT).await.unwrap(), "a\n");
        let error = output(&["sh", "-c", "echo reason >&2; exit 3"], LIMIT).await.unwrap_err().to_string();
        assert!(error.ends_with("reason"), "{error}");
    }
}
