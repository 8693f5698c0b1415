//! Reads the node's settings: sections `paths`, `node`, `tunnel`, `provider`, `secrets`, `cluster`, `kubernetes` and
//! `log` of the file that all binaries of a node share. Keys, defaults and meanings are defined here, in
//! `registries` and in the `config` modules of `cluster` and `secrets`; a provider's own
//! keys with the provider.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use peerpod_base::{
    config::{Mistakes, Printed, Reader, Sources},
    fd_handoff,
    telemetry::LogConfig,
};
use peerpod_providers::{Context, Purpose};

use crate::{
    cluster::ClusterConfig,
    registries::Registries,
    sandbox,
    secrets::SecretsConfig,
    spec::{GUEST_MEMORY, vm_options::Wishes},
    tunnel::{
        Classifier, NETNS_DIR, Owner, TunnelConfig, TunnelKind, Vnis, WireguardConfig,
        external::{self, External, Way},
        netns_in,
    },
};

/// Sections of the shared file that other binaries read; the node reads one key of `relay` and two of `csi`.
const OTHERS: [&str; 5] = ["relay", "controller", "webhook", "csi", "volumes"];
/// Largest batch. More sandboxes do not arrive within one window; each is an entry of the batch's file.
const MOST_BATCH: u32 = 1000;
/// Upper bound of `node.guest-memory-mib`, in MiB: 1 TiB.
const MOST_GUEST_MEMORY: u64 = 1 << 20;
/// Upper bound of each list of networks; the guest accepts no more.
const MOST_PREFIXES: usize = 64;

/// Time after which the log and an Event name the step that a start waits for: longer than a usual boot.
const SLOW_AFTER: Duration = Duration::from_secs(60);
/// Limit of one `StartVM`: shorter than the shim's `create_container_timeout`.
const START_TIMEOUT: Duration = Duration::from_secs(9 * 60);
/// Time for the kata-agent to listen in a VM that is connected. It starts within a second.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Lifetime of a ticket: longer than the slowest boot of a bare-metal instance.
const TICKET_TTL: Duration = Duration::from_secs(30 * 60);
/// Age at which a sandbox without `StartVM` is removed: longer than a shim waits between the two calls.
const NEVER_STARTED_GRACE: Duration = Duration::from_secs(15 * 60);
/// Time after which a sandbox without its network namespace is removed: longer than a restart of the runtime.
const NETNS_GONE_GRACE: Duration = Duration::from_secs(30);
/// Time without a guest's link before the node asks the provider for the VM: two lost keep-alives of the link.
const VM_GONE_GRACE: Duration = Duration::from_secs(24);
/// Interval of the rotation of the node's CA, with which guests get new certificates: half of the validity of these.
const CA_ROLL_OVER: Duration = Duration::from_secs(180 * 86_400);
/// Time that a step of the CA's rotation waits for guests that do not follow.
const CA_FOLLOW_TIMEOUT: Duration = Duration::from_secs(7 * 86_400);
/// Lifetime of a tombstone: longer than a container runtime repeats a call.
const TOMBSTONE_TTL: Duration = Duration::from_secs(6 * 3600);
/// Time for a stopped VM to write its data out: within the seconds that a shim waits for `StopVM`.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);
/// Age at which a VM of this node without a record is deleted: longer than clouds hide a new VM from their lists.
const ORPHAN_GRACE: Duration = Duration::from_secs(60);
/// Limit of sandboxes at once. `cluster.capacity` limits the pods of Kubernetes.
const MAX_SANDBOXES: u32 = 1000;
/// Folder in which CSI drivers that support Kata describe the pods' volumes; the path is Kata's own.
const DIRECT_VOLUMES_DIR: &str = "/run/kata-containers/shared/direct-volumes";
/// Classifier that redirects a pod's traffic: the first of u32, matchall and bpf that the kernel has.
const REDIRECT: &str = "auto";
/// Interval of a guest's path-MTU probe towards the node: routes change without notice.
const PROBE_INTERVAL: Duration = Duration::from_secs(600);
/// UDP checksums in IPv4 tunnels cost much on most NICs of clouds; the inner packets have their own.
const UDP_CHECKSUM: bool = false;

/// TCP port on which VMs listen for the node, with `node.link-dial: node`.
const GUEST_PORT: u16 = 15150;
/// UDP source ports of tunnels: the kernel's range for programs.
const SOURCE_PORTS: &str = "";

