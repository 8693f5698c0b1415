//! `peerpod-pull`: pulls one image. `peerpod-guest` starts it; by hand:
//! `echo '{"image":…,"store":…,"bundle":null}' | peerpod-pull`.

use std::process::ExitCode;

fn main() -> ExitCode {
    peerpod_images::run()
}
