//! Runs iproute2 and similar tools, as witnesses and in the place of a CNI. Test code only: the product starts no
//! processes.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// Runs a program to its end and returns its standard output. The error contains its standard error.
pub(crate) fn run(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<String> {
    let attempt = || format!("{program} {}", arguments.join(" "));
    let mut child = Command::new(program)
        .args(arguments)
        .process_group(0) // a Ctrl-C at the terminal must not reach the child: this process ends it
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(attempt)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).with_context(attempt)?;
    }
    let output = child.wait_with_output().with_context(attempt)?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("{}: {}: {}", attempt(), output.status, text.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `ip -n NAMESPACE -batch -` with these lines. Fails if any of them fails.
pub fn ip(namespace: &str, lines: &str) -> anyhow::Result<String> {
    run("ip", &["-n", namespace, "-batch", "-"], lines).with_context(|| format!("in {namespace}:\n{lines}"))
}
