//! Accepts connections for as long as a program runs.

use std::{future::Future, io, time::Duration};

/// Pause after a failure. The likely cause is a lack of descriptors, which other connections need time to release.
const PAUSE: Duration = Duration::from_millis(100);

/// Returns the next connection that `accept` returns. Logs a failure with the name of the socket, pauses, and tries
/// again. As cancel-safe as `accept`.
pub async fn accept<T, F>(socket: &str, mut accept: impl FnMut() -> F) -> T
where
    F: Future<Output = io::Result<T>>,
{
    loop {
        match accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                tracing::warn!(socket, %error, "connection not accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
