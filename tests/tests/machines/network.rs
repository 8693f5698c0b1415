//! Tests the pod network's cases that depend on a real VM: the MTU of its underlay (by DHCP, and changed later), the
//! offloads of its virtio NIC, and an address that DHCP takes away. The machines boot in libvirtd and QEMU. Needs root
//! and `make image`.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, ensure};
use peerpod_client::{AgentClient, ContainerSpec, exec_request};
use peerpod_tests::machines::{PATIENCE, Place};
use peerpod_tests::{Sandbox, fresh_id, stop_promptly, vm};
use peerpod_world::libvirtd::{NETWORK, Shape};
use peerpod_world::page::{PageServer, page_for};
use peerpod_world::ping::ping;
use peerpod_world::traffic::{self, ECHO_PORT, Echo};
use peerpod_world::{Daemons, Namespace, Pod, Settings, World, eventually};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Larger than the MTU of any VM's underlay, so that the underlay limits the pod's packets.
const POD_MTU: u32 = 9000;
/// Bytes sent there and back in each family, started from each of the two ends.
const BULK: usize = 3 << 20;
/// Port of the echo server in the pod.
const PORT_INSIDE: u16 = 7778;
/// Prefix of a command that runs in the VM's own network, not in the pod's.
const BESIDE: &str = "nsenter -t 1 -n /bin/busybox";

/// Pod in its own machine with an echo server in it, and another pod of the node.
struct Machine {
    id: String,
    pod: Pod,
    other: Pod,
    shim: peerpod_client::ShimClient,
    agent: AgentClient,
    /// Name of the machine in libvirt.
    domain: String,
    /// Device on the node that is the other end of the VM's NIC.
    tap: String,
    mac: String,
}

impl Machine {
    async fn start(place: &Place, daemons: &Daemons, name: &str) -> anyhow::Result<Machine> {
        let world: &World = &place.world;
        let (pod, other) = (world.pod_with_mtu(POD_MTU)?, world.pod_with_mtu(POD_MTU)?);
        let Sandbox { id, pod, shim, agent, .. } = place.boot(daemons, pod, name).await;
        agent.create_container(&ContainerSpec::new("main", &["sleep", "infinity"]).request()).await?;
        agent.start_container("main").await?;
        // Like the echo server of `traffic` it first sends 64 bytes, but not the client's address.
        let script = format!("exec busybox nc -ll -p {PORT_INSIDE} -e sh -c \"printf '%-64s' ::; exec cat\"");
        agent.exec_process(&exec_request("main", "echo", &["/bin/sh", "-c", &script])).await?;
        let domain = place.libvirtd.domains()?.pop().context("a domain")?;
        let nics = place.libvirtd.virsh(&["domiflist", &domain])?;
        let nic = nics.lines().find(|line| line.contains(NETWORK)).context("a NIC")?;
        let words: Vec<&str> = nic.split_whitespace().collect();
        let [tap, _, _, _, mac] = words[..] else { anyhow::bail!("a NIC like no other: {nic}") };
        let (tap, mac) = (tap.to_owned(), mac.to_owned());
        Ok(Machine { id, pod, other, shim, agent, domain, tap, mac })
    }

    /// Runs a script in the pod and returns its output.
    async fn shell(&self, script: &str) -> anyhow::Result<String> {
        self.run(&["/bin/sh", "-c", script]).await
    }

