//! `peerpod-guest`, the guest program of the pod VM. All of it is in the library, which the benches share.

use std::process::ExitCode;

fn main() -> ExitCode {
    peerpod_guest::run()
}
