//! The pod network's cases that a real VM can change: how large packets of its wire may be (by DHCP, and changed later),
//! what its virtio card does for it, and an address that DHCP takes away. The machines boot in libvirtd and QEMU. Needs
//! root and `make image`.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, ensure};
use peerpod_client::{AgentClient, ContainerSpec, exec_request};
use peerpod_tests::{Sandbox, fresh_id, machines::Place, stop_promptly, vm};
use peerpod_world::{
    Daemons, Namespace, Pod, Settings, World, eventually,
    libvirtd::{NETWORK, Shape},
    page::{PageServer, page_for},
    ping::ping,
    traffic::{self, ECHO_PORT, Echo},
};
use tokio::{task::spawn_blocking, time::timeout};

const PATIENCE: Duration = Duration::from_secs(60);
/// More than any of the VMs' wires takes: what limits the pod's packets is the wire.
const POD_MTU: u32 = 9000;
/// In bytes: goes there and back, of each family, begun by each of the two.
const BULK: usize = 3 << 20;
/// Of the echo in the pod.
const PORT_INSIDE: u16 = 7778;
/// Begins a command in the VM's own network, beside the pod's.
const BESIDE: &str = "nsenter -t 1 -n /bin/busybox";

/// A pod in a machine of its own, with an echo in it, and another pod of the node.
struct Machine {
    id: String,
    pod: Pod,
    other: Pod,
    shim: peerpod_client::ShimClient,
    agent: AgentClient,
    /// libvirt's name of it.
    domain: String,
    /// The node's end of its card.
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
        // As the echo of the world's traffic it first tells 64 bytes, but not who asked.
        let script = format!("exec busybox nc -ll -p {PORT_INSIDE} -e sh -c \"printf '%-64s' ::; exec cat\"");
        agent.exec_process(&exec_request("main", "echo", &["/bin/sh", "-c", &script])).await?;
        let domain = place.libvirtd.domains()?.pop().context("a domain")?;
        let cards = place.libvirtd.virsh(&["domiflist", &domain])?;
        let card = cards.lines().find(|line| line.contains(NETWORK)).context("a card")?;
        let words: Vec<&str> = card.split_whitespace().collect();
        let [tap, _, _, _, mac] = words[..] else { anyhow::bail!("a card like no other: {card}") };
        let (tap, mac) = (tap.to_owned(), mac.to_owned());
        Ok(Machine { id, pod, other, shim, agent, domain, tap, mac })
    }

    /// What a script in the pod prints.
    async fn shell(&self, script: &str) -> anyhow::Result<String> {
        self.run(&["/bin/sh", "-c", script]).await
    }

    async fn run(&self, command: &[&str]) -> anyhow::Result<String> {
        let request = exec_request("main", &fresh_id("exec"), command);
        let output = timeout(PATIENCE, self.agent.exec(&request)).await;
        let output = output.with_context(|| format!("{command:?}: no end within {PATIENCE:?}"))??;
        ensure!(output.status == 0, "{command:?}: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Asks in the pod, again and again, until the answer is right.
    async fn until(&self, script: &str, is: impl Fn(&str) -> bool) -> anyhow::Result<String> {
        let mut last: anyhow::Result<String> = Err(anyhow::anyhow!("never asked"));
        let seen = eventually(script, PATIENCE, async || {
            last = self.shell(script).await;
            last.as_ref().is_ok_and(|text| is(text)).then_some(())
        })
        .await;
        seen.with_context(|| format!("it says {last:?}"))?;
        last
    }

    /// Waits until the VM's own card takes packets of this size.
    async fn until_card(&self, mtu: u32) -> anyhow::Result<()> {
        let expected = format!("mtu {mtu} ");
        self.until(&format!("{BESIDE} ip link show dev eth0"), |text| text.contains(&expected))
            .await
            .map(drop)
    }

    /// Waits until the pod's interface in the VM takes packets of one of these sizes; which.
    async fn until_mtu(&self, of: &[u32]) -> anyhow::Result<u32> {
        let read = |text: &str| -> Option<u32> {
            text.split_whitespace().skip_while(|word| *word != "mtu").nth(1)?.parse().ok()
        };
        let is = |text: &str| read(text).is_some_and(|mtu| of.contains(&mtu));
        let shown = self.until("busybox ip link show dev eth0", is).await;
        read(&shown.with_context(|| format!("the pod's MTU is to be one of {of:?}"))?).context("an MTU")
    }

    /// Packets that were cut into fragments so far, wherever the pod's pass.
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

    /// The largest packets there are and many MiB, both ways, both families; nothing is cut, and all arrives as it was sent.
    async fn converse(&self, world: &World, mtu: u32) -> anyhow::Result<()> {
        // Who is where is known by then.
        self.is_reached().await?;
        let before = self.fragments(world).await?;
        let (outside, echo) = (
            self.other.namespace().netns(),
            Echo::start(self.other.namespace().netns(), &self.other.addresses())?,
        );
        // Kept in the VM: its memory is as good as a disk.
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
        echo.end().await;
        let after = self.fragments(world).await?;
        ensure!(after == before, "packets were cut: {before:?} before, {after:?} after");
        Ok(())
    }

    /// The other pod gets an answer of the pod, in both families.
    async fn is_reached(&self) -> anyhow::Result<()> {
        for address in self.pod.addresses() {
            let from = self.other.namespace().clone();
            spawn_blocking(move || ping(&from, address, 56, PATIENCE)).await??;
        }
        Ok(())
    }

    /// The pod gets a page of the other one, in both families and as itself.
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
        daemons.gone(&self.id, PATIENCE).await?;
        drop(self);
        place.assert_clean();
        Ok(())
    }
}

