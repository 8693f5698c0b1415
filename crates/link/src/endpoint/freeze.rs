//! Hands an endpoint over to another process.
//!
//! The endpoint stops between two polls, returns its state, and continues unchanged after
//! [`super::EndpointHandle::thaw`]. Until then it touches none of its sockets, so a process with copies may continue.
//!
//! The transport is not handed over: both ends send unacknowledged records again.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::time::Instant;

use super::dialled::{Conn, DialledState};
use super::local::{Local, LocalState};
use super::{Handler, Limits, Role};
use crate::session::{BadState, Session, SessionState};

/// State of an endpoint without its sockets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EndpointState {
    session: SessionState,
    locals: Vec<LocalState>,
    dialled: Vec<DialledState>,
}

/// A stopped endpoint.
#[derive(Debug)]
pub struct Frozen {
    /// State of the endpoint.
    pub state: EndpointState,
    /// Copies of its sockets: first those of local connections, then those of dialled ones.
    pub sockets: Vec<OwnedFd>,
}

/// Error of handing an endpoint over.
#[derive(Debug, thiserror::Error)]
pub enum NotFrozen {
    /// The endpoint has ended, or does not answer.
    #[error("the endpoint has ended")]
    Ended,
    /// Error of the kernel.
    #[error("a socket of the endpoint: {0}")]
    Socket(#[from] io::Error),
    /// Invalid state of the session.
    #[error(transparent)]
    Session(#[from] BadState),
    /// Invalid state of a connection, or wrong number of sockets.
    #[error("the endpoint's state is invalid: {0}")]
    State(&'static str),
}

pub(super) struct Restored {
    pub(super) session: Session,
    pub(super) locals: Vec<Local>,
    pub(super) dialled: Vec<Conn>,
}

pub(super) fn copy(socket: &impl AsFd) -> io::Result<OwnedFd> {
    socket.as_fd().try_clone_to_owned()
}

impl Frozen {
    pub(super) fn take<'a>(
        session: &Session,
        locals: impl Iterator<Item = &'a Local>,
        dialled: impl Iterator<Item = &'a Conn>,
    ) -> Result<Frozen, NotFrozen> {
        let mut sockets = Vec::new();
        let now = Instant::now();
        let locals = locals
            .filter_map(|local| local.state(now, &mut sockets).transpose())
            .collect::<Result<_, _>>()?;
        let dialled = dialled
            .filter_map(|conn| conn.state(&mut sockets).transpose())
            .collect::<Result<_, io::Error>>()?;
        Ok(Frozen { state: EndpointState { session: session.state(), locals, dialled }, sockets })
    }
}

impl Restored {
    pub(super) fn read(
        handler: &mut impl Handler,
        limits: &Limits,
        Frozen { state, sockets }: Frozen,
    ) -> Result<Restored, NotFrozen> {
        let EndpointState { session, locals, dialled } = state;
        if sockets.len() != locals.len() + dialled.len() || locals.len() > limits.connections {
            return Err(NotFrozen::State("the sockets are not as many as the connections"));
        }
        let mut session = Session::restore(Role::Relay, super::task::bounds(limits), session)?;
        let mut sockets = sockets.into_iter();
        let mut next = || sockets.next().ok_or(NotFrozen::State("a socket is missing"));
        let local = |state| {
            let socket = std::os::unix::net::UnixStream::from(next()?);
            socket.set_nonblocking(true)?;
            Local::restore(UnixStream::from_std(socket)?, handler.filter(), state)
        };
        let locals = locals.into_iter().map(local).collect::<Result<Vec<Local>, NotFrozen>>()?;
        let conn = |state| {
            let socket = std::net::TcpStream::from(next()?);
            socket.set_nonblocking(true)?;
            Ok(Conn::restore(tokio::net::TcpStream::from_std(socket)?, state))
        };
        let mut dialled = dialled.into_iter().map(conn).collect::<Result<Vec<Conn>, NotFrozen>>()?;
        dialled.sort_by_key(Conn::stream);
        let owned: Vec<u32> =
            locals.iter().filter_map(|local| local.stream).chain(dialled.iter().map(Conn::stream)).collect();
        session.close_others(|stream| owned.contains(&stream));
        Ok(Restored { session, locals, dialled })
    }
}
