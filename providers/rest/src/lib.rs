//! Implements the parts that providers of clouds with a REST API share.
//!
//! * [`Http`] sends one request and reads one bounded answer. [`Request`] and [`HttpAnswer`] are plain data.
//! * [`Tokens`] keeps an access token and renews it; [`sources`] fetch tokens. [`Hosts`] limits the hosts that get one.
//! * [`Rest`] makes a call of the cloud's API: its turn from the scheduler, the token, the answer, and the error of a
//!   refusal by the cloud's [`Dialect`]. It also reads lists of several pages ([`Next`]).
//! * [`decide`] waits until an asynchronous cloud has decided on an accepted call.
//! * [`ibm`] has the parts that the services of IBM Cloud share.
//! * [`read`] reads values of an answer. Answers are untrusted: nothing here panics or loops without an end.
//!
//! Repeats no call by itself, except after a throttle (in a later turn) and once after an expired token: the decorator
//! of the provider does that. May touch the network and read the files of credentials.

mod call;
mod dialect;
mod failure;
mod hosts;
mod http;
pub mod ibm;
mod operation;
mod page;
pub mod read;
mod request;
pub mod sources;
#[cfg(test)]
mod tests;
mod token;

pub use call::{Rest, Signature};
pub use dialect::{Dialect, Said};
pub use failure::Failure;
pub use hosts::Hosts;
pub use http::{Http, HttpSettings, NoAnswer};
pub use operation::{Decision, decide, end_of_wait};
pub use page::Next;
pub use request::{HttpAnswer, Request};
pub use reqwest::{Method, Url, header};
pub use token::{Token, TokenSource, Tokens};