/// A probe of the path that got lost on a busy machine is not the last word for ten minutes.
fn settings(place: &Place) -> Settings {
    place.settings.clone().set("tunnel.probe-interval", "10s")
}

/// The node's end of the VM's card: what the VM said that it takes is what the node may leave to it.
const OFFLOADS: [&str; 3] = ["tx-checksumming", "tcp-segmentation-offload", "generic-segmentation-offload"];

/// Switches the offloads of the node's end of the card; they are so when this returns.
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

/// What VM and hypervisor agreed on for the card (`linux/virtio_net.h`): the checksums and the cutting of large segments are
/// left to the other side, both ways, in both families.
async fn card_offloads(machine: &Machine) -> anyhow::Result<()> {
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

/// A small wire from the VM's first packet on, with the offloads that machines have, without those of the node's side; and
/// one that becomes a large one while the pod runs.
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
    machine.until_card(1400).await.context("DHCP says what the wire takes")?;
    // By the family that carries the tunnel.
    let mtu = machine.until_mtu(&[1400 - 50, 1400 - 70]).await?;
    let tunnel = 1400 - mtu;

    card_offloads(&machine).await?;
    offloads_are(world, &machine.tap, "on")?;
    machine.converse(world, mtu).await.context("with offloads")?;
    offloads(world, &machine.tap, "off")?;
    machine.converse(world, mtu).await.context("without offloads on the node's side")?;

    // The cloud gives the wire jumbo frames.
    offloads(world, &machine.tap, "on")?;
    let tap = &machine.tap;
    world.node().ip(&format!("link set lv{NETWORK} mtu 9000\nlink set {tap} mtu 9000\n"))?;
    machine.shell(&format!("{BESIDE} ip link set dev eth0 mtu 9000")).await?;
    let mtu = machine.until_mtu(&[9000 - tunnel]).await.context("a wire that is wider now")?;
    machine.converse(world, mtu).await.context("with jumbo frames")?;
    machine.stop(place, daemons).await
}

