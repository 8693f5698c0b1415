//! Token for a service account with a private key: a signed assertion (RFC 7523), as Google's keys need it.

use std::time::{SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use reqwest::Url;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;

use crate::http::Http;
use crate::sources::oauth;
use crate::token::{Token, TokenSource};

/// Life of an assertion, in seconds; Google accepts no longer one.
const LIFE: u64 = 3600;
/// Type of the grant.
const GRANT: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";

/// Service account with an RSA key.
pub struct JwtBearer {
    url: Url,
    issuer: String,
    key_id: Option<String>,
    key: RsaKeyPair,
    scope: String,
    remedy: &'static str,
}

impl JwtBearer {
    /// Reads the key, a PEM of PKCS #8. `url` is the token endpoint, `issuer` the account.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the text is no such key; it does not contain the text.
    pub fn new(
        url: Url,
        (issuer, key_id): (&str, Option<&str>),
        key: &Secret,
        scope: &str,
        remedy: &'static str,
    ) -> Result<JwtBearer, Error> {
        let bad = |why: String| {
            Error::invalid(format!(
                "read the private key of {issuer}: {why}; create a new key of the account"
            ))
        };
        let der = PrivatePkcs8KeyDer::from_pem_slice(key.expose().as_bytes())
            .map_err(|error| bad(error.to_string()))?;
        let key = RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()).map_err(|error| bad(error.to_string()))?;
        Ok(JwtBearer {
            url,
            issuer: issuer.to_owned(),
            key_id: key_id.map(str::to_owned),
            key,
            scope: scope.to_owned(),
            remedy,
        })
    }

    /// Returns the signed assertion.
    fn assertion(&self, now: SystemTime) -> Result<Secret, Error> {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut header = json!({"alg": "RS256", "typ": "JWT"});
        if let (Some(id), Some(header)) = (&self.key_id, header.as_object_mut()) {
            header.insert("kid".to_owned(), id.as_str().into());
        }
        let claims = json!({
            "iss": self.issuer,
            "scope": self.scope,
            "aud": self.url.as_str(),
            "iat": now,
            "exp": now + LIFE,
        });
        let encode = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encode(&header), encode(&claims));
        let mut signature = vec![0; self.key.public().modulus_len()];
        let done = self.key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), signed.as_bytes(), &mut signature);
        done.map_err(|_| Error::transient("sign an assertion: the signature failed; it is tried again"))?;
        Ok(Secret::new(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))))
    }
}

#[async_trait]
impl TokenSource for JwtBearer {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let assertion = self.assertion(SystemTime::now())?;
        let fields = [("grant_type", GRANT), ("assertion", assertion.expose())];
        oauth::ask(http, &oauth::form(&self.url, &fields), self.remedy).await
    }
}
