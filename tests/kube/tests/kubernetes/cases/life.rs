//! The life of pods and of what makes them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use anyhow::{Context, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{Case, NOTE, PAUSE, SLEEP};

pub(crate) fn run_and_logs(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("p", "Never", "PAUSE; echo out; echo err >&2")?;
    case.phase("p", "Succeeded")?;
    let log = case.kubectl(&["logs", "p"])?;
    ensure!(log == "out\nerr\n" || log == "err\nout\n", "{log:?}");
    Ok(())
}

pub(crate) fn follow(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("p", "Never", "for n in $(seq 1 200); do echo $n; sleep 0.01; done")?;
    case.until("the container starts", || Ok(case.kubectl(&["logs", "p"]).ok().map(drop)))?;
    let log = case.kubectl(&["logs", "-f", "p"])?;
    let expected: String = (1..=200).map(|n| format!("{n}\n")).collect();
    ensure!(log == expected, "{log:?}");
    Ok(())
}

pub(crate) fn exec(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    for (script, code) in [("true", 0), ("exit 3", 3), ("kill -9 $$", 137)] {
        let done = case.kubectl_with(&["exec", "p", "--", "sh", "-c", script], b"")?;
        ensure!(done.status.code() == Some(code), "{script}: {done:?}");
    }
    let done = case.kubectl_with(&["exec", "p", "--", "absent"], b"")?;
    ensure!(!done.status.success(), "{done:?}");
    let output = case.exec("p", &["sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x"])?;
    ensure!(output.len() == 1_000_000 && output.bytes().all(|byte| byte == b'x'), "{} bytes", output.len());
    Ok(())
}

pub(crate) fn exec_stdin(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    let input: Vec<u8> = (0..3_000_000u32).flat_map(|n| [(n % 251) as u8]).collect();
    let done = case.kubectl_with(&["exec", "-i", "p", "--", "cat"], &input)?;
    ensure!(done.status.success() && done.stdout == input, "{} bytes came back", done.stdout.len());
    Ok(())
}

pub(crate) fn exec_many(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    thread::scope(|scope| {
        let all: Vec<_> = (0..20)
            .map(|n: u32| scope.spawn(move || (case.exec("p", &["echo", &n.to_string()]), n)))
            .collect();
        for one in all {
            let (output, n) = one.join().map_err(|_| anyhow::anyhow!("panic"))?;
            let output = output?;
            ensure!(output == format!("{n}\n"), "{output:?}");
        }
        Ok(())
    })
}

pub(crate) fn copy(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    copy_bytes(case, "p", 3_000_000).map(drop)
}

pub(crate) fn large_copy(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    case.apply(&format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: plain}}, spec: {{terminationGracePeriodSeconds: 1,
           containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}']}}]}}}}"
    ))?;
    case.ready("plain")?;
    let [there, back] = copy_bytes(case, "p", 200_000_000)?;
    println!("{NOTE}cp of 200 MB: {there:.0} MB/s there, {back:.0} MB/s back");
    // The pod without a VM is for comparison: kubelet and runc can break off its copy.
    match copy_bytes(case, "plain", 200_000_000) {
        Ok([there, back]) => println!("{NOTE}without a VM: {there:.0} MB/s there, {back:.0} MB/s back"),
        Err(error) => println!("{NOTE}without a VM: {error:#}"),
    }
    Ok(())
}

/// Copies bytes into a pod and back, and compares them. Returns both rates in MB/s.
fn copy_bytes(case: &Case<'_>, pod: &str, count: u32) -> anyhow::Result<[f64; 2]> {
    let folder = std::env::temp_dir().join(case.namespace);
    std::fs::create_dir(&folder)?;
    let (from, back) = (folder.join("from"), folder.join("back"));
    let bytes: Vec<u8> = (0..count).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&from, &bytes)?;
    let in_pod = format!("{pod}:/tmp/file");
    let rate = |from: &str, to: &str| -> anyhow::Result<f64> {
        let began = Instant::now();
        // kubelet may reset the connection with the last bytes on their way, also that of a pod without a VM.
        case.kubectl(&["cp", "--retries=5", from, to])?;
        Ok(f64::from(count) / 1e6 / began.elapsed().as_secs_f64())
    };
    let rates = [rate(&from.to_string_lossy(), &in_pod)?, rate(&in_pod, &back.to_string_lossy())?];
    ensure!(std::fs::read(&back)? == bytes, "other bytes came back");
    std::fs::remove_dir_all(&folder)?;
    Ok(rates)
}

