//! Finds the places of user-data in clouds: a table with one description per cloud, which is the `guest.toml` in its
//! provider's folder (`providers/README.md` explains the format).
//!
//! The builder of the VM image copies the descriptions as JSON, which this program reads anyway. A TOML parser would
//! cost the boot more than all else about user-data. The machine itself identifies its cloud: strings of its firmware,
//! a file of the kernel, a disk's label. No name is looked up, and no request goes to a network before the machine has
//! identified its cloud.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_link::user_data::MAX_LEN;
use serde::Deserialize;
use tokio::time::timeout;

use crate::files;

pub(crate) mod addresses;
mod disk;
mod guestinfo;
pub(crate) mod http;
pub(crate) mod notice;

/// Directory of the copies in the VM image.
pub(crate) const FOLDER: &str = "/etc/peerpod/sources";
const FW_CFG: &str = "/sys/firmware/qemu_fw_cfg/by_name";
const DMI: &str = "/sys/class/dmi/id";
const VERSION: u32 = 1;
const MAX_FILE: u64 = 16 << 10;
const MOST: usize = 64;
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct CloudSource {
    version: u32,
    /// Name of the file without its extension.
    #[serde(skip)]
    pub(crate) name: String,
    /// The VM runs there if all conditions of one of these hold; none = it may run there.
    #[serde(default)]
    when: Vec<When>,
    /// Places of user-data, in this order.
    #[serde(default)]
    user_data: Vec<UserDataPlace>,
    /// Announcements that the cloud takes the VM back, asked in this order.
    #[serde(default)]
    notice: Vec<notice::SpotNotice>,
    /// Variables for the VM's addresses, where the provider cannot learn them from its cloud.
    addresses: Option<addresses::Addresses>,
    #[serde(default)]
    metadata: Metadata,
}

/// Conditions that identify a cloud.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct When {
    /// Strings of the firmware: a file's name in `/sys/class/dmi/id`, and its content; a final `*` stands for any rest.
    #[serde(default)]
    dmi: BTreeMap<String, String>,
    /// File that exists.
    exists: Option<PathBuf>,
    /// Label of a disk that exists.
    disk: Option<String>,
}

/// Place of user-data: one of `file`, `disk`, `fw-cfg`, `guestinfo`, `http`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Written")]
pub(crate) struct UserDataPlace {
    kind: Kind,
    base64: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    File(PathBuf),
    /// Label, and path on the disk.
    Disk(String, PathBuf),
    FwCfg(String),
    /// Variable that VMware shares with the VM.
    GuestInfo(String),
    Http(http::Request),
}

