//! Table of providers: one feature in `Cargo.toml` and one row here each. No other list of providers exists.
//!
//! No other part of the project names a provider. Reads `provider.kind` and the section of that provider; touches
//! nothing else before [`ProviderSettings::open`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use peerpod_base::config::{Mistakes, Reader, Setting, Sources};
use peerpod_provider_api::{Error, Owner, Provider};
pub use peerpod_provider_cloud::image::{ImageSettings, Upload};

/// Facts about the node that every provider gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// `paths.state-dir`. A provider keeps its files below `<state-dir>/<provider name>`.
    pub state_dir: PathBuf,
    /// Cluster that the VMs belong to; part of the owner mark on each VM.
    pub cluster_id: String,
    /// Node that the VMs belong to. Empty with [`Purpose::Collect`]: the VMs of all nodes.
    pub node_name: String,
    /// Purpose of the provider.
    pub purpose: Purpose,
}

/// Purpose of a provider in a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Purpose {
    /// The whole trait, for a node.
    #[default]
    Create,
    /// Listing and deletion for the whole cluster, for the controller. Settings that only a create needs may be
    /// missing. A create is refused, and `preflight` is never called.
    Collect,
    /// The preflight alone, for a check that makes nothing at the provider.
    Check,
}

impl Purpose {
    fn creates(self) -> bool {
        self != Purpose::Collect
    }
}

/// One provider: its kind, and a function that reads its section and returns an opener.
struct Row {
    kind: &'static str,
    /// Whether the VMs are free of charge, so that a test may create some without confirmation.
    free: bool,
    read: fn(&mut Reader, &Context) -> Opener,
    /// Reads its section for [`Purpose::Collect`], and returns the upload of a disk image; `None`: there is none.
    upload: Option<fn(&mut Reader) -> Uploader>,
}

/// Upload of a built disk image with the settings of a provider.
pub type Uploader = Box<dyn FnOnce(Upload) -> Pin<Box<dyn Future<Output = Uploaded> + Send>> + Send>;
type Uploaded = Result<ImageSettings, Error>;

type Opened = Result<Arc<dyn Provider>, Error>;
type Opener = Box<dyn FnOnce(Owner) -> Pin<Box<dyn Future<Output = Opened> + Send>> + Send>;

/// Opener for providers that open without waiting: all but `external`.
#[cfg(any(
    feature = "alibabacloud",
    feature = "aws",
    feature = "azure",
    feature = "byom",
    feature = "fake",
    feature = "gcp",
    feature = "ibmcloud",
    feature = "libvirt",
    feature = "local",
    feature = "powervs",
    feature = "vsphere"
))]
fn at_once(open: impl FnOnce(Owner) -> Opened + Send + 'static) -> Opener {
    Box::new(|owner| Box::pin(async { open(owner) }))
}

