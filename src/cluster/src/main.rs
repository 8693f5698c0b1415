//! Runs `peerpod-cluster`; see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    peerpod_cluster::run(peerpod_base::program::arguments().collect())
}
