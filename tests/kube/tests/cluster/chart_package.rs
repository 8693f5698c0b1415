//! Tests the packaged chart: its content, its README, and values that change pods.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use peerpod_test_kube::{helm, helm_program, object, program, project};
use peerpod_test_reference as reference;
use serde_json::{Value, json};

use crate::chart::{Home, NAMESPACE, pod_templates, providers, render};

/// Packages the chart, and returns the folder of the unpacked package.
fn unpacked(home: &Path) -> std::path::PathBuf {
    let chart = project("deploy/chart");
    helm(home, &["package", chart.to_str().unwrap(), "-d", home.to_str().unwrap()]).unwrap();
    let mut files = fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path());
    let packed = files.find(|path| path.extension().is_some_and(|end| end == "tgz")).unwrap();
    let done = Command::new("tar").args(["-xzf"]).arg(&packed).arg("-C").arg(home).status().unwrap();
    assert!(done.success());
    home.join("peerpod")
}

/// A user of the packaged chart has no clone: the values of every provider, Kata's files and the custom resources are in
/// the package, and not as links.
#[test]
fn the_package_is_complete() {
    let home = Home::new("package");
    let package = unpacked(&home.0);
    let mut shipped = BTreeSet::new();
    for (name, values) in providers().into_iter().filter(|(name, _)| name != "fake") {
        let file = package.join(format!("files/providers/{name}.yaml"));
        let text = fs::read_to_string(&file).unwrap_or_else(|why| panic!("{}: {why}", file.display()));
        assert_eq!(text, fs::read_to_string(values).unwrap(), "{name}");
        let words =
            ["template", "x", package.to_str().unwrap(), "-f", file.to_str().unwrap(), "-n", NAMESPACE];
        let all = helm(&home.0, &words).unwrap();
        assert!(all.contains(&format!("kind: {name}")), "{name}");
        shipped.insert(format!("{name}.yaml"));
    }
    let names = |folder: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(package.join(folder)).unwrap().map(|entry| entry.unwrap());
        let regular = entries.inspect(|entry| assert!(entry.file_type().unwrap().is_file(), "{entry:?}"));
        regular.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(names("files/providers"), shipped);
    assert!(names("files/kata").contains("kata-deploy.yaml"));
    assert_eq!(names("crds").len(), 3);
    for file in ["README.md", "values.schema.json", "templates/NOTES.txt"] {
        assert!(package.join(file).is_file(), "{file}");
    }
}

/// Renders the values with their comments, one row each. A comment belongs to the key below it.
fn values_table() -> String {
    let text = fs::read_to_string(project("deploy/chart/values.yaml")).unwrap();
    let defaults: Value = serde_yaml::from_str(&text).unwrap();
    let (mut rows, mut comment, mut path) = (Vec::new(), String::new(), Vec::<(usize, String)>::new());
    for line in text.lines() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        if let Some(words) = trimmed.strip_prefix("# ") {
            comment = format!("{comment}{}{words}", if comment.is_empty() { "" } else { " " });
            continue;
        }
        let Some((key, _)) = trimmed.split_once(':').filter(|(key, _)| !key.contains(['-', ' ', '{'])) else {
            comment.clear();
            continue;
        };
        path.retain(|(at, _)| *at < indent);
        path.push((indent, key.to_owned()));
        let keys = path.iter().map(|(_, key)| key.as_str()).collect::<Vec<_>>();
        let at = keys.iter().fold(&defaults, |value, key| &value[*key]);
        let is_section = at.as_object().is_some_and(|object| !object.is_empty());
        if !at.is_null() && (!is_section || !comment.is_empty()) {
            let default = if is_section { String::new() } else { format!("`{at}`") };
            rows.push([
                format!("`{}`", keys.join(".")),
                default,
                std::mem::take(&mut comment).replace('|', "\\|").replace('<', "&lt;"),
            ]);
        }
        comment.clear();
    }
    let rows = rows.iter().map(|[key, default, meaning]| format!("| {key} | {default} | {meaning} |\n"));
    format!("| Value | Default | Meaning |\n|---|---|---|\n{}", rows.collect::<String>())
}

#[test]
fn documented_values_of_the_chart_are_up_to_date() {
    let table = values_table();
    for key in ["image.repository", "node.appArmorProfile", "relay.updateStrategy", "test.image"] {
        assert!(table.contains(&format!("| `{key}` | ")), "{key} in {table}");
    }
    reference::section("../deploy/chart/README.md", "values", &table).unwrap();
}

