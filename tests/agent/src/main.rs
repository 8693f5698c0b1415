//! Serves Kata's agent API with real processes, for the demo, the tests and the local provider's VMs. It is started
//! like the real kata-agent (`--config agent-config.toml`), and that one can replace it. Towards a shim it behaves like
//! the real one, as the recorded transcripts show.
//!
//! A container is a process in the network namespace of its specification. Its root is the VM's own or that of its
//! pulled image. It has a mount namespace only if it has volumes.
//!
//! As `peerpod-test-agent tool …`, and as any container's program named `peerpod-test-tool`, it is also the small page
//! server and client that the demo runs inside a pod.

mod cgroup;
mod container;
mod error;
mod files;
mod image;
mod policy;
mod process;
mod service;
mod stats;
mod storage;
mod tool;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use peerpod_proto::agent_ttrpc::{create_agent_service, create_health};
use service::Agent;
use tokio::net::UnixListener;
use ttrpc::asynchronous::Server;
use ttrpc::asynchronous::transport::Listener;

/// Socket of an agent without a configured one. It lies outside the tree that CreateSandbox empties.
const DEFAULT_SOCKET: &str = "/run/peerpod/agent.sock";

/// The tree that CreateSandbox empties.
const DEFAULT_ROOT: &str = "/run/kata-containers";

/// Notice in images that have this agent (podvm/vm-image).
const IMAGE_NOTICE: &str = "/etc/peerpod/test-agent";

/// Program name of a container that stands for this program's tools.
pub(crate) const TOOL: &str = "peerpod-test-tool";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((first, rest)) if first == "tool" => tool::run(rest),
        _ => serve(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peerpod-test-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `--socket PATH` or `--config FILE`; `--root DIRECTORY` for tests that must not empty the machine's own.
struct Options {
    socket: PathBuf,
    root: PathBuf,
}

impl Options {
    fn parse(arguments: &[String]) -> anyhow::Result<Options> {
        let mut options = Options { socket: DEFAULT_SOCKET.into(), root: DEFAULT_ROOT.into() };
        let mut arguments = arguments.iter();
        while let Some(name) = arguments.next() {
            let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--socket" => options.socket = value.into(),
                "--config" | "-c" => {
                    if let Some(socket) = socket_of(Path::new(value))? {
                        options.socket = socket;
                    }
                }
                "--root" => options.root = value.into(),
                other => bail!("{other} is not an option; there are --socket, --config and --root"),
            }
        }
        Ok(options)
    }
}

/// Reads `server_addr = "unix:///path"` from a kata-agent's configuration file and ignores the rest.
fn socket_of(config: &Path) -> anyhow::Result<Option<PathBuf>> {
    let text = fs::read_to_string(config).with_context(|| format!("read {}", config.display()))?;
    for line in text.lines() {
        let Some((key, value)) = line.split_once('=') else { continue };
        if key.trim() == "server_addr" {
            let value = value.trim().trim_matches(['"', '\'']);
            let path = value.strip_prefix("unix://").with_context(|| {
                format!("{}: server_addr = {value}: only unix:// is served here", config.display())
            })?;
            return Ok(Some(path.into()));
        }
    }
    Ok(None)
}

#[tokio::main]
async fn serve(arguments: &[String]) -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(std::io::stderr).init();
    let options = Options::parse(arguments)?;
    // A VM image that was built without a real agent logs its notice at each boot.
    if let Ok(notice) = fs::read_to_string(IMAGE_NOTICE) {
        tracing::warn!("{}", notice.trim());
    }

    let (agent, mut done) = Agent::new(options.root);
    let agent = Arc::new(agent);
    let mut services = create_agent_service(agent.clone());
    for service in services.values_mut() {
        // For missing methods the generated code answers NOT_FOUND; shims expect UNIMPLEMENTED.
        service.methods.retain(|method, _| service::METHODS.contains(&method.as_str()));
    }
    services.extend(create_health(agent));
    let mut server = Server::new().add_listener(listen(&options.socket)?).register_service(services);
    server.start().await.context("start the ttrpc server")?;
    tracing::info!(socket = %options.socket.display(), "agent listens");

    // As with the real agent, DestroySandbox ends the program.
    done.wait_for(|done| *done).await.context("wait for the end of the sandbox")?;
    server.shutdown().await.context("shut the ttrpc server down")
}

/// Binds under a temporary name and renames, so that the socket answers from the moment it is visible.
fn listen(socket: &Path) -> anyhow::Result<Listener> {
    if let Some(folder) = socket.parent() {
        fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let fresh = socket.with_extension(format!("{}.new", std::process::id()));
    let listener = UnixListener::bind(&fresh).with_context(|| format!("bind {}", fresh.display()))?;
    fs::rename(&fresh, socket).with_context(|| format!("name the socket {}", socket.display()))?;
    Ok(Listener::from(listener))
}
