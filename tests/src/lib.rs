//! Drives the real binaries from outside.
