//! Ways to reach a pod.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::Case;

/// A pod that serves its own name on port 8080.
const SERVER: &str = "mkdir /w; hostname >/w/index.html; httpd -f -p 8080 -h /w";

/// Makes the pod `web`, which serves its name, and waits until it does.
fn serve(case: &Case<'_>) -> anyhow::Result<()> {
    case.pod(
        "web",
        &format!(
            "containers: [{{name: c, image: IMAGE, command: [sh, -c, '{SERVER}'],
               readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}}}]"
        ),
    )?;
    case.ready("web")
}

fn address(case: &Case<'_>, pod: &str) -> anyhow::Result<String> {
    let pod = case.get(&format!("pod/{pod}"))?;
    Ok(pod["status"]["podIP"].as_str().context("an address")?.to_owned())
}

pub(crate) fn reachable(case: &Case<'_>) -> anyhow::Result<()> {
    serve(case)?;
    case.apply("{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}}")?;
    case.apply("{apiVersion: v1, kind: Pod, metadata: {name: plain}, spec: {terminationGracePeriodSeconds: 1, containers: [{name: c, image: IMAGE, command: [sleep, '1000']}]}}")?;
    case.sleeper("peer")?;
    case.ready("plain")?;
    let address = address(case, "web")?;
    let service = case.get("service/web")?["spec"]["clusterIP"].as_str().context("an address")?.to_owned();
    // kube-proxy needs a moment.
    for (from, to) in [
        ("plain", format!("{address}:8080")),
        ("peer", format!("{address}:8080")),
        ("plain", service.clone()),
        ("peer", service),
    ] {
        let url = format!("http://{to}/");
        case.until(&format!("{from} reaches {url}"), || {
            Ok(case.exec(from, &fetch(&url)).ok().filter(|page| page == "web\n").map(drop))
        })?;
    }
    let mut stream = TcpStream::connect((address.as_str(), 8080)).context("from the node")?;
    ensure!(get(&mut stream)?.ends_with("web\n"), "from the node");
    Ok(())
}

fn fetch(url: &str) -> [&str; 7] {
    ["timeout", "5", "wget", "-q", "-O", "-", url]
}

fn get(stream: &mut TcpStream) -> anyhow::Result<String> {
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    Ok(page)
}

pub(crate) fn readiness(case: &Case<'_>) -> anyhow::Result<()> {
    case.apply("{apiVersion: v1, kind: Service, metadata: {name: p}, spec: {selector: {app: p}, ports: [{port: 80}]}}")?;
    case.pod(
        "p",
        "containers: [{name: c, image: IMAGE, command: [sh, -c, 'touch /ready; sleep 1000'],
           readinessProbe: {exec: {command: [cat, /ready]}, periodSeconds: 1}}]",
    )?;
    case.ready("p")?;
    let ready = |wanted: &str| {
        let words = [
            "get",
            "endpointslices",
            "-l",
            "kubernetes.io/service-name=p",
            "-o",
            "jsonpath={.items[*].endpoints[*].conditions.ready}",
        ];
        case.until(&format!("the endpoint's ready is {wanted}"), || {
            Ok((case.kubectl(&words)? == wanted).then_some(()))
        })
    };
    ready("true")?;
    case.exec("p", &["rm", "/ready"])?;
    ready("false")
}

/// kubectl that forwards a port of its own to port 8080 of the pod `web`.
pub(crate) struct Forward {
    pub(crate) child: Child,
    pub(crate) port: u16,
    /// It stays open, because kubectl ends when it cannot write a line for each connection.
    _lines: BufReader<ChildStdout>,
}

impl Forward {
    pub(crate) fn start(case: &Case<'_>) -> anyhow::Result<Forward> {
        let mut command =
            case.node.kubectl_command(&["-n", case.namespace, "port-forward", "pod/web", ":8080"])?;
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut line = String::new();
        let mut lines = BufReader::new(child.stdout.take().context("stdout")?);
        lines.read_line(&mut line)?;
        let mut words = line.split([':', ' ']);
        let port: Option<u16> = words.nth(3).and_then(|port| port.parse().ok());
        let port = port.with_context(|| format!("a port in {line:?}"))?;
        Ok(Forward { child, port, _lines: lines })
    }

    /// Ends kubectl. An error in `result` gets its error output.
    fn end<T>(mut self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        self.child.kill()?;
        let said = self.child.wait_with_output()?.stderr;
        result.with_context(|| String::from_utf8_lossy(&said).into_owned())
    }
}

pub(crate) fn port_forward(case: &Case<'_>) -> anyhow::Result<()> {
    serve(case)?;
    let forward = Forward::start(case)?;
    let port = forward.port;
    let clients: Vec<_> =
        (0..10).map(|_| thread::spawn(move || get(&mut TcpStream::connect(("127.0.0.1", port))?))).collect();
    let pages: anyhow::Result<Vec<_>> =
        clients.into_iter().map(|client| client.join().map_err(|_| anyhow::anyhow!("panic"))?).collect();
    let pages = forward.end(pages)?;
    ensure!(pages.iter().all(|page| page.ends_with("web\n")), "{pages:?}");
    Ok(())
}

