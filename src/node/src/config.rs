//! Reads the node's settings: sections `paths`, `node`, `tunnel`, `provider`, `secrets`, `cluster`, `kubernetes` and
//! `log` of the file that all binaries of a node share. Keys, defaults and meanings are defined here, in
//! `registries` and in the `config` modules of `cluster` and `secrets`; a provider's own
//! keys with the provider.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
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
    spec::{
        GUEST_MEMORY,
        vm_options::{self, Wishes},
    },
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
    /// `node.link-dial` and `node.guest-port`: port on which VMs wait for the relay to dial; `None`: VMs dial.
    pub dial: Option<u16>,
    /// `node.ticket-ttl`.
    pub ticket_ttl: Duration,
    /// `node.boot-timeout`.
    pub boot_timeout: Duration,
    /// `node.slow-after`: time after which the log and an Event name the step that a start waits for.
    pub slow_after: Duration,
    /// `node.start-timeout`.
    pub start_timeout: Duration,
    /// `node.agent-timeout`.
    pub agent_timeout: Duration,
    /// `node.never-started-grace`.
    pub never_started_grace: Duration,
    /// `node.netns-gone-grace`.
    pub netns_gone_grace: Duration,
    /// `node.vm-gone-grace`.
    pub vm_gone_grace: Duration,
    /// `node.ca-follow-timeout`: time that a step of the CA rotation waits for guests that do not follow.
    pub ca_follow_timeout: Duration,
    /// `node.tombstone-ttl`.
    pub tombstone_ttl: Duration,
    /// `node.lease`.
    pub lease: Duration,
    /// `node.flush-timeout`.
    pub flush_timeout: Duration,
    /// `node.orphan-grace`.
    pub orphan_grace: Duration,
    /// `node.ca-roll-over`: interval of the CA rotation; `None`: when a third of the CA's validity is left.
    pub ca_roll_over: Option<Duration>,
    /// `node.max-sandboxes`.
    pub max_sandboxes: usize,
    /// `node.guest-memory-mib`; `None`: the provider's figure.
    pub guest_memory_mib: Option<u64>,
    /// `node.batch`: whether one call may create the VMs of sandboxes that want the same VM at the same moment.
    pub batch: bool,
    /// `node.vm-…`: VM options of pods that do not set them.
    pub wishes: Wishes,
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
    /// `csi.volumes-dir`: folder in which the CSI wrapper records the pods' volumes.
    pub volumes_dir: PathBuf,
    /// `csi.direct-volumes-dir`: folder in which CSI drivers that support Kata describe the pods' volumes.
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
        let ca_roll_over: Option<Duration> = reader.optional(
            "node.ca-roll-over",
            "interval of the rotation of the node's CA; when not set, in the last third of its ten years",
        );
        let dials = reader.choice(
            "node.link-dial",
            "guest",
            &["guest", "node"],
            "side that dials the TCP connection between VM and node: the guest, or the node, where the \
             network blocks connections from VMs to the node",
        ) == "node";
        let guest_port: u16 = reader.get(
            "node.guest-port",
            "15150",
            "TCP port on which VMs listen for the node, with node.link-dial: node",
        );
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
            ticket_ttl: reader.get(
                "node.ticket-ttl",
                "30m",
                "time limit for a new VM to show its ticket; longer than the slowest boot",
            ),
            boot_timeout: reader.get(
                "node.boot-timeout",
                "5m",
                "time limit from CreateVM until the VM is ready",
            ),
            slow_after: reader.get(
                "node.slow-after",
                "1m",
                "after this time, the log and an Event on the pod name the step that a start is waiting for",
            ),
            start_timeout: reader.get(
                "node.start-timeout",
                "9m",
                "time limit of one StartVM; the sandbox goes on after it",
            ),
            agent_timeout: reader.get(
                "node.agent-timeout",
                "1m",
                "time limit for kata-agent to listen in the VM",
            ),
            never_started_grace: reader.get(
                "node.never-started-grace",
                "15m",
                "time after which a sandbox that was created and never started is removed",
            ),
            netns_gone_grace: reader.get(
                "node.netns-gone-grace",
                "30s",
                "time after which a sandbox without its network namespace is removed",
            ),
            vm_gone_grace: reader.get(
                "node.vm-gone-grace",
                "24s",
                "time without a guest's link after which the node asks the provider for the VM; if the VM is \
                 gone, the pod has failed",
            ),
            ca_follow_timeout: reader.get(
                "node.ca-follow-timeout",
                "7d",
                "time that a step of the CA's rotation waits for guests that do not follow; then it goes on \
                 without them",
            ),
            tombstone_ttl: reader.get(
                "node.tombstone-ttl",
                "6h",
                "time for which the node keeps the tombstone of a stopped sandbox",
            ),
            lease: reader.get(
                "node.lease",
                "15m",
                "time without contact to this node after which a VM powers off; longer than an upgrade or a \
                 partition",
            ),
            flush_timeout: reader.get(
                "node.flush-timeout",
                "3s",
                "time limit for a stopped VM to write its data out",
            ),
            orphan_grace: reader.get(
                "node.orphan-grace",
                "1m",
                "time after which a VM of this node without a record is deleted",
            ),
            ca_roll_over,
            max_sandboxes: usize::try_from(reader.get::<u32>(
                "node.max-sandboxes",
                "1000",
                "limit of sandboxes at once; the node refuses more",
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
            wishes: node_wishes(reader),
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
            direct_volumes_dir: reader.get(
                "csi.direct-volumes-dir",
                "/run/kata-containers/shared/direct-volumes",
                "folder in which CSI drivers that support Kata describe pods' volumes; only read",
            ),
        };
        config.cluster = ClusterConfig::read(reader, config.max_sandboxes);
        if let (Some(cluster), false) = (&config.cluster, reader.is_set("node.name")) {
            // Without `node.name`, the node takes its Kubernetes name, so that it has one name everywhere.
            config.name = cluster.node_name.clone();
        }
        let volumes_dir = config.state_dir.join("volumes");
        config.volumes_dir = reader
            .optional(
                "csi.volumes-dir",
                "folder in which peerpod-csi node records pods' volumes; volumes in paths.state-dir when not \
                 set",
            )
            .unwrap_or(volumes_dir);
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
            ("csi.volumes-dir", &self.volumes_dir),
            ("csi.direct-volumes-dir", &self.direct_volumes_dir),
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
        for (key, value) in [
            ("node.ticket-ttl", self.ticket_ttl),
            ("node.boot-timeout", self.boot_timeout),
            ("node.start-timeout", self.start_timeout),
            ("node.slow-after", self.slow_after),
            ("node.agent-timeout", self.agent_timeout),
            ("node.lease", self.lease),
            ("node.tombstone-ttl", self.tombstone_ttl),
        ] {
            if value < Duration::from_secs(1) {
                reader.mistake(key, "too short for any start to succeed; set 1s or more");
            }
        }
        if self.ticket_ttl < self.boot_timeout {
            reader.mistake("node.ticket-ttl", "shorter than node.boot-timeout; a slow VM could not join");
        }
        if self.dial == Some(0) {
            reader.mistake("node.guest-port", "guests must listen on a known port; 15150 is the usual one");
        }
        if self.dial.is_some() && self.tunnel.wireguard.is_some() {
            let why = "the guest begins the encrypted tunnel, and this network blocks connections from guests; set \
                 tunnel.kind: vxlan, or node.link-dial: guest";
            reader.mistake("node.link-dial", why);
        }
        if self.guest_memory_mib.is_some_and(|mib| mib > MOST_GUEST_MEMORY) {
            reader.mistake("node.guest-memory-mib", "more than 1 TiB; write it in MiB");
        }
        if self.max_sandboxes == 0 {
            reader.mistake("node.max-sandboxes", "no pod could ever run; set 1 or more");
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
            wishes: self.wishes.clone(),
            may_wish: self.may_wish.clone(),
            dial: self.dial,
            max_batch: 0,
        }
    }
}

