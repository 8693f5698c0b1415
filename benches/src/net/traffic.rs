//! Measures traffic between two namespaces: one TCP stream, 64 of them, UDP packets of 64 bytes. Several paths are
//! measured in interleaved bursts, so that other load on the machine affects all of them alike.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use peerpod_podnet::netns::Netns;

use crate::load::median;

const ROUNDS: usize = 10;
const WARM: Duration = Duration::from_millis(60);
const BURST: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(5);
const STREAMS: usize = 64;
const PIECE: usize = 128 << 10;
const PACKET: [u8; 64] = [0x5a; 64];

/// Two namespaces, and the address by which the first reaches the second.
#[derive(Clone)]
pub(crate) struct Path {
    pub(crate) from: Netns,
    pub(crate) to: Netns,
    pub(crate) address: IpAddr,
}

/// Rates at the receiver of a path, per second.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rates {
    /// Bits of one TCP stream.
    pub(crate) tcp1: f64,
    /// Bits of 64 TCP streams.
    pub(crate) tcp64: f64,
    /// UDP packets with 64 bytes each.
    pub(crate) pps: f64,
}

impl Rates {
    /// Returns a rate by its name in report keys.
    pub(crate) fn of(&self, what: &str) -> f64 {
        match what {
            "tcp1" => self.tcp1,
            "tcp64" => self.tcp64,
            _ => self.pps,
        }
    }
}

/// Measures all paths, burst by burst in turn. The results are medians over the better half of the rounds.
pub(crate) fn measure(paths: &[Path]) -> anyhow::Result<Vec<Rates>> {
    let mut tcp1 = rounds(paths, |path| path.tcp(1))?.into_iter();
    let mut tcp64 = rounds(paths, |path| path.tcp(STREAMS))?.into_iter();
    let mut pps = rounds(paths, Path::packets)?.into_iter();
    let mut next = || Some(Rates { tcp1: tcp1.next()?, tcp64: tcp64.next()?, pps: pps.next()? });
    Ok(std::iter::from_fn(&mut next).collect())
}

/// Measures one TCP stream over each path in the same way, in bits per second.
pub(crate) fn measure_one_stream(paths: &[Path]) -> anyhow::Result<Vec<f64>> {
    rounds(paths, |path| path.tcp(1))
}

fn rounds(paths: &[Path], burst: impl Fn(&Path) -> anyhow::Result<f64>) -> anyhow::Result<Vec<f64>> {
    let mut rates = vec![Vec::new(); paths.len()];
    for _ in 0..ROUNDS {
        for (path, rates) in paths.iter().zip(&mut rates) {
            rates.push(burst(path).with_context(|| format!("traffic to {}", path.address))?);
        }
    }
    let better = |mut rates: Vec<f64>| {
        rates.sort_by(|a, b| b.total_cmp(a));
        median(&mut rates[..ROUNDS / 2]).context("no rounds")
    };
    rates.into_iter().map(better).collect()
}

/// Counts arrivals until it is stopped.
#[derive(Default)]
struct Meter {
    arrived: AtomicU64,
    stop: AtomicBool,
}

impl Meter {
    /// Returns arrivals per second, counted after a warm-up.
    fn rate(&self) -> f64 {
        thread::sleep(WARM);
        let (before, began) = (self.arrived.load(Relaxed), Instant::now());
        thread::sleep(BURST);
        let (after, took) = (self.arrived.load(Relaxed), began.elapsed());
        self.stop.store(true, Relaxed);
        (after - before) as f64 / took.as_secs_f64()
    }

    fn pour(&self, mut stream: TcpStream) {
        let data = vec![0x5a; PIECE];
        while !self.stop.load(Relaxed) {
            // A failure lowers the rate; the reader's end fails alike.
            if stream.write_all(&data).is_err() {
                return;
            }
        }
    }

    fn drain(&self, mut stream: TcpStream) {
        let mut buffer = vec![0; PIECE];
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            self.arrived.fetch_add(read as u64, Relaxed);
        }
    }

    fn send(&self, socket: &UdpSocket) {
        while !self.stop.load(Relaxed) {
            // A full queue refuses the packet, which then does not arrive and is not counted.
            socket.send(&PACKET).ok();
        }
    }

    /// Reads in batches: with a wake-up per packet, the reader would be the limit.
    fn receive(&self, socket: &UdpSocket) {
        let mut buffer = [0; 128];
        while !self.stop.load(Relaxed) {
            while socket.recv(&mut buffer).is_ok() {
                self.arrived.fetch_add(1, Relaxed);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Path {
    /// Returns the bits per second that arrive over this many streams.
    pub(crate) fn tcp(&self, streams: usize) -> anyhow::Result<f64> {
        let listener = self.to.run(|| TcpListener::bind((self.address, 0)))??;
        let address = listener.local_addr()?;
        // The connections wait in the listener's queue, which is long enough for all.
        let connect = || TcpStream::connect_timeout(&address, PATIENCE);
        let sending = self.from.run(|| (0..streams).map(|_| connect()).collect::<io::Result<Vec<_>>>())??;
        let receiving = (0..streams).map(|_| Ok(listener.accept()?.0)).collect::<io::Result<Vec<_>>>()?;
        for stream in &sending {
            stream.set_write_timeout(Some(PATIENCE))?;
        }
        for stream in &receiving {
            stream.set_read_timeout(Some(PATIENCE))?;
        }
        let meter = Meter::default();
        let bytes = thread::scope(|scope| {
            for stream in receiving {
                scope.spawn(|| meter.drain(stream));
            }
            for stream in sending {
                scope.spawn(|| meter.pour(stream));
            }
            meter.rate()
        });
        ensure!(bytes > 0.0, "nothing arrived");
        Ok(bytes * 8.0)
    }

    /// Returns the packets of 64 bytes that arrive per second.
    pub(crate) fn packets(&self) -> anyhow::Result<f64> {
        let receiver = self.to.run(|| UdpSocket::bind((self.address, 0)))??;
        let address = receiver.local_addr()?;
        // The buffer holds some hundred milliseconds of packets, so that none are lost while the reader does not run.
        setsockopt(&receiver, sockopt::RcvBufForce, &(64 << 20))?;
        let any: SocketAddr = if address.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
        let sender = self.from.run(|| {
            let socket = UdpSocket::bind(any)?;
            socket.connect(address)?;
            io::Result::Ok(socket)
        })??;
        // The kernel resolves the neighbours before the count begins.
        receiver.set_read_timeout(Some(Duration::from_millis(100)))?;
        let until = Instant::now() + PATIENCE;
        while sender.send(&PACKET).is_err() || receiver.recv(&mut [0; 128]).is_err() {
            ensure!(Instant::now() < until, "nothing arrived");
        }
        receiver.set_nonblocking(true)?;
        let meter = Meter::default();
        Ok(thread::scope(|scope| {
            scope.spawn(|| meter.receive(&receiver));
            scope.spawn(|| meter.send(&sender));
            meter.rate()
        }))
    }
}
