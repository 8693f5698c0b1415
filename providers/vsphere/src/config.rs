//! Defines and reads the settings of the provider, `provider.vsphere.*`. Reads configuration, touches nothing else.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::{Reader, Secret};
use peerpod_provider_cloud::{Alphabet, settings};
use peerpod_provider_rest::Url;

/// Marks of a VM: variables of its `extraConfig`.
pub const ALPHABET: Alphabet = Alphabet {
    cloud: "vSphere",
    max_marks: 64,
    max_name: 80,
    max_value: 1024,
    name: |c| c.is_ascii_alphanumeric() || "._-/".contains(c),
    value: |c| !c.is_control(),
    escapes: true,
    reserved: &[],
    reserves_values: false,
    shown: None,
};

/// Largest number of virtual CPUs of a VM, and of its memory in MiB (vSphere 8).
pub(crate) const LARGEST: (u32, u64) = (768, 24 << 20);
/// First pause of each wait for a task.
const PAUSE: Duration = Duration::from_millis(100);
/// Longest name of an object in the inventory.
const MAX_NAME: usize = 80;

/// Settings of the provider.
#[derive(Debug, Clone)]
pub struct VsphereConfig {
    /// Whether VMs are created, not only listed and deleted.
    pub creates: bool,
    /// URL of the vCenter's API; `None` only with a mistake.
    pub url: Option<Url>,
    /// Account.
    pub username: String,
    /// Password of the account. Without one the login fails.
    pub password: Option<Secret>,
    /// PEM file of the CA certificates to trust; `None`: those of the system.
    pub ca_file: Option<PathBuf>,
    /// SHA-256 of the one certificate to trust.
    pub fingerprint: Option<[u8; 32]>,
    /// Datacenter of the VMs.
    pub datacenter: String,
    /// Folder of the VMs, below the datacenter's `vm`.
    pub folder: String,
    /// Template that VMs are clones of, below the datacenter's `vm`.
    pub template: String,
    /// Cluster of the VMs.
    pub cluster: Option<String>,
    /// Whether the cluster's DRS chooses the host.
    pub drs: bool,
    /// Hosts of the VMs, of the cluster if there is one. Empty with DRS.
    pub hosts: Vec<String>,
    /// Resource pool of the VMs, below that of the cluster or host; `None`: that one itself.
    pub resource_pool: Option<String>,
    /// Datastores of the VMs; empty: that of the template.
    pub datastores: Vec<String>,
    /// Network of the VMs; `None`: that of the template.
    pub network: Option<String>,
    /// Network of the second NIC of pods that request one.
    pub second_network: Option<String>,
    /// Virtual CPUs of a pod that requests none.
    pub vcpus: u32,
    /// Memory of a pod that requests none, in MiB.
    pub memory_mib: u64,
    /// Whether VMs write their console to a file beside their disk.
    pub console: bool,
    /// Variables that the administrator sets on every VM.
    pub tags: BTreeMap<String, String>,
    /// First pause of each wait for a task.
    pub pause: Duration,
    /// Longest wait for one answer of the API.
    pub call_timeout: Duration,
}

impl VsphereConfig {
    /// Reads `provider.vsphere.*`. The reader collects the mistakes. A process that does not create (the cluster's
    /// controller) needs no hosts.
    pub fn read(reader: &mut Reader, creates: bool) -> VsphereConfig {
        reader.section("provider.vsphere", |section| {
            let config = VsphereConfig {
                creates,
                url: url(section),
                username: section.required("username", "account of the vCenter").unwrap_or_default(),
                password: section.optional(
                    "password",
                    "password of the account; best as PEERPOD_PROVIDER_VSPHERE_PASSWORD",
                ),
                ca_file: section
                    .optional("ca-file", "PEM file of the CA of the vCenter; default: those of the system"),
                fingerprint: fingerprint(section),
                datacenter: section.required("datacenter", "datacenter of the VMs").unwrap_or_default(),
                folder: section.get("folder", "peerpods", "folder of the VMs; made if it is missing"),
                template: section.get("template", "podvm-template", "template of the pod VM, or its path"),
                cluster: section.optional("cluster", "cluster of the VMs"),
                drs: section.get("drs", "false", "let the cluster's DRS choose the host of each VM"),
                hosts: section.get("hosts", "", "hosts of the VMs, where DRS does not choose them"),
                resource_pool: section
                    .optional("resource-pool", "resource pool of the VMs, in that of the cluster or host"),
                datastores: section.get("datastores", "", "datastores of the VMs; default: the template's"),
                network: section.optional("network", "network of the VMs; default: the template's"),
                second_network: section
                    .optional("second-network", "network of a pod's second NIC; without it no pod gets one"),
                vcpus: section.get("vcpus", "2", "virtual CPUs of a pod's VM when the pod asks for no size"),
                memory_mib: section.get(
                    "memory-mib",
                    "4096",
                    "memory of a pod's VM in MiB when the pod asks for no size",
                ),
                console: section.get("console", "false", "write each VM's console to a file beside its disk"),
                tags: settings::tags(section, "variables of VMs (peerpod.tag.…), as key=value", &ALPHABET),
                pause: section.constant("first-pause", "PAUSE", PAUSE),
                call_timeout: settings::call_timeout(section),
            };
            config.check(section);
            config
        })
    }

