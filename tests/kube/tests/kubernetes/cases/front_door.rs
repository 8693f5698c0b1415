//! The command line with a kubeconfig, where it starts programs in pods.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::thread;

use anyhow::{Context, anyhow, ensure};
use peerpod_test_kube::{NODE, program, servers};
use serde_json::Value;

use super::network::nft;
use super::{Case, POLL, image};
use crate::images_common::PORT;
use crate::node::ADDRESS;
use crate::storage::DRIVER;

/// Runs the command line with all rights. Returns its exit code, its output and its errors.
pub(crate) fn peerpod(case: &Case<'_>, words: &[&str]) -> anyhow::Result<(Option<i32>, String, String)> {
    let bin = case.node.folder().join(format!("bin-{}", case.namespace));
    fs::create_dir_all(&bin)?;
    let script = format!("#!/bin/sh\nexec {} kubectl \"$@\"\n", servers()?.display());
    fs::write(bin.join("kubectl"), script)?;
    fs::set_permissions(bin.join("kubectl"), fs::Permissions::from_mode(0o755))?;
    let mut command = Command::new(program("peerpod")?);
    let path = std::env::var("PATH").unwrap_or_default();
    command.args(words).env("PATH", format!("{}:{path}", bin.display()));
    command.env("KUBECONFIG", case.node.cluster.folder().join("admin.kubeconfig"));
    let output = command.output()?;
    let [text, errors] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Ok((output.status.code(), text, errors))
}

/// Returns the tests of a table with this sign.
fn of(table: &str, sign: char) -> Vec<&str> {
    let rows = table.lines().filter_map(|line| line.strip_prefix(sign));
    rows.filter_map(|row| row.trim_start().split("  ").next()).collect()
}

/// Does for the namespace of the first NetworkPolicy what the node's network plugin does not: on the node, between bridge
/// and pods, no new connection to its pods passes. Ends when `is_over` returns true.
fn enforce(case: &Case<'_>, mut is_over: impl FnMut() -> bool) -> anyhow::Result<()> {
    const TABLE: &str = "bridge peerpod_test";
    const OF_TEST: &str = "peerpod-test-";
    let mut is_closed = false;
    while !is_over() {
        thread::sleep(POLL);
        if is_closed {
            continue;
        }
        let policies = case.node.read("/apis/networking.k8s.io/v1/networkpolicies")?;
        let mut namespaces = policies["items"].as_array().into_iter().flatten();
        let namespace = namespaces
            .find_map(|one| one["metadata"]["namespace"].as_str().filter(|name| name.starts_with(OF_TEST)));
        let Some(namespace) = namespace else { continue };
        let pods = case.node.read(&format!("/api/v1/namespaces/{namespace}/pods"))?;
        let pods = pods["items"].as_array().context("pods")?;
        let addresses: Vec<_> = pods.iter().filter_map(|pod| pod["status"]["podIP"].as_str()).collect();
        if addresses.is_empty() {
            continue;
        }
        nft(&format!(
            "add table {TABLE}\nadd chain {TABLE} f {{ type filter hook forward priority 0; }}\n\
             add rule {TABLE} f ip daddr {{ {} }} tcp flags & (syn | ack) == syn drop\n",
            addresses.join(", ")
        ))?;
        is_closed = true;
    }
    if is_closed { nft(&format!("delete table {TABLE}\n")) } else { Ok(()) }
}

