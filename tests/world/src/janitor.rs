//! Removes a world, even if the process that made it was killed: a shell in a separate process group waits for the end
//! of its standard input and then cleans up.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

/// Script of the janitor. It kills every process in the world's network namespaces. It also kills every Peerpod program
/// with an open file in the world's folder; each VM of the local provider depends on one. It then removes the
/// namespaces, the mounts below the folder, and the folder. `$1` is the prefix of the namespaces' names, `$2` the
/// folder, `$3` the pid of the process that made them.
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

/// Number of attempts. A Ctrl-C between the shell's start and its own process group kills it; then another is started.
const TRIES: usize = 5;

/// Shell that removes one world.
pub(crate) struct Janitor {
    child: Child,
    alive: Option<ChildStdin>,
}

impl Janitor {
    /// Starts the shell; `prefix` and `folder` must belong to this world alone. After the return no signal to this
    /// process or to its process group ends the shell.
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
            .process_group(0) // a Ctrl-C at the terminal must not reach it
            .spawn()?;
        let alive = child.stdin.take();
        Ok(Janitor { child, alive })
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        self.alive = None;
        // Bounded: each step of the script has a limit.
        drop(self.child.wait());
    }
}
