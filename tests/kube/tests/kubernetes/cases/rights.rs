//! Rights and resources of pods, and pods that are refused.

use std::io::Write;
use std::{fs, thread};

use anyhow::{Context, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;

use super::{Case, NOTE, SLEEP};
use crate::images_common::{LayerBuilder, Packing};
use crate::node::busybox;

/// Bytes of the file in a large image.
const LARGE_IMAGE: usize = 1 << 30;

pub(crate) fn no_new_privileges(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "containers: [{name: c, image: IMAGE, securityContext: {allowPrivilegeEscalation: false, runAsUser: 1000},
        command: [sh, -c, 'grep NoNewPrivs /proc/self/status']}]";
    case.prints(spec, "NoNewPrivs:\t1\n")
}

pub(crate) fn privileged(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "containers: [{name: c, image: IMAGE, securityContext: {privileged: true},
        command: [sh, -c, 'mkdir /m && mount -t tmpfs none /m && echo mounted']}]";
    case.prints(spec, "mounted\n")
}

pub(crate) fn root_refused(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "securityContext: {runAsNonRoot: true}, containers: [{name: c, image: IMAGE, command: [sleep, '9']}]",
    )?;
    case.waiting("p", &["CreateContainerConfigError"], "runAsNonRoot")
}

pub(crate) fn seccomp(case: &Case<'_>) -> anyhow::Result<()> {
    let container = |name: &str, profile: &str| {
        format!(
            "{{name: {name}, image: IMAGE, securityContext: {{seccompProfile: {{type: {profile}}}}},
               command: [sh, -c, 'PAUSE; grep Seccomp /proc/self/status']}}"
        )
    };
    let containers = [container("with", "RuntimeDefault"), container("without", "Unconfined")].join(", ");
    case.pod("p", &format!("restartPolicy: Never, containers: [{containers}]"))?;
    case.phase("p", "Succeeded")?;
    let [with, without] = ["with", "without"].map(|name| case.kubectl(&["logs", "p", "-c", name]));
    let (with, without) = (with?, without?);
    // A VM of the local provider may have a filter of the test (see `agent`), which both containers inherit.
    ensure!(with.contains("Seccomp:") && with == without, "with a profile {with:?}, without {without:?}");
    println!(
        "{NOTE}seccomp: RuntimeDefault is not applied, a container without a profile has the same filters"
    );
    Ok(())
}

pub(crate) fn limits(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "containers: [{name: c, image: IMAGE, resources: {limits: {cpu: 500m, memory: 64Mi}},
        command: [sh, -c, 'cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null;
          cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cut -d\" \" -f1 /sys/fs/cgroup/cpu.max']}]";
    case.prints(spec, "67108864\n50000\n")
}

pub(crate) fn host_path(case: &Case<'_>) -> anyhow::Result<()> {
    // The VM has a copy of the node's folder.
    let folder = case.node.folder().join(format!("path-{}", case.namespace));
    fs::create_dir(&folder)?;
    fs::write(folder.join("f"), "of the node\n")?;
    case.pod(
        "p",
        &format!("volumes: [{{name: v, hostPath: {{path: {}, type: Directory}}}}],
         containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}'], volumeMounts: [{{name: v, mountPath: /v}}]}}]",
         folder.display()),
    )?;
    case.ready("p")?;
    let copied = case.exec("p", &["cat", "/v/f"])?;
    ensure!(copied == "of the node\n", "the pod reads {copied:?}");
    case.exec("p", &["sh", "-c", "echo of the pod >/v/f; echo new >/v/g"])?;
    let kept = fs::read_to_string(folder.join("f"))?;
    ensure!(kept == "of the node\n" && !folder.join("g").exists(), "a write reached the node: {kept:?}");
    fs::write(folder.join("f"), "later\n")?;
    let kept = case.exec("p", &["cat", "/v/f", "/v/g"])?;
    ensure!(kept == "of the pod\nnew\n", "the pod reads {kept:?} after a write on the node");
    println!("{NOTE}hostPath: the pod has a copy; its writes do not reach the node, nor the node's the pod");
    Ok(())
}

pub(crate) fn host_network(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod("p", "hostNetwork: true, containers: [{name: c, image: IMAGE, command: [sleep, '9']}]")?;
    case.event("FailedCreatePodSandBox", "hostNetwork: true")
}

