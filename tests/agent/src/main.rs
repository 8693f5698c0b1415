//! Kata's agent API with real processes, for the demo, the tests and the local provider's VMs. It is started like the
//! real kata-agent (`--config agent-config.toml`), behaves like it where a shim can see it (as the recorded
//! transcripts show), and can be replaced by it. A container is a process in the VM's own root directory and in the
//! network namespace that its specification names; it has no mount namespace of its own.
//!
//! As `peerpod-test-agent tool …`, and as any container's program named `peerpod-test-tool`, it is also the little
//! page server and client that the demo runs inside a pod.

mod cgroup;
mod container;
mod error;
mod files;
mod image;
mod process;
mod service;
mod stats;
mod storage;
mod tool;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, bail};
use peerpod_proto::agent_ttrpc::{create_agent_service, create_health};
use service::Agent;
use tokio::net::UnixListener;
use ttrpc::asynchronous::{Server, transport::Listener};

/// Where the agent listens when its configuration does not say: our image's choice, outside of the tree that
/// CreateSandbox empties.
const DEFAULT_SOCKET: &str = "/run/peerpod/agent.sock";

/// The tree that CreateSandbox empties.
const DEFAULT_ROOT: &str = "/run/kata-containers";

/// What an image that has this agent says of itself (podvm/image).
const IMAGE_NOTICE: &str = "/etc/peerpod/test-agent";

/// What the unmodified program name of a container stands for: this very program's tools.
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

/// `server_addr = "unix:///path"` of a kata-agent's configuration file. The rest of it is for the real one.
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
    // A VM image that was built without a real agent says so at each boot.
    if let Ok(notice) = fs::read_to_string(IMAGE_NOTICE) {
        tracing::warn!("{}", notice.trim());
    }

    let (agent, mut done) = Agent::new(options.root);
    let agent = Arc::new(agent);
    let mut services = create_agent_service(agent.clone());
    for service in services.values_mut() {
        // The generator answers NOT_FOUND for what a service leaves out; UNIMPLEMENTED is what a shim understands.
        service.methods.retain(|method, _| service::METHODS.contains(&method.as_str()));
    }
    services.extend(create_health(agent));
    let mut server = Server::new().add_listener(listen(&options.socket)?).register_service(services);
    server.start().await.context("start the ttrpc server")?;
    tracing::info!(socket = %options.socket.display(), "agent listens");

    // Like the real one: DestroySandbox ends the program.
    done.wait_for(|done| *done).await.context("wait for the end of the sandbox")?;
    server.shutdown().await.context("shut the ttrpc server down")
}

/// Binds under a name of its own and renames, so that the socket answers from the moment it is seen.
fn listen(socket: &Path) -> anyhow::Result<Listener> {
    if let Some(folder) = socket.parent() {
        fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let fresh = socket.with_extension(format!("{}.new", std::process::id()));
    let listener = UnixListener::bind(&fresh).with_context(|| format!("bind {}", fresh.display()))?;
    fs::rename(&fresh, socket).with_context(|| format!("name the socket {}", socket.display()))?;
    Ok(Listener::from(listener))
}