/// Rows of the table, one per provider of this build.
const TABLE: &[Row] = &[
    #[cfg(feature = "local")]
    Row {
        kind: "local",
        free: true,
        read: |reader, context| {
            let config = peerpod_provider_local::LocalConfig::read(reader, &context.state_dir);
            at_once(|_| Ok(Arc::new(peerpod_provider_local::LocalProvider::open(config)?)))
        },
        upload: None,
    },
    #[cfg(feature = "alibabacloud")]
    Row {
        kind: "alibabacloud",
        free: false,
        read: |reader, context| {
            use peerpod_provider_alibabacloud::{AlibabaCloudConfig, AlibabaCloudProvider};
            let config = AlibabaCloudConfig::read(reader, context.purpose.creates());
            at_once(|owner| Ok(Arc::new(AlibabaCloudProvider::new(config, owner))))
        },
        upload: None,
    },
    #[cfg(feature = "aws")]
    Row {
        kind: "aws",
        free: false,
        read: |reader, context| {
            let mut config = peerpod_provider_aws::AwsConfig::read(reader, context.purpose.creates());
            config.dry = context.purpose == Purpose::Check;
            at_once(|owner| Ok(Arc::new(peerpod_provider_aws::AwsProvider::new(config, owner))))
        },
        upload: Some(|reader| {
            let config = peerpod_provider_aws::AwsConfig::read(reader, false);
            Box::new(|upload| Box::pin(peerpod_provider_aws::upload(config, upload)))
        }),
    },
    #[cfg(feature = "azure")]
    Row {
        kind: "azure",
        free: false,
        read: |reader, context| {
            use peerpod_provider_azure::{AzureConfig, AzureProvider};
            let config = AzureConfig::read(reader, context.purpose.creates());
            at_once(|owner| Ok(Arc::new(AzureProvider::new(config, owner)?)))
        },
        upload: None,
    },
    #[cfg(feature = "byom")]
    Row {
        kind: "byom",
        // The machines may be rented, and each pod costs a reboot.
        free: false,
        read: |reader, context| {
            use peerpod_provider_byom::{ByomConfig, ByomProvider};
            let config = ByomConfig::read(reader, context.purpose.creates());
            at_once(|owner| Ok(Arc::new(ByomProvider::new(config, owner))))
        },
        upload: None,
    },
    #[cfg(feature = "gcp")]
    Row {
        kind: "gcp",
        free: false,
        read: |reader, context| {
            let config = peerpod_provider_gcp::GcpConfig::read(reader, context.purpose.creates());
            at_once(|owner| Ok(Arc::new(peerpod_provider_gcp::GcpProvider::new(config, owner))))
        },
        upload: None,
    },
    #[cfg(feature = "ibmcloud")]
    Row {
        kind: "ibmcloud",
        free: false,
        read: |reader, context| {
            use peerpod_provider_ibmcloud::{IbmCloudConfig, IbmCloudProvider};
            let config = IbmCloudConfig::read(reader, context.purpose.creates());
            at_once(|owner| Ok(Arc::new(IbmCloudProvider::new(config, owner))))
        },
        upload: None,
    },
    #[cfg(feature = "powervs")]
    Row {
        kind: "ibmcloud-powervs",
        free: false,
        read: |reader, context| {
            use peerpod_provider_powervs::{PowerVsConfig, PowerVsProvider};
            let config = PowerVsConfig::read(reader, context.purpose.creates());
            at_once(|owner| Ok(Arc::new(PowerVsProvider::new(config, owner))))
        },
        upload: None,
    },
    #[cfg(feature = "libvirt")]
    Row {
        kind: "libvirt",
        // The host may be in other use, so its VMs are not assumed to be free.
        free: false,
        read: |reader, context| {
            use peerpod_provider_libvirt::{LibvirtConfig, LibvirtProvider};
            let mut config = LibvirtConfig::read(reader, context.purpose.creates());
            config.dry = context.purpose == Purpose::Check;
            at_once(|owner| Ok(Arc::new(LibvirtProvider::new(config, owner))))
        },
        upload: Some(|reader| {
            let config = peerpod_provider_libvirt::LibvirtConfig::read(reader, false);
            Box::new(|upload| Box::pin(peerpod_provider_libvirt::upload(config, upload)))
        }),
    },
    #[cfg(feature = "vsphere")]
    Row {
        kind: "vsphere",
        free: false,
        read: |reader, context| {
            use peerpod_provider_vsphere::{VsphereConfig, VsphereProvider};
            let config = VsphereConfig::read(reader, context.purpose.creates());
            at_once(|owner| Ok(Arc::new(VsphereProvider::new(config, owner))))
        },
        upload: None,
    },
    #[cfg(feature = "fake")]
    Row {
        kind: "fake",
        free: true,
        read: |reader, context| {
            let config = peerpod_provider_fake::FakeConfig::read(reader, &context.state_dir);
            at_once(|_| Ok(Arc::new(peerpod_provider_fake::Fake::new(config))))
        },
        upload: None,
    },
    #[cfg(feature = "external")]
    Row {
        kind: "external",
        // The service behind the socket is unknown.
        free: false,
        read: |reader, context| {
            use peerpod_provider_external::{External, ExternalConfig};
            let config = ExternalConfig::read(reader, &context.state_dir);
            Box::new(move |owner| {
                Box::pin(async move {
                    let opened = External::open(ExternalConfig { owner, ..config }).await?;
                    Ok(Arc::new(opened) as Arc<dyn Provider>)
                })
            })
        },
        upload: None,
    },
];

