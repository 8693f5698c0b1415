//! Sends traffic between namespaces with known ends: an echo server that returns the client's address, and clients that
//! compare the echo.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use peerpod_podnet::netns::Netns;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, timeout};

use crate::command::run;
use crate::eventually;

/// Port of every echo server.
pub const ECHO_PORT: u16 = 7777;
/// Payload of a datagram that is larger than every MTU of the tests: 8 KiB with its IPv4 header.
pub const LARGE_DATAGRAM: usize = 8192 - 28;

/// Time limit of one exchange, on a machine that is busy with tests.
const PATIENCE: Duration = Duration::from_secs(60);
const PIECE: usize = 16 << 10;

/// Echoes TCP and UDP in a namespace until it is dropped. A TCP client first receives its own address.
pub struct Echo {
    netns: Netns,
    at: Vec<SocketAddr>,
    tasks: JoinSet<()>,
}

impl Echo {
    /// Listens on [`ECHO_PORT`] of each of these addresses of the namespace.
    pub fn start(netns: &Netns, addresses: &[IpAddr]) -> anyhow::Result<Echo> {
        let mut tasks = JoinSet::new();
        let all: Vec<_> = addresses.iter().map(|address| SocketAddr::new(*address, ECHO_PORT)).collect();
        for at in all.iter().copied() {
            let (tcp, udp) = bind(netns, at).with_context(|| format!("listen on {at}"))?;
            tcp.set_nonblocking(true)?;
            udp.set_nonblocking(true)?;
            let (tcp, udp) = (TcpListener::from_std(tcp)?, UdpSocket::from_std(udp)?);
            tasks.spawn(async move {
                let mut streams = JoinSet::new();
                while let Ok((stream, peer)) = tcp.accept().await {
                    // A client may disconnect at any time.
                    streams.spawn(async move { drop(echo(stream, peer).await) });
                    while streams.try_join_next().is_some() {}
                }
            });
            tasks.spawn(async move {
                let mut datagram = vec![0; 65_536];
                // An ICMP error for a client that left is returned as an error of the socket.
                loop {
                    if let Ok((length, peer)) = udp.recv_from(&mut datagram).await {
                        udp.send_to(&datagram[..length], peer).await.ok();
                    }
                }
            });
        }
        Ok(Echo { netns: netns.clone(), at: all, tasks })
    }

    /// Ends the server and waits until its port is free again. A process that another test has forked has a copy of
    /// each socket until its exec.
    pub async fn end(mut self) -> anyhow::Result<()> {
        self.tasks.shutdown().await;
        for at in self.at {
            eventually(&format!("{at} is free"), PATIENCE, async || bind(&self.netns, at).ok()).await?;
        }
        Ok(())
    }
}

fn bind(netns: &Netns, at: SocketAddr) -> anyhow::Result<(std::net::TcpListener, std::net::UdpSocket)> {
    Ok(netns.run(|| io::Result::Ok((std::net::TcpListener::bind(at)?, std::net::UdpSocket::bind(at)?)))??)
}

async fn echo(stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
    let (mut from, mut to) = stream.into_split();
    to.write_all(format!("{:<64}", peer.ip().to_canonical()).as_bytes()).await?;
    tokio::io::copy(&mut from, &mut to).await?;
    to.shutdown().await
}

/// Connects from a namespace, sends `bytes` bytes, compares the echo, and returns the address that the server saw.
pub async fn tcp(from: &Netns, to: SocketAddr, bytes: usize) -> anyhow::Result<IpAddr> {
    tcp_of(from, None, to, bytes).await
}

/// Does the same as [`tcp`], from one of the namespace's addresses.
pub async fn tcp_of(
    from: &Netns,
    source: Option<IpAddr>,
    to: SocketAddr,
    bytes: usize,
) -> anyhow::Result<IpAddr> {
    let attempt = || format!("{bytes} bytes of TCP to {to}");
    let talk = tcp_here(from, source, to, |sent| bytes - sent);
    timeout(PATIENCE, talk).await.with_context(attempt)?.with_context(attempt)
}

/// Does the same as [`tcp`], but sends as many bytes as it can until `over` is set; limited to 90 s.
pub async fn tcp_until(from: &Netns, to: SocketAddr, over: &AtomicBool) -> anyhow::Result<IpAddr> {
    const LONGEST: Duration = Duration::from_secs(90);
    let attempt = || format!("a stream of TCP to {to}");
    let talk = tcp_here(from, None, to, |_| if over.load(Ordering::SeqCst) { 0 } else { PIECE });
    timeout(LONGEST, talk).await.with_context(attempt)?.with_context(attempt)
}

