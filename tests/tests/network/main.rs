//! Pods' traffic through the tunnel: what a CNI makes, faults, changes, kills, encryption, localhost.

mod encrypted;
mod faults;
mod follow;
mod killed;
mod localhost;
mod network_common;
mod pods;
mod underlay;