    fn check(&self, section: &mut Reader) {
        let mut paths = vec![("folder", &self.folder), ("template", &self.template)];
        // An empty one is a mistake already.
        paths.extend([("datacenter", &self.datacenter)].into_iter().filter(|(_, path)| !path.is_empty()));
        let optional = [
            ("cluster", &self.cluster),
            ("resource-pool", &self.resource_pool),
            ("network", &self.network),
            ("second-network", &self.second_network),
        ];
        let names = optional.into_iter().filter_map(|(key, name)| Some((key, name.as_ref()?)));
        let hosts = self.hosts.iter().map(|host| ("hosts", host));
        let datastores = self.datastores.iter().map(|datastore| ("datastores", datastore));
        for (key, name) in names.chain(hosts).chain(datastores) {
            if !is_name(name) {
                section.mistake(key, format!("`{name:.80}` is not a name of the inventory; correct it"));
            }
        }
        for (key, path) in paths {
            if !path.split('/').all(is_name) {
                section
                    .mistake(key, format!("`{path:.80}` is not a path of the inventory; write it like a/b"));
            }
        }
        if self.drs && self.cluster.is_none() {
            section.mistake("drs", "there is no cluster whose DRS could choose a host; set cluster");
        }
        if self.drs && !self.hosts.is_empty() {
            section.mistake("hosts", "DRS chooses the host; remove hosts, or set drs to false");
        }
        if self.creates && !self.drs && self.hosts.is_empty() {
            section.mistake("hosts", "without DRS it must name the hosts of the VMs; give one or more");
        }
        let (vcpus, memory) = LARGEST;
        if self.vcpus == 0 || self.vcpus > vcpus {
            section.mistake("vcpus", format!("write 1 to {vcpus}"));
        }
        if self.memory_mib < 256 || self.memory_mib > memory {
            section.mistake("memory-mib", format!("write 256 to {memory}"));
        }
        if self.fingerprint.is_some() && self.ca_file.is_some() {
            section.mistake("ca-file", "given together with fingerprint-sha256; keep one of them");
        }
    }

    /// Returns the path of the folder of all VMs.
    pub(crate) fn vm_root(&self) -> String {
        format!("{}/vm", self.datacenter)
    }

    /// Returns the path of the folder of the provider's VMs.
    pub(crate) fn folder_path(&self) -> String {
        format!("{}/{}", self.vm_root(), self.folder)
    }
}

/// Whether a text can be the name of an object of the inventory.
fn is_name(name: &str) -> bool {
    let has_only = |c: char| !c.is_control() && !"/\\".contains(c);
    !name.is_empty() && name.chars().count() <= MAX_NAME && name.chars().all(has_only) && name != ".."
}

fn url(section: &mut Reader) -> Option<Url> {
    let text: String = section.required("url", "URL of the vCenter, like https://vcenter.example.com")?;
    let url = parse(&text);
    if url.is_none() && text.contains('@') {
        // A mistake of this key would repeat the password.
        section.mistake("password", "url has an account in it; move it to username and password");
    } else if url.is_none() {
        section.mistake("url", "not the URL of a vCenter; write it like https://vcenter.example.com");
    }
    url
}

/// Returns the URL of the API. The path may be left out, and also the scheme, as for govc.
fn parse(text: &str) -> Option<Url> {
    let text = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
    let mut url = Url::parse(&text).ok()?;
    let is_plain = url.username().is_empty() && url.password().is_none() && url.query().is_none();
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() || !is_plain {
        return None;
    }
    if matches!(url.path(), "" | "/") {
        url.set_path("/sdk");
    }
    Some(url)
}