/// Exchanges TCP data. `left` returns the number of bytes left to send after the given number.
async fn tcp_here(
    from: &Netns,
    source: Option<IpAddr>,
    to: SocketAddr,
    left: impl Fn(usize) -> usize,
) -> anyhow::Result<IpAddr> {
    let socket = from.run(|| if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() })??;
    if let Some(source) = source {
        socket.bind(SocketAddr::new(source, 0))?;
    }
    let (reader, mut writer) = socket.connect(to).await?.into_split();
    let mut reader = BufReader::with_capacity(PIECE, reader);
    let mut seen = [0; 64];
    reader.read_exact(&mut seen).await?;
    let peer = std::str::from_utf8(&seen)?.trim().parse()?;
    let send = async {
        let mut sent = 0;
        loop {
            let count = left(sent).min(PIECE);
            if count == 0 {
                break;
            }
            writer.write_all(&pattern(sent, count)).await?;
            sent += count;
        }
        writer.shutdown().await?;
        anyhow::Ok(sent)
    };
    let receive = async {
        let mut place = 0;
        let mut piece = vec![0; PIECE];
        loop {
            match reader.read(&mut piece).await? {
                0 => break,
                count => {
                    ensure!(piece[..count] == pattern(place, count), "other bytes than sent from {place} on");
                    place += count;
                }
            }
        }
        anyhow::Ok(place)
    };
    let (sent, came) = tokio::try_join!(send, receive)?;
    ensure!(came == sent, "{came} of {sent} bytes came back");
    Ok(peer)
}

/// Returns the stream's bytes from an offset; no two segments are alike.
fn pattern(place: usize, count: usize) -> Vec<u8> {
    (place..place + count).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

/// Runs `count` streams at once.
pub async fn streams(from: &Netns, to: SocketAddr, count: usize, bytes: usize) -> anyhow::Result<()> {
    let mut all = JoinSet::new();
    for _ in 0..count {
        let from = from.clone();
        all.spawn(async move { tcp(&from, to, bytes).await });
    }
    while let Some(done) = all.join_next().await {
        done??;
    }
    Ok(())
}

/// Sends a datagram of `bytes` bytes until it comes back unchanged.
pub async fn udp(from: &Netns, to: SocketAddr, bytes: usize) -> anyhow::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match udp_once(from, to, bytes).await {
            Err(error) if Instant::now() > end => return Err(error),
            // No route or no neighbour yet: retry.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            Ok(()) => return Ok(()),
        }
    }
}

/// Sends a datagram of `bytes` bytes once, and waits a moment for its echo.
pub async fn udp_once(from: &Netns, to: SocketAddr, bytes: usize) -> anyhow::Result<()> {
    const MOMENT: Duration = Duration::from_millis(300);
    let attempt = || format!("a datagram of {bytes} bytes to {to}");
    let any: SocketAddr = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
    let socket = from.run(|| std::net::UdpSocket::bind(any))?.with_context(attempt)?;
    socket.set_nonblocking(true)?;
    let socket = UdpSocket::from_std(socket)?;
    let datagram = pattern(0, bytes);
    let mut buffer = vec![0; 65_536];
    socket.send_to(&datagram, to).await.with_context(attempt)?;
    let answer = timeout(MOMENT, socket.recv_from(&mut buffer)).await;
    let (length, peer) = answer.with_context(attempt)?.with_context(attempt)?;
    ensure!(buffer[..length] == datagram, "{}: it came back as another", attempt());
    ensure!(peer == to, "{} was answered by {peer}", attempt());
    Ok(())
}

/// Sends packets of exactly `size` bytes with their IP header that must not be fragmented (`ping -M do`).
pub async fn ping_whole(from: &Netns, to: IpAddr, size: u64) -> anyhow::Result<()> {
    let payload = (size - if to.is_ipv4() { 28 } else { 48 }).to_string();
    let (from, to) = (from.clone(), to.to_string());
    let ping = move || {
        // -w with -c: repeats until one reply comes.
        let words = ["-n", "-q", "-c", "1", "-i", "0.2", "-w", "10", "-M", "do", "-s", &payload, &to];
        from.run(|| run("ping", &words, ""))
    };
    spawn_blocking(ping).await???;
    Ok(())
}

/// Returns whether the kernel refuses to send an unfragmented packet of exactly `size` bytes because of its size.
pub async fn is_too_large(from: &Netns, to: IpAddr, size: u64) -> anyhow::Result<bool> {
    let payload = (size - if to.is_ipv4() { 28 } else { 48 }).to_string();
    let (from, to) = (from.clone(), to.to_string());
    let ping = move || {
        let words = ["-n", "-c", "1", "-W", "2", "-M", "do", "-s", &payload, &to];
        from.run(|| std::process::Command::new("ping").args(words).output())
    };
    let output = spawn_blocking(ping).await???;
    let said = [output.stdout, output.stderr].concat();
    Ok(!output.status.success() && String::from_utf8_lossy(&said).contains("too long"))
}

/// Returns the number of conntrack entries of a namespace with this destination port.
pub fn tracked(netns: &Netns, port: u16) -> anyhow::Result<usize> {
    let all = netns.run(|| std::fs::read_to_string("/proc/thread-self/net/nf_conntrack"))??;
    let port = format!("dport={port} ");
    Ok(all.lines().filter(|line| line.contains(&port)).count())
}
