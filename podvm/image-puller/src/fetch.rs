//! Fetches a layer's bytes into a file, again after transient failures.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use crate::cause::Error;
use crate::registry::{Layer, Registry};

/// Limit of attempts for one layer, and for the requests before.
pub(crate) const TRIES: u32 = 4;

/// Returns the pause before the next attempt.
pub(crate) fn pause(attempt: u32) -> Duration {
    Duration::from_millis(500 << attempt.min(4))
}

/// Writes the layer's packed bytes to `path`; they have the digest of the manifest.
pub(crate) async fn layer(
    registry: &Registry,
    layer: &Layer,
    path: &Path,
    mut warn: impl FnMut(String),
) -> Result<(), Error> {
    let mut attempt = 0;
    loop {
        match once(registry, layer, path).await {
            Err(error) if error.cause.is_transient() && attempt + 1 < TRIES => {
                warn(format!("{error}; tried again"));
                tokio::time::sleep(pause(attempt)).await;
                attempt += 1;
            }
            other => return other,
        }
    }
}

async fn once(registry: &Registry, layer: &Layer, path: &Path) -> Result<(), Error> {
    let failed = |error: std::io::Error| crate::cause::disk("writing", path, &error);
    let mut file = File::create(path).map_err(failed)?;
    registry.blob(&layer.descriptor, |part| file.write_all(part).map_err(failed)).await
}
