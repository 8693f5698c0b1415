//! Helpers of the image tests: builds images, serves them with Debian's registry or with a hostile one, and runs
//! `peerpod-pull` as the guest does.

#![allow(dead_code, unreachable_pub)] // each test file uses its part
#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use peerpod_tests::PATIENCE;
use peerpod_world::{Settings, World, binary, eventually_blocking};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

pub mod hostile;

/// The registries' port. Each registry has an address or a network namespace of its own.
pub const PORT: u16 = 5000;

/// Temporary folder of a test on a disk, removed when dropped.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pp-images-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

pub fn digest(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    format!("sha256:{}", hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// A layer under construction.
pub struct LayerBuilder(tar::Builder<Vec<u8>>);

impl LayerBuilder {
    pub fn new() -> LayerBuilder {
        LayerBuilder(tar::Builder::new(Vec::new()))
    }

    /// Adds any entry; the name is written unchanged, valid or not.
    pub fn raw(
        mut self,
        kind: tar::EntryType,
        name: &[u8],
        mode: u32,
        link: &[u8],
        data: &[u8],
    ) -> LayerBuilder {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(data.len() as u64);
        header.set_mtime(1_700_000_000);
        header.set_uid(0);
        header.set_gid(0);
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name);
        header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link);
        header.set_cksum();
        self.0.append(&header, data).unwrap();
        self
    }

    pub fn dir(self, name: &str, mode: u32) -> LayerBuilder {
        self.raw(tar::EntryType::Directory, name.as_bytes(), mode, b"", b"")
    }

    pub fn file(self, name: &str, mode: u32, data: &[u8]) -> LayerBuilder {
        self.raw(tar::EntryType::Regular, name.as_bytes(), mode, b"", data)
    }

    pub fn symlink(self, name: &str, to: &str) -> LayerBuilder {
        self.raw(tar::EntryType::Symlink, name.as_bytes(), 0o777, to.as_bytes(), b"")
    }

    pub fn hard_link(self, name: &str, to: &str) -> LayerBuilder {
        self.raw(tar::EntryType::Link, name.as_bytes(), 0o644, to.as_bytes(), b"")
    }

    /// Sets the extended attributes of the next entry.
    pub fn xattrs(mut self, all: &[(&str, &[u8])]) -> LayerBuilder {
        let all: Vec<(String, &[u8])> =
            all.iter().map(|(key, value)| (format!("SCHILY.xattr.{key}"), *value)).collect();
        self.0.append_pax_extensions(all.iter().map(|(key, value)| (key.as_str(), *value))).unwrap();
        self
    }

    pub fn build(self, packing: Packing) -> Layer {
        Layer::of(self.0.into_inner().unwrap(), packing)
    }
}

/// A packed layer.
#[derive(Clone)]
pub struct Layer {
    pub blob: Vec<u8>,
    pub diff_id: String,
    pub media_type: &'static str,
}

impl Layer {
    pub fn of(tar: Vec<u8>, packing: Packing) -> Layer {
        let diff_id = digest(&tar);
        let (blob, media_type) = match packing {
            Packing::Plain => (tar, "application/vnd.oci.image.layer.v1.tar"),
            Packing::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(&tar).unwrap();
                (encoder.finish().unwrap(), "application/vnd.oci.image.layer.v1.tar+gzip")
            }
            Packing::Zstd => (
                ruzstd::encoding::compress_to_vec(&*tar, ruzstd::encoding::CompressionLevel::Fastest),
                "application/vnd.oci.image.layer.v1.tar+zstd",
            ),
        };
        Layer { blob, diff_id, media_type }
    }
}

/// An image: its blobs, and the manifest that its name resolves to.
#[derive(Clone)]
pub struct Image {
    pub blobs: Vec<Vec<u8>>,
    pub manifest: Vec<u8>,
    /// Media type of the manifest.
    pub media_type: &'static str,
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

impl Image {
    pub fn of(layers: &[Layer]) -> Image {
        Image::with(layers, |_| {})
    }

