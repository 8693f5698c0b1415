//! Signs requests by ACS3-HMAC-SHA256 ("V3 request structure and signature"). Pure but for the clock and random numbers.
//!
//! The signature covers method, path, query, the headers `host`, `content-type` and `x-acs-*`, and the hash of the body.
//! Each attempt has a time and a number of its own: the cloud refuses one that it has seen.

use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use peerpod_provider_rest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use peerpod_provider_rest::{HttpAnswer, Request, Signature, Url, read};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ring::rand::SystemRandom;
use ring::{digest, hmac};

/// Way of this cloud.
pub(crate) const SIGNATURE: Signature = Signature { sign, has_ended };

const ALGORITHM: &str = "ACS3-HMAC-SHA256";
/// Characters that a parameter encodes: all but the unreserved ones of RFC 3986.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Access key.
#[derive(Clone)]
pub(crate) struct AccessKey {
    pub id: String,
    pub secret: Secret,
    /// Security token of a temporary key.
    pub token: Option<Secret>,
}

impl AccessKey {
    /// Returns the key as one secret, as a source of tokens gives it.
    pub(crate) fn pack(&self) -> Secret {
        let token = self.token.as_ref().map_or("", Secret::expose);
        Secret::new(format!("{}\n{}\n{token}", self.id, self.secret.expose()))
    }

    /// Reads the result of [`AccessKey::pack`].
    fn unpack(packed: &Secret) -> AccessKey {
        let mut parts = packed.expose().splitn(3, '\n').map(str::to_owned);
        let mut next = || parts.next().unwrap_or_default();
        AccessKey {
            id: next(),
            secret: Secret::new(next()),
            token: Some(next()).filter(|token| !token.is_empty()).map(Secret::new),
        }
    }
}

/// Signs a request with a packed access key.
fn sign(request: &Request, credential: &Secret) -> Result<Request, Error> {
    let date = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let nonce = ring::rand::generate::<[u8; 16]>(&SystemRandom::new());
    let nonce = nonce.map_err(|_| Error::transient("sign a request: the kernel gave no random number"))?;
    signed(request, &AccessKey::unpack(credential), &date, &hex::encode(nonce.expose()))
}

fn signed(request: &Request, key: &AccessKey, date: &str, nonce: &str) -> Result<Request, Error> {
    let query = canonical_query(request.url());
    let mut url = request.url().clone();
    url.set_query(Some(&query).filter(|query| !query.is_empty()).map(String::as_str));
    let body_hash = hex::encode(digest::digest(&digest::SHA256, request.body()));
    let mut signed = request.clone().to(url);
    for (name, text) in [
        ("x-acs-date", Some(date)),
        ("x-acs-signature-nonce", Some(nonce)),
        ("x-acs-content-sha256", Some(body_hash.as_str())),
        ("x-acs-security-token", key.token.as_ref().map(Secret::expose)),
    ] {
        if let Some(text) = text {
            signed = signed.with(HeaderName::from_static(name), value(text)?);
        }
    }
    let (headers, names) = canonical_headers(&signed);
    let method = request.method();
    let path = request.url().path();
    let canonical = format!("{method}\n{path}\n{query}\n{headers}\n{names}\n{body_hash}");
    let hash = hex::encode(digest::digest(&digest::SHA256, canonical.as_bytes()));
    let secret = hmac::Key::new(hmac::HMAC_SHA256, key.secret.expose().as_bytes());
    let signature = hex::encode(hmac::sign(&secret, format!("{ALGORITHM}\n{hash}").as_bytes()));
    let text = format!("{ALGORITHM} Credential={},SignedHeaders={names},Signature={signature}", key.id);
    Ok(signed.with(AUTHORIZATION, value(&text)?))
}

fn value(text: &str) -> Result<HeaderValue, Error> {
    let mut value = HeaderValue::from_str(text).map_err(|_| Error::Auth {
        text: "sign a request: the access key has a character that no header takes; correct it".to_owned(),
    })?;
    value.set_sensitive(true);
    Ok(value)
}

fn encode(text: &str) -> String {
    utf8_percent_encode(text, ENCODED).to_string()
}

/// Returns the sorted parameters of a query.
fn canonical_query(url: &Url) -> String {
    let mut pairs: Vec<(String, String)> = url.query_pairs().into_owned().collect();
    pairs.sort();
    let pairs: Vec<String> =
        pairs.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
    pairs.join("&")
}

