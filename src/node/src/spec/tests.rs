//! The annotations as both shims send them.
