//! The API server's audit log of the chart's accounts: their rights, used and unused, and refused requests. The CSI
//! driver's sidecars have the same accounts as peerpod-csi, so their requests count as well.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::node::Node;

/// Prefixes of the names of the accounts that have rights by the chart: its own, and those of the CSI driver.
const ACCOUNTS: [&str; 2] = ["system:serviceaccount:peerpod-system:", "system:serviceaccount:csi-hostpath:"];

/// Account, verb and resource of the rights that nothing here needs, each with its user.
const UNUSED: [(&str, &str, &str, &str); 23] = [
    ("driver-controller", "create", EVENTS, "an attach or detach that is refused"),
    ("driver-controller", "patch", EVENTS, "the same, again"),
    ("driver-controller", "list", PEERPODS, "a disk that the driver attaches (csi.attach: driver)"),
    ("driver-controller", "delete", "leases.coordination.k8s.io", "the owner of a disk on a lost node"),
    ("driver-controller", "get", VOLUMES, "a disk that the driver attaches (csi.attach: driver)"),
    ("driver-controller", "patch", VOLUMES, "a disk that the driver attaches (csi.attach: driver)"),
    ("driver-controller", "patch", VOLUMES_STATUS, "a disk that the driver attaches (csi.attach: driver)"),
    ("driver-controller", "delete", VOLUMES, "a disk on a lost node"),
    ("driver-node", "delete", VOLUMES, "a disk whose pod stays"),
    ("driver-node", "update", "leases.coordination.k8s.io", "a disk whose last owner has released it"),
    ("peerpod-controller", "create", EVENTS, "a VM that is not deleted, an orphan"),
    ("peerpod-controller", "patch", EVENTS, "the same, again"),
    ("peerpod-controller", "delete", "leases.coordination.k8s.io", "the heartbeat of a lost node"),
    ("peerpod-controller", "delete", PEERPODS, "a PeerPod of a lost node"),
    (
        "peerpod-controller",
        "get",
        "nodes",
        "a PeerPod that is deleted before its node's daemon has deleted the VM",
    ),
    ("peerpod-controller", "get", PEERPODS, "finalizers that another client changes at the same time"),
    ("peerpod-controller", "list", "pods", "an orphan"),
    ("peerpod-controller", "patch", PEERPODS, "the finalizer of a VM that the controller deletes"),
    ("peerpod-controller", "patch", PEERPODS_STATUS, "a VM that is not deleted"),
    ("peerpod-node", "create", PEERPODS, "server-side apply, which the API server counts as a patch"),
    ("peerpod-node", "create", "subjectaccessreviews.authorization.k8s.io", "a scraper of the metrics"),
    ("peerpod-node", "create", "tokenreviews.authentication.k8s.io", "a scraper of the metrics"),
    ("peerpod-node", "patch", "events", "an event that happens again"),
];
const VOLUMES: &str = "peerpodvolumes.confidentialcontainers.org";
const VOLUMES_STATUS: &str = "peerpodvolumes/status.confidentialcontainers.org";
const PEERPODS: &str = "peerpods.confidentialcontainers.org";
const PEERPODS_STATUS: &str = "peerpods/status.confidentialcontainers.org";
const EVENTS: &str = "events.events.k8s.io";

/// A verb and a resource with its API group.
type Right = (String, String);

/// Returns the flags of an API server that writes the log to `audit.log` in a folder.
pub(crate) fn flags(folder: &Path) -> anyhow::Result<Vec<String>> {
    let policy = folder.join("audit.yaml");
    let groups = ["system:serviceaccounts:peerpod-system", "system:serviceaccounts:csi-hostpath"];
    let content = json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "userGroups": groups}, {"level": "None"}],
    });
    fs::write(&policy, content.to_string())?;
    Ok(vec![
        format!("--audit-policy-file={}", policy.display()),
        format!("--audit-log-path={}", folder.join("audit.log").display()),
    ])
}

