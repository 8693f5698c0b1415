//! `peerpod sysdump`: one compressed archive with the state of a node or of a cluster, for a report. [`hide`] removes
//! secrets. It may touch: the files that its parts name, the admin socket, the API server, kubectl, `ip`, `tc` and `nft`.

mod cluster;
mod hide;
mod node;
mod nodes;

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;
use k8s_openapi::jiff::Timestamp;
use peerpod_node::admin::COMMIT;
use serde::Serialize;
use tar::{Builder, Header};

use crate::output::safe;
use crate::source::{Source, SourceArgs};

/// Size limit of the archive's content, in bytes. Later parts are left out, and named as such.
const MOST: usize = 512 << 20;
/// Folder of all parts in the archive.
const FOLDER: &str = "peerpod-sysdump";
/// Name of the archive that is standard output.
const STDOUT: &str = "-";

/// Arguments of `peerpod sysdump`.
#[derive(Debug, clap::Args)]
pub(crate) struct SysdumpArgs {
    #[command(flatten)]
    from: SourceArgs,
    /// The archive, readable by its owner only; - is standard output [default: peerpod-sysdump-TIME.tar.gz]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The node's configuration file [default: PEERPOD_CONFIG, or else /etc/peerpod/peerpod.yaml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A log of peerpod-node or peerpod-relay, instead of kubelet's files; may be repeated
    #[arg(long, value_name = "FILE")]
    file: Vec<PathBuf>,
}

/// The archive, and the failures of its parts.
struct Dump {
    archive: Builder<GzEncoder<File>>,
    seconds: u64,
    size: usize,
    /// Size limit of the content, in bytes.
    most: usize,
    /// Whether a part was left out because of that limit.
    is_full: bool,
    /// Name and size of each part.
    parts: Vec<(String, usize)>,
    failures: Vec<String>,
}

impl Dump {
    /// Adds a text, line by line without secrets.
    fn text(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        self.put(name, &hide::text(text))
    }

    /// Adds a value as YAML without secrets.
    fn value(&mut self, name: &str, value: &impl Serialize) -> anyhow::Result<()> {
        let mut value = serde_json::to_value(value)?;
        hide::value(&mut value);
        self.put(&format!("{name}.yaml"), &serde_yaml::to_string(&value)?)
    }

    /// Adds the text of a part, or else its failure.
    fn text_of(&mut self, name: &str, part: anyhow::Result<String>) -> anyhow::Result<()> {
        match part {
            Ok(text) => self.text(name, &text),
            Err(error) => self.failed(name, &error),
        }
    }

    /// Adds the value of a part, or else its failure.
    fn value_of<T: Serialize>(&mut self, name: &str, part: anyhow::Result<T>) -> anyhow::Result<()> {
        match part {
            Ok(value) => self.value(name, &value),
            Err(error) => self.failed(name, &error),
        }
    }

    fn failed(&mut self, name: &str, error: &anyhow::Error) -> anyhow::Result<()> {
        let error = peerpod_base::chain::chain(error.as_ref()).to_string();
        self.failures.push(format!("{name}: {error}"));
        Ok(())
    }

    fn put(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        if self.size.saturating_add(text.len()) > self.most {
            self.is_full = true;
            let most = self.most;
            self.failures.push(format!("{name}: left out, the archive's limit of {most} bytes is reached"));
            return Ok(());
        }
        self.append(name, text)
    }

    /// Adds a part beyond the limit as well.
    fn append(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        self.size += text.len();
        let mut header = Header::new_gnu();
        header.set_size(text.len().try_into()?);
        header.set_mode(0o600);
        header.set_mtime(self.seconds);
        let path = format!("{FOLDER}/{name}");
        self.archive.append_data(&mut header, &path, text.as_bytes()).context("write the archive")?;
        self.parts.push((name.to_owned(), text.len()));
        Ok(())
    }

    /// Whether there is a part in one of these folders; an empty name stands for every part.
    fn has(&self, folders: &[&str]) -> bool {
        self.parts.iter().any(|(name, _)| folders.iter().any(|folder| name.starts_with(folder)))
    }

