//! ttrpc frames.