#[test]
fn every_role_takes_labels_variables_affinity_and_profiles() {
    let home = Home::new("roles");
    for role in ["node", "relay", "webhook", "controller"] {
        let set = json!({role: {
            "podLabels": {"team": "a"},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "affinity": {"nodeAffinity": {}},
            "appArmorProfile": {"type": "Localhost", "localhostProfile": "peerpod"},
            "seLinuxOptions": {"type": "spc_t"},
        }});
        let file = home.0.join(format!("{role}.json"));
        fs::write(&file, set.to_string()).unwrap();
        let all = render(&home.0, &["-f", file.to_str().unwrap(), "--no-hooks"]).unwrap();
        for (name, spec) in pod_templates(&all) {
            let chosen = name == format!("peerpod-{role}");
            let variables = spec["containers"][0]["env"].to_string();
            let security = &spec["securityContext"];
            assert_eq!(variables.contains("HTTPS_PROXY"), chosen, "{role}: {name}");
            assert_eq!(spec["affinity"] == json!({"nodeAffinity": {}}), chosen, "{role}: {name}");
            assert_eq!(
                security["appArmorProfile"]["localhostProfile"] == "peerpod",
                chosen,
                "{role}: {name}"
            );
            assert_eq!(security["seLinuxOptions"]["type"] == "spc_t", chosen, "{role}: {name}");
        }
        let kind = if ["node", "relay"].contains(&role) { "DaemonSet" } else { "Deployment" };
        let labels = &object(&all, kind, &format!("peerpod-{role}")).unwrap()["spec"]["template"]["metadata"];
        assert_eq!(labels["labels"]["team"], "a", "{role}");
    }
}

#[test]
fn an_older_kubernetes_is_enough_without_the_admission_policy() {
    let home = Home::new("floor");
    let on = |version: &str, more: &[&str]| render(&home.0, &[&["--kube-version", version], more].concat());
    let off = ["--set", "admissionPolicy.enabled=false"];
    on("1.32.0", &[]).unwrap();
    let why = on("1.31.9", &[]).unwrap_err().to_string();
    assert!(why.contains("admissionPolicy.enabled") && why.contains("1.31.9"), "{why}");
    on("1.31.9", &off).unwrap();
    assert!(on("1.30.0", &off).is_err());
}

/// OpenShift permits each role on the node exactly the rights that its pods ask for.
#[test]
fn openshift_gets_a_constraint_for_each_role_on_the_node() {
    let home = Home::new("openshift");
    let plain = render(&home.0, &[]).unwrap();
    assert!(plain.iter().all(|object| object["kind"] != "SecurityContextConstraints"));
    let all = render(&home.0, &["--api-versions", "security.openshift.io/v1"]).unwrap();
    for role in ["node", "relay"] {
        let name = format!("peerpod-{role}");
        let constraint = object(&all, "SecurityContextConstraints", &name).unwrap();
        let pod = &object(&all, "DaemonSet", &name).unwrap()["spec"]["template"]["spec"];
        let wanted = &pod["containers"][0]["securityContext"]["capabilities"]["add"];
        let wanted = if wanted.is_null() { json!([]) } else { wanted.clone() };
        assert_eq!(constraint["allowedCapabilities"], wanted, "{role}");
        assert_eq!(constraint["allowHostNetwork"], pod["hostNetwork"], "{role}");
        assert_eq!(constraint["allowPrivilegedContainer"], false, "{role}");
        let account = pod["serviceAccountName"].as_str().unwrap();
        assert_eq!(
            constraint["users"],
            json!([format!("system:serviceaccount:{NAMESPACE}:{account}")]),
            "{role}"
        );
        let permitted: BTreeSet<&str> =
            constraint["volumes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        for volume in pod["volumes"].as_array().unwrap() {
            let kinds = volume.as_object().unwrap().keys().filter(|key| *key != "name");
            assert!(kinds.clone().all(|kind| permitted.contains(kind.as_str())), "{role}: {volume}");
        }
    }
}

/// kata-deploy installs the shim that Peerpod answers, and leaves the RuntimeClass to this chart.
#[test]
fn katas_own_chart_gets_values_for_this_one() {
    let values: Value =
        serde_yaml::from_str(&fs::read_to_string(project("deploy/kata/kata-deploy.yaml")).unwrap()).unwrap();
    let shim = &values["shims"]["remote"];
    assert_eq!(values["runtimeClasses"]["enabled"], false, "two releases cannot own one class");
    assert_eq!(shim["containerd"]["forceGuestPull"], true);
    let home = Home::new("kata-deploy");
    let all = render(&home.0, &[]).unwrap();
    let class = object(&all, "RuntimeClass", "kata-remote").unwrap();
    assert_eq!(class["handler"], "kata-remote", "kata-deploy's handler of the shim remote");
    let shipped = fs::read_to_string(project("deploy/kata/configuration-remote-go.toml")).unwrap();
    let shipped: toml::Table = shipped.parse().unwrap();
    let permitted = serde_json::to_value(&shipped["hypervisor"]["remote"]["enable_annotations"]).unwrap();
    assert_eq!(shim["allowedHypervisorAnnotations"], permitted);
}

