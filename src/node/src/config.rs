//! Reads the node's settings from the file that all binaries of a node share. Keys, defaults and meanings are defined
//! here, in `registries` and in the `config` modules of `cluster` and `secrets`; a provider's own keys with the
//! provider.

mod tunnel;
mod vm;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::{Mistakes, Reader, Setting, Sources};
use peerpod_base::telemetry::LogConfig;
use peerpod_podnet::mark::Owner;
use peerpod_providers::{Context, Purpose};
use vm::sandbox_settings;

use crate::cluster::ClusterConfig;
use crate::registries::Registries;
use crate::sandbox;
use crate::secrets::SecretsConfig;
use crate::spec::GUEST_MEMORY;
use crate::tunnel::external::Egress;
use crate::tunnel::{TunnelConfig, TunnelKind};

/// Sections that this binary reads.
const MINE: [&str; 8] = ["paths", "node", "tunnel", "provider", "secrets", "log", "cluster", "kubernetes"];
/// Sections of the shared file that other binaries read; the node reads two keys of `relay`.
const OTHERS: [&str; 4] = ["relay", "controller", "webhook", "csi"];
/// Largest batch. More sandboxes do not arrive within one window; each is an entry of the batch's file.
const MOST_BATCH: u32 = 1000;
/// Upper bound of `node.guest-memory-mib`, in MiB: 1 TiB.
const MOST_GUEST_MEMORY: u64 = 1 << 20;

/// Interval of the rotation of the node's CA, with which guests get new certificates: half of the validity of these.
const CA_ROTATION: Duration = Duration::from_secs(180 * 86_400);
/// Time that a step of the CA's rotation waits for guests that do not follow.
const CA_FOLLOW_TIMEOUT: Duration = Duration::from_secs(7 * 86_400);
/// Age at which a VM of this node without a record is deleted: longer than clouds hide a new VM from their lists.
const ORPHAN_GRACE: Duration = Duration::from_secs(60);
/// Folder in which CSI drivers that support Kata describe the pods' volumes; the path is Kata's own.
const DIRECT_VOLUMES_DIR: &str = "/run/kata-containers/shared/direct-volumes";

/// Settings of the node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// `paths.run-dir`: folder of the sockets.
    pub run_dir: PathBuf,
    /// `paths.state-dir`: folder of the ledger, the CA and the inbox.
    pub(crate) state_dir: PathBuf,
    pub(crate) relay_listen: SocketAddr,
    pub(crate) admin_listen: SocketAddr,
    /// `relay.admin-listen`, which the admin socket names and whose metrics `metrics_listen` serves, too.
    pub(crate) relay_admin: SocketAddr,
    /// `node.metrics-listen`; `None`: scrapers use the admin ports.
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// `node.relay-addresses`: addresses that guests dial; empty: the node determines them.
    pub(crate) relay_addresses: Vec<GuestAddress>,
    /// `node.otlp-endpoint`: host and port that get the traces of starts.
    pub(crate) otlp_endpoint: Option<String>,
    pub(crate) ca_follow_timeout: Duration,
    pub(crate) orphan_grace: Duration,
    pub(crate) ca_rotation: Duration,
    /// `node.guest-memory-mib`; `None`: the provider's figure.
    pub(crate) guest_memory_mib: Option<u64>,
    /// `node.batch`: whether one call may create the VMs of sandboxes that want the same VM at the same moment.
    pub(crate) batch: bool,
    /// Settings of every sandbox. `guest_addresses`, `max_batch` and `guest_memory_mib` are known later.
    pub sandbox: sandbox::Settings,
    pub(crate) tunnel: TunnelConfig,
    /// `tunnel.localhost`: whether connections to a pod's localhost on the node are carried into the VM.
    pub(crate) localhost: bool,
    pub(crate) registries: Registries,
    /// Section `secrets`: the service for pods' pull secrets; `None`: no service is asked.
    pub(crate) secrets: Option<SecretsConfig>,
    /// Sections `cluster` and `kubernetes`; `None`: this node is in no cluster.
    pub(crate) cluster: Option<ClusterConfig>,
    /// Folder in which the CSI wrapper records the pods' volumes.
    pub(crate) volumes_dir: PathBuf,
    pub(crate) direct_volumes_dir: PathBuf,
}