    /// Makes an image with a changed manifest.
    pub fn with(layers: &[Layer], change: impl FnOnce(&mut Value)) -> Image {
        Image::made(layers, |_| {}, change)
    }

    /// Makes an image with a changed configuration.
    pub fn configured(layers: &[Layer], configure: impl FnOnce(&mut Value)) -> Image {
        Image::made(layers, |config| configure(&mut config["config"]), |_| {})
    }

    fn made(layers: &[Layer], configure: impl FnOnce(&mut Value), change: impl FnOnce(&mut Value)) -> Image {
        let ids: Vec<&str> = layers.iter().map(|layer| layer.diff_id.as_str()).collect();
        let mut config = json!({
            "architecture": "amd64", "os": "linux",
            "config": { "Env": ["PATH=/bin"], "Cmd": ["/bin/sh"], "WorkingDir": "/" },
            "rootfs": { "type": "layers", "diff_ids": ids },
        });
        configure(&mut config);
        let config = serde_json::to_vec(&config).unwrap();
        let described: Vec<Value> = layers
            .iter()
            .map(|layer| json!({ "mediaType": layer.media_type, "digest": digest(&layer.blob), "size": layer.blob.len() }))
            .collect();
        let mut manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(&config), "size": config.len() },
            "layers": described,
        });
        change(&mut manifest);
        let mut blobs: Vec<Vec<u8>> = layers.iter().map(|layer| layer.blob.clone()).collect();
        blobs.push(config);
        Image { blobs, manifest: serde_json::to_vec(&manifest).unwrap(), media_type: MANIFEST }
    }

    /// Puts the manifest into an index, beside one for another architecture.
    pub fn indexed(mut self) -> Image {
        let entry = |digest: String, size: usize, architecture: &str| {
            json!({ "mediaType": MANIFEST, "digest": digest, "size": size,
                    "platform": { "architecture": architecture, "os": "linux" } })
        };
        let ours = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [
            entry(digest(b"other"), 5, "s390x"), entry(digest(&self.manifest), self.manifest.len(), ours) ] });
        self.blobs.push(std::mem::replace(&mut self.manifest, serde_json::to_vec(&index).unwrap()));
        Image { media_type: INDEX, ..self }
    }
}

/// Returns an ordinary image: a shell in the first layer, links and attributes in the second, removals in the third.
pub fn ordinary() -> Image {
    let shell = fs::read("/bin/busybox").expect("busybox-static is installed by scripts/setup");
    let base = LayerBuilder::new()
        .dir("bin/", 0o755)
        .file("bin/busybox", 0o755, &shell)
        .symlink("bin/sh", "busybox")
        .dir("usr/", 0o755)
        .dir("usr/lib/", 0o755)
        .symlink("lib", "usr/lib")
        .dir("tmp/", 0o1777)
        .dir("old/", 0o755)
        .file("old/one", 0o644, b"one")
        .file("old/two", 0o644, b"two")
        .dir("opaque/", 0o755)
        .file("opaque/below", 0o644, b"below")
        .file("replaced", 0o644, b"first")
        .build(Packing::Gzip);
    let middle = LayerBuilder::new()
        // Without entries for their folders: /tmp keeps its mode, /lib stays a link.
        .file("tmp/made", 0o600, b"made")
        .file("lib/library", 0o644, b"library")
        .file("linked", 0o4755, b"linked")
        .hard_link("also/linked", "linked")
        .hard_link("old/three", "old/one")
        .xattrs(&[("user.peerpod", b"kept"), ("trusted.overlay.opaque", b"y")])
        .file("attributed", 0o644, b"x")
        .raw(tar::EntryType::Char, b"dev/null", 0o666, b"", b"")
        .build(Packing::Zstd);
    let top = LayerBuilder::new()
        .file("old/.wh.two", 0o644, b"")
        .dir("opaque/", 0o750)
        .file("opaque/above", 0o644, b"above")
        .file("opaque/.wh..wh..opq", 0o644, b"")
        .dir("replaced/", 0o755)
        .file("replaced/by", 0o644, b"folder")
        .build(Packing::Plain);
    Image::of(&[base, middle, top])
}

