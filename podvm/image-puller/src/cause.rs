//! Classifies the errors of the disk and of the registry's client.

use std::error::Error as StdError;
use std::io;
use std::path::Path;

use oci_client::errors::{OciDistributionError, OciErrorCode};
pub(crate) use peerpod_image_job::{Cause, Error, quote};
use rustls::CertificateError;

/// Classifies an error of the VM's disk.
pub(crate) fn disk(what: &str, path: &Path) -> impl Fn(io::Error) -> Error {
    move |error| {
        let text = format!("{what} {}: {error}", path.display());
        if !matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            return Error::new(Cause::Internal, text);
        }
        let cure = "give the VM a larger disk for images (without a disk they are in memory), or more memory, or use \
                    a smaller image";
        Error::new(Cause::NoSpace, format!("{text}; {cure}"))
    }
}

/// Classifies the client's error of a request to the registry.
pub(crate) fn registry(what: &str, error: &OciDistributionError) -> Error {
    let (cause, why, cure) = classify(error);
    let separator = if cure.is_empty() { "" } else { "; " };
    Error::new(cause, format!("{what}: {}{separator}{cure}", quote(&why)))
}

const CHECK_NAME: &str = "check the image's name and tag";
const CHECK_SECRET: &str = "check that the image exists and that its pull secret reaches this VM and is \
                            valid";
const CHECK_ROUTE: &str = "check the registry's name and port, and that the VM's own network reaches it";
const CHECK_DATES: &str =
    "renew the registry's certificate, or set the VM's clock by NTP or by its hypervisor";
const CHECK_CA: &str = "trust its CA (node.registry-ca, or the VM image's CA certificates)";

/// Returns kind, text and remedy.
fn classify(error: &OciDistributionError) -> (Cause, String, &'static str) {
    use OciDistributionError as E;
    match error {
        E::UnauthorizedError { .. } => {
            (Cause::Denied, "the registry requires other credentials".into(), CHECK_SECRET)
        }
        E::AuthenticationFailure(why) => {
            (Cause::Denied, format!("the registry's token service reports {why}"), CHECK_SECRET)
        }
        E::ImageManifestNotFoundError(why) => (Cause::NotFound, why.clone(), CHECK_NAME),
        E::RegistryError { envelope, .. } => {
            let said: Vec<String> =
                envelope.errors.iter().take(3).map(|e| format!("{:?}: {}", e.code, e.message)).collect();
            let said = format!("the registry reports {}", said.join(", "));
            match envelope.errors.first().map(|e| &e.code) {
                Some(
                    OciErrorCode::ManifestUnknown
                    | OciErrorCode::NameUnknown
                    | OciErrorCode::BlobUnknown
                    | OciErrorCode::ManifestBlobUnknown
                    | OciErrorCode::NotFound
                    | OciErrorCode::NameInvalid,
                ) => (Cause::NotFound, said, CHECK_NAME),
                Some(OciErrorCode::Unauthorized | OciErrorCode::Denied) => {
                    (Cause::Denied, said, CHECK_SECRET)
                }
                Some(OciErrorCode::Toomanyrequests) => (Cause::Unreachable, said, ""),
                _ => (Cause::Malformed, said, ""),
            }
        }
        E::ServerError { code, message, .. } => {
            let said = format!("the registry answers {code} {message}");
            match code {
                404 => (Cause::NotFound, said, CHECK_NAME),
                401 | 403 => (Cause::Denied, said, CHECK_SECRET),
                408 | 429 | 500.. => (Cause::Unreachable, said, ""),
                _ => (Cause::Malformed, said, ""),
            }
        }
        E::DigestError(why) => (Cause::Digest, why.to_string(), ""),
        E::IoError(error) => of_chain(error, false),
        E::RequestError(error) => of_chain(error, error.is_redirect()),
        E::UnsupportedMediaTypeError(_) | E::UnsupportedSchemaVersionError(_) => {
            (Cause::Unsupported, error.to_string(), "")
        }
        other => (Cause::Malformed, other.to_string(), ""),
    }
}

/// Searches the chain of an error for its origin: a certificate, a network, a digest.
fn of_chain(error: &(dyn StdError + 'static), redirect: bool) -> (Cause, String, &'static str) {
    let mut words = vec![error.to_string()];
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    let mut timed_out = false;
    while let Some(at) = next {
        if let Some(tls) = at.downcast_ref::<rustls::Error>() {
            let text = format!("the TLS handshake failed: {tls}");
            return match tls {
                rustls::Error::InvalidCertificate(
                    CertificateError::Expired
                    | CertificateError::ExpiredContext { .. }
                    | CertificateError::NotValidYet
                    | CertificateError::NotValidYetContext { .. },
                ) => (Cause::Untrusted, text, CHECK_DATES),
                rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented => {
                    (Cause::Untrusted, text, CHECK_CA)
                }
                _ => (Cause::Unreachable, text, "a registry that speaks plain HTTP must be named as one"),
            };
        }
        if let Some(digest) = at.downcast_ref::<oci_client::errors::DigestError>() {
            return (Cause::Digest, digest.to_string(), "");
        }
        let text = at.to_string();
        if !words.iter().any(|known| known.contains(&text)) {
            words.push(text);
        }
        timed_out |= at.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::TimedOut);
        // The `source` of an io::Error skips the error that it wraps.
        next = match at.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => at.source(),
        };
    }
    if redirect {
        return (Cause::Malformed, format!("the registry redirects in a circle: {}", words.join(": ")), "");
    }
    let silent = if timed_out { " (it did not answer in time)" } else { "" };
    (Cause::Unreachable, format!("{}{silent}", words.join(": ")), CHECK_ROUTE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_distinguished_from_other_errors() {
        let full = io::Error::from_raw_os_error(nix::errno::Errno::ENOSPC as i32);
        let error = disk("writing", Path::new("/x"))(full);
        assert_eq!(error.cause, Cause::NoSpace);
        assert!(error.to_string().starts_with("no space: writing /x: "), "{error}");
        let other = io::Error::from_raw_os_error(nix::errno::Errno::EIO as i32);
        assert_eq!(disk("writing", Path::new("/x"))(other).cause, Cause::Internal);
    }

    #[test]
    fn the_innermost_error_decides() {
        let tls = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let wrapped = OciDistributionError::IoError(io::Error::other(io::Error::other(tls)));
        assert_eq!(registry("x", &wrapped).cause, Cause::Untrusted);
        let refused = OciDistributionError::IoError(io::ErrorKind::ConnectionRefused.into());
        assert_eq!(registry("x", &refused).cause, Cause::Unreachable);
        let missing =
            OciDistributionError::ServerError { code: 404, url: String::new(), message: "x".into() };
        assert_eq!(registry("x", &missing).cause, Cause::NotFound);
    }
}
