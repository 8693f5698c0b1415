//! Tokens of IBM Cloud's IAM: for an API key, and for a trusted profile that a projected token proves.

use std::path::PathBuf;

use async_trait::async_trait;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use reqwest::Url;

use crate::http::Http;
use crate::sources::oauth;
use crate::token::{Token, TokenSource};

/// Type of the grant for an API key.
const API_KEY: &str = "urn:ibm:params:oauth:grant-type:apikey";
/// Type of the grant for a compute resource.
const COMPUTE_RESOURCE: &str = "urn:ibm:params:oauth:grant-type:cr-token";

/// User or service id with an API key.
#[derive(Debug, Clone)]
pub struct ApiKey {
    /// Token endpoint.
    pub url: Url,
    /// The key.
    pub key: Secret,
    /// Remedy of a refusal, without a full stop.
    pub remedy: &'static str,
}

/// Compute resource, such as a pod, that a trusted profile accepts.
#[derive(Debug, Clone)]
pub struct ComputeResource {
    /// Token endpoint.
    pub url: Url,
    /// File with the token of the resource, which its cluster projects.
    pub file: PathBuf,
    /// Id of the trusted profile.
    pub profile: String,
    /// Remedy of a refusal, without a full stop.
    pub remedy: &'static str,
}

#[async_trait]
impl TokenSource for ApiKey {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let fields = [("grant_type", API_KEY), ("apikey", self.key.expose())];
        oauth::ask(http, &oauth::form(&self.url, &fields), self.remedy).await
    }
}

#[async_trait]
impl TokenSource for ComputeResource {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let token = super::file(&self.file).await?;
        let fields = [
            ("grant_type", COMPUTE_RESOURCE),
            ("cr_token", token.expose()),
            ("profile_id", self.profile.as_str()),
        ];
        oauth::ask(http, &oauth::form(&self.url, &fields), self.remedy).await
    }
}
