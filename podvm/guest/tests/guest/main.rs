//! The guest's program from outside, in namespaces and in machines.

mod cards;
mod life;
mod machine;
mod relay;
mod unit;
mod vm;
