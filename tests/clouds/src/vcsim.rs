//! Runs govmomi's simulator of a vCenter for one test (`vcsim/`), behind a proxy that counts calls, breaks connections and
//! loses answers. The simulator ends when its [`Vcsim`] is dropped.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::{Request, Response};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::faults::{Fault, Faults};
use crate::server::listen;
use crate::witness::made;

/// Datacenter of the simulator.
pub const DATACENTER: &str = "DC0";
/// Its cluster.
pub const CLUSTER: &str = "DC0_C0";
/// Hosts of the cluster.
pub const HOSTS: [&str; 3] = ["DC0_C0_H0", "DC0_C0_H1", "DC0_C0_H2"];
/// Datastores, which all hosts reach. The template is in the first one.
pub const DATASTORES: [&str; 2] = ["LocalDS_0", "LocalDS_1"];
/// Standard network, and the portgroup of a distributed switch, which the template's NIC has.
pub const NETWORKS: [&str; 2] = ["VM Network", "DC0_DVPG0"];
/// Folder of the provider's VMs.
pub const FOLDER: &str = "peerpods";

/// Largest accepted request.
const MAX_BODY: usize = 4 << 20;
/// Longest wait for an answer of the simulator.
const ANSWER: Duration = Duration::from_secs(60);
/// Methods that change something.
const CHANGES: [&str; 8] = [
    "AttachDisk_Task",
    "CloneVM_Task",
    "CreateFolder",
    "Destroy_Task",
    "DetachDisk_Task",
    "PowerOffVM_Task",
    "PowerOnVM_Task",
    "ReconfigVM_Task",
];

/// Point from which on each connection breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// Before the change of this number, from 0, takes effect.
    Before(usize),
    /// After it, before its answer.
    After(usize),
}

/// A vCenter for one test.
pub struct Vcsim {
    program: Child,
    said: Value,
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    simulator: SocketAddr,
    faults: Mutex<Faults>,
    breaks: Mutex<Option<Break>>,
    /// Changes since [`Vcsim::break_at`].
    changes: AtomicUsize,
    /// Method and body of each call.
    calls: Mutex<Vec<(String, Bytes)>>,
    /// Calls that took effect and are not answered yet.
    late: AtomicUsize,
    /// Most objects of a page; 0: as many as the call wants.
    page: AtomicUsize,
}

