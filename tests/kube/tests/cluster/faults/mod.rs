//! Injects each fault of the table, and compares the texts that an operator gets: the Event, the error of the shim's call,
//! and `peerpod describe`. VMs are those of the local provider, and a fake Google Cloud refuses others.

mod away;
mod injected;
mod refused;
mod side;

use std::fs;
use std::path::Path;
use std::process::Command;

use peerpod_test_kube::{program, report};
use peerpod_world::Daemons;

/// A fault, and the texts about it.
struct Fault {
    name: &'static str,
    /// Reason of the Event on the pod, or on the Node.
    reason: &'static str,
    /// Parts of the Event, of the error and of `describe`.
    cause: &'static str,
    remedy: &'static str,
    /// Whether a call of the shim fails.
    fails: bool,
}

impl Fault {
    const fn new(
        name: &'static str,
        reason: &'static str,
        cause: &'static str,
        remedy: &'static str,
    ) -> Fault {
        Fault { name, reason, cause, remedy, fails: true }
    }

    /// A fault that fails no call.
    const fn harmless(self) -> Fault {
        Fault { fails: false, ..self }
    }

    /// Row of docs/troubleshooting.md.
    fn row(&self) -> String {
        let Fault { name, reason, cause, remedy, .. } = self;
        format!("| {name} | `{reason}` | `{cause}` | `{remedy}` |\n")
    }
}

const UNANSWERED: &str =
    "does not answer: let the security group and all firewalls between VM and node pass this TCP port";
const MEMORY: &str = "raise the pod's memory limit, or node.guest-memory-mib, and delete the pod";

/// All faults.
const FAULTS: [Fault; 20] = [
    Fault::new(
        "the node's firewall drops the guests' port",
        "StartFailed",
        "did not dial this node within",
        UNANSWERED,
    ),
    Fault::new(
        "the node's firewall rejects the guests' port",
        "StartFailed",
        "refuses the connection",
        "start peerpod-relay there, or let the firewalls of node and network pass this TCP port",
    ),
    Fault::new(
        "the VM has the wrong security group",
        "StartFailed",
        "did not dial this node within",
        UNANSWERED,
    ),
    Fault::new(
        "the VM image is missing",
        "VMRefused",
        "was not found",
        "set image to one that exists and that this identity may use",
    ),
    Fault::new("the account's quota is used up", "VMRefused", "Quota", "ask for a higher quota"),
    Fault::new(
        "the cloud has no capacity",
        "VMRefused",
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "allow more instance types, zones or markets, or wait",
    ),
    Fault::new(
        "the VM's network has no DHCP server",
        "StartFailed",
        "no DHCP server answers",
        "See that the VM's network has one of the two and passes UDP ports 67 and 68",
    ),
    Fault::new(
        "another server has the node's address, or the node another CA",
        "StartFailed",
        "its certificate is not of the CA that this VM was given",
        "see that node.relay-addresses lead to this VM's node",
    ),
    Fault::new(
        "the ticket has expired",
        "StartFailed",
        "the ticket has expired, because the VM took too long to join",
        "see why it boots slowly, and delete the pod",
    ),
    Fault::new(
        "the kata-agent crashes",
        "GuestNote",
        "the kata-agent died with running containers, so the pod is lost",
        "delete the pod, so that it gets a new VM",
    ),
    Fault::new(
        "the pull secret is bad or missing",
        "GuestNote",
        "denied: ",
        "check that the image exists and that its pull secret reaches this VM and is valid",
    ),
    Fault::new("the VM's disk is full", "GuestNote", "no space: ", "give the VM a larger disk for images"),
    Fault::new(
        "the VM's clock is wrong",
        "StartFailed",
        "the clocks of VM and node differ",
        "set the VM's clock by NTP or by its hypervisor",
    ),
    Fault::new(
        "the path drops large packets",
        "NarrowPath",
        "packets of at most",
        "let the network between VM and node pass packets of the VM's MTU",
    )
    .harmless(),
    Fault::new(
        "another program has the tunnel's VNI",
        "StartFailed",
        "another program deleted the pod's tunnel and took its VNI",
        "stop that program, and delete the pod to get another VNI",
    ),
    Fault::new(
        "the pod's network namespace is gone",
        "NetworkLost",
        "its network namespace is gone",
        "see their logs, and delete the pod to get a new one",
    ),
    Fault::new(
        "the API server is away",
        "ApiServerAway",
        "the API server",
        "check the node's path to the API server",
    )
    .harmless(),
    Fault::new(
        "the provider's process crashed",
        "StartFailed",
        "the cloud did not make a VM within",
        "start it, or correct its address in provider.external",
    ),
    Fault::new(
        "the VM is killed",
        "VMFailed",
        "the provider no longer has it, and its guest does not answer",
        "find out at the provider who deleted it",
    ),
    Fault::new(
        "the VM's kernel kills the kata-agent for lack of memory",
        "GuestNote",
        "the kernel killed it for lack of memory",
        MEMORY,
    ),
];

/// Texts about an injected fault.
struct Seen {
    event: String,
    /// Error of the shim's call, if one fails.
    error: Option<String>,
    described: String,
}

/// Texts by the fault's name.
#[derive(Default)]
struct Texts(Vec<(&'static str, Seen)>);

impl Texts {
    fn add(&mut self, name: &'static str, event: String, error: Option<String>, described: String) {
        self.0.push((name, Seen { event, error, described }));
    }

    /// Compares all texts with the table. Returns the number of faults that are named, and the rest as text.
    fn compare(&self) -> (usize, Vec<String>) {
        let mut wrong = Vec::new();
        for fault in &FAULTS {
            let Some((_, seen)) = self.0.iter().find(|(name, _)| *name == fault.name) else {
                wrong.push(format!("{}: not injected", fault.name));
                continue;
            };
            let texts = [
                ("Event", Some(&seen.event)),
                ("error", seen.error.as_ref()),
                ("describe", Some(&seen.described)),
            ];
            println!("{} ({})", fault.name, fault.reason);
            let mut lacks = Vec::new();
            for (place, text) in texts {
                let Some(text) = text else { continue };
                println!("  {place}: {}", text.trim_end().replace('\n', "\n    "));
                let missing = [fault.cause, fault.remedy].into_iter().filter(|part| !text.contains(part));
                lacks.extend(missing.map(|part| format!("{place} lacks {part:?}")));
            }
            if seen.error.is_some() != fault.fails {
                lacks.push(format!("a call fails: {}", seen.error.is_some()));
            }
            if !lacks.is_empty() {
                wrong.push(format!("{}: {}", fault.name, lacks.join(", ")));
            }
        }
        (FAULTS.len() - wrong.len(), wrong)
    }
}

/// Returns the output of `peerpod describe` on a node.
fn describe(daemons: &Daemons, id: &str) -> String {
    let socket = daemons.run_dir().join("node-admin.sock");
    let output =
        Command::new(program("peerpod").unwrap()).args(["describe", id, "--socket"]).arg(socket).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{id}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_names_cause_and_remedy() {
    let texts = injected::all().await;
    let (named, wrong) = texts.compare();
    report("faults_named", named as f64).unwrap();
    report("faults_total", FAULTS.len() as f64).unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_documented_faults_are_those_of_the_table() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/troubleshooting.md");
    let page = fs::read_to_string(page).unwrap();
    for fault in &FAULTS {
        assert!(page.contains(&fault.row()), "docs/troubleshooting.md lacks this row:\n{}", fault.row());
    }
}