/// Settings of the node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// `paths.run-dir`: folder of the sockets.
    pub run_dir: PathBuf,
    /// `paths.state-dir`: folder of the ledger, the CA and the inbox.
    pub state_dir: PathBuf,
    /// `relay.listen`: address on which the relay accepts guests.
    pub relay_listen: SocketAddr,
    /// `node.cluster-id`.
    pub cluster_id: String,
    /// `node.name`.
    pub name: String,
    /// `node.admin-listen`: metrics and health.
    pub admin_listen: SocketAddr,
    /// `node.relay-addresses`: addresses that guests dial; empty: the node determines them.
    pub relay_addresses: Vec<GuestAddress>,
    /// `node.link-dial`: port on which VMs wait for the relay to dial; `None`: VMs dial.
    pub dial: Option<u16>,
    /// [`TICKET_TTL`].
    pub ticket_ttl: Duration,
    /// `node.boot-timeout`.
    pub boot_timeout: Duration,
    /// [`SLOW_AFTER`].
    pub slow_after: Duration,
    /// [`START_TIMEOUT`].
    pub start_timeout: Duration,
    /// [`AGENT_TIMEOUT`].
    pub agent_timeout: Duration,
    /// [`NEVER_STARTED_GRACE`].
    pub never_started_grace: Duration,
    /// [`NETNS_GONE_GRACE`].
    pub netns_gone_grace: Duration,
    /// [`VM_GONE_GRACE`].
    pub vm_gone_grace: Duration,
    /// [`CA_FOLLOW_TIMEOUT`].
    pub ca_follow_timeout: Duration,
    /// [`TOMBSTONE_TTL`].
    pub tombstone_ttl: Duration,
    /// `node.lease`.
    pub lease: Duration,
    /// [`FLUSH_TIMEOUT`].
    pub flush_timeout: Duration,
    /// [`ORPHAN_GRACE`].
    pub orphan_grace: Duration,
    /// [`CA_ROLL_OVER`].
    pub ca_roll_over: Duration,
    /// [`MAX_SANDBOXES`].
    pub max_sandboxes: usize,
    /// `node.guest-memory-mib`; `None`: the provider's figure.
    pub guest_memory_mib: Option<u64>,
    /// `node.batch`: whether one call may create the VMs of sandboxes that want the same VM at the same moment.
    pub batch: bool,
    /// `node.vm-annotations`: VM options that a pod may set.
    pub may_wish: Vec<String>,
    /// Section `tunnel`.
    pub tunnel: TunnelConfig,
    /// `tunnel.localhost`: whether connections to a pod's localhost in its namespace on the node are carried into the
    /// VM.
    pub localhost: bool,
    /// Registry settings for guests.
    pub registries: Registries,
    /// Section `secrets`: the service for pods' pull secrets; `None`: no service is asked.
    pub secrets: Option<SecretsConfig>,
    /// Sections `cluster` and `kubernetes`; `None`: this node is in no cluster.
    pub cluster: Option<ClusterConfig>,
    /// Folder in which the CSI wrapper records the pods' volumes.
    pub volumes_dir: PathBuf,
    /// Folder in which CSI drivers that support Kata describe the pods' volumes.
    pub direct_volumes_dir: PathBuf,
}

/// Address that guests dial, with its own port or with the relay's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestAddress {
    /// Address with its own port.
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