/// Access of pods to the cloud's metadata service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Metadata {
    #[serde(default)]
    addresses: Vec<IpAddr>,
    #[serde(default)]
    open_to_pods: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Written {
    file: Option<PathBuf>,
    disk: Option<String>,
    path: Option<PathBuf>,
    fw_cfg: Option<String>,
    guestinfo: Option<String>,
    http: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    token: Option<http::WrittenToken>,
    #[serde(default)]
    encoding: Encoding,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Encoding {
    #[default]
    Plain,
    Base64,
}

impl TryFrom<Written> for UserDataPlace {
    type Error = String;

    fn try_from(written: Written) -> Result<UserDataPlace, String> {
        if written.http.is_none() && (!written.headers.is_empty() || written.token.is_some()) {
            return Err("`headers` and `token` belong to `http`".to_owned());
        }
        if written.disk.is_some() != written.path.is_some() {
            return Err("`disk` needs a `path` on it, and no other kind has one".to_owned());
        }
        if written.guestinfo.is_some() && written.encoding != Encoding::Plain {
            return Err("`guestinfo` has its encoding in a variable of its own".to_owned());
        }
        let relative =
            |path: &Path| path.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let Written { file, disk, path, fw_cfg, guestinfo, http, headers, token, encoding } = written;
        let kind = match (file, disk.zip(path), fw_cfg, guestinfo, http) {
            (Some(file), None, None, None, None) if file.is_absolute() => Kind::File(file),
            (Some(_), None, None, None, None) => return Err("`file` must be an absolute path".to_owned()),
            (None, Some((label, path)), None, None, None) if relative(&path) => Kind::Disk(label, path),
            (None, Some(_), None, None, None) => return Err("`path` counts from the disk's root".to_owned()),
            (None, None, Some(name), None, None) if relative(Path::new(&name)) => Kind::FwCfg(name),
            (None, None, Some(_), None, None) => {
                return Err("`fw-cfg` is a name like opt/org.example/data".to_owned());
            }
            (None, None, None, Some(name), None) if is_variable(&name) => Kind::GuestInfo(name),
            (None, None, None, Some(_), None) => {
                return Err("`guestinfo` is a name like guestinfo.userdata".to_owned());
            }
            (None, None, None, None, Some(url)) => Kind::Http(http::Request::new(&url, headers, token)?),
            _ => {
                return Err("a source is one of `file`, `disk`, `fw-cfg`, `guestinfo`, `http`".to_owned());
            }
        };
        Ok(UserDataPlace { kind, base64: encoding == Encoding::Base64 })
    }
}

/// Returns whether a name is that of a variable, and one word of a request.
fn is_variable(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    name.starts_with("guestinfo.") && name.len() <= 128 && name.bytes().all(fits)
}

impl CloudSource {
    /// Parses a description. All faults are mistakes of its author.
    pub(crate) fn parse(text: &[u8], file: &Path) -> Result<CloudSource, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let wrong = |why: &str| format!("{}: {why}", file.display());
        let of = |found| {
            wrong(&format!(
                "version {found}, this program reads {VERSION}; image and program must be built together"
            ))
        };
        // Parsed once if all is well: this delays the first contact with the node.
        let mut source: CloudSource = serde_json::from_slice(text).map_err(|error| {
            match serde_json::from_slice::<Versioned>(text) {
                Ok(Versioned { version }) if version != VERSION => of(version),
                _ => wrong(&error.to_string()),
            }
        })?;
        if source.version != VERSION {
            return Err(of(source.version));
        }
        source.name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if source.when.iter().any(|when| *when == When::default()) {
            return Err(wrong("an empty [[when]] is true everywhere: leave it out"));
        }
        if source.when.is_empty() && !source.notice.is_empty() {
            return Err(wrong("[[notice]] needs a [[when]]: other clouds are never asked"));
        }
        if source
            .addresses
            .as_ref()
            .is_some_and(|variables| source.when.is_empty() || !variables.are_variables())
        {
            return Err(wrong("[addresses] names variables like guestinfo.local-ipv4, and needs a [[when]]"));
        }
        let is_name = |name: &String| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !source.when.iter().flat_map(|when| when.dmi.keys()).all(is_name) {
            return Err(wrong("`dmi` names a file of /sys/class/dmi/id"));
        }
        Ok(source)
    }

    /// Returns whether this VM runs there.
    pub(crate) fn is_here(&self) -> bool {
        self.when.is_empty() || self.when.iter().any(When::holds)
    }

    pub(crate) fn places(&self) -> &[UserDataPlace] {
        &self.user_data
    }

    /// Returns the variables for the VM's addresses, if the VM runs there and the provider wants them.
    fn addresses(&self) -> Option<addresses::Addresses> {
        self.addresses.clone().filter(|_| self.is_here())
    }

    /// Returns the addresses that the pod's containers must not reach: none if the author opens them.
    pub(crate) fn closed_to_pods(&self) -> &[IpAddr] {
        if self.metadata.open_to_pods { &[] } else { &self.metadata.addresses }
    }

    /// Returns the addresses that are opened to them.
    pub(crate) fn open_to_pods(&self) -> &[IpAddr] {
        if self.metadata.open_to_pods { &self.metadata.addresses } else { &[] }
    }
}

impl When {
    fn holds(&self) -> bool {
        self.dmi.iter().all(|(name, wanted)| {
            let found = files::read(&Path::new(DMI).join(name), 4096).ok().flatten().unwrap_or_default();
            fits(wanted, String::from_utf8_lossy(&found).trim())
        }) && self.exists.as_ref().is_none_or(|path| path.exists())
            && self.disk.as_ref().is_none_or(|label| disk::find(label).is_some())
    }
}

fn fits(wanted: &str, found: &str) -> bool {
    match wanted.strip_suffix('*') {
        Some(begin) => found.starts_with(begin),
        None => found == wanted,
    }
}

impl std::fmt::Display for UserDataPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.kind {
            Kind::File(path) => write!(f, "{}", path.display()),
            Kind::Disk(label, path) => write!(f, "{} on the disk {label:?}", path.display()),
            Kind::FwCfg(name) => write!(f, "fw_cfg {name}"),
            Kind::GuestInfo(name) => write!(f, "VMware's {name}"),
            Kind::Http(request) => write!(f, "{request}"),
        }
    }
}