/// Address that guests dial, with its own port or with the relay's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestAddress {
    Whole(SocketAddr),
    /// Address that takes the port on which the relay listens.
    Host(IpAddr),
}

impl GuestAddress {
    fn parse(text: &str) -> Option<GuestAddress> {
        let text = text.trim();
        let whole = text.parse().map(GuestAddress::Whole);
        whole.or_else(|_| text.trim_matches(['[', ']']).parse().map(GuestAddress::Host)).ok()
    }
}

/// Reads the address for scrapers.
fn metrics_listen(reader: &mut Reader) -> Option<SocketAddr> {
    reader.optional(
        "node.metrics-listen",
        "address and port of /metrics (of the node) and /relay/metrics over TLS, for callers whose token may get the \
         URL /metrics by the API server's answer; when not set, no such port is opened",
    )
}

fn batch(reader: &mut Reader) -> bool {
    let choice = reader.choice(
        "node.batch",
        "auto",
        &["auto", "off"],
        "create VMs that are requested at the same moment by one call, with one ticket, where the provider can; auto: \
         unless NAT may translate the VMs' addresses (tunnel.kind wireguard and auto)",
    );
    choice == "auto"
}

impl NodeConfig {
    /// Reads the node's keys.
    pub fn read(reader: &mut Reader) -> NodeConfig {
        let run_dir: PathBuf = reader.get("paths.run-dir", "/run/peerpod", "folder of the sockets");
        let state_dir: PathBuf =
            reader.get("paths.state-dir", "/var/lib/peerpod", "folder of the state that survives a restart");
        let cluster = ClusterConfig::read(reader);
        let tunnel = tunnel::read(reader, &run_dir, &state_dir);
        let second_nic =
            tunnel.external.as_ref().is_some_and(|external| external.egress == Egress::SecondNic);
        let node = cluster.as_ref().map(|cluster| cluster.node_name.clone());
        let config = NodeConfig {
            sandbox: sandbox::Settings {
                pods_dir: run_dir.join("pods"),
                second_nic,
                ..sandbox_settings(reader, node)
            },
            relay_listen: reader.get(
                "relay.listen",
                "[::]:15151",
                "address and port that pod VMs dial (TLS); [::] means both families",
            ),
            relay_admin: reader.get(
                "relay.admin-listen",
                "127.0.0.1:15152",
                "address and port of /metrics, /healthz and /readyz",
            ),
            admin_listen: reader.get(
                "node.admin-listen",
                "127.0.0.1:15153",
                "address and port of /metrics, /healthz and /readyz",
            ),
            metrics_listen: metrics_listen(reader),
            relay_addresses: relay_addresses(reader),
            otlp_endpoint: reader.optional(
                "node.otlp-endpoint",
                "host:port of an OTLP receiver over plain HTTP (usually port 4318), which gets one trace for each start of a \
                 pod; when not set, no trace is made",
            ),
            ca_follow_timeout: reader.constant(
                "node.ca-follow-timeout",
                "CA_FOLLOW_TIMEOUT",
                CA_FOLLOW_TIMEOUT,
            ),
            orphan_grace: reader.constant("node.orphan-grace", "ORPHAN_GRACE", ORPHAN_GRACE),
            ca_rotation: reader.constant("node.ca-roll-over", "CA_ROTATION", CA_ROTATION),
            guest_memory_mib: reader.optional(
                "node.guest-memory-mib",
                "memory in MiB that a pod's VM has besides the pod's own, for the guest; when not set, the \
                 provider's figure for the image, or else 256",
            ),
            batch: batch(reader),
            tunnel,
            localhost: reader.get(
                "tunnel.localhost",
                "true",
                "carry connections to 127.0.0.1 and ::1 of a pod's namespace (port-forward) into its VM",
            ),
            registries: Registries::read(reader),
            secrets: SecretsConfig::read(reader),
            cluster,
            volumes_dir: reader.derived("csi.volumes-dir", "paths.state-dir", state_dir.join("volumes")),
            direct_volumes_dir: reader.constant(
                "csi.direct-volumes-dir",
                "DIRECT_VOLUMES_DIR",
                PathBuf::from(DIRECT_VOLUMES_DIR),
            ),
            run_dir,
            state_dir,
        };
        config.check(reader);
        config
    }

