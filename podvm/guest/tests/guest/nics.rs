//! Tests the VM's NICs with a real DHCP server (dnsmasq) in network namespaces. Covers leases and their settings,
//! renewal, refusal, and servers that are away, slow, unreachable at first, silent for ever, or of IPv6.
//!
//! Each test starts itself again in fresh namespaces (`inner`), so that nothing of it can stay behind. Needs root.

use std::fs;
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const INNER: &str = "PEERPOD_CARDS_TEST_INNER";
const PATIENCE: Duration = Duration::from_secs(60);
const LOG: &str = "/run/dnsmasq.log";
/// Log of the guest.
const SAYS: &str = "/run/guest.log";
const VERY_SHORT: &str = "--dhcp-option=option:T1,4 --dhcp-option=option:T2,60";

#[test]
fn a_lease_is_used_whole_and_renewed() {
    in_namespaces("lease");
}

#[test]
fn an_address_that_is_not_renewed_is_removed() {
    in_namespaces("refused");
}

#[test]
fn a_late_server_and_a_nic_without_carrier_recover() {
    in_namespaces("away");
}

#[test]
fn a_server_that_takes_seconds_for_each_offer_gives_an_address() {
    in_namespaces("slow");
}

#[test]
fn lost_requests_are_repeated() {
    in_namespaces("deaf");
}

#[test]
fn without_a_server_the_console_names_the_remedy() {
    in_namespaces("silent");
}

#[test]
fn ipv6_comes_from_routers_and_servers() {
    in_namespaces("v6");
}

#[test]
fn a_nic_that_has_an_address_is_left_alone() {
    in_namespaces("given");
}

fn in_namespaces(case: &str) {
    assert!(nix::unistd::geteuid().is_root(), "this test makes namespaces: run it as root");
    let output = Command::new("unshare")
        .args(["--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"])
        .arg(std::env::current_exe().unwrap())
        .args(["nics::inner", "--exact", "--ignored", "--nocapture"])
        .env(INNER, case)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text =
        format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("inner is done"), "{text}");
}

fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{script}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

fn until(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is() {
        let seen = sh(&format!(
            "ip -n vm addr; ip -n vm route; ip -n vm -6 route; cat {LOG} || true; cat {SAYS} || true"
        ));
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}\n{seen}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn vm(words: &str) -> String {
    sh(&format!("ip -n vm {words}"))
}

struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Starts the server in the test's own namespace, without any leases.
fn server(words: &str) -> Ends {
    let script = format!(
        "rm -f /run/leases; exec dnsmasq --keep-in-foreground --conf-file=/dev/null --port=0 --bind-dynamic \
         --interface=up0 --dhcp-leasefile=/run/leases --pid-file= --user=root --log-dhcp --log-facility={LOG} \
         --dhcp-authoritative --no-ping {words}"
    );
    Ends(Command::new("sh").args(["-ec", &script]).spawn().unwrap())
}

/// Starts the guest, which waits for user-data that never comes.
fn guest() -> Ends {
    let settings = r#"{"version":1,"agent":[],"uplink":"on","user_data":["/nonexistent"]}"#;
    let script = "mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /etc; mkdir -p /etc/peerpod
        printf %s \"$SETTINGS\" > /etc/peerpod/guest.json; exec \"$GUEST\" serve";
    let started = Command::new("ip")
        .args(["netns", "exec", "vm", "unshare", "--mount", "--kill-child", "--fork", "sh", "-ec", script])
        .env("SETTINGS", settings)
        .env("GUEST", env!("CARGO_BIN_EXE_peerpod-guest"))
        .stdin(Stdio::null())
        .stderr(fs::File::options().create(true).append(true).open(SAYS).unwrap())
        .spawn();
    Ends(started.unwrap())
}

/// Waits, in the server's place, for so many requests of a NIC; returns the number of requests of others meanwhile.
fn hear(nic: &str, times: usize) -> usize {
    let mac = vm(&format!("-o link show {nic}"));
    let mac = mac.split("link/ether ").nth(1).unwrap().split(' ').next().unwrap();
    let mac: Vec<u8> = mac.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    let ear = UdpSocket::bind("0.0.0.0:67").unwrap();
    ear.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut heard, mut others, mut question) = (0, 0, [0; 1500]);
    while heard < times {
        let length = ear.recv(&mut question).expect("a question in time");
        // `chaddr` of RFC 2131.
        let of_nic = question[..length].get(28..34) == Some(&mac[..]);
        *(if of_nic { &mut heard } else { &mut others }) += 1;
    }
    others
}

