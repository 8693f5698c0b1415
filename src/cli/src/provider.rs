//! `peerpod provider check CONFIG`: opens the configured provider and checks every promise of the trait, with real VMs.
//! It is for authors of providers, and for users that test an account and its settings.
//!
//! It acts as a node of its own (`check-…`) with its own state directory, so that it neither sees nor touches the VMs
//! of a running node. It deletes its VMs, also after a failure and on Ctrl-C.

use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_trait::async_trait;
use peerpod_base::config::{Mistakes, Reader, Sources};
use peerpod_base::telemetry::{self, LogConfig};
use peerpod_cluster::SECTIONS;
use peerpod_node::admin::SOCKET;
use peerpod_node::config::NodeConfig;
use peerpod_provider_api::conformance::{
    Checked, Harness, PROMISES, Promise, ProviderRole, Stop, SuiteLimits, Trial, table, word,
};
use peerpod_provider_api::{DiskRequest, InstanceId, Provider};
use peerpod_providers::{Context, ProviderSettings, Purpose};
use tokio::process;

use crate::SETTINGS;
use crate::output::say;
use crate::signals::{INTERRUPTED, Signals};

/// Exit code if nothing was done: arguments or a consent are missing.
const NOT_DONE: u8 = 2;
/// Time limit of a probe, and of the preflight.
const PROBE: Duration = Duration::from_secs(60);

/// Subcommands of `peerpod provider`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ProviderCommand {
    /// Tests the provider of a configuration against every promise, with real VMs that are deleted again; exit code 1
    /// if a promise is broken, 2 if nothing was tested
    #[command(after_help = SETTINGS)]
    Check(Check),
}

/// Arguments of `peerpod provider check`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Check {
    /// The configuration file
    #[arg(value_name = "CONFIG")]
    config: PathBuf,
    /// Makes VMs also where they may cost money
    #[arg(long)]
    yes: bool,
    /// VMs at once
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    crowd: u32,
    /// Tests only the promises with these words in their sentence
    #[arg(long, value_name = "WORDS")]
    only: Option<String>,
    /// An unattached disk, to test volumes with
    #[arg(long, value_name = "ID")]
    volume: Option<String>,
    /// An independent check: `PROGRAM user-data ID` prints the user-data that this VM received, `PROGRAM machines` the
    /// number of VMs of this check; it fails where it cannot
    #[arg(long, value_name = "PROGRAM")]
    probe: Option<PathBuf>,
    /// Longest time for one promise
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = crate::duration)]
    patience: Duration,
}

impl Check {
    /// Whether this promise is to be tested.
    fn wants(&self, promise: &Promise) -> bool {
        let only = self.only.as_ref().map(|only| only.replace('_', " "));
        only.is_none_or(|only| promise.words().contains(&only))
    }
}

