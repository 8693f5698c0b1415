//! The local provider as a program of its own, for the tests of `provider.kind: external`: `peerpod-test-plugin
//! --paths.state-dir DIR [--provider.local.key VALUE]...` serves it where `PEERPOD_PROVIDER_SOCKET` says.

use std::sync::Arc;

use anyhow::Context;
use peerpod_base::config::{Reader, Sources};
use peerpod_provider_api::Provider;
use peerpod_provider_external::serve::{Serving, listen_on_socket, socket_we_were_given, until_orphaned};
use peerpod_provider_local::{LocalConfig, LocalProvider};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let sources = Sources::from_process(std::env::args().skip(1), []);
    let mut reader = Reader::load(sources, &["paths", "provider"], &[])?;
    let state_dir: std::path::PathBuf =
        reader.required("paths.state-dir", "where it keeps its VMs").unwrap_or_default();
    let config = LocalConfig::read(&mut reader, &state_dir);
    reader.finish()?;
    let local: Arc<dyn Provider> = Arc::new(LocalProvider::open(config).context("open the local provider")?);
    let listener = listen_on_socket(&socket_we_were_given()?)?;
    let serving = Serving::start("local", listener, move |_: &_| Ok(Arc::clone(&local))).await?;
    eprintln!("serving the local provider");
    until_orphaned().await;
    serving.stop().await;
    Ok(())
}
