//! Implementation of the provider; present with the feature `sdk`.

mod client;
mod create;
mod credentials;
mod events;
mod facts;
mod kept;
mod looks;
mod preflight;
mod prices;
mod provider;
mod recent;
mod refusal;
mod remove;
mod see;
mod shape;
mod tags;
mod volumes;

use provider::Aws;
pub use provider::AwsProvider;