    fn check(&self, reader: &mut Reader) {
        let sandbox = &self.sandbox;
        for (key, path) in [
            ("paths.run-dir", &self.run_dir),
            ("paths.state-dir", &self.state_dir),
            ("node.netns-dir", &self.tunnel.netns_dir),
        ] {
            if !path.is_absolute() {
                reader.mistake(key, "not an absolute path; begin it with '/'");
            }
        }
        let text = self.run_dir.to_string_lossy();
        // <run-dir>/pods/<id>/agent.ttrpc must fit into a socket's address, with an id of at least 32 characters.
        const ROOM: usize = 107 - "/pods/".len() - 32 - "/agent.ttrpc".len();
        if text.len() > ROOM || text.contains([':', '%', '?', '#']) {
            let why = format!("shims cannot use sockets in it; at most {ROOM} characters, none of : % ? #");
            reader.mistake("paths.run-dir", why);
        }
        for (key, value) in [("node.cluster-id", &sandbox.cluster_id), ("node.name", &sandbox.node_name)] {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if value.is_empty() || value.len() > 128 || !value.chars().all(fits) {
                reader.mistake(key, "not a name; write at most 128 letters, digits, '-', '_' and '.'");
            }
        }
        for (key, value) in [("node.boot-timeout", sandbox.boot_timeout), ("node.lease", sandbox.lease)] {
            if value < Duration::from_secs(1) {
                reader.mistake(key, "too short for any start to succeed; set 1s or more");
            }
        }
        if sandbox.ticket_ttl < sandbox.boot_timeout {
            let most = sandbox.ticket_ttl;
            let why = format!("longer than a ticket, so a slow VM could not join; set at most {most:?}");
            reader.mistake("node.boot-timeout", why);
        }
        if sandbox.dial.is_some() && self.tunnel.wireguard.is_some() {
            let why = "the guest begins the encrypted tunnel, and this network blocks connections from guests; set \
                 tunnel.kind: vxlan, or node.link-dial: guest";
            reader.mistake("node.link-dial", why);
        }
        if self.guest_memory_mib.is_some_and(|mib| mib > MOST_GUEST_MEMORY) {
            reader.mistake("node.guest-memory-mib", "more than 1 TiB; write it in MiB");
        }
        let capacity = self.cluster.as_ref().and_then(|cluster| cluster.capacity).unwrap_or_default();
        let most = sandbox.max_sandboxes;
        if usize::try_from(capacity).is_ok_and(|capacity| capacity > most) {
            let why = format!("more than {most}, the limit of a node's sandboxes; lower it");
            reader.mistake("cluster.capacity", why);
        }
        if self.tunnel.port == 0 {
            reader.mistake("tunnel.port", "guests need a known port; 4789 is the usual one");
        }
    }

    /// Reads all settings of this binary. Opens nothing. Fails with all mistakes of all sources together.
    pub fn load(
        sources: Sources,
    ) -> Result<(NodeConfig, peerpod_providers::ProviderSettings, LogConfig, Vec<Setting>), Mistakes> {
        let mut reader = Reader::load(sources, &MINE, &OTHERS)?;
        let (config, provider, log) = NodeConfig::ask(&mut reader);
        let printed = reader.finish()?;
        Ok((config, provider, log, printed))
    }

    /// Returns every setting of this binary with any provider, for the help text.
    ///
    /// # Errors
    /// None in practice: it reads no file.
    pub fn every_setting() -> Result<Vec<Setting>, Mistakes> {
        peerpod_providers::every_setting(&MINE, &OTHERS, |reader| drop(NodeConfig::ask(reader)))
    }

    fn ask(reader: &mut Reader) -> (NodeConfig, peerpod_providers::ProviderSettings, LogConfig) {
        let config = NodeConfig::read(reader);
        let context = Context {
            state_dir: config.state_dir.clone(),
            cluster_id: config.sandbox.cluster_id.clone(),
            node_name: config.sandbox.node_name.clone(),
            purpose: Purpose::Create,
        };
        let provider = peerpod_providers::read(reader, &context);
        (config, provider, LogConfig::read(reader))
    }