/// The chart takes the values that `peerpod config convert-caa --helm` makes.
#[test]
fn a_cloud_api_adaptors_settings_become_values() {
    let home = Home::new("caa");
    let (caa, mine) = (home.0.join("caa.yaml"), home.0.join("mine.yaml"));
    let manifests = json!({"kind": "List", "items": [
        {"kind": "ConfigMap", "data": {"CLOUD_PROVIDER": "azure", "AZURE_REGION": "westeurope", "VXLAN_PORT": "9000",
            "REMOTE_HYPERVISOR_ENDPOINT": "/run/peerpod/hypervisor.sock"}},
        {"kind": "Secret", "stringData": {"AZURE_CLIENT_SECRET": "hush"}},
    ]});
    fs::write(&caa, manifests.to_string()).unwrap();
    let mut command = Command::new(program("peerpod").unwrap());
    let done =
        command.args(["config", "convert-caa", "--helm", "--out"]).arg(&mine).arg(&caa).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let all = render(&home.0, &["-f", mine.to_str().unwrap()]).unwrap();
    let config =
        object(&all, "ConfigMap", "peerpod-config").unwrap()["data"]["peerpod.yaml"].as_str().unwrap();
    assert!(config.contains("region: westeurope") && config.contains("port: 9000"), "{config}");
    assert!(!config.contains("hush"), "{config}");
    let secret = &object(&all, "Secret", "peer-pods-secret").unwrap()["stringData"];
    assert_eq!(secret, &json!({"PEERPOD_PROVIDER_AZURE_CLIENT_SECRET": "hush"}));
}

/// Makes the parts of a release that need no build: chart, notes and checksums.
#[test]
fn a_release_has_the_chart_its_notes_and_checksums() {
    let home = Home::new("release");
    let out = home.0.join("files");
    let release = |tag: &str| {
        let mut command = Command::new(project("scripts/release"));
        command.args(["chart", "notes", "sums"]).env("OUT", &out).env("HOME", &home.0).env("TAG", tag);
        command.env("HELM", helm_program().unwrap()).env_remove("REGISTRY").env_remove("COSIGN_KEY");
        command.output().unwrap()
    };
    let refused = release("v99.0.0");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("v99.0.0"), "{said}");
    let version = env!("CARGO_PKG_VERSION");
    let done = release(&format!("v{version}"));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mut check = Command::new("sha256sum");
    let checked = check.args(["--check", "--strict", "SHA256SUMS"]).current_dir(&out).output().unwrap();
    assert!(checked.status.success(), "{checked:?}");
    let sums = fs::read_to_string(out.join("SHA256SUMS")).unwrap();
    let chart = format!("peerpod-{version}.tgz");
    for file in [chart.as_str(), "notes.md"] {
        assert!(sums.contains(&format!("  {file}\n")), "{sums}");
    }
    let shown = helm(&home.0, &["show", "chart", out.join(&chart).to_str().unwrap()]).unwrap();
    assert!(shown.contains(&format!("version: {version}")), "{shown}");
    let notes = fs::read_to_string(out.join("notes.md")).unwrap();
    let changes = fs::read_to_string(project("CHANGELOG.md")).unwrap();
    assert!(!notes.contains("\n## ") && changes.contains(notes.trim()) && notes.contains("###"), "{notes}");
}

/// A release whose programs are played by `recorder.sh`.
struct Release(Home);

impl Release {
    fn new() -> Release {
        let home = Home::new("pushed");
        let built = home.0.join("target/dist/rootfs/usr/bin");
        for folder in [&built, &home.0.join("bin"), &home.0.join("files")] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(home.0.join("target/dist/sbom.cdx.json"), "{}").unwrap();
        for name in ["peerpod-node", "peerpod-relay", "peerpod-cluster", "peerpod-csi"] {
            fs::write(built.join(name), name).unwrap();
        }
        let recorder = project("tests/kube/tests/cluster/recorder.sh").canonicalize().unwrap();
        let played = ["make", "docker", "cosign", "helm"].map(|name| home.0.join("bin").join(name));
        for path in played.iter().chain([&built.join("peerpod")]) {
            std::os::unix::fs::symlink(&recorder, path).unwrap();
        }
        Release(home)
    }

