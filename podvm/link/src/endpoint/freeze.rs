//! How an endpoint is handed to another process: it stands still between two polls, says what it is, and goes on as if
//! nothing had been when it is told to ([`super::EndpointHandle::thaw`]). Until then it touches none of its sockets, so
//! whoever has copies of them may go on in its place.
//!
//! The transport is not handed over: what it carried is in the session until it is acknowledged, and what came in and was
//! not a whole record yet is sent again.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use serde::{Deserialize, Serialize};
use tokio::{net::UnixStream, time::Instant};

use super::{
    Handler, Limits, Role,
    dialled::{Conn, DialledState},
    local::{Local, LocalState},
};
use crate::session::{BadState, Session, SessionState};

/// Everything of an endpoint but its sockets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EndpointState {
    session: SessionState,
    locals: Vec<LocalState>,
    dialled: Vec<DialledState>,
}

/// An endpoint that stands still.
#[derive(Debug)]
pub struct Frozen {
    /// What it is.
    pub state: EndpointState,
    /// Copies of its sockets: those of local connections, then those of dialled ones.
    pub sockets: Vec<OwnedFd>,
}

/// Why an endpoint cannot be handed over.
#[derive(Debug, thiserror::Error)]
pub enum NotFrozen {
    /// It has ended, or does not answer.
    #[error("the endpoint has ended")]
    Ended,
    /// The kernel's word.
    #[error("a socket of the endpoint: {0}")]
    Socket(#[from] io::Error),
    /// The session.
    #[error(transparent)]
    Session(#[from] BadState),
    /// A connection's state, or the number of sockets.
    #[error("the endpoint's state makes no sense: {0}")]
    State(&'static str),
}

/// What a task is made of beside what is new.
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
        let mut made = Vec::with_capacity(locals.len());
        for local in locals {
            let socket = std::os::unix::net::UnixStream::from(next()?);
            socket.set_nonblocking(true)?;
            made.push(Local::restore(UnixStream::from_std(socket)?, handler.filter(), local)?);
        }
        let locals = made;
        let mut made: Vec<Conn> = Vec::with_capacity(dialled.len());
        for conn in dialled {
            let socket = std::net::TcpStream::from(next()?);
            socket.set_nonblocking(true)?;
            made.push(Conn::restore(tokio::net::TcpStream::from_std(socket)?, conn));
        }
        made.sort_by_key(Conn::stream);
        let owned: Vec<u32> =
            locals.iter().filter_map(|local| local.stream).chain(made.iter().map(Conn::stream)).collect();
        session.close_others(|stream| owned.contains(&stream));
        Ok(Restored { session, locals, dialled: made })
    }

    pub(super) fn control_waiting(&self) -> usize {
        self.session.control_waiting()
    }
}