/// Returns the content of a file in the guest's mount namespace.
fn guests_file(path: &str) -> String {
    let pid = sh("pgrep -f '[p]eerpod-guest serve$' | tail -n 1");
    fs::read_to_string(format!("/proc/{}/root{path}", pid.trim())).unwrap_or_default()
}

fn count(words: &str) -> usize {
    fs::read_to_string(LOG).unwrap_or_default().matches(words).count()
}

#[test]
#[ignore = "role: started by the tests above in namespaces of its own"]
fn inner() {
    let Ok(case) = std::env::var(INNER) else { return };
    sh("mount -t tmpfs tmpfs /run; ip link set lo up; ip netns add vm; ip -n vm link set lo up
        ip link add up0 type veth peer name eth0 netns vm
        ip addr add 10.97.0.1/24 dev up0; ip addr add fd97::1/64 dev up0 nodad; ip link set up0 up");
    match case.as_str() {
        "lease" => lease(),
        "refused" => refused(),
        "away" => away(),
        "slow" => slow(),
        "deaf" => deaf(),
        "silent" => silent(),
        "v6" => v6(),
        "given" => given(),
        _ => unreachable!(),
    }
    println!("inner is done");
}

fn lease() {
    let _server = server(&format!(
        "--dhcp-range=10.97.0.50,10.97.0.60,255.255.255.0,2m --dhcp-option=option:router,10.97.0.9 \
         --dhcp-option=option:classless-static-route,0.0.0.0/0,10.97.0.1,192.168.7.0/24,10.97.0.2 \
         --dhcp-option=option:mtu,1400 --dhcp-option=option:dns-server,10.97.0.53 \
         --dhcp-option=option:domain-name,cloud.example {VERY_SHORT}"
    ));
    let _guest = guest();
    until("the lease", || vm("addr show eth0").contains("inet 10.97.0."));
    until("its routes", || vm("route").contains("192.168.7.0/24 via 10.97.0.2 dev eth0 proto dhcp"));
    let routes = vm("route");
    assert!(routes.contains("default via 10.97.0.1"), "{routes}");
    assert!(
        !routes.contains("10.97.0.9"),
        "where there are classless routes the router option does not count"
    );
    let link = vm("addr show eth0");
    assert!(
        link.contains("mtu 1400") && !link.contains("valid_lft forever preferred_lft forever\n    inet "),
        "{link}"
    );
    until("name servers", || {
        guests_file("/etc/resolv.conf") == "nameserver 10.97.0.53\nsearch cloud.example\n"
    });
    let acknowledged = count("DHCPACK");
    until("a renewal", || count("DHCPACK") > acknowledged);
    assert_eq!(count("DHCPNAK"), 0);
    assert_eq!(vm("addr show eth0").matches("inet 10.97").count(), 1);
}

fn refused() {
    let first = server(&format!("--dhcp-range=10.97.0.50,10.97.0.60,255.255.255.0,2m {VERY_SHORT}"));
    let _guest = guest();
    until("the lease", || vm("addr show eth0").contains("inet 10.97.0."));
    drop(first);
    let _other = server(&format!(
        "--dhcp-range=10.97.0.150,10.97.0.160,255.255.255.0,2m --dhcp-option=option:router,10.97.0.1 {VERY_SHORT}"
    ));
    until("the other lease", || vm("addr show eth0").contains("inet 10.97.0.1"));
    assert!(count("DHCPNAK") > 0, "{}", fs::read_to_string(LOG).unwrap());
    until("the first one's end", || !vm("addr show eth0").contains("inet 10.97.0.5"));
}

fn away() {
    let guest = guest();
    until("a NIC that is up", || vm("link show eth0").contains("state UP"));
    hear("eth0", 2); // requests without an answer
    let words = format!("--dhcp-range=10.97.0.50,10.97.0.60,255.255.255.0,2m {VERY_SHORT}");
    let first = server(&words);
    until("the late server's lease", || vm("addr show eth0").contains("inet 10.97.0."));
    // The server is away for longer than a renewal, and comes back.
    drop(first);
    hear("eth0", 1);
    assert!(vm("addr show eth0").contains("inet 10.97.0."), "the address has the granted lifetime");
    let again = count("DHCPACK");
    let _second = server(&words);
    until("the server's answer", || count("DHCPACK") > again);
    // The cable is pulled and put in again.
    sh("ip link set up0 down");
    until("no carrier", || vm("link show eth0").contains("NO-CARRIER"));
    let again = count("DHCPACK");
    sh("ip link set up0 up");
    until("a new lease", || count("DHCPACK") > again);
    // Another run of the program takes over the address of the previous one.
    let before = vm("addr show eth0").split("inet ").nth(1).unwrap().split('/').next().unwrap().to_owned();
    drop(guest);
    assert!(vm("addr show eth0").contains(&before));
    let again = count("DHCPACK");
    let _guest = self::guest();
    until("its own lease", || count("DHCPACK") > again);
    until("one address", || vm("addr show eth0").matches("inet ").count() == 1);
}

/// Each request keeps the server busy for longer than the guest's first wait, and than a request may take.
fn slow() {
    let _server = server("--dhcp-range=10.97.0.50,10.97.0.60,255.255.255.0,2m --dhcp-reply-delay=5");
    let _guest = guest();
    until("the lease", || vm("addr show eth0").contains("inet 10.97.0."));
    let log = fs::read_to_string(LOG).unwrap();
    assert!(count("DHCPDISCOVER") > 1, "it was not slow: {log}");
    // An answer that is too late for the first request is in time for the second one, which has a longer limit.
    assert!(count("DHCPACK") <= 2, "{log}");
    assert_eq!(vm("addr show eth0").matches("inet 10.97").count(), 1);
}

/// The network drops the first two requests.
fn deaf() {
    sh("nft add table inet deaf
        nft add chain inet deaf input '{ type filter hook input priority 0; }'
        nft add rule inet deaf input udp dport 67 limit rate 1/day burst 2 packets counter drop");
    let _server = server(&format!("--dhcp-range=10.97.0.50,10.97.0.60,255.255.255.0,2m {VERY_SHORT}"));
    let _guest = guest();
    until("the lease", || vm("addr show eth0").contains("inet 10.97.0."));
    let rules = sh("nft list table inet deaf");
    assert!(rules.contains("counter packets 2 "), "{rules}");
}

fn silent() {
    let _guest = guest();
    let said = || fs::read_to_string(SAYS).unwrap_or_default();
    until("a message about a NIC without an address", || said().contains("no DHCP server answers"));
    let mac = vm("-o link show eth0").split("link/ether ").nth(1).unwrap()[..17].to_owned();
    let said = said();
    for words in [
        "ERROR",
        "cannot join the node: no NIC has an address",
        &format!("eth0 ({mac})"),
        "UDP ports 67 and 68",
        "ip=ADDRESS::GATEWAY:NETMASK::eth0",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    // The guest has continued to ask.
    let _server = server(&format!("--dhcp-range=10.97.0.50,10.97.0.60,255.255.255.0,2m {VERY_SHORT}"));
    until("the lease", || vm("addr show eth0").contains("inet 10.97.0."));
}

fn v6() {
    let _server = server(
        "--enable-ra --dhcp-range=fd97::100,fd97::200,64,2m --dhcp-option=option6:dns-server,[fd97::53]",
    );
    let _guest = guest();
    until("the server's address", || {
        let seen = vm("-6 addr show dev eth0");
        seen.contains("inet6 fd97::1") || seen.contains("inet6 fd97::2")
    });
    until("the router's route", || vm("-6 route").contains("default via fe80::"));
    until("name servers", || guests_file("/etc/resolv.conf").contains("nameserver fd97::53"));
}

fn given() {
    sh("ip -n vm addr add 10.97.0.2/24 dev eth0; ip -n vm link set eth0 up");
    // Beside a NIC that has no address, and asks.
    sh(
        "ip link add up1 type veth peer name eth1 netns vm; ip addr add 10.98.0.1/24 dev up1; ip link set up1 up",
    );
    let _guest = guest();
    let others = hear("eth1", 2);
    assert_eq!(others, 0, "questions of the NIC that has an address");
    assert_eq!(vm("addr show eth0").matches("inet ").count(), 1);
}