/// Kinds of the project's providers that this build leaves out.
const LEFT_OUT: &[&str] = &[
    #[cfg(not(feature = "alibabacloud"))]
    "alibabacloud",
    #[cfg(not(feature = "aws"))]
    "aws",
    #[cfg(not(feature = "azure"))]
    "azure",
    #[cfg(not(feature = "byom"))]
    "byom",
    #[cfg(not(feature = "external"))]
    "external",
    #[cfg(not(feature = "gcp"))]
    "gcp",
    #[cfg(not(feature = "ibmcloud"))]
    "ibmcloud",
    #[cfg(not(feature = "powervs"))]
    "ibmcloud-powervs",
    #[cfg(not(feature = "libvirt"))]
    "libvirt",
    #[cfg(not(feature = "local"))]
    "local",
    #[cfg(not(feature = "vsphere"))]
    "vsphere",
];

/// Settings of a provider, read but not yet applied.
pub struct ProviderSettings {
    kind: String,
    free: bool,
    cluster_id: String,
    node_name: String,
    opener: Option<Opener>,
}

/// Returns the values that `provider.kind` may have in this build.
pub fn kinds() -> Vec<&'static str> {
    TABLE.iter().map(|row| row.kind).collect()
}

/// Returns the kinds of the project's providers that this build leaves out.
pub fn left_out() -> &'static [&'static str] {
    LEFT_OUT
}

/// Reads `provider.kind` and the section of that provider. Mistakes stay with the reader. The sections of other
/// providers stay unread, those of providers that this build leaves out, too.
pub fn read(reader: &mut Reader, context: &Context) -> ProviderSettings {
    let (kind, row) = selected(reader);
    let (opener, free) = row.map_or((None, false), |row| (Some((row.read)(reader, context)), row.free));
    let Context { cluster_id, node_name, .. } = context.clone();
    ProviderSettings { kind, free, cluster_id, node_name, opener }
}

/// Reads `provider.kind` and the section of that provider for the upload of a disk image. Mistakes stay with the reader.
/// Returns the kind, and the upload; `None`: the provider has none, and [`guide`] is the page with the steps.
pub fn read_upload(reader: &mut Reader) -> (String, Option<Uploader>) {
    let (kind, row) = selected(reader);
    let uploader = row.and_then(|row| row.upload).map(|read| read(reader));
    (kind, uploader)
}

/// Returns the page about the installation with a provider of this kind.
pub fn guide(kind: &str) -> String {
    match kind {
        "external" => "docs/provider-guide.md".to_owned(),
        _ => format!("docs/install-{}.md", kind.rsplit('-').next().unwrap_or(kind)),
    }
}

/// Reads `provider.kind`, and leaves the sections of all other providers unread. Returns the kind and its row.
fn selected(reader: &mut Reader) -> (String, Option<&'static Row>) {
    let kinds = kinds();
    let default = kinds.first().copied().unwrap_or_default();
    let mut known = [&kinds, LEFT_OUT].concat();
    known.sort_unstable();
    let kind = reader.choice("provider.kind", default, &known, "cloud or hypervisor that makes the VMs");
    for left_out in LEFT_OUT {
        reader.leave(&format!("provider.{left_out}"));
    }
    if LEFT_OUT.contains(&kind.as_str()) {
        let why = format!(
            "not in this build, which has {}; build the programs with CLOUDS=1 (make dist CLOUDS=1)",
            kinds.join(", ")
        );
        reader.mistake("provider.kind", why);
    }
    for row in TABLE.iter().filter(|row| row.kind != kind) {
        reader.leave(&format!("provider.{}", row.kind));
    }
    let row = TABLE.iter().find(|row| row.kind == kind);
    (kind, row)
}

