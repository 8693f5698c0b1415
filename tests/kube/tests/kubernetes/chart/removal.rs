//! The end of an installation: refused, in order, and without a trace.

use std::process::Command;

use anyhow::{Context, ensure};
use peerpod_test_kube::NODE;
use peerpod_world::{Libvirtd, NETWORK, POOL, eventually_blocking};

use super::{Installed, NAMESPACE, PATIENCE, claims};
use crate::cases::{Case, NOTE};

pub(super) fn drain(on: &Installed<'_>) -> anyhow::Result<()> {
    // Another node would take the replicas of the release's own Deployments, which their disruption budget waits for.
    let others = "--pod-selector=app.kubernetes.io/name!=peerpod";
    let which = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", others, "--timeout=240s"];
    on.node.kubectl(&[&["drain", NODE], &which[..]].concat())?;
    let left = on.node.kubectl(&["-n", "users", "get", "pods", "-o", "name"])?;
    ensure!(left.is_empty(), "{left}");
    eventually_blocking("no VM is left", PATIENCE, || {
        on.libvirtd.borrow().domains().ok()?.is_empty().then_some(())
    })?;
    let peer_pods = on.node.kubectl(&["get", "peerpods", "-A", "-o", "name"])?;
    ensure!(peer_pods.is_empty(), "{peer_pods}");
    Ok(())
}

pub(super) fn uninstall_refused(on: &Installed<'_>) -> anyhow::Result<()> {
    let refused = on.node.cluster.helm(&["uninstall", "peerpod", "-n", NAMESPACE, "--wait"]);
    ensure!(refused.is_err(), "helm removed the release under running pods");
    let reason = on.node.kubectl(&["-n", NAMESPACE, "logs", "job/peerpod-idle"])?;
    ensure!(reason.contains("PeerPods exist") && reason.contains("users/p"), "{reason}");
    on.ready()?;
    Case::of(on.node, "users").exec("p", &["true"]).map(drop)
}

pub(super) fn uninstall(on: &Installed<'_>) -> anyhow::Result<()> {
    claims::uninstall(on)?;
    on.node.cluster.helm(&["uninstall", "peerpod", "-n", NAMESPACE, "--wait"])?;
    on.node.kubectl(&["delete", "namespace", NAMESPACE, "--timeout=120s"]).map(drop)
}

/// Returns a text with all that a VM has in libvirt.
pub(super) fn of_libvirt(libvirtd: &Libvirtd) -> anyhow::Result<String> {
    let lists = [libvirtd.domains()?, libvirtd.files(POOL)?, libvirtd.firmware()?];
    Ok(format!("domains, volumes, NVRAM: {lists:?}\n{}", libvirtd.virsh(&["net-dumpxml", NETWORK])?))
}

/// Helm keeps the custom resources (`has_crds`), kustomize does not.
pub(super) fn nothing_is_left(on: &Installed<'_>, has_crds: bool) -> anyhow::Result<()> {
    let crds = on.node.kubectl(&["get", "crd", "-o", "name"])?;
    ensure!(crds.contains(".confidentialcontainers.org") == has_crds, "{crds}");
    let namespaces_and_volumes = on.node.kubectl(&["get", "namespaces,pv", "-o", "name"])?;
    let is_ours = |name: &str| name.ends_with(NAMESPACE) || name.contains("persistentvolume/");
    ensure!(!namespaces_and_volumes.lines().any(is_ours), "{namespaces_and_volumes}");
    let mut now = String::new();
    eventually_blocking("libvirt has as much as before", PATIENCE, || {
        now = of_libvirt(&on.libvirtd.borrow()).ok()?;
        (now == on.of_libvirt).then_some(())
    })
    .with_context(|| format!("before: {}\nnow: {now}", on.of_libvirt))?;
    for kind in
        ["runtimeclasses", "mutatingwebhookconfigurations", "validatingadmissionpolicies", "clusterroles"]
    {
        let names = on.node.kubectl(&["get", kind, "-o", "name"])?;
        let ours: Vec<_> =
            names.lines().filter(|name| name.contains("peerpod") || name.contains("kata")).collect();
        ensure!(ours.is_empty(), "{ours:?}");
    }
    let rules = String::from_utf8(Command::new("nft").args(["list", "tables"]).output()?.stdout)?;
    ensure!(!rules.contains("peerpod"), "{rules}");
    let sockets = Command::new("find").args(["/run/peerpod", "-type", "s"]).output()?.stdout;
    ensure!(sockets.is_empty(), "{}", String::from_utf8_lossy(&sockets));
    on.before.is_again(on.node)?;
    println!("{NOTE}{} things of the kernel and files are as before", on.before.len());
    Ok(())
}