impl NodeConfig {
    /// Reads the node's keys.
    pub fn read(reader: &mut Reader) -> NodeConfig {
        let addresses: Vec<String> = reader
            .optional(
                "node.relay-addresses",
                "addresses by which pod VMs reach this node's relay, with or without a port; detected when \
                 not set",
            )
            .unwrap_or_default();
        let relay_addresses =
            addresses.iter().filter_map(|text| GuestAddress::parse(text)).collect::<Vec<_>>();
        if relay_addresses.len() != addresses.len() {
            reader.mistake(
                "node.relay-addresses",
                "not all are addresses; write them like 10.0.0.7 or [fd00::7]:15151",
            );
        }
        let dials = reader.choice(
            "node.link-dial",
            "guest",
            &["guest", "node"],
            "side that dials the TCP connection between VM and node: the guest, or the node, where the \
             network blocks connections from VMs to the node",
        ) == "node";
        let guest_port = reader.constant("node.guest-port", "GUEST_PORT", GUEST_PORT);
        let mut config = NodeConfig {
            run_dir: reader.get("paths.run-dir", "/run/peerpod", "folder of the sockets"),
            state_dir: reader.get(
                "paths.state-dir",
                "/var/lib/peerpod",
                "folder of the state that survives a restart",
            ),
            relay_listen: reader.get(
                "relay.listen",
                "[::]:15151",
                "address and port that pod VMs dial (TLS); [::] means both families",
            ),
            cluster_id: reader.get(
                "node.cluster-id",
                "peerpod",
                "name of this cluster in the cloud account; it marks the cluster's VMs: never change it \
                 while any exist",
            ),
            name: reader
                .optional(
                    "node.name",
                    "name of this node; it marks the node's VMs; cluster.node-name, or else the host's name, \
                     when not set",
                )
                .unwrap_or_else(hostname),
            admin_listen: reader.get(
                "node.admin-listen",
                "127.0.0.1:15153",
                "address and port of /metrics, /healthz and /readyz",
            ),
            relay_addresses,
            dial: dials.then_some(guest_port),
            ticket_ttl: reader.constant("node.ticket-ttl", "TICKET_TTL", TICKET_TTL),
            boot_timeout: reader.get(
                "node.boot-timeout",
                "5m",
                "time limit from CreateVM until the VM is ready",
            ),
            slow_after: reader.constant("node.slow-after", "SLOW_AFTER", SLOW_AFTER),
            start_timeout: reader.constant("node.start-timeout", "START_TIMEOUT", START_TIMEOUT),
            agent_timeout: reader.constant("node.agent-timeout", "AGENT_TIMEOUT", AGENT_TIMEOUT),
            never_started_grace: reader.constant(
                "node.never-started-grace",
                "NEVER_STARTED_GRACE",
                NEVER_STARTED_GRACE,
            ),
            netns_gone_grace: reader.constant("node.netns-gone-grace", "NETNS_GONE_GRACE", NETNS_GONE_GRACE),
            vm_gone_grace: reader.constant("node.vm-gone-grace", "VM_GONE_GRACE", VM_GONE_GRACE),
            ca_follow_timeout: reader.constant(
                "node.ca-follow-timeout",
                "CA_FOLLOW_TIMEOUT",
                CA_FOLLOW_TIMEOUT,
            ),
            tombstone_ttl: reader.constant("node.tombstone-ttl", "TOMBSTONE_TTL", TOMBSTONE_TTL),
            lease: reader.get(
                "node.lease",
                "15m",
                "time without contact to this node after which a VM powers off; longer than an upgrade or a \
                 partition",
            ),
            flush_timeout: reader.constant("node.flush-timeout", "FLUSH_TIMEOUT", FLUSH_TIMEOUT),
            orphan_grace: reader.constant("node.orphan-grace", "ORPHAN_GRACE", ORPHAN_GRACE),
            ca_roll_over: reader.constant("node.ca-roll-over", "CA_ROLL_OVER", CA_ROLL_OVER),
            max_sandboxes: usize::try_from(reader.constant::<u32>(
                "node.max-sandboxes",
                "MAX_SANDBOXES",
                MAX_SANDBOXES,
            ))
            .unwrap_or(usize::MAX),
            guest_memory_mib: reader.optional(
                "node.guest-memory-mib",
                "memory in MiB that a pod's VM has besides the pod's own, for the guest; when not set, the \
                 provider's figure for the image, or else 256",
            ),
            batch: reader.choice(
                "node.batch",
                "auto",
                &["auto", "off"],
                "create VMs that are requested at the same moment by one call, with one ticket, where the \
                 provider can; auto: unless NAT may translate the VMs' addresses (tunnel.kind wireguard and \
                 auto)",
            ) == "auto",
            may_wish: may_wish(reader),
            tunnel: tunnel(reader),
            localhost: reader.get(
                "tunnel.localhost",
                "true",
                "carry connections to 127.0.0.1 and ::1 of a pod's namespace (port-forward) into its VM",
            ),
            registries: Registries::read(reader),
            secrets: SecretsConfig::read(reader),
            cluster: None,
            volumes_dir: PathBuf::new(),
            direct_volumes_dir: reader.constant(
                "csi.direct-volumes-dir",
                "DIRECT_VOLUMES_DIR",
                PathBuf::from(DIRECT_VOLUMES_DIR),
            ),
        };
        config.cluster = ClusterConfig::read(reader, config.max_sandboxes);
        if let (Some(cluster), false) = (&config.cluster, reader.is_set("node.name")) {
            // Without `node.name`, the node takes its Kubernetes name, so that it has one name everywhere.
            config.name = cluster.node_name.clone();
        }
        let volumes_dir = config.state_dir.join("volumes");
        config.volumes_dir = reader.derived("csi.volumes-dir", "paths.state-dir", volumes_dir);
        if let Some(wireguard) = &mut config.tunnel.wireguard {
            wireguard.key_dir = config.state_dir.join("trust");
            wireguard.netns = netns_in(&config.run_dir);
            wireguard.relay = config.run_dir.join(fd_handoff::SOCKET);
        }
        config.check(reader);
        config
    }

