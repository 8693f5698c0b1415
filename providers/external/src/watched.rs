//! Wraps a byte stream so that its end and the cause are observable, and so that it can be cut from outside.
//!
//! The ttrpc library supports neither. A broken connection is detected only by the next call, and a hanging one stays
//! open for as long as any call waits on it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;

/// End of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StreamEnd {
    pub(crate) why: String,
    /// Whether TLS caused the end, so that dialling again cannot help.
    pub(crate) refused: bool,
}

/// Second handle of the stream. Dropping it cuts the stream.
pub(crate) struct StreamHandle {
    shared: Arc<Shared>,
    ended: watch::Receiver<Option<StreamEnd>>,
}

struct Shared {
    cut: AtomicBool,
    reader: AtomicWaker,
}

/// Watched stream; see the module.
pub(crate) struct Stream<S> {
    inner: S,
    shared: Arc<Shared>,
    ended: watch::Sender<Option<StreamEnd>>,
}

/// Wraps a connected stream.
pub(crate) fn watched<S>(inner: S) -> (Stream<S>, StreamHandle) {
    let (sender, ended) = watch::channel(None);
    let shared = Arc::new(Shared { cut: AtomicBool::new(false), reader: AtomicWaker::new() });
    (Stream { inner, shared: shared.clone(), ended: sender }, StreamHandle { shared, ended })
}

impl StreamHandle {
    pub(crate) async fn ended(&mut self) -> StreamEnd {
        match self.ended.wait_for(Option::is_some).await.map(|end| end.clone()) {
            Ok(Some(end)) => end,
            _ => StreamEnd { why: "the connection is gone".to_owned(), refused: false },
        }
    }

    pub(crate) fn end(&self) -> Option<StreamEnd> {
        self.ended.borrow().clone()
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.shared.cut.store(true, Ordering::Release);
        self.shared.reader.wake();
    }
}

impl<S> Stream<S> {
    fn note(&self, why: String, refused: bool) {
        self.ended.send_if_modified(|end| {
            let first = end.is_none();
            if first {
                *end = Some(StreamEnd { why, refused });
            }
            first
        });
    }

    fn note_error(&self, error: &io::Error) {
        let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        self.note(error.to_string(), tls.is_some_and(is_refusal));
    }
}

/// Whether one side refused the other's certificate or TLS settings. Any other error of TLS, such as a damaged record, is
/// one of the connection: a new connection may work.
fn is_refusal(error: &rustls::Error) -> bool {
    use rustls::AlertDescription as Alert;
    match error {
        rustls::Error::InvalidCertificate(_)
        | rustls::Error::NoCertificatesPresented
        | rustls::Error::PeerIncompatible(_) => true,
        rustls::Error::AlertReceived(alert) => matches!(
            alert,
            Alert::AccessDenied
                | Alert::BadCertificate
                | Alert::CertificateExpired
                | Alert::CertificateRequired
                | Alert::CertificateRevoked
                | Alert::CertificateUnknown
                // The signature of a certificate is wrong.
                | Alert::DecryptError
                | Alert::HandshakeFailure
                | Alert::InsufficientSecurity
                | Alert::ProtocolVersion
                | Alert::UnknownCA
                | Alert::UnsupportedCertificate
        ),
        _ => false,
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.shared.reader.register(cx.waker());
        if self.shared.cut.load(Ordering::Acquire) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, "given up")));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        match &read {
            Poll::Ready(Ok(())) if buf.filled().len() == before && buf.remaining() > 0 => {
                self.note("it closed the connection".to_owned(), false);
            }
            Poll::Ready(Err(error)) => self.note_error(error),
            _ => {}
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        if let Poll::Ready(Err(error)) = &written {
            self.note_error(error);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn the_end_of_the_peer_is_reported() {
        let (near, mut far) = tokio::io::duplex(64);
        let (mut stream, mut handle) = watched(near);
        far.write_all(b"x").await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'x');
        assert_eq!(handle.end(), None);
        drop(far);
        assert!(stream.read_u8().await.is_err());
        assert_eq!(handle.ended().await.why, "it closed the connection");
    }

    #[tokio::test]
    async fn a_reader_of_a_broken_stream_ends() {
        let (near, _far) = tokio::io::duplex(64);
        let (mut stream, handle) = watched(near);
        let reader = tokio::spawn(async move { stream.read_u8().await });
        tokio::task::yield_now().await;
        drop(handle);
        let error = reader.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    }

    #[test]
    fn only_a_refusal_counts_as_a_refusal() {
        let refused = rustls::Error::AlertReceived(rustls::AlertDescription::CertificateRequired);
        assert!(is_refusal(&refused));
        for broken in [
            rustls::Error::DecryptError,
            rustls::Error::AlertReceived(rustls::AlertDescription::BadRecordMac),
        ] {
            assert!(!is_refusal(&broken), "{broken}");
        }
    }
}
