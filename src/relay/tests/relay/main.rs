//! The relay's program from outside.

mod common;
mod dials;
mod door;
mod guests;
mod process;
mod replaced;
mod sandbox;
