//! Implements the bodies of requests and answers: forwarded streams, or whole bodies of this program.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::body::{Body as _, Frame, Incoming};
use peerpod_base::chain::chain;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::grpc::{Code, Status};

#[derive(Debug)]
pub(crate) struct Body(Kind);

#[derive(Debug)]
enum Kind {
    /// From a caller to the driver; the flag tells whether it has been polled.
    Request(Incoming, bool),
    /// From the driver to a caller.
    Answer(Box<Answer>),
    /// Whole body of this program.
    Whole(Option<Bytes>, Option<HeaderMap>),
}

#[derive(Debug)]
struct Answer {
    from: Incoming,
    patience: Patience,
    timer: Pin<Box<Sleep>>,
    over: bool,
}

/// Limit of a wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// Until the caller's deadline.
    Until(Instant),
    /// Without a deadline: until this much silence.
    Silence(Duration),
}

impl Patience {
    /// Returns when to give up, if nothing arrives from now on.
    pub(crate) fn end(self) -> Instant {
        match self {
            Patience::Until(end) => end,
            Patience::Silence(most) => Instant::now() + most,
        }
    }

    /// Whether the caller's deadline is nearer than `margin`, or over.
    fn is_over_within(self, margin: Duration) -> bool {
        matches!(self, Patience::Until(end) if end <= Instant::now() + margin)
    }
}

/// Extra time after the caller's deadline, in which the driver's own status may arrive.
pub(crate) const GRACE: Duration = Duration::from_millis(500);
/// How much earlier than the caller the driver may see its deadline pass: it was given the remaining time.
const EARLY: Duration = Duration::from_millis(100);

fn late() -> Status {
    Code::DeadlineExceeded.status("the CSI driver did not end its answer in time")
}

impl Body {
    /// Returns a body of these bytes, followed by these trailers.
    pub(crate) fn whole(data: Option<Bytes>, trailers: Option<HeaderMap>) -> Body {
        Body(Kind::Whole(data, trailers))
    }

    pub(crate) fn request(from: Incoming) -> Body {
        Body(Kind::Request(from, false))
    }

    /// Forwards the driver's body. If it breaks off or takes too long, the caller gets a status, not a reset.
    pub(crate) fn answer(from: Incoming, patience: Patience) -> Body {
        let timer = Box::pin(sleep_until(patience.end()));
        Body(Kind::Answer(Box::new(Answer { from, patience, timer, over: false })))
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.0 {
            Kind::Request(from, begun) => {
                *begun = true;
                Pin::new(from).poll_frame(context)
            }
            Kind::Answer(answer) => answer.poll(context),
            Kind::Whole(data, trailers) => {
                let next = data.take().map(Frame::data).or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(next.map(Ok))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            // gRPC in Go waits for ever for the end of a stream that ends with its headers. A stream without a message
            // therefore ends as its caller ended it: with an empty DATA frame.
            Kind::Request(from, begun) => *begun && from.is_end_stream(),
            Kind::Answer(answer) => answer.over || answer.from.is_end_stream(),
            Kind::Whole(data, trailers) => data.is_none() && trailers.is_none(),
        }
    }

    // The default size_hint is never exact: an exact one would add a `content-length` that the other side did not send.
}

impl Answer {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(next) = Pin::new(&mut self.from).poll_frame(context) {
            return Poll::Ready(match next {
                // The driver was given the same deadline, and may reset the stream first.
                Some(Err(_)) if self.patience.is_over_within(GRACE + EARLY) => Some(Ok(self.end(late()))),
                Some(Err(why)) => Some(Ok(self.end(Code::Unavailable.status(format!(
                    "the CSI driver broke off during its answer: {}; ask again",
                    chain(&why)
                ))))),
                next => {
                    if let Patience::Silence(_) = self.patience {
                        self.timer.as_mut().reset(self.patience.end());
                    }
                    next
                }
            });
        }
        ready!(self.timer.as_mut().poll(context));
        Poll::Ready(Some(Ok(self.end(late()))))
    }

    /// Returns trailers with the status. The body is dropped right after, which cancels the call to the driver.
    fn end(&mut self, status: Status) -> Frame<Bytes> {
        self.over = true;
        let mut trailers = HeaderMap::new();
        status.put(&mut trailers);
        Frame::trailers(trailers)
    }
}
