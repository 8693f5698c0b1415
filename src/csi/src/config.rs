//! Reads the settings: sections `csi`, `paths`, `kubernetes` and `log` of the file that all programs share.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use peerpod_base::config::{Mistakes, Reader, Setting, Sources};
use peerpod_base::telemetry::LogConfig;
use peerpod_volume::descriptor::Attach;

/// Sections of the shared file that other programs read.
const OTHERS: [&str; 7] = ["node", "relay", "tunnel", "provider", "controller", "secrets", "webhook"];

/// File in a pod with the namespace of its service account.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// Default namespace outside a pod.
const NAMESPACE: &str = "peerpod-system";

/// Time for which a call without a deadline may be silent.
const CALL_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Limit of a message that is decoded, in bytes: the drivers' own. Others pass in pieces.
const MAX_MESSAGE: u32 = 4 << 20;

/// Settings of both roles.
#[derive(Clone, Debug)]
pub struct CsiConfig {
    /// `csi.endpoint`: socket of this program.
    pub endpoint: PathBuf,
    /// `csi.driver-endpoint`: socket of the driver.
    pub driver_endpoint: PathBuf,
    /// `csi.admin-listen`: address of metrics and health.
    pub admin_listen: SocketAddr,
    /// Limit of calls without a deadline.
    pub call_timeout: Duration,
    /// Limit of intercepted messages in bytes.
    pub max_message: usize,
    /// `csi.runtime-classes`: pods with one of these have a VM, and all their volumes go there. Never empty.
    pub runtime_classes: Vec<String>,
    /// `csi.attach`: component that attaches disks.
    pub attach: Attach,
    /// `csi.node-id`: template of the driver's name for a VM.
    pub node_id: String,
    /// `cluster.node-name`: the Kubernetes node (role node).
    pub node_name: String,
    /// Folder of the records that peerpod-node reads.
    pub volumes_dir: PathBuf,
    /// `csi.region`: region of this node.
    pub region: Option<String>,
    /// Namespace of the Leases that record the owners of disks.
    pub namespace: String,
    /// Kubeconfig of the API server; `None`: there is no API server; inner `None`: the pod's service account.
    pub cluster: Option<Option<PathBuf>>,
    /// Socket on which peerpod-node answers for volumes.
    pub volumes_socket: PathBuf,
}

impl CsiConfig {
    /// Reads all settings.
    ///
    /// # Errors
    /// Every mistake of all layers.
    pub fn load(sources: Sources) -> Result<(CsiConfig, LogConfig, Vec<Setting>), Mistakes> {
        let mut reader = Reader::load(sources, &["csi", "paths", "cluster", "kubernetes", "log"], &OTHERS)?;
        let config = CsiConfig::read(&mut reader);
        let log = LogConfig::read(&mut reader);
        Ok((config, log, reader.finish()?))
    }

    /// Reads the keys. Mistakes stay with the reader.
    pub fn read(reader: &mut Reader) -> CsiConfig {
        let run_dir: PathBuf = reader.get("paths.run-dir", "/run/peerpod", "folder of the sockets");
        let state_dir: PathBuf =
            reader.get("paths.state-dir", "/var/lib/peerpod", "folder of the state that survives a restart");
        for key in ["namespace", "pod-uid", "extended-resource", "capacity"] {
            reader.leave(&format!("cluster.{key}"));
        }
        reader.removed("csi.node-name", "use cluster.node-name");
        let config = CsiConfig {
            endpoint: reader.get(
                "csi.endpoint",
                "/csi/peerpod.sock",
                "the socket that sidecars and kubelet dial",
            ),
            driver_endpoint: reader.get("csi.driver-endpoint", "/csi/csi.sock", "the CSI driver's socket"),
            admin_listen: reader.get(
                "csi.admin-listen",
                "127.0.0.1:15156",
                "address and port of /metrics, /healthz and /readyz",
            ),
            call_timeout: reader.constant("csi.call-timeout", "CALL_TIMEOUT", CALL_TIMEOUT),
            max_message: reader.constant::<u32>("csi.max-message", "MAX_MESSAGE", MAX_MESSAGE) as usize,
            runtime_classes: classes(reader),
            attach: attacher(reader),
            node_id: node_id(reader),
            node_name: reader.get(
                "cluster.node-name",
                "",
                "the Kubernetes node's name, by the downward API (role node, with a cluster)",
            ),
            volumes_dir: reader.derived("csi.volumes-dir", "paths.state-dir", state_dir.join("volumes")),
            region: reader
                .optional("csi.region", "this node's region, where a driver's volumes are named by it (EFS)"),
            namespace: namespace(reader, Path::new(NAMESPACE_FILE)),
            cluster: cluster(reader),
            volumes_socket: run_dir.join("volumes.sock"),
        };
        if config.endpoint == config.driver_endpoint {
            reader.mistake("csi.endpoint", "also csi.driver-endpoint; give each a path of its own");
        }
        config
    }