pub(crate) fn host_pid(case: &Case<'_>) -> anyhow::Result<()> {
    // Without the webhook, which refuses it, the pod runs. Its VM has no process of the node.
    let spec = "hostPID: true, containers: [{name: c, image: IMAGE, command: [sh, -c, 'ps | grep -c [k]ube-server; true']}]";
    case.prints(spec, "0\n")
}

/// Kata's agent of `KATA_DIR` enforces no policy, so a pod with one must not run. Other initdata does not keep a pod.
pub(crate) fn unenforced_policy(case: &Case<'_>) -> anyhow::Result<()> {
    let pod = |name: &str, file: &str| -> anyhow::Result<()> {
        let initdata = format!("algorithm = \"sha256\"\nversion = \"0.1.0\"\n[data]\n{file}\n");
        let mut packed = GzEncoder::new(Vec::new(), Compression::default());
        packed.write_all(initdata.as_bytes())?;
        let initdata = BASE64_STANDARD.encode(packed.finish()?);
        case.apply(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, annotations: {{
               io.katacontainers.config.hypervisor.cc_init_data: '{initdata}'}}}}, spec: {{runtimeClassName: kata-remote,
               terminationGracePeriodSeconds: 5, containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}']}}]}}}}"
        ))
    };
    pod("data", "\"notes.toml\" = \"x\"")?;
    pod("policy", "\"policy.rego\" = \"package agent_policy\\ndefault ExecProcessRequest := false\"")?;
    case.ready("data")?;
    case.event("FailedCreatePodSandBox", "the kata-agent refuses the policy.rego of the pod's initdata")?;
    ensure!(!case.is_ready("policy")?, "the pod runs without its policy");
    Ok(())
}

pub(crate) fn app_armor(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "containers: [{name: c, image: IMAGE, command: [sh, -c, 'cat /proc/self/attr/current'],
           securityContext: {appArmorProfile: {type: RuntimeDefault}}}]";
    let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled").unwrap_or_default();
    if enabled.starts_with('Y') {
        case.prints(spec, "unconfined\n")?;
        println!("{NOTE}AppArmor: RuntimeDefault is not applied");
        return Ok(());
    }
    case.pod("p", &format!("restartPolicy: Never, {spec}"))?;
    case.phase("p", "Failed")?;
    let message = case.get("pod/p")?["status"]["message"].as_str().unwrap_or_default().to_owned();
    ensure!(message.contains("AppArmor"), "{message:?}");
    println!("{NOTE}AppArmor: the kernel has none, kubelet refuses the pod: {message}");
    Ok(())
}

pub(crate) fn summary(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("p", "Always", "while :; do :; done")?;
    case.ready("p")?;
    let path = format!("/api/v1/nodes/{}/proxy/stats/summary", peerpod_test_kube::NODE);
    case.until("the summary has the processor time and memory of the pod and its container", || {
        // containerd fails while any container of the node is being made.
        let Ok(summary) = case.node.read(&path) else { return Ok(None) };
        let mut pods = summary["pods"].as_array().into_iter().flatten();
        let Some(pod) = pods.find(|pod| pod["podRef"]["namespace"] == case.namespace) else {
            return Ok(None);
        };
        let is_counted = |one: &Value| {
            one["cpu"]["usageCoreNanoSeconds"].as_u64().is_some_and(|time| time > 0)
                && one["memory"]["workingSetBytes"].as_u64().is_some_and(|bytes| bytes > 0)
        };
        Ok((is_counted(pod) && is_counted(&pod["containers"][0])).then_some(()))
    })
}

pub(crate) fn resource_metrics(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("p", "Always", "while :; do :; done")?;
    case.ready("p")?;
    let path = format!("/api/v1/nodes/{}/proxy/metrics/resource", peerpod_test_kube::NODE);
    let namespace = format!("namespace=\"{}\"", case.namespace);
    case.until("the metrics have the container", || {
        let Ok(metrics) = case.kubectl(&["get", "--raw", &path]) else { return Ok(None) };
        let has =
            |name: &str| metrics.lines().any(|line| line.starts_with(name) && line.contains(&namespace));
        let names = [
            "container_cpu_usage_seconds_total{",
            "container_memory_working_set_bytes{",
            "pod_cpu_usage_seconds_total{",
            "pod_memory_working_set_bytes{",
        ];
        Ok(names.iter().all(|name| has(name)).then_some(()))
    })
}