    fn check(&self, reader: &mut Reader) {
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
        for (key, value) in [("node.cluster-id", &self.cluster_id), ("node.name", &self.name)] {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if value.is_empty() || value.len() > 128 || !value.chars().all(fits) {
                reader.mistake(key, "not a name; write at most 128 letters, digits, '-', '_' and '.'");
            }
        }
        for (key, value) in [("node.boot-timeout", self.boot_timeout), ("node.lease", self.lease)] {
            if value < Duration::from_secs(1) {
                reader.mistake(key, "too short for any start to succeed; set 1s or more");
            }
        }
        if self.ticket_ttl < self.boot_timeout {
            let why = format!("longer than a ticket, {:?}; a slow VM could not join", self.ticket_ttl);
            reader.mistake("node.boot-timeout", why);
        }
        if self.dial.is_some() && self.tunnel.wireguard.is_some() {
            let why = "the guest begins the encrypted tunnel, and this network blocks connections from guests; set \
                 tunnel.kind: vxlan, or node.link-dial: guest";
            reader.mistake("node.link-dial", why);
        }
        if self.guest_memory_mib.is_some_and(|mib| mib > MOST_GUEST_MEMORY) {
            reader.mistake("node.guest-memory-mib", "more than 1 TiB; write it in MiB");
        }
        if self.tunnel.port == 0 {
            reader.mistake("tunnel.port", "guests need a known port; 4789 is the usual one");
        }
    }

    /// Reads all settings of this binary. Opens nothing.
    ///
    /// # Errors
    /// All mistakes of all sources together.
    pub fn load(
        sources: Sources,
    ) -> Result<(NodeConfig, peerpod_providers::Settings, LogConfig, Printed), Mistakes> {
        let mine = ["paths", "node", "tunnel", "provider", "secrets", "log", "cluster", "kubernetes"];
        let mut reader = Reader::load(sources, &mine, &OTHERS)?;
        let config = NodeConfig::read(&mut reader);
        let provider = peerpod_providers::read(&mut reader, &config.provider_context());
        let log = LogConfig::read(&mut reader);
        let printed = reader.finish()?;
        Ok((config, provider, log, printed))
    }

    /// Owner mark of this node's tunnels, which separates them from those of other daemons on the machine.
    pub fn owner(&self) -> Owner {
        // The canonical path, so that another path to the same folder gives the same owner.
        let dir = self.state_dir.canonicalize().unwrap_or_else(|_| self.state_dir.clone());
        Owner::of(&[&self.cluster_id, &self.name, &dir.to_string_lossy()])
    }

    /// Whether VMs need a second NIC.
    pub fn wants_second_nic(&self) -> bool {
        self.tunnel.external.as_ref().is_some_and(|external| external.way == Way::SecondNic)
    }

    /// Largest batch to request by one call, given the provider's own limit; below 2: one call per VM.
    pub fn max_batch(&self, provider: u32) -> u32 {
        // The node identifies each guest of a batch by its source address, which NAT changes.
        let translated = self.tunnel.auto || self.tunnel.kind == TunnelKind::Wireguard;
        if self.batch && !translated { provider.min(MOST_BATCH) } else { 0 }
    }

    /// Memory in MiB that a guest needs besides its pod. `provider` is the provider's figure for its image, or 0.
    pub fn guest_memory(&self, provider: u64) -> u64 {
        let of_image = if provider == 0 { GUEST_MEMORY } else { provider };
        self.guest_memory_mib.unwrap_or(of_image)
    }

