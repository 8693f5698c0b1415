//! Makes requests about containers with the fields that the Rust shim sets (`tests/transcripts/`).

use std::collections::HashMap;

use peerpod_proto::agent::{
    CopyFileRequest, CreateContainerRequest, ExecProcessRequest, LinuxNamespace, Mount, Process, Spec,
};
use protobuf::MessageField;

/// Only folder in a VM to which CopyFile may write.
pub const SHARED_CONTAINERS: &str = "/run/kata-containers/shared/containers";

/// Returns the OCI annotation with the container's bundle on the node.
pub const fn bundle_annotation() -> &'static str {
    "io.katacontainers.pkg.oci.bundle_path"
}

const ENV: &[&str] = &["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"];

/// A container to create.
#[derive(Debug, Clone)]
pub struct ContainerSpec {
    id: String,
    process: Process,
    mounts: Vec<Mount>,
    annotations: HashMap<String, String>,
}

impl ContainerSpec {
    /// Makes a container with this id that runs `arguments` as root in `/`.
    pub fn new(id: &str, arguments: &[&str]) -> ContainerSpec {
        let bundle = format!("/run/containerd/io.containerd.runtime.v2.task/k8s.io/{id}");
        ContainerSpec {
            id: id.into(),
            process: process(arguments),
            mounts: vec![mount("/proc", "proc", "proc", &[])],
            annotations: HashMap::from([(bundle_annotation().into(), bundle)]),
        }
    }

    /// Marks the pod's own (pause) container, as containerd does.
    pub fn sandbox(self) -> ContainerSpec {
        self.annotation("io.kubernetes.cri.container-type", "sandbox")
            .annotation("io.katacontainers.pkg.oci.container_type", "pod_sandbox")
    }

    /// Adds `NAME=value`.
    pub fn env(mut self, entry: &str) -> ContainerSpec {
        self.process.Env.push(entry.into());
        self
    }

    /// Adds an OCI annotation.
    pub fn annotation(mut self, key: &str, value: &str) -> ContainerSpec {
        self.annotations.insert(key.into(), value.into());
        self
    }

    /// Adds a bind mount; the source is a path in the VM.
    pub fn bind(mut self, source: &str, destination: &str) -> ContainerSpec {
        self.mounts.push(mount(destination, source, "bind", &["rbind", "rprivate", "rw"]));
        self
    }

    /// Returns the request. It has no network namespace, because the shim removes it.
    pub fn request(self) -> CreateContainerRequest {
        let mut specification = Spec::new();
        specification.Version = "1.1.0".into();
        specification.Process = MessageField::some(self.process);
        specification.Root.mut_or_insert_default().Path = format!("/run/kata-containers/{}/rootfs", self.id);
        specification.Mounts = self.mounts;
        specification.Annotations = self.annotations;
        let linux = specification.Linux.mut_or_insert_default();
        linux.CgroupsPath = format!("/kubepods/{}", self.id);
        for kind in ["ipc", "uts", "mount"] {
            let mut namespace = LinuxNamespace::new();
            namespace.Type = kind.into();
            linux.Namespaces.push(namespace);
        }
        let mut request = CreateContainerRequest::new();
        request.container_id = self.id;
        request.OCI = MessageField::some(specification);
        request
    }
}

/// Makes an ExecProcess of `arguments` in a container, as root in `/`.
pub fn exec_request(container: &str, exec: &str, arguments: &[&str]) -> ExecProcessRequest {
    let mut request = ExecProcessRequest::new();
    request.container_id = container.into();
    request.exec_id = exec.into();
    request.process = MessageField::some(process(arguments));
    request
}

/// Makes a CopyFile of a whole small file, as the Rust shim sends it: `name` is below [`SHARED_CONTAINERS`].
pub fn copy_file(name: &str, mode: u32, data: &[u8]) -> CopyFileRequest {
    let mut request = CopyFileRequest::new();
    request.path = format!("{SHARED_CONTAINERS}/{name}");
    request.file_size = data.len() as i64;
    request.file_mode = 0o100_000 | mode;
    request.data = data.into();
    request
}

fn process(arguments: &[&str]) -> Process {
    let mut process = Process::new();
    process.User.mut_or_insert_default();
    process.Args = arguments.iter().map(|argument| argument.to_string()).collect();
    process.Env = ENV.iter().map(|entry| entry.to_string()).collect();
    process.Cwd = "/".into();
    process.NoNewPrivileges = true;
    process
}

fn mount(destination: &str, source: &str, kind: &str, options: &[&str]) -> Mount {
    let mut mount = Mount::new();
    mount.destination = destination.into();
    mount.source = source.into();
    mount.type_ = kind.into();
    mount.options = options.iter().map(|option| option.to_string()).collect();
    mount
}
