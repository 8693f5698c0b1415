//! Sources of access tokens. Each asks one endpoint; files of credentials are read again at each fetch, because
//! projected tokens rotate.
//!
//! All answers have the form of OAuth 2.0 (RFC 6749, section 5), also those of the metadata services of Azure and
//! Google, and of IBM's IAM except for its refusals.

mod exchange;
mod iam;
mod jwt;
mod metadata;
mod oauth;

use std::path::Path;

use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use tokio::io::AsyncReadExt;

pub use exchange::{Exchange, Impersonation, Subject};
pub use iam::{ApiKey, ComputeResource};
pub use jwt::JwtBearer;
pub use metadata::Metadata;
pub use oauth::{ClientSecret, Federated};

/// Largest file of a credential.
const MAX_FILE: u64 = 64 << 10;

/// Reads a credential from a file, without the white space around it.
///
/// # Errors
/// [`Error::Auth`] when the file cannot be read, is empty or has more than 64 KiB.
pub async fn file(path: &Path) -> Result<Secret, Error> {
    let read = async {
        let mut text = String::new();
        tokio::fs::File::open(path).await?.take(MAX_FILE + 1).read_to_string(&mut text).await?;
        Ok::<_, std::io::Error>(text)
    };
    let unreadable = |why: String| {
        let path = path.display();
        Error::Auth { text: format!("read the token in {path}: {why}; mount a token there") }
    };
    match read.await {
        Err(error) => Err(unreadable(error.to_string())),
        Ok(text) if text.len() as u64 > MAX_FILE => Err(unreadable("it is longer than 64 KiB".to_owned())),
        Ok(text) if text.trim().is_empty() => Err(unreadable("it is empty".to_owned())),
        Ok(text) => Ok(Secret::new(text.trim().to_owned())),
    }
}
