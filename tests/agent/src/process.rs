//! Runs one real process: its start in a network namespace, its streams, its exit.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use nix::errno::Errno;
use nix::pty::openpty;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use peerpod_podnet::netns::Netns;
use peerpod_proto::agent::{Mount, Process as Specification};
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::process::Command;
use tokio::sync::{Mutex, watch};

use crate::{TOOL, error};

/// Maximum bytes in the answer to one read, so that the answer fits a frame.
const MAX_READ: usize = 1 << 20;

/// Program of every pod's own container.
const PAUSE: &str = "/pause";

/// Folder of the volumes' mounts in the VM.
const VOLUMES: &str = "/run/peerpod/volumes/";

type Stream = Box<dyn AsyncRead + Send + Unpin>;
type Input = Box<dyn AsyncWrite + Send + Unpin>;

/// A process and its three streams. It leads its own process group, which receives its signals.
pub(crate) struct Process {
    pid: Pid,
    stdin: Mutex<Option<Input>>,
    stdout: Mutex<Option<Stream>>,
    stderr: Mutex<Option<Stream>>,
    exit: watch::Receiver<Option<i32>>,
}

/// Output stream of a process.
#[derive(Clone, Copy)]
pub(crate) enum Output {
    Stdout,
    Stderr,
}

impl Process {
    /// Starts the process of a specification. Its errors distinguish "not found" from "not permitted".
    pub(crate) fn start(
        specification: &Specification,
        netns: Option<&Path>,
        rootfs: Option<&Path>,
        cgroup: Option<&Path>,
        inside: Inside<'_>,
    ) -> ttrpc::Result<Arc<Process>> {
        let mut command = command(specification, rootfs)?;
        if let Some(folder) = cgroup {
            command = streams(wrapped(tool(&["cgroup"]), folder, &command));
        }
        let mut command = enter(command, specification, inside);
        let terminal = if specification.Terminal { Some(attach_terminal(&mut command)?) } else { None };
        let runtime = tokio::runtime::Handle::current();
        let mut spawn = || {
            // Another thread enters the namespace; it does not belong to the runtime.
            let _entered = runtime.enter();
            command.spawn()
        };
        let spawned = match netns {
            Some(path) => Netns::open(path).map_err(namespace)?.run(spawn).map_err(error::io)?,
            None => spawn(),
        };
        let mut child = spawned.map_err(error::io)?;
        // The command holds the terminal's other end. While that is open, the output has no end.
        drop(command);
        let pid = child.id().ok_or_else(|| error::errno(Errno::ESRCH))?;
        let (stdin, stdout): (Option<Input>, Option<Stream>) = match terminal {
            Some((input, output)) => (Some(Box::new(input)), Some(Box::new(output))),
            None => (
                child.stdin.take().map(|stream| Box::new(stream) as _),
                child.stdout.take().map(|stream| Box::new(stream) as _),
            ),
        };
        let stderr = child.stderr.take().map(|stream| Box::new(stream) as _);
        let (exited, exit) = watch::channel(None);
        tokio::spawn(async move {
            let code = match child.wait().await {
                Ok(status) => code(status),
                Err(error) => {
                    tracing::error!(pid, %error, "cannot wait for a process");
                    255
                }
            };
            exited.send_replace(Some(code));
        });
        Ok(Arc::new(Process {
            pid: Pid::from_raw(pid as i32),
            stdin: Mutex::new(stdin),
            stdout: Mutex::new(stdout),
            stderr: Mutex::new(stderr),
            exit,
        }))
    }

    /// Returns its pid in the VM.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Returns the exit code, if the process has ended.
    pub(crate) fn exited(&self) -> Option<i32> {
        *self.exit.borrow()
    }

