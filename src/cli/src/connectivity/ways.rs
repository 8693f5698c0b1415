//! The tests, one after the other, each with a result. A test that needs a pod is left out if that pod did not start.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{LogParams, PostParams};
use kube::{Api, Resource, ResourceExt};
use peerpod_kube::client::within;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, from_value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::objects::{DATA, TestPod, WEB, claim, closed, service, url};
use super::{Bench, LOOK_AGAIN, TestNode};
use crate::item::{Fault, Outcome, failed, skipped};

/// Time limit of a way, which kube-proxy, DNS and CNI may need a moment to open or close.
const WAY: Duration = Duration::from_secs(30);
/// Failed fetches in a row by which a way counts as closed.
const REFUSALS: u32 = 3;
/// Names of the peer pods and of the ordinary pod.
const PEERS: [&str; 2] = ["peer-1", "peer-2"];
const PLAIN: &str = "plain";
const VOLUME: &str = "volume";
/// Remedies.
const START: &str = "follow the cause; docs/troubleshooting.md lists all Events";
const ROUTES: &str = "open the way in security groups, firewalls and the CNI's settings: docs/networking.md";

/// A pod that is ready, with its address.
struct Started {
    name: &'static str,
    address: String,
}

impl Bench {
    /// Runs all tests.
    pub(super) async fn tests(&mut self) {
        let began = Instant::now();
        if let Err(why) = self.prepare().await {
            self.record(
                "objects",
                began,
                failed(format!("{why:#}"), "correct the cause, and run this again"),
            );
            return;
        }
        let pods = self.pods().await;
        let find = |name: &str| pods.iter().find(|pod| pod.name == name);
        let Some(one) = find(PEERS[0]) else { return };
        self.kernel().await;
        self.logs().await;
        self.services(find(PLAIN)).await;
        for from in &pods {
            for to in pods.iter().filter(|to| to.name != from.name) {
                let began = Instant::now();
                let outcome = self.reaches(from.name, &url(&to.address), to.name).await;
                self.record(&format!("pod {} to {}", from.name, to.name), began, outcome);
            }
        }
        let began = Instant::now();
        let outcome = self.port_forward(one.name).await;
        self.record("port-forward", began, outcome);
        let began = Instant::now();
        let outcome = self.egress(one.name).await;
        self.record("egress", began, outcome);
        self.volume().await;
        let began = Instant::now();
        let outcome = match find(PLAIN) {
            Some(plain) => self.policy(one, plain).await,
            None => {
                skipped("the ordinary pod did not start, so nothing shows whether the CNI enforces policies")
            }
        };
        self.record("network policy", began, outcome);
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }

    async fn make<K>(&self, object: Value) -> anyhow::Result<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + Serialize
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let object: K = from_value(object)?;
        let what = format!("make {} {}", K::kind(&()), object.name_any());
        Ok(within(what, self.api::<K>().create(&PostParams::default(), &object)).await?)
    }

    /// Makes the objects that the first tests need.
    async fn prepare(&self) -> anyhow::Result<()> {
        let accounts = self.api::<ServiceAccount>();
        let until = Instant::now() + WAY;
        while within("look at the service account", accounts.get_opt("default")).await?.is_none() {
            anyhow::ensure!(Instant::now() < until, "the namespace has no service account after {WAY:?}");
            sleep(LOOK_AGAIN).await;
        }
        let nodes: Vec<&TestNode> = self.nodes.iter().collect();
        let (Some(first), Some(last)) = (nodes.first(), nodes.last()) else { return Ok(()) };
        let class = Some(self.args.runtime_class.as_str());
        for (name, node, class) in [(PEERS[0], first, class), (PEERS[1], last, class), (PLAIN, last, None)] {
            let image = &self.args.image;
            let pod = TestPod { name, node: &node.name, image, class, has_volume: false };
            self.make::<Pod>(pod.object()).await?;
        }
        self.make::<Service>(service(PEERS[0])).await.map(drop)
    }

    /// Waits until the pods are ready, with a result for each.
    async fn pods(&mut self) -> Vec<Started> {
        let (began, mut started) = (Instant::now(), Vec::new());
        for name in [PEERS[0], PEERS[1], PLAIN] {
            let outcome = self.start(name).await.map(|(address, found)| {
                started.push(Started { name, address });
                found
            });
            self.record(&format!("start of {name}"), began, outcome);
        }
        if let [node] = &self.nodes[..] {
            let why = format!("{} is the only node with peer pods", node.name);
            self.record("two nodes", Instant::now(), skipped(why));
        }
        started
    }

    /// Waits until a pod is ready. Returns its address and a text.
    async fn start(&self, name: &str) -> Result<(String, String), Fault> {
        let until = Instant::now() + self.args.timeout;
        let pods = self.api::<Pod>();
        loop {
            let found = within(format!("look at pod {name}"), pods.get(name)).await;
            let status = found.as_ref().ok().and_then(|pod| pod.status.clone()).unwrap_or_default();
            let mut conditions = status.conditions.iter().flatten();
            if conditions.any(|one| one.type_ == "Ready" && one.status == "True") {
                let node = found.ok().and_then(|pod| pod.spec?.node_name).unwrap_or_default();
                return Ok((status.pod_ip.unwrap_or_default(), format!("ready on node {node}")));
            }
            if status.phase.as_deref() == Some("Failed") || Instant::now() >= until {
                let why = match found {
                    Ok(_) => self.reason(name).await,
                    Err(why) => why.to_string(),
                };
                return Err(Fault::failed(format!("not ready: {why}"), START));
            }
            sleep(LOOK_AGAIN).await;
        }
    }

    /// Returns the newest warning about a pod.
    async fn reason(&self, name: &str) -> String {
        let events = self.cluster.events(&self.namespace, name).await.unwrap_or_default();
        let warning = events.into_iter().rev().find(|event| event.type_.as_deref() == Some("Warning"));
        let text = warning.map(|event| {
            format!("{}: {}", event.reason.unwrap_or_default(), event.message.unwrap_or_default())
        });
        text.unwrap_or_else(|| format!("there is no warning about it within {:?}", self.args.timeout))
    }

    async fn in_pod(&self, pod: &str, program: &[&str]) -> anyhow::Result<String> {
        self.cluster.exec((&self.namespace, pod), "c", program).await
    }

    /// Compares the kernels of pod and node by the ids of their boots.
    async fn kernel(&mut self) {
        let began = Instant::now();
        let boot = self.in_pod(PEERS[0], &["cat", "/proc/sys/kernel/random/boot_id"]).await;
        let outcome = match boot {
            Err(why) => failed(format!("{why:#}"), "see `kubectl exec` and the log of kubelet"),
            Ok(boot) if self.nodes.iter().any(|node| node.boot == boot.trim()) => failed(
                "the pod runs on the kernel of its node, and not in a VM",
                "see the handler of the RuntimeClass: `peerpod check` on that node",
            ),
            Ok(_) => Ok("the pod has a kernel of its own".to_owned()),
        };
        self.record("own kernel", began, outcome);
    }

    async fn logs(&mut self) {
        let (began, name) = (Instant::now(), PEERS[0]);
        let read = within("read the log", self.api::<Pod>().logs(name, &LogParams::default())).await;
        let outcome = match read {
            Ok(text) if text.contains(&format!("{name} serves")) => {
                Ok("the log has the pod's line".to_owned())
            }
            Ok(_) => failed("the log lacks the pod's line", "see `peerpod logs` of that pod"),
            Err(why) => failed(why.to_string(), "see the log of kubelet"),
        };
        self.record("logs", began, outcome);
    }

    /// Reaches the Service by its name and by its address, from a peer pod, and from an ordinary pod.
    async fn services(&mut self, plain: Option<&Started>) {
        let found = within("look at the Service", self.api::<Service>().get(WEB)).await;
        let address = found.ok().and_then(|found| found.spec?.cluster_ip).unwrap_or_default();
        let froms = [PEERS[1]].into_iter().chain(plain.map(|plain| plain.name));
        for from in froms.collect::<Vec<_>>() {
            for (test, at, remedy) in [
                ("service", address.as_str(), "see kube-proxy, or the CNI in its place"),
                ("DNS", WEB, "see the cluster's DNS, and `nameserver` in the pod's /etc/resolv.conf"),
            ] {
                let began = Instant::now();
                let outcome = self.reaches(from, &url(at), PEERS[0]).await;
                let outcome = outcome.map_err(|fault| Fault { remedy: remedy.to_owned(), ..fault });
                self.record(&format!("{test} from {from}"), began, outcome);
            }
        }
    }

    /// Gets a page from a pod, until it is that of the pod `wanted`.
    async fn reaches(&self, from: &str, at: &str, wanted: &str) -> Outcome {
        let until = Instant::now() + WAY;
        loop {
            let why = match self.get(from, at).await {
                Ok(page) if page.trim() == wanted => return Ok(format!("{at} answers")),
                Ok(page) => format!("the page is {:?}", page.trim()),
                Err(why) => format!("{why:#}"),
            };
            if Instant::now() >= until {
                return failed(format!("{at} does not answer: {why}"), ROUTES);
            }
            sleep(LOOK_AGAIN).await;
        }
    }

    async fn get(&self, from: &str, at: &str) -> anyhow::Result<String> {
        self.in_pod(from, &["timeout", "5", "wget", "-q", "-O", "-", at]).await
    }

    async fn port_forward(&self, pod: &str) -> Outcome {
        let page = async {
            let forward = self.cluster.forward(&self.namespace, pod, super::objects::PORT).await?;
            let asked = timeout(WAY, async {
                let mut stream = TcpStream::connect(("127.0.0.1", forward.port)).await?;
                stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
                let mut page = String::new();
                stream.take(1 << 16).read_to_string(&mut page).await?;
                std::io::Result::Ok(page)
            });
            anyhow::Ok(asked.await.context("no answer in time")??)
        };
        match page.await {
            Ok(page) if page.trim_end().ends_with(pod) => Ok("the forwarded port answers".to_owned()),
            Ok(page) => failed(format!("the page is {page:?}"), "see the log of kubelet"),
            Err(why) => failed(
                format!("{why:#}"),
                "see `localhost` in docs/networking.md, and peerpod_node_network_obstacles_total of the node",
            ),
        }
    }

    async fn egress(&self, pod: &str) -> Outcome {
        let at = &self.args.egress;
        let Some((host, port)) = at.rsplit_once(':') else {
            return failed(format!("--egress {at} has no port"), "write HOST:PORT");
        };
        let host = host.trim_matches(['[', ']']);
        let connect = ["sh", "-c", "timeout 10 nc -w 5 \"$0\" \"$1\" </dev/null", host, port];
        match self.in_pod(pod, &connect).await {
            Ok(_) => Ok(format!("{at} answers")),
            Err(why) => failed(
                format!("{at} does not answer: {why:#}"),
                "name an address that pods may reach with --egress, or open the way: docs/networking.md#egress",
            ),
        }
    }

    async fn volume(&mut self) {
        let began = Instant::now();
        let Some(class) = self.args.storage_class.clone() else {
            return self.record("volume", began, skipped("no StorageClass is named (--storage-class)"));
        };
        let outcome = match self.with_volume(&class).await {
            Ok(()) => match self.start(VOLUME).await {
                Ok(_) => self.writes().await,
                Err(fault) => Err(fault),
            },
            Err(why) => failed(format!("{why:#}"), "name another StorageClass"),
        };
        self.record("volume", began, outcome);
    }

    async fn with_volume(&self, class: &str) -> anyhow::Result<()> {
        let Some(node) = self.nodes.first() else { return Ok(()) };
        self.make::<PersistentVolumeClaim>(claim(class)).await?;
        let (image, runtime) = (&self.args.image, Some(self.args.runtime_class.as_str()));
        let pod = TestPod { name: VOLUME, node: &node.name, image, class: runtime, has_volume: true };
        self.make::<Pod>(pod.object()).await.map(drop)
    }

    /// Writes to the volume, which must be a mount of its own.
    async fn writes(&self) -> Outcome {
        let script = "grep -q \" $0 \" /proc/mounts && echo written >$0/f && sync && cat $0/f";
        match self.in_pod(VOLUME, &["sh", "-c", script, DATA]).await {
            Ok(text) if text.trim() == "written" => Ok("a file is written and read".to_owned()),
            Ok(text) => failed(format!("the file contains {:?}", text.trim()), "see docs/volumes.md"),
            Err(why) => failed(format!("{why:#}"), "see docs/volumes.md"),
        }
    }

    /// Closes all pods by a NetworkPolicy. If an ordinary pod stays open, the CNI enforces none.
    async fn policy(&self, peer: &Started, plain: &Started) -> Outcome {
        // A way that is closed without a policy would count as closed by it.
        for (from, to) in [(peer, plain), (plain, peer)] {
            self.reaches(from.name, &url(&to.address), to.name).await?;
        }
        if let Err(why) = self.make::<NetworkPolicy>(closed()).await {
            return failed(format!("{why:#}"), "give this account the right to make NetworkPolicies");
        }
        if !self.is_closed(peer.name, plain).await? {
            return skipped("the CNI enforces no NetworkPolicy: an ordinary pod stays open, too");
        }
        if self.is_closed(plain.name, peer).await? {
            return Ok("a policy closes peer pods, like ordinary ones".to_owned());
        }
        failed(
            format!("a policy closes ordinary pods, and {} stays open", peer.name),
            "this CNI enforces policies beside the pod's network namespace: docs/networking.md",
        )
    }

    async fn is_closed(&self, from: &str, to: &Started) -> Result<bool, Fault> {
        let (at, until) = (url(&to.address), Instant::now() + WAY);
        let fetch = "timeout 5 wget -q -O /dev/null \"$0\" 2>/dev/null; echo $?";
        let is_open = async || Ok(self.in_pod(from, &["sh", "-c", fetch, &at]).await?.trim() == "0");
        let closes = closes(is_open, until).await;
        closes.map_err(|why| Fault::failed(format!("{why:#}"), "see `kubectl exec` and the log of kubelet"))
    }
}