/// Prints each right of the chart's accounts with the number of its requests. Fails if one was refused, and if a right has
/// no user.
pub(crate) fn check(node: &Node, folder: &Path) -> anyhow::Result<()> {
    let (mut used, mut refused) = (BTreeMap::<(String, Right), usize>::new(), BTreeSet::new());
    for line in fs::read_to_string(folder.join("audit.log"))?.lines() {
        let entry: Value = serde_json::from_str(line)?;
        let user = entry["user"]["username"].as_str().unwrap_or_default();
        let Some(account) = ACCOUNTS.iter().find_map(|prefix| user.strip_prefix(prefix)) else { continue };
        let object = &entry["objectRef"];
        let word = |name: &str| object[name].as_str().filter(|word| !word.is_empty());
        let resource = word("subresource").map(|part| format!("/{part}")).unwrap_or_default();
        let resource = format!("{}{resource}", word("resource").unwrap_or("(discovery)"));
        let verb = entry["verb"].as_str().unwrap_or_default().to_owned();
        let right = (verb, full(word("apiGroup").unwrap_or_default(), &resource));
        let status = &entry["responseStatus"];
        // A namespace that is being deleted takes no Events, whatever the rights.
        let causes = status["details"]["causes"].as_array();
        let is_ending = causes.into_iter().flatten().any(|cause| cause["reason"] == "NamespaceTerminating");
        if status["code"] == 403 && !is_ending {
            refused.insert(format!("{account} may not {} {}: {}", right.0, right.1, entry["requestURI"]));
        }
        *used.entry((account.to_owned(), right)).or_default() += 1;
    }
    ensure!(!used.is_empty(), "the audit log has no request of the chart's accounts");
    let mut without_user = Vec::new();
    for (account, rights) in granted(node)? {
        for right in rights {
            let known = UNUSED.iter().find(|(of, verb, resource, _)| {
                (*of, *verb, *resource) == (&account, right.0.as_str(), right.1.as_str())
            });
            let user = match (used.get(&(account.clone(), right.clone())), known) {
                (Some(requests), _) => format!("{requests} requests"),
                (None, Some((.., user))) => format!("for {user}"),
                (None, None) => {
                    without_user.push(format!("{account}: {} {}", right.0, right.1));
                    "unused".to_owned()
                }
            };
            println!("         {account}: {} {}: {user}", right.0, right.1);
        }
    }
    ensure!(refused.is_empty(), "{refused:#?}");
    ensure!(without_user.is_empty(), "rights without a user: {without_user:#?}");
    Ok(())
}

fn full(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

/// Returns the rights of each account, by the bindings of the release.
fn granted(node: &Node) -> anyhow::Result<BTreeMap<String, BTreeSet<Right>>> {
    let read = |kinds: &str| -> anyhow::Result<Vec<Value>> {
        let labels = "app.kubernetes.io/name=peerpod";
        let all: Value =
            serde_json::from_str(&node.kubectl(&["get", kinds, "-A", "-l", labels, "-o", "json"])?)?;
        Ok(all["items"].as_array().context("items")?.clone())
    };
    let roles = read("roles,clusterroles")?;
    let mut granted = BTreeMap::<String, BTreeSet<Right>>::new();
    for binding in read("rolebindings,clusterrolebindings")? {
        let target = &binding["roleRef"];
        let role = roles.iter().find(|role| {
            role["kind"] == target["kind"]
                && role["metadata"]["name"] == target["name"]
                && (role["kind"] == "ClusterRole"
                    || role["metadata"]["namespace"] == binding["metadata"]["namespace"])
        });
        let role = role.with_context(|| format!("no role for {}", binding["metadata"]["name"]))?;
        for subject in binding["subjects"].as_array().into_iter().flatten() {
            let rights = granted.entry(subject["name"].as_str().unwrap_or_default().to_owned()).or_default();
            for rule in role["rules"].as_array().into_iter().flatten() {
                for (group, resource) in strings(&rule["apiGroups"])
                    .flat_map(|group| strings(&rule["resources"]).map(move |resource| (group, resource)))
                {
                    rights
                        .extend(strings(&rule["verbs"]).map(|verb| (verb.to_owned(), full(group, resource))));
                }
            }
        }
    }
    Ok(granted)
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}
