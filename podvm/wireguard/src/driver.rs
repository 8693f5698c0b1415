//! Runs the data plane: two threads between a TUN device and a UDP socket, one per direction. They sleep while there
//! are no packets, take many packets per wake-up, and hold a bounded amount of memory.
//!
//! The threads end together: when an error or a panic ends one of them, the other ends too, and device and socket are
//! free. A single thread would carry no traffic, and would keep the device from a new data plane.

use std::fmt;
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd::{read, write};

use crate::engine::{Engine, Path, Sink};
use crate::merge::{Merge, PREFIX};
use crate::stats::Reason;
use crate::udp::{Buffers, LARGEST, Udp};
use peerpod_common::tun::Tun;

/// Interval between two runs of the sessions' timers.
const TICK: Duration = Duration::from_millis(250);
/// Most packets read from the device before the sealed ones are sent.
const BURST: usize = 64;
/// Time to wait for a full send buffer; meanwhile the device's queue grows, then drops packets.
const FULL: Duration = Duration::from_millis(10);
/// Largest packet of the device, in bytes.
const PACKET: usize = 1 << 16;

/// Body of one thread; it returns after a stop request.
type Half = fn(&Shared, &Ends) -> io::Result<()>;

/// Two running threads. Dropping it ends them; other descriptors of the device and the socket stay valid.
pub struct DataPlane {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl fmt::Debug for DataPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataPlane").field("is_running", &self.is_running()).finish_non_exhaustive()
    }
}

struct Shared {
    engine: Arc<Engine>,
    /// Called once, when the threads end without a request.
    ended: Box<dyn Fn() + Send + Sync>,
    stop: AtomicBool,
    begin: AtomicBool,
    failed: AtomicBool,
    panicked: AtomicBool,
    /// Readable when the threads must end; never read.
    ending: EventFd,
    /// Wakes the thread that runs the timers.
    word: EventFd,
}

struct Ends {
    tun: Tun,
    /// Length of the header in front of a packet on the device, in bytes.
    prefix: usize,
    udp: Udp,
}

impl DataPlane {
    /// Starts both threads. `name` becomes part of their names. Calls `ended` once, on one of the threads, when they
    /// end by themselves: by an error, a panic, or the deletion of the device. `ended` must not panic and must not drop
    /// the plane. After an error nothing runs.
    pub fn start(
        engine: Arc<Engine>,
        tun: Tun,
        socket: UdpSocket,
        name: &str,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<DataPlane> {
        DataPlane::with(engine, tun, socket, name, ended, [("out", outgoing), ("in", incoming)])
    }

    fn with(
        engine: Arc<Engine>,
        tun: Tun,
        socket: UdpSocket,
        name: &str,
        ended: impl Fn() + Send + Sync + 'static,
        halves: [(&str, Half); 2],
    ) -> io::Result<DataPlane> {
        nix::fcntl::fcntl(&tun, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
        let prefix = if tun.has_prefix()? { PREFIX } else { 0 };
        let ends = Arc::new(Ends { tun, prefix, udp: Udp::new(socket)? });
        let event = || EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        let shared = Arc::new(Shared {
            engine,
            ended: Box::new(ended),
            stop: AtomicBool::new(false),
            begin: AtomicBool::new(true),
            failed: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            ending: event()?,
            word: event()?,
        });
        // Dropping it ends the threads that were started so far.
        let mut plane = DataPlane { shared: shared.clone(), threads: Vec::new() };
        for (what, half) in halves {
            let (shared, ends) = (shared.clone(), ends.clone());
            let run = move || {
                // Dropped after the device and the socket are released.
                let _both = Both(&shared);
                let ends = ends;
                if let Err(error) = half(&shared, &ends) {
                    tracing::error!(%error, "the encrypted tunnel's data plane ended");
                }
            };
            plane.threads.push(Builder::new().name(format!("{name}-{what}")).spawn(run)?);
        }
        Ok(plane)
    }

    /// Returns the engine that it drives.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.shared.engine
    }

    /// Begins a handshake with every peer that has a configured endpoint.
    pub fn begin(&self) {
        self.shared.begin.store(true, Ordering::Release);
        // Full only if the thread has not read an earlier write; it will read that one.
        self.shared.word.write(1).ok();
    }

    /// Returns whether both threads work. When dropped, the plane frees its resources.
    pub fn is_running(&self) -> bool {
        !self.shared.failed.load(Ordering::Acquire) && !self.threads.iter().any(JoinHandle::is_finished)
    }

    /// Returns whether a panic ended it, which may have left a session of the engine in an inconsistent state.
    pub fn has_panicked(&self) -> bool {
        self.shared.panicked.load(Ordering::Acquire)
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        self.shared.end();
        for thread in self.threads.drain(..) {
            // A panic in the thread was logged when it happened.
            drop(thread.join());
        }
    }
}

impl Shared {
    /// Requests both threads to end; returns whether this is the first request.
    fn end(&self) -> bool {
        let first = !self.stop.swap(true, Ordering::AcqRel);
        // Fails only when it is readable already.
        self.ending.write(1).ok();
        first
    }
}

/// Guard that ends both threads when one of them ends for any reason.
struct Both<'s>(&'s Shared);

