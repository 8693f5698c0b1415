//! Runs other programs with bounded time and output. It may touch: processes of its own.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::time::timeout;

/// Size limit of a program's output as text, in bytes.
const OUTPUT: u64 = 4 << 20;

/// Returns the output of a program, or its beginning: the program is killed at the limit.
///
/// # Errors
/// The program is missing, fails (with its own text), or does not end within `limit`.
pub(crate) async fn output(words: &[&str], limit: Duration) -> anyhow::Result<String> {
    Ok(match run(words, limit, OUTPUT).await? {
        Output::Whole(stdout) => lossy(&stdout),
        Output::Cut(beginning) => format!("{}\n(cut after {OUTPUT} bytes)", lossy(&beginning)),
    })
}

/// Returns the whole output of a program.
///
/// # Errors
/// As [`output`], and if the output has `most` bytes or more.
pub(crate) async fn bytes(words: &[&str], limit: Duration, most: u64) -> anyhow::Result<Vec<u8>> {
    match run(words, limit, most).await? {
        Output::Whole(stdout) => Ok(stdout),
        Output::Cut(_) => bail!("the output has {most} bytes or more, or the errors have {OUTPUT}"),
    }
}

/// Output of a program that ended well, or that reached the limit.
enum Output {
    Whole(Vec<u8>),
    Cut(Vec<u8>),
}

async fn run(words: &[&str], limit: Duration, most: u64) -> anyhow::Result<Output> {
    let Some((program, rest)) = words.split_first() else { bail!("no program") };
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("start {program}"))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let end = async {
        let read = tokio::try_join!(read(stdout, most), read(stderr, OUTPUT));
        if read.is_err() {
            child.start_kill().ok();
        }
        std::io::Result::Ok((child.wait().await?, read))
    };
    let end = timeout(limit, end).await.with_context(|| format!("no end of {program} within {limit:?}"))?;
    match end.with_context(|| format!("wait for {program}"))? {
        (_, Err(beginning)) => Ok(Output::Cut(beginning)),
        (status, Ok((stdout, _))) if status.success() => Ok(Output::Whole(stdout)),
        (status, Ok((_, stderr))) => bail!("{program}: {status}: {}", lossy(&stderr).trim()),
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns all that a program wrote, or the beginning as an error if the limit is reached.
async fn read(from: Option<impl AsyncRead + Unpin>, most: u64) -> Result<Vec<u8>, Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        // After a failure there is no more to read, and the program's status tells the rest.
        from.take(most).read_to_end(&mut bytes).await.ok();
    }
    let is_cut = u64::try_from(bytes.len()).is_ok_and(|length| length >= most);
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
        assert_eq!(bytes(&["printf", r"\377a"], LIMIT, 3).await.unwrap(), [255, b'a']);
        bytes(&["printf", "abc"], LIMIT, 3).await.unwrap_err();
    }
}
