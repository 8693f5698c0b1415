//! Pods' networks in real namespaces.

mod conntrack;
mod copy;
mod external;
mod follow;
mod look;
mod messages;
mod path;
mod shapes;
mod threads;
mod tunnel;
mod world;
