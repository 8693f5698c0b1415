//! Tests controller, webhook, pull secrets, nodes and the chart against a real API server.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod by_node;
mod chart;
mod chart_package;
mod chart_release;
mod check;
mod controller;
mod controller_world;
mod crds;
mod drain;
mod faults;
mod front_door;
#[path = "../../../tests/images_common/mod.rs"]
mod images_common;
mod node;
mod node_common;
mod rbac;
mod rollout;
mod secrets;
mod secrets_common;
mod secrets_e2e;
mod server;
mod webhook;
mod webhook_managed;