pub(crate) fn evicted(case: &Case<'_>) -> anyhow::Result<()> {
    case.script(
        "p",
        "Always",
        "trap 'echo terminated; exit' TERM; echo started; while :; do sleep 0.1; done",
    )?;
    case.ready("p")?;
    let mut command = case.node.kubectl_command(&["-n", case.namespace, "logs", "-f", "p"])?;
    let reader = thread::spawn(move || command.output());
    let body = r#"{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"p"}}"#;
    let path = format!("/api/v1/namespaces/{}/pods/p/eviction", case.namespace);
    let done = case.kubectl_with(&["create", "--raw", &path, "-f", "-"], body.as_bytes())?;
    ensure!(done.status.success(), "{done:?}");
    case.kubectl(&["wait", "--for=delete", "pod/p", "--timeout=90s"])?;
    let output = reader.join().map_err(|_| anyhow::anyhow!("panic"))??;
    // As above, kubelet may add a line.
    ensure!(output.stdout.starts_with(b"started\nterminated\n"), "{output:?}");
    case.until("its VM is gone", || Ok((case.vms()? == 0).then_some(())))
}

pub(crate) fn graceful_end(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "containers: [{name: c, image: IMAGE,
           command: [sh, -c, 'trap \"echo terminated; exit\" TERM; echo started; while :; do sleep 0.1; done'],
           lifecycle: {preStop: {exec: {command: [sh, -c, 'echo prestop >/proc/1/fd/1']}}}}]",
    )?;
    case.ready("p")?;
    let mut command = case.node.kubectl_command(&["-n", case.namespace, "logs", "-f", "p"])?;
    let reader = thread::spawn(move || command.output());
    case.kubectl(&["delete", "pod", "p", "--timeout=90s"])?;
    let output = reader.join().map_err(|_| anyhow::anyhow!("panic"))??;
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    // kubelet may add a line of its own, because the container is removed before it looks at its state.
    ensure!(log.starts_with("started\nprestop\nterminated\n"), "{log:?}");
    Ok(())
}

pub(crate) fn restart(case: &Case<'_>) -> anyhow::Result<()> {
    // The second run goes on, because kubelet keeps one ended container.
    case.pod(
        "p",
        &format!(
            "volumes: [{{name: v, emptyDir: {{}}}}], containers: [{{name: c, image: IMAGE,
               volumeMounts: [{{name: v, mountPath: /v}}],
               command: [sh, -c, 'PAUSE; echo run; mkdir /v/first && exit 7; {SLEEP}']}}]"
        ),
    )?;
    let status = |pod: &Value| pod["status"]["containerStatuses"][0].clone();
    case.until("the container was restarted", || {
        let status = status(&case.get("pod/p")?);
        Ok((status["restartCount"] == 1 && status["ready"] == true).then_some(()))
    })?;
    let pod = case.get("pod/p")?;
    ensure!(status(&pod)["lastState"]["terminated"]["exitCode"] == 7, "{}", pod["status"]);
    let before = case.kubectl(&["logs", "p", "--previous"])?;
    ensure!(before.starts_with("run\n"), "{before:?}");
    let ours = case.vms()?;
    ensure!(ours == 1, "{ours} VMs");
    Ok(())
}

pub(crate) fn termination(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "restartPolicy: Never, containers: [
           {name: file, image: IMAGE, command: [sh, -c, 'echo -n from-file >/dev/termination-log; exit 4']},
           {name: log, image: IMAGE, terminationMessagePolicy: FallbackToLogsOnError, command: [sh, -c, 'PAUSE; echo from-log; exit 5']}]",
    )?;
    case.phase("p", "Failed")?;
    let pod = case.get("pod/p")?;
    let ended: Vec<_> = pod["status"]["containerStatuses"]
        .as_array()
        .context("containers")?
        .iter()
        .map(|one| &one["state"]["terminated"])
        .map(|ended| {
            (ended["exitCode"].as_i64(), ended["message"].as_str().unwrap_or_default().trim().to_owned())
        })
        .collect();
    ensure!(ended == [(Some(4), "from-file".to_owned()), (Some(5), "from-log".to_owned())], "{ended:?}");
    Ok(())
}