/// Returns the signed headers, one on each line, and their names.
fn canonical_headers(request: &Request) -> (String, String) {
    let url = request.url();
    let host = url.host_str().unwrap_or_default();
    let host = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
    let is_signed = |name: &HeaderName| name == CONTENT_TYPE || name.as_str().starts_with("x-acs-");
    let mut headers: Vec<(&str, String)> = request
        .headers()
        .iter()
        .filter(|(name, _)| is_signed(name))
        .map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes()).trim().to_owned()))
        .collect();
    headers.push(("host", host));
    headers.sort();
    let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    (lines, names.join(";"))
}

/// Whether a refusal shows that the temporary key has ended.
fn has_ended(answer: &HttpAnswer) -> bool {
    if answer.is_success() {
        return false;
    }
    let body = answer.json();
    let code = read::text(&body, "/Code").unwrap_or_default();
    code.starts_with("InvalidSecurityToken.") || code == "InvalidAccessKeyId.Inactive"
}

#[cfg(test)]
mod tests {
    use peerpod_provider_rest::Method;

    use super::*;

    fn key(token: Option<&str>) -> AccessKey {
        let token = token.map(|token| Secret::new(token.to_owned()));
        AccessKey {
            id: "YourAccessKeyId".into(),
            secret: Secret::new("YourAccessKeySecret".to_owned()),
            token,
        }
    }

    fn request(url: &str) -> Request {
        let request = Request::new(Method::POST, Url::parse(url).unwrap());
        let header = |name| HeaderName::from_static(name);
        request
            .with(header("x-acs-action"), HeaderValue::from_static("RunInstances"))
            .with(header("x-acs-version"), HeaderValue::from_static("2014-05-26"))
    }

    fn authorization(request: &Request) -> &str {
        request.headers()[AUTHORIZATION].to_str().unwrap()
    }

    /// The example of "V3 request structure and signature", with all its values.
    #[test]
    fn the_published_example_has_its_published_signature() {
        let url = "https://ecs.cn-shanghai.aliyuncs.com/?ImageId=win2019_1809_x64_dtc_zh-cn_40G_alibase_20230811.vhd&RegionId=cn-shanghai";
        let signed =
            signed(&request(url), &key(None), "2023-10-26T10:22:32Z", "3156853299f313e23d1673dc12e1703d");
        let signed = signed.unwrap();
        assert_eq!(
            authorization(&signed),
            "ACS3-HMAC-SHA256 Credential=YourAccessKeyId,SignedHeaders=host;x-acs-action;x-acs-content-sha256;\
             x-acs-date;x-acs-signature-nonce;x-acs-version,\
             Signature=06563a9e1b43f5dfe96b81484da74bceab24a1d853912eee15083a6f0f3283c0"
        );
        assert_eq!(
            signed.headers()["x-acs-content-sha256"],
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
    }

    #[test]
    fn the_query_is_sent_as_it_is_signed() {
        let request = request("https://ecs.example").query("Tag.1.Value", "a b*c+~/ä:").query("A", "");
        let signed = signed(&request, &key(Some("token")), "d", "n").unwrap();
        assert_eq!(signed.url().query(), Some("A=&Tag.1.Value=a%20b%2Ac%2B~%2F%C3%A4%3A"));
        assert!(authorization(&signed).contains(";x-acs-security-token;"), "{}", authorization(&signed));
        assert_eq!(signed.headers()["x-acs-security-token"], "token");
    }

    #[test]
    fn body_port_time_and_number_change_the_signature() {
        let sign = |request: &Request, date, nonce| {
            authorization(&signed(request, &key(None), date, nonce).unwrap()).to_owned()
        };
        let first = sign(&request("https://ecs.example"), "d", "n");
        let form = request("https://ecs.example").form(&[("UserData", "e30=")]);
        let others = [
            sign(&form, "d", "n"),
            sign(&request("https://ecs.example:8443"), "d", "n"),
            sign(&request("https://ecs.example"), "e", "n"),
            sign(&request("https://ecs.example"), "d", "m"),
        ];
        assert!(others[0].contains("SignedHeaders=content-type;host;"), "{}", others[0]);
        for other in others {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn a_key_is_packed_and_read_back_and_a_bad_one_shows_nothing() {
        for token in [None, Some("with\nnewline")] {
            let back = AccessKey::unpack(&key(token).pack());
            assert_eq!(back.id, "YourAccessKeyId");
            assert_eq!(back.secret.expose(), "YourAccessKeySecret");
            assert_eq!(back.token.as_ref().map(Secret::expose), token);
        }
        let error = signed(&request("https://x"), &key(Some("a\nsecret")), "d", "n").unwrap_err();
        assert!(error.class() == "auth" && !error.to_string().contains("secret\n"), "{error}");
    }
}
