//! Runs as pid 1 if the VM image has no other. Mounts missing file systems, loads the machine's modules, and reaps.
//! Keeps `peerpod-guest serve` running, feeds the watchdog, and shuts the machine down in order. Small and
//! single-threaded, because the end of pid 1 is the end of the VM.
//!
//! `serve` is a process of its own so that kata-agent and containers survive its death: pid 1 adopts them. In a "VM" of
//! namespaces the same program handles only its own processes, and leaves the machine alone.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use netlink_packet_route::RouteNetlinkMessage;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use peerpod_common::backoff::Backoff;
use peerpod_podnet::netlink::Client;

use crate::agent::{LONGEST_PAUSE, PAUSE, STABLE};
use crate::config::Settings;
use crate::status::{self, Past};
use crate::{entropy, files, power};

pub(crate) mod button;
mod lockdown;
pub(crate) mod modules;
mod root;
mod settle;
mod shutdown;
pub(crate) mod uevents;
mod usr;
mod watchdog;

use button::Buttons;
use modules::Modules;
use uevents::Uevents;
use watchdog::{MEAL, Pulse, Verdict, Watchdog};

/// Time that `serve` may take to end after the request.
const GRACE: Duration = Duration::from_secs(2);
/// List of modules that no device announces and the kernel does not request, made by the builder of the VM image.
const LIST: &str = "/etc/peerpod/modules";
/// Limit of event rounds: the driver of a device announces further devices, as PCI, virtio, SCSI, disk.
const ROUNDS: u32 = 16;
/// Signal that the node was dialled; without it, pid 1 loads the remaining drivers after `GOES_ON`.
const GO_ON: Signal = Signal::SIGUSR1;
const GOES_ON: Duration = Duration::from_secs(3);
/// Niceness while pid 1 loads drivers that nothing waits for.
const LATE: i32 = 19;

/// Runs until the machine must power off. Its return is the end of the VM.
pub(crate) fn run(settings: &Settings) -> anyhow::Result<ExitCode> {
    let began = status::since_boot();
    let first_root = root::build();
    settle::limits();
    if let Err(error) = loopback_up() {
        tracing::warn!(%error, "cannot bring lo up");
    }
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGPWR, GO_ON] {
        signals.add(signal);
    }
    signals.thread_block()?; // `serve` inherits the mask, and resets it for its children
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let mut stages = vec![Past::new("init", began)];
    let machine = status::in_first_pid_namespace().then(|| {
        let began = status::since_boot();
        let machine = Machine::new(first_root);
        stages.push(Past::new("modules", began));
        machine
    });
    if machine.is_none() {
        root::complete();
        settle::settle();
    }
    if let Err(error) =
        files::make_folder(&settings.state_dir).and_then(|()| status::note_past(&settings.state_dir, &stages))
    {
        tracing::warn!(%error, "cannot note the times of the boot");
    }
    let patience = Duration::from_secs(settings.hang_seconds.into());
    let pulse = Pulse::new(settings.state_dir.join(power::FILE), patience);
    let now = Instant::now();
    let supervisor = Supervisor {
        signals,
        serve: None,
        begun: now,
        due: now,
        pause: Backoff::new(PAUSE, LONGEST_PAUSE),
        pulse,
        machine,
        started: now,
        goes_on: false,
    };
    supervisor.run(&settings.state_dir)
}

/// Returns whether this process is `serve` below peerpod-guest as pid 1, which then handles the tasks of pid 1.
pub(crate) fn is_ours() -> bool {
    let exe = |who: &str| fs::read_link(format!("/proc/{who}/exe")).ok();
    nix::unistd::getppid().as_raw() == 1 && exe("1").is_some_and(|init| Some(init) == exe("self"))
}

pub(crate) fn is_complete() -> bool {
    root::is_complete() && usr::is_mounted()
}

/// Signals pid 1, if it is peerpod-guest, that the node was dialled: deferred work may begin.
pub(crate) fn go_on() {
    if is_ours()
        && let Err(error) = kill(nix::unistd::getppid(), GO_ON)
    {
        tracing::warn!(%error, "cannot signal pid 1 to go on");
    }
}

/// State of a machine that belongs to the VM alone.
struct Machine {
    /// Present until all drivers are loaded.
    modules: Option<Modules>,
    first_root: Option<OwnedFd>,
    uevents: Option<Uevents>,
    buttons: Buttons,
    watchdog: Option<Watchdog>,
}