    /// Writes the list of failures and completes the file.
    fn finish(mut self) -> anyhow::Result<Vec<(String, usize)>> {
        let failures = self.failures.join("\n");
        self.append("failures.txt", &hide::text(&failures))?;
        let file = self.archive.into_inner()?.finish()?;
        // A pipe has nothing to synchronise.
        if file.metadata().context("look at the archive")?.is_file() {
            file.sync_all().context("write the archive")?;
        }
        Ok(self.parts)
    }
}

/// Writes the archive, prints its table of contents, and the failures to stderr. Exits with 1 if the source gave nothing.
pub(crate) async fn run(args: SysdumpArgs, settings: Vec<String>) -> anyhow::Result<ExitCode> {
    let source = args.from.open().await?;
    let seconds = u64::try_from(Timestamp::now().as_second()).unwrap_or_default();
    let out = args.out.unwrap_or_else(|| PathBuf::from(format!("peerpod-sysdump-{seconds}.tar.gz")));
    let mut dump = create(&out, seconds, MOST)?;
    let folders: &[&str] = match source {
        Source::Node(node) => {
            node::collect(&mut dump, &node, (args.config, settings), args.file).await?;
            &node::ANSWERS
        }
        Source::Cluster(cluster) => {
            cluster::collect(&mut dump, &cluster).await?;
            nodes::collect(&mut dump, &cluster).await?;
            &[""]
        }
    };
    // The reader of a pipe takes a failure for a cut archive. `failures.txt` names the parts that are missing.
    let is_useful = out == Path::new(STDOUT) || dump.has(folders);
    let code = if is_useful { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    let version = format!("{}, commit {}", env!("CARGO_PKG_VERSION"), COMMIT.unwrap_or("unknown"));
    dump.text("versions/peerpod.txt", &version)?;
    let failures = hide::text(&dump.failures.join("\n"));
    let mut text = String::new();
    for (name, size) in dump.finish()? {
        text.push_str(&format!("{size:>10}  {}\n", safe(&name)));
    }
    for failure in failures.lines() {
        eprintln!("peerpod: {}", safe(failure));
    }
    if out != Path::new(STDOUT) {
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{text}{}", out.display())?;
    }
    Ok(code)
}

/// Creates the archive, which only its owner can read. `most`: size limit of its content, in bytes.
fn create(out: &Path, seconds: u64, most: usize) -> anyhow::Result<Dump> {
    let file = if out == Path::new(STDOUT) {
        let is_terminal = std::io::stdout().is_terminal();
        ensure!(
            !is_terminal,
            "write the archive to standard output: it is a terminal; redirect it or name a file"
        );
        std::io::stdout().as_fd().try_clone_to_owned().map(File::from)
    } else {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(out)
    };
    let file =
        file.with_context(|| format!("create {}; remove it or name another with --out", out.display()))?;
    let archive = Builder::new(GzEncoder::new(file, Compression::default()));
    let (parts, failures) = (Vec::new(), Vec::new());
    Ok(Dump { archive, seconds, size: 0, most, is_full: false, parts, failures })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an archive in a file that is removed at once.
    pub(super) fn small(name: &str, most: usize) -> Dump {
        let path = std::env::temp_dir().join(format!("peerpod-{name}-{}", std::process::id()));
        let dump = create(&path, 0, most).unwrap();
        std::fs::remove_file(path).unwrap();
        dump
    }

    #[tokio::test]
    async fn a_dump_without_an_answer_has_failures_alone() {
        let mut dump = small("no-answer", MOST);
        let away = crate::source::Node::new("/nowhere/node.sock".into());
        node::sandboxes(&mut dump, &away, &[]).await.unwrap();
        dump.text("versions/kernel.txt", "Linux").unwrap();
        assert!(!dump.has(&node::ANSWERS) && dump.has(&[""]));
        assert!(dump.failures[0].starts_with("sandboxes/list: "), "{:?}", dump.failures);
        dump.text("node/readyz.txt", "ok").unwrap();
        assert!(dump.has(&node::ANSWERS));
        dump.most = 0;
        let parts = dump.finish().unwrap();
        assert_eq!(parts.last().unwrap().0, "failures.txt");
    }
}