/// Tries a way until it is closed [`REFUSALS`] times in a row, or still open at `until`. A try that itself failed says
/// nothing about the way; at `until` it is the error.
async fn closes(is_open: impl AsyncFn() -> anyhow::Result<bool>, until: Instant) -> anyhow::Result<bool> {
    let mut refusals = 0;
    loop {
        match is_open().await {
            Ok(false) if refusals + 1 == REFUSALS => return Ok(true),
            Ok(false) => refusals += 1,
            Ok(true) if Instant::now() >= until => return Ok(false),
            Err(why) if Instant::now() >= until => return Err(why),
            Ok(true) | Err(_) => refusals = 0,
        }
        sleep(LOOK_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::bail;

    use super::*;

    /// Tries a way with these results, and then with the last one again and again.
    async fn tried(results: &[Option<bool>], time: Duration) -> (anyhow::Result<bool>, usize) {
        let tries = Cell::new(0);
        let is_open = async || {
            let at = tries.replace(tries.get() + 1);
            match results[at.min(results.len() - 1)] {
                Some(is_open) => Ok(is_open),
                None => bail!("no exec"),
            }
        };
        (closes(is_open, Instant::now() + time).await, tries.get())
    }

    #[tokio::test]
    async fn a_failed_exec_does_not_count_as_a_closed_way() {
        let (closed, tries) = tried(&[None, Some(false), Some(true), Some(false)], WAY).await;
        assert!(closed.unwrap() && tries == 6);
        assert!(!tried(&[Some(true)], Duration::ZERO).await.0.unwrap());
        assert_eq!(tried(&[None], Duration::ZERO).await.0.unwrap_err().to_string(), "no exec");
    }
}
