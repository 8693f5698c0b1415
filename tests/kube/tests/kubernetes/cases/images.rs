//! An image that takes longer than every timeout of a container's start.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{Case, SLEEP};
use crate::images_common::{LayerBuilder, PORT, Packing};
use crate::node::{ADDRESS, SLOW, busybox};

/// Bytes of the slow image's file.
const FILE: usize = 40 << 20;
/// Bytes of each step of a slow answer.
const STEP: usize = 64 << 10;
/// Time that the shim waits for the first pod's container.
const SHIM: Duration = Duration::from_secs(15);
/// Pods, by the program with the timeout that ends their first start.
const PODS: [&str; 2] = ["shim", "kubelet"];

/// A proxy before the node's registry that is slow for VMs. The node's container runtime pulls the image first, and is
/// not the subject.
struct SlowRegistry {
    address: SocketAddr,
    /// Bytes that VMs received.
    sent: Arc<AtomicUsize>,
}

impl SlowRegistry {
    /// Starts it with a pause after each step of an answer.
    fn start(pause: Duration) -> io::Result<SlowRegistry> {
        let listener = TcpListener::bind((ADDRESS, SLOW))?;
        let (address, sent) = (listener.local_addr()?, Arc::new(AtomicUsize::new(0)));
        let counter = sent.clone();
        // Ends with the test.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let counter = counter.clone();
                thread::spawn(move || pass(client, pause, &counter));
            }
        });
        Ok(SlowRegistry { address, sent })
    }
}

/// Passes one connection on. Its first request tells whether its client is a VM.
fn pass(mut client: TcpStream, pause: Duration, sent: &AtomicUsize) -> io::Result<()> {
    let mut first = vec![0; 4096];
    let length = client.read(&mut first)?;
    let is_vm = String::from_utf8_lossy(&first).contains("peerpod-guest/");
    let mut registry = TcpStream::connect((ADDRESS, PORT))?;
    registry.write_all(&first[..length])?;
    let (mut requests, mut to_registry) = (client.try_clone()?, registry.try_clone()?);
    thread::spawn(move || {
        let copied = io::copy(&mut requests, &mut to_registry);
        let _closed = to_registry.shutdown(Shutdown::Write);
        copied
    });
    let mut buffer = vec![0; STEP];
    loop {
        let length = registry.read(&mut buffer)?;
        if length == 0 {
            return client.shutdown(Shutdown::Write);
        }
        client.write_all(&buffer[..length])?;
        if is_vm {
            sent.fetch_add(length, Relaxed);
            thread::sleep(pause * u32::try_from(length).unwrap_or_default() / STEP as u32);
        }
    }
}

pub(crate) fn slow_registry(case: &Case<'_>) -> anyhow::Result<()> {
    let large = LayerBuilder::new().file("large", 0o644, &vec![7; FILE]).build(Packing::Plain);
    case.node.store_image("slow:1", &[busybox(), large]);
    case.node.trust(SLOW)?;
    // Emulated VMs have kubelet's default, which is minutes, and the first pod alone.
    let (pods, longest) = match case.node.has_chart() {
        true => (&PODS[..1], SHIM * 3),
        false => (&PODS[..], case.node.request_timeout),
    };
    // The whole image takes longer than shim and kubelet wait for these pods.
    let registry = SlowRegistry::start(longest * 7 / 5 / (FILE / STEP) as u32)?;
    let image = format!("{}/slow:1", registry.address);
    for (name, seconds) in pods.iter().zip([SHIM.as_secs(), 600]) {
        case.apply(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, annotations:
                 {{io.katacontainers.config.runtime.create_container_timeout: '{seconds}'}}}},
               spec: {{runtimeClassName: kata-remote, terminationGracePeriodSeconds: 1,
                 containers: [{{name: c, image: '{image}', command: [sh, -c, '{SLEEP}']}}]}}}}"
        ))?;
    }
    progress_is_visible(case, &image, pods)?;
    case.until("the error names image, progress and remedy", || {
        let texts = of_pod(case, "shim", "Failed")?;
        let words = ["too slow", image.as_str(), " MiB are in the VM", "create_container_timeout"];
        let is_it = |event: &Value| {
            let text = event["message"].as_str().unwrap_or_default();
            words.iter().all(|word| text.contains(word))
        };
        Ok(texts.iter().any(is_it).then_some(()))
    })?;
    for name in pods {
        case.ready(name)?;
        let status = &case.get(&format!("pod/{name}"))?["status"]["containerStatuses"][0];
        let restarts = status["restartCount"].as_u64().context("restartCount")?;
        ensure!(restarts > 0, "{name} started at once: the registry is not slow enough");
        let events = of_pod(case, name, "PullingImage")?.len();
        ensure!(events < 10, "{events} Events of one pull");
    }
    let sent = registry.sent.load(Relaxed);
    ensure!(sent < 2 * FILE + FILE / 2, "{sent} bytes for two VMs: a pull began anew");
    Ok(())
}

/// Waits for the progress in normal Events of the pods, or in the relay's log.
fn progress_is_visible(case: &Case<'_>, image: &str, pods: &[&str]) -> anyhow::Result<()> {
    if !case.node.has_chart() {
        let parts = [case.namespace, image, "MiB are in the VM after"];
        return case.until("the relay's log shows the progress", || {
            let log = case.node.log("relay")?;
            let has = |line: &&str| parts.iter().all(|part| line.contains(part));
            Ok((log.lines().filter(has).count() > 2).then_some(()))
        });
    }
    for name in pods {
        case.until(&format!("{name} has normal Events with the progress"), || {
            let events = of_pod(case, name, "PullingImage")?;
            let has = |event: &Value| {
                let text = event["message"].as_str().unwrap_or_default();
                event["type"] == "Normal" && text.contains(image) && text.contains("MiB/s")
            };
            Ok((events.len() > 1 && events.iter().all(has)).then_some(()))
        })?;
    }
    Ok(())
}

/// Returns a pod's events with this reason.
fn of_pod(case: &Case<'_>, pod: &str, reason: &str) -> anyhow::Result<Vec<Value>> {
    let events = case.get("event/")?;
    let all = events["items"].as_array().into_iter().flatten();
    let ours = all.filter(|one| one["reason"] == reason && one["involvedObject"]["name"] == pod);
    let is_of_pod = |one: &&Value| one["involvedObject"]["kind"] == "Pod";
    Ok(ours.filter(is_of_pod).cloned().collect())
}
