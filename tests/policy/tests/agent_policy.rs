//! Tests the published rules (`podvm/guest/policy/peerpod.rego`) against the requests that reach a kata-agent. These
//! are a real shim's recorded requests after `peerpod-guest`'s changes, and requests that a hostile node would send
//! instead.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Waker};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::BytesMut;
use peerpod_guest::intercept::{Intercept, Notice, Preparing, Ready, Use};
use peerpod_link::endpoint::Filter;
use peerpod_link::frame::{HEADER_LEN, Header, REQUEST};
use peerpod_proto::agent::{
    CreateContainerRequest, CreateSandboxRequest, Device, LinuxNamespace, Mount, Storage,
};
use peerpod_proto::ttrpc_frame::Request;
use peerpod_test_policy::{allows, json};
use protobuf::{Message, MessageDyn};
use tokio::sync::oneshot;

const CONTAINER: &str = "CreateContainerRequest";
const SANDBOX: &str = "CreateSandboxRequest";
const PODNS: &str = "/run/netns/podns";
const RECORDINGS: [&str; 3] = ["rust-cri-pod.jsonl", "rust-volume.jsonl", "rust-ctr-run.jsonl"];
/// Identifier of a volume, and its mark on a container until the guest fills it in.
const VOLUME: &str = "0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a";
const OURS: &str = "peerpod-volume";
/// The users' whole policy besides the rules.
const USE: &str = "
default CreateContainerRequest := false
CreateContainerRequest if peerpod_container(input)

default CreateSandboxRequest := false
CreateSandboxRequest if peerpod_sandbox(input)
";

fn published() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../podvm/guest/policy/peerpod.rego");
    std::fs::read_to_string(path).unwrap()
}

fn is_allowed(rules: &str, rule: &str, request: &dyn MessageDyn) -> bool {
    // An agent refuses a request that its policy does not mention.
    allows(&format!("{rules}{USE}"), rule, request).unwrap_or(false)
}

/// A guest in a VM with GPUs, with these volumes ready.
struct Guest(Ready);

impl Notice for Guest {
    fn container(&self) {}
    fn bind_source(&self, _source: &str) {}
    fn gpus(&self) -> u32 {
        1
    }
    fn prepare(&self, wanted: Vec<Use>) -> Preparing {
        let (answer, preparing) = oneshot::channel();
        let ready = wanted.into_iter().map(|wanted| Ready { paths: wanted.paths, ..self.0.clone() });
        answer.send(Ok(ready.collect())).unwrap();
        preparing
    }
    fn sandbox_ends(&self) {}
}

/// Passes a request through the guest; returns the request that the agent gets.
fn through(request: &Request, ready: Ready) -> Request {
    let payload = request.write_to_bytes().unwrap();
    let head = Header { length: u32::try_from(payload.len()).unwrap(), stream: 1, kind: REQUEST, flags: 0 };
    let bytes = [&head.encode()[..], &payload].concat();
    let mut filter = Intercept::new(Arc::new(Guest(ready)), PODNS.to_owned());
    let (mut to_peer, mut to_agent) = (BytesMut::new(), BytesMut::new());
    filter.from_peer(&bytes, &mut to_peer, &mut to_agent);
    filter.poll(&mut Context::from_waker(Waker::noop()), &mut to_peer, &mut to_agent);
    assert!(to_peer.is_empty(), "refused: {:?}", String::from_utf8_lossy(&to_peer));
    Request::parse_from_bytes(&to_agent[HEADER_LEN..]).unwrap()
}

/// Returns a recording's requests of one method, as the shim sent them.
fn recorded(file: &str, method: &str) -> Vec<Request> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../transcripts").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines
        .filter(|line| line["sock"] == "agent" && line["type"] == 1 && line["method"] == method)
        .map(|line| {
            let payload = BASE64_STANDARD.decode(line["payload_b64"].as_str().unwrap()).unwrap();
            Request::parse_from_bytes(&payload).unwrap()
        })
        .collect()
}

/// Returns the recorded container that is not the pod's own.
fn shims_container() -> CreateContainerRequest {
    let request = recorded("rust-volume.jsonl", "CreateContainer").pop().unwrap();
    CreateContainerRequest::parse_from_bytes(&request.payload).unwrap()
}

