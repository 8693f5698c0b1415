//! The bodies of requests and answers: passed on as they come, or whole ones of ours. May touch: nothing.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use hyper::{
    HeaderMap,
    body::{Body as _, Frame, Incoming, SizeHint},
};
use peerpod_base::chain::chain;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::grpc::{Code, Status};

/// A body.
#[derive(Debug)]
pub struct Body(Kind);

#[derive(Debug)]
enum Kind {
    /// From a caller, to the driver; whether a piece of it has come.
    Request(Incoming, bool),
    /// From the driver, to a caller.
    Answer(Box<Answer>),
    /// Ours.
    Whole(Option<Bytes>, Option<HeaderMap>),
}

#[derive(Debug)]
struct Answer {
    from: Incoming,
    patience: Patience,
    timer: Pin<Box<Sleep>>,
    over: bool,
}

/// Until when something is waited for.
#[derive(Clone, Copy, Debug)]
pub enum Patience {
    /// The caller's deadline.
    Until(Instant),
    /// It gave none: so long without a sign.
    Silence(Duration),
}

impl Patience {
    /// When to give up, if nothing comes from now on.
    pub fn end(self) -> Instant {
        match self {
            Patience::Until(end) => end,
            Patience::Silence(most) => Instant::now() + most,
        }
    }

    /// Whether the caller's deadline is that near, or over.
    fn is_over_within(self, margin: Duration) -> bool {
        matches!(self, Patience::Until(end) if end <= Instant::now() + margin)
    }
}

/// At the caller's deadline the driver's own words may be on their way.
pub const GRACE: Duration = Duration::from_millis(500);
/// How much before the caller's deadline a driver may see it pass: it was given what was left of it.
const EARLY: Duration = Duration::from_millis(100);

fn late() -> Status {
    Status::new(Code::DeadlineExceeded, "the CSI driver did not end its answer in time")
}

impl Body {
    /// Nothing.
    pub fn empty() -> Body {
        Body(Kind::Whole(None, None))
    }

    /// These bytes, and then these trailers.
    pub fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Body {
        Body(Kind::Whole(Some(data), trailers))
    }

    /// Trailers alone.
    pub fn trailers(trailers: Option<HeaderMap>) -> Body {
        Body(Kind::Whole(None, trailers))
    }

    /// A caller's.
    pub fn request(from: Incoming) -> Body {
        Body(Kind::Request(from, false))
    }

    /// The driver's. Where it breaks off or takes too long, the caller gets a status with words, not a reset.
    pub fn answer(from: Incoming, patience: Patience) -> Body {
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
            // gRPC in Go waits for ever for the end of a stream that ends with its headers, so a stream without a message ends
            // as its caller ended it: by an empty piece.
            Kind::Request(from, begun) => *begun && from.is_end_stream(),
            Kind::Answer(answer) => answer.over || answer.from.is_end_stream(),
            Kind::Whole(data, trailers) => data.is_none() && trailers.is_none(),
        }
    }

    /// Never exact, or a `content-length` would be added that the other side did not send.
    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl Answer {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(next) = Pin::new(&mut self.from).poll_frame(context) {
            return Poll::Ready(match next {
                // The driver was given the same deadline, and may see its end first.
                Some(Err(_)) if self.patience.is_over_within(GRACE + EARLY) => Some(Ok(self.end(late()))),
                Some(Err(why)) => Some(Ok(self.end(Status::new(
                    Code::Unavailable,
                    format!("the CSI driver broke off during its answer: {}; ask again", chain(&why)),
                )))),
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

    /// Trailers that say why. The driver's side of the call is cancelled when this body is dropped, right after.
    fn end(&mut self, status: Status) -> Frame<Bytes> {
        self.over = true;
        let mut trailers = HeaderMap::new();
        status.put(&mut trailers);
        Frame::trailers(trailers)
    }
}
