//! Sandboxes against a world of our own: time stands still unless somebody sleeps, every effect can fail, and the
//! node can be killed before and after each.

mod batch;
mod calls;
mod cluster;
mod crash;
mod deaths;
mod failures;
mod follow;
mod node;
mod restart;
mod world;
