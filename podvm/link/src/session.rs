//! The session, without IO.