pub(crate) fn job(case: &Case<'_>) -> anyhow::Result<()> {
    case.apply(
        "{apiVersion: batch/v1, kind: Job, metadata: {name: j}, spec: {completions: 4, parallelism: 2, template: {spec:
           {runtimeClassName: kata-remote, restartPolicy: Never, containers: [{name: c, image: IMAGE, command: [echo, done]}]}}}}",
    )?;
    case.until("the job is complete", || Ok((case.get("job/j")?["status"]["succeeded"] == 4).then_some(())))
}

fn template(version: &str) -> String {
    format!(
        "{{metadata: {{labels: {{app: d}}}}, spec: {{runtimeClassName: kata-remote, terminationGracePeriodSeconds: 2,
           containers: [{{name: c, image: IMAGE, env: [{{name: VERSION, value: '{version}'}}], command: [sh, -c, '{SLEEP}']}}]}}}}"
    )
}

pub(crate) fn deployment(case: &Case<'_>) -> anyhow::Result<()> {
    for version in ["1", "2"] {
        case.apply(&format!(
            "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: d}}, spec: {{replicas: 2, selector: {{matchLabels: {{app: d}}}}, template: {}}}}}",
            template(version)
        ))?;
        case.kubectl(&["rollout", "status", "deployment/d", "--timeout=90s"])?;
        let seen = case.exec("deployment/d", &["sh", "-c", "echo $VERSION"])?;
        ensure!(seen.trim() == version, "{seen:?}");
    }
    Ok(())
}

pub(crate) fn stateful_set(case: &Case<'_>) -> anyhow::Result<()> {
    case.apply(&format!(
        "{{apiVersion: apps/v1, kind: StatefulSet, metadata: {{name: d}}, spec: {{serviceName: d, replicas: 2, selector: {{matchLabels: {{app: d}}}}, template: {}}}}}",
        template("1")
    ))?;
    case.kubectl(&["rollout", "status", "statefulset/d", "--timeout=90s"])?;
    let name = case.exec("d-1", &["hostname"])?;
    ensure!(name == "d-1\n", "{name:?}");
    Ok(())
}

pub(crate) fn daemon_set(case: &Case<'_>) -> anyhow::Result<()> {
    case.apply(&format!(
        "{{apiVersion: apps/v1, kind: DaemonSet, metadata: {{name: d}}, spec: {{selector: {{matchLabels: {{app: d}}}}, template: {}}}}}",
        template("1")
    ))?;
    case.kubectl(&["rollout", "status", "daemonset/d", "--timeout=90s"]).map(drop)
}

pub(crate) fn debug(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    let image = format!("--image={}", super::image());
    case.kubectl(&[
        "debug",
        "p",
        &image,
        "-c",
        "look",
        "--profile=general",
        "--",
        "sh",
        "-c",
        &format!("{PAUSE}; echo looked"),
    ])?;
    case.until("the ephemeral container's log", || {
        Ok(case.kubectl(&["logs", "p", "-c", "look"]).ok().filter(|log| log == "looked\n").map(drop))
    })
}

pub(crate) fn deadline(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        &format!(
            "activeDeadlineSeconds: 8, containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}']}}]"
        ),
    )?;
    case.phase("p", "Failed")?;
    let reason = case.get("pod/p")?["status"]["reason"].clone();
    ensure!(reason == "DeadlineExceeded", "{reason}");
    Ok(())
}

/// Exit code of a container in a VM with cgroup v1.
const V1: u32 = 3;

