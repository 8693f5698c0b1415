//! Takes a world away, also when the process that made it was killed: a shell of its own process group that waits for
//! the end of its input.

use std::{
    io::{self, Read},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
};

/// Ends every process in the world's network namespaces and every program of ours that has a file of the world's folder
/// open (each of the local provider's VMs hangs on such a one), removes the namespaces, what is mounted below the folder,
/// and the folder. `$1` is what the namespaces' names begin with, `$2` the folder, `$3` the process that made them.
const SCRIPT: &str = r#"
trap '' INT TERM HUP QUIT
echo ready
exec >/dev/null
read -r _
for round in 1 2 3 4 5 6 7 8 9 10; do
    found=
    for path in /run/netns/"$1"*; do
        [ -e "$path" ] || continue
        for pid in $(ip netns pids "${path##*/}" 2>/dev/null); do
            [ "$pid" != "$3" ] && kill -9 "$pid" 2>/dev/null && found=yes
        done
    done
    for open in $(find /proc/[0-9]*/fd -maxdepth 1 -lname "$2/*" 2>/dev/null); do
        pid=${open#/proc/} pid=${pid%%/*}
        case "$(readlink /proc/$pid/exe)" in
            */peerpod-*) [ "$pid" != "$3" ] && kill -9 "$pid" 2>/dev/null && found=yes ;;
        esac
    done
    [ -z "$found" ] && break
    sleep 0.05
done
for path in /run/netns/"$1"*; do
    [ -e "$path" ] && ip netns del "${path##*/}"
done
while read -r _ _ _ _ point _; do
    case "$point" in "$2"/*) umount -l "$point" ;; esac
done < /proc/self/mountinfo
[ -n "$PEERPOD_KEEP" ] || rm -rf --one-file-system "$2"
# An `ip` that an interrupted process had just started may make one more.
(
    sleep 1
    for path in /run/netns/"$1"*; do
        [ -e "$path" ] && ip netns del "${path##*/}"
    done
) >/dev/null 2>&1 &
"#;

/// A Ctrl-C in the moment between its birth and its own process group kills it: then another one is started.
const TRIES: usize = 5;

/// The watcher of one world.
pub(crate) struct Janitor {
    child: Child,
    alive: Option<ChildStdin>,
}

impl Janitor {
    /// Starts watching; `prefix` and `folder` must be this world's alone. No signal to us or to our group ends it when
    /// this returns.
    pub(crate) fn start(prefix: &str, folder: &Path) -> io::Result<Janitor> {
        for _ in 0..TRIES {
            let mut janitor = Janitor::spawn(prefix, folder)?;
            let mut word = Vec::new();
            if let Some(mut output) = janitor.child.stdout.take() {
                output.read_to_end(&mut word)?;
            }
            if word == b"ready\n" {
                return Ok(janitor);
            }
        }
        Err(io::Error::other("the shell that is to clean up ends at once"))
    }

    fn spawn(prefix: &str, folder: &Path) -> io::Result<Janitor> {
        let mut child = Command::new("/bin/sh")
            .arg("-c")
            .arg(SCRIPT)
            .arg("peerpod-janitor")
            .arg(prefix)
            .arg(folder)
            .arg(std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .current_dir("/")
            .process_group(0) // a Ctrl-C at the terminal is not for it
            .spawn()?;
        let alive = child.stdin.take();
        Ok(Janitor { child, alive })
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        self.alive = None;
        // It has a bound of its own on everything it does.
        drop(self.child.wait());
    }
}
