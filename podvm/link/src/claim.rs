//! The ticket exchange on a fresh connection.
