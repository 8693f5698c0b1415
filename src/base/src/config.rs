//! Configuration: one YAML file, below the environment (`PEERPOD_…`), below flags (`--section.key value`).
//!
//! Each part of a binary asks a [`Reader`] for the keys it owns, with a default and a sentence of help; what was asked
//! is also what is known, so unknown keys, the schema, the printed configuration and the help text all come from the
//! same place and cannot drift from the code. Every mistake of all layers is reported at once, as
//! `where = value: why; what would do`.
//!
//! May touch: the one configuration file. The environment and the flags are handed in, so that tests need neither.

mod duration;
mod lines;
mod mistake;
mod node;
mod output;
mod reader;
mod secret;
mod section;
mod sources;
mod suggest;
mod unknown;
mod value;

pub use duration::{format_duration, parse_duration};
pub use mistake::{Mistake, Mistakes};
pub use node::Node;
pub use output::{help, print, schema};
pub use reader::{Origin, Printed, Reader, Setting};
pub use secret::Secret;
pub use section::Section;
pub use sources::{DEFAULT_FILE, Sources, env_name};
pub use value::{Bad, Value};

#[cfg(test)]
mod tests;
