//! guests