fn container_through(container: &CreateContainerRequest, ready: Ready) -> CreateContainerRequest {
    let mut request = recorded("rust-volume.jsonl", "CreateContainer").pop().unwrap();
    request.payload = container.write_to_bytes().unwrap();
    CreateContainerRequest::parse_from_bytes(&through(&request, ready).payload).unwrap()
}

/// Returns the container with a volume at its recorded place, marked as the relay marks it, and on a disk.
fn with_volume(ready: Ready) -> CreateContainerRequest {
    let mut container = shims_container();
    let mount_point = format!("/run/peerpod/volumes/{VOLUME}");
    let spec = container.OCI.mut_or_insert_default();
    let mount = spec.Mounts.iter_mut().find(|mount| mount.destination == "/var/lib/db").unwrap();
    mount.source = format!("{mount_point}/of/it");
    container.storages.push(Storage {
        driver: OURS.into(),
        source: VOLUME.into(),
        mount_point,
        ..Storage::default()
    });
    container_through(&container, ready)
}

fn disk() -> Ready {
    Ready { driver: "blk".into(), source: "/dev/vdb".into(), fstype: "ext4".into(), ..Ready::default() }
}

/// Returns requests as the agent gets them: of the recordings, with each kind of volume, with GPUs.
fn containers() -> Vec<(String, CreateContainerRequest)> {
    let mut all = Vec::new();
    for file in RECORDINGS {
        for (number, request) in recorded(file, "CreateContainer").iter().enumerate() {
            let payload = through(request, Ready::default()).payload;
            let container = CreateContainerRequest::parse_from_bytes(&payload).unwrap();
            all.push((format!("{file}, container {number}"), container));
        }
    }
    assert_eq!(all.len(), 5);
    all.push(("a volume on a disk".into(), with_volume(disk())));
    let share = Ready {
        driver: "virtio-fs".into(),
        source: "192.0.2.1:/export".into(),
        fstype: "nfs4".into(),
        options: vec!["addr=192.0.2.1".into()],
        ..Ready::default()
    };
    all.push(("a volume on a share".into(), with_volume(share)));
    let signed_in = Ready {
        driver: "virtio-fs".into(),
        source: format!("/run/peerpod/shares/{VOLUME}"),
        fstype: "bind".into(),
        options: vec!["bind".into()],
        ..Ready::default()
    };
    all.push(("a volume on a share with a password".into(), with_volume(signed_in)));

    let mut raw = shims_container();
    raw.devices.push(Device {
        id: VOLUME.into(),
        type_: OURS.into(),
        vm_path: VOLUME.into(),
        container_path: "/dev/xvda".into(),
        ..Device::default()
    });
    let device = Ready {
        driver: "mmioblk".into(),
        source: "/dev/vdb".into(),
        device: Some((254, 16)),
        ..Ready::default()
    };
    all.push(("a raw device".into(), container_through(&raw, device)));

    let mut gpus = shims_container();
    let process = gpus.OCI.mut_or_insert_default().Process.mut_or_insert_default();
    process.Env.push("NVIDIA_VISIBLE_DEVICES=0,1".into());
    let gpus = container_through(&gpus, Ready::default());
    assert!(gpus.OCI.Annotations.contains_key("cdi.k8s.io/peer-pods"));
    all.push(("GPUs".into(), gpus));
    all
}

fn sandboxes() -> Vec<CreateSandboxRequest> {
    let of = |file| recorded(file, "CreateSandbox");
    let through = |request| through(&request, Ready::default()).payload;
    let requests = RECORDINGS.into_iter().flat_map(of).map(through);
    requests.map(|payload| CreateSandboxRequest::parse_from_bytes(&payload).unwrap()).collect()
}

#[test]
fn the_published_rules_allow_what_we_send() {
    let rules = published();
    for (name, container) in containers() {
        let answer = allows(&format!("{rules}{USE}"), CONTAINER, &container);
        assert!(matches!(answer, Ok(true)), "{name}: {answer:?}: {:#}", json(&container));
    }
    let sandboxes = sandboxes();
    assert_eq!(sandboxes.len(), RECORDINGS.len());
    for sandbox in sandboxes {
        let answer = allows(&format!("{rules}{USE}"), SANDBOX, &sandbox);
        assert!(matches!(answer, Ok(true)), "{answer:?}: {:#}", json(&sandbox));
    }
}

