//! Kubernetes' metrics server, which `kubectl top` asks.

use std::path::Path;

use anyhow::Context;
use peerpod_test_kube::{Process, program};

use crate::node::{ADDRESS, Node};

/// Flags of the API server, with which it passes requests on to the metrics server.
pub(crate) const API_SERVER: [&str; 7] = [
    "--requestheader-client-ca-file=ca.crt",
    "--requestheader-allowed-names=kube-apiserver",
    "--requestheader-username-headers=X-Remote-User",
    "--requestheader-group-headers=X-Remote-Group",
    "--requestheader-extra-headers-prefix=X-Remote-Extra-",
    "--proxy-client-cert-file=api-server.crt",
    "--proxy-client-key-file=api-server.key",
];

/// Starts the metrics server. It ends when it is dropped.
pub(crate) fn start(node: &Node, folder: &Path) -> anyhow::Result<Process> {
    let server = program("csi/metrics-server").context("build it first (tests/csi/build sidecars)")?;
    let admin = node.cluster.folder().join("admin.kubeconfig");
    let mut words = vec![
        format!("--secure-port={PORT}"),
        "--kubelet-insecure-tls".to_owned(),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        "--metric-resolution=15s".to_owned(),
        format!("--cert-dir={}", folder.join("metrics-server").display()),
    ];
    let flags = ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"];
    words.extend(flags.map(|flag| format!("--{flag}={}", admin.display())));
    let process = Process::start("metrics-server", &server, &words, folder)?;
    node.apply("kube-system", &OBJECTS.replace("ADDRESS", &ADDRESS.to_string()).replace("PORT", PORT))?;
    Ok(process)
}

const PORT: &str = "10449";

const OBJECTS: &str = "
{apiVersion: v1, kind: Service, metadata: {name: metrics-server}, spec: {ports: [{port: 443, targetPort: PORT}]}}
---
{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice,
 metadata: {name: metrics-server, labels: {kubernetes.io/service-name: metrics-server}},
 addressType: IPv4, ports: [{port: PORT}], endpoints: [{addresses: [ADDRESS]}]}
---
{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1beta1.metrics.k8s.io},
 spec: {group: metrics.k8s.io, version: v1beta1, groupPriorityMinimum: 100, versionPriority: 100,
   insecureSkipTLSVerify: true, service: {name: metrics-server, namespace: kube-system}}}";
