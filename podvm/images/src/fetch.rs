//! A layer's bytes into a file, again after what may pass.

use std::{fs::File, io::Write, path::Path, time::Duration};

use crate::{
    cause::Error,
    registry::{Layer, Registry},
};

/// Tries of one layer, and of the questions before.
pub(crate) const TRIES: u32 = 4;

/// The pause before the next try.
pub(crate) fn pause(attempt: u32) -> Duration {
    Duration::from_millis(500 << attempt.min(4))
}

/// Writes the layer's packed bytes to `path`; they have the digest that the manifest says.
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
