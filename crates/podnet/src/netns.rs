//! Network namespaces: open and check one, run code in one, make and remove a named one.
//!
//! The only place of the project that calls `setns` or `unshare` for a network namespace, and it does so only on a
//! thread that ends right after: no thread can be left in the wrong namespace. A netlink socket belongs to the
//! namespace it was made in for its whole life, so that is all such a thread has to make.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::CloneFlags;
use nix::sys::statfs::{NSFS_MAGIC, fstatfs, statfs};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::Error;
use super::netlink::Client;

/// Which network namespace it is, whatever path leads to it: the namespace file's device and inode. Two that are
/// open at the same time are the same namespace exactly if these are equal; the kernel may give an inode again after
/// a namespace is gone and nobody holds it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsId {
    /// Device number of the kernel's nsfs.
    pub dev: u64,
    /// Inode in it.
    pub inode: u64,
}

impl NetnsId {
    /// The identity of the namespace a path leads to now, without opening it; `None` where the path leads nowhere or
    /// not to a namespace file. This is how a vanished or replaced namespace is found.
    pub fn of(path: &Path) -> Option<NetnsId> {
        let filesystem = statfs(path).ok()?;
        if filesystem.filesystem_type() != NSFS_MAGIC {
            return None;
        }
        let meta = fs::metadata(path).ok()?;
        Some(NetnsId { dev: meta.dev(), inode: meta.ino() })
    }
}

/// An open network namespace. While a copy of it lives the namespace lives, even when its name is gone.
#[derive(Clone, Debug)]
pub struct Netns(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    id: NetnsId,
    path: PathBuf,
    // First the socket whose making proved that this is a network namespace, later one that a step left for the next:
    // a thread and a socket cost as much as half a step.
    idle: Mutex<Option<Client>>,
}

impl Netns {
    /// Opens the namespace at `path` and makes sure that it is a network namespace.
    ///
    /// # Errors
    /// [`Error::Netns`] where the path cannot be opened, [`Error::NotNetns`] where it is something else. A FIFO or a
    /// device at the path is not opened, so this does not block on one.
    pub fn open(path: impl AsRef<Path>) -> Result<Netns, Error> {
        let path = path.as_ref();
        let failed = |source: io::Error| Error::Netns { attempt: "open", path: path.to_owned(), source };
        let not = |what: &str| Error::NotNetns { path: path.to_owned(), what: what.to_owned() };
        // O_PATH first: looking at a thing must not have the effects that opening a FIFO or a device has.
        let handle = nix::fcntl::open(
            path,
            nix::fcntl::OFlag::O_PATH | nix::fcntl::OFlag::O_CLOEXEC,
            nix::sys::stat::Mode::empty(),
        )
        .map_err(|e| failed(e.into()))?;
        if fstatfs(handle.as_fd()).map_err(|e| failed(e.into()))?.filesystem_type() != NSFS_MAGIC {
            return Err(not("an ordinary file or folder"));
        }
        let file = File::open(format!("/proc/self/fd/{}", handle.as_raw_fd())).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        let id = NetnsId { dev: meta.dev(), inode: meta.ino() };
        let idle = match run_in(file.as_fd(), Client::route).and_then(|made| made) {
            Ok(client) => client,
            // setns says so for a namespace of another kind.
            Err(e) if e.raw_os_error() == Some(libc_einval()) => {
                return Err(not("a namespace of another kind"));
            }
            Err(source) => return Err(Error::Netns { attempt: "enter", path: path.to_owned(), source }),
        };
        Ok(Netns(Arc::new(Inner { file, id, path: path.to_owned(), idle: Mutex::new(Some(idle)) })))
    }

    /// The namespace the calling thread is in.
    ///
    /// # Errors
    /// As [`Netns::open`]; `/proc` must be mounted.
    pub fn current() -> Result<Netns, Error> {
        Netns::open("/proc/thread-self/ns/net")
    }

