//! Measures VMs that boot (QEMU, emulated), the image's size, and the guest program's memory while its pod is idle. The
//! boot time runs from power-on to the guest's first byte to the node. Boots of the bare kernel with a one-line init
//! take turns with it.

use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use peerpod_client::Annotations;
use peerpod_link::user_data::{TicketSecret, UserData, UserDataNode, UserDataTicket, VERSION};
use peerpod_world::qemu::{Machine, Running};
use peerpod_world::{Daemons, Settings, Sight, World};

use crate::load::quantile;
use crate::report::{Goal, Report};
use crate::stages;

const ROUNDS: usize = 7;
const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY: u32 = 512;
/// Address of the host in QEMU's user network.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
const MIB: f64 = (1 << 20) as f64;
/// Prints one line on the console and then sleeps for ever. It uses no library, so that only the kernel is measured.
const BARE: &str = r#"
static long call(long n, long a, long b, long c) {
    __asm__ volatile("syscall" : "+a"(n) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return n;
}
void _start(void) {
    call(1, 1, (long)"bare: up\n", 9);
    for (;;) call(34, 0, 0, 0);
}
"#;

/// Runs the measurements. The image and its programs must exist (`make image`).
pub(crate) async fn run(folder: &Path, report: &mut Report) -> anyhow::Result<()> {
    let target = target()?;
    let image = image()?;
    sizes(&image, report)?;
    boots(folder, &image, report)?;
    stages::run(&image, report).await?;
    memory(&target, report).await
}

/// Returns the folder of the minimal image.
pub(crate) fn image() -> anyhow::Result<PathBuf> {
    Ok(target()?.join("image/minimal"))
}

/// Returns the target folder that this program was built in.
fn target() -> anyhow::Result<PathBuf> {
    let us = std::env::current_exe()?;
    let target = us.ancestors().nth(2).context("peerpod-benches is not below a target folder")?;
    Ok(target.to_owned())
}

fn sizes(image: &Path, report: &mut Report) -> anyhow::Result<()> {
    let mut total = 0.0;
    for file in ["vmlinuz", "initrd.img"] {
        let path = image.join(file);
        let length = fs::metadata(&path).with_context(|| format!("{}: `make image`", path.display()))?.len();
        total += length as f64 / MIB;
    }
    report.figure("image_minimal_mib", total, Goal::None, "kernel and initramfs, as they are loaded");
    Ok(())
}

fn boots(folder: &Path, image: &Path, report: &mut Report) -> anyhow::Result<()> {
    let description: serde_json::Value = serde_json::from_slice(&fs::read(image.join("image.json"))?)?;
    let command_line = description["cmdline_emulated"].as_str().context("image.json: no cmdline_emulated")?;
    let bare = bare_initramfs(folder)?;
    let (mut bare_took, mut ours_took, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        // An uncounted boot precedes each counted one. If the host is itself a VM, its hypervisor may reclaim free
        // memory. The first process to touch it again pays for that: a quarter of a second on the machine where this
        // was measured.
        first_byte_home(folder, image)?;
        let machine =
            Machine::new(MEMORY).user_network("").kernel(&image.join("vmlinuz"), &bare, command_line);
        let mut running = machine.start(folder)?;
        running.line_blocking("bare: up", PATIENCE)?;
        let bare = running.began().elapsed().as_secs_f64();
        drop(running);
        first_byte_home(folder, image)?;
        let ours = first_byte_home(folder, image)?;
        bare_took.push(bare);
        ours_took.push(ours);
        // One ratio per turn: the load of other processes changes more slowly than turns.
        ratios.push(ours / bare);
    }
    let median = |figures: &mut Vec<f64>| quantile(figures, 0.5).context("no boots");
    let (bare, ours, ratio) = (median(&mut bare_took)?, median(&mut ours_took)?, median(&mut ratios)?);
    report.figure("boot_bare_s", bare, Goal::None, "power-on to the one-line init's line; emulated");
    report.figure("guest_boot_s", ours, Goal::None, "power-on to the guest's first byte home; emulated");
    // Some 0.1 of it is the pause before the DHCP client's first request (docs/design/009).
    report.figure("guest_boot_vs_bare", ratio, Goal::AtMost(1.4), "the two above, turn by turn; the median");
    Ok(())
}

fn bare_initramfs(folder: &Path) -> anyhow::Result<PathBuf> {
    let root = folder.join("bare");
    fs::create_dir_all(&root)?;
    let source = folder.join("bare.c");
    fs::write(&source, BARE)?;
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-static", "-nostdlib", "-fno-stack-protector", "-o"]);
    ensure!(compiler.arg(root.join("init")).arg(&source).status()?.success(), "cc failed");
    let archive = folder.join("bare.cpio");
    let mut cpio = Command::new("cpio")
        .args(["--quiet", "-o", "-H", "newc"])
        .current_dir(&root)
        .stdin(Stdio::piped())
        .stdout(fs::File::create(&archive)?)
        .spawn()
        .context("start cpio")?;
    std::io::Write::write_all(&mut cpio.stdin.take().context("cpio's stdin")?, b"init\n")?;
    ensure!(cpio.wait()?.success(), "cpio failed");
    Ok(archive)
}

/// Returns the seconds from the start of QEMU to the guest program's first byte at the address in its user-data.
fn first_byte_home(folder: &Path, image: &Path) -> anyhow::Result<f64> {
    let home = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    home.set_nonblocking(true)?;
    let user_data = UserData {
        version: VERSION,
        ticket: UserDataTicket { id: "b".repeat(32), secret: TicketSecret::new([7; 32]), claims: 1 },
        node: UserDataNode {
            addresses: vec![(HOST, home.local_addr()?.port()).into()],
            ca_sha256: vec![[8; 32]],
            listen: None,
        },
        lease_seconds: 900,
    };
    let file = folder.join("user-data");
    fs::write(&file, user_data.to_json())?;
    let firmware = format!("name=opt/io.peerpod/user-data,file={}", file.display());
    let machine =
        Machine::new(MEMORY).user_network("").with(["-fw_cfg", &firmware]).minimal_image(image, "")?;
    let running = machine.start(folder)?;
    wait_for_a_byte(&home, &running)?;
    Ok(running.began().elapsed().as_secs_f64())
}

fn wait_for_a_byte(home: &TcpListener, running: &Running) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match home.accept() {
            Ok((mut connection, _)) => {
                connection.set_nonblocking(false)?;
                connection.set_read_timeout(Some(PATIENCE))?;
                return connection.read_exact(&mut [0]).context("the guest's first byte");
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        ensure!(Instant::now() < deadline, "the guest does not call; its console:\n{}", running.console());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Measures the image's guest program in a VM of the local provider, where its process is visible.
async fn memory(target: &Path, report: &mut Report) -> anyhow::Result<()> {
    let guest = target.join("x86_64-unknown-linux-musl/image/peerpod-guest");
    let length = fs::metadata(&guest).with_context(|| format!("{}: `make image`", guest.display()))?.len();
    report.figure("guest_size_mib", length as f64 / MIB, Goal::None, "the static program in the image");
    let world = World::new()?;
    let settings = Settings::privileged()
        .set("log.level", "info")
        .set("provider.local.guest-binary", guest.display().to_string())
        .set("provider.local.agent-binary", std::env::current_exe()?.to_string_lossy().into_owned());
    let daemons = Daemons::start(&world, settings).await?;
    let shim = daemons.shim().await?;
    let pod = world.pod()?;
    shim.create_vm("idle", Annotations::new("bench", "idle"), &pod.namespace().path()).await?;
    shim.start_vm_within("idle", PATIENCE).await.with_context(|| daemons.log_tails())?;
    let sight = Sight::of(&world, &[], &daemons)?;
    let (mut all, mut twice) = (0.0, 0.0);
    for pid in sight.pids("peerpod-guest") {
        all += memory_of(pid, "Pss:")?;
        twice += memory_of(pid, "Rss:")?;
    }
    ensure!(all > 0.0, "no peerpod-guest runs: {sight}");
    report.figure(
        "guest_rss_of_each_mib",
        twice,
        Goal::None,
        "pid 1 and serve, what they share counted for each",
    );
    report.figure(
        "guest_rss_mib",
        all,
        Goal::AtMost(6.0),
        "memory of peerpod-guest: pid 1 and serve, what they share counted once (Pss)",
    );
    shim.stop_vm("idle").await?;
    daemons.gone("idle", PATIENCE).await
}

/// Returns the kernel's sum over a process's pages, in MiB.
fn memory_of(pid: u32, kind: &str) -> anyhow::Result<f64> {
    let sums = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = sums.lines().find_map(|line| line.strip_prefix(kind)).with_context(|| format!("no {kind}"))?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib / 1024.0)
}
