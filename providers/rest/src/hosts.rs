//! Limits the hosts that get an access token: the configured one and a list of suffixes. Pure.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::refusal::clip;
use reqwest::Url;

/// Hosts of one API. A URL of an answer (next page, operation) is followed only to them.
#[derive(Debug, Clone)]
pub struct Hosts {
    base: Url,
    suffixes: &'static [&'static str],
}

impl Hosts {
    /// Allows the host and port of this URL, and over TLS each host with one of these suffixes, like
    /// `.management.azure.com`.
    pub fn new(base: Url, suffixes: &'static [&'static str]) -> Hosts {
        Hosts { base, suffixes }
    }

    /// Parses the URL of an endpoint from the settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a text that is no URL of a host with `http` or `https`.
    pub fn parse(endpoint: &str, suffixes: &'static [&'static str]) -> Result<Hosts, Error> {
        let base = Url::parse(endpoint)
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host() && has_no_user(url));
        let base = base.ok_or_else(|| {
            Error::invalid(format!("the endpoint {} is no URL; correct the settings", clip(endpoint)))
        })?;
        Ok(Hosts::new(base, suffixes))
    }

    /// Returns the URL of the endpoint.
    pub fn base(&self) -> &Url {
        &self.base
    }

    /// Returns the URL of a path of the endpoint. Each segment is encoded. A path of the endpoint itself stays in
    /// front.
    pub fn path<'s>(&self, segments: impl IntoIterator<Item = &'s str>) -> Url {
        let mut url = self.base.clone();
        // Only a URL that cannot be a base has no segments; `parse` refuses those.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    /// Whether requests to this URL may carry the token.
    pub fn allows(&self, url: &Url) -> bool {
        let is_base = url.scheme() == self.base.scheme()
            && url.host_str() == self.base.host_str()
            && url.port_or_known_default() == self.base.port_or_known_default();
        let host = url.host_str().unwrap_or_default();
        let is_listed = url.scheme() == "https"
            && url.port_or_known_default() == Some(443)
            && self.suffixes.iter().any(|suffix| host.len() > suffix.len() && host.ends_with(suffix));
        (is_base || is_listed) && has_no_user(url)
    }

    /// Returns the URL of a link in an answer, which may be relative.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the link leads to another host or is no URL.
    pub fn follow(&self, link: &str) -> Result<Url, Error> {
        let url = self.base.join(link).ok().filter(|url| self.allows(url));
        url.ok_or_else(|| {
            // The query of a link may hold a signature.
            let shown = link.split(['?', '#']).next().unwrap_or_default();
            Error::invalid(format!(
                "an answer leads to {}, which is not a host of {}; the token is not sent there, check the endpoint",
                clip(shown),
                self.base.host_str().unwrap_or_default()
            ))
        })
    }
}

fn has_no_user(url: &Url) -> bool {
    url.username().is_empty() && url.password().is_none()
}