    /// Owner mark of this node's tunnels, which separates them from those of other daemons on the machine.
    pub(crate) fn owner(&self) -> Owner {
        // The canonical path, so that another path to the same folder gives the same owner.
        let dir = self.state_dir.canonicalize().unwrap_or_else(|_| self.state_dir.clone());
        Owner::of(&[&self.sandbox.cluster_id, &self.sandbox.node_name, &dir.to_string_lossy()])
    }

    /// Largest batch to request by one call, given the provider's own limit; below 2: one call per VM.
    pub(crate) fn max_batch(&self, provider: u32) -> u32 {
        // The node identifies each guest of a batch by its source address, which NAT changes.
        let translated = self.tunnel.auto || self.tunnel.kind == TunnelKind::Wireguard;
        if self.batch && !translated { provider.min(MOST_BATCH) } else { 0 }
    }

    /// Memory in MiB that a guest needs besides its pod. `provider` is the provider's figure for its image, or 0.
    pub(crate) fn guest_memory(&self, provider: u64) -> u64 {
        let of_image = if provider == 0 { GUEST_MEMORY } else { provider };
        self.guest_memory_mib.unwrap_or(of_image)
    }
}

fn relay_addresses(reader: &mut Reader) -> Vec<GuestAddress> {
    let key = "node.relay-addresses";
    let texts: Vec<String> = reader
        .optional(
            key,
            "addresses by which pod VMs reach this node's relay, with or without a port; detected when not set",
        )
        .unwrap_or_default();
    let addresses: Vec<GuestAddress> = texts.iter().filter_map(|text| GuestAddress::parse(text)).collect();
    if addresses.len() != texts.len() {
        reader.mistake(key, "not all are addresses; write them like 10.0.0.7 or [fd00::7]:15151");
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(args: &[&str]) -> Result<NodeConfig, Mistakes> {
        let args = args.iter().map(|arg| (*arg).to_owned());
        NodeConfig::load(Sources::from_process(args, []).for_tests()).map(|(config, ..)| config)
    }

    #[test]
    fn defaults_are_applied() {
        let config = load(&[]).unwrap();
        assert_eq!((config.sandbox.lease, config.tunnel.port), (Duration::from_secs(900), 4789));
        assert!(config.relay_addresses.is_empty());
    }

    #[test]
    fn a_dialling_node_has_a_guest_port_and_no_encrypted_tunnel() {
        assert_eq!(load(&[]).unwrap().sandbox.dial, None);
        assert_eq!(load(&["--node.link-dial=node"]).unwrap().sandbox.dial, Some(15150));
        assert_eq!(load(&["--node.link-dial=node", "--node.guest-port=7"]).unwrap().sandbox.dial, Some(7));
        for kind in ["wireguard", "auto"] {
            let mistakes = load(&["--node.link-dial=node", &format!("--tunnel.kind={kind}")]).unwrap_err();
            assert!(
                mistakes.to_string().contains("set tunnel.kind: vxlan, or node.link-dial: guest"),
                "{mistakes}"
            );
        }
    }

    #[test]
    fn relay_addresses_may_have_a_port() {
        let config = load(&["--node.relay-addresses", "10.0.0.7,[fd00::7]:99,fd00::8"]).unwrap();
        let expected = [
            GuestAddress::Host("10.0.0.7".parse().unwrap()),
            GuestAddress::Whole("[fd00::7]:99".parse().unwrap()),
            GuestAddress::Host("fd00::8".parse().unwrap()),
        ];
        assert_eq!(config.relay_addresses, expected);
    }

    #[test]
    fn tunnel_settings_reach_the_tunnel_config() {
        let tunnel = load(&[]).unwrap().tunnel;
        assert_eq!(TunnelConfig::default(), tunnel);
        let args = ["--tunnel.vnis=100-200", "--tunnel.source-ports=40000-40063"];
        let tunnel = load(&[args.as_slice(), &["--tunnel.redirect=bpf"]].concat()).unwrap().tunnel;
        assert!(!tunnel.vnis.contains(99) && tunnel.vnis.contains(200) && !tunnel.vnis.contains(201));
        assert_eq!(
            (tunnel.source_ports, tunnel.redirect),
            (Some((40000, 40063)), Some(peerpod_podnet::redirect::Classifier::Bpf))
        );
    }

    #[test]
    fn vms_behind_nat_are_not_created_in_batches() {
        let most = |args: &[&str], provider| load(args).unwrap().max_batch(provider);
        assert_eq!((most(&[], 500), most(&[], 0), most(&[], 5000)), (500, 0, 1000));
        assert_eq!(most(&["--node.batch=off"], 500), 0);
        assert_eq!((most(&["--tunnel.kind=auto"], 500), most(&["--tunnel.kind=wireguard"], 500)), (0, 0));
        assert!(load(&["--node.batch=on"]).is_err());
    }

    #[test]
    fn two_state_directories_are_two_owners() {
        let owner = |args: &[&str]| load(args).unwrap().owner();
        assert_eq!(owner(&["--node.name=a"]), owner(&["--node.name=a"]));
        assert_ne!(owner(&["--node.name=a"]), owner(&["--node.name=a", "--paths.state-dir=/var/lib/other"]));
        assert_ne!(owner(&["--node.name=a"]), owner(&["--node.name=b"]));
    }

    #[test]
    fn external_egress_needs_the_clusters_networks() {
        let config = load(&["--tunnel.external=vm", "--tunnel.cluster-cidrs=10.244.0.0/16,10.96.0.0/12"]);
        assert_eq!(config.unwrap().tunnel.external.unwrap().cluster_cidrs, ["10.244.0.0/16", "10.96.0.0/12"]);
        assert_eq!(load(&[]).unwrap().tunnel.external, None);
        let config = load(&["--tunnel.external=second-nic", "--tunnel.cluster-cidrs=10.0.0.0/8"]).unwrap();
        assert!(config.sandbox.second_nic);
        assert!(
            !load(&["--tunnel.external=vm", "--tunnel.cluster-cidrs=10.0.0.0/8"]).unwrap().sandbox.second_nic
        );
        for (args, named) in [
            (&["--tunnel.external=vm"][..], "tunnel.cluster-cidrs"),
            (&["--tunnel.external=second-nic"], "tunnel.cluster-cidrs"),
            (&["--tunnel.external=vm", "--tunnel.cluster-cidrs=10.244.0.1"], "10.244.0.1"),
            (&["--tunnel.external-allow=169.254.169.254/32"], "tunnel.external-allow"),
            (&["--tunnel.external=internet"], "tunnel.external"),
        ] {
            let text = load(args).unwrap_err().to_string();
            assert!(text.contains(named), "{named} in {text}");
        }
    }

    #[test]
    fn the_options_that_pods_may_set_are_known_ones() {
        assert_eq!(
            load(&["--node.vm-annotations=zones,public-ip"]).unwrap().sandbox.allowed_options,
            ["zones", "public-ip"]
        );
        let told = load(&["--node.vm-annotations=zone"]).unwrap_err().to_string();
        assert!(told.contains("zone is not one of them"), "{told}");
    }

    #[test]
    fn a_removed_key_is_named_with_its_constant() {
        let args = ["--node.ticket-ttl=1h", "--tunnel.vni-min=7", "--node.vm-market=spot"].map(str::to_owned);
        let env = [("PEERPOD_NODE_FLUSH_TIMEOUT".to_owned(), "9s".to_owned())];
        let told = NodeConfig::load(Sources::from_process(args, env)).err().unwrap().to_string();
        for part in [
            "--node.ticket-ttl: no longer a setting; the constant TICKET_TTL is 30m; remove the key",
            "PEERPOD_NODE_FLUSH_TIMEOUT: no longer a setting; the constant FLUSH_TIMEOUT is 3s",
            "--tunnel.vni-min: no longer a setting; use tunnel.vnis",
            "--node.vm-market: no longer a setting; use the provider's settings",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let long = format!("--paths.state-dir=here --paths.run-dir=/{}", "x".repeat(60));
        let mut args: Vec<&str> = long.split(' ').collect();
        args.extend(["--node.relay-addresses=nowhere", "--node.boot-timeout=1h", "--tunnel.vnis=9-8"]);
        args.extend(["--node.cluster-id=a/b", "--tunnel.port=0", "--node.leese=5m", "--provider.kind=clowd"]);
        let text = load(&args).unwrap_err().to_string();
        for part in [
            "paths.state-dir",
            "paths.run-dir",
            "node.relay-addresses",
            "node.boot-timeout",
            "node.cluster-id",
            "tunnel.port",
            "tunnel.vnis",
            "node.leese",
            "provider.kind",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