    /// A new namespace without a name; it goes when the last copy is dropped.
    ///
    /// # Errors
    /// [`Error::Netns`] where the kernel refuses (needs CAP_SYS_ADMIN).
    pub fn scratch() -> Result<Netns, Error> {
        let failed =
            |source| Error::Netns { attempt: "make", path: PathBuf::from("(without a name)"), source };
        on_own_thread(|| {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET)?;
            Ok(Netns::current())
        })
        .map_err(failed)?
    }

    /// Which namespace it is.
    pub fn id(&self) -> NetnsId {
        self.0.id
    }

    /// The path it was opened by; for messages.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Whether the path still leads to this very namespace.
    pub fn is_still_there(&self) -> bool {
        NetnsId::of(&self.0.path) == Some(self.0.id)
    }

    /// Runs `f` on a new thread in this namespace and waits for it. A panic of `f` becomes an error.
    ///
    /// # Errors
    /// When the thread cannot be started, the namespace cannot be entered (needs CAP_SYS_ADMIN), or `f` panicked.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> io::Result<T> {
        run_in(self.0.file.as_fd(), f)
    }

    /// Runs `inside` on a new thread in this namespace and `meanwhile` on this one, and waits for both. A panic of
    /// `inside` becomes an error.
    pub(crate) fn run_beside<T: Send, U>(
        &self,
        inside: impl FnOnce() -> T + Send,
        meanwhile: impl FnOnce() -> U,
    ) -> (io::Result<T>, U) {
        let netns = self.0.file.as_fd();
        beside(|| entered(netns, inside), meanwhile)
    }

    /// A netlink socket for routes, links and tc in this namespace.
    ///
    /// # Errors
    /// [`Error::Netns`] where the namespace cannot be entered or has no room for a socket.
    pub fn netlink(&self) -> Result<Client, Error> {
        let idle = self.0.idle.lock().take();
        match idle {
            Some(client) => Ok(client),
            None => self.socket(Client::route),
        }
    }

    /// Keeps a socket of [`Netns::netlink`] for the next who asks; only one, and only after a success. The last step
    /// of a pod's set-up does not: for the pod's life one descriptor is enough.
    pub(crate) fn keep(&self, mut client: Client) {
        client.rest();
        *self.0.idle.lock() = Some(client);
    }

    /// A netlink socket for nftables in this namespace.
    ///
    /// # Errors
    /// As [`Netns::netlink`]; also where the kernel has no netfilter.
    pub fn netfilter(&self) -> Result<Client, Error> {
        self.socket(Client::netfilter)
    }

    fn socket(&self, make: fn() -> io::Result<Client>) -> Result<Client, Error> {
        self.run(make).and_then(|made| made).map_err(|source| Error::Netns {
            attempt: "enter",
            path: self.0.path.clone(),
            source,
        })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

fn libc_einval() -> i32 {
    Errno::EINVAL as i32
}

fn run_in<T: Send>(netns: BorrowedFd<'_>, f: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_own_thread(|| entered(netns, f))
}

/// To be called only on a thread of [`beside`].
#[allow(clippy::disallowed_methods)] // this is the place the rule speaks of: the thread ends right after
fn entered<T>(netns: BorrowedFd<'_>, f: impl FnOnce() -> T) -> io::Result<T> {
    nix::sched::setns(netns, CloneFlags::CLONE_NEWNET)?;
    Ok(f())
}

fn on_own_thread<T: Send>(f: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    beside(f, || ()).0
}

fn beside<T: Send, U>(
    f: impl FnOnce() -> io::Result<T> + Send,
    meanwhile: impl FnOnce() -> U,
) -> (io::Result<T>, U) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, f);
        let other = meanwhile();
        let panicked = |_| Err(io::Error::other("the thread in the network namespace panicked"));
        (thread.and_then(|thread| thread.join().unwrap_or_else(panicked)), other)
    })
}

/// Makes a network namespace with a name, as `ip netns add` does: a new namespace, bound to the file `path`. Only the
/// loopback interface is in it, down. A namespace that is already there is kept and returned; a plain file that a
/// crash left at the path is used.
///
/// # Errors
/// [`Error::Netns`] when the file or the mount cannot be made (needs CAP_SYS_ADMIN).
pub fn create_named(path: impl AsRef<Path>) -> Result<Netns, Error> {
    let path = path.as_ref();
    if NetnsId::of(path).is_some() {
        return Netns::open(path);
    }
    let failed = |source: io::Error| Error::Netns { attempt: "make", path: path.to_owned(), source };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    let existed = path.symlink_metadata().is_ok();
    if !existed {
        File::create_new(path).map_err(failed)?;
    }
    let made = on_own_thread(|| {
        nix::sched::unshare(CloneFlags::CLONE_NEWNET)?;
        mount(Some("/proc/thread-self/ns/net"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        Ok(())
    });
    if let Err(source) = made {
        if !existed {
            // The file is ours and nothing is mounted on it; the error that counts is the one above.
            drop(fs::remove_file(path));
        }
        return Err(failed(source));
    }
    Netns::open(path)
}

/// Gives an open namespace of [`create_named`] its name `path` again. Other mounts there are unmounted in this mount
/// namespace. A plain file is used and not replaced: another container's mount namespace may have the name on it, and
/// would lose it with the file.
///
/// # Errors
/// [`Error::Netns`] when the path cannot be freed, or the file or the mount cannot be made.
pub fn name_again(netns: BorrowedFd<'_>, path: &Path) -> Result<(), Error> {
    let failed = |source: io::Error| Error::Netns { attempt: "name again", path: path.to_owned(), source };
    unmount_all(path).map_err(failed)?;
    if !path.symlink_metadata().is_ok_and(|found| found.is_file()) {
        delete_named(path)?;
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        File::create_new(path).map_err(failed)?;
    }
    let open = format!("/proc/self/fd/{}", netns.as_raw_fd());
    mount(Some(open.as_str()), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(|e| failed(e.into()))
}

/// Unmounts every mount at the path. No mount, or no such path, is fine.
fn unmount_all(path: &Path) -> io::Result<()> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {} // a name can be mounted over twice
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Removes a named network namespace: what is mounted at the path, then the file. Nothing there is fine. Devices in
/// it go when its last holder (a process, an open descriptor) is gone.
///
/// # Errors
/// [`Error::Netns`] when the mount or the file stays.
pub fn delete_named(path: impl AsRef<Path>) -> Result<(), Error> {
    let path = path.as_ref();
    let failed = |source: io::Error| Error::Netns { attempt: "remove", path: path.to_owned(), source };
    unmount_all(path).map_err(failed)?;
    match fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(failed(e)),
    }
}
