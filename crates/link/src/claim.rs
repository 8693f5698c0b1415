//! Exchanges a ticket for a certificate on a fresh TLS connection.
//!
//! The first record decides how a connection is used. Without a certificate it carries one Claim, else it begins with
//! Hello.
//!
//! This module holds no policy: the node decides which claims it accepts. Callers bound the time
//! ([`FIRST_RECORD_DEADLINE`] fits); the functions bound the memory.

use std::io;
use std::time::Duration;

use peerpod_proto::guest::{Claim, ClaimReply};
use protobuf::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::record::{self, BadRecord, HEADER_LEN, Hello, RecordHeader, RecordKind};

/// Time limit for a peer's first record.
pub const FIRST_RECORD_DEADLINE: Duration = Duration::from_secs(15);

/// Text on a VM's console before the reason why it cannot join the node. The node looks for it there.
pub const CANNOT_JOIN: &str = "cannot join the node: ";

/// First record of a connection.
#[derive(Clone, Debug, PartialEq)]
pub enum First {
    /// A ticket; answer with [`reply`].
    Claim(Box<Claim>),
    /// A session, which only a guest with a certificate may begin.
    Hello(Hello),
}

/// Error of the ticket exchange.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The connection broke or ended early.
    #[error("ticket exchange: the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The received bytes are not a record.
    #[error("ticket exchange: {0}")]
    Record(#[from] BadRecord),
    /// A record of a kind that is not allowed here.
    #[error("ticket exchange: the peer sent {0:?} where {1} was due")]
    Unexpected(RecordKind, &'static str),
    /// The message in the record cannot be encoded or decoded.
    #[error("ticket exchange: the {0} cannot be read: {1}")]
    Message(&'static str, protobuf::Error),
}

/// Guest: sends a claim and waits for the reply. A refusal is a reply (`ClaimReply.error`), not an error.
pub async fn ask<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    claim: &Claim,
) -> Result<ClaimReply, ClaimError> {
    send(stream, RecordKind::Claim, claim).await?;
    match receive(stream).await? {
        (RecordKind::ClaimReply, payload) => {
            ClaimReply::parse_from_bytes(&payload).map_err(|why| ClaimError::Message("ClaimReply", why))
        }
        (other, _) => Err(ClaimError::Unexpected(other, "ClaimReply")),
    }
}

/// Relay: reads the first record of a fresh connection, and not one byte beyond it.
pub async fn first_record<S: AsyncRead + Unpin>(stream: &mut S) -> Result<First, ClaimError> {
    match receive(stream).await? {
        (RecordKind::Claim, payload) => {
            let claim = Claim::parse_from_bytes(&payload).map_err(|why| ClaimError::Message("Claim", why))?;
            Ok(First::Claim(Box::new(claim)))
        }
        (RecordKind::Hello, payload) => Ok(First::Hello(Hello::decode(&payload)?)),
        (other, _) => Err(ClaimError::Unexpected(other, "Claim or Hello")),
    }
}

/// Relay: sends the reply to a claim.
pub async fn reply<S: AsyncWrite + Unpin>(stream: &mut S, reply: &ClaimReply) -> Result<(), ClaimError> {
    send(stream, RecordKind::ClaimReply, reply).await
}

async fn send<S: AsyncWrite + Unpin>(
    stream: &mut S,
    kind: RecordKind,
    message: &impl Message,
) -> Result<(), ClaimError> {
    let payload = message.write_to_bytes().map_err(|why| ClaimError::Message("message to send", why))?;
    stream.write_all(&record::plain(kind, &payload)?).await?;
    Ok(stream.flush().await?)
}

async fn receive<S: AsyncRead + Unpin>(stream: &mut S) -> Result<(RecordKind, Vec<u8>), ClaimError> {
    let mut header = [0; HEADER_LEN];
    stream.read_exact(&mut header).await?;
    let header = RecordHeader::decode(&header)?;
    // The buffer grows with the bytes that arrive, not with the announced length.
    let mut payload = Vec::new();
    stream.take(u64::from(header.length)).read_to_end(&mut payload).await?;
    if payload.len() < header.length as usize {
        return Err(ClaimError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok((header.kind, payload))
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn a_claim_is_sent_and_answered() {
        let (mut guest, mut relay) = duplex(64);
        let claim = Claim { ticket_id: "t".into(), csr: vec![1; 5000], ..Default::default() };
        let answer =
            ClaimReply { sandbox_id: "s".into(), certificates: vec![vec![2; 3000]], ..Default::default() };
        let (asked, served) = tokio::join!(ask(&mut guest, &claim), async {
            let First::Claim(seen) = first_record(&mut relay).await.unwrap() else { panic!("not a claim") };
            assert_eq!(*seen, claim);
            reply(&mut relay, &answer).await
        });
        served.unwrap();
        assert_eq!(asked.unwrap(), answer);
    }

    #[tokio::test]
    async fn a_wrong_first_record_is_refused_with_its_name() {
        let first = async |bytes: &[u8]| {
            let mut input = bytes;
            first_record(&mut input).await
        };
        assert!(matches!(first(&[0xff; 40]).await, Err(ClaimError::Record(_))));
        assert!(matches!(
            first(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n").await,
            Err(ClaimError::Record(_))
        ));
        assert!(matches!(first(&[0; 5]).await, Err(ClaimError::Io(_))));
        let data = record::plain(RecordKind::Data, b"x").unwrap();
        assert!(matches!(first(&data).await, Err(ClaimError::Unexpected(RecordKind::Data, _))));
        let mut short = record::plain(RecordKind::Claim, &[0; 100]).unwrap();
        short.truncate(60);
        assert!(matches!(first(&short).await, Err(ClaimError::Io(_))));
        let garbage = record::plain(RecordKind::Claim, &[0xff; 100]).unwrap();
        assert!(matches!(first(&garbage).await, Err(ClaimError::Message("Claim", _))));
    }

    #[tokio::test]
    async fn nothing_after_the_first_record_is_taken() {
        let hello = Hello {
            versions: (1, 1),
            session: record::SessionId([3; 16]),
            epoch: 0,
            recv: 0,
            program: "1".into(),
        };
        let mut bytes = record::plain(RecordKind::Hello, &hello.encode()).unwrap();
        bytes.extend_from_slice(b"rest");
        let mut input = &bytes[..];
        assert_eq!(first_record(&mut input).await.unwrap(), First::Hello(hello));
        assert_eq!(input, b"rest");
    }
}
