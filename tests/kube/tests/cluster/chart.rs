//! Tests the chart: its rendered objects for every provider, and their installation on a real API server.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Binding, Node, Pod};
use kube::api::{ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use peerpod_test_kube::{Cluster, Options, helm, kubectl, object, objects, program, project, wait_for};
use serde_json::{Value, from_value, json};

const LIMIT: Duration = Duration::from_secs(120);
pub(super) const NAMESPACE: &str = "peerpod-system";
/// Name of the port of peerpod-csi's metrics.
const CSI_PORT: &str = "peerpod-csi";

/// Returns every provider that has a values file, with the file. The fake one is in the tests' folder.
pub(super) fn providers() -> Vec<(String, PathBuf)> {
    let folders = fs::read_dir(project("providers")).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<(String, PathBuf)> = folders
        .chain([project("tests/fake")])
        .map(|folder| {
            (folder.file_name().unwrap().to_string_lossy().into_owned(), folder.join("values.yaml"))
        })
        .filter(|(_, values)| values.is_file())
        .collect();
    found.sort();
    // This is a lower bound; another test compares the rendered provider kinds with the programs' kinds.
    assert!(found.len() >= 5, "{found:?}");
    found
}

/// A folder of a test, removed on drop.
pub(super) struct Home(pub(super) PathBuf);

impl Home {
    pub(super) fn new(name: &str) -> Home {
        let path = std::env::temp_dir().join(format!("peerpod-chart-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Home(path)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// Returns the arguments that a render or an installation needs besides these: a provider, or the permission to use the
/// fake one, which the chart's schema does not know.
fn provider(words: &[&str]) -> &'static [&'static str] {
    match words.iter().find(|word| word.ends_with("values.yaml")) {
        None => &["--set", "config.provider.kind=libvirt"],
        Some(values) if values.ends_with("tests/fake/values.yaml") => &["--skip-schema-validation"],
        Some(_) => &[],
    }
}

pub(super) fn render(home: &Path, more: &[&str]) -> anyhow::Result<Vec<Value>> {
    let chart = project("deploy/chart");
    let words = ["template", "peerpod", chart.to_str().unwrap(), "-n", NAMESPACE];
    let words = [&words, provider(more), more].concat();
    objects(&helm(home, &words)?)
}

pub(super) fn pod_templates(all: &[Value]) -> Vec<(String, &Value)> {
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    let found = all.iter().filter(|object| !object["spec"]["template"].is_null());
    found.map(|object| (name(object), &object["spec"]["template"]["spec"])).collect()
}

#[test]
fn the_chart_lints_and_refuses_meaningless_values() {
    let home = Home::new("lint");
    let chart = project("deploy/chart");
    for (_, values) in providers() {
        let words = ["lint", "--strict", chart.to_str().unwrap(), "-f", values.to_str().unwrap()];
        helm(&home.0, &[&words, provider(&words)].concat()).unwrap();
    }
    for (bad, named) in [
        ("relay.updateStrategy=Recreate", "updateStrategy"),
        ("node.replicas=3", "replicas"),
        ("config.nodes.name=x", "nodes"),
        ("config.paths.run-dir=/x", "paths"),
        ("config.node.leese=5m", "leese"),
        ("config.webhook.totals=all", "totals"),
        ("config.provider.kind=clowd", "kind"),
        ("config.provider.kind=null", "kind"),
        ("config.provider=null", "provider"),
        ("image.digest=sha256:12", "digest"),
        ("rollout.peerPodConfig.limit=ten", "limit"),
        ("name=Peerpod", "name"),
        ("paths.kubelet=var/lib/kubelet", "kubelet"),
        ("paths.bundles={relative}", "bundles"),
    ] {
        let why = render(&home.0, &["--set", bad]).unwrap_err().to_string();
        assert!(why.contains(named), "{bad}: {why}");
    }
}

/// Checks that the port of the metrics, the rights to serve it, and the objects for monitoring come and go together.
#[test]
fn metrics_are_served_and_found_by_the_values() {
    let home = Home::new("metrics");
    let kinds = |all: &[Value]| {
        let kind = |object: &Value| object["kind"].as_str().unwrap().to_owned();
        all.iter()
            .filter(|object| object["apiVersion"] == "monitoring.coreos.com/v1")
            .map(kind)
            .collect::<Vec<_>>()
    };
    let is_served = |all: &[Value]| {
        let text = serde_json::to_string(all).unwrap();
        [
            "metrics-listen: '[::]:15157'",
            "subjectaccessreviews",
            "peerpod-metrics-reader",
            "peerpod-node-metrics",
        ]
        .map(|part| text.contains(part))
    };
    let all = render(&home.0, &[]).unwrap();
    assert_eq!((is_served(&all), kinds(&all)), ([true; 4], Vec::new()));
    let all = render(&home.0, &["--set", "metrics.enabled=false,metrics.podMonitor.enabled=true"]).unwrap();
    assert_eq!((is_served(&all), kinds(&all)), ([false; 4], Vec::new()));
    let all = render(&home.0, &["--set", "metrics.podMonitor.enabled=true,metrics.podMonitor.labels.team=a"])
        .unwrap();
    let mut found = kinds(&all);
    found.sort();
    assert_eq!(found, ["PodMonitor", "PrometheusRule", "ServiceMonitor"]);
    // Without it Prometheus renames the labels `namespace` and `pod` of the VMs' metrics.
    let node = object(&all, "ServiceMonitor", "peerpod-node").unwrap();
    let endpoints = node["spec"]["endpoints"].as_array().unwrap();
    assert!(endpoints.iter().all(|endpoint| endpoint["honorLabels"] == true), "{node}");
    for object in all.iter().filter(|object| object["apiVersion"] == "monitoring.coreos.com/v1") {
        assert_eq!(object["metadata"]["labels"]["team"], "a", "{object}");
        if object["kind"] == "ServiceMonitor" {
            let endpoint = &object["spec"]["endpoints"][0];
            let of_chart = json!({"credentials": {"name": "peerpod-scraper", "key": "token"}});
            assert_eq!((&endpoint["authorization"], &endpoint["bearerTokenFile"]), (&of_chart, &Value::Null));
        }
        if object["kind"] == "PrometheusRule" {
            assert!(object["spec"]["groups"][0]["rules"][0]["alert"].is_string(), "{object}");
        }
    }
    let drivers = json!([{"namespace": "a", "controllerServiceAccount": "c", "nodeServiceAccount": "n"}]);
    let set = format!("csi.drivers={drivers}");
    let with_csi =
        render(&home.0, &["--set", "metrics.podMonitor.enabled=true", "--set-json", &set]).unwrap();
    let csi = &object(&with_csi, "PodMonitor", "peerpod-csi").unwrap()["spec"];
    assert_eq!(csi["namespaceSelector"], json!({"matchNames": ["a"]}));
    assert_eq!(csi["podMetricsEndpoints"], json!([{"port": CSI_PORT}]), "the port's name in deploy/csi");
    let dashboard = all.iter().find(|object| object["metadata"]["name"] == "peerpod-dashboard").unwrap();
    let dashboard: Value = serde_json::from_str(dashboard["data"]["peerpod.json"].as_str().unwrap()).unwrap();
    assert_eq!(dashboard["uid"], "peerpod");
}

/// Checks that `make kustomize` would change no file, and that its output is a valid kustomization.
#[test]
fn generated_manifests_are_up_to_date() {
    let home = Home::new("kustomize");
    let made = Command::new(project("deploy/kustomize/make")).arg(&home.0).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    for file in [
        "kustomize/base/peerpod.yaml",
        "kustomize/base/crds.yaml",
        "kustomize/base/kustomization.yaml",
        "kustomize/base/namespace.yaml",
        "webhook/registration.yaml",
    ] {
        let kept = fs::read_to_string(project("deploy").join(file)).unwrap();
        assert!(
            fs::read_to_string(home.0.join(file)).unwrap() == kept,
            "deploy/{file}: run `make kustomize`"
        );
    }
    let objects =
        objects(&kubectl(&["kustomize", project("deploy/kustomize/base").to_str().unwrap()]).unwrap())
            .unwrap();
    for (kind, name) in
        [("DaemonSet", "peerpod-node"), ("CustomResourceDefinition", "peerpods.confidentialcontainers.org")]
    {
        object(&objects, kind, name).unwrap();
    }
    let links = ["crds", "files/kata"].map(|link| fs::read_link(project("deploy/chart").join(link)).unwrap());
    assert_eq!(
        links,
        [Path::new("../crds"), Path::new("../../kata")],
        "the chart has no copies that could differ"
    );
}

/// Checks that the programs accept the configuration that the chart renders for them.
#[test]
fn the_programs_accept_every_providers_values() {
    let home = Home::new("config");
    let mut kinds = BTreeSet::new();
    let mut skipped = Vec::new();
    for (name, values) in providers() {
        let all = render(&home.0, &["-f", values.to_str().unwrap()]).unwrap();
        let config = object(&all, "ConfigMap", "peerpod-config").unwrap();
        let file = home.0.join(format!("{name}.yaml"));
        fs::write(&file, config["data"]["peerpod.yaml"].as_str().unwrap()).unwrap();
        let check = |program_name: &str, words: &[&str]| {
            let mut command = Command::new(program(program_name).unwrap());
            command.args(words).arg("--config").arg(&file).env("PEERPOD_NODE_NAME", "worker-1");
            // As users run them: a removed key is a mistake.
            command.env_remove("PEERPOD_TESTING");
            let done = command.output().unwrap();
            (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
        };
        let (code, said) = check("peerpod", &["config", "check"]);
        if said.contains("not in this build") {
            assert!(
                code == Some(1) && said.contains("CLOUDS=1") && said.contains("has a mistake:"),
                "{said}"
            );
            skipped.push(name);
            continue;
        }
        assert_eq!(code, Some(0), "{name}: {said}");
        // 2 means mistakes in the configuration. 1 means none, and that there is no API server here.
        let away = ["--kubernetes.kubeconfig", "/nonexistent"];
        let (code, said) = check("peerpod-cluster", &[&["controller"][..], &away].concat());
        assert_eq!(code, Some(1), "{name}: {said}");
        let (code, said) = check("peerpod-cluster", &[&["webhook"][..], &away].concat());
        assert_eq!(code, Some(1), "{name}: {said}");
        let read: Value = serde_yaml::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        kinds.insert(read["provider"]["kind"].as_str().unwrap().to_owned());
    }
    let known: BTreeSet<String> = providers().into_iter().map(|(name, _)| name).collect();
    let checked: BTreeSet<String> = known.iter().filter(|name| !skipped.contains(name)).cloned().collect();
    assert_eq!(kinds, checked, "each provider's values are for that provider");
    // Only the clouds' SDKs and SSH are left out of a build. This bypasses the test runner, which captures the output of
    // passing tests.
    assert!(skipped.iter().all(|name| name == "aws" || name == "byom"), "{skipped:?}");
    // CI builds with all of them (`.ci/run`).
    assert!(skipped.is_empty() || std::env::var_os("CI").is_none(), "left out in CI: {skipped:?}");
    if !skipped.is_empty() {
        let said = format!(
            "skipped {} of {} providers' configurations: {}; the programs are built without them (CLOUDS=1 has them)\n",
            skipped.len(),
            known.len(),
            skipped.join(", ")
        );
        std::io::stderr().write_all(said.as_bytes()).unwrap();
    }
}

/// Compares the keys with those that each shim reads. The two differ, and a shim silently ignores unknown keys.
#[test]
fn katas_configuration_has_exactly_the_keys_that_each_shim_reads() {
    let home = Home::new("kata");
    let all = render(&home.0, &[]).unwrap();
    let kata = object(&all, "ConfigMap", "peerpod-kata").unwrap();
    let keys = |file: &str| -> BTreeSet<String> {
        let read: toml::Table = kata["data"][file].as_str().unwrap().parse().unwrap();
        let mut found = BTreeSet::new();
        flatten("", &toml::Value::Table(read), &mut found);
        found
    };
    let shared = [
        "hypervisor.remote.enable_annotations",
        "hypervisor.remote.default_bridges",
        "hypervisor.remote.memory_slots",
        "hypervisor.remote.disable_guest_selinux",
        "runtime.internetworking_model",
        "runtime.disable_new_netns",
        "runtime.static_sandbox_resource_mgmt",
        "runtime.sandbox_cgroup_only",
        "runtime.disable_guest_seccomp",
        "runtime.emptydir_mode",
    ];
    let go = [
        "hypervisor.remote.remote_hypervisor_socket",
        "hypervisor.remote.remote_hypervisor_timeout",
        "agent.kata.dial_timeout",
        "runtime.disable_guest_empty_dir",
        "runtime.experimental_force_guest_pull",
        "runtime.create_container_timeout",
        "runtime.kubelet_root_dir",
    ];
    let rust = [
        "hypervisor.remote.hypervisor_socket",
        "hypervisor.remote.hypervisor_timeout",
        "hypervisor.remote.default_vcpus",
        "hypervisor.remote.default_memory",
        "agent.kata.dial_timeout_ms",
        "agent.kata.reconnect_timeout_ms",
        "agent.kata.create_container_timeout",
        "runtime.name",
        "runtime.hypervisor_name",
        "runtime.agent_name",
        "runtime.experimental",
    ];
    let expected =
        |own: &[&str]| shared.iter().chain(own).map(|key| (*key).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(keys("configuration-remote-go.toml"), expected(&go));
    assert_eq!(keys("configuration-remote-rs.toml"), expected(&rust));
    for (file, socket) in [
        ("configuration-remote-go.toml", "remote_hypervisor_socket"),
        ("configuration-remote-rs.toml", "hypervisor_socket"),
    ] {
        let read: toml::Table = kata["data"][file].as_str().unwrap().parse().unwrap();
        assert_eq!(read["hypervisor"]["remote"][socket].as_str(), Some("/run/peerpod/hypervisor.sock"));
        assert_eq!(read["runtime"]["internetworking_model"].as_str(), Some("none"));
        assert_eq!(read["runtime"]["static_sandbox_resource_mgmt"].as_bool(), Some(true));
    }
    // Without these the first pod fails after its VM was made.
    let runtime =
        |file: &str| kata["data"][file].as_str().unwrap().parse::<toml::Table>().unwrap()["runtime"].clone();
    let pulls = &runtime("configuration-remote-rs.toml")["experimental"];
    assert_eq!(pulls.as_array().unwrap(), &[toml::Value::from("force_guest_pull")]);
    let pulls = &runtime("configuration-remote-go.toml")["experimental_force_guest_pull"];
    assert_eq!(pulls.as_bool(), Some(true));
    for file in ["containerd-1.toml", "containerd-2.toml", "crio.conf"] {
        assert!(keys(file).iter().any(|key| key.contains("kata-remote")), "{file}");
    }
    let old = kata["data"]["containerd-1.toml"].as_str().unwrap();
    assert!(old.contains("containerd-shim-kata-remote-v2"), "containerd 1.6 looks for the shim by this name");
}

fn flatten(path: &str, value: &toml::Value, found: &mut BTreeSet<String>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                flatten(&format!("{path}{}{key}", if path.is_empty() { "" } else { "." }), value, found);
            }
        }
        _ => drop(found.insert(path.to_owned())),
    }
}

/// Checks the rights that no role may have with any provider, and each role's required settings.
#[test]
fn pods_have_no_more_rights_on_the_node_than_they_need() {
    let home = Home::new("pods");
    let all = render(&home.0, &["--no-hooks"]).unwrap();
    let templates = pod_templates(&all);
    assert_eq!(templates.len(), 4, "node, relay, webhook, controller");
    for (name, spec) in &templates {
        assert_eq!(spec["enableServiceLinks"], false, "{name}: a Service's variables would be settings");
        assert!(spec["priorityClassName"].is_string(), "{name}");
        assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        for container in spec["containers"].as_array().unwrap() {
            let security = &container["securityContext"];
            assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(security["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(security["capabilities"]["drop"], json!(["ALL"]), "{name}");
            assert!(security["privileged"].is_null(), "{name}");
            assert!(!container["resources"]["requests"].is_null(), "{name}");
            // Two pods share a node's ports during a handover.
            if spec["hostNetwork"] == true {
                assert!(container["ports"].is_null(), "{name}");
            }
        }
    }
    let spec = |name: &str| templates.iter().find(|(found, _)| found == name).unwrap().1;
    let added = |name: &str| spec(name)["containers"][0]["securityContext"]["capabilities"]["add"].clone();
    assert_eq!(added("peerpod-node"), json!(["NET_ADMIN", "SYS_ADMIN"]));
    assert_eq!(added("peerpod-relay"), Value::Null);
    let mounts = spec("peerpod-relay")["containers"][0]["volumeMounts"].as_array().unwrap();
    let paths: Vec<&str> = mounts.iter().map(|mount| mount["mountPath"].as_str().unwrap()).collect();
    let bundles = "/run/containerd/io.containerd.runtime.v2.task";
    let (relay, inbox) = ("/var/lib/peerpod/relay", "/var/lib/peerpod/inbox");
    let config = "/etc/peerpod/peerpod.yaml";
    assert_eq!(paths, [config, "/run/peerpod", relay, inbox, "/var/lib/kubelet/pods", bundles]);
    for name in ["peerpod-webhook", "peerpod-controller"] {
        assert_eq!(spec(name)["securityContext"]["runAsNonRoot"], true, "{name}");
        assert_eq!(spec(name)["hostNetwork"], Value::Null, "{name}");
    }
    assert_eq!(spec("peerpod-relay")["automountServiceAccountToken"], false);
    let no_rights = |object: &&Value| {
        object["kind"].as_str().unwrap().ends_with("RoleBinding")
            && object["subjects"][0]["name"] == "peerpod-relay"
    };
    assert!(all.iter().find(no_rights).is_none(), "the relay connects to no API server");
    let mounts = &spec("peerpod-node")["containers"][0]["volumeMounts"];
    let netns = mounts.as_array().unwrap().iter().find(|mount| mount["mountPath"] == "/run/netns").unwrap();
    assert_eq!(netns["mountPropagation"], "HostToContainer");
    the_pods_own_folders_are_there(&templates, &["/run/containerd/io.containerd.runtime.v2.task"]);
    let others = ["--set", "paths.bundles={/run/containers/storage,/run/k3s/task}"];
    let all = render(&home.0, &[&others[..], &["--no-hooks"]].concat()).unwrap();
    the_pods_own_folders_are_there(&pod_templates(&all), &["/run/containers/storage", "/run/k3s/task"]);
    for (name, spec) in &templates {
        let of_node = ["peerpod-node", "peerpod-relay"].contains(&name.as_str());
        let class = if of_node { "system-node-critical" } else { "peerpod-cluster" };
        assert_eq!(spec["priorityClassName"], class, "{name}");
    }
    // A changed setting or tag of the node does not change the relay.
    let relay = |more: &[&str]| {
        let all = render(&home.0, more).unwrap();
        object(&all, "DaemonSet", "peerpod-relay").unwrap()["spec"]["template"].clone()
    };
    let changed = ["--set", "node.tag=9.9", "--set", "config.node.lease=20m", "--set", "relay.tag=0.1.0"];
    assert_eq!(relay(&["--set", "relay.tag=0.1.0"]), relay(&changed));
}

/// Renders the Job of `peerpod check`: it is confined as the node's daemon, has an account of its own that only reads,
/// and changes no file of the node.
#[test]
fn the_check_is_a_job_with_an_account_of_its_own() {
    let home = Home::new("check");
    assert!(object(&render(&home.0, &[]).unwrap(), "Job", "peerpod-check-1").is_err());
    let more = ["--set", "check.enabled=true", "--set", "check.nodes=3"];
    let all = render(&home.0, &more).unwrap();
    let job = object(&all, "Job", "peerpod-check-1").unwrap();
    assert_eq!((&job["spec"]["completions"], &job["spec"]["parallelism"]), (&json!(3), &json!(3)));
    let (spec, node) = (
        &job["spec"]["template"]["spec"],
        &object(&all, "DaemonSet", "peerpod-node").unwrap()["spec"]["template"]["spec"],
    );
    for same in ["nodeSelector", "tolerations", "hostNetwork", "securityContext"] {
        assert_eq!(spec[same], node[same], "{same}");
    }
    assert_eq!(
        (&spec["serviceAccountName"], &node["serviceAccountName"]),
        (&json!("peerpod-check"), &json!("peerpod-node"))
    );
    let subjects = |name: &str| object(&all, "ClusterRoleBinding", name).unwrap()["subjects"].clone();
    assert_eq!(
        (&subjects("peerpod-check")[0]["name"], subjects("peerpod-check").as_array().unwrap().len()),
        (&json!("peerpod-check"), 1)
    );
    assert!(!subjects("peerpod-node").to_string().contains("peerpod-check"));
    let container = &spec["containers"][0];
    assert_eq!(container["securityContext"], node["containers"][0]["securityContext"]);
    let account = format!("{NAMESPACE}/peerpod-node");
    assert_eq!(
        container["command"],
        json!(["/usr/bin/peerpod", "check", "--root", "/host", "--account", account])
    );
    for mount in container["volumeMounts"].as_array().unwrap() {
        assert!(mount["readOnly"] == true || mount["mountPath"] == "/tmp", "{mount}");
    }
    let rules = &object(&all, "ClusterRole", "peerpod-check").unwrap()["rules"];
    for rule in rules.as_array().unwrap() {
        // A review is an answer, and no object.
        let is_review = rule["resources"] == json!(["subjectaccessreviews"]);
        let reads = |verb: &Value| is_review || ["get", "list"].contains(&verb.as_str().unwrap());
        assert!(rule["verbs"].as_array().unwrap().iter().all(reads), "{rule}");
    }
    assert!(render(&home.0, &["--set", "check.nodes=0"]).is_err());
}

/// Containers' bundles and volumes' targets are named by the node's paths. Node and relay mount them there, read-only
/// and with mount propagation. No other role mounts them.
fn the_pods_own_folders_are_there(templates: &[(String, &Value)], bundles: &[&str]) {
    for (name, spec) in templates {
        let of_node = ["peerpod-node", "peerpod-relay"].contains(&name.as_str());
        let mounts = spec["containers"][0]["volumeMounts"].as_array().unwrap();
        let volumes = spec["volumes"].as_array().unwrap();
        // The relay compares volumes' targets, which are in the pods' folders.
        let kubelet = if name == "peerpod-relay" { "/var/lib/kubelet/pods" } else { "/var/lib/kubelet" };
        for path in bundles.iter().chain(&[kubelet]) {
            let mount = mounts.iter().find(|mount| mount["mountPath"] == *path);
            assert_eq!(mount.is_some(), of_node, "{name}: {path}");
            let Some(mount) = mount else { continue };
            assert_eq!(mount["readOnly"], true, "{name}: {path}");
            assert_eq!(mount["mountPropagation"], "HostToContainer", "{name}: {path}");
            let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
            assert_eq!(volume["hostPath"]["path"], *path, "{name}: at the same path as on the node");
        }
        if name == "peerpod-relay" {
            let variables = spec["containers"][0]["env"].as_array().unwrap();
            let set = variables.iter().find(|variable| variable["name"] == "PEERPOD_RELAY_BUNDLES");
            let others = (bundles.len() > 1).then(|| json!(bundles.join(",")));
            assert_eq!(set.map(|set| set["value"].clone()), others, "{bundles:?}: a setting of this release");
        }
    }
}

pub(super) async fn a_node(client: &Client, name: &str) {
    let labels = json!({"katacontainers.io/kata-runtime": "true", "kubernetes.io/hostname": name});
    let node = json!({"metadata": {"name": name, "labels": labels}});
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &from_value(node).unwrap()).await.unwrap();
    // Like a kubelet's status; a DaemonSet's pods may exist before it.
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "x", "message": "",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(&ready)).await.unwrap();
}

/// Installs the definitions of the objects for the Prometheus operator and for cert-manager.
fn define_others_objects(cluster: &Cluster) {
    let done = Command::new(project("tests/kube/definitions")).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let file = String::from_utf8(done.stdout).unwrap();
    cluster.kubectl(&["apply", "--server-side", "-f", file.trim()]).unwrap();
    let words = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
    cluster.kubectl(&words).unwrap();
}

/// Runs a user's steps on a real API server: the server validates each provider's values, and one release is installed.
#[tokio::test(flavor = "multi_thread")]
async fn installs_on_a_real_api_server() {
    let controllers = ["daemonset-controller", "deployment-controller", "replicaset-controller"];
    // The provider for development needs a privileged pod.
    let api_server = vec!["--allow-privileged=true".to_owned()];
    let options = Options { controllers: controllers.to_vec(), api_server, node: None };
    let cluster = Cluster::start(options).await.unwrap();
    let client = cluster.client().unwrap();
    cluster.namespace(NAMESPACE).await.unwrap();
    let crds = project("deploy/crds");
    cluster.kubectl(&["apply", "--server-side", "-f", crds.to_str().unwrap()]).unwrap();
    define_others_objects(&cluster);
    let modes: [&[&str]; 3] = [
        &[],
        &[
            "--set",
            "rollout.mode=config",
            "--set",
            "rollout.peerPodConfig.create=true",
            "--set",
            "check.enabled=true",
        ],
        &[
            "--set",
            "webhook.certificate.source=cert-manager,pullSecrets.enabled=false,metrics.podMonitor.enabled=true",
            "--set",
            "csi.drivers[0].namespace=peerpod-system,csi.drivers[0].nodeServiceAccount=n,\
             csi.drivers[0].controllerServiceAccount=c",
        ],
    ];
    for (name, values) in providers() {
        for mode in modes {
            // The pod of `helm test` needs the RuntimeClass; `chart_release` runs the hooks.
            let words = [&["-f", values.to_str().unwrap(), "--no-hooks"][..], mode].concat();
            let all = render(cluster.folder(), &words).unwrap();
            let list = json!({"apiVersion": "v1", "kind": "List", "items": all});
            let file = cluster.folder().join(format!("{name}.json"));
            fs::write(&file, list.to_string()).unwrap();
            let words = [
                "apply",
                "--dry-run=server",
                "--validate=strict",
                "--server-side",
                "-f",
                file.to_str().unwrap(),
            ];
            cluster.kubectl(&words).unwrap_or_else(|why| panic!("{name}, {mode:?}: {why}"));
        }
    }
    a_node(&client, "worker-1").await;
    // As the webhook of an older release made it.
    let old = [
        "create",
        "secret",
        "generic",
        "-n",
        NAMESPACE,
        "peerpod-webhook-ca",
        "--from-literal=authority.json=old",
    ];
    cluster.kubectl(&old).unwrap();
    install(&cluster, &["install"], &[]).unwrap();
    let filled = r#"{"stringData":{"authority.json":"new"}}"#;
    let words = ["patch", "secret", "-n", NAMESPACE, "peerpod-secrets-ca", "--type=merge", "-p", filled];
    cluster.kubectl(&words).unwrap();
    let list = cluster.helm(&["list", "-n", NAMESPACE]).unwrap();
    assert!(list.contains("deployed"), "{list}");
    for (component, count) in [("node", 1), ("relay", 1), ("webhook", 2), ("controller", 2)] {
        pods(&client, component, count).await;
    }
    the_relay_changes_hands(&cluster, &client).await;
    // Upgrades keep the CAs, in Base64 here.
    for (name, content) in [("peerpod-secrets-ca", "bmV3"), ("peerpod-webhook-ca", "b2xk")] {
        let words = ["get", "secret", "-n", NAMESPACE, name, "-o", "jsonpath={.data.authority\\.json}"];
        assert_eq!(cluster.kubectl(&words).unwrap(), content, "{name}");
    }
    peerpod_csi_before_a_driver(&cluster, &client).await;
}

/// Checks that the API server accepts `deploy/csi-example`, which puts peerpod-csi before a driver by `deploy/csi`, and
/// that each socket leads to the next program.
async fn peerpod_csi_before_a_driver(cluster: &Cluster, client: &Client) {
    const DRIVER: &str = "csi-hostpath";
    cluster.namespace(DRIVER).await.unwrap();
    cluster.kubectl(&["apply", "-k", project("deploy/csi-example").to_str().unwrap()]).unwrap();
    let controllers: Api<Deployment> = Api::namespaced(client.clone(), DRIVER);
    let controller = controllers.get("driver-controller").await.unwrap();
    let template = controller.spec.unwrap().template;
    assert_eq!(template.metadata.unwrap().labels.unwrap()["peerpod.io/csi"], "controller");
    let spec = serde_json::to_value(template.spec).unwrap();
    let of = |spec: &Value, name: &str| {
        let all = spec["containers"].as_array().unwrap();
        all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name} in {all:?}")).clone()
    };
    let controllers_own = of(&spec, "peerpod-csi");
    assert!(controllers_own["securityContext"]["privileged"].is_null());
    assert_eq!(controllers_own["command"], json!(["/usr/bin/peerpod-csi", "controller"]));
    for sidecar in ["csi-provisioner", "csi-attacher"] {
        assert_eq!(of(&spec, sidecar)["args"], json!(["--csi-address=/csi/peerpod.sock"]), "{sidecar}");
    }

    let nodes: Api<DaemonSet> = Api::namespaced(client.clone(), DRIVER);
    let node = nodes.get("driver-node").await.unwrap();
    let template = node.spec.unwrap().template;
    assert_eq!(template.metadata.unwrap().labels.unwrap()["peerpod.io/csi"], "node");
    let spec = serde_json::to_value(template.spec).unwrap();
    let ours = of(&spec, "peerpod-csi");
    assert_eq!(ours["securityContext"]["privileged"], true, "else its mounts do not reach the node");
    let mounts = ours["volumeMounts"].as_array().unwrap();
    for (path, propagation) in [
        ("/csi", Value::Null),
        ("/var/lib/kubelet", json!("Bidirectional")),
        ("/var/lib/peerpod", Value::Null),
        ("/run/peerpod", Value::Null),
    ] {
        let mount = mounts.iter().find(|mount| mount["mountPath"] == path).unwrap();
        assert_eq!(mount["mountPropagation"], propagation, "{path}");
        let volumes = spec["volumes"].as_array().unwrap();
        assert!(volumes.iter().any(|volume| volume["name"] == mount["name"]), "{path}");
    }
    let name = &ours["env"].as_array().unwrap()[0];
    assert_eq!(name["name"], "PEERPOD_CLUSTER_NODE_NAME");
    assert_eq!(name["valueFrom"]["fieldRef"]["fieldPath"], "spec.nodeName");
    let registrar = of(&spec, "registrar")["args"].to_string();
    assert_eq!(registrar.matches("peerpod.sock").count(), 2, "{registrar}");
    for program in [&ours, &of(&spec, "driver")] {
        assert!(program.to_string().contains("/csi/csi.sock"), "the driver's own socket: {program}");
    }
    has_the_port_of_its_metrics(&controllers_own);
    has_the_port_of_its_metrics(&ours);
}

fn has_the_port_of_its_metrics(csi: &Value) {
    let port = &csi["ports"][0];
    assert_eq!((&port["name"], &port["containerPort"]), (&json!(CSI_PORT), &json!(15156)));
    let listen = json!({"name": "PEERPOD_CSI_ADMIN_LISTEN", "value": "[::]:15156"});
    assert!(csi["env"].as_array().unwrap().contains(&listen), "{csi}");
}

pub(super) fn install(cluster: &Cluster, verb: &[&str], more: &[&str]) -> anyhow::Result<String> {
    let chart = project("deploy/chart");
    let words = [verb, &["peerpod", chart.to_str().unwrap(), "-n", NAMESPACE], provider(more), more].concat();
    cluster.helm(&words)
}

/// Waits for this number of pods that are not being deleted.
async fn pods(client: &Client, component: &str, count: usize) -> Vec<Pod> {
    let all: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let of = ListParams::default().labels(&format!("app.kubernetes.io/component={component}"));
    wait_for(&format!("{count} pods of {component}"), LIMIT, async || {
        let found = all.list(&of).await?.items;
        let stay: Vec<Pod> =
            found.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect();
        Ok((stay.len() == count).then_some(stay))
    })
    .await
    .unwrap()
}

/// Plays the kubelet: the pod runs, and has long been ready.
async fn runs(client: &Client, pod: &Pod) {
    let all: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let name = pod.metadata.name.clone().unwrap();
    let meta = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
    let to = json!({"metadata": meta, "target": {"apiVersion": "v1", "kind": "Node", "name": "worker-1"}});
    let bound: Binding = from_value(to).unwrap();
    let _: Value = all.create_subresource("binding", &name, &PostParams::default(), &bound).await.unwrap();
    let ready = json!({"status": {"phase": "Running", "conditions": [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    all.patch_status(&name, &PatchParams::default(), &Patch::Merge(&ready)).await.unwrap();
}

/// With OnDelete an upgrade keeps the pod. With RollingUpdate the new pod is ready before the old one is deleted.
async fn the_relay_changes_hands(cluster: &Cluster, client: &Client) {
    let first = pods(client, "relay", 1).await.remove(0);
    runs(client, &first).await;
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    install(cluster, &["upgrade"], &["--set", "image.tag=2.0"]).unwrap();
    wait_for("the controller to see the upgrade", LIMIT, async || {
        let set = sets.get("peerpod-relay").await?;
        let seen = set.status.and_then(|status| status.observed_generation);
        let image = set.spec.unwrap().template.spec.unwrap().containers[0].image.clone();
        assert_eq!(image.as_deref(), Some("peerpod:2.0"));
        Ok((seen == set.metadata.generation && seen > Some(1)).then_some(()))
    })
    .await
    .unwrap();
    let still = pods(client, "relay", 1).await.remove(0);
    assert_eq!(still.metadata.uid, first.metadata.uid);

    let rolling = ["--set", "image.tag=2.0", "--set", "relay.updateStrategy=RollingUpdate"];
    install(cluster, &["upgrade"], &rolling).unwrap();
    let both = pods(client, "relay", 2).await;
    let second = both.iter().find(|pod| pod.metadata.uid != first.metadata.uid).unwrap();
    runs(client, second).await;
    let last = pods(client, "relay", 1).await.remove(0);
    assert_eq!(last.metadata.uid, second.metadata.uid);
}