/// Runs `peerpod provider check` with these settings besides the configuration file.
pub(crate) fn run(
    ProviderCommand::Check(words): ProviderCommand,
    settings: Vec<String>,
) -> anyhow::Result<ExitCode> {
    let mut sources = Sources::of_this_process(settings);
    sources.file = Some(words.config.clone());
    let folder = std::env::temp_dir().join(format!("peerpod-check-{}", std::process::id()));
    let node_name = format!("check-{}-{}", std::process::id(), fresh());
    // Read once more for a provider that only lists and deletes; the mistakes are the same.
    let read_for = |purpose| read(sources.clone(), &folder, &node_name, purpose);
    let both = read_for(Purpose::Create).and_then(|read| Ok((read, read_for(Purpose::Collect)?.settings)));
    let (ConfiguredCheck { settings, log, run_dir }, collector) = match both {
        Ok(read) => read,
        Err(mistakes) => {
            eprintln!("{mistakes}");
            return Ok(ExitCode::FAILURE);
        }
    };
    let promises: Vec<&Promise> = PROMISES.iter().filter(|promise| words.wants(promise)).collect();
    let (kind, crowd) = (settings.kind().to_owned(), words.crowd);
    // Each check that cuts calls off makes a VM for each cut, some make two; the others make one or two.
    let all = crowd + 5 * DROPS + 40;
    if !settings.is_free() && !words.yes {
        say!(
            stdout,
            "provider {kind}: {} promises would be tested with real VMs, up to {crowd} at once and about \
             {all} in total, each deleted after a moment.\nThis may cost money. Pass --yes to run the test; \
             --crowd N lowers the number of VMs.",
            promises.len()
        );
        return Ok(ExitCode::from(NOT_DONE));
    }
    // Two providers of the node itself would share bridge and addresses, and so disturb each other's VMs.
    if settings.is_free() && UnixStream::connect(run_dir.join(SOCKET)).is_ok() {
        say!(
            stdout,
            "provider {kind}: nothing was tested, because peerpod-node runs here ({}), and the VMs of both would have \
             the same network. Stop peerpod-node and its VMs first, or test on another machine.",
            run_dir.display()
        );
        return Ok(ExitCode::from(NOT_DONE));
    }
    telemetry::init(&log)?;
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&folder)
        .with_context(|| format!("make {}", folder.display()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(check(settings, collector, words, promises));
    // The provider's tasks must end before its folder is removed.
    runtime.shutdown_timeout(Duration::from_secs(10));
    let removed = match outcome {
        Ok((_, false)) => {
            say!(
                stdout,
                "look for VMs of this cluster with the node name {node_name} and delete them; the provider's \
                 records of them stay in {}",
                folder.display()
            );
            Ok(())
        }
        _ => std::fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display())),
    };
    // After an error nothing was made yet; a failed removal matters less than the error.
    let (code, _) = outcome?;
    removed.map(|()| code)
}

/// Number of cuts in each check that cuts calls off.
const DROPS: u32 = 12;

/// The parts of the configuration that a check needs.
struct ConfiguredCheck {
    settings: ProviderSettings,
    log: LogConfig,
    /// Folder with the sockets of a node that runs here.
    run_dir: PathBuf,
}

/// Reads all sections, as the binaries do: a misspelled key in any section is a mistake. The socket of an external
/// provider's program is in this command's folder, with one place for each of the two providers: the program of a
/// running node may listen at the configured place.
fn read(
    mut sources: Sources,
    folder: &Path,
    node_name: &str,
    purpose: Purpose,
) -> Result<ConfiguredCheck, Mistakes> {
    let reader = Reader::load(sources.clone(), &SECTIONS, &[])?;
    if reader.is_set("provider.external.command") {
        let place = if purpose == Purpose::Collect { "second" } else { "first" };
        let socket = folder.join(place).join("provider.sock");
        sources.flags.push(("provider.external.socket".to_owned(), socket.display().to_string()));
    }
    let mut reader = Reader::load(sources, &SECTIONS, &[])?;
    crate::config::ask(&mut reader);
    let node = NodeConfig::read(&mut reader);
    let context = Context {
        state_dir: folder.to_owned(),
        cluster_id: node.sandbox.cluster_id,
        node_name: node_name.to_owned(),
        purpose,
    };
    let settings = peerpod_providers::read(&mut reader, &context);
    let log = LogConfig::read(&mut reader);
    reader.finish()?;
    Ok(ConfiguredCheck { settings, log, run_dir: node.run_dir })
}

/// Returns a random number, so that VMs left by an interrupted check are never taken for those of this one.
pub(crate) fn fresh() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() % 1_000_000
}