#[test]
fn what_a_shim_sent_is_denied_as_long_as_the_guest_has_not_changed_it() {
    let rules = published();
    for file in RECORDINGS {
        for request in recorded(file, "CreateContainer") {
            let container = CreateContainerRequest::parse_from_bytes(&request.payload).unwrap();
            assert!(!is_allowed(&rules, CONTAINER, &container), "{file}: no network namespace");
        }
    }
    let request = recorded("rust-cri-pod.jsonl", "CreateSandbox").remove(0);
    let sandbox = CreateSandboxRequest::parse_from_bytes(&request.payload).unwrap();
    assert!(!is_allowed(&rules, SANDBOX, &sandbox), "with dns");
}

/// Returns the file's rules with their names; several rules of one name are separate entries.
fn rules(text: &str) -> Vec<(&str, &str)> {
    let name = |paragraph: &str| {
        let head = paragraph.lines().find(|line| !line.starts_with('#'))?;
        head.starts_with("peerpod_").then(|| head.find(['(', ' ']).unwrap_or(head.len()))
    };
    text.split("\n\n")
        .filter_map(|paragraph| {
            let length = name(paragraph)?;
            let head = paragraph.lines().find(|line| !line.starts_with('#'))?;
            Some((&head[..length], paragraph))
        })
        .collect()
}

#[test]
fn without_any_one_of_the_rules_something_of_ours_is_denied() {
    let text = published();
    let rules = rules(&text);
    assert!(rules.len() >= 15, "{}", rules.len());
    let (containers, sandboxes) = (containers(), sandboxes());
    for (name, rule) in &rules {
        let mut less = text.replace(rule, "");
        if *name == "peerpod_bind" {
            // A shim marks a bind mount twice, by type and by option.
            for (_, other) in rules.iter().filter(|(other, _)| other == name) {
                less = less.replace(other, "");
            }
        }
        assert!(less.len() < text.len());
        let denied = containers.iter().any(|(_, container)| !is_allowed(&less, CONTAINER, container))
            || sandboxes.iter().any(|sandbox| !is_allowed(&less, SANDBOX, sandbox));
        assert!(denied, "nothing needs this rule:\n{rule}");
    }
}

fn bind(source: &str) -> Mount {
    Mount {
        destination: "/x".into(),
        source: source.into(),
        type_: "bind".into(),
        options: vec!["rbind".into()],
        ..Mount::default()
    }
}

fn storage(driver: &str, source: &str, mount_point: &str) -> Storage {
    Storage {
        driver: driver.into(),
        source: source.into(),
        fstype: "ext4".into(),
        mount_point: mount_point.into(),
        ..Storage::default()
    }
}

/// Returns a storage with options or a kind that would expose the VM's own folders.
fn disguised(driver: &str, source: &str, fstype: &str, option: &str) -> Storage {
    let mount_point = match driver {
        "ephemeral" | "local" => "/run/kata-containers/shared/containers/x".to_owned(),
        _ => format!("/run/peerpod/volumes/{VOLUME}b"),
    };
    let (fstype, options) = (fstype.to_owned(), vec![option.to_owned()]);
    Storage { fstype, options, ..storage(driver, source, &mount_point) }
}

type Change = Box<dyn Fn(&mut CreateContainerRequest)>;