pub(crate) fn out_of_memory(case: &Case<'_>) -> anyhow::Result<()> {
    // The agent reports the cause and the end by two calls. The container `child` ends later than its process, so that the
    // cause is known first. With cgroup v1, kata-agent's read of the event blocks the thread that is to pass it on, until
    // the container has ended: VMs of the local provider have the machine's version, those of the images have v2.
    let allocates = "x=x; while :; do x=$x$x; done";
    let container = |name: &str, script: &str| {
        format!(
            "{{name: {name}, image: IMAGE, resources: {{limits: {{memory: 32Mi}}}}, command: [sh, -c, \"{script}\"]}}"
        )
    };
    let child = container(
        "child",
        &format!("sh -c '{allocates}'; sleep 3; [ ! -d /sys/fs/cgroup/memory ] || exit {V1}; exit 1"),
    );
    let first = container("first", allocates);
    case.pod("p", &format!("restartPolicy: OnFailure, containers: [{child}, {first}]"))?;
    let ended = |name: &str| -> anyhow::Result<Vec<Value>> {
        let pod = case.get("pod/p")?;
        let mut all = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
        let Some(one) = all.find(|one| one["name"] == name) else { return Ok(Vec::new()) };
        let ends = ["lastState", "state"].map(|state| one[state]["terminated"].clone());
        Ok(ends.into_iter().filter(|end| !end.is_null()).collect())
    };
    let end = case.until("the first process has ended", || Ok(ended("first")?.into_iter().next()))?;
    ensure!(end["exitCode"] == 137, "{end}");
    println!("{NOTE}OOMKilled: the reason of a container whose first process is killed is {}", end["reason"]);
    let end = case.until("an end has the reason", || {
        let is_known = |end: &Value| end["reason"] == "OOMKilled" || end["exitCode"] == V1;
        Ok(ended("child")?.into_iter().find(is_known))
    })?;
    println!("{NOTE}OOMKilled: the reason of a container whose child is killed is {}", end["reason"]);
    Ok(())
}

pub(crate) fn probes(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "containers: [{name: c, image: IMAGE,
           command: [sh, -c, 'mkdir /w; echo ok >/w/health; sleep 2; httpd -f -p 8080 -h /w'],
           startupProbe: {tcpSocket: {port: 8080}, periodSeconds: 1, failureThreshold: 60},
           readinessProbe: {httpGet: {path: /health, port: 8080}, periodSeconds: 1},
           livenessProbe: {exec: {command: [cat, /w/health]}, periodSeconds: 1}}]",
    )?;
    case.ready("p")?;
    let restarts = case.get("pod/p")?["status"]["containerStatuses"][0]["restartCount"].clone();
    ensure!(restarts == 0, "{restarts} restarts");
    Ok(())
}

pub(crate) fn liveness(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "containers: [{name: c, image: IMAGE,
           command: [sh, -c, 'trap exit TERM; while :; do sleep 0.2; done'],
           livenessProbe: {exec: {command: [cat, /absent]}, periodSeconds: 1, failureThreshold: 2}}]",
    )?;
    case.until("the probe restarts the container", || {
        let pod = case.get("pod/p")?;
        Ok((pod["status"]["containerStatuses"][0]["restartCount"].as_u64() >= Some(1)).then_some(()))
    })
}

pub(crate) fn missing_image(case: &Case<'_>) -> anyhow::Result<()> {
    let image = super::image().replace("busybox", "absent");
    case.pod("p", &format!("containers: [{{name: c, image: '{image}'}}]"))?;
    case.waiting("p", &["ErrImagePull", "ImagePullBackOff"], &image)
}

pub(crate) fn terminal(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    let pty = nix::pty::openpty(None, None)?;
    let resize = |rows: &str, columns: &str| -> anyhow::Result<()> {
        let done = Command::new("stty")
            .args(["rows", rows, "columns", columns])
            .stdin(pty.slave.try_clone()?)
            .status()?;
        ensure!(done.success(), "stty: {done}");
        Ok(())
    };
    resize("30", "100")?;
    let script = "while :; do stty size; sleep 0.1; done";
    let words = ["-n", case.namespace, "exec", "-it", "p", "--", "sh", "-c", script];
    let mut command = case.node.kubectl_command(&words)?;
    let [stdin, stdout, stderr] = [pty.slave.try_clone()?, pty.slave.try_clone()?, pty.slave.try_clone()?];
    let mut child = command.stdin(stdin).stdout(stdout).stderr(stderr).spawn()?;
    let seen = Arc::new(Mutex::new(String::new()));
    let (mut from, to) = (File::from(pty.master.try_clone()?), seen.clone());
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            to.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    });
    let until_seen = |text: &str| {
        case.until(text, || Ok(seen.lock().unwrap().contains(text).then_some(())))
            .with_context(|| seen.lock().unwrap().clone())
    };
    until_seen("30 100")?;
    resize("40", "120")?;
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGWINCH)?;
    let resized = until_seen("40 120");
    child.kill()?;
    child.wait()?;
    resized
}

