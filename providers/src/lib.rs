//! The table of providers: one feature in `Cargo.toml` and one row here each, and the only list there is.
//!
//! Nothing else in the project names a provider. Reads `provider.kind` and that provider's own section; touches
//! nothing before [`Settings::open`].

use std::path::PathBuf;
use std::sync::Arc;

use peerpod_base::config::Reader;
use peerpod_provider_api::{Error, Provider};

/// What every provider gets to know of its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// `paths.state-dir`; a provider keeps what it must below `<state-dir>/<its name>`.
    pub state_dir: PathBuf,
    /// Which cluster the VMs belong to; part of what marks them as ours.
    pub cluster_id: String,
    /// Which node they belong to.
    pub node_name: String,
}

/// One provider: reads its section, and gives what opens it.
struct Row {
    kind: &'static str,
    read: fn(&mut Reader, &Context) -> Opener,
}

type Opener = Box<dyn FnOnce() -> Result<Arc<dyn Provider>, Error> + Send>;

/// The table.
const TABLE: &[Row] = &[
    #[cfg(feature = "local")]
    Row {
        kind: "local",
        read: |reader, context| {
            let config = peerpod_provider_local::LocalConfig::read(reader, &context.state_dir);
            Box::new(|| Ok(Arc::new(peerpod_provider_local::LocalProvider::open(config)?)))
        },
    },
];

/// A provider's settings, read but not acted on.
pub struct Settings {
    kind: String,
    opener: Option<Opener>,
}

/// The names that `provider.kind` may have in this build.
pub fn kinds() -> Vec<&'static str> {
    TABLE.iter().map(|row| row.kind).collect()
}

/// Reads `provider.kind` and the section of that provider. Mistakes stay with the reader; the sections of other
/// providers are left unread.
pub fn read(reader: &mut Reader, context: &Context) -> Settings {
    let kinds = kinds();
    let default = kinds.first().copied().unwrap_or_default();
    let kind = reader.choice("provider.kind", default, &kinds, "which cloud or hypervisor makes the VMs");
    let mut opener = None;
    for row in TABLE {
        if row.kind == kind {
            opener = Some((row.read)(reader, context));
        } else {
            reader.leave(&format!("provider.{}", row.kind));
        }
    }
    Settings { kind, opener }
}

impl Settings {
    /// Opens the provider: bare, without [`peerpod_provider_api::decorate`].
    ///
    /// # Errors
    /// Whatever the provider needs and does not find; and a kind that this build does not have.
    pub fn open(self) -> Result<Arc<dyn Provider>, Error> {
        match self.opener {
            Some(opener) => opener(),
            None => Err(Error::invalid(format!(
                "provider.kind = {}: this build has no such provider; it has {}",
                self.kind,
                kinds().join(", ")
            ))),
        }
    }
}

/// Reads and opens in one go, for programs that have nothing else to read.
///
/// # Errors
/// As [`Settings::open`]. Mistakes in the configuration stay with the reader: ask it, too.
pub fn build(reader: &mut Reader, context: &Context) -> Result<Arc<dyn Provider>, Error> {
    read(reader, context).open()
}