impl Machine {
    /// Loads the drivers needed to dial the node, and then locks the kernel for modules other than the distribution's.
    /// [`Machine::complete`] loads the rest, at once if those drivers do not suffice.
    fn new(first_root: Option<OwnedFd>) -> Machine {
        let modules = Modules::open();
        if modules.is_empty() {
            tracing::warn!("the image has no modules for this kernel; only built-in drivers are available");
        }
        // Subscribe first, then inspect: so no device falls between the two.
        let uevents = Uevents::listen();
        let uevents =
            uevents.inspect_err(|error| tracing::error!(%error, "cannot watch for new devices")).ok();
        let mut all_here = modules.plug_first();
        for _ in 0..ROUNDS {
            let came = uevents.as_ref().map(Uevents::take).unwrap_or_default();
            if came.is_empty() {
                break;
            }
            // Each is loaded, whether or not the previous one failed.
            for alias in came.iter().filter_map(|added| added.alias.as_deref()) {
                all_here &= modules.load_first(alias);
            }
        }
        lockdown::raise();
        let modules = Some(modules);
        let mut machine =
            Machine { modules, first_root, uevents, buttons: Buttons::default(), watchdog: None };
        if !all_here || !entropy::is_there() {
            machine.complete();
        }
        machine
    }

    /// Mounts the remaining file systems and loads all other drivers.
    fn complete(&mut self) {
        let Some(modules) = self.modules.take() else { return };
        root::complete();
        settle::settle();
        usr::mount_file(&modules, self.first_root.take().as_ref());
        nice(LATE);
        modules.cold_plug();
        modules.load_list(Path::new(LIST));
        // Without a device, the kernel's software watchdog: it detects at least that this program hangs.
        if !Path::new(watchdog::FIRST).exists()
            && let Err(error) = modules.load("softdog")
        {
            tracing::info!(%error, "no watchdog");
        }
        for _ in 0..ROUNDS {
            if !self.hear(Some(&modules)) {
                break;
            }
        }
        self.buttons.inspect();
        self.watchdog = Watchdog::open();
        nice(0);
    }

    /// Loads the drivers of new devices; returns whether any came. Without an index, reads it again: a late device is
    /// rare, and a kept index would occupy memory.
    fn hear(&mut self, modules: Option<&Modules>) -> bool {
        let came = self.uevents.as_ref().map(Uevents::take).unwrap_or_default();
        let mut read = None;
        for alias in came.iter().filter_map(|added| added.alias.as_deref()) {
            modules.unwrap_or_else(|| read.get_or_insert_with(Modules::open)).load_for_device(alias);
        }
        if came.iter().any(|added| added.is_input) {
            self.buttons.inspect();
        }
        !came.is_empty()
    }
}

/// Sets the niceness of pid 1: 0 is the default.
fn nice(level: i32) {
    if let Err(error) = rustix::process::setpriority_process(None, level) {
        tracing::debug!(%error, level, "cannot change the priority");
    }
}

struct Supervisor {
    signals: SignalFd,
    serve: Option<Pid>,
    begun: Instant,
    due: Instant,
    pause: Backoff,
    pulse: Pulse,
    machine: Option<Machine>,
    started: Instant,
    /// Whether `serve` has reported that deferred work may begin.
    goes_on: bool,
}

impl Supervisor {
    fn run(mut self, state_dir: &Path) -> anyhow::Result<ExitCode> {
        loop {
            if self.serve.is_none() {
                if power::is_overdue(state_dir) {
                    tracing::error!("the guest program keeps ending and the lease is over");
                    break;
                }
                if Instant::now() >= self.due {
                    self.start();
                }
            }
            if let Some(machine) = &mut self.machine
                && (self.goes_on || self.started.elapsed() > GOES_ON)
            {
                machine.complete();
            }
            // The wait is bounded, to check the lease and the pulse of `serve` in between.
            let is_complete = self.machine.as_ref().is_none_or(|machine| machine.modules.is_none());
            let until = GOES_ON.saturating_sub(self.started.elapsed());
            self.wait(if is_complete { MEAL } else { MEAL.min(until) })?;
            if self.signals_and_children()? {
                break;
            }
            if self.look_after() {
                tracing::info!("the power button was pressed");
                break;
            }
        }
        self.stop()?;
        match self.machine.take() {
            Some(machine) => shutdown::finish(machine.watchdog),
            // The mounts of the pod alone: the machine belongs to the host.
            None => {
                shutdown::flush(power::flush, &mut None);
            }
        }
        power::now(power::Finish::PowerOff);
        Ok(ExitCode::SUCCESS)
    }

