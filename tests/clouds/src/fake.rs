//! Defines the part of one cloud: which call a request is, and its answer.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;

use crate::faults::Faults;
use crate::rates::Rate;
use crate::tokens::Tokens;

/// Cloud behind a [`crate::Cloud`]. It has no clock, lock or socket of its own.
pub trait Fake: Send + 'static {
    /// Returns the call's name, as the vendor's description of the API names it. Faults, rates and records use it.
    fn action(&self, request: &Request) -> String;

    /// Returns whether the request asks for a page of a list after the first. Its faults have a name of their own: the
    /// action and ` second page`.
    fn is_later_page(&self, request: &Request) -> bool;

    /// Returns the rights that the cloud checks for this call, by the names that its roles list.
    fn rights(&self, request: &Request, action: &str) -> Vec<String>;

    /// Returns whether the call needs no token, because it issues one or because a signed URL authorises it.
    fn is_open(&self, action: &str) -> bool;

    /// Returns the counters of this call, which it shares with others, and their limits.
    fn rates(&self, request: &Request, action: &str) -> Vec<(String, Rate)>;

    /// Moves all states to this time.
    fn tick(&mut self, now: Duration);

    /// Answers a call that passed tokens, rights, rates and faults.
    fn answer(&mut self, request: &Request, action: &str, world: &mut World<'_>) -> Answer;

    /// Returns a refusal in the cloud's form.
    fn refusal(&self, status: u16, code: &str, message: &str) -> Answer;

    /// Returns the refusal of a call that lacks a right.
    fn denied(&self, right: &str) -> Answer;

    /// Returns the refusal of a call without a valid token.
    fn unauthorized(&self) -> Answer;

    /// Returns the refusal of a call above its limit. A token is there after `wait`.
    fn throttled(&self, counter: &str, wait: Duration) -> Answer;
}

/// Surroundings of an answer.
pub struct World<'a> {
    /// Time since the cloud's start.
    pub now: Duration,
    /// Base of the URLs in the answer: scheme, host and port that the caller used.
    pub endpoint: &'a str,
    /// Whether a witness asks, not a provider.
    pub is_witness: bool,
    /// Time for which lists miss changes.
    pub lag: Duration,
    /// Code and text of the refusal that follows the acceptance of this create, if the test set one.
    pub late: Option<(String, String)>,
    /// Calls left in each counter of this call; empty: unlimited.
    pub left: Vec<(String, u64)>,
    /// Valid tokens.
    pub tokens: &'a mut Tokens,
    pub(crate) faults: &'a mut Faults,
}

impl World<'_> {
    /// Takes a VM of this `(type, zone, market)` from the stock; false when there is none left.
    pub fn take_stock(&mut self, offering: [&str; 3]) -> bool {
        self.faults.take_stock(offering, 1) == 1
    }

    /// Returns the time until the cloud decides on a create, and the time from then until the VM runs.
    pub fn times(&self) -> (Duration, Duration) {
        (self.faults.decision, self.faults.boot)
    }
}

/// HTTP request.
#[derive(Debug, Clone)]
pub struct Request {
    /// Method, in capitals.
    pub method: String,
    /// Path, still percent-encoded.
    pub path: String,
    /// Parameters of the query, decoded.
    pub query: BTreeMap<String, String>,
    /// Headers, by their names in lower case.
    pub headers: BTreeMap<String, String>,
    /// Body.
    pub body: Bytes,
}

impl Request {
    /// Returns a request to this path and query, with JSON if there is a body. Its length is a header, as clients send it.
    pub fn new(method: &str, target: &str, headers: &[(&str, &str)], body: Option<&Value>) -> Request {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut all: BTreeMap<String, String> =
            headers.iter().map(|(name, value)| (name.to_ascii_lowercase(), (*value).to_owned())).collect();
        if body.is_some() {
            all.insert("content-type".to_owned(), "application/json".to_owned());
        }
        let body: Bytes = body.map(|body| body.to_string().into()).unwrap_or_default();
        all.insert("content-length".to_owned(), body.len().to_string());
        Request { method: method.to_owned(), path: path.to_owned(), query: pairs(query), headers: all, body }
    }

    /// Returns the decoded parts of the path.
    pub fn parts(&self) -> Vec<String> {
        self.path.split('/').filter(|part| !part.is_empty()).map(decode).collect()
    }

    /// Returns a parameter of the query, or an empty text.
    pub fn query(&self, name: &str) -> &str {
        self.query.get(name).map_or("", String::as_str)
    }

    /// Returns a header, or an empty text.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    /// Returns whether the request sends a body, or should, without its length. Some servers refuse it (411).
    pub fn lacks_length(&self) -> bool {
        let has = |name: &str| self.headers.contains_key(name);
        matches!(self.method.as_str(), "POST" | "PUT" | "PATCH")
            && !has("content-length")
            && !has("transfer-encoding")
    }

    /// Returns the body as JSON; `Null` when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns the body as a form.
    pub fn form(&self) -> BTreeMap<String, String> {
        pairs(&String::from_utf8_lossy(&self.body))
    }
}

/// HTTP answer.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// Status.
    pub status: u16,
    /// Headers.
    pub headers: Vec<(String, String)>,
    /// Body.
    pub body: Bytes,
}

impl Answer {
    /// Returns an answer with JSON.
    pub fn json(status: u16, body: &Value) -> Answer {
        Answer { status, body: body.to_string().into(), ..Answer::default() }
            .header("content-type", "application/json; charset=utf-8")
    }

    /// Returns the body as JSON; `Null` when it is none.
    pub fn value(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns a header, or an empty text.
    pub fn get(&self, name: &str) -> &str {
        self.headers.iter().find(|(one, _)| one == name).map_or("", |(_, value)| value)
    }

    /// Returns an answer without a body.
    pub fn empty(status: u16) -> Answer {
        Answer { status, ..Answer::default() }
    }

    /// Returns an answer with plain text.
    pub fn text(status: u16, body: impl Into<Bytes>) -> Answer {
        Answer { status, body: body.into(), ..Answer::default() }.header("content-type", "text/plain")
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl Into<String>) -> Answer {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
}

/// Refusal of a call: status, code, text.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) status: u16,
    pub(crate) code: String,
    pub(crate) message: String,
}

/// Returns a refusal.
pub(crate) fn refused<T>(status: u16, code: &str, message: impl Into<String>) -> Result<T, Box<Refused>> {
    Err(Box::new(Refused { status, code: code.to_owned(), message: message.into() }))
}

/// Reads the parameters of a query or a form: `a=1&b=2`.
pub fn pairs(text: &str) -> BTreeMap<String, String> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(&name.replace('+', " ")), decode(&value.replace('+', " ")))
    };
    text.split('&').filter(|part| !part.is_empty()).map(pair).collect()
}

fn decode(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_decoded() {
        let found = pairs("$filter=location%20eq%20'x'&b=1+2&c");
        assert_eq!(found.get("$filter").map(String::as_str), Some("location eq 'x'"));
        assert_eq!(found.get("b").map(String::as_str), Some("1 2"));
        assert_eq!(found.get("c").map(String::as_str), Some(""));
    }
}
