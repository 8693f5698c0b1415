//! Hostile shims, guests and files; who trusts whom.

#[path = "../guest_common/mod.rs"]
mod guest_common;
mod hostile;
mod hostile_guest;
mod trust;
