//! Tests the life of a guest against a relay in this test. The real program runs as pid 1 of namespaces of its own, or
//! as a service below another pid 1. Covers claim, assignment to a pod, kata-agent calls, the guest killed and back,
//! flush, the lease.
//!
//! The test starts itself again in fresh namespaces (`inner`), so that nothing of it can stay behind in any case. When
//! that process ends the kernel ends all others. Needs root.

use super::relay;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use peerpod_link::endpoint::LinkEvent;
use peerpod_link::frame::{HEADER_LEN, Header, REQUEST, RESPONSE};
use peerpod_link::user_data::{TicketSecret, UserData, UserDataNode, UserDataTicket};
use peerpod_podnet::inspect;
use peerpod_podnet::netns::Netns;
use peerpod_proto::guest::request::Body;
use peerpod_proto::guest::{self, Flush, Personalise};
use peerpod_proto::{agent, ttrpc_frame};
use protobuf::Message;
use relay::{PATIENCE, Relay};

const INNER: &str = "PEERPOD_GUEST_TEST_INNER";
const AGENT: &str = "PEERPOD_GUEST_TEST_AGENT";
/// Stand-in for systemd and the unit, in a shell: another pid 1, which starts `serve` again when it ends. With 70
/// `serve` asks for the power-off where it may not power the machine off itself.
const SERVICE: &str = r#"ip link set lo up
    while :; do end=0; "$GUEST" serve || end=$?; [ $end != 70 ] || exit 0; sleep 0.1; done"#;
const NODE: &str = "10.98.0.1";
const SANDBOX: &str = "sandbox-1";

#[test]
fn a_guest_claims_serves_survives_a_restart_and_ends_with_its_lease() {
    in_namespaces("init");
}

/// As under systemd: another pid 1 starts `serve`, again after each end.
#[test]
fn a_guest_as_a_service_claims_serves_restarts_and_ends() {
    in_namespaces("service");
}

/// As on a machine of a pool: the test plays the node that claims the machine over SFTP.
#[test]
fn a_guest_of_a_pool_waits_for_its_claim_serves_one_pod_and_reboots() {
    in_namespaces("pool");
}

fn in_namespaces(mode: &str) {
    assert!(nix::unistd::geteuid().is_root(), "this test makes namespaces: run it as root");
    let output = Command::new("unshare")
        .args(["--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"])
        .arg(std::env::current_exe().unwrap())
        .args(["life::inner", "--exact", "--ignored", "--nocapture"])
        .env(INNER, mode)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text =
        format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("inner is done"), "{text}");
    let stranger =
        format!("cannot join the node: tls handshake with {NODE}:15151 (its certificate is not of");
    assert_eq!(text.matches(&stranger).count(), 1, "the guest logs the mistake once: {text}");
}

/// kata-agent that answers each request with the request itself. Only a role of this program, not a test.
#[test]
#[ignore = "role: started by the guest of `inner`"]
fn be_an_agent() {
    let Ok(path) = std::env::var(AGENT) else { return };
    let listener = UnixListener::bind(path).unwrap();
    for connection in listener.incoming() {
        std::thread::spawn(move || {
            let mut connection = connection.unwrap();
            while let Some((head, payload)) = read_frame(&mut connection) {
                let mut response = ttrpc_frame::Response::new();
                response.status.mut_or_insert_default();
                response.payload = payload;
                let payload = response.write_to_bytes().unwrap();
                let head = Header { length: payload.len() as u32, kind: RESPONSE, ..head };
                connection.write_all(&[&head.encode()[..], &payload].concat()).unwrap();
            }
        });
    }
}

fn read_frame(from: &mut UnixStream) -> Option<(Header, Vec<u8>)> {
    let mut head = [0; HEADER_LEN];
    from.read_exact(&mut head).ok()?;
    let head = Header::decode(&head);
    let mut payload = vec![0; head.length as usize];
    from.read_exact(&mut payload).ok()?;
    Some((head, payload))
}