impl UserDataPlace {
    /// Reads the place; `None` if nothing is there (yet). The error names the reason, without any of the content.
    pub(crate) async fn read(&self) -> Result<Option<Vec<u8>>, String> {
        let kind = self.kind.clone();
        let read = async {
            match kind {
                Kind::File(path) => blocking(move || read_file(&path)).await,
                Kind::FwCfg(name) => {
                    blocking(move || read_file(&Path::new(FW_CFG).join(name).join("raw"))).await
                }
                Kind::Disk(label, path) => blocking(move || disk::read(&label, &path)).await,
                Kind::GuestInfo(name) => {
                    blocking(move || guestinfo::read(&mut guestinfo::dial()?, &name)).await
                }
                Kind::Http(request) => request.send().await.map(Some),
            }
        };
        let found = timeout(PATIENCE, read).await.map_err(|_| format!("no answer within {PATIENCE:?}"))??;
        match found {
            Some(text) if self.base64 => {
                let text: Vec<u8> = text.into_iter().filter(|byte| !byte.is_ascii_whitespace()).collect();
                BASE64_STANDARD.decode(text).map(Some).map_err(|_| "it is not base64".to_owned())
            }
            found => Ok(found),
        }
    }

    /// Returns whether every process of the VM can read the place, also those of the pod.
    pub(crate) fn is_exposed(&self) -> bool {
        matches!(self.kind, Kind::GuestInfo(_))
    }

    /// Overwrites an exposed place.
    pub(crate) async fn erase(&self) -> Result<(), String> {
        let Kind::GuestInfo(name) = self.kind.clone() else { return Ok(()) };
        blocking(move || guestinfo::erase(&mut guestinfo::dial()?, &name).map(|()| None)).await.map(drop)
    }
}

async fn blocking(
    read: impl FnOnce() -> Result<Option<Vec<u8>>, String> + Send + 'static,
) -> Result<Option<Vec<u8>>, String> {
    tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())?
}

/// A little more than user-data may have in base64, which distinguishes an oversize file from a missing one.
const LIMIT: u64 = (MAX_LEN as u64) * 3 / 2;

fn read_file(path: &Path) -> Result<Option<Vec<u8>>, String> {
    files::read(path, LIMIT).map_err(|error| error.to_string())
}

/// Reads the descriptions in the VM image; the second value lists the unusable ones.
pub(crate) fn load(folder: &Path) -> (Vec<CloudSource>, Vec<String>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "json"));
    paths.sort_unstable();
    let (mut sources, mut errors) = (Vec::new(), Vec::new());
    for path in paths.into_iter().take(MOST) {
        let read = files::read(&path, MAX_FILE).map_err(|error| format!("{}: {error}", path.display()));
        match read.and_then(|text| CloudSource::parse(&text.unwrap_or_default(), &path)) {
            Ok(source) => sources.push(source),
            Err(error) => errors.push(error),
        }
    }
    (sources, errors)
}

/// Returns the descriptions of the clouds that this VM runs in.
pub(crate) fn here() -> Vec<CloudSource> {
    load(Path::new(FOLDER)).0.into_iter().filter(CloudSource::is_here).collect()
}