/// Numbered lines of an exec, none missing and none twice.
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

    /// Reads on to what is said after this call.
    async fn go_on(&mut self, machine: &Machine) -> anyhow::Result<()> {
        // A file that is just being written is empty.
        let now = machine.shell("until n=$(cat /run/ticks) && [ -n \"$n\" ]; do :; done; echo $n").await?;
        self.read_to(now.trim().parse::<u64>()? + 3, machine).await
    }

    async fn read_to(&mut self, number: u64, machine: &Machine) -> anyhow::Result<()> {
        while self.last < number {
            let read = timeout(PATIENCE, machine.agent.read_stdout("main", "ticks", 4096)).await;
            let read = read.with_context(|| format!("no line after {} within {PATIENCE:?}", self.last))??;
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

/// One TCP connection from the other pod to the pod's echo, on which bytes go to and fro all the time.
struct Transfer {
    rounds: Arc<AtomicU64>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Transfer {
    fn start(from: &Namespace, to: IpAddr) -> anyhow::Result<Transfer> {
        let to = SocketAddr::new(to, PORT_INSIDE);
        let mut stream = from.run(|| TcpStream::connect_timeout(&to, PATIENCE))??;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
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
                    // The machine has other work, too.
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
        let on = eventually("the connection goes on", PATIENCE, async || {
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

/// What the DHCP server gives the VM from its next question on.
const OTHER_ADDRESS: &str = "10.97.0.252";
/// Whose address the VM's first one is from then on.
const OTHER_MAC: &str = "52:54:00:00:00:fe";

/// On a wire with jumbo frames from the start: the server refuses to renew the lease and gives another address of the same
/// network, while an exec and a connection stream; later the card loses its cable and gets it back.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_gets_another_address_by_dhcp_takes_all_along() {
    let place = Place::on(Shape { mtu: Some(9000), ipv6: false, renewal: Some(8) }, &[]);
    let daemons = Daemons::start(&place.world, settings(&place)).await.unwrap();
    let done = moves(&place, &daemons).await;
    done.unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", daemons.log_tails(), place.consoles()));
}

async fn moves(place: &Place, daemons: &Daemons) -> anyhow::Result<()> {
    let world = &place.world;
    let machine = Machine::start(place, daemons, "moving").await?;
    machine.until_card(9000).await.context("DHCP says what the wire takes")?;
    let mtu = machine.until_mtu(&[9000 - 50]).await?;
    machine.converse(world, mtu).await.context("before it moves")?;
    let addresses = format!("{BESIDE} ip -4 addr show dev eth0");
    let before = machine.shell(&addresses).await?;
    ensure!(before.contains("inet 10.97.0.") && !before.contains(OTHER_ADDRESS), "{before}");
    let mut ticks = Ticks::start(&machine).await?;
    let transfer = Transfer::start(machine.other.namespace(), machine.pod.v4())?;

    let old = before.split("inet ").nth(1).and_then(|rest| rest.split('/').next()).context("no address")?;
    // The reservation was in force before the VM's first question; any other address has one chance in 241.
    let network = place.libvirtd.virsh(&["net-dumpxml", NETWORK])?;
    let mut hosts = network.lines().filter(|line| line.contains(&format!("mac='{}'", machine.mac)));
    let is_reserved = hosts.any(|host| host.contains(&format!("ip='{old}'")));
    ensure!(is_reserved, "{old} is not the reserved address: {network}");
    ensure!(place.libvirtd.unreserve()? == 1, "one entry of a provider's");
    // That the address is another host's now is what dnsmasq refuses a renewal for: the client names the server in it,
    // which then looks no further.
    for (mac, address) in [(machine.mac.as_str(), OTHER_ADDRESS), (OTHER_MAC, old)] {
        let host = format!("<host mac='{mac}' ip='{address}'/>");
        place.libvirtd.virsh(&["net-update", NETWORK, "add-last", "ip-dhcp-host", &host, "--live"])?;
    }
    let known = eventually("the node knows the new address", PATIENCE, async || {
        let entry = daemons.ledger().ok()?.into_iter().find(|entry| entry.id == machine.id)?;
        entry.record.to_string().contains(OTHER_ADDRESS).then_some(())
    });
    known.await?;
    all_goes_on(&machine, &mut ticks, &transfer).await.context("after it moved")?;
    // The one before is gone, and the one and only is there whole: nothing waits for the next renewal.
    let is = |text: &str| text.matches("inet ").count() == 1 && text.contains(&format!("{OTHER_ADDRESS}/24"));
    machine.until(&addresses, is).await?;
    let said = place.consoles();
    ensure!(!said.contains("make the route to"), "the card was without its address for a while");
    machine.until_mtu(&[mtu]).await?;

    // The cable.
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

/// The tunnel both ways, the link, and what was in its middle.
async fn all_goes_on(machine: &Machine, ticks: &mut Ticks, transfer: &Transfer) -> anyhow::Result<()> {
    machine.is_reached().await?;
    ticks.go_on(machine).await.context("the exec that streams")?;
    machine.fetches().await?;
    transfer.goes_on().await
}
