//! Tests that the fakes behave like their clouds, because other tests rely on it.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod alibaba;
mod azure;
mod gcp;
mod ibmcloud;
mod powervs;
mod socket;
#[cfg(feature = "witness")]
mod witness;