/// Tests the promises one after another. Returns the exit code, and whether everything that was made is gone.
async fn check(
    settings: ProviderSettings,
    collector: ProviderSettings,
    words: Check,
    promises: Vec<&Promise>,
) -> anyhow::Result<(ExitCode, bool)> {
    let mut signals = Signals::new()?;
    let kind = settings.kind().to_owned();
    let installation = format!("check-{}", fresh());
    let provider =
        settings.open(installation.clone()).await.with_context(|| format!("open provider {kind}"))?;
    // Both providers are undecorated: `decorate` would hide the promises that a provider itself does not keep.
    let collector = match promises.iter().any(|promise| promise.name == COLLECTS) {
        true => second(collector, installation).await,
        false => None,
    };
    let found = tokio::select! {
        name = signals.next() => anyhow::bail!("{name}: nothing was made"),
        found = tokio::time::timeout(PROBE, provider.preflight()) => found
            .with_context(|| format!("ask provider {kind} for its preflight: no answer within {PROBE:?}"))?
            .with_context(|| format!("the preflight of provider {kind} failed, so no VM was made"))?,
    };
    for fact in &found.facts {
        say!(stdout, "{kind}: {fact}");
    }
    for warning in &found.warnings {
        say!(stdout, "{kind}: warning: {warning}");
    }
    let trial = Arc::new(Trial::new(Arc::new(Configured { provider, collector, words })));
    let mut results: Vec<(&Promise, Checked)> = Vec::new();
    for (number, promise) in (1..).zip(&promises) {
        let start = Instant::now();
        let verdict = tokio::select! {
            biased;
            name = signals.next() => {
                say!(stdout, "\n{name}: deleting the VMs of this check");
                let clean = report_clean_up(&trial).await;
                return Ok((ExitCode::from(INTERRUPTED), clean));
            }
            verdict = trial.keeps(promise) => verdict,
        };
        say!(
            stdout,
            "{number:>2}/{}  {:7} {:>6.1} s  {}",
            promises.len(),
            word(&verdict),
            start.elapsed().as_secs_f64(),
            promise.words()
        );
        results.push((promise, verdict));
    }
    let clean = report_clean_up(&trial).await;
    say!(stdout, "");
    write!(std::io::stdout(), "{}", table(&results)).ok();
    let broken = results.iter().any(|(_, verdict)| matches!(verdict, Err(Stop::Broken(_))));
    Ok((if broken || !clean { ExitCode::FAILURE } else { ExitCode::SUCCESS }, clean))
}

/// Promise that needs a second provider.
const COLLECTS: &str = "who_only_collects_lists_and_deletes";

/// Opens the same provider once more, if it allows two, on its own thread: it may wait for the first one to end.
async fn second(settings: ProviderSettings, installation: String) -> Option<Arc<dyn Provider>> {
    let runtime = tokio::runtime::Handle::current();
    let opened = tokio::task::spawn_blocking(move || runtime.block_on(settings.open(installation)));
    opened.await.ok()?.ok()
}

async fn report_clean_up(trial: &Trial) -> bool {
    match trial.clean_up().await {
        Ok(()) => true,
        Err(why) => {
            say!(stdout, "CLEAN-UP FAILED: {why}");
            false
        }
    }
}

/// The provider with the options of the command line.
struct Configured {
    provider: Arc<dyn Provider>,
    collector: Option<Arc<dyn Provider>>,
    words: Check,
}

impl Configured {
    /// Returns the probe's output for these arguments; `None` without a probe or if it fails.
    async fn probe(&self, words: &[&str]) -> Option<Vec<u8>> {
        let probe: &PathBuf = self.words.probe.as_ref()?;
        let output = process::Command::new(probe).args(words).kill_on_drop(true).output();
        let why = match tokio::time::timeout(PROBE, output).await {
            Ok(Ok(output)) if output.status.success() => return Some(output.stdout),
            Ok(Ok(output)) => {
                format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {PROBE:?}"),
        };
        say!(stderr, "peerpod: {} {}: {why}", probe.display(), words.join(" "));
        None
    }
}

#[async_trait]
impl Harness for Configured {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.provider)
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        self.probe(&["user-data", id.as_str()]).await
    }

    async fn machines(&self) -> Option<usize> {
        let printed = self.probe(&["machines"]).await?;
        String::from_utf8_lossy(&printed).trim().parse().ok()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        self.collector.clone().filter(|_| role == ProviderRole::Collector)
    }

    fn volume(&self) -> Option<DiskRequest> {
        let volume = self.words.volume.clone()?;
        Some(DiskRequest { volume, ..DiskRequest::default() })
    }

    fn limits(&self) -> SuiteLimits {
        SuiteLimits { crowd: self.words.crowd, drops: DROPS, patience: self.words.patience }
    }
}