/// Runs `peerpod test`, whose tests must pass except for `failing` and the one that needs a second node. Calls `beside`
/// again and again meanwhile. Returns the command and its table, with a fixed name of the namespace.
pub(crate) fn test(
    case: &Case<'_>,
    class: &str,
    failing: &[&str],
    mut beside: impl FnMut(),
) -> anyhow::Result<(String, String)> {
    let (image, egress) = (image(), format!("{ADDRESS}:{PORT}"));
    let words = ["test", "--image", &image, "--egress", &egress, "--storage-class", class];
    let (tested, enforced) = thread::scope(|scope| {
        let tested = scope.spawn(|| peerpod(case, &words));
        let enforced = enforce(case, || {
            beside();
            tested.is_finished()
        });
        (tested.join(), enforced)
    });
    let (code, table, errors) = tested.map_err(|_| anyhow!("panic"))??;
    enforced.context("close the pods")?;
    let expected = i32::from(!failing.is_empty());
    ensure!(of(&table, '✗') == failing && code == Some(expected), "{code:?}\n{table}{errors}");
    ensure!(of(&table, '-') == ["two nodes"], "{table}");
    let passed = of(&table, '✓');
    for test in [
        "start of peer-1",
        "start of plain",
        "own kernel",
        "logs",
        "service from peer-2",
        "DNS from peer-2",
        "service from plain",
        "pod peer-1 to peer-2",
        "pod peer-1 to plain",
        "pod plain to peer-1",
        "port-forward",
        "egress",
        "volume",
        "network policy",
        "clean-up",
    ] {
        ensure!(passed.contains(&test) || failing.contains(&test), "{test}: {table}");
    }
    let left = case.node.kubectl(&["get", "namespaces", "-o", "name"])?;
    ensure!(!left.contains("peerpod-test-"), "{left}");
    let namespace = table.split_whitespace().find(|word| word.starts_with("peerpod-test-"));
    let table = table.replace(namespace.context("a namespace")?, "peerpod-test-x7k2p");
    Ok((format!("peerpod test --storage-class {class}"), table.trim_start_matches('\n').to_owned()))
}

/// The local provider's VMs have the node's kernel, and there is one node: all else must pass.
pub(crate) fn connectivity(case: &Case<'_>) -> anyhow::Result<()> {
    let ready = "{\"status\": {\"conditions\": [{\"type\": \"PeerPodsReady\", \"status\": \"True\"}]}}";
    case.kubectl(&["patch", "node", NODE, "--subresource=status", "--type=strategic", "-p", ready])?;
    test(case, DRIVER, &["own kernel"], || ()).map(drop)
}

/// Makes a DaemonSet with the node's sockets and an account like that of the chart. Asks its pod for orphans and for the
/// node's sysdump.
pub(crate) fn orphans(case: &Case<'_>) -> anyhow::Result<()> {
    let program = program("peerpod")?;
    let run = case.node.run_dir()?;
    let labels = "app.kubernetes.io/name: peerpod, app.kubernetes.io/component: node";
    let binding = format!("{}-node", case.namespace);
    case.apply(&format!(
        "{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: node}}}}\n---\n\
         {{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, \
         metadata: {{name: {binding}, labels: {{{labels}}}}}, \
         roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: none}}, \
         subjects: [{{kind: ServiceAccount, name: node, namespace: {}}}]}}\n---\n\
         {{apiVersion: apps/v1, kind: DaemonSet, metadata: {{name: node}}, spec: {{\
         selector: {{matchLabels: {{{labels}}}}}, template: {{metadata: {{labels: {{{labels}}}}}, \
         spec: {{serviceAccountName: node, terminationGracePeriodSeconds: 1, containers: [{{name: node, \
         image: IMAGE, command: [sleep, '1000'], volumeMounts: [{{name: program, mountPath: /usr/bin/peerpod}}, \
         {{name: lib, mountPath: /lib}}, {{name: lib64, mountPath: /lib64}}, {{name: run, mountPath: /run/peerpod}}]}}], \
         volumes: [{{name: program, hostPath: {{path: {}}}}}, {{name: lib, hostPath: {{path: /usr/lib}}}}, \
         {{name: lib64, hostPath: {{path: /usr/lib64}}}}, {{name: run, hostPath: {{path: {}}}}}]}}}}}}}}",
        case.namespace,
        program.display(),
        run.display(),
    ))?;
    // `rollout status` also returns before the controller has counted the node.
    let available = "--for=jsonpath={.status.numberAvailable}=1";
    case.kubectl(&["wait", "daemonset/node", available, "--timeout=120s"])?;
    let (code, text, errors) = peerpod(case, &["orphans", "-o", "json"])?;
    let read: Value = serde_json::from_str(&text).with_context(|| format!("{text}{errors}"))?;
    ensure!(code == Some(0) && read.is_array(), "{code:?} {text} {errors}");
    let out = case.node.folder().join(format!("{}.tar.gz", case.namespace));
    let (code, contents, errors) = peerpod(case, &["sysdump", "--out", &out.display().to_string()])?;
    for part in ["node/status.yaml", "node/metrics.txt", "sandboxes/list.yaml", "ledger-index.txt"] {
        let part = format!(" nodes/{NODE}/{part}");
        ensure!(code == Some(0) && contents.contains(&part), "{part}: {code:?} {contents} {errors}");
    }
    case.kubectl(&["delete", "clusterrolebinding", &binding]).map(drop)
}