/// Returns changes that a container's request must not contain.
fn foreign() -> Vec<(String, Change)> {
    let mut all: Vec<(String, Change)> = Vec::new();
    for path in ["/proc/1/ns/net", "", "/run/netns/other"] {
        all.push((
            format!("the network namespace {path:?}"),
            Box::new(move |container: &mut CreateContainerRequest| {
                let linux = container.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
                linux.Namespaces.retain(|namespace| namespace.Type != "network");
                let (kind, path) = ("network".to_owned(), path.to_owned());
                linux.Namespaces.push(LinuxNamespace { Type: kind, Path: path, ..LinuxNamespace::default() });
            }),
        ));
    }
    let volume = format!("/run/peerpod/volumes/{VOLUME}");
    let mut sources: Vec<PathBuf> =
        ["/", "/etc", "/run/peerpod", "/run/kata-containers", "/run/peerpod/volumes/"]
            .map(PathBuf::from)
            .into();
    sources.push(format!("{volume}b").into());
    sources.push(format!("{volume}/../../auth.json").into());
    sources.push("/run/kata-containers/shared/containers/..".into());
    sources.push("/run/kata-containers/shared/containers/../../../etc".into());
    for source in sources {
        let source = source.display().to_string();
        all.push((
            format!("a mount of {source}"),
            Box::new(move |container: &mut CreateContainerRequest| {
                container.OCI.mut_or_insert_default().Mounts.push(bind(&source))
            }),
        ));
    }
    for (kind, options) in
        [("none", "rbind"), ("", "bind"), ("ext4", "rw"), ("nfs4", "rw"), ("overlay", "rw")]
    {
        let mut mount = bind("/dev/vda");
        (mount.type_, mount.options) = (kind.into(), vec![options.into()]);
        all.push((
            format!("a mount of type {kind:?} with {options}"),
            Box::new(move |container: &mut CreateContainerRequest| {
                container.OCI.mut_or_insert_default().Mounts.push(mount.clone())
            }),
        ));
    }
    let storages = [
        storage("blk", "/dev/vda", "/usr"),
        storage("blk", "/dev/vda", "/run/kata-containers/shared/containers/x"),
        storage("blk", "/dev/vda", "/run/peerpod/volumes"),
        storage("blk", "/dev/vda", "/run/peerpod/volumes/.."),
        storage("blk", "/dev/vda", "/run/peerpod/volumes/a/b"),
        storage("blk", "02/00", &format!("{volume}b")),
        storage("scsi", "0:0", &format!("{volume}b")),
        storage("virtio-fs", "kataShared", &format!("{volume}b")),
        storage(OURS, VOLUME, &format!("{volume}b")),
        storage("ephemeral", "tmpfs", "/run/peerpod/volumes/tmp"),
        storage("local", "local", "/run/kata-containers/../peerpod"),
        storage("bind", "/etc", "/run/kata-containers/x"),
        disguised("ephemeral", "/dev/vdb", "ext4", "rw"),
        disguised("ephemeral", "/etc", "tmpfs", "bind"),
        disguised("local", "/etc", "local", "rbind"),
        disguised("blk", "/dev/../etc", "ext4", "rw"),
        disguised("blk", "/dev/vdb", "ext4", "bind"),
        disguised("virtio-fs", "/etc", "nfs4", "bind"),
        disguised("virtio-fs", "/etc", "nfs4", "remount"),
        disguised("virtio-fs", "/etc", "bind", "bind"),
        // The share of another volume.
        disguised("virtio-fs", &format!("/run/peerpod/shares/{VOLUME}"), "bind", "bind"),
        disguised("virtio-fs", &format!("/run/peerpod/shares/{VOLUME}b"), "bind", "rbind"),
    ];
    for storage in storages {
        all.push((
            format!("the storage {storage}"),
            Box::new(move |container: &mut CreateContainerRequest| container.storages.push(storage.clone())),
        ));
    }
    for (kind, path) in
        [(OURS, VOLUME), ("vfio-pci", "0000:00:01.0"), ("mmioblk", "vda"), ("mmioblk", "/dev/../etc")]
    {
        let device = Device { type_: kind.into(), vm_path: path.into(), ..Device::default() };
        all.push((
            format!("the device {device}"),
            Box::new(move |container: &mut CreateContainerRequest| container.devices.push(device.clone())),
        ));
    }
    all.push((
        "another vendor's devices".into(),
        Box::new(|container: &mut CreateContainerRequest| {
            let annotations = &mut container.OCI.mut_or_insert_default().Annotations;
            annotations.insert("cdi.k8s.io/peer-pods".into(), "nvidia.com/gpu=0,vendor.com/x=1".into());
        }),
    ));
    all
}

#[test]
fn what_is_not_ours_is_denied() {
    let rules = published();
    let ours = with_volume(disk());
    assert!(is_allowed(&rules, CONTAINER, &ours), "what the changes begin with");
    for (name, change) in foreign() {
        let mut container = ours.clone();
        change(&mut container);
        assert!(!is_allowed(&rules, CONTAINER, &container), "{name} is allowed");
    }
    // Without a mount, the path of a volume is not a volume.
    let mut bare = ours;
    bare.storages.retain(|storage| storage.driver != "blk");
    assert!(!is_allowed(&rules, CONTAINER, &bare), "a mount of a volume that is not mounted is allowed");
}
