//! The link between two ends: dialled, cut, resumed.

mod dialled;
mod link;
mod support;