pub(crate) fn top(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("p", "Always", "x=$(head -c 20000000 /dev/zero | tr '\\0' x); while :; do :; done")?;
    case.ready("p")?;
    case.until("a processor's use and memory of the pod", || {
        let Ok(line) = case.kubectl(&["top", "pod", "p", "--no-headers"]) else { return Ok(None) };
        let mut numbers = line
            .split_whitespace()
            .skip(1)
            .map(|word| word.trim_end_matches(char::is_alphabetic).parse::<u32>().unwrap_or_default());
        Ok(numbers.all(|number| number > 0).then_some(()))
    })?;
    case.kubectl(&["top", "node", peerpod_test_kube::NODE]).map(drop)
}

pub(crate) fn overhead(case: &Case<'_>) -> anyhow::Result<()> {
    let class = format!("kata-{}", case.namespace);
    case.apply(&format!(
        "{{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {{name: {class}}}, handler: kata-remote,
           overhead: {{podFixed: {{cpu: 300m, memory: 64Mi}}}}}}"
    ))?;
    let pod = |name: &str, cpu: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{runtimeClassName: {class}, terminationGracePeriodSeconds: 1,
               containers: [{{name: c, image: IMAGE, command: [sleep, '1000'], resources: {{requests: {{cpu: {cpu}}}}}}}]}}}}"
        )
    };
    case.until("the class counts for new pods", || Ok(case.apply(&pod("small", "100m")).ok()))?;
    case.ready("small")?;
    let seen = case.get("pod/small")?["spec"]["overhead"]["cpu"].clone();
    ensure!(seen == "300m", "{seen}");
    // Its request fits the node's processors, its request with the overhead does not.
    let node = case.node.read(&format!("/api/v1/nodes/{}", peerpod_test_kube::NODE))?;
    let processors: u32 = node["status"]["allocatable"]["cpu"].as_str().context("cpu")?.parse()?;
    case.apply(&pod("large", &format!("{}m", processors * 1000 - 200)))?;
    let cleaned = case.event("FailedScheduling", "Insufficient cpu");
    case.kubectl(&["delete", "runtimeclass", &class])?;
    cleaned
}

pub(crate) fn capacity(case: &Case<'_>) -> anyhow::Result<()> {
    // The extended resource is set on the node as the daemon sets it.
    let resource = format!("example.org/{}", case.namespace);
    let patch = format!(
        "[{{\"op\":\"add\",\"path\":\"/status/capacity/{}\",\"value\":\"2\"}}]",
        resource.replace('/', "~1")
    );
    case.kubectl(&[
        "patch",
        "node",
        peerpod_test_kube::NODE,
        "--subresource",
        "status",
        "--type=json",
        "-p",
        &patch,
    ])?;
    let node = format!("/api/v1/nodes/{}", peerpod_test_kube::NODE);
    case.until("kubelet offers the resource", || {
        Ok((case.node.read(&node)?["status"]["allocatable"][&resource] == "2").then_some(()))
    })?;
    for name in ["one", "two", "three"] {
        case.pod(
            name,
            &format!("containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}'], resources: {{limits: {{{resource}: 1}}}}}}]"),
        )?;
    }
    case.event("FailedScheduling", &format!("Insufficient {resource}"))?;
    case.ready("one")?;
    case.ready("two")?;
    case.kubectl(&["delete", "pod", "one", "--timeout=90s"])?;
    case.ready("three")
}

pub(crate) fn many_containers(case: &Case<'_>) -> anyhow::Result<()> {
    let containers: Vec<_> = (0..6)
        .map(|n| format!("{{name: c{n}, image: IMAGE, command: [sh, -c, 'PAUSE; echo {n}']}}"))
        .collect();
    case.pod("p", &format!("restartPolicy: Never, containers: [{}]", containers.join(", ")))?;
    case.phase("p", "Succeeded")?;
    thread::scope(|scope| {
        let logs: Vec<_> = (0..6)
            .map(|n| scope.spawn(move || (n, case.kubectl(&["logs", "p", "-c", &format!("c{n}")]))))
            .collect();
        for one in logs {
            let (n, log) = one.join().map_err(|_| anyhow::anyhow!("panic"))?;
            let log = log?;
            ensure!(log == format!("{n}\n"), "{log:?}");
        }
        Ok(())
    })
}

