//! Serves the local provider as a separate program, for the tests of `provider.kind: external`.
//!
//! `peerpod-test-plugin --paths.state-dir DIR [--provider.local.key VALUE]...` serves on the socket that
//! `PEERPOD_PROVIDER_SOCKET` names. With `--socket PATH` as the first argument it serves on PATH until it is killed,
//! for a node that does not start it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use peerpod_base::config::{Reader, Sources};
use peerpod_provider_api::Provider;
use peerpod_provider_external::serve::{Serving, listen_on_socket, socket_we_were_given, until_orphaned};
use peerpod_provider_local::{LocalConfig, LocalProvider};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let socket = match arguments.first().map(String::as_str) {
        Some("--socket") if arguments.len() > 1 => {
            Some(PathBuf::from(arguments.drain(..2).next_back().unwrap_or_default()))
        }
        _ => None,
    };
    let sources = Sources::from_process(arguments, []).for_tests();
    let mut reader = Reader::load(sources, &["paths", "provider"], &[])?;
    let state_dir: PathBuf = reader.required("paths.state-dir", "folder of its VMs").unwrap_or_default();
    let config = LocalConfig::read(&mut reader, &state_dir);
    reader.finish()?;
    let local: Arc<dyn Provider> = Arc::new(LocalProvider::open(config).context("open the local provider")?);
    let listener = listen_on_socket(&socket.clone().map_or_else(socket_we_were_given, Ok)?)?;
    let serving = Serving::start("local", listener, move |_: &_| Ok(Arc::clone(&local))).await?;
    eprintln!("serving the local provider");
    match socket {
        Some(_) => std::future::pending().await,
        None => until_orphaned().await,
    }
    serving.stop().await;
    Ok(())
}
