//! Runs one moto server for the test process, and sends it calls.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::form::{self, Params};

/// Longest start; the first one on a machine loads a catalogue of 1 395 types.
const START: Duration = Duration::from_secs(60);
/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(60);

/// A running moto. It ends with the test process.
#[derive(Debug)]
pub struct Moto {
    address: SocketAddr,
    python: PathBuf,
}

impl Moto {
    /// Returns the process's moto, which starts at the first call. Accounts in it are isolated from each other.
    ///
    /// # Errors
    /// When it cannot be installed or does not start.
    pub fn shared() -> anyhow::Result<&'static Moto> {
        static SHARED: OnceLock<Result<Moto, String>> = OnceLock::new();
        let moto = SHARED.get_or_init(|| Moto::start().map_err(|error| format!("{error:#}")));
        moto.as_ref().map_err(|error| anyhow::anyhow!("start moto: {error}"))
    }

    fn start() -> anyhow::Result<Moto> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let setup = Command::new(here.join("setup"))
            .stderr(Stdio::inherit())
            .output()
            .context("run tests/ec2/setup")?;
        ensure!(setup.status.success(), "tests/ec2/setup failed; it needs python3 with venv, and PyPI once");
        let venv = PathBuf::from(String::from_utf8(setup.stdout)?.trim());
        // Another process rarely takes a port that was just free; if one does, moto prints an error and exits.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let (said, heard) = std::sync::mpsc::channel();
        let program = venv.join("bin/moto_server");
        let amis = here.join("amis.json");
        // The kernel ends moto with the thread that started it, so this thread stays.
        std::thread::Builder::new().name("moto".to_owned()).spawn(move || {
            let started = Command::new("setpriv")
                .args(["--pdeathsig", "KILL"])
                .arg(program)
                .args(["-H", "127.0.0.1", "-p", &port.to_string()])
                .env("MOTO_AMIS_PATH", amis)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn();
            let mut lines = Vec::new();
            if let Ok(mut child) = started {
                if let Some(stderr) = child.stderr.take() {
                    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                        if line.contains("Running on") {
                            said.send(Ok(())).ok();
                        }
                        // A failing moto prints the cause last. Request lines are dropped.
                        if !line.contains("\"POST ") && lines.len() < 200 {
                            lines.push(line);
                        }
                    }
                }
                child.wait().ok();
            }
            said.send(Err(lines.join("\n"))).ok();
        })?;
        match heard.recv_timeout(START) {
            Ok(Ok(())) => Ok(Moto { address, python: venv.join("bin/python") }),
            Ok(Err(lines)) => bail!("it ended: {lines}"),
            Err(_) => bail!("it does not listen after {START:?}"),
        }
    }

    /// Returns its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns its Python interpreter, which has boto3 as well.
    pub fn python(&self) -> &Path {
        &self.python
    }

    /// Makes one call in this account; returns the status and the XML of the answer.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn ask(&self, account: &str, region: &str, params: &Params) -> anyhow::Result<(u16, String)> {
        let headers = "Content-Type: application/x-www-form-urlencoded; charset=utf-8\r\n";
        self.send(account, region, "ec2", "POST /", headers, form::encode(params).as_bytes())
    }

    /// Sends one request to a service in this account: `head` is its method and path, each of `headers` a line. Returns
    /// the status and the body of the answer.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn send(
        &self,
        account: &str,
        region: &str,
        service: &str,
        head: &str,
        headers: &str,
        body: &[u8],
    ) -> anyhow::Result<(u16, String)> {
        let host = self.address;
        // moto reads the region from a signature that it does not check.
        let request = format!(
            "{head} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nx-moto-account-id: {account}\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/{region}/{service}/aws4_request, \
             SignedHeaders=host, Signature=0\r\n{headers}Content-Length: {}\r\n\r\n",
            body.len()
        );
        let end = Instant::now() + ANSWER;
        let mut stream = TcpStream::connect_timeout(&self.address, ANSWER)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.set_write_timeout(Some(ANSWER))?;
        stream.write_all(&[request.as_bytes(), body].concat())?;
        let mut answer = Vec::new();
        stream.take(64 << 20).read_to_end(&mut answer)?;
        ensure!(Instant::now() < end + ANSWER, "moto is too slow");
        let text = String::from_utf8(answer)?;
        let (head, body) = text.split_once("\r\n\r\n").context("an answer without a head")?;
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("a status")?;
        Ok((status, body.to_owned()))
    }
}
