//! `peerpod sysdump`: one compressed archive with the state of a node or of a cluster, for a report. [`hide`] removes
//! secrets. It may touch: the files that its parts name, the admin socket, the API server, `ip`, `tc` and `nft`.

mod cluster;
mod hide;
mod node;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tar::{Builder, Header};

use crate::source::{Source, SourceArgs};

/// Size limit of the archive's content, in bytes. Later parts are left out, and named as such.
const MOST: usize = 512 << 20;

/// Arguments of `peerpod sysdump`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    from: SourceArgs,
    /// The archive, readable by its owner only [default: peerpod-sysdump-TIME.tar.gz]
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
        if self.size.saturating_add(text.len()) > MOST {
            self.failures.push(format!("{name}: left out, the archive's limit of {MOST} bytes is reached"));
            return Ok(());
        }
        self.size += text.len();
        let mut header = Header::new_gnu();
        header.set_size(text.len().try_into()?);
        header.set_mode(0o600);
        header.set_mtime(self.seconds);
        let path = format!("peerpod-sysdump/{name}");
        self.archive.append_data(&mut header, &path, text.as_bytes()).context("write the archive")?;
        self.parts.push((name.to_owned(), text.len()));
        Ok(())
    }

    /// Writes the list of failures and completes the file.
    fn finish(mut self) -> anyhow::Result<Vec<(String, usize)>> {
        let failures = self.failures.join("\n");
        self.text("failures.txt", &failures)?;
        let file = self.archive.into_inner()?.finish()?;
        file.sync_all().context("write the archive")?;
        Ok(self.parts)
    }
}

/// Writes the archive and prints its table of contents.
pub(crate) async fn run(args: Args, settings: Vec<String>) -> anyhow::Result<ExitCode> {
    let source = args.from.open().await?;
    let seconds = u64::try_from(Timestamp::now().as_second()).unwrap_or_default();
    let out = args.out.unwrap_or_else(|| PathBuf::from(format!("peerpod-sysdump-{seconds}.tar.gz")));
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&out);
    let file =
        file.with_context(|| format!("create {}; remove it or name another with --out", out.display()))?;
    let archive = Builder::new(GzEncoder::new(file, Compression::default()));
    let mut dump = Dump { archive, seconds, size: 0, parts: Vec::new(), failures: Vec::new() };
    match source {
        Source::Node(node) => {
            node::collect(&mut dump, &node, (args.config, settings), args.file).await?;
        }
        Source::Cluster(cluster) => cluster::collect(&mut dump, &cluster).await?,
    }
    let mut text = String::new();
    for (name, size) in dump.finish()? {
        text.push_str(&format!("{size:>10}  {name}\n"));
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}{}", out.display())?;
    Ok(ExitCode::SUCCESS)
}
