//! The table of providers: one feature in `Cargo.toml` and one row here each, and the only list there is.
//!
//! Nothing else in the project names a provider. Reads `provider.kind` and that provider's own section; touches
//! nothing before [`Settings::open`].

pub mod caa;

use std::path::PathBuf;
use std::pin::Pin;
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
    /// Which node they belong to. Empty with [`Purpose::Collect`]: the VMs of all nodes.
    pub node_name: String,
    /// What the provider is for.
    pub purpose: Purpose,
}

/// What a provider is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Purpose {
    /// All of the trait: a node.
    #[default]
    Create,
    /// Lists and deletes, for the whole cluster: the controller. Settings that only a create needs may be missing; a
    /// create is refused, and nobody calls `preflight`.
    Collect,
}

/// One provider: reads its section, and gives what opens it.
struct Row {
    kind: &'static str,
    /// Whether its VMs cost nobody anything, so that a test may make some without asking.
    free: bool,
    read: fn(&mut Reader, &Context) -> Opener,
}

type Opened = Result<Arc<dyn Provider>, Error>;
type Opener = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = Opened> + Send>> + Send>;

/// For providers that need to wait for nothing when they are opened, which is all but one.
#[cfg(any(feature = "aws", feature = "drill", feature = "libvirt", feature = "local"))]
fn at_once(open: impl FnOnce() -> Opened + Send + 'static) -> Opener {
    Box::new(|| Box::pin(async { open() }))
}

/// The table.
const TABLE: &[Row] = &[
    #[cfg(feature = "local")]
    Row {
        kind: "local",
        free: true,
        read: |reader, context| {
            let config = peerpod_provider_local::LocalConfig::read(reader, &context.state_dir);
            at_once(|| Ok(Arc::new(peerpod_provider_local::LocalProvider::open(config)?)))
        },
    },
    #[cfg(feature = "aws")]
    Row {
        kind: "aws",
        free: false,
        read: |reader, context| {
            let creates = context.purpose == Purpose::Create;
            let config = peerpod_provider_aws::AwsConfig::read(reader, creates);
            let (cluster, node) = (context.cluster_id.clone(), context.node_name.clone());
            at_once(move || Ok(Arc::new(peerpod_provider_aws::AwsProvider::new(config, &cluster, &node))))
        },
    },
    #[cfg(feature = "libvirt")]
    Row {
        kind: "libvirt",
        // Whose host it is, and what else runs there, nobody knows.
        free: false,
        read: |reader, context| {
            use peerpod_provider_libvirt::{LibvirtConfig, LibvirtProvider};
            let config = LibvirtConfig::read(reader, context.purpose == Purpose::Create);
            let (cluster, node) = (context.cluster_id.clone(), context.node_name.clone());
            at_once(move || Ok(Arc::new(LibvirtProvider::new(config, &cluster, &node))))
        },
    },
    #[cfg(feature = "drill")]
    Row {
        kind: "drill",
        free: true,
        read: |reader, context| {
            let config = peerpod_provider_drill::DrillConfig::read(reader, &context.state_dir);
            at_once(|| Ok(Arc::new(peerpod_provider_drill::Drill::new(config))))
        },
    },
    #[cfg(feature = "external")]
    Row {
        kind: "external",
        // Who knows what is behind it.
        free: false,
        read: |reader, context| {
            use peerpod_provider_external::{External, ExternalConfig, Owner};
            let Context { state_dir, cluster_id, node_name, .. } = context;
            let owner = Owner { cluster_id: cluster_id.clone(), node_name: node_name.clone() };
            let config = ExternalConfig::read(reader, state_dir, owner);
            Box::new(|| {
                Box::pin(async {
                    let opened = External::open(config).await?;
                    Ok(Arc::new(opened) as Arc<dyn Provider>)
                })
            })
        },
    },
];

/// A provider's settings, read but not acted on.
pub struct Settings {
    kind: String,
    free: bool,
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
    let (mut opener, mut free) = (None, false);
    for row in TABLE {
        if row.kind == kind {
            (opener, free) = (Some((row.read)(reader, context)), row.free);
        } else {
            reader.leave(&format!("provider.{}", row.kind));
        }
    }
    Settings { kind, free, opener }
}

impl Settings {
    /// `provider.kind`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether this provider's VMs are known to cost nobody anything.
    pub fn is_free(&self) -> bool {
        self.free
    }

    /// Opens the provider: bare, without [`peerpod_provider_api::decorate()`]. Only an external one is waited for, until
    /// it has said what it can do.
    ///
    /// # Errors
    /// Whatever the provider needs and does not find; and a kind that this build does not have.
    pub async fn open(self) -> Result<Arc<dyn Provider>, Error> {
        match self.opener {
            Some(opener) => opener().await,
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
pub async fn build(reader: &mut Reader, context: &Context) -> Result<Arc<dyn Provider>, Error> {
    read(reader, context).open().await
}

/// The README's provider is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod tests {
    use peerpod_base::config::Sources;

    use super::*;

    fn reader(flags: &[(&str, &str)]) -> Reader {
        let flags = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Reader::load(Sources { flags, ..Sources::default() }, &["provider"], &[]).unwrap()
    }

    fn context() -> Context {
        let state_dir = std::env::temp_dir().join(format!("peerpod-providers-{}", std::process::id()));
        Context { state_dir, cluster_id: "c".to_owned(), node_name: "n".to_owned(), purpose: Purpose::Create }
    }

    #[cfg(feature = "local")]
    #[tokio::test]
    async fn without_a_word_it_is_the_local_provider() {
        let context = context();
        let mut reader = reader(&[("provider.local.bridge", "ppx0")]);
        let settings = read(&mut reader, &context);
        reader.finish().unwrap();
        assert!(!context.state_dir.exists(), "reading has no effect");
        assert!(settings.is_free());
        let provider = settings.open().await.unwrap();
        assert_eq!(provider.name(), "local");
        drop(provider);
        std::fs::remove_dir_all(&context.state_dir).unwrap();
    }

    #[test]
    fn mistakes_are_all_reported_and_name_their_keys() {
        let mut reader = reader(&[
            ("provider.kind", "clowd"),
            ("provider.local.bridge", "a-name-that-is-too-long"),
            ("provider.local.subnet4", "10.99.0.1/16"),
            ("provider.local.subnet6", "10.99.0.0/16"),
            ("provider.local.boot-delay", "soon"),
            ("provider.local.mtu", "1279"),
            ("provider.local.second-subnet4", "10.98.0.0/31"),
            ("provider.local.guest-binry", "/x"),
        ]);
        read(&mut reader, &context());
        let text = reader.finish().unwrap_err().to_string();
        for part in [
            "provider.kind",
            "bridge",
            "local.subnet4",
            "subnet6",
            "boot-delay",
            "guest-binry",
            "mtu",
            "second-subnet4",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let mut reader = self::reader(&[("provider.local.second-bridge", "pplocal0")]);
        read(&mut reader, &context());
        let text = reader.finish().unwrap_err().to_string();
        assert!(text.contains("second-bridge"), "{text}");
    }
}
