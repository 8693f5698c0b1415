//! Drives one session.
