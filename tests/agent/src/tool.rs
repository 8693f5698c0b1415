//! Implements the programs of the demo's "image": a page server that shows the client's address, a client, and the
//! programs that enter a cgroup or a root. They need no file of the VM's root directory, so the demo needs nothing
//! installed.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context, bail};
use peerpod_podnet::netns::Netns;

/// Time limit of a fetch, long enough for an emulated machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs a tool. `cgroup FOLDER PROGRAM …` executes the program in that cgroup; `chroot FOLDER CWD PROGRAM …` executes it
/// with the folder as its root, in a working directory that is made if the root has none. `page PORT` serves a page with the client's address until it is killed;
/// `fetch ADDRESS:PORT` prints one. `pause` waits to be killed. `forward PORT SOCKET` connects each connection to that
/// port, in the network namespace of pid 1, with that Unix socket. `echo` copies its input to its output, and `discard`
/// reads it.
pub(crate) fn run(arguments: &[String]) -> anyhow::Result<()> {
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["cgroup", folder, program, ref arguments @ ..] => {
            let file = Path::new(folder).join("cgroup.procs");
            fs::write(&file, "0").with_context(|| format!("write {}", file.display()))?;
            let error = Command::new(program).args(arguments).exec();
            Err(error).with_context(|| format!("run {program}"))
        }
        ["chroot", folder, cwd, program, ref arguments @ ..] => {
            nix::unistd::chroot(folder).with_context(|| format!("enter {folder}"))?;
            let cwd = Path::new("/").join(cwd);
            fs::create_dir_all(&cwd).with_context(|| format!("make {} in {folder}", cwd.display()))?;
            let error = Command::new(program).args(arguments).current_dir(cwd).exec();
            Err(error).with_context(|| format!("run {program} in {folder}"))
        }
        ["page", port] => serve(port.parse().with_context(|| format!("{port} is not a port"))?),
        ["fetch", address] => fetch(address.parse().with_context(|| format!("{address} is not an address"))?),
        ["forward", port, socket] => {
            forward(port.parse().with_context(|| format!("{port} is not a port"))?, Path::new(socket))
        }
        ["echo"] => {
            copy(&mut std::io::stdin(), &mut std::io::stdout());
            Ok(())
        }
        ["discard"] => {
            copy(&mut std::io::stdin(), &mut std::io::sink());
            Ok(())
        }
        ["pause"] => loop {
            thread::park();
        },
        _ => bail!(
            "tool cgroup FOLDER PROGRAM [ARGUMENT …] | tool chroot FOLDER CWD PROGRAM [ARGUMENT …] | tool page PORT | tool fetch ADDRESS:PORT | tool forward PORT SOCKET | tool echo | tool discard | tool pause"
        ),
    }
}

fn serve(port: u16) -> anyhow::Result<()> {
    // One socket for both families.
    let listener =
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).with_context(|| format!("listen on {port}"))?;
    println!("listening on {port}");
    std::io::stdout().flush()?;
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || {
            // A client may close the connection; the server goes on.
            if let Err(error) = answer(stream) {
                eprintln!("page: {error:#}");
            }
        });
    }
    Ok(())
}

fn forward(port: u16, socket: &Path) -> anyhow::Result<()> {
    let netns = Netns::open(Path::new("/proc/1/ns/net"))?;
    let listener = netns.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)))?;
    let listener = listener.with_context(|| format!("listen on {port}"))?;
    for from in listener.incoming() {
        let from = from?;
        from.set_nodelay(true)?;
        let to = UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
        let (mut from_reader, mut to_writer) = (from.try_clone()?, to.try_clone()?);
        let (mut from, mut to) = (from, to);
        thread::spawn(move || copy(&mut from_reader, &mut to_writer));
        thread::spawn(move || copy(&mut to, &mut from));
    }
    Ok(())
}

/// Copies like `socat`, which has buffers of 8 KiB. An error ends the connection.
fn copy(from: &mut impl Read, to: &mut impl Write) {
    let mut buffer = [0; 8192];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}

fn answer(mut stream: TcpStream) -> anyhow::Result<()> {
    let peer = stream.peer_addr()?.ip().to_canonical();
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut request = [0; 1024];
    let mut filled = 0;
    while filled < request.len() && !request[..filled].windows(4).any(|window| window == b"\r\n\r\n") {
        match stream.read(&mut request[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    let page = format!("a page for {peer}\n");
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{page}", page.len())?;
    println!("asked by {peer}");
    std::io::stdout().flush()?;
    Ok(())
}

fn fetch(address: SocketAddr) -> anyhow::Result<()> {
    let mut stream =
        TcpStream::connect_timeout(&address, PATIENCE).with_context(|| format!("connect to {address}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(1 << 20).read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("the answer has no body")?;
    print!("{body}");
    Ok(())
}
