//! Token of the machine's own identity, from the metadata service of the cloud.

use async_trait::async_trait;
use peerpod_provider_api::Error;
use reqwest::Url;
use reqwest::header::HeaderName;

use crate::http::Http;
use crate::request::Request;
use crate::sources::oauth;
use crate::token::{Token, TokenSource};

/// Metadata service of a cloud. It is asked without a proxy.
#[derive(Debug, Clone)]
pub struct Metadata {
    /// URL of the token, with its query.
    pub url: Url,
    /// Header that the service requires, like `Metadata: true`. The name is in lower case.
    pub header: (&'static str, &'static str),
    /// Remedy of a refusal, without a full stop.
    pub remedy: &'static str,
}

#[async_trait]
impl TokenSource for Metadata {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let (name, value) = self.header;
        let request = Request::get(self.url.clone()).header(HeaderName::from_static(name), value);
        let answer = http.send_direct(&request).await;
        oauth::token(&self.url, answer, self.remedy)
    }
}
