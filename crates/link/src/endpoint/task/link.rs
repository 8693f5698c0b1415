//! Handles the peer's side of the task: handshake, received records, sent records, heartbeat.

use std::io::IoSlice;
use std::task::{Context, Poll};

use tokio::time::Instant;
use tracing::debug;

use super::locals::Batch;
use super::{Link, Scratch, Task, random, random_id};
use crate::endpoint::join::First;
use crate::endpoint::{Handler, LinkEvent, Role, Transport};
use crate::record::{self, CloseReason, Hello, StreamKind};
use crate::session::pool::{self, Size};
use crate::session::{Joined, Received, Violation};

/// Writes of one round; each writes at most as much as TLS buffers.
const WRITES: usize = 2;

impl<H: Handler> Task<H> {
    pub(super) fn poll_joining(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(joining) = &mut self.joining else { return false };
        let Poll::Ready(first) = joining.poll(cx, self.role) else { return false };
        let Some(joining) = self.joining.take() else { return false };
        match first {
            Ok((First::Hello(hello), rest)) => self.answer(joining.transport, &hello, rest),
            Ok((First::Welcome(welcome), rest)) => match self.session.welcomed(&welcome) {
                Ok(joined) => self.up(joining.transport, rest, joined, welcome.program),
                Err(why) => {
                    self.refuse(why.to_string());
                    self.renew();
                }
            },
            Err(why) => self.refuse(format!("handshake: {why}")),
        }
        true
    }

    /// Relay: answers a guest's Hello on this transport, which then replaces the earlier one.
    fn answer(&mut self, transport: Transport, hello: &Hello, rest: Vec<u8>) {
        let epoch = u64::from_be_bytes(random()) | 1; // never 0
        // An unsupported version must not cost the working link.
        match self.session.answer(hello, epoch) {
            Ok(joined) => self.up(transport, rest, joined, hello.program.clone()),
            Err(why) => self.refuse(why.to_string()),
        }
    }

    fn up(&mut self, transport: Transport, carry: Vec<u8>, joined: Joined, version: String) {
        self.joining = None;
        self.down("replaced by a newer connection");
        if joined.lost {
            self.lost();
        }
        let now = Instant::now();
        let peer = transport.peer();
        self.link = Some(Link {
            transport,
            carry,
            fresh: true,
            sent: false,
            received: true,
            received_at: now,
            beat: now + self.limits.heartbeat,
        });
        self.stats.links += 1;
        self.publish_stats();
        if let Some(session) = self.session.id() {
            self.handler.on_link(LinkEvent::Up { resumed: joined.resumed, session, peer, version });
        }
    }

    /// Drops the transport; streams and local connections stay.
    pub(super) fn down(&mut self, reason: &str) {
        self.end_link(reason, false);
    }

    fn end_link(&mut self, reason: &str, violation: bool) {
        if self.link.take().is_some() {
            debug!(reason, "link down");
            self.handler.on_link(LinkEvent::Down { reason: reason.to_owned(), violation });
        }
    }

    /// Closes the link after a protocol violation: the states of both ends may no longer match.
    fn violated(&mut self, why: &Violation) {
        self.end_link(&format!("protocol: {why}"), true);
        self.renew();
    }

    fn renew(&mut self) {
        self.session.reset((self.role == Role::Guest).then(random_id));
        self.lost();
    }

    pub(super) fn poll_receive(&mut self, cx: &mut Context<'_>, scratch: &mut Scratch) -> bool {
        let Some(link) = &mut self.link else { return false };
        let have = link.carry.len();
        if link.transport.poll_readable(cx).is_pending() && !(link.fresh && have > 0) {
            return false;
        }
        let mut buffer = pool::take(Size::Read);
        buffer[..have].copy_from_slice(&link.carry);
        let read = match link.transport.poll_read(cx, &mut buffer[have..]) {
            Poll::Ready(Ok(0)) => Err("the peer closed the connection".to_owned()),
            Poll::Ready(Ok(n)) => Ok(n),
            Poll::Ready(Err(error)) => Err(error.to_string()),
            Poll::Pending if link.fresh && have > 0 => Ok(0),
            Poll::Pending => {
                pool::give(buffer);
                return false;
            }
        };
        match read {
            Ok(n) => {
                (link.fresh, link.received) = (false, true);
                self.records(cx, scratch, &buffer[..have + n]);
            }
            Err(reason) => self.down(&reason),
        }
        pool::give(buffer);
        true
    }