    async fn run(&self, command: &[&str]) -> anyhow::Result<String> {
        let request = exec_request("main", &fresh_id("exec"), command);
        let output = timeout(*PATIENCE, self.agent.exec(&request)).await;
        let output = output.with_context(|| format!("{command:?}: no end within {:?}", *PATIENCE))??;
        ensure!(output.status == 0, "{command:?}: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Repeats a script in the pod until its output satisfies `is`.
    async fn until(&self, script: &str, is: impl Fn(&str) -> bool) -> anyhow::Result<String> {
        let mut last: anyhow::Result<String> = Err(anyhow::anyhow!("never asked"));
        let seen = eventually(script, *PATIENCE, async || {
            last = self.shell(script).await;
            last.as_ref().is_ok_and(|text| is(text)).then_some(())
        })
        .await;
        seen.with_context(|| format!("it says {last:?}"))?;
        last
    }

    /// Waits until the VM's own NIC has this MTU.
    async fn until_nic(&self, mtu: u32) -> anyhow::Result<()> {
        let expected = format!("mtu {mtu} ");
        self.until(&format!("{BESIDE} ip link show dev eth0"), |text| text.contains(&expected))
            .await
            .map(drop)
    }

    /// Waits until the pod's interface in the VM has one of these MTUs, and returns it.
    async fn until_mtu(&self, of: &[u32]) -> anyhow::Result<u32> {
        let read = |text: &str| -> Option<u32> {
            text.split_whitespace().skip_while(|word| *word != "mtu").nth(1)?.parse().ok()
        };
        let is = |text: &str| read(text).is_some_and(|mtu| of.contains(&mtu));
        let shown = self.until("busybox ip link show dev eth0", is).await;
        read(&shown.with_context(|| format!("the pod's MTU is to be one of {of:?}"))?).context("an MTU")
    }

    /// Returns the number of fragmented packets so far, in every namespace that the pod's packets pass.
    async fn fragments(&self, world: &World) -> anyhow::Result<Vec<(&'static str, u64)>> {
        const FILES: &str = "cat /proc/net/snmp; echo and; cat /proc/net/snmp6";
        let mut all = Vec::new();
        for (name, netns) in [
            ("the node", world.node()),
            ("the pod on the node", self.pod.namespace()),
            ("the other pod", self.other.namespace()),
        ] {
            all.push((name, vm::fragments(netns.netns())?));
        }
        for (name, script) in [("the pod", FILES.to_owned()), ("the VM", format!("{BESIDE} sh -c '{FILES}'"))]
        {
            let text = self.shell(&script).await?;
            let (v4, v6) = text.split_once("and\n").context("two files")?;
            all.push((name, vm::fragments_of(v4, v6)?));
        }
        Ok(all)
    }

    /// Sends the largest packets and many MiB in both directions and families. No packet may be fragmented, and all
    /// data must arrive unchanged.
    async fn converse(&self, world: &World, mtu: u32) -> anyhow::Result<()> {
        // Afterwards every neighbour is resolved.
        self.is_reached().await?;
        let before = self.fragments(world).await?;
        let (outside, echo) = (
            self.other.namespace().netns(),
            Echo::start(self.other.namespace().netns(), &self.other.addresses())?,
        );
        // Kept in the VM's memory, which serves as well as a disk.
        let fill = format!("busybox dd if=/dev/urandom of=/run/bulk bs=65536 count={}", BULK >> 16);
        self.shell(&format!("{fill} 2>/dev/null")).await?;
        let sum = self.shell("sha256sum < /run/bulk").await?;
        for (pod, beside) in self.pod.addresses().into_iter().zip(self.other.addresses()) {
            let headers = if pod.is_ipv4() { 28 } else { 48 };
            traffic::ping_whole(outside, pod, mtu.into()).await.context("whole packets into the pod")?;
            let ping = format!("ping -c 1 -W 2 -s {} {beside}", mtu - headers);
            let ping = format!("until {ping} >/dev/null 2>&1; do sleep 0.1; done");
            self.shell(&ping).await.context("whole packets out of the pod")?;
            traffic::tcp(outside, SocketAddr::new(pod, PORT_INSIDE), BULK).await.context("into the pod")?;
            let back =
                format!("busybox nc {beside} {ECHO_PORT} < /run/bulk | busybox tail -c +65 | sha256sum");
            let back = self.shell(&back).await.context("out of the pod")?;
            ensure!(back == sum, "to {beside} and back {sum} became {back}");
        }
        echo.end().await?;
        let after = self.fragments(world).await?;
        ensure!(after == before, "packets were cut: {before:?} before, {after:?} after");
        Ok(())
    }

    /// Checks that the other pod gets replies from the pod, in both families.
    async fn is_reached(&self) -> anyhow::Result<()> {
        for address in self.pod.addresses() {
            let from = self.other.namespace().clone();
            spawn_blocking(move || ping(&from, address, 56, *PATIENCE)).await??;
        }
        Ok(())
    }

    /// Checks that the pod gets a page of the other pod, in both families and from its own address.
    async fn fetches(&self) -> anyhow::Result<()> {
        let server = PageServer::start(self.other.namespace())?;
        for (own, to) in self.pod.addresses().into_iter().zip(self.other.addresses()) {
            let to = SocketAddr::new(to, server.port());
            let page = self.run(&["peerpod-test-tool", "fetch", &to.to_string()]).await?;
            ensure!(page == page_for(own), "{page}");
        }
        Ok(())
    }

    async fn stop(self, place: &Place, daemons: &Daemons) -> anyhow::Result<()> {
        stop_promptly(&self.shim, &self.id).await?;
        daemons.gone(&self.id, *PATIENCE).await?;
        drop(self);
        place.assert_clean();
        Ok(())
    }
}

/// Returns settings with a short probe interval: a path probe lost on a busy machine must not count for ten minutes.
fn settings(place: &Place) -> Settings {
    place.settings.clone().set("tunnel.probe-interval", "10s")
}

/// Offloads of the node's device for the VM's NIC: the node may leave to the VM exactly those that the VM accepted.
const OFFLOADS: [&str; 3] = ["tx-checksumming", "tcp-segmentation-offload", "generic-segmentation-offload"];

/// Switches the offloads of the node's device for the NIC, and checks them.
fn offloads(world: &World, tap: &str, state: &str) -> anyhow::Result<()> {
    let set = format!("ethtool -K {tap} tx {state} sg {state} tso {state} gso {state} gro {state}");
    vm::run(world.node().netns(), &set)?;
    offloads_are(world, tap, state)
}

fn offloads_are(world: &World, tap: &str, state: &str) -> anyhow::Result<()> {
    let shown = vm::run(world.node().netns(), &format!("ethtool -k {tap}"))?;
    for feature in OFFLOADS {
        let expected = format!("{feature}: {state}");
        ensure!(shown.lines().any(|line| line.trim_end() == expected), "{expected}? {shown}");
    }
    Ok(())
}

/// Checks the features that VM and hypervisor negotiated for the NIC (`linux/virtio_net.h`): each side leaves checksums
/// and segmentation to the other, in both directions and families.
async fn nic_offloads(machine: &Machine) -> anyhow::Result<()> {
    let script = "for d in /sys/bus/virtio/devices/*; do \
                  [ \"$(cat $d/device)\" = 0x0001 ] && cat $d/features; done; true";
    let bits = machine.shell(script).await?;
    for (bit, name) in [
        (0, "CSUM"),
        (1, "GUEST_CSUM"),
        (7, "GUEST_TSO4"),
        (8, "GUEST_TSO6"),
        (11, "HOST_TSO4"),
        (12, "HOST_TSO6"),
    ] {
        ensure!(bits.as_bytes().get(bit) == Some(&b'1'), "VIRTIO_NET_F_{name} is not in {bits:?}");
    }
    Ok(())
}

/// An underlay with a small MTU from the VM's first packet on, with the default offloads and with those of the node's
/// device off; then an MTU that grows while the pod runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_machines_packets_are_as_large_as_its_wire_takes_with_offloads_and_without() {
    let place = Place::on(Shape { mtu: Some(1400), ..Shape::default() }, &[]);
    let daemons = Daemons::start(&place.world, settings(&place)).await.unwrap();
    let done = wires_and_offloads(&place, &daemons).await;
    done.unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", daemons.log_tails(), place.consoles()));
}

async fn wires_and_offloads(place: &Place, daemons: &Daemons) -> anyhow::Result<()> {
    let world = &place.world;
    let machine = Machine::start(place, daemons, "wire").await?;
    machine.until_nic(1400).await.context("DHCP says what the wire takes")?;
    // Depends on the family that the tunnel uses.
    let mtu = machine.until_mtu(&[1400 - 50, 1400 - 70]).await?;
    let tunnel = 1400 - mtu;

    nic_offloads(&machine).await?;
    offloads_are(world, &machine.tap, "on")?;
    machine.converse(world, mtu).await.context("with offloads")?;
    offloads(world, &machine.tap, "off")?;
    machine.converse(world, mtu).await.context("without offloads on the node's side")?;

    // The cloud enables jumbo frames.
    offloads(world, &machine.tap, "on")?;
    let tap = &machine.tap;
    world.node().ip(&format!("link set lv{NETWORK} mtu 9000\nlink set {tap} mtu 9000\n"))?;
    machine.shell(&format!("{BESIDE} ip link set dev eth0 mtu 9000")).await?;
    let mtu = machine.until_mtu(&[9000 - tunnel]).await.context("a wire that is wider now")?;
    machine.converse(world, mtu).await.context("with jumbo frames")?;
    machine.stop(place, daemons).await
}

/// Numbered lines of an exec, of which none may be missing or repeated.
struct Ticks {
    last: u64,
    rest: Vec<u8>,
}

impl Ticks {
    async fn start(machine: &Machine) -> anyhow::Result<Ticks> {
        let script = "i=0; while :; do i=$((i+1)); echo $i; echo $i > /run/ticks; sleep 0.1; done";
        machine.agent.exec_process(&exec_request("main", "ticks", &["/bin/sh", "-c", script])).await?;
        let mut ticks = Ticks { last: 0, rest: Vec::new() };
        ticks.read_to(3, machine).await?;
        Ok(ticks)
    }