/// Reads the VM options of pods that set none themselves.
fn node_wishes(reader: &mut Reader) -> Wishes {
    fn one<T>(
        reader: &mut Reader,
        key: &'static str,
        help: &'static str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        let text: String = reader.optional(key, help)?;
        read(&text).map_err(|why| reader.mistake(key, why)).ok()
    }
    Wishes {
        arch: one(
            reader,
            "node.vm-arch",
            "architecture of pods' VMs: x86_64, aarch64, s390x, ppc64le; default: that of the provider's \
             image",
            vm_options::arch,
        ),
        confidential: one(
            reader,
            "node.vm-confidential",
            "technology that encrypts the memory of pods' VMs: sev, sev-snp, tdx, secure-execution; default: \
             the provider's setting",
            vm_options::confidential,
        ),
        market: one(
            reader,
            "node.vm-market",
            "market of pods' VMs: spot, on-demand; default: the provider's setting",
            vm_options::market,
        ),
        zones: zones(reader),
        public_ip: reader.optional(
            "node.vm-public-ip",
            "give pods' VMs a public IP address beside the private one; default: false",
        ),
    }
}

fn zones(reader: &mut Reader) -> Vec<String> {
    let key = "node.vm-zones";
    let names: Vec<String> =
        reader.get(key, "", "the cloud's zones that may hold pods' VMs; default: all zones of the provider");
    vm_options::zones(&names.join(",")).unwrap_or_else(|why| {
        reader.mistake(key, why);
        Vec::new()
    })
}