/// Parses an address and an optional port (default 80): the clouds' services are dialled by number.
pub(crate) fn target(authority: &str) -> Option<SocketAddr> {
    let alone = |text: &str| text.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok();
    authority.parse().ok().or_else(|| Some(SocketAddr::new(alone(authority)?, 80)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    /// Converts a description as the builder of the VM image does.
    fn json(toml: &str) -> Vec<u8> {
        basic_toml::from_str::<serde_json::Value>(toml).unwrap().to_string().into_bytes()
    }

    fn parse(toml: &str) -> Result<CloudSource, String> {
        CloudSource::parse(&json(toml), Path::new("/x/cloud.json")).map_err(|error| error.to_string())
    }

    #[test]
    fn every_providers_source_file_is_read() {
        let providers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../providers");
        let mut read = 0;
        for folder in std::fs::read_dir(providers).unwrap() {
            let file = folder.unwrap().path().join("guest.toml");
            if let Ok(text) = std::fs::read_to_string(&file) {
                let source = CloudSource::parse(&json(&text), &file).unwrap();
                assert!(!source.places().is_empty(), "{}", file.display());
                read += 1;
            }
        }
        assert!(read >= 2, "{read}");
    }

    #[test]
    fn a_cloud_can_open_its_service_to_pods_and_share_variables() {
        let vsphere = "
            version = 1
            [[when]]
            dmi = { sys_vendor = 'VMware, Inc.' }
            [[user-data]]
            guestinfo = 'guestinfo.userdata'
            [metadata]
            addresses = ['169.254.169.254', '168.63.129.16']
            open-to-pods = true";
        let source = parse(vsphere).unwrap();
        assert_eq!(source.name, "cloud");
        assert_eq!((source.closed_to_pods().len(), source.open_to_pods().len()), (0, 2));
        assert!(!source.is_here(), "the tests do not run there");
        let [place] = source.places() else { panic!("{source:?}") };
        assert_eq!((place.is_exposed(), place.to_string().as_str()), (true, "VMware's guestinfo.userdata"));
    }

    #[test]
    fn mistakes_are_named() {
        let place = |text: &str| parse(&format!("version = 1\n[[user-data]]\n{text}")).unwrap_err();
        for (error, named) in [
            (parse("version = 2").unwrap_err(), "version 2"),
            (parse("version = 1\nuserdata = 1").unwrap_err(), "userdata"),
            (parse("version = 1\n[[when]]").unwrap_err(), "empty [[when]]"),
            (parse("version = 1\n[[when]]\ndmi = { '../x' = 'y' }").unwrap_err(), "/sys/class/dmi/id"),
            (place("file = '/a'\nfw-cfg = 'b'"), "one of"),
            (place("file = 'a'"), "absolute"),
            (place("disk = 'cidata'"), "path"),
            (place("disk = 'cidata'\npath = '../x'"), "root"),
            (place("fw-cfg = '/etc/shadow'"), "a name like"),
            (place("guestinfo = 'userdata'"), "like guestinfo.userdata"),
            (place("guestinfo = 'guestinfo.userdata x'"), "like guestinfo.userdata"),
            (place("guestinfo = 'guestinfo.userdata'\nencoding = 'base64'"), "variable of its own"),
            (place("http = 'http://metadata.example/x'"), "by its address"),
            (place("http = 'https://169.254.169.254/x'"), "http://"),
            (place("http = 'http://1.2.3.4/x'\nheaders = { A = \"b\\r\\nC: d\" }"), "header"),
            (place("file = '/a'\nencoding = 'rot13'"), "rot13"),
            (
                parse("version = 1\n[[notice]]\nhttp = 'http://1.2.3.4/x'\ntext = 'y'").unwrap_err(),
                "[[when]]",
            ),
        ] {
            assert!(error.contains(named) && error.contains("cloud.json"), "{named}: {error}");
        }
    }

    #[tokio::test]
    async fn files_are_read_with_a_limit_and_base64_is_decoded() {
        let dir = TempDir::new();
        let file = dir.path().join("data");
        let place = |encoding: &str| {
            let text = format!("version = 1\n[[user-data]]\nfile = {file:?}\nencoding = '{encoding}'");
            parse(&text).unwrap().user_data.remove(0)
        };
        assert_eq!(place("plain").read().await, Ok(None));
        std::fs::write(&file, "e30=\n").unwrap();
        assert_eq!(place("plain").read().await.unwrap().unwrap(), b"e30=\n");
        assert_eq!(place("base64").read().await.unwrap().unwrap(), b"{}");
        std::fs::write(&file, "!").unwrap();
        assert!(place("base64").read().await.unwrap_err().contains("base64"));
        std::fs::write(&file, vec![b'x'; LIMIT as usize + 1]).unwrap();
        assert!(place("plain").read().await.unwrap_err().contains("more than"));
    }

    #[test]
    fn a_bad_file_does_not_affect_the_others() {
        let dir = TempDir::new();
        std::fs::write(dir.path().join("a.json"), json("version = 1\n[[user-data]]\nfile = '/a'")).unwrap();
        std::fs::write(dir.path().join("b.json"), "{\"version\": \"x\"}").unwrap();
        std::fs::write(dir.path().join("c.txt"), "").unwrap();
        let (sources, errors) = load(dir.path());
        assert_eq!((sources.len(), errors.len()), (1, 1));
        assert!(errors[0].to_string().contains("b.json"));
        assert!(load(Path::new("/nonexistent")).0.is_empty());
    }

    #[test]
    fn strings_match_as_a_whole_or_as_a_prefix() {
        assert!(
            fits("Amazon EC2", "Amazon EC2")
                && !fits("Amazon", "Amazon EC2")
                && fits("Amazon*", "Amazon EC2")
        );
    }
}