    fn records(&mut self, cx: &mut Context<'_>, scratch: &mut Scratch, bytes: &[u8]) {
        let mut input = bytes;
        let mut batch = Batch::default();
        let result = loop {
            let (header, payload) = match record::split(&mut input) {
                Ok(Some(record)) => record,
                Ok(None) => break Ok(()),
                Err(why) => break Err(why.into()),
            };
            match self.session.receive(&header, payload) {
                Ok(Received::Nothing) => {}
                Ok(Received::Data(stream, data)) if self.dialled.has(stream) => {
                    self.stats.bytes_from_peer += data.len() as u64;
                    self.dialled.data(cx, &mut self.session, stream, data);
                }
                Ok(Received::Data(stream, data)) => self.data(cx, scratch, &mut batch, stream, data),
                Ok(Received::Control(message)) => self.handler.on_control(message),
                Ok(Received::Line(line)) => self.handler.on_line(line),
                Ok(Received::Opened(stream, StreamKind::Agent)) => self.opened(stream),
                Ok(Received::Opened(stream, StreamKind::Dial(_))) if self.role == Role::Relay => {
                    self.session.close(stream, CloseReason::Refused);
                }
                Ok(Received::Opened(stream, StreamKind::Dial(target))) => {
                    let handler = &mut self.handler;
                    self.dialled.called(&mut self.session, &self.limits, stream, || handler.dial_pod(target));
                }
                Ok(Received::Connected(stream)) => {
                    self.dialled.connected(&self.shared.0, &self.limits, stream)
                }
                // Only dialled streams end one direction at a time.
                Ok(Received::Finished(stream)) => self.dialled.finished(stream),
                Ok(Received::Closed(stream, reason)) if self.dialled.has(stream) => {
                    self.dialled.closed(stream, reason);
                }
                Ok(Received::Closed(stream, _)) => {
                    self.deliver(cx, scratch, &mut batch);
                    if let Some(at) = self.locals.by_stream.remove(&stream) {
                        self.stream_lost(at, false);
                    }
                }
                Err(why) => break Err(why),
            }
        };
        self.deliver(cx, scratch, &mut batch);
        match (result, &mut self.link) {
            (Err(why), _) => self.violated(&why),
            (Ok(()), Some(link)) if !(input.is_empty() && link.carry.is_empty()) => {
                link.carry = input.to_vec()
            }
            _ => {}
        }
    }
}

impl<H: Handler> Task<H> {
    pub(super) fn poll_send(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        for _ in 0..WRITES {
            self.session.schedule();
            let Some(link) = &mut self.link else { return moved };
            let mut slices = [IoSlice::new(&[]); 8];
            let filled = self.session.output(&mut slices);
            if filled == 0 {
                break;
            }
            match link.transport.poll_write(cx, &slices[..filled]) {
                Poll::Ready(Ok(0)) => return self.broke("the connection takes no bytes"),
                Poll::Ready(Ok(n)) => {
                    link.sent = true;
                    self.session.wrote(n);
                    moved = true;
                }
                Poll::Ready(Err(error)) => return self.broke(&error.to_string()),
                Poll::Pending => break,
            }
        }
        // The transport may still hold bytes that it has taken.
        if let Some(link) = &mut self.link
            && let Poll::Ready(Err(error)) = link.transport.poll_flush(cx)
        {
            return self.broke(&error.to_string());
        }
        moved
    }

    fn broke(&mut self, reason: &str) -> bool {
        self.down(reason);
        true
    }

    /// Runs once per heartbeat: checks that the peer has sent bytes, and pings it if this end has sent none.
    pub(super) fn beat(&mut self, now: Instant) {
        let Some(link) = &mut self.link else { return };
        if link.received {
            link.received_at = now;
        }
        let silent = now - link.received_at;
        if silent >= self.limits.silence {
            return self.down(&format!("nothing received for {silent:.0?}"));
        }
        if !link.sent {
            self.session.ping();
        }
        (link.sent, link.received) = (false, false);
        link.beat = now + self.limits.heartbeat;
    }
}
