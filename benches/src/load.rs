//! Makes calls with raw ttrpc frames over a blocking unix socket, one write per request. So the path dominates the
//! measurement, not the client. The calls are Kata's (`Check`, `ReadStdout`).

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use peerpod_link::frame::{HEADER_LEN, Header, REQUEST};
use peerpod_proto::{agent, ttrpc_frame};
use protobuf::Message;

/// Kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// `grpc.Health/Check`: the smallest call.
    Check,
    /// `ReadStdout` with an answer of this many bytes.
    Read(u32),
}

/// One connection that makes calls.
pub(crate) struct Client {
    socket: UnixStream,
    stream: u32,
    body: Vec<u8>,
}

impl Client {
    /// Connects; a call that gets no answer in 10 s is an error.
    pub(crate) fn connect(path: &Path) -> io::Result<Client> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(Client { socket, stream: 1, body: vec![0; 64 << 10] })
    }

    /// Encodes a request frame of this call for the next stream.
    fn request(&mut self, call: Call) -> io::Result<Vec<u8>> {
        let stream = self.stream;
        self.stream = self.stream.wrapping_add(2);
        encode(call, stream)
    }

    /// Reads one whole answer; returns its stream and payload length.
    fn answer(&mut self) -> io::Result<(u32, usize)> {
        let mut head = [0; HEADER_LEN];
        self.socket.read_exact(&mut head)?;
        let header = Header::decode(&head);
        let mut left = header.length as usize;
        while left > 0 {
            let want = left.min(self.body.len());
            self.socket.read_exact(&mut self.body[..want])?;
            left -= want;
        }
        Ok((header.stream, header.length as usize))
    }

    /// Makes one call and returns the time until its answer.
    pub(crate) fn call(&mut self, call: Call) -> io::Result<Duration> {
        let request = self.request(call)?;
        let start = Instant::now();
        self.socket.write_all(&request)?;
        let (_, length) = self.answer()?;
        let took = start.elapsed();
        let least = if let Call::Read(bytes) = call { bytes as usize } else { 2 };
        if length < least {
            return Err(io::Error::other(format!("{call:?} answered with {length} bytes")));
        }
        Ok(took)
    }

    /// Makes calls one after another for this time and returns every latency.
    pub(crate) fn burst(&mut self, call: Call, time: Duration) -> io::Result<Vec<Duration>> {
        let end = Instant::now() + time;
        let mut all = Vec::new();
        while Instant::now() < end {
            all.push(self.call(call)?);
        }
        Ok(all)
    }

    /// Keeps `width` small calls in flight for this time and returns calls per second.
    pub(crate) fn flood(&mut self, width: usize, time: Duration) -> io::Result<f64> {
        let start = Instant::now();
        for _ in 0..width {
            let request = self.request(Call::Check)?;
            self.socket.write_all(&request)?;
        }
        let mut done = 0_u64;
        while start.elapsed() < time {
            self.answer()?;
            done += 1;
            let request = self.request(Call::Check)?;
            self.socket.write_all(&request)?;
        }
        let rate = done as f64 / start.elapsed().as_secs_f64();
        for _ in 0..width {
            self.answer()?;
        }
        Ok(rate)
    }
}

fn encode(call: Call, stream: u32) -> io::Result<Vec<u8>> {
    let mut request = ttrpc_frame::Request::new();
    match call {
        Call::Check => {
            request.service = "grpc.Health".into();
            request.method = "Check".into();
            request.payload = agent::CheckRequest::new().write_to_bytes()?;
        }
        Call::Read(bytes) => {
            request.service = "grpc.AgentService".into();
            request.method = "ReadStdout".into();
            let read = agent::ReadStreamRequest {
                container_id: "bench".into(),
                exec_id: "bench".into(),
                len: bytes,
                ..Default::default()
            };
            request.payload = read.write_to_bytes()?;
        }
    }
    let payload = request.write_to_bytes()?;
    let header = Header { length: payload.len() as u32, stream, kind: REQUEST, flags: 0 };
    Ok([header.encode().as_slice(), &payload].concat())
}

/// Returns the median; `None` without values.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    (!values.is_empty()).then(|| values[values.len() / 2])
}

/// Returns the value below which `share` (0 to 1) of all values lie.
pub(crate) fn quantile(values: &mut [f64], share: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    values.get((last as f64 * share).round() as usize).copied()
}