    /// Reads up to a line that was printed after this call.
    async fn go_on(&mut self, machine: &Machine) -> anyhow::Result<()> {
        // The file is empty while it is being written.
        let now = machine.shell("until n=$(cat /run/ticks) && [ -n \"$n\" ]; do :; done; echo $n").await?;
        self.read_to(now.trim().parse::<u64>()? + 3, machine).await
    }

    async fn read_to(&mut self, number: u64, machine: &Machine) -> anyhow::Result<()> {
        while self.last < number {
            let read = timeout(*PATIENCE, machine.agent.read_stdout("main", "ticks", 4096)).await;
            let read =
                read.with_context(|| format!("no line after {} within {:?}", self.last, *PATIENCE))??;
            ensure!(!read.is_empty(), "the exec ended after line {}", self.last);
            self.rest.extend(read);
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                let line: u64 = std::str::from_utf8(&line)?.trim().parse()?;
                ensure!(line == self.last + 1, "line {line} came after {}", self.last);
                self.last = line;
            }
        }
        Ok(())
    }
}

/// TCP connection from the other pod to the pod's echo server that exchanges bytes all the time.
struct Transfer {
    rounds: Arc<AtomicU64>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Transfer {
    fn start(from: &Namespace, to: IpAddr) -> anyhow::Result<Transfer> {
        let to = SocketAddr::new(to, PORT_INSIDE);
        let mut stream = from.run(|| TcpStream::connect_timeout(&to, *PATIENCE))??;
        stream.set_read_timeout(Some(*PATIENCE))?;
        stream.set_write_timeout(Some(*PATIENCE))?;
        stream.read_exact(&mut [0; 64])?;
        let (rounds, ending) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let thread = std::thread::spawn({
            let (rounds, ending) = (rounds.clone(), ending.clone());
            move || {
                while !ending.load(SeqCst) {
                    let round = rounds.load(SeqCst);
                    let sent: Vec<u8> = (round * 7..).take(16 << 10).map(|byte| byte as u8).collect();
                    stream.write_all(&sent).with_context(|| format!("write of round {round}"))?;
                    let mut back = vec![0; sent.len()];
                    stream.read_exact(&mut back).with_context(|| format!("read of round {round}"))?;
                    ensure!(sent == back, "round {round} came back as another");
                    rounds.store(round + 1, SeqCst);
                    // Leaves processor time for other work of the machine.
                    std::thread::sleep(Duration::from_millis(10));
                }
                anyhow::Ok(())
            }
        });
        Ok(Transfer { rounds, ending, thread: Some(thread) })
    }

    /// Waits for rounds that began after this call.
    async fn goes_on(&self) -> anyhow::Result<()> {
        let before = self.rounds.load(SeqCst);
        let on = eventually("the connection goes on", *PATIENCE, async || {
            (self.rounds.load(SeqCst) > before + 1).then_some(())
        });
        on.await.with_context(|| format!("after round {before}"))
    }

    async fn end(mut self) -> anyhow::Result<()> {
        self.ending.store(true, SeqCst);
        let thread = self.thread.take().context("it ended before")?;
        spawn_blocking(move || thread.join()).await?.map_err(|_| anyhow::anyhow!("the transfer's thread"))?
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.ending.store(true, SeqCst);
    }
}

/// Address that the DHCP server assigns at the VM's next request.
const OTHER_ADDRESS: &str = "10.97.0.252";
/// MAC of the host that then gets the VM's first address.
const OTHER_MAC: &str = "52:54:00:00:00:fe";

/// On an underlay with jumbo frames, the DHCP server refuses to renew the lease and assigns another address of the same
/// network. An exec and a connection stream meanwhile. Later the NIC loses its carrier and gets it back.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_with_a_new_address_by_dhcp_keeps_its_pod() {
    let place = Place::on(Shape { mtu: Some(9000), ipv6: false, renewal: Some(8) }, &[]);
    let daemons = Daemons::start(&place.world, settings(&place)).await.unwrap();
    let done = moves(&place, &daemons).await;
    done.unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", daemons.log_tails(), place.consoles()));
}