pub(crate) fn killed_client(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    let words = ["-n", case.namespace, "exec", "-i", "p", "--", "cat"];
    let mut command = case.node.kubectl_command(&words)?;
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().context("stdin")?;
    stdin.write_all(b"line\n")?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("stdout")?).read_line(&mut line)?;
    ensure!(line == "line\n", "{line:?}");
    child.kill()?;
    child.wait()?;
    // Its input ends, and so does the program.
    case.until("the program ends", || {
        Ok((!case.exec("p", &["ps"])?.lines().any(|line| line.ends_with(" cat"))).then_some(()))
    })
}

pub(crate) fn attach(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "restartPolicy: Never, containers: [{name: c, image: IMAGE, stdin: true, stdinOnce: true,
           command: [sh, -c, 'read line; echo got $line; exit 3']}]",
    )?;
    case.ready("p")?;
    let done = case.kubectl_with(&["attach", "-i", "p"], b"words\n")?;
    let output = String::from_utf8_lossy(&done.stdout).into_owned();
    ensure!(output.contains("got words"), "{done:?}");
    case.phase("p", "Failed")?;
    let ended = case.get("pod/p")?["status"]["containerStatuses"][0]["state"]["terminated"].clone();
    ensure!(ended["exitCode"] == 3, "{ended}");
    Ok(())
}

pub(crate) fn run_with_input(case: &Case<'_>) -> anyhow::Result<()> {
    let image = format!("--image={}", super::image());
    let overrides = r#"--overrides={"spec":{"runtimeClassName":"kata-remote"}}"#;
    let words = ["run", "p", "-i", "--rm", "--restart=Never", "--quiet", &image, overrides];
    let done = case.kubectl_with(&[&words[..], &["--", "sh", "-c", "cat; exit 0"]].concat(), b"through\n")?;
    let output = String::from_utf8_lossy(&done.stdout).into_owned();
    ensure!(done.status.success() && output.contains("through\n"), "{done:?}");
    Ok(())
}

pub(crate) fn forced_end(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("p", "Always", "trap '' TERM; while :; do sleep 1; done")?;
    case.ready("p")?;
    case.kubectl(&["delete", "pod", "p", "--force", "--grace-period=0"])?;
    case.until("the VM is gone", || Ok((case.vms()? == 0).then_some(())))
}

pub(crate) fn ignored_term(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "terminationGracePeriodSeconds: 2, containers: [{name: c, image: IMAGE,
           command: [sh, -c, 'trap \"\" TERM; while :; do sleep 1; done']}]",
    )?;
    case.ready("p")?;
    case.kubectl(&["delete", "pod", "p", "--timeout=90s"])?;
    case.until("the VM is gone", || Ok((case.vms()? == 0).then_some(())))
}

pub(crate) fn post_start(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "containers: [{name: c, image: IMAGE,
        command: [sh, -c, 'until [ -e /tmp/post ]; do sleep 0.1; done; cat /tmp/post'],
        lifecycle: {postStart: {exec: {command: [sh, -c, 'echo post >/tmp/p; mv /tmp/p /tmp/post']}}}}]";
    case.prints(spec, "post\n")
}

pub(crate) fn failed_post_start(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "restartPolicy: Never, containers: [{name: c, image: IMAGE, command: [sleep, '1000'],
           lifecycle: {postStart: {exec: {command: [sh, -c, 'exit 6']}}}}]",
    )?;
    case.event("FailedPostStartHook", "PostStartHook failed")
}

