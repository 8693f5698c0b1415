//! Reads the settings of sandboxes and their VMs.

use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::admin::Ready;
use peerpod_base::config::Reader;

use crate::sandbox::Settings;
use crate::spec::{GUEST_MEMORY, VmOptions};
use crate::traces::Tracer;

/// Time after which the log and an Event name the step that a start waits for: longer than a usual boot.
const SLOW_AFTER: Duration = Duration::from_secs(60);
/// Limit of one `StartVM`: shorter than the shim's `remote_hypervisor_timeout`.
const START_TIMEOUT: Duration = Duration::from_secs(9 * 60);
/// Time for the kata-agent to listen in a VM that is connected. It starts within a second.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Lifetime of a ticket: longer than the slowest boot of a bare-metal instance.
const TICKET_TTL: Duration = Duration::from_secs(30 * 60);
/// Age at which a sandbox without `StartVM` is removed: longer than a shim waits between the two calls.
const NEVER_STARTED_GRACE: Duration = Duration::from_secs(15 * 60);
/// Time after which a sandbox without its network namespace is removed: longer than a restart of the runtime.
const NETNS_GONE_GRACE: Duration = Duration::from_secs(30);
/// Time after which a sandbox without its shim is removed. A restart of the runtime leaves shims and connections alone.
const SHIM_GONE_GRACE: Duration = Duration::from_secs(20);
/// Time without a guest's link before the node asks the provider for the VM: two lost keep-alives of the link.
const VM_GONE_GRACE: Duration = Duration::from_secs(24);
/// Lifetime of a tombstone: longer than a container runtime repeats a call.
const TOMBSTONE_TTL: Duration = Duration::from_secs(6 * 3600);
/// Time for a stopped VM to write its data out: within the seconds that a shim waits for `StopVM`.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);
/// Limit of sandboxes at once. `cluster.capacity` limits the pods of Kubernetes.
const MAX_SANDBOXES: u32 = 1000;
/// TCP port on which VMs listen for the node, with `node.link-dial: node`.
const GUEST_PORT: u16 = 15150;

/// Reads the settings of every sandbox. The caller fills in `pods_dir` and `second_nic`. `cluster_name`: the node's name
/// in Kubernetes, which is its name everywhere unless `node.name` is set.
pub(super) fn sandbox_settings(reader: &mut Reader, cluster_name: Option<String>) -> Settings {
    let name: Option<String> = reader.optional(
        "node.name",
        "name of this node; it marks the node's VMs; cluster.node-name, or else the host's name, when not set",
    );
    let dials = reader.choice(
        "node.link-dial",
        "guest",
        &["guest", "node"],
        "side that dials the TCP connection between VM and node: the guest, or the node, where the network blocks \
         connections from VMs to the node",
    ) == "node";
    let guest_port = reader.constant("node.guest-port", "GUEST_PORT", GUEST_PORT);
    let max_sandboxes = reader.constant("node.max-sandboxes", "MAX_SANDBOXES", MAX_SANDBOXES);
    Settings {
        cluster_id: reader.get(
            "node.cluster-id",
            "peerpod",
            "name of this cluster in the cloud account; it marks the cluster's VMs: never change it while any exist",
        ),
        node_name: name.or(cluster_name).unwrap_or_else(hostname),
        pods_dir: PathBuf::new(),
        guest_addresses: String::new(),
        boot_timeout: reader.get("node.boot-timeout", "5m", "time limit from CreateVM until the VM is ready"),
        slow_after: reader.constant("node.slow-after", "SLOW_AFTER", SLOW_AFTER),
        start_timeout: reader.constant("node.start-timeout", "START_TIMEOUT", START_TIMEOUT),
        agent_timeout: reader.constant("node.agent-timeout", "AGENT_TIMEOUT", AGENT_TIMEOUT),
        flush_timeout: reader.constant("node.flush-timeout", "FLUSH_TIMEOUT", FLUSH_TIMEOUT),
        ticket_ttl: reader.constant("node.ticket-ttl", "TICKET_TTL", TICKET_TTL),
        lease: reader.get(
            "node.lease",
            "15m",
            "time without contact to this node after which a VM powers off; longer than an upgrade or a partition",
        ),
        tombstone_ttl: reader.constant("node.tombstone-ttl", "TOMBSTONE_TTL", TOMBSTONE_TTL),
        never_started_grace: reader.constant("node.never-started-grace", "NEVER_STARTED_GRACE", NEVER_STARTED_GRACE),
        netns_gone_grace: reader.constant("node.netns-gone-grace", "NETNS_GONE_GRACE", NETNS_GONE_GRACE),
        shim_gone_grace: reader.constant("node.shim-gone-grace", "SHIM_GONE_GRACE", SHIM_GONE_GRACE),
        vm_gone_grace: reader.constant("node.vm-gone-grace", "VM_GONE_GRACE", VM_GONE_GRACE),
        max_sandboxes: usize::try_from(max_sandboxes).unwrap_or(usize::MAX),
        guest_memory_mib: GUEST_MEMORY,
        second_nic: false,
        allowed_options: allowed_options(reader),
        dial: dials.then_some(guest_port),
        max_batch: 0,
        tracer: Tracer::default(),
        ready: Ready::default(),
    }
}

fn allowed_options(reader: &mut Reader) -> Vec<String> {
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
    if let Some(bad) = names.iter().find(|name| !VmOptions::ALL.iter().any(|(known, _)| known == name)) {
        let known: Vec<&str> = VmOptions::ALL.iter().map(|(name, _)| *name).collect();
        reader.mistake(key, format!("{bad} is not one of them; write some of {}", known.join(", ")));
    }
    names
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "node".into(), |name| name.trim().into())
}