    /// Facts about this node for the provider.
    pub fn provider_context(&self) -> Context {
        Context {
            state_dir: self.state_dir.clone(),
            cluster_id: self.cluster_id.clone(),
            node_name: self.name.clone(),
            purpose: Purpose::Create,
        }
    }

    /// Settings that every sandbox needs.
    pub fn sandbox_settings(&self) -> sandbox::Settings {
        sandbox::Settings {
            cluster_id: self.cluster_id.clone(),
            node_name: self.name.clone(),
            pods_dir: self.run_dir.join("pods"),
            guest_addresses: String::new(),
            boot_timeout: self.boot_timeout,
            slow_after: self.slow_after,
            start_timeout: self.start_timeout,
            agent_timeout: self.agent_timeout,
            flush_timeout: self.flush_timeout,
            ticket_ttl: self.ticket_ttl,
            lease: self.lease,
            tombstone_ttl: self.tombstone_ttl,
            never_started_grace: self.never_started_grace,
            netns_gone_grace: self.netns_gone_grace,
            vm_gone_grace: self.vm_gone_grace,
            max_sandboxes: self.max_sandboxes,
            guest_memory_mib: self.guest_memory(0),
            second_nic: self.wants_second_nic(),
            may_wish: self.may_wish.clone(),
            dial: self.dial,
            max_batch: 0,
        }
    }
}

/// Reads the list of VM options that a pod may set.
fn may_wish(reader: &mut Reader) -> Vec<String> {
    for key in ["arch", "confidential", "market", "public-ip", "zones"] {
        reader.removed(
            &format!("node.vm-{key}"),
            "use the provider's settings, or the pod's annotation io.peerpod/…",
        );
    }
    let key = "node.vm-annotations";
    let names: Vec<String> = reader.get(
        key,
        "arch,confidential,market,zones",
        "options that a pod may set by annotations io.peerpod/<name>: arch, confidential, market, zones, \
         public-ip",
    );
    if let Some(bad) = names.iter().find(|name| !Wishes::ALL.iter().any(|(known, _)| known == name)) {
        let known: Vec<&str> = Wishes::ALL.iter().map(|(name, _)| *name).collect();
        reader.mistake(key, format!("{bad} is not one of them; write some of {}", known.join(", ")));
    }
    names
}

/// Reads section `tunnel`.
fn tunnel(reader: &mut Reader) -> TunnelConfig {
    let defaults = TunnelConfig::default();
    let choice = reader.choice(
        "tunnel.kind",
        "vxlan",
        &["auto", "vxlan", "wireguard"],
        "tunnel that carries a pod's frames to its VM: vxlan in clear, wireguard encrypted and through NAT; \
         auto: vxlan where the node reaches the VM at its own private address, else wireguard",
    );
    let wireguard_port: u16 = reader.get(
        "tunnel.wireguard-port",
        "51820",
        "UDP port of this node's encrypted tunnel; 0: the kernel chooses one, which is then kept",
    );
    // `NodeConfig::read` fills in the folders when they are known.
    let wireguard = (choice != "vxlan").then(|| WireguardConfig {
        port: wireguard_port,
        key_dir: PathBuf::new(),
        netns: PathBuf::new(),
        relay: PathBuf::new(),
    });
    let by: String = reader.constant("tunnel.redirect", "REDIRECT", REDIRECT.to_owned());
    let vnis: String = reader.get(
        "tunnel.vnis",
        "1-16777215",
        "VNIs of the pods' tunnels, first-last, of which the node takes any; another VXLAN of the network needs VNIs of \
         its own",
    );
    for key in ["tunnel.vni-min", "tunnel.vni-max"] {
        reader.removed(key, "use tunnel.vnis, first-last");
    }
    let (min, max): (u32, u32) = range(&vnis).unwrap_or_default();
    // The encrypted tunnel derives inner addresses from VNIs; the addresses of 0, 1 and 0xffffff are not usable.
    let (min, max) = if wireguard.is_some() { (min.max(2), max.min(0xff_fffe)) } else { (min, max) };
    let vnis = Vnis::new(min, max);
    if vnis.is_none() {
        reader.mistake("tunnel.vnis", "no range of VNIs; write 1-16777215 or a part of it");
    }
    let ports = reader.constant("tunnel.source-ports", "SOURCE_PORTS", SOURCE_PORTS.to_owned());
    let source_ports = range(&ports);
    let probe_interval: Duration = reader.constant("tunnel.probe-interval", "PROBE_INTERVAL", PROBE_INTERVAL);
    TunnelConfig {
        netns_dir: reader.get(
            "node.netns-dir",
            NETNS_DIR,
            "folder in which the container runtime keeps the pods' network namespaces",
        ),
        kind: if choice == "wireguard" { TunnelKind::Wireguard } else { TunnelKind::Vxlan },
        auto: choice == "auto",
        wireguard,
        port: reader.get("tunnel.port", "4789", "UDP port of the pods' tunnels; the same on all nodes"),
        udp_checksum: reader.constant("tunnel.udp-checksum", "UDP_CHECKSUM", UDP_CHECKSUM),
        anti_spoof: reader.get(
            "tunnel.anti-spoof",
            "true",
            "accept a tunnel's packets from its VM's address only, and keep them out of conntrack (nftables)",
        ),
        redirect: Classifier::ALL.into_iter().find(|classifier| classifier.name() == by),
        vnis: vnis.unwrap_or_default(),
        source_ports,
        external: external(reader),
        probe_interval,
        ..defaults
    }
}

