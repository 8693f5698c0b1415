//! Implementation of the provider; present with the feature `sdk`.

mod cache;
mod client;
mod create;
mod credentials;
mod events;
mod facts;
mod lookup;
mod preflight;
mod prices;
mod provider;
mod quota;
mod refusal;
mod remove;
mod shape;
mod upload;
mod vms;
mod volumes;

use provider::Aws;
pub use provider::AwsProvider;
pub use upload::upload;