impl Vcsim {
    /// Starts the simulator, without TLS.
    ///
    /// # Errors
    /// When it cannot be built or does not start. Needs a runtime.
    pub fn start() -> anyhow::Result<Vcsim> {
        Vcsim::start_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, false)
    }

    /// Starts it with a proxy on this listener, which may have been bound in another network namespace. With `tls`, the
    /// simulator itself has TLS ([`Vcsim::said`]), and the proxy serves nothing.
    ///
    /// # Errors
    /// As [`Vcsim::start`].
    pub fn start_on(listener: TcpListener, tls: bool) -> anyhow::Result<Vcsim> {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        let mut command = Command::new(made(&PROGRAM, "vcsim")?);
        if tls {
            command.arg("tls");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut program = command.spawn().context("start vcsim")?;
        let mut line = String::new();
        BufReader::new(program.stdout.take().context("its output")?).read_line(&mut line)?;
        let said: Value = serde_json::from_str(&line).context("vcsim did not start")?;
        let url = said["url"].as_str().unwrap_or_default();
        let simulator = url.split('/').nth(2).context("its URL")?.parse()?;
        let shared = Arc::new(Shared {
            simulator,
            faults: Mutex::default(),
            breaks: Mutex::default(),
            changes: AtomicUsize::new(0),
            calls: Mutex::default(),
            late: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
        });
        let (address, task) = {
            let shared = Arc::clone(&shared);
            listen(listener, move |request| answer(Arc::clone(&shared), request))?
        };
        Ok(Vcsim { program, said, address, shared, task })
    }

    /// Returns the URL of the API, through the proxy.
    pub fn url(&self) -> String {
        format!("http://{}/sdk", self.address)
    }

    /// Returns a fact about the simulator itself: `url`, `user`, `password`, and with TLS `fingerprint`, `certificate`.
    pub fn said(&self, fact: &str) -> &str {
        self.said[fact].as_str().unwrap_or_default()
    }

    /// Executes an order of `vcsim/control.go`.
    ///
    /// # Panics
    /// When the simulator refuses it.
    #[track_caller]
    pub fn order(&self, order: &Value) -> Value {
        let control: SocketAddr = self.said("control").parse().expect("an address");
        let body = order.to_string();
        let (status, answer) = ask(control, "POST", "/", "", body.as_bytes()).expect("vcsim answers");
        assert!(status == 200, "{order}: {}", String::from_utf8_lossy(&answer));
        serde_json::from_slice(&answer).unwrap_or_default()
    }

    /// Returns the VMs in the provider's folder, as the simulator holds them.
    pub fn vms(&self) -> Vec<Value> {
        let all = self.order(&json!({"op": "vms"}));
        let all = all.as_array().cloned().unwrap_or_default();
        all.into_iter().filter(|vm| vm["Folder"] == FOLDER).collect()
    }

    /// Returns a VM by its name.
    pub fn vm(&self, name: &str) -> Option<Value> {
        self.vms().into_iter().find(|vm| vm["Name"] == name)
    }

    /// Makes a first-class disk. Returns its id and the path of its file.
    pub fn first_class_disk(&self, name: &str, datastore: &str) -> (String, String) {
        let made = self.order(&json!({"op": "disk", "name": name, "datastore": datastore}));
        let text = |key: &str| made[key].as_str().unwrap_or_default().to_owned();
        (text("id"), text("path"))
    }

    /// Makes a plain disk with this path.
    pub fn plain_disk(&self, path: &str) {
        self.order(&json!({"op": "disk", "path": path}));
    }

    /// Whether the file of a disk exists.
    pub fn exists(&self, path: &str) -> bool {
        self.order(&json!({"op": "exists", "path": path})) == true
    }

    /// Sets the fault of the next calls of a method. [`Fault::LateRefusal`] is one of its task.
    pub fn fail(&self, method: &str, fault: Fault, calls: u32) {
        match fault {
            Fault::LateRefusal { code, .. } => {
                let order = json!({"op": "late", "method": method, "fault": code});
                (0..calls).for_each(|_| drop(self.order(&order)));
            }
            fault => self.shared.faults.lock().next.push((method.to_owned(), fault, calls)),
        }
    }

    /// Breaks each connection from this point on, as if the caller had been killed.
    pub fn break_at(&self, at: Break) {
        self.shared.changes.store(0, Ordering::Relaxed);
        *self.shared.breaks.lock() = Some(at);
    }

    /// Returns the number of changes since [`Vcsim::break_at`].
    pub fn changes(&self) -> usize {
        self.shared.changes.load(Ordering::Relaxed)
    }

    /// Returns the methods of all calls.
    pub fn calls(&self) -> Vec<String> {
        self.shared.calls.lock().iter().map(|(method, _)| method.clone()).collect()
    }

    /// Returns methods and bodies of all SOAP calls.
    pub fn bodies(&self) -> Vec<(String, String)> {
        let calls = self.shared.calls.lock();
        let of = |(method, body): &(String, Bytes)| {
            Some((method.clone(), String::from_utf8(body.to_vec()).ok().filter(|body| !body.is_empty())?))
        };
        calls.iter().filter_map(of).collect()
    }

    /// Returns the number of calls of a method.
    pub fn count(&self, method: &str) -> usize {
        self.shared.calls.lock().iter().filter(|(call, _)| call == method).count()
    }

    /// Forgets the recorded calls.
    pub fn forget_calls(&self) {
        self.shared.calls.lock().clear();
    }

    /// Sets the time of each task.
    pub fn set_task_time(&self, time: Duration) {
        self.order(&json!({"op": "task-time", "ms": time.as_millis() as u64}));
    }

    /// Sets the most objects of a page, which a vCenter may choose.
    pub fn set_page(&self, most: usize) {
        self.shared.page.store(most, Ordering::Relaxed);
    }

    /// Returns the number of calls that took effect and are not answered yet.
    pub fn late(&self) -> usize {
        self.shared.late.load(Ordering::Relaxed)
    }

    /// Removes all faults and delays.
    pub fn heal(&self) {
        *self.shared.faults.lock() = Faults::default();
        *self.shared.breaks.lock() = None;
        self.order(&json!({"op": "heal"}));
    }
}

impl Drop for Vcsim {
    fn drop(&mut self) {
        self.task.abort();
        // It removes its files when its input ends.
        drop(self.program.stdin.take());
        self.program.wait().ok();
    }
}