/// Reads the settings of the pods' egress from the cluster.
fn external(reader: &mut Reader) -> Option<External> {
    let way = reader.choice(
        "tunnel.external",
        "tunnel",
        &["tunnel", "vm", "second-nic"],
        "egress of the pods' default routes: by the node (tunnel), by their VMs' own network (vm), or by a \
         second NIC of their VMs (second-nic; the provider must support it); NetworkPolicy applies to the \
         first only",
    );
    let cluster_cidrs: Vec<String> = reader
        .optional(
            "tunnel.cluster-cidrs",
            "with tunnel.external vm or second-nic: networks of the cluster's pods, services and nodes, which stay in \
             the tunnel",
        )
        .unwrap_or_default();
    let allow: Vec<String> = reader
        .optional(
            "tunnel.external-allow",
            "with tunnel.external vm or second-nic: networks that pods may reach although they are \
             link-local, like the cloud's metadata service, or the VM's own",
        )
        .unwrap_or_default();
    let way = match way.as_str() {
        "vm" => Some(Way::Vm),
        "second-nic" => Some(Way::SecondNic),
        _ => None,
    };
    for (key, texts) in [("tunnel.cluster-cidrs", &cluster_cidrs), ("tunnel.external-allow", &allow)] {
        if let Some(wrong) = texts.iter().find(|text| !external::is_prefix(text)) {
            reader.mistake(key, format!("{wrong:?} is not a network; write it like 10.244.0.0/16"));
        }
        if texts.len() > MOST_PREFIXES {
            reader.mistake(key, format!("more than {MOST_PREFIXES}; summarise them"));
        }
        if way.is_none() && !texts.is_empty() {
            reader.mistake(key, "has no effect without tunnel.external: vm or second-nic");
        }
    }
    if way.is_some() && cluster_cidrs.is_empty() {
        reader.mistake(
            "tunnel.cluster-cidrs",
            "pods could not reach the cluster; name the networks of its pods, services and nodes",
        );
    }
    way.map(|way| External { way, cluster_cidrs, allow })
}

/// Parses `first-last`.
fn range<T: FromStr + PartialOrd>(text: &str) -> Option<(T, T)> {
    let (first, last) = text.split_once('-')?;
    let range = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (range.0 <= range.1).then_some(range)
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "node".into(), |name| name.trim().into())
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
        assert_eq!((config.lease, config.tunnel.port), (Duration::from_secs(900), 4789));
        assert!(config.relay_addresses.is_empty());
    }

    #[test]
    fn a_dialling_node_has_a_guest_port_and_no_encrypted_tunnel() {
        assert_eq!(load(&[]).unwrap().dial, None);
        assert_eq!(load(&["--node.link-dial=node"]).unwrap().dial, Some(15150));
        assert_eq!(load(&["--node.link-dial=node", "--node.guest-port=7"]).unwrap().dial, Some(7));
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
        assert_eq!((tunnel.source_ports, tunnel.redirect), (Some((40000, 40063)), Some(Classifier::Bpf)));
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
        assert!(config.wants_second_nic() && config.sandbox_settings().second_nic);
        assert!(
            !load(&["--tunnel.external=vm", "--tunnel.cluster-cidrs=10.0.0.0/8"]).unwrap().wants_second_nic()
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
            load(&["--node.vm-annotations=zones,public-ip"]).unwrap().may_wish,
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
