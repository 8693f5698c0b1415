//! Providers of other programs, over their socket.

mod common;
mod faults;
mod pki;
mod python;
mod served;
mod tls;
