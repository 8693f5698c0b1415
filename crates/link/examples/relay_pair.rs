//! Measures the cost of a call through a relay's and a guest's endpoint, compared with the bare unix socket and with
//! a pair of byte copiers: `cargo run --release -p peerpod-link --example relay_pair [rounds]`; `… idle 1000`
//! measures memory at rest.
//!
//! Client, agent, relay and guest each have a thread with its own runtime, because they are separate processes in
//! production. Bursts are interleaved; a figure is the median of the better half of its bursts' medians.
#![allow(clippy::unwrap_used)] // a measuring tool: a panic is a fit report

#[path = "../tests/session/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use peerpod_link::endpoint::{Limits, Role, tune};
use peerpod_link::frame::HEADER_LEN;
use support::{Dir, ECHO, Identities, accept, agent, answer, call, dial, end_with, request};
use tokio::io::{AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Builder;

/// Runs a future on its own thread; returns the value that the future sends through the channel.
fn thread<T: Send + 'static, F: Future<Output = ()>>(
    workers: usize,
    start: impl FnOnce(mpsc::Sender<T>) -> F + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = match workers {
            0 => Builder::new_current_thread().enable_all().build().unwrap(),
            many => Builder::new_multi_thread().worker_threads(many).enable_all().build().unwrap(),
        };
        runtime.block_on(start(sender));
    });
    receiver.recv().unwrap()
}

/// Accepts unix connections forever.
async fn shims(path: PathBuf, mut with: impl FnMut(UnixStream)) {
    let listener = UnixListener::bind(path).unwrap();
    while let Ok((socket, _)) = listener.accept().await {
        with(socket);
    }
}

/// Sets up relay → TCP (and TLS) → guest → agent; returns the path that serves it.
fn link_pair(dir: &Path, tls: bool, workers: usize, agent: &Path) -> PathBuf {
    let identities = tls.then(|| Arc::new(Identities::new()));
    let near = dir.join(format!("near-{tls}-{workers}.sock"));
    let (path, ids) = (near.clone(), identities.clone());
    let to = thread(workers, move |sender| async move {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let relay = end_with(Role::Relay, None, Limits::default(), Some(true));
        accept(listener, relay.handle.clone(), ids);
        sender.send(address).unwrap();
        shims(path, |socket| relay.handle.adopt(socket)).await;
    });
    let agent = agent.to_owned();
    thread(0, move |sender| async move {
        let guest = end_with(Role::Guest, Some(agent), Limits::default(), Some(true));
        dial(to, guest.handle.clone(), guest.down, identities);
        sender.send(()).unwrap();
        std::future::pending::<()>().await;
    });
    near
}

/// Sets up two byte copiers over TCP, with one connection each.
fn splice_pair(dir: &Path, agent: &Path) -> PathBuf {
    const BUFFER: usize = 64 << 10;
    let agent = agent.to_owned();
    let to = thread(0, move |sender| async move {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        sender.send(listener.local_addr().unwrap()).unwrap();
        while let Ok((mut tcp, _)) = listener.accept().await {
            tune(&tcp).unwrap();
            let mut socket = UnixStream::connect(&agent).await.unwrap();
            tokio::spawn(async move {
                copy_bidirectional_with_sizes(&mut tcp, &mut socket, BUFFER, BUFFER).await
            });
        }
    });
    let near = dir.join("near-splice.sock");
    let path = near.clone();
    thread(0, move |sender| async move {
        sender.send(()).unwrap();
        shims(path, move |mut socket| {
            tokio::spawn(async move {
                let mut tcp = TcpStream::connect(to).await.unwrap();
                tune(&tcp).unwrap();
                copy_bidirectional_with_sizes(&mut tcp, &mut socket, BUFFER, BUFFER).await
            });
        })
        .await;
    });
    near
}