/// Makes one call over a shim's connection; returns the echo of the request that reached the kata-agent.
fn call(shim: &mut UnixStream, stream: u32, method: &str, payload: Vec<u8>) -> ttrpc_frame::Request {
    let mut request = ttrpc_frame::Request::new();
    (request.service, request.method) = ("grpc.AgentService".into(), method.into());
    request.payload = payload;
    let bytes = request.write_to_bytes().unwrap();
    let head = Header { length: bytes.len() as u32, stream, kind: REQUEST, flags: 0 };
    shim.write_all(&[&head.encode()[..], &bytes].concat()).unwrap();
    let (head, payload) = read_frame(shim).expect("an answer");
    assert_eq!((head.stream, head.kind), (stream, RESPONSE));
    let response = ttrpc_frame::Response::parse_from_bytes(&payload).unwrap();
    assert_eq!(response.status.code, 0, "{}", response.status.message);
    ttrpc_frame::Request::parse_from_bytes(&response.payload).unwrap()
}

fn sh(script: &str) {
    let status = Command::new("sh").args(["-ec", script]).status().unwrap();
    assert!(status.success(), "{script}");
}

/// Starts the guest as pid 1 of a "VM" with a NIC, a tmpfs of its own where it writes, and user-data.
fn start_guest(user_data: &UserData, mode: &str) -> Child {
    let mount = "mount -t tmpfs tmpfs";
    sh(&format!(
        "ip link set lo up; {mount} /run; ip netns add vm
         ip link add up0 type veth peer name eth0 netns vm
         ip addr add {NODE}/24 dev up0; ip link set up0 up
         ip -n vm addr add 10.98.0.2/24 dev eth0; ip -n vm link set eth0 up"
    ));
    let test = std::env::current_exe().unwrap();
    let settings = serde_json::json!({
        "version": 1,
        "agent": ["/usr/bin/env", format!("{AGENT}=/run/peerpod/agent.sock"), test, "life::be_an_agent", "--exact", "--ignored"],
        "log": "info",
        "pool_dir": (mode == "pool").then_some("/media/cidata"),
    });
    let script = format!(
        "{mount} /run; {mount} /etc; {mount} /media; mkdir -p /etc/peerpod /media/cidata
         mount --bind /tmp /tmp  # init leaves it alone then: this very program may lie below it
         printf %s \"$SETTINGS\" > /etc/peerpod/guest.json
         {}; unset SETTINGS USER_DATA; {}",
        match mode {
            "pool" => "true",
            _ => "printf %s \"$USER_DATA\" > /media/cidata/user-data; mount -o remount,ro /media",
        },
        if mode == "init" { "exec \"$GUEST\"" } else { SERVICE }
    );
    Command::new("ip")
        .args(["netns", "exec", "vm", "unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child"])
        .args(["--mount-proc", "sh", "-ec", &script])
        .env("SETTINGS", settings.to_string())
        .env("USER_DATA", user_data.to_json())
        .env("GUEST", env!("CARGO_BIN_EXE_peerpod-guest"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// Returns the process with this command line.
fn process(words: &str) -> Option<u32> {
    std::fs::read_dir("/proc").unwrap().find_map(|entry| {
        let pid: u32 = entry.unwrap().file_name().to_str()?.parse().ok()?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        (line.trim() == words || line.contains(words) && words.contains("be_an_agent")).then_some(pid)
    })
}

fn until<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns initdata with one file of this content.
fn initdata(content: &str) -> String {
    format!("algorithm = \"sha384\"\nversion = \"0.1.0\"\n[data]\n\"aa.toml\" = \"{content}\"\n")
}

fn plan(lease_seconds: u32) -> Personalise {
    let mut plan = Personalise::new();
    (plan.version, plan.sandbox_id) = (1, SANDBOX.into());
    (plan.pod_name, plan.pod_namespace) = ("pod".into(), "default".into());
    (plan.lease_seconds, plan.agent_timeout_ms) = (lease_seconds, 20_000);
    plan.initdata = initdata("first");
    let network = plan.network.mut_or_insert_default();
    network.version = 1;
    let mut interface = guest::Interface::new();
    (interface.name, interface.mac) = ("eth0".into(), "02:00:0a:f4:01:07".into());
    (interface.mtu, interface.vni) = (1450, 77);
    let mut address = guest::Address::new();
    address.prefix = "10.244.1.7/24".into();
    interface.addresses.push(address);
    for (destination, gateway, scope) in [("10.244.1.0/24", "", 253), ("0.0.0.0/0", "10.244.1.1", 0)] {
        let mut route = guest::Route::new();
        (route.destination, route.gateway) = (destination.into(), gateway.into());
        (route.scope, route.table) = (scope, 254);
        interface.routes.push(route);
    }
    network.interfaces.push(interface);
    let underlay = network.underlay.mut_or_insert_default();
    (underlay.kind, underlay.node_address) = ("vxlan".into(), NODE.into());
    (underlay.port, underlay.overhead) = (4789, 50);
    plan
}

#[test]
#[ignore = "role: started by the tests above in namespaces of its own"]
fn inner() {
    let Ok(mode) = std::env::var(INNER) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build().unwrap();
    let relay = Relay::new(SANDBOX);
    let user_data = UserData {
        version: 1,
        ticket: UserDataTicket { id: "0".repeat(32), secret: TicketSecret::new(relay::SECRET), claims: 1 },
        node: UserDataNode {
            addresses: vec!["10.98.0.99:15151".parse().unwrap(), format!("{NODE}:15151").parse().unwrap()],
            ca_sha256: vec![relay.ca_sha256()],
            listen: None,
        },
        lease_seconds: 60,
    };
    let mut vm = start_guest(&user_data, &mode);
    let folder = (mode == "pool").then(|| claim(&user_data));
    // Another host has the node's address at first. The guest shows it no ticket, and the right node still gets the
    // ticket.
    runtime.block_on(Relay::new(SANDBOX).impersonate(&format!("{NODE}:15151"), 3));
    let mut relay = runtime.block_on(relay.listen(&format!("{NODE}:15151")));
    life(&runtime, &mut relay, &mode);

    // The node is gone: the lease (2 s) ends the VM. A machine of a pool ends at the node's request.
    let since = Instant::now();
    if let Some(folder) = folder {
        std::fs::write(folder.join("reboot"), "").unwrap();
        let status = until("the reboot", || vm.try_wait().unwrap());
        assert!(status.success(), "{status}");
        println!("inner is done");
        return;
    }
    drop(relay);
    drop(runtime);
    let status = until("the power-off", || vm.try_wait().unwrap());
    assert!(status.success(), "{status}");
    assert!(since.elapsed() >= Duration::from_millis(1500), "{:?}", since.elapsed());
    println!("inner is done");
}

/// Claims the machine as a node does, and delivers user-data. Returns the folder of its files.
fn claim(user_data: &UserData) -> PathBuf {
    let line = format!("{} serve", env!("CARGO_BIN_EXE_peerpod-guest"));
    let serve = until("the guest runs", || process(&line));
    let folder = PathBuf::from(format!("/proc/{serve}/root/media/cidata"));
    let machine = until("the boot is published", || std::fs::read(folder.join("machine")).ok());
    let machine: serde_json::Value = serde_json::from_slice(&machine).unwrap();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!((&machine["version"], machine["boot_id"].as_str()), (&1.into(), Some(boot_id.trim())));
    assert!(machine["vcpus"].as_u64() > Some(0) && machine["memory_mib"].as_u64() > Some(64), "{machine}");
    let aside = folder.join("user-data.0");
    std::fs::write(&aside, user_data.to_json()).unwrap();
    std::fs::write(folder.join("claim"), "{}").unwrap();
    std::fs::rename(aside, folder.join("user-data")).unwrap();
    // The guest program may be started again; the machine's folder stays open.
    let open = std::fs::File::open(&folder).unwrap();
    PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::IntoRawFd::into_raw_fd(open)))
}

fn life(runtime: &tokio::runtime::Runtime, relay: &mut Relay, mode: &str) {
    // Claimed (the first answer is "not yet"), linked, with a certificate.
    let LinkEvent::Up { session: first, resumed: false, .. } = relay.up(runtime) else {
        panic!("not a new link")
    };
    assert_eq!(relay.claims(), 2, "one retry, one grant");

    // The plan of another sandbox is refused, the right one is applied.
    let mut other = plan(60);
    other.sandbox_id = "sandbox-2".into();
    let reply = relay.ask(runtime, Body::Personalise(other));
    assert!(reply.error.contains("belongs to sandbox sandbox-1, not to sandbox-2"), "{}", reply.error);
    let reply = relay.ask(runtime, Body::Personalise(plan(60)));
    assert_eq!(reply.error, "");
    assert!(reply.status.ready && reply.status.agent_running, "{:?}", reply.status);
    let names: Vec<_> = reply.status.stages.iter().map(|stage| stage.name.as_str()).collect();
    for name in ["boot", "user-data", "dial", "claim", "link", "network", "agent"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert!(reply.status.stages.iter().all(|stage| stage.at_us < 60_000_000), "the namespace's clock");

    let digest = reply.status.initdata_digest.clone();
    assert!(digest.starts_with("sha384:"), "{digest}");
    has_its_initdata(runtime, relay);

    let guest = env!("CARGO_BIN_EXE_peerpod-guest");
    // peerpod-guest as pid 1 starts `serve` under its short name; a service has its whole path.
    let serve_line = if mode == "init" { "peerpod-guest serve".to_owned() } else { format!("{guest} serve") };
    let its = process(if mode == "init" { guest } else { &serve_line }).expect("the guest");
    // The directory stays open, even if this process ends.
    let root = std::fs::File::open(format!("/proc/{its}/root")).unwrap();
    let podns = PathBuf::from(format!("/proc/self/fd/{}/run/netns/podns", root.as_raw_fd()));
    has_network(&podns);

    // A call reaches the kata-agent, with the pod's namespace in it; the connection stays open.
    let mut shim = relay.shim();
    let mut container = agent::CreateContainerRequest::new();
    container.container_id = "c1".into();
    container.OCI.mut_or_insert_default().Hostname = "h".into();
    let echo = call(&mut shim, 1, "CreateContainer", container.write_to_bytes().unwrap());
    let container = agent::CreateContainerRequest::parse_from_bytes(&echo.payload).unwrap();
    let namespaces = &container.OCI.Linux.Namespaces;
    assert_eq!((namespaces[0].Type.as_str(), namespaces[0].Path.as_str()), ("network", "/run/netns/podns"));
    assert_eq!(container.OCI.Hostname, "h");
    let big = vec![7; 3 << 20];
    assert_eq!(call(&mut shim, 3, "WriteStdin", big.clone()).payload, big);

    // The guest program is killed: another session, the same kata-agent, the same network.
    let agent_pid = process("be_an_agent --exact").expect("the agent");
    let serve = process(&serve_line).expect("serve");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(serve as i32), nix::sys::signal::SIGKILL).unwrap();
    let LinkEvent::Up { session: second, resumed: false, .. } = relay.up(runtime) else { panic!("resumed") };
    assert_ne!(first, second);
    assert_eq!(relay.claims(), 2, "it still has its certificate");
    assert_eq!(process("be_an_agent --exact"), Some(agent_pid), "the agent survives");
    let reply = relay.ask(runtime, Body::Personalise(plan(2)));
    assert_eq!(reply.error, "");
    assert!(reply.status.ready && reply.status.agent_running);
    assert!(reply.status.lost[0].contains("the guest program was restarted"), "{:?}", reply.status.lost);
    assert_eq!(reply.status.initdata_digest, digest);
    has_its_initdata(runtime, relay);
    has_network(&podns);
    let mut shim = relay.shim();
    assert_eq!(call(&mut shim, 1, "Check", vec![1]).payload, [1]);

    // Rotate without certificates asks for a request; with them the new certificate counts.
    let rotate = relay.ask(runtime, Body::Rotate(guest::Rotate::new()));
    assert!(rotate.error.is_empty() && !rotate.csr.is_empty());
    let mut new = guest::Rotate::new();
    new.certificates = relay.sign(&rotate.csr);
    assert_eq!(relay.ask(runtime, Body::Rotate(new)).error, "");

    assert_eq!(relay.ask(runtime, Body::Flush(Flush::new())).error, "");

    // The kata-agent dies with a container: reported at once, unasked, and no other is started.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(agent_pid as i32), nix::sys::signal::SIGKILL).unwrap();
    let status = relay.told(runtime, |status| status.error.contains("died with running containers"));
    assert_eq!((status.agent_running, status.agent_exits), (false, 1));
    assert_eq!(process("be_an_agent --exact"), None);
}

/// Checks that an assignment with other initdata, or without, is refused.
fn has_its_initdata(runtime: &tokio::runtime::Runtime, relay: &mut Relay) {
    for other in [initdata("second"), String::new()] {
        let reply = relay.ask(runtime, Body::Personalise(Personalise { initdata: other, ..plan(60) }));
        assert!(reply.error.contains("the first assignment's initdata counts"), "{}", reply.error);
    }
}

fn has_network(podns: &Path) {
    let seen = inspect::inspect(&Netns::open(podns).unwrap()).unwrap();
    let text = format!("{seen:?}");
    assert!(text.contains("10.244.1.7"), "{text}");
}