/// Debian's registry, with images put into its storage.
pub struct Registry {
    folder: Folder,
    child: Option<Child>,
    pub address: SocketAddr,
}

/// Options of a registry.
#[derive(Default)]
pub struct Serving<'a> {
    /// User and password.
    pub secret: Option<(&'a str, &'a str)>,
    /// Certificate chain and key, PEM.
    pub tls: Option<(String, String)>,
    /// Address to listen on; a loopback address of its own by default.
    pub at: Option<SocketAddr>,
    /// Network namespace to listen in, with `at`; the test's own by default.
    pub netns: Option<&'a str>,
}

impl Registry {
    pub fn start(images: &[(&str, &Image)], serving: &Serving<'_>) -> Registry {
        let folder = Folder::new();
        for (name, image) in images {
            store(&folder.join("data"), name, image);
        }
        let address = serving.at.unwrap_or_else(own_address);
        let mut config = json!({
            "version": "0.1",
            "log": { "level": "warn" },
            "storage": { "filesystem": { "rootdirectory": folder.join("data") } },
            "http": { "addr": address.to_string() },
        });
        if let Some((user, password)) = serving.secret {
            let output = Command::new("htpasswd").args(["-Bbn", user, password]).output().unwrap();
            assert!(output.status.success(), "htpasswd is in apache2-utils");
            fs::write(folder.join("htpasswd"), output.stdout).unwrap();
            config["auth"] = json!({ "htpasswd": { "realm": "test", "path": folder.join("htpasswd") } });
        }
        if let Some((chain, key)) = &serving.tls {
            fs::write(folder.join("chain.pem"), chain).unwrap();
            fs::write(folder.join("key.pem"), key).unwrap();
            config["http"]["tls"] =
                json!({ "certificate": folder.join("chain.pem"), "key": folder.join("key.pem") });
        }
        // JSON is YAML.
        fs::write(folder.join("config.yml"), config.to_string()).unwrap();
        let mut command = match serving.netns {
            Some(netns) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", netns, "docker-registry"]);
                command
            }
            None => Command::new("docker-registry"),
        };
        let log = fs::File::create(folder.join("log")).unwrap();
        let child = command
            .arg("serve")
            .arg(folder.join("config.yml"))
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("docker-registry is installed by scripts/setup");
        let registry = Registry { folder, child: Some(child), address };
        let netns = serving.netns.map(str::to_owned);
        eventually_blocking("the registry listens", PATIENCE, || match &netns {
            None => TcpStream::connect(address).ok().map(drop),
            Some(netns) => {
                let listing =
                    Command::new("ip").args(["netns", "exec", netns, "ss", "-Hltn"]).output().ok()?;
                let port = format!(":{} ", address.port());
                String::from_utf8_lossy(&listing.stdout).contains(&port).then_some(())
            }
        })
        .unwrap_or_else(|error| panic!("{error}: {}", registry.log()));
        registry
    }

    /// Puts one more image into its storage.
    pub fn add(&self, name: &str, image: &Image) {
        store(&self.folder.join("data"), name, image);
    }

    /// Starts a registry on the node's address in the VMs' network, for machines that boot.
    pub fn for_machines(world: &World, images: &[(&str, &Image)]) -> Registry {
        let at = Some(SocketAddr::from(([10, 97, 0, 1], PORT)));
        let serving = Serving { at, netns: Some(world.node().name()), ..Serving::default() };
        tokio::task::block_in_place(|| Registry::start(images, &serving))
    }

    /// Returns settings of a node with VMs that trust this registry and prefetch an image of it.
    pub fn settings(&self, settings: &Settings, early: &str) -> Settings {
        let address = self.address.to_string();
        let settings = settings.clone().set("node.prefetch-images", format!("{address}/{early}"));
        settings.set("node.plain-http-registries", address)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Stops the registry; the address stays the same.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns a loopback address that no other registry of a test has. A port alone would be given to another test's
/// registry as soon as this one stops.
pub fn own_address() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, NEXT.fetch_add(1, Ordering::Relaxed), high, low], PORT))
}