impl Drop for Both<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.panicked.store(true, Ordering::Release);
            tracing::error!("the encrypted tunnel's data plane panicked; this is a bug in Peerpod");
        }
        if self.0.end() {
            self.0.failed.store(true, Ordering::Release);
            (self.0.ended)();
        }
    }
}

/// Waits until one of the descriptors is ready, at most for `timeout`.
fn wait(fds: &[(BorrowedFd<'_>, PollFlags)], timeout: PollTimeout) -> io::Result<()> {
    let mut fds: Vec<PollFd<'_>> = fds.iter().map(|(fd, flags)| PollFd::new(*fd, *flags)).collect();
    match poll(&mut fds, timeout) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Moves packets from the device to the network.
fn outgoing(shared: &Shared, ends: &Ends) -> io::Result<()> {
    let mut packet = vec![0; PACKET];
    let mut scratch = vec![0; Engine::room(PACKET)];
    let mut out = Out::new(ends, &shared.engine, true);
    while !shared.stop.load(Ordering::Acquire) {
        let mut taken = 0;
        while taken < BURST {
            match read(&ends.tun, &mut packet) {
                Ok(length) => {
                    taken += 1;
                    let packet = packet.get(ends.prefix..length).unwrap_or_default();
                    shared.engine.outgoing(packet, &mut scratch, &mut out);
                }
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => {}
                Err(e) => return Err(device(e)),
            }
        }
        out.flush();
        if taken < BURST {
            let ending = (shared.ending.as_fd(), PollFlags::POLLIN);
            wait(&[(ends.tun.as_fd(), PollFlags::POLLIN), ending], PollTimeout::NONE)?;
        }
    }
    Ok(())
}

/// Moves packets from the network to the device, and runs the timers.
fn incoming(shared: &Shared, ends: &Ends) -> io::Result<()> {
    let mut buffers = Buffers::new();
    let mut scratch = vec![0; Engine::room(PACKET)];
    let mut out = Out::new(ends, &shared.engine, false);
    let mut ticked = Instant::now();
    while !shared.stop.load(Ordering::Acquire) {
        let got = ends.udp.receive(&mut buffers, |path, datagram| {
            shared.engine.incoming(path, datagram, &mut scratch, &mut out);
        });
        out.flush();
        if let Some(e) = out.device.take() {
            return Err(device(e));
        }
        let now = Instant::now();
        if shared.begin.swap(false, Ordering::AcqRel) {
            shared.engine.begin(now, &mut out);
        }
        if now.saturating_duration_since(ticked) >= TICK {
            ticked = now;
            shared.engine.tick(now, &mut out);
        }
        out.flush();
        match got {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let timeout = PollTimeout::try_from(TICK).unwrap_or(PollTimeout::MAX);
                let readable = PollFlags::POLLIN;
                let (socket, word) = (ends.udp.socket().as_fd(), shared.word.as_fd());
                wait(&[(socket, readable), (shared.ending.as_fd(), readable), (word, readable)], timeout)?;
                shared.word.read().ok();
            }
            // An ICMP error for an earlier datagram; it needs no action.
            Err(e) if is_passing(&e) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(
        error.kind(),
        K::Interrupted | K::ConnectionRefused | K::HostUnreachable | K::NetworkUnreachable | K::NetworkDown
    )
}

fn device(error: Errno) -> io::Error {
    io::Error::other(format!("the tunnel's device: {error}; was it deleted?"))
}

/// Collects datagrams of one size for one peer and sends them in one call.
struct Out<'e> {
    ends: &'e Ends,
    engine: &'e Engine,
    /// Whether to wait for a full send buffer. False in the thread that must keep receiving.
    waits: bool,
    path: Option<Path>,
    segment: usize,
    closed: bool,
    count: usize,
    bytes: Vec<u8>,
    /// Packets for the device.
    merge: Merge,
    /// Whether the kernel accepts several packets together (Linux 6.2 and later).
    merges: bool,
    /// Error after which the device accepts no more packets.
    device: Option<Errno>,
}

impl<'e> Out<'e> {
    fn new(ends: &'e Ends, engine: &'e Engine, waits: bool) -> Out<'e> {
        Out {
            ends,
            engine,
            waits,
            path: None,
            segment: 0,
            closed: false,
            count: 0,
            bytes: Vec::with_capacity(LARGEST),
            merge: Merge::new(),
            merges: true,
            device: None,
        }
    }

    fn flush(&mut self) {
        self.flush_tunnel();
        self.flush_network();
    }

    fn flush_tunnel(&mut self) {
        let together = self.merge.count();
        if together == 0 {
            return;
        }
        match write(&self.ends.tun, self.merge.finish()) {
            Err(Errno::EINVAL) if together > 1 => {
                self.merges = false;
                let (tun, mut failed) = (&self.ends.tun, Vec::new());
                self.merge.each(|one| failed.extend(write(tun, one).err()));
                failed.into_iter().for_each(|e| self.not_written(e));
            }
            Err(e) => self.not_written(e),
            Ok(_) => {}
        }
        self.merge.clear();
    }

    fn not_written(&mut self, error: Errno) {
        match error {
            Errno::EAGAIN | Errno::ENOBUFS | Errno::EINVAL | Errno::EIO | Errno::EINTR | Errno::ENOMEM => {
                self.engine.stats().drop(Reason::Socket); // down, or out of memory: drop it as a NIC does
            }
            error => self.device = Some(error),
        }
    }

    fn flush_network(&mut self) {
        let Some(path) = self.path.take() else { return };
        if self.count == 1 || self.send(&path, &self.bytes, self.segment).is_err() {
            // One by one: this also works if the NIC or the kernel does not segment.
            for datagram in self.bytes.chunks(self.segment.max(1)) {
                if self.send(&path, datagram, datagram.len()).is_err() {
                    self.engine.stats().drop(Reason::Socket);
                }
            }
        }
        self.bytes.clear();
        (self.count, self.closed) = (0, false);
    }

    fn send(&self, path: &Path, bytes: &[u8], segment: usize) -> io::Result<()> {
        match self.ends.udp.send(path, bytes, segment) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && self.waits => {
                let full = PollTimeout::try_from(FULL).unwrap_or(PollTimeout::ZERO);
                wait(&[(self.ends.udp.socket().as_fd(), PollFlags::POLLOUT)], full)?;
                self.ends.udp.send(path, bytes, segment)
            }
            Err(e) if path.local.is_some() && e.kind() != io::ErrorKind::WouldBlock => {
                // The local address may no longer belong to this host.
                self.ends.udp.send(&Path { local: None, ..*path }, bytes, segment)
            }
            sent => sent,
        }
    }
}

impl Sink for Out<'_> {
    fn network(&mut self, path: &Path, datagram: &[u8]) {
        let fits = self.path == Some(*path)
            && !self.closed
            && datagram.len() <= self.segment
            && self.bytes.len() + datagram.len() <= LARGEST
            && self.count < self.ends.udp.segments();
        if !fits {
            self.flush_network();
            self.path = Some(*path);
            self.segment = datagram.len();
        }
        self.closed = datagram.len() < self.segment;
        self.bytes.extend_from_slice(datagram);
        self.count += 1;
    }

    fn tunnel(&mut self, packet: &[u8]) {
        if self.ends.prefix == 0 {
            if let Err(e) = write(&self.ends.tun, packet) {
                self.not_written(e);
            }
            return;
        }
        if (!self.merges && self.merge.count() > 0) || !self.merge.push(packet) {
            self.flush_tunnel();
            self.merge.push(packet);
        }
    }
}

#[cfg(test)]
mod tests;
