//! Opens, checks and enters network namespaces, and makes and removes named ones.
//!
//! Node and guest call `setns` and `unshare` for a network namespace only here, on a thread that ends right after. A
//! netlink socket stays in the namespace in which it was made, so such a thread only has to make the socket.

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

/// Identity of a network namespace, regardless of the path: device and inode of the namespace file. Two open namespaces
/// are the same exactly if their identities are equal. The kernel may reuse the inode of a closed namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsId {
    /// Device number of the kernel's nsfs.
    pub dev: u64,
    /// Inode number on that device.
    pub inode: u64,
}

impl NetnsId {
    /// Returns the identity of the namespace that a path leads to now, without opening it. Returns `None` where the
    /// path leads nowhere or not to a namespace file. This detects a vanished or replaced namespace.
    pub fn of(path: &Path) -> Option<NetnsId> {
        let filesystem = statfs(path).ok()?;
        if filesystem.filesystem_type() != NSFS_MAGIC {
            return None;
        }
        let meta = fs::metadata(path).ok()?;
        Some(NetnsId { dev: meta.dev(), inode: meta.ino() })
    }
}

/// Open network namespace. The namespace lives as long as a copy of this value, even after its name is gone.
#[derive(Clone, Debug)]
pub struct Netns(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    id: NetnsId,
    path: PathBuf,
    // An idle socket: first the one that proved at opening that this is a network namespace, later one that a step left
    // for the next step. A new thread and a new socket cost as much as half a step.
    idle: Mutex<Option<Client>>,
}

impl Netns {
    /// Opens the namespace at `path` and verifies that it is a network namespace.
    ///
    /// # Errors
    /// [`Error::Netns`] where the path cannot be opened, [`Error::NotNetns`] where it is another kind of file. A FIFO
    /// or a device at the path is not opened, so the call does not block on one.
    pub fn open(path: impl AsRef<Path>) -> Result<Netns, Error> {
        let path = path.as_ref();
        let failed = Error::netns("open", path);
        let not = |what| Error::NotNetns(path.to_owned(), what);
        // O_PATH first: it has none of the side effects of opening a FIFO or a device.
        let handle = nix::fcntl::open(
            path,
            nix::fcntl::OFlag::O_PATH | nix::fcntl::OFlag::O_CLOEXEC,
            nix::sys::stat::Mode::empty(),
        )
        .map_err(|e| failed(e.into()))?;
        if fstatfs(handle.as_fd()).map_err(|e| failed(e.into()))?.filesystem_type() != NSFS_MAGIC {
            return Err(not("an ordinary file or folder"));
        }
        let file = File::open(format!("/proc/self/fd/{}", handle.as_raw_fd())).map_err(&failed)?;
        let meta = file.metadata().map_err(&failed)?;
        let id = NetnsId { dev: meta.dev(), inode: meta.ino() };
        let idle = match run_in(file.as_fd(), Client::route).and_then(|made| made) {
            Ok(client) => client,
            // setns returns EINVAL for a namespace of another kind.
            Err(e) if e.raw_os_error() == Some(Errno::EINVAL as i32) => {
                return Err(not("a namespace of another kind"));
            }
            Err(e) => return Err(Error::netns("enter", path)(e)),
        };
        Ok(Netns(Arc::new(Inner { file, id, path: path.to_owned(), idle: Mutex::new(Some(idle)) })))
    }

    /// Opens the namespace of the calling thread; `/proc` must be mounted.
    pub fn current() -> Result<Netns, Error> {
        Netns::open("/proc/thread-self/ns/net")
    }