    /// Handles devices, buttons, the pulse and the watchdog; returns whether the power button was pressed.
    fn look_after(&mut self) -> bool {
        let verdict = self.pulse.inspect();
        if let (Verdict::Hangs | Verdict::Lost, Some(serve)) = (verdict, self.serve)
            && self.begun.elapsed() > self.pulse.patience
        {
            tracing::error!("peerpod-guest serve hangs: it is killed and started again");
            if let Err(error) = kill(serve, Signal::SIGKILL) {
                tracing::debug!(%error, "peerpod-guest serve has already ended");
            }
        }
        let Some(machine) = &mut self.machine else { return false };
        machine.hear(None);
        match &mut machine.watchdog {
            Some(_) if verdict == Verdict::Lost => tracing::error!("the watchdog is not fed any more"),
            Some(watchdog) => watchdog.feed(),
            None => {}
        }
        machine.buttons.pressed()
    }

    fn start(&mut self) {
        self.begun = Instant::now();
        let spawned = Command::new("/proc/self/exe")
            .arg0("peerpod-guest")
            .arg("serve")
            .current_dir("/")
            .stdin(Stdio::null())
            .spawn();
        match spawned {
            Ok(child) => self.serve = Some(Pid::from_raw(child.id() as i32)),
            Err(error) => {
                tracing::error!(%error, "cannot start peerpod-guest serve");
                self.back_off();
            }
        }
    }

    fn back_off(&mut self) {
        if self.begun.elapsed() > STABLE {
            self.pause.reset();
        }
        self.due = Instant::now() + self.pause.pause();
    }

    /// Waits for a signal, a device event, the next start, or `limit`.
    fn wait(&self, limit: Duration) -> anyhow::Result<()> {
        let until_due = self.due.saturating_duration_since(Instant::now());
        let wait = if self.serve.is_none() { until_due.min(limit) } else { limit };
        let wait = PollTimeout::try_from(wait + Duration::from_millis(1))?;
        let mut polled = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        if let Some(machine) = &self.machine {
            let fds = machine.uevents.iter().map(Uevents::fd).chain(machine.buttons.fds());
            polled.extend(fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        }
        match poll(&mut polled, wait) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Handles signals and ended children; returns whether the machine must power off.
    fn signals_and_children(&mut self) -> anyhow::Result<bool> {
        let mut ends = false;
        while let Some(signal) = self.signals.read_signal()? {
            if signal.ssi_signo == GO_ON as u32 {
                self.goes_on = true;
            } else if signal.ssi_signo != Signal::SIGCHLD as u32 {
                tracing::info!(signal = signal.ssi_signo, "asked to power off");
                ends = true;
            }
        }
        // The ends of several children may come as one signal.
        loop {
            let status = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(ends),
                Err(Errno::EINTR) => continue,
                other => other?,
            };
            if status.pid().is_none() || status.pid() != self.serve {
                continue;
            }
            self.serve = None;
            if matches!(status, WaitStatus::Exited(_, code) if code == i32::from(power::POWER_OFF)) {
                ends = true;
            } else {
                tracing::error!(?status, "peerpod-guest serve ended");
                self.back_off();
            }
        }
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        let Some(serve) = self.serve else { return Ok(()) };
        let deadline = Instant::now() + GRACE;
        if let Err(error) = kill(serve, Signal::SIGTERM) {
            tracing::debug!(%error, "peerpod-guest serve has already ended");
        }
        while self.serve.is_some() && Instant::now() < deadline {
            self.wait(deadline.saturating_duration_since(Instant::now()))?;
            self.signals_and_children()?;
        }
        Ok(())
    }
}

fn loopback_up() -> anyhow::Result<()> {
    let link = rtnetlink::LinkUnspec::new_with_index(1).up();
    Ok(Client::route()?.tell(0, RouteNetlinkMessage::SetLink(link.build()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_exits_lengthen_the_restart_pause() {
        let signals = SignalFd::with_flags(&SigSet::empty(), SfdFlags::SFD_CLOEXEC).unwrap();
        let now = Instant::now();
        let pulse = Pulse::new("/nonexistent".into(), STABLE);
        let mut supervisor = Supervisor {
            signals,
            serve: None,
            begun: now,
            due: now,
            pause: Backoff::new(PAUSE, LONGEST_PAUSE),
            pulse,
            machine: None,
            started: now,
            goes_on: false,
        };
        for expected in [100, 200, 400, 800, 1600, 3200, 5000, 5000] {
            let mut pause = supervisor.pause;
            assert_eq!(pause.pause().as_millis(), expected);
            supervisor.back_off();
        }
        supervisor.begun = now.checked_sub(STABLE * 2).unwrap();
        supervisor.back_off();
        assert_eq!(supervisor.pause.pause(), PAUSE * 2);
    }
}