    /// Waits for the exit code; 128 + signal if a signal ended the process.
    pub(crate) async fn wait(&self) -> i32 {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(code) => code.unwrap_or(255),
            // The waiting task ends only with the whole program.
            Err(_) => 255,
        }
    }

    /// Signals the process group. ESRCH once the process has ended, even while a child of it is alive.
    pub(crate) fn signal(&self, number: u32) -> Result<(), Errno> {
        if self.exited().is_some() {
            return Err(Errno::ESRCH);
        }
        let number = i32::try_from(number).map_err(|_| Errno::EINVAL)?;
        if number == 0 {
            return killpg(self.pid, None);
        }
        // Real-time signals have numbers without a name in nix.
        let signal = Signal::try_from(number).map_err(|_| Errno::EINVAL)?;
        killpg(self.pid, signal)
    }

    /// Ends the whole group, whether or not its leader has ended.
    pub(crate) fn kill_group(&self) {
        // ESRCH means that the group has ended already.
        killpg(self.pid, Signal::SIGKILL).ok();
    }

    /// Waits for output and returns up to `len` bytes of it; empty at the end of the stream.
    pub(crate) async fn read(&self, which: Output, len: u32) -> ttrpc::Result<Vec<u8>> {
        let stream = match which {
            Output::Stdout => &self.stdout,
            Output::Stderr => &self.stderr,
        };
        let mut guard = stream.lock().await;
        let Some(reader) = guard.as_mut() else { return Ok(Vec::new()) };
        let mut data = vec![0; (len as usize).clamp(1, MAX_READ)];
        let count = match reader.read(&mut data).await {
            Ok(count) => count,
            // A read from a terminal fails with EIO once the other end is closed; that is its end of file.
            Err(error) if error.raw_os_error() == Some(Errno::EIO as i32) => 0,
            Err(error) => return Err(error::io(error)),
        };
        if count == 0 {
            *guard = None;
        }
        data.truncate(count);
        Ok(data)
    }

    /// Writes all of it, at the pace of the process's reads. Empty data closes the input.
    pub(crate) async fn write(&self, data: &[u8]) -> ttrpc::Result<u32> {
        if data.is_empty() {
            self.close_stdin().await;
            return Ok(0);
        }
        let mut guard = self.stdin.lock().await;
        let writer = guard.as_mut().ok_or_else(|| error::errno(Errno::EPIPE))?;
        writer.write_all(data).await.map_err(error::io)?;
        writer.flush().await.map_err(error::io)?;
        Ok(data.len() as u32)
    }

    pub(crate) async fn close_stdin(&self) {
        *self.stdin.lock().await = None;
    }
}

fn command(specification: &Specification, rootfs: Option<&Path>) -> ttrpc::Result<Command> {
    let (program, arguments) =
        specification.Args.split_first().ok_or_else(|| error::invalid("the process has no arguments"))?;
    let mut command = match program.as_str() {
        // A separate program enters the root, which would need unsafe code here; the VM's image has no chroot(1).
        program if rootfs.is_some() => {
            let mut command = tool(&["chroot"]);
            command.arg(rootfs.unwrap_or(Path::new("/"))).arg(&specification.Cwd).arg(program);
            command
        }
        TOOL => tool(&[]),
        // The real agent unpacks this program from its image for the pod's own container.
        PAUSE if !Path::new(PAUSE).exists() => tool(&["pause"]),
        program => Command::new(program),
    };
    command.args(arguments).env_clear();
    command.envs(specification.Env.iter().filter_map(|entry| entry.split_once('=')));
    if rootfs.is_none() && !specification.Cwd.is_empty() {
        // An image need not contain it, and the real agent makes it, too.
        std::fs::create_dir_all(&specification.Cwd).map_err(error::io)?;
        command.current_dir(&specification.Cwd);
    }
    Ok(streams(command))
}

fn streams(mut command: Command) -> Command {
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Mount namespace of a container's process.
#[derive(Clone, Copy)]
pub(crate) enum Inside<'b> {
    /// The VM's: the container has no mounts of its own.
    Nothing,
    /// A new one with these mounts; the file appears when they are done.
    New(&'b [Bind], &'b Path),
    /// That of the process with this pid.
    Of(i32),
}

impl<'b> Inside<'b> {
    /// Returns a new namespace for these mounts, with `ready` as its signal file, or none without mounts.
    pub(crate) fn new(binds: &'b [Bind], ready: &'b Path) -> Inside<'b> {
        if binds.is_empty() { Inside::Nothing } else { Inside::New(binds, ready) }
    }
}