/// Stores an image in the registry's own format.
fn store(data: &Path, name: &str, image: &Image) {
    let (repository, tag) = name.split_once(':').unwrap();
    let root = data.join("docker/registry/v2");
    let put = |path: PathBuf, bytes: &[u8]| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let hex = |bytes: &[u8]| digest(bytes).trim_start_matches("sha256:").to_owned();
    let manifests = root.join("repositories").join(repository).join("_manifests");
    for bytes in image.blobs.iter().chain([&image.manifest]) {
        let hex = hex(bytes);
        put(root.join("blobs/sha256").join(&hex[..2]).join(&hex).join("data"), bytes);
        let link = format!("sha256:{hex}");
        let layers = root.join("repositories").join(repository).join("_layers/sha256");
        put(layers.join(&hex).join("link"), link.as_bytes());
        put(manifests.join("revisions/sha256").join(&hex).join("link"), link.as_bytes());
    }
    let link = digest(&image.manifest);
    let tag = manifests.join("tags").join(tag);
    put(tag.join("current/link"), link.as_bytes());
    put(tag.join("index/sha256").join(hex(&image.manifest)).join("link"), link.as_bytes());
}

/// Returns a job for `peerpod-pull`.
pub fn job(store: &Path, image: &str) -> Value {
    let plain: Vec<&str> = image.split('/').take(1).collect();
    json!({ "image": image, "store": store, "bundle": null, "plain_http": plain })
}

/// Starts a job.
pub fn begin(job: &Value) -> Child {
    start(&mut Command::new(binary("peerpod-pull").unwrap()), job)
}

fn start(command: &mut Command, job: &Value) -> Child {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&serde_json::to_vec(job).unwrap()).unwrap();
    child
}

/// Runs a job and returns its result, or the cause and the text of its failure.
pub fn pull(job: &Value) -> Result<Value, (String, String)> {
    let output = begin(job).wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    let last: Value = serde_json::from_str(words.lines().last().unwrap_or("{}")).unwrap_or_default();
    if last["done"].is_object() {
        assert!(output.status.success());
        return Ok(last["done"].clone());
    }
    assert!(!output.status.success(), "{words}");
    let part = |key: &str| last["failed"][key].as_str().unwrap_or_default().to_owned();
    match part("cause") {
        cause if cause.is_empty() => Err((format!("{}", output.status), words)),
        cause => Err((cause, part("text"))),
    }
}

/// Pulls and mounts in a new mount namespace, then runs a script in the container's root and returns its output.
pub fn inspect(job: &Value, script: &str) -> String {
    let mut job = job.clone();
    job["bundle"] = json!("/run/kata-containers/test");
    let pull = binary("peerpod-pull").unwrap();
    let script = format!(
        "set -eu; mkdir -p /run/kata-containers; mount -t tmpfs none /run/kata-containers; \
         {} >&2; cd /run/kata-containers/test/rootfs; {script}",
        pull.display()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]).stderr(Stdio::piped());
    let output = start(&mut command, &job).wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the number of complete layers, and the paths of incomplete ones.
pub fn layers_in(store: &Path) -> (usize, Vec<PathBuf>) {
    let entries = |name: &str| -> Vec<PathBuf> {
        fs::read_dir(store.join(name)).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    (entries("l").len(), entries("t"))
}