/// Reads the list of VM options that a pod may set.
fn may_wish(reader: &mut Reader) -> Vec<String> {
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

/// Allowed intervals of a guest's path-MTU probe. Each probe is a dozen packets.
const PROBE_INTERVALS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(86_400);

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
    let by = reader.choice(
        "tunnel.redirect",
        "auto",
        &["auto", "u32", "matchall", "bpf"],
        "the kernel's classifier that redirects a pod's traffic; auto: the first that the kernel has",
    );
    let min: u32 = reader.get(
        "tunnel.vni-min",
        "1",
        "the smallest VNI of a pod's tunnel; VNIs are chosen at random from here",
    );
    let max: u32 = reader.get(
        "tunnel.vni-max",
        "16777215",
        "the largest VNI; set both where another VXLAN of the network needs VNIs of its own",
    );
    // The encrypted tunnel derives inner addresses from VNIs; the addresses of 0, 1 and 0xffffff are not usable.
    let (min, max) = if wireguard.is_some() { (min.max(2), max.min(0xff_fffe)) } else { (min, max) };
    let vnis = Vnis::new(min, max);
    if vnis.is_none() {
        reader.mistake("tunnel.vni-max", "no range with tunnel.vni-min; 1 to 16777215, the smaller first");
    }
    let ports: Option<String> = reader.optional(
        "tunnel.source-ports",
        "UDP source ports of tunnels, first-last; not set: the kernel's range for programs. Many ports \
         spread the load over a NIC's queues, few ports use fewer entries of a firewall's table",
    );
    let source_ports = ports.as_deref().and_then(port_range);
    if ports.is_some() != source_ports.is_some() {
        reader.mistake("tunnel.source-ports", "not a range of ports; write it like 40000-40063");
    }
    let probe_interval: Duration = reader.get(
        "tunnel.probe-interval",
        "10m",
        "interval of a guest's path-MTU probe towards the node; routes change without notice",
    );
    if !PROBE_INTERVALS.contains(&probe_interval) {
        reader.mistake("tunnel.probe-interval", "from 1s to 1d");
    }
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
        udp_checksum: reader.get(
            "tunnel.udp-checksum",
            "false",
            "UDP checksums in IPv4 tunnels; costs much on most cloud NICs",
        ),
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

fn port_range(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-')?;
    let range = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (0 < range.0 && range.0 <= range.1).then_some(range)
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "node".into(), |name| name.trim().into())
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::{Arch, Market};

    use super::*;

    fn load(args: &[&str]) -> Result<NodeConfig, Mistakes> {
        let args = args.iter().map(|arg| (*arg).to_owned());
        NodeConfig::load(Sources::from_process(args, [])).map(|(config, ..)| config)
    }

    #[test]
    fn defaults_are_applied() {
        let config = load(&[]).unwrap();
        assert_eq!((config.lease, config.tunnel.port), (Duration::from_secs(900), 4789));
        assert!(config.relay_addresses.is_empty() && config.ca_roll_over.is_none());
    }

    #[test]
    fn a_dialling_node_has_a_guest_port_and_no_encrypted_tunnel() {
        assert_eq!(load(&[]).unwrap().dial, None);
        assert_eq!(load(&["--node.link-dial=node"]).unwrap().dial, Some(15150));
        assert_eq!(load(&["--node.link-dial=node", "--node.guest-port=7"]).unwrap().dial, Some(7));
        assert!(load(&["--node.link-dial=node", "--node.guest-port=0"]).is_err());
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
        let args = ["--tunnel.vni-min=100", "--tunnel.vni-max=200", "--tunnel.source-ports=40000-40063"];
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
    fn vm_options_are_read_and_mistakes_name_accepted_values() {
        let config = load(&[
            "--node.vm-arch=arm64",
            "--node.vm-market=spot",
            "--node.vm-zones=north-1a,north-1b",
            "--node.vm-annotations=zones,public-ip",
        ]);
        let config = config.unwrap();
        let Wishes { arch, confidential, market, zones, public_ip } = config.wishes;
        assert_eq!((arch, market), (Some(Arch::Aarch64), Some(Market::Spot)));
        assert_eq!((confidential, public_ip), (None, None));
        assert_eq!(zones, ["north-1a", "north-1b"]);
        assert_eq!(config.may_wish, ["zones", "public-ip"]);
        let told =
            load(&["--node.vm-market=cheap", "--node.vm-confidential=yes", "--node.vm-annotations=zone"])
                .unwrap_err()
                .to_string();
        for part in ["write spot or on-demand", "write sev, sev-snp", "zone is not one of them"] {
            assert!(told.contains(part), "{part} in {told}");
        }
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let long = format!("--paths.state-dir=here --paths.run-dir=/{}", "x".repeat(60));
        let mut args: Vec<&str> = long.split(' ').collect();
        args.extend(["--node.relay-addresses=nowhere", "--node.ticket-ttl=1m", "--node.max-sandboxes=0"]);
        args.extend([
            "--tunnel.vni-min=9",
            "--tunnel.vni-max=8",
            "--tunnel.source-ports=9-8",
            "--tunnel.redirect=xdp",
        ]);
        args.extend(["--node.cluster-id=a/b", "--tunnel.port=0", "--node.leese=5m", "--provider.kind=clowd"]);
        let text = load(&args).unwrap_err().to_string();
        for part in [
            "paths.state-dir",
            "paths.run-dir",
            "node.relay-addresses",
            "node.ticket-ttl",
            "node.max-sandboxes",
            "node.cluster-id",
            "tunnel.port",
            "tunnel.vni-max",
            "tunnel.source-ports",
            "tunnel.redirect",
            "node.leese",
            "provider.kind",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