/// A volume at its place in a container.
pub(crate) struct Bind {
    source: String,
    destination: String,
    read_only: bool,
}

impl Bind {
    /// Returns the bind of a specification's mount, if that is a volume's.
    pub(crate) fn of(mount: &Mount) -> Option<Bind> {
        (mount.type_ == "bind" && mount.source.starts_with(VOLUMES)).then(|| Bind {
            source: mount.source.clone(),
            destination: mount.destination.clone(),
            read_only: mount.options.iter().any(|option| option == "ro"),
        })
    }
}

/// Mounts, then executes the program. `unshare` and `nsenter` of util-linux do in the child the steps that would need
/// unsafe code here.
const MOUNT: &str = r#"set -e
ready=$1
shift
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "$(dirname "$2")"; touch "$2"; fi
    mount --bind "$1" "$2"
    if [ "$3" = ro ]; then mount -o remount,bind,ro "$2"; fi
    shift 3
done
shift
: > "$ready"
exec "$@""#;

fn enter(command: Command, specification: &Specification, inside: Inside<'_>) -> Command {
    let user = &specification.User;
    let mut outer = match inside {
        Inside::Nothing => {
            let mut command = command;
            if user.UID != 0 || user.GID != 0 {
                command.uid(user.UID).gid(user.GID);
            }
            return command;
        }
        Inside::New(binds, ready) => {
            let mut outer = Command::new("unshare");
            outer.args(["--mount", "--propagation", "private", "sh", "-c", MOUNT, "sh"]).arg(ready);
            for bind in binds {
                let how = if bind.read_only { "ro" } else { "rw" };
                outer.args([bind.source.as_str(), bind.destination.as_str(), how]);
            }
            outer.arg("--");
            outer
        }
        Inside::Of(pid) => {
            let mut outer = Command::new("nsenter");
            outer.args(["--target", &pid.to_string(), "--mount", "--"]);
            outer
        }
    };
    if user.UID != 0 || user.GID != 0 {
        let groups: Vec<String> = user.AdditionalGids.iter().map(u32::to_string).collect();
        outer.args(["setpriv", "--reuid", &user.UID.to_string(), "--regid", &user.GID.to_string()]);
        match groups.is_empty() {
            true => outer.arg("--clear-groups"),
            false => outer.args(["--groups", &groups.join(",")]),
        };
    }
    let inner = command.as_std();
    outer.arg(inner.get_program()).args(inner.get_args()).env_clear();
    outer.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if let Some(folder) = inner.get_current_dir() {
        outer.current_dir(folder);
    }
    streams(outer)
}

/// Returns a command that executes another one, which follows the argument.
fn wrapped(mut outer: Command, argument: &Path, inner: &Command) -> Command {
    let inner = inner.as_std();
    outer.arg(argument).arg(inner.get_program()).args(inner.get_args()).env_clear();
    outer.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if let Some(folder) = inner.get_current_dir() {
        outer.current_dir(folder);
    }
    outer
}

/// Returns a command that runs this program's tools.
fn tool(arguments: &[&str]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg("tool").args(arguments);
    command
}

/// Gives the command its own terminal; returns the two ends of this side. `setsid --ctty` of util-linux does in the
/// child the steps that would need unsafe code here.
fn attach_terminal(command: &mut Command) -> ttrpc::Result<(File, File)> {
    let pty = openpty(None, None).map_err(error::errno)?;
    let mut wrapped = wrapped(Command::new("setsid"), Path::new("--ctty"), command);
    let duplicate = || pty.slave.try_clone().map_err(error::io);
    wrapped.stdin(duplicate()?).stdout(duplicate()?).stderr(duplicate()?);
    *command = wrapped;
    let master = std::fs::File::from(pty.master);
    let other = master.try_clone().map_err(error::io)?;
    Ok((File::from_std(master), File::from_std(other)))
}

fn namespace(failed: peerpod_podnet::Error) -> ttrpc::Error {
    use peerpod_podnet::Error;
    match failed {
        Error::Netns { source, .. } => error::io(source),
        other => error::invalid(other),
    }
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}