/// Answers a request of the provider.
async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> anyhow::Result<Response<Full<Bytes>>> {
    let (head, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("{error}"))?.to_bytes();
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let method = method_of(&body).unwrap_or_else(|| format!("{} {}", head.method, head.uri.path()));
    let headers: String = ["cookie", "soapaction", "content-type", "range"]
        .into_iter()
        .filter_map(|name| Some(format!("{name}: {}\r\n", head.headers.get(name)?.to_str().ok()?)))
        .collect();
    shared.calls.lock().push((method.clone(), body.clone()));
    let fault = shared.faults.lock().next(&method);
    let number = match CHANGES.contains(&method.as_str()) {
        true => shared.changes.fetch_add(1, Ordering::Relaxed),
        false => shared.changes.load(Ordering::Relaxed),
    };
    let is_change = CHANGES.contains(&method.as_str());
    let breaks = *shared.breaks.lock();
    let is_broken = match breaks {
        Some(Break::Before(at)) => number > at || (number == at && is_change),
        Some(Break::After(at)) => number > at,
        None => false,
    };
    if is_broken || matches!(fault, Some(Fault::Reset)) {
        bail!("this connection breaks");
    }
    if let Some(Fault::Refuse { status, code, message }) = fault {
        return Ok(Response::builder().status(status).body(Full::from(refusal(&code, &message)))?);
    }
    let is_lost = breaks == Some(Break::After(number)) && is_change;
    let delay = match fault {
        Some(Fault::Late(delay)) => delay,
        _ => Duration::ZERO,
    };
    let verb = head.method.as_str().to_owned();
    let body = paged(body, shared.page.load(Ordering::Relaxed));
    // A vCenter completes a call even if the client no longer waits.
    let work = tokio::spawn(async move {
        let simulator = shared.simulator;
        let ask = tokio::task::spawn_blocking(move || ask_all(simulator, &verb, &path, &headers, &body));
        let answered = ask.await?;
        if !delay.is_zero() {
            shared.late.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(delay).await;
            shared.late.fetch_sub(1, Ordering::Relaxed);
        }
        answered
    });
    let (status, headers, body) = work.await??;
    ensure!(!is_lost && !matches!(fault, Some(Fault::LostAnswer)), "this answer is lost");
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(name, value);
    }
    Ok(response.body(Full::from(body))?)
}

/// Returns the request with at most this many objects in a page, or in an answer to a wait for changes.
fn paged(body: Bytes, most: usize) -> Bytes {
    let text = String::from_utf8_lossy(&body).into_owned();
    if most == 0 {
        return body;
    }
    let (end, updates) =
        ("</maxWaitSeconds>", format!("</maxWaitSeconds><maxObjectUpdates>{most}</maxObjectUpdates>"));
    match text.split_once("<maxObjects>").and_then(|(before, rest)| Some((before, rest.split_once('<')?.1))) {
        Some((before, rest)) => Bytes::from(format!("{before}<maxObjects>{most}<{rest}")),
        None => Bytes::from(text.replace(end, &updates)),
    }
}

/// Returns the name of the method in a SOAP request.
fn method_of(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let (_, rest) = text.split_once("Body><")?;
    Some(rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect())
}

fn refusal(code: &str, message: &str) -> String {
    format!(
        "<e:Envelope xmlns:e=\"http://schemas.xmlsoap.org/soap/envelope/\" \
         xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\"><e:Body><e:Fault><faultcode>ServerFaultCode</faultcode>\
         <faultstring>{message}</faultstring><detail><{code}Fault xmlns=\"urn:vim25\" xsi:type=\"{code}\"/></detail>\
         </e:Fault></e:Body></e:Envelope>"
    )
}

type Whole = (u16, Vec<(String, String)>, Vec<u8>);

fn ask(at: SocketAddr, verb: &str, path: &str, headers: &str, body: &[u8]) -> anyhow::Result<(u16, Vec<u8>)> {
    let (status, _, body) = ask_all(at, verb, path, headers, body)?;
    Ok((status, body))
}

/// Sends a request, and reads status, the headers that matter, and the body.
fn ask_all(at: SocketAddr, verb: &str, path: &str, headers: &str, body: &[u8]) -> anyhow::Result<Whole> {
    let mut stream = TcpStream::connect_timeout(&at, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    // HTTP/1.0: the body ends with the connection.
    let head =
        format!("{verb} {path} HTTP/1.0\r\nHost: {at}\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), body].concat())?;
    let mut answer = Vec::new();
    stream.take(64 << 20).read_to_end(&mut answer)?;
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").context("an answer without a head")?;
    let head = String::from_utf8_lossy(answer.get(..end).unwrap_or_default()).into_owned();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("a status")?;
    let kept = head.lines().filter_map(|line| line.split_once(": ")).filter(|(name, _)| {
        ["set-cookie", "content-type", "content-range"].iter().any(|one| name.eq_ignore_ascii_case(one))
    });
    let kept = kept.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    Ok((status, kept, answer.split_off(end + 4)))
}