/// Returns every setting that `ask` reads with any provider of this build, by key, independent of the configuration.
/// `mine` and `others` are the sections as for [`Reader::load`].
///
/// # Errors
/// As [`Reader::load`].
pub fn every_setting(
    mine: &[&str],
    others: &[&str],
    ask: impl Fn(&mut Reader),
) -> Result<Vec<Setting>, Mistakes> {
    let mut all: BTreeMap<String, Setting> = BTreeMap::new();
    for kind in kinds() {
        let flags = vec![("provider.kind".to_owned(), kind.to_owned())];
        let mut reader = Reader::load(Sources { flags, ..Sources::default() }, mine, others)?;
        ask(&mut reader);
        for setting in reader.asked() {
            all.entry(setting.key.clone()).or_insert(setting);
        }
    }
    Ok(all.into_values().collect())
}

impl ProviderSettings {
    /// Value of `provider.kind`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether the VMs of this provider are known to be free of charge.
    pub fn is_free(&self) -> bool {
        self.free
    }

    /// Opens the bare provider, without [`peerpod_provider_api::decorate()`], for the VMs of this installation
    /// ([`Owner::installation`]). Only an external provider makes this wait, until it has sent its capabilities.
    ///
    /// # Errors
    /// A requirement of the provider that is not met, or a kind that this build does not have.
    pub async fn open(self, installation: String) -> Result<Arc<dyn Provider>, Error> {
        let ProviderSettings { cluster_id, node_name, .. } = self;
        match self.opener {
            Some(opener) => opener(Owner { cluster_id, node_name, installation }).await,
            None => Err(Error::invalid(format!(
                "provider.kind = {}: this build has no such provider; it has {}",
                self.kind,
                kinds().join(", ")
            ))),
        }
    }
}

/// Compiles and runs the provider of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(flags: &[(&str, &str)]) -> Reader {
        let flags = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Reader::load(Sources { flags, ..Sources::default() }.for_tests(), &["provider"], &[]).unwrap()
    }

    fn context() -> Context {
        let state_dir = std::env::temp_dir().join(format!("peerpod-providers-{}", std::process::id()));
        Context { state_dir, cluster_id: "c".to_owned(), node_name: "n".to_owned(), purpose: Purpose::Create }
    }

    #[cfg(feature = "local")]
    #[tokio::test]
    async fn the_default_provider_is_local() {
        let context = context();
        let mut reader = reader(&[("provider.local.bridge", "ppx0")]);
        let settings = read(&mut reader, &context);
        reader.finish().unwrap();
        assert!(!context.state_dir.exists(), "reading has no effect");
        assert!(settings.is_free());
        let provider = settings.open("i".to_owned()).await.unwrap();
        assert_eq!(provider.name(), "local");
        drop(provider);
        std::fs::remove_dir_all(&context.state_dir).unwrap();
    }

    #[cfg(not(feature = "aws"))]
    #[test]
    fn a_provider_that_the_build_leaves_out_is_named_as_such() {
        for (kind, mistakes) in [("aws", 1), ("local", 0)] {
            let mut reader = reader(&[("provider.kind", kind), ("provider.aws.region", "eu-central-1")]);
            read(&mut reader, &context());
            let text = reader.finish().map_or_else(|why| why.to_string(), |_| String::new());
            assert_eq!(text.matches("not in this build").count(), mistakes, "{text}");
            assert!(!text.contains("unknown key"), "{text}");
        }
    }

    #[test]
    fn every_kind_has_a_guide() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let shipped = kinds().into_iter().chain(left_out().iter().copied()).filter(|kind| *kind != "fake");
        for kind in shipped {
            assert!(root.join(guide(kind)).is_file(), "{kind}: {}", guide(kind));
        }
    }

    #[test]
    fn all_mistakes_are_reported_with_their_keys() {
        let mut reader = reader(&[
            ("provider.kind", "clowd"),
            ("provider.local.subnet4", "10.99.0.1/16"),
            ("provider.local.guest-binry", "/x"),
        ]);
        read(&mut reader, &context());
        let text = reader.finish().unwrap_err().to_string();
        for part in ["provider.kind", "local.subnet4", "guest-binry"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
