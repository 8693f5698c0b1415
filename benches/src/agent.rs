//! Serves a minimal agent: the fastest agent that a relay can be measured against. It runs on tokio like the real one,
//! implements `Check` and `ReadStdout`, reads many frames per system call and sends prepared answers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::Path;

use peerpod_link::frame::{HEADER_LEN, Header, RESPONSE};
use peerpod_proto::{agent, ttrpc_frame};
use protobuf::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// Serves until the process ends.
pub(crate) fn serve(path: &Path) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = UnixListener::bind(path)?;
        println!("ready");
        loop {
            // A client that closes ends its connection; the error has no receiver.
            tokio::spawn(connection(listener.accept().await?.0));
        }
    })
}

async fn connection(mut socket: UnixStream) -> io::Result<()> {
    let mut answers: HashMap<u32, Vec<u8>> = HashMap::new();
    let mut input = vec![0_u8; 64 << 10];
    let (mut have, mut out) = (0, Vec::new());
    loop {
        let read = socket.read(&mut input[have..]).await?;
        if read == 0 {
            return Ok(());
        }
        have += read;
        let mut at = 0;
        while let Some(head) = input[at..have].first_chunk::<HEADER_LEN>() {
            let header = Header::decode(head);
            let end = at + HEADER_LEN + header.length as usize;
            if end > have {
                break;
            }
            let want = wanted(&input[at + HEADER_LEN..end])?;
            let answer = match answers.entry(want) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(prepared(want)?),
            };
            let header =
                Header { length: answer.len() as u32, stream: header.stream, kind: RESPONSE, flags: 0 };
            out.extend_from_slice(&header.encode());
            out.extend_from_slice(answer);
            at = end;
        }
        input.copy_within(at..have, 0);
        have -= at;
        socket.write_all(&out).await?;
        out.clear();
    }
}

/// Returns the number of bytes that the call asks for; 0 for `Check`.
fn wanted(payload: &[u8]) -> io::Result<u32> {
    let request = ttrpc_frame::Request::parse_from_bytes(payload)?;
    if request.method != "ReadStdout" {
        return Ok(0);
    }
    Ok(agent::ReadStreamRequest::parse_from_bytes(&request.payload)?.len)
}

/// Returns the response's payload with its ttrpc envelope.
fn prepared(bytes: u32) -> io::Result<Vec<u8>> {
    let body = if bytes == 0 {
        let mut check = agent::HealthCheckResponse::new();
        check.status = agent::health_check_response::ServingStatus::SERVING.into();
        check.write_to_bytes()?
    } else {
        agent::ReadStreamResponse { data: vec![0x5a; bytes as usize], ..Default::default() }
            .write_to_bytes()?
    };
    let status = ttrpc_frame::Status::new();
    let response = ttrpc_frame::Response { status: Some(status).into(), payload: body, ..Default::default() };
    Ok(response.write_to_bytes()?)
}