    /// Makes a namespace without a name; it ends when the last copy is dropped. Needs CAP_SYS_ADMIN.
    pub fn scratch() -> Result<Netns, Error> {
        on_own_thread(|| {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET)?;
            Ok(Netns::current())
        })
        .map_err(Error::netns("make", Path::new("(without a name)")))?
    }

    /// Returns the identity of the namespace.
    pub fn id(&self) -> NetnsId {
        self.0.id
    }

    /// Returns the path by which it was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns whether the path still leads to this very namespace.
    pub fn is_still_there(&self) -> bool {
        NetnsId::of(&self.0.path) == Some(self.0.id)
    }

    /// Runs `f` on a new thread in this namespace and waits for it. Needs CAP_SYS_ADMIN. A panic of `f` is an error.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> io::Result<T> {
        run_in(self.0.file.as_fd(), f)
    }

    /// Runs `inside` on a new thread in this namespace and `meanwhile` on this one, and waits, as [`Netns::run`].
    pub(crate) fn run_beside<T: Send, U>(
        &self,
        inside: impl FnOnce() -> T + Send,
        meanwhile: impl FnOnce() -> U,
    ) -> (io::Result<T>, U) {
        let netns = self.0.file.as_fd();
        beside(|| entered(netns, inside), meanwhile)
    }

    /// Returns a netlink socket for routes, devices and tc in this namespace.
    pub fn netlink(&self) -> Result<Client, Error> {
        let idle = self.0.idle.lock().take();
        idle.map_or_else(|| self.socket(Client::route), Ok)
    }

    /// Keeps a socket of [`Netns::netlink`] for its next call: one socket, and only after a success. The last step of a
    /// pod's set-up keeps none: one descriptor is enough for the pod's life.
    pub(crate) fn keep(&self, mut client: Client) {
        client.rest();
        *self.0.idle.lock() = Some(client);
    }

    /// Returns a netlink socket for nftables in this namespace. Fails where the kernel has no netfilter.
    pub fn netfilter(&self) -> Result<Client, Error> {
        self.socket(Client::netfilter)
    }

    fn socket(&self, make: fn() -> io::Result<Client>) -> Result<Client, Error> {
        self.run(make).and_then(|made| made).map_err(Error::netns("enter", self.path()))
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

fn run_in<T: Send>(netns: BorrowedFd<'_>, f: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_own_thread(|| entered(netns, f))
}

/// Must be called only on a thread of [`beside`].
#[allow(clippy::disallowed_methods)] // the one place that the lint allows: the thread ends right after
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

/// Makes a network namespace with a name, as `ip netns add` does: a new namespace, bound to the file `path`. It has
/// only `lo`, down. An existing namespace is kept, and a plain file of a crash is used. Needs CAP_SYS_ADMIN.
pub fn create_named(path: impl AsRef<Path>) -> Result<Netns, Error> {
    let path = path.as_ref();
    if NetnsId::of(path).is_some() {
        return Netns::open(path);
    }
    let failed = Error::netns("make", path);
    let existed = path.symlink_metadata().is_ok();
    if !existed {
        new_file(path).map_err(&failed)?;
    }
    let made = on_own_thread(|| {
        nix::sched::unshare(CloneFlags::CLONE_NEWNET)?;
        mount(Some("/proc/thread-self/ns/net"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        Ok(())
    });
    if let Err(source) = made {
        if !existed {
            // This call made the file, and nothing is mounted on it. The error that counts is the one above.
            drop(fs::remove_file(path));
        }
        return Err(failed(source));
    }
    Netns::open(path)
}

/// Binds an open namespace of [`create_named`] to its name `path` again, in place of other mounts there. A plain file
/// is used and not replaced: another container's mount namespace would lose the name with the file.
pub fn name_again(netns: BorrowedFd<'_>, path: &Path) -> Result<(), Error> {
    let failed = Error::netns("restore the name of", path);
    unmount_all(path).map_err(&failed)?;
    if !path.symlink_metadata().is_ok_and(|found| found.is_file()) {
        delete_named(path)?;
        new_file(path).map_err(&failed)?;
    }
    let open = format!("/proc/self/fd/{}", netns.as_raw_fd());
    mount(Some(open.as_str()), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(|e| failed(e.into()))
}

/// Makes an empty file, and the missing folders above it.
fn new_file(path: &Path) -> io::Result<File> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    File::create_new(path)
}

/// Unmounts every mount at the path. A missing mount or path is no error.
fn unmount_all(path: &Path) -> io::Result<()> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {} // a name can be mounted over twice
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Removes a named network namespace: the mounts at the path, then the file. A missing name is no error. The
/// namespace's devices go when its last holder (a process, an open descriptor) is gone.
pub fn delete_named(path: impl AsRef<Path>) -> Result<(), Error> {
    let path = path.as_ref();
    let failed = Error::netns("remove", path);
    unmount_all(path).map_err(&failed)?;
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(failed),
    }
}