pub(crate) fn large_forward(case: &Case<'_>) -> anyhow::Result<()> {
    let script =
        "mkdir /w; head -c 100000000 /dev/urandom >/w/f; httpd -p 8080 -h /w; sha256sum </w/f; sleep 1000";
    case.script("web", "Always", script)?;
    let expected = case.until("the file's digest", || {
        Ok(case.kubectl(&["logs", "web"]).ok().filter(|log| log.ends_with("-\n")))
    })?;
    let forward = Forward::start(case)?;
    let url = format!("http://127.0.0.1:{}/f", forward.port);
    let script = format!("busybox wget -q -O - {url} | sha256sum");
    let fetched = Command::new("sh").args(["-c", &script]).output();
    let fetched = forward.end(fetched.map_err(Into::into))?;
    ensure!(fetched.stdout == expected.as_bytes(), "{fetched:?}, expected {expected}");
    Ok(())
}

pub(crate) fn both_families(case: &Case<'_>) -> anyhow::Result<()> {
    serve(case)?;
    case.sleeper("peer")?;
    let web = case.get("pod/web")?;
    let all = web["status"]["podIPs"].as_array().context("addresses")?;
    let v6 = all.iter().filter_map(|one| one["ip"].as_str()).find(|one| one.contains(':'));
    let v6 = v6.with_context(|| format!("an IPv6 address in {all:?}"))?;
    let page = case.exec("peer", &fetch(&format!("http://[{v6}]:8080/")))?;
    ensure!(page == "web\n", "{page:?}");
    Ok(())
}

pub(crate) fn names(case: &Case<'_>) -> anyhow::Result<()> {
    serve(case)?;
    for (name, more) in [("service", ""), ("headless", "clusterIP: None, ")] {
        case.apply(&format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: {name}}}, spec: {{{more}selector: {{app: web}}, ports: [{{port: 8080}}]}}}}"
        ))?;
    }
    case.sleeper("peer")?;
    let address = address(case, "web")?;
    case.until("the pod's address by the headless Service", || {
        let command = ["nslookup", &format!("headless.{}.svc.cluster.local", case.namespace)];
        Ok(case.exec("peer", &command).ok().filter(|answer| answer.contains(&address)).map(drop))
    })?;
    case.until("the page by the Service's name", || {
        let url = format!("http://service.{}.svc.cluster.local:8080/", case.namespace);
        Ok(case.exec("peer", &fetch(&url)).ok().filter(|page| page == "web\n").map(drop))
    })
}

pub(crate) fn large_transfer(case: &Case<'_>) -> anyhow::Result<()> {
    case.script("web", "Always", "mkdir /w; head -c 20000000 /dev/urandom >/w/f; httpd -f -p 8080 -h /w")?;
    case.sleeper("peer")?;
    case.ready("web")?;
    let script = format!("timeout 30 wget -q -O - http://{}:8080/f | sha256sum", address(case, "web")?);
    let expected = case.exec(
        "web",
        &["sh", "-c", "until [ $(wc -c </w/f) = 20000000 ]; do sleep 0.1; done; sha256sum </w/f"],
    )?;
    case.until(
        "the same bytes",
        || Ok((case.exec("peer", &["sh", "-c", &script])? == expected).then_some(())),
    )
}

pub(crate) fn denied_by_the_node(case: &Case<'_>) -> anyhow::Result<()> {
    serve(case)?;
    case.sleeper("peer")?;
    let url = format!("http://{}:8080/", address(case, "web")?);
    let fetch = fetch(&url);
    case.exec("peer", &fetch)?;
    // A policy as a network plugin enforces it: on the node, between bridge and pod.
    let table = format!("bridge policy_{}", case.namespace.replace('-', "_"));
    let rules = format!(
        "add table {table}\nadd chain {table} f {{ type filter hook forward priority 0; }}\n\
         add rule {table} f ip saddr {} drop\n",
        address(case, "peer")?
    );
    nft(&rules)?;
    let denied = case.exec("peer", &fetch);
    nft(&format!("delete table {table}\n"))?;
    ensure!(denied.is_err(), "{denied:?}");
    case.exec("peer", &fetch)?;
    Ok(())
}

/// Changes the rules of the node.
pub(crate) fn nft(rules: &str) -> anyhow::Result<()> {
    let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn()?;
    child.stdin.take().context("stdin")?.write_all(rules.as_bytes())?;
    let done = child.wait()?;
    ensure!(done.success(), "nft: {done}: {rules}");
    Ok(())
}