fn fingerprint(section: &mut Reader) -> Option<[u8; 32]> {
    let help = "SHA-256 of the vCenter's certificate, instead of a CA: 64 hex digits, with or without colons";
    let text: Option<String> = section.optional("fingerprint-sha256", help);
    let text = text?;
    let digits: String = text.chars().filter(|c| !":- ".contains(*c)).collect();
    let bytes = hex::decode(digits).ok().and_then(|bytes| bytes.try_into().ok());
    if bytes.is_none() {
        let why =
            "not a SHA-256; `openssl x509 -noout -fingerprint -sha256` prints it, a SHA-1 has 40 digits";
        section.mistake("fingerprint-sha256", why);
    }
    bytes
}

#[cfg(test)]
pub(crate) mod tests {
    use peerpod_base::config::Sources;

    use super::*;

    const LEAST: [(&str, &str); 5] = [
        ("url", "vcenter.example.com"),
        ("username", "u"),
        ("password", "hush"),
        ("datacenter", "DC0"),
        ("hosts", "esx-1"),
    ];

    pub(crate) fn read_as(more: &[(&str, &str)], creates: bool) -> Result<VsphereConfig, String> {
        let mut all: BTreeMap<&str, &str> = LEAST.into();
        all.extend(more.iter().copied());
        let env = all.iter().filter(|(_, value)| !value.is_empty());
        let env = env.map(|(key, value)| {
            let name = format!("PEERPOD_PROVIDER_VSPHERE_{key}").to_ascii_uppercase().replace('-', "_");
            (name, (*value).to_owned())
        });
        let sources = Sources { env: env.collect(), ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = VsphereConfig::read(&mut reader, creates);
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    pub(crate) fn read(more: &[(&str, &str)]) -> Result<VsphereConfig, String> {
        read_as(more, true)
    }

    #[test]
    fn the_least_is_a_vcenter_an_account_a_datacenter_and_a_host() {
        let config = read(&[]).unwrap();
        assert_eq!(config.url.clone().unwrap().as_str(), "https://vcenter.example.com/sdk");
        assert_eq!(
            (config.template.as_str(), config.folder_path().as_str()),
            ("podvm-template", "DC0/vm/peerpods")
        );
        assert!(!format!("{config:?}").contains("hush"));
        read_as(&[("hosts", "")], false).unwrap();
        let config = read(&[("hosts", ""), ("cluster", "C"), ("drs", "true")]).unwrap();
        assert!(config.drs && config.hosts.is_empty());
        let told = read(&[("url", ""), ("username", ""), ("datacenter", "")]).unwrap_err();
        for key in ["url", "username", "datacenter"] {
            assert!(told.contains(key), "{key} in {told}");
        }
    }

    #[test]
    fn all_mistakes_are_reported_at_once_with_a_remedy() {
        let told = read(&[
            ("url", "https://me:hush@vcenter"),
            ("fingerprint-sha256", "0a1b2c"),
            ("drs", "true"),
            ("datacenter", "a/../b"),
            ("cluster", "a/b"),
            ("folder", "a//b"),
            ("datastores", "a\\b"),
            ("vcpus", "0"),
            ("memory-mib", "1"),
            ("tags", "peerpod.node=x,team"),
        ])
        .unwrap_err();
        for part in [
            "url has an account in it",
            "not a SHA-256",
            "remove hosts",
            "`a/../b` is not a path",
            "`a/b` is not a name",
            "`a//b` is not a path",
            "`a\\b` is not a name",
            "write 1 to 768",
            "write 256 to",
            "peerpod.node is taken",
            "`team` is not key=value",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
        assert!(!told.contains("hush"), "{told}");
        assert!(read(&[("url", "ftp://vcenter")]).unwrap_err().contains("not the URL of a vCenter"));
        assert!(read(&[("hosts", "")]).unwrap_err().contains("give one or more"));
        assert!(read(&[("drs", "true")]).unwrap_err().contains("set cluster"));
    }

    #[test]
    fn a_fingerprint_may_have_colons() {
        let text = vec!["AB"; 32].join(":");
        let config = read(&[("fingerprint-sha256", &text)]).unwrap();
        assert_eq!(config.fingerprint, Some([0xab; 32]));
        assert!(
            read(&[("fingerprint-sha256", &text), ("ca-file", "/ca.pem")]).unwrap_err().contains("keep one")
        );
    }

    #[test]
    fn a_url_may_lack_scheme_and_path() {
        for (text, url) in [
            ("vc:8443", Some("https://vc:8443/sdk")),
            ("https://vc/", Some("https://vc/sdk")),
            ("https://vc/other/sdk", Some("https://vc/other/sdk")),
            ("http://127.0.0.1:1", Some("http://127.0.0.1:1/sdk")),
            ("ftp://vc", None),
            ("https://vc/?a=b", None),
            ("", None),
        ] {
            assert_eq!(parse(text).map(String::from).as_deref(), url, "{text}");
        }
    }
}