pub(crate) fn never_pulled(case: &Case<'_>) -> anyhow::Result<()> {
    let image = super::image().replace("busybox", "other");
    case.pod("p", &format!("containers: [{{name: c, image: '{image}', imagePullPolicy: Never}}]"))?;
    case.waiting("p", &["ErrImageNeverPull"], "")
}

pub(crate) fn digest(case: &Case<'_>) -> anyhow::Result<()> {
    let image = super::image().replace(":1", &format!("@{}", case.node.digest));
    case.prints(
        &format!("containers: [{{name: c, image: '{image}', command: [sh, -c, 'echo runs']}}]"),
        "runs\n",
    )
}

pub(crate) fn image_config(case: &Case<'_>) -> anyhow::Result<()> {
    let image = super::image().replace("busybox", "configured");
    case.prints(
        &format!("containers: [{{name: c, image: '{image}', args: [argument]}}]"),
        "value /tmp 1000 argument\n",
    )
}

pub(crate) fn always_pulled(case: &Case<'_>) -> anyhow::Result<()> {
    case.node.store_image("always:1", &[busybox()]);
    let image = super::image().replace("busybox", "always");
    // Each VM asks the registry, too.
    let asked = |line: &&str| line.contains("/v2/always/manifests/") && line.contains("containerd/");
    let pull = |pod: &str| -> anyhow::Result<usize> {
        case.pod(
            pod,
            &format!(
                "restartPolicy: Never, containers: [{{name: c, image: '{image}', imagePullPolicy: Always, command: ['true']}}]"
            ),
        )?;
        case.phase(pod, "Succeeded")?;
        Ok(case.node.registry_log().lines().filter(asked).count())
    };
    let (first, second) = (pull("p")?, pull("q")?);
    ensure!(
        first > 0 && second > first,
        "the node asked {first} times for the manifest, then {second} times"
    );
    Ok(())
}

pub(crate) fn long_log(case: &Case<'_>) -> anyhow::Result<()> {
    // Logs are on the node, so kubelet sees them.
    case.pod(
        "p",
        "containers: [{name: c, image: IMAGE, command: [sh, -c, 'yes | head -c 8000000; sleep 1000'],
           resources: {limits: {ephemeral-storage: 2Mi}}}]",
    )?;
    case.phase("p", "Failed")?;
    let status = case.get("pod/p")?["status"].clone();
    let message = status["message"].as_str().unwrap_or_default();
    ensure!(status["reason"] == "Evicted" && message.contains("ephemeral"), "{status}");
    case.until("its VM is gone", || Ok((case.vms()? == 0).then_some(())))
}

pub(crate) fn large_image(case: &Case<'_>) -> anyhow::Result<()> {
    let large = LayerBuilder::new().file("large", 0o644, &vec![7; LARGE_IMAGE]).build(Packing::Plain);
    let registry = case.node.second_registry("large:1", &[busybox(), large], None)?;
    let name = format!("{}/large:1", registry.address);
    case.pod(
        "p",
        &format!(
            "restartPolicy: OnFailure, containers: [{{name: c, image: '{name}', command: [wc, -c, /large]}}]"
        ),
    )?;
    // The VM pulls it after the node's container runtime did. The other layer has less than 2 MiB.
    let parts = [0, 1].map(|more| format!(" of {} MiB", (LARGE_IMAGE >> 20) + more));
    case.until("the relay's log shows the progress", || {
        let log = case.node.log("relay")?;
        let mut lines = log.lines().filter(|line| parts.iter().any(|part| line.contains(part)));
        Ok(lines.any(|line| line.contains(case.namespace)).then_some(()))
    })?;
    case.phase("p", "Succeeded")?;
    let log = case.kubectl(&["logs", "p"])?;
    ensure!(log == format!("{LARGE_IMAGE} /large\n"), "{log:?}");
    Ok(())
}