async fn client(path: &Path) -> UnixStream {
    loop {
        match UnixStream::connect(path).await {
            Ok(socket) => return socket,
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

fn cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let whole =
        |time: nix::sys::time::TimeVal| Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000);
    whole(usage.user_time()) + whole(usage.system_time())
}

/// Makes one call at a time; returns the median in µs, and the CPU time of all four parties in µs per call.
async fn burst(path: &Path, frame: &[u8], calls: usize) -> (f64, f64) {
    let mut socket = client(path).await;
    for _ in 0..calls / 10 + 1 {
        call(&mut socket, frame).await.unwrap();
    }
    let mut times = Vec::with_capacity(calls);
    let before = cpu();
    for _ in 0..calls {
        let start = Instant::now();
        call(&mut socket, frame).await.unwrap();
        times.push(start.elapsed());
    }
    let used = cpu() - before;
    times.sort_unstable();
    (times[calls / 2].as_secs_f64() * 1e6, used.as_secs_f64() * 1e6 / calls as f64)
}

/// Keeps sixteen calls in flight on one connection; returns µs per call, and CPU time in µs per call.
async fn sixteen(path: &Path, calls: usize) -> (f64, f64) {
    let mut socket = client(path).await;
    let frame = request(1, ECHO, 40);
    call(&mut socket, &frame).await.unwrap();
    let (start, before) = (Instant::now(), cpu());
    let (mut input, mut output) = socket.into_split();
    let credit = Arc::new(tokio::sync::Semaphore::new(16));
    let writer = {
        let credit = credit.clone();
        tokio::spawn(async move {
            let mut sent = 0;
            while sent < calls {
                // One write per call, like independent callers.
                credit.acquire().await.unwrap().forget();
                output.write_all(&frame).await.unwrap();
                sent += 1;
            }
            output
        })
    };
    let (mut have, mut buffer) = (0, vec![0; 64 << 10]);
    let (mut done, size) = (0, HEADER_LEN + 40);
    while done < calls {
        have += tokio::io::AsyncReadExt::read(&mut input, &mut buffer).await.unwrap();
        credit.add_permits(have / size);
        done += have / size;
        have %= size;
    }
    drop(writer.await.unwrap());
    let (took, used) = (start.elapsed(), cpu() - before);
    (took.as_secs_f64() * 1e6 / calls as f64, used.as_secs_f64() * 1e6 / calls as f64)
}

/// Returns the resident memory of this process in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Measures the memory of many idle sandboxes after one call on each; both ends are in this process.
fn idle(sandboxes: usize) {
    let dir = Dir::new();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let agent_path = dir.join("agent.sock");
        tokio::spawn(agent(UnixListener::bind(&agent_path).unwrap()));
        let identities = Arc::new(Identities::new());
        let (before, mut kept) = (resident(), Vec::new());
        for _ in 0..sandboxes {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let to = listener.local_addr().unwrap();
            let relay = end_with(Role::Relay, None, Limits::default(), Some(true));
            accept(listener, relay.handle.clone(), Some(identities.clone()));
            let guest = end_with(Role::Guest, Some(agent_path.clone()), Limits::default(), Some(true));
            dial(to, guest.handle.clone(), guest.down, Some(identities.clone()));
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            relay.handle.adopt(theirs);
            call(&mut ours, &request(1, ECHO, 40)).await.unwrap();
            kept.push((relay.handle, guest.handle, ours));
        }
        println!(
            "{sandboxes} sandboxes: {} KiB each, both ends and the agent's side",
            (resident() - before) / sandboxes as u64
        );
        tokio::time::sleep(Duration::from_secs(5)).await;
        let used = cpu();
        tokio::time::sleep(Duration::from_secs(10)).await;
        println!(
            "5 s later {} KiB each; idle CPU {:.2} %",
            (resident() - before) / sandboxes as u64,
            (cpu() - used).as_secs_f64() * 10.0
        );
    });
}

/// Named chains between a client and the agent, by the path of their socket.
type Chains = Vec<(&'static str, PathBuf)>;
/// Name, request frame, and number of calls of a burst.
type Kind = (&'static str, Vec<u8>, usize);
/// Time and CPU time of each burst, by kind and chain.
type Results = BTreeMap<(usize, usize), Vec<(f64, f64)>>;

fn chains(dir: &Dir, only: Option<&str>) -> Chains {
    let agent_path = dir.join("agent.sock");
    let path = agent_path.clone();
    thread(0, move |sender| async move {
        let listener = UnixListener::bind(path).unwrap();
        sender.send(()).unwrap();
        agent(listener).await;
    });
    let mut chains = vec![
        ("direct", agent_path.clone()),
        ("splice", splice_pair(&dir.0, &agent_path)),
        ("link", link_pair(&dir.0, false, 0, &agent_path)),
        ("link+tls", link_pair(&dir.0, true, 0, &agent_path)),
        ("link+tls, 2 workers", link_pair(&dir.0, true, 2, &agent_path)),
    ];
    if let Some(only) = only {
        chains.retain(|(name, _)| *name == "direct" || *name == only);
    }
    chains
}

/// Measures one burst of each kind on each chain, and the calls in flight.
async fn round(chains: &Chains, kinds: &[Kind], results: &mut Results) {
    for (kind, (_, frame, calls)) in kinds.iter().enumerate() {
        for (chain, (_, path)) in chains.iter().enumerate() {
            let result = burst(path, frame, *calls).await;
            results.entry((kind, chain)).or_default().push(result);
        }
    }
    for (chain, (_, path)) in chains.iter().enumerate() {
        let result = sixteen(path, 40_000).await;
        results.entry((kinds.len(), chain)).or_default().push(result);
    }
}

fn print(chains: &Chains, kinds: &[Kind], results: &Results) {
    let names = kinds.iter().map(|(name, ..)| *name).chain(["16 in flight"]);
    for (kind, name) in names.enumerate() {
        println!("{name}");
        let mut direct = (0.0, 0.0);
        for (chain, (chain_name, _)) in chains.iter().enumerate() {
            let mut all = results[&(kind, chain)].clone();
            all.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (time, used) = all[all.len() / 4];
            if chain == 0 {
                direct = (time, used);
            }
            println!(
                "  {chain_name:20} {time:9.2} us  x{:5.2}  pair's cpu {:8.2} us/call",
                time / direct.0,
                used - direct.1
            );
        }
    }
}

fn main() {
    if let Some(sandboxes) = std::env::args().skip_while(|arg| arg != "idle").nth(1) {
        return idle(sandboxes.parse().unwrap());
    }
    let rounds: usize = std::env::args().nth(1).map_or(8, |text| text.parse().unwrap());
    let dir = Dir::new();
    let chains = chains(&dir, std::env::args().nth(2).as_deref());
    let kinds: [Kind; 5] = [
        ("small", request(1, ECHO, 40), 3000),
        ("write 64k", request(1, 8, 64 << 10), 1000),
        ("read 64k", request(1, 64 << 10, 40), 1000),
        ("write 1m", request(1, 8, 1 << 20), 150),
        ("read 1m", request(1, 1 << 20, 40), 150),
    ];
    let mut results = Results::new();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for _ in 0..rounds {
            round(&chains, &kinds, &mut results).await;
        }
        print(&chains, &kinds, &results);
        // Checks the answer to an uncounted call, so that the example fails when the pair does.
        let mut socket = client(&chains[chains.len() - 1].1).await;
        socket.write_all(&request(1, ECHO, 40)).await.unwrap();
        assert_eq!(answer(&mut socket).await.unwrap().1.len(), 40);
    });
}