pub(crate) fn cron_job(case: &Case<'_>) -> anyhow::Result<()> {
    case.apply(
        "{apiVersion: batch/v1, kind: CronJob, metadata: {name: j}, spec: {schedule: '* * * * *', jobTemplate: {spec: {template: {spec:
           {runtimeClassName: kata-remote, restartPolicy: Never, containers: [{name: c, image: IMAGE, command: [echo, done]}]}}}}}}",
    )?;
    case.until("a job of the schedule is complete", || {
        let jobs = case.get("job/")?;
        let mut all = jobs["items"].as_array().into_iter().flatten();
        Ok(all.any(|job| job["status"]["succeeded"] == 1).then_some(()))
    })
}

pub(crate) fn failed_job(case: &Case<'_>) -> anyhow::Result<()> {
    case.apply(
        "{apiVersion: batch/v1, kind: Job, metadata: {name: j}, spec: {backoffLimit: 0, template: {spec:
           {runtimeClassName: kata-remote, restartPolicy: Never, containers: [{name: c, image: IMAGE, command: [sh, -c, 'exit 9']}]}}}}",
    )?;
    case.until("the job failed", || {
        let job = case.get("job/j")?;
        let conditions = job["status"]["conditions"].as_array().cloned().unwrap_or_default();
        Ok(conditions.iter().any(|one| one["reason"] == "BackoffLimitExceeded").then_some(()))
    })
}

pub(crate) fn scale(case: &Case<'_>) -> anyhow::Result<()> {
    case.apply(&format!(
        "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: d}}, spec: {{replicas: 1, selector: {{matchLabels: {{app: d}}}}, template: {}}}}}",
        template("1")
    ))?;
    for replicas in ["3", "0"] {
        case.kubectl(&["scale", "deployment/d", &format!("--replicas={replicas}")])?;
        case.kubectl(&["rollout", "status", "deployment/d", "--timeout=90s"])?;
        case.until("as many VMs as replicas", || Ok((case.vms()?.to_string() == replicas).then_some(())))?;
    }
    Ok(())
}

pub(crate) fn log_options(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "restartPolicy: Never, containers: [
           {name: a, image: IMAGE, command: [sh, -c, 'PAUSE; seq 1 10']},
           {name: b, image: IMAGE, command: [sh, -c, 'PAUSE; head -c 100000 /dev/zero | tr \"\\\\0\" x; echo; echo -n end']}]",
    )?;
    case.phase("p", "Succeeded")?;
    let tail = case.kubectl(&["logs", "p", "-c", "a", "--tail=2"])?;
    ensure!(tail == "9\n10\n", "{tail:?}");
    let all = case.kubectl(&["logs", "p", "--all-containers", "--prefix"])?;
    ensure!(all.matches("[pod/p/a] ").count() == 10, "{all:?}");
    let long = case.kubectl(&["logs", "p", "-c", "b"])?;
    ensure!(long.len() == 100_004 && long.ends_with("x\nend"), "{} bytes", long.len());
    let stamped = case.kubectl(&["logs", "p", "-c", "a", "--timestamps", "--since=1h"])?;
    ensure!(stamped.lines().all(|line| line.starts_with("20")), "{stamped:?}");
    Ok(())
}

pub(crate) fn back_off(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("p", "Always", "exit 1")?;
    let first = case.until("the pod has a VM", || Ok(case.sandboxes().ok().filter(|all| !all.is_empty())))?;
    case.waiting("p", &["CrashLoopBackOff"], "back-off")?;
    let now = case.sandboxes()?;
    ensure!(first.len() == 1 && now == first, "sandboxes {first:?}, then {now:?}");
    Ok(())
}

pub(crate) fn missing_command(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod("p", "restartPolicy: Never, containers: [{name: c, image: IMAGE, command: [/absent]}]")?;
    case.phase("p", "Failed")?;
    let ended = case.get("pod/p")?["status"]["containerStatuses"][0]["state"]["terminated"].clone();
    let message = ended["message"].as_str().unwrap_or_default();
    ensure!(ended["reason"] == "StartError" && message.contains("absent"), "{ended}");
    Ok(())
}