    fn file(&self, name: &str) -> String {
        self.0.0.join("files").join(name).display().to_string()
    }

    /// Makes these parts. Returns the calls, or the error.
    fn make(&self, parts: &[&str], variables: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let (home, record) = (&self.0.0, self.0.0.join("record"));
        fs::write(&record, "").unwrap();
        let path = std::env::join_paths(
            std::iter::once(home.join("bin"))
                .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
        );
        let mut command = Command::new(project("scripts/release"));
        command.args(parts).env("OUT", home.join("files")).env("CARGO_TARGET_DIR", home.join("target"));
        for name in ["docker", "cosign", "helm"] {
            command.env(name.to_uppercase(), home.join("bin").join(name));
        }
        command.env("PATH", path.unwrap()).env("RECORD", &record).env("PEERPOD", program("peerpod").unwrap());
        for name in ["REGISTRY", "TAG", "COSIGN_KEY"] {
            command.env_remove(name);
        }
        let done = command.envs(variables.iter().copied()).output().unwrap();
        if !done.status.success() {
            return Err(String::from_utf8_lossy(&done.stderr).into_owned());
        }
        Ok(fs::read_to_string(&record).unwrap().lines().map(str::to_owned).collect())
    }
}

/// The images of both architectures get one name. Image, chart and checksums are signed, the first two by their digest.
#[test]
fn a_release_is_pushed_and_signed_by_its_digests() {
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    let release = Release::new();
    let (own, other) = if cfg!(target_arch = "x86_64") { ("amd64", "arm64") } else { ("arm64", "amd64") };
    fs::write(release.file(&format!("peerpod-{VERSION}-{other}-image.tar.gz")), "").unwrap();
    let (registry, key) = (("REGISTRY", "r.example/p"), ("COSIGN_KEY", "k.key"));
    let image = format!("r.example/p/peerpod:{VERSION}");
    let mut wanted = vec![
        "make dist CLOUDS=1".to_owned(),
        format!("docker build -f deploy/Dockerfile -t peerpod:{VERSION}-{own} ."),
        format!("docker save peerpod:{VERSION}-{own}"),
    ];
    for arch in ["amd64", "arm64"] {
        let archive = release.file(&format!("peerpod-{VERSION}-{arch}-image.tar.gz"));
        wanted.push(format!("docker load -i {archive}"));
        wanted.push(format!("docker tag peerpod:{VERSION}-{arch} {image}-{arch}"));
        wanted.push(format!("docker push {image}-{arch}"));
    }
    let (sums, bundle) = (release.file("SHA256SUMS"), release.file("SHA256SUMS.sigstore.json"));
    let chart = release.file(&format!("peerpod-{VERSION}.tgz"));
    let sign = "cosign sign --yes --recursive --key k.key r.example/p";
    wanted.extend([
        format!("docker buildx imagetools create -t {image} {image}-amd64 {image}-arm64"),
        format!("docker buildx imagetools inspect {image} --format {{{{.Manifest.Digest}}}}"),
        format!("{sign}/peerpod@sha256:of-the-image"),
        format!("helm push {chart} oci://r.example/p/charts"),
        format!("{sign}/charts/peerpod@sha256:of-the-chart"),
        format!("cosign sign-blob --yes --key k.key --bundle {bundle} {sums}"),
    ]);
    assert_eq!(release.make(&["tree", "image", "push", "sums"], &[registry, key]).unwrap(), wanted);

    let archive = release.file(&format!("peerpod-cli-{VERSION}-linux-{own}.tar.gz"));
    let packed = Command::new("tar").args(["-tzf", &archive]).output().unwrap();
    let packed = String::from_utf8(packed.stdout).unwrap();
    let packed: BTreeSet<&str> = packed.lines().collect();
    for file in ["peerpod", "kubectl_complete-peerpod", "completions/peerpod.bash", "man/peerpod-check.1"] {
        assert!(packed.contains(file), "{file} in {packed:?}");
    }

    let unsigned = release.make(&["push", "sums"], &[registry]).unwrap();
    assert!(unsigned.len() == 9 && !unsigned.iter().any(|call| call.starts_with("cosign")), "{unsigned:?}");
    assert_eq!(release.make(&["push"], &[key]).unwrap(), Vec::<String>::new(), "there is no registry");
    let why = release.make(&["push"], &[registry, key, ("CHART_DIGEST", "")]).unwrap_err();
    assert!(why.contains("helm named no digest"), "{why}");
}
