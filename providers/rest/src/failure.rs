//! Defines the failure of a call: the error to return, and the answer of the cloud.

use peerpod_provider_api::Error;
use serde_json::Value;

use crate::dialect::Said;
use crate::request::HttpAnswer;

/// Failed call.
#[derive(Debug)]
pub struct Failure {
    /// Error to return.
    pub error: Error,
    said: Option<Box<(Said, HttpAnswer)>>,
}

impl Failure {
    /// Returns the failure of a call that the cloud refused by this answer.
    pub fn new(error: Error, said: Said, answer: HttpAnswer) -> Failure {
        Failure { error, said: Some(Box::new((said, answer))) }
    }

    /// Returns the code of the cloud; empty if it did not answer.
    pub fn code(&self) -> &str {
        self.said.as_ref().map_or("", |said| &said.0.code)
    }

    /// Returns the message of the cloud; empty if it did not answer.
    pub fn message(&self) -> &str {
        self.said.as_ref().map_or("", |said| &said.0.message)
    }

    /// Returns the HTTP status; 0 if the cloud did not answer.
    pub fn status(&self) -> u16 {
        self.said.as_ref().map_or(0, |said| said.1.status)
    }

    /// Returns the body of the answer; `Value::Null` without one. Not for texts.
    pub fn body(&self) -> Value {
        self.said.as_ref().map_or(Value::Null, |said| said.1.json())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { error, said: None }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        failure.error
    }
}

impl AsRef<Error> for Failure {
    fn as_ref(&self) -> &Error {
        &self.error
    }
}
