//! Defines a request to an API and its answer. Pure.

use std::fmt;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Method, Url};
use serde_json::Value;

/// Longest pause that an answer may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Request to an API, without its token. A clone sends the same bytes.
#[derive(Clone)]
pub struct Request {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Option<Bytes>,
}

impl Request {
    /// Returns a request without a body.
    pub fn new(method: Method, url: Url) -> Request {
        Request { method, url, headers: HeaderMap::new(), body: None }
    }

    /// Returns a GET.
    pub fn get(url: Url) -> Request {
        Request::new(Method::GET, url)
    }

    /// Adds a parameter to the query.
    #[must_use]
    pub fn query(mut self, name: &str, value: &str) -> Request {
        self.url.query_pairs_mut().append_pair(name, value);
        self
    }

    /// Adds a header with a fixed value, like `If-None-Match: *`.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: &'static str) -> Request {
        self.headers.insert(name, HeaderValue::from_static(value));
        self
    }

    /// Adds a header whose value is not a constant, like a signature or a cookie.
    #[must_use]
    pub fn with(mut self, name: HeaderName, value: HeaderValue) -> Request {
        self.headers.insert(name, value);
        self
    }

    /// Sets the body to this XML.
    #[must_use]
    pub fn xml(mut self, body: String) -> Request {
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/xml; charset=utf-8"));
        self.body = Some(Bytes::from(body));
        self
    }

    /// Sets the body to this JSON.
    #[must_use]
    pub fn json(mut self, body: &Value) -> Request {
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.body = Some(Bytes::from(body.to_string()));
        self
    }

    /// Sets the body to this form.
    #[must_use]
    pub fn form(mut self, fields: &[(&str, &str)]) -> Request {
        let text = "application/x-www-form-urlencoded";
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static(text));
        // The query of a URL has the encoding of a form.
        let mut url = self.url.clone();
        url.query_pairs_mut().clear().extend_pairs(fields);
        self.body = Some(Bytes::from(url.query().unwrap_or_default().to_owned()));
        self
    }

    /// Returns the method.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// Returns the URL.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Replaces the URL.
    #[must_use]
    pub fn to(mut self, url: Url) -> Request {
        self.url = url;
        self
    }

    /// Returns the headers that were set, without those of the connection.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Returns the bytes of the body, empty without one.
    pub fn body(&self) -> &[u8] {
        self.body.as_deref().unwrap_or_default()
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Query, headers and body may hold secrets.
        let host = self.url.host_str().unwrap_or_default();
        write!(f, "{} {host}{} ({} bytes)", self.method, self.url.path(), self.body().len())
    }
}

/// Answer of an API, with a body of bounded size.
#[derive(Clone)]
pub struct HttpAnswer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl HttpAnswer {
    /// Returns an answer with a JSON body, for tests and for results inside of other answers.
    pub fn of(status: u16, body: &Value) -> HttpAnswer {
        HttpAnswer { status, headers: HeaderMap::new(), body: Bytes::from(body.to_string()) }
    }

    /// Returns the HTTP status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Whether the status is one of 200 to 299.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Returns a header; `None`: it is absent or no text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Returns the body as JSON; `Value::Null` when it is empty or none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns the bytes of the body.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// Returns the pause of `Retry-After`, in seconds or as a date; at most ten minutes.
    pub fn retry_after(&self, now: SystemTime) -> Option<Duration> {
        let text = self.header(RETRY_AFTER.as_str())?.trim();
        let pause = match text.parse() {
            Ok(seconds) => Duration::from_secs(seconds),
            Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default(),
        };
        Some(pause.min(LONGEST_PAUSE))
    }
}

impl fmt::Debug for HttpAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "answer {} ({} bytes)", self.status, self.body.len())
    }
}
