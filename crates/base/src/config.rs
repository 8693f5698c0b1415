//! Reads the configuration: one YAML file, then the environment (`PEERPOD_…`), then flags (`--section.key value`).
//!
//! Each component asks a [`Reader`] for its keys, with a default and a sentence of help. Unknown keys, schema, printed
//! configuration and help follow from these. All mistakes are reported at once, as `where = value: why; advice`.
//!
//! May touch: the one configuration file. Callers pass the environment and the flags in, so that tests need neither.

mod duration;
mod lines;
mod mistake;
mod node;
mod output;
mod reader;
mod secret;
mod sources;
mod suggest;
mod unknown;
mod value;

pub use duration::{format_duration, parse_duration};
pub use mistake::{Mistake, Mistakes};
pub use node::Node;
pub use output::{help, print, schema};
pub use reader::{Origin, Reader, Setting};
pub use secret::Secret;
pub use sources::{DEFAULT_FILE, Sources, env_name};
pub use value::{Bad, Value};

#[cfg(test)]
mod tests;
