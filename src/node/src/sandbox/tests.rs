//! Tests sandboxes against a fake world. The clock advances only while tasks sleep, every operation can fail, and the
//! node can be killed before and after each.

mod batch;
mod calls;
mod cluster;
mod crash;
mod failures;
mod follow;
mod node;
mod pull;
mod restart;
mod vm_liveness;
mod volumes;
mod world;