    /// Refuses settings that need an API server, if there is none.
    pub(crate) fn check_cluster(&self) -> anyhow::Result<()> {
        if self.cluster.is_none() && self.attach == Attach::Driver {
            bail!("csi.attach: driver needs a cluster, whose PeerpodVolumes name the VM of a disk");
        }
        Ok(())
    }
}

/// Both roles of a driver need the same namespace: they run in the driver's namespace and have rights on Leases there.
fn namespace(reader: &mut Reader, file: &Path) -> String {
    let own = std::fs::read_to_string(file).ok().map(|text| text.trim().to_owned());
    let own = own.filter(|name| !name.is_empty()).unwrap_or_else(|| NAMESPACE.to_owned());
    reader.derived("csi.namespace", "the service account", own)
}

fn classes(reader: &mut Reader) -> Vec<String> {
    let classes: Vec<String> = reader.get(
        "csi.runtime-classes",
        "kata-remote",
        "RuntimeClasses whose pods have a VM: all their volumes go there, and pods of no other class get a peer pod's \
         volume; not used without a cluster",
    );
    let classes: Vec<String> = classes.into_iter().filter(|class| !class.is_empty()).collect();
    if classes.is_empty() {
        reader.mistake("csi.runtime-classes", "none; name at least one");
    }
    classes
}

fn attacher(reader: &mut Reader) -> Attach {
    let word = reader.choice(
        "csi.attach",
        "provider",
        &["provider", "driver"],
        "method of attaching disks to VMs: provider (the cloud's own call by peerpod-node) or driver (its \
         ControllerPublishVolume)",
    );
    if word == "driver" { Attach::Driver } else { Attach::Provider }
}

fn node_id(reader: &mut Reader) -> String {
    let template: String = reader.get(
        "csi.node-id",
        "{vm}",
        "how the driver names a VM as a node: {vm} the provider's id, {name} the part after its last slash, \
         {node} the node",
    );
    if !["{vm}", "{name}"].iter().any(|part| template.contains(part)) {
        reader.mistake("csi.node-id", "names every VM the same; use {vm} or {name} in it");
    }
    template
}

/// There is an API server if a kubeconfig is given or the program runs in a pod.
fn cluster(reader: &mut Reader) -> Option<Option<PathBuf>> {
    let kubeconfig: Option<PathBuf> =
        reader.optional("kubernetes.kubeconfig", "file; the pod's service account when not set");
    reader.removed("csi.cluster", "there is an API server in a pod, or with kubernetes.kubeconfig");
    let pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    (kubeconfig.is_some() || pod).then_some(kubeconfig)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(flags: &[&str]) -> Result<CsiConfig, String> {
        let words = flags.iter().map(|flag| (*flag).to_owned());
        CsiConfig::load(Sources::from_process(words, []))
            .map(|loaded| loaded.0)
            .map_err(|why| why.to_string())
    }

    #[test]
    fn leases_are_in_the_drivers_namespace_by_default() {
        let file = std::env::temp_dir().join(format!("peerpod-csi-namespace-{}", std::process::id()));
        let read = |flags: &[&str]| {
            let words = flags.iter().map(|flag| (*flag).to_owned());
            let mut reader =
                Reader::load(Sources::from_process(words, []).for_tests(), &["csi"], &[]).unwrap();
            namespace(&mut reader, &file)
        };
        assert_eq!(read(&[]), "peerpod-system");
        std::fs::write(&file, "shop\n").unwrap();
        assert_eq!(read(&[]), "shop");
        assert_eq!(read(&["--csi.namespace=other"]), "other");
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn defaults_are_usable_and_contradictions_are_named() {
        let config = load(&[]).unwrap();
        assert_eq!(config.volumes_dir, PathBuf::from("/var/lib/peerpod/volumes"));
        assert_eq!(config.volumes_socket, PathBuf::from("/run/peerpod/volumes.sock"));
        assert_eq!(config.runtime_classes, ["kata-remote"]);
        let mistakes = load(&[
            "--csi.endpoint=/a",
            "--csi.driver-endpoint=/a",
            "--csi.node-id=vm",
            "--csi.runtime-classes=,",
            "--csi.max-message=1",
        ]);
        let mistakes = mistakes.unwrap_err();
        for key in ["csi.endpoint", "csi.node-id", "csi.runtime-classes", "csi.max-message"] {
            assert!(mistakes.contains(key), "{mistakes}");
        }
    }
}