pub(crate) fn failed_init(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "restartPolicy: Never, initContainers: [{name: i, image: IMAGE, command: [sh, -c, 'exit 8']}],
         containers: [{name: c, image: IMAGE, command: [echo, never]}]",
    )?;
    case.phase("p", "Failed")?;
    let ended = case.get("pod/p")?["status"]["initContainerStatuses"][0]["state"]["terminated"].clone();
    ensure!(ended["exitCode"] == 8, "{ended}");
    Ok(())
}

pub(crate) fn same_name(case: &Case<'_>) -> anyhow::Result<()> {
    for round in ["1", "2"] {
        case.script("p", "Never", &format!("PAUSE; echo {round}"))?;
        case.phase("p", "Succeeded")?;
        let log = case.kubectl(&["logs", "p"])?;
        ensure!(log == format!("{round}\n"), "{log:?}");
        case.kubectl(&["delete", "pod", "p", "--timeout=90s"])?;
    }
    Ok(())
}

pub(crate) fn finished_vm(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("p", "Never", "true")?;
    case.phase("p", "Succeeded")?;
    case.until("the VM of the finished pod is gone", || Ok((case.vms()? == 0).then_some(())))
}

pub(crate) fn resize_in_place(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        &format!(
            "containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SLEEP}'],
           resources: {{requests: {{cpu: 100m}}, limits: {{cpu: 200m}}}}}}]"
        ),
    )?;
    case.ready("p")?;
    let patch = r#"{"spec":{"containers":[{"name":"c","resources":{"requests":{"cpu":"150m"},"limits":{"cpu":"300m"}}}]}}"#;
    case.kubectl(&["patch", "pod", "p", "--subresource", "resize", "-p", patch])?;
    // The cgroup in the VM counts, and not the API's status alone.
    let quota = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cut -d' ' -f1 /sys/fs/cgroup/cpu.max";
    let outcome = case.until("the VM has the new limit, or the pod says why not", || {
        if case.exec("p", &["sh", "-c", quota])? == "30000\n" {
            return Ok(Some("works".to_owned()));
        }
        let pod = case.get("pod/p")?;
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let is_final = |one: &&Value| {
            one["type"] == "PodResizePending" && one["reason"] == "Infeasible"
                || one["type"] == "PodResizeInProgress" && one["reason"] == "Error"
        };
        let text = |one: &Value| Some(format!("is refused: {}", one["message"].as_str()?));
        Ok(conditions.find(is_final).and_then(text))
    })?;
    println!("{NOTE}resize in place {outcome}");
    Ok(())
}

pub(crate) fn grpc_probe(case: &Case<'_>) -> anyhow::Result<()> {
    let image = super::image().replace("busybox", "etcd");
    case.pod(
        "p",
        &format!(
            "containers: [{{name: c, image: '{image}', command: [/etcd, --data-dir, /tmp/etcd, --listen-client-urls, 'http://0.0.0.0:2379', --advertise-client-urls, 'http://127.0.0.1:2379'],
           readinessProbe: {{grpc: {{port: 2379}}, periodSeconds: 1}}}}]"
        ),
    )?;
    case.ready("p")
}

pub(crate) fn http_liveness(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "p",
        "containers: [{name: c, image: IMAGE,
           command: [sh, -c, 'mkdir /w; echo ok >/w/health; httpd -p 8080 -h /w; sleep 2; rm /w/health; exec sleep 1000'],
           livenessProbe: {httpGet: {path: /health, port: 8080}, periodSeconds: 1, failureThreshold: 2}}]",
    )?;
    case.event("Unhealthy", "404")?;
    case.event("Killing", "liveness")
}

pub(crate) fn closed_stdin(case: &Case<'_>) -> anyhow::Result<()> {
    case.sleeper("p")?;
    // The input ends before the output begins, and within it.
    for script in ["head -c 3000000 /dev/zero", "sleep 1; head -c 3000000 /dev/zero"] {
        let done = case.kubectl_with(&["exec", "-i", "p", "--", "sh", "-c", script], b"")?;
        ensure!(done.stdout.len() == 3_000_000, "{script}: {} bytes came back", done.stdout.len());
    }
    Ok(())
}