async fn moves(place: &Place, daemons: &Daemons) -> anyhow::Result<()> {
    let world = &place.world;
    let machine = Machine::start(place, daemons, "moving").await?;
    machine.until_nic(9000).await.context("DHCP says what the wire takes")?;
    let mtu = machine.until_mtu(&[9000 - 50]).await?;
    machine.converse(world, mtu).await.context("before it moves")?;
    let addresses = format!("{BESIDE} ip -4 addr show dev eth0");
    let before = machine.shell(&addresses).await?;
    ensure!(before.contains("inet 10.97.0.") && !before.contains(OTHER_ADDRESS), "{before}");
    let mut ticks = Ticks::start(&machine).await?;
    let transfer = Transfer::start(machine.other.namespace(), machine.pod.v4())?;

    let old = before.split("inet ").nth(1).and_then(|rest| rest.split('/').next()).context("no address")?;
    // The reservation existed before the VM's first request; any other address has one chance in 241.
    let network = place.libvirtd.virsh(&["net-dumpxml", NETWORK])?;
    let mut hosts = network.lines().filter(|line| line.contains(&format!("mac='{}'", machine.mac)));
    let is_reserved = hosts.any(|host| host.contains(&format!("ip='{old}'")));
    ensure!(is_reserved, "{old} is not the reserved address: {network}");
    ensure!(place.libvirtd.unreserve()? == 1, "one entry of a provider's");
    // dnsmasq refuses a renewal only because the address now belongs to another host: the client names the server in
    // its request, and the server then checks nothing else.
    for (mac, address) in [(machine.mac.as_str(), OTHER_ADDRESS), (OTHER_MAC, old)] {
        let host = format!("<host mac='{mac}' ip='{address}'/>");
        place.libvirtd.virsh(&["net-update", NETWORK, "add-last", "ip-dhcp-host", &host, "--live"])?;
    }
    let known = eventually("the node knows the new address", *PATIENCE, async || {
        let entry = daemons.ledger().ok()?.into_iter().find(|entry| entry.id == machine.id)?;
        entry.record.to_string().contains(OTHER_ADDRESS).then_some(())
    });
    known.await?;
    all_goes_on(&machine, &mut ticks, &transfer).await.context("after it moved")?;
    // The old address is gone, and the new address is complete: nothing depends on the next renewal.
    let is = |text: &str| text.matches("inet ").count() == 1 && text.contains(&format!("{OTHER_ADDRESS}/24"));
    machine.until(&addresses, is).await?;
    let said = place.consoles();
    ensure!(!said.contains("make the route to"), "the NIC was without its address for a while");
    machine.until_mtu(&[mtu]).await?;

    // The carrier of the NIC.
    for state in ["down", "up"] {
        place.libvirtd.virsh(&["domif-setlink", &machine.domain, &machine.tap, state])?;
        if state == "down" {
            let (from, to) = (machine.other.namespace().clone(), machine.pod.v4());
            let silent = spawn_blocking(move || ping(&from, to, 56, Duration::from_secs(2))).await?;
            ensure!(silent.is_err(), "the cable is out and there is an answer");
        }
    }
    all_goes_on(&machine, &mut ticks, &transfer).await.context("after its cable was out")?;
    transfer.end().await?;
    machine.converse(world, mtu).await.context("after all of it")?;
    machine.stop(place, daemons).await
}

/// Checks the tunnel in both directions, the link, and the exec and connection that were under way.
async fn all_goes_on(machine: &Machine, ticks: &mut Ticks, transfer: &Transfer) -> anyhow::Result<()> {
    machine.is_reached().await?;
    ticks.go_on(machine).await.context("the exec that streams")?;
    machine.fetches().await?;
    transfer.goes_on().await
}
